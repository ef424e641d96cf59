"""Instructions for one kind of memory are refused another one; masks and orders that a GPU does not promise."""

import numpy as np
import pytest

from ddtree_cupy import emulate
from ddtree_cupy.errors import EmulatorError
from tests.emulate.cases import run

pytestmark = pytest.mark.emulate

PTX = '#include "common/ptx.cuh"\n'


def launch(body, shared_mem=0, seed=0):
    code = f'{PTX}extern "C" __global__ void k(float* x, const float* y) {{\nint i = threadIdx.x;\n{body}\n}}'
    x, y = np.zeros(64, np.float32), np.arange(64, dtype=np.float32)
    emulate.Module(code).get_function("k")((1,), (32,), (x, y), shared_mem, seed)
    return x


@pytest.mark.parametrize("shared", ["__shared__ __align__(16) float s[128];", "extern __shared__ float s[];"])
@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("x[i] = __ldg(&y[i]);", "x[i] = __ldg(&s[i]);", "__ldg reads shared memory"),
        ("x[i] = __ldcg(&y[i]);", "x[i] = __ldcg(&s[i]);", "__ldcg reads shared memory"),
        ("__stcs(&x[i], 1.0f);", "__stcs(&s[i], 1.0f);", "__stcs writes shared memory"),
        (
            "copy_async_16(shared_address(&s[4 * (i % 8)]), &y[4 * (i % 8)], true);",
            "copy_async_16((SharedAddress)(size_t)&x[4 * (i % 8)], &y[4 * (i % 8)], true);",
            "cp.async writes to memory that is not shared",
        ),
        (
            "unsigned r[4]; load_matrices(r, shared_address(&s[4 * i])); x[i] = r[0] & 1;",
            "unsigned r[4]; load_matrices(r, (SharedAddress)(size_t)&y[4 * (i % 16)]); x[i] = r[0] & 1;",
            "ldmatrix reads memory that is not shared",
        ),
        ("x[i] = __isShared(&s[i]) && !__isShared(&x[i]);", None, None),
    ],
    ids=["ldg", "ldcg", "stcs", "cp.async", "ldmatrix", "isShared"],
)
def test_instructions_are_refused_other_memory(shared, right, wrong, message):
    bytes_ = 512 if "extern" in shared else 0
    launch(f"{shared}\n{right}", bytes_)
    if wrong:
        with pytest.raises(EmulatorError, match=rf"common/ptx|kernel\.cu:\d: {message}"):
            launch(f"{shared}\n{wrong}", bytes_)


def test_active_mask_is_no_mask_for_a_shuffle():
    opportunistic = """unsigned mask = __activemask();
    int leader = __ffs(mask) - 1;
    if (threadIdx.x % 32 == leader) atomicAdd(&x[0], (float)__popc(mask));
    __syncwarp(mask);"""
    assert run(f"if (threadIdx.x & 1) {{ {opportunistic} }}")[0] == 32
    with pytest.raises(EmulatorError, match=r"kernel\.cu:2: lane 0 shuffles from lane 1, which takes no part"):
        run("x[threadIdx.x] = __shfl_down_sync(__activemask(), 1.0f, 1);")


@pytest.mark.parametrize("blocks", [1, 2, 7, 12, 64])
def test_every_schedule_runs_every_block_once(blocks):
    orders = set()
    for seed in range(16):
        body = "int n = atomicAdd((int*)&x[0], 1); if (threadIdx.x == 0) x[1 + n] = blockIdx.x;"
        x = run(body, threads=1, blocks=blocks, n=1 + blocks, seed=seed)
        assert sorted(x[1:]) == list(range(blocks))
        orders.add(x[1:].tobytes())
    assert len(orders) >= min(blocks, 6)  # index order, backwards, and some that jump


def test_a_kernel_that_relies_on_the_order_of_blocks_is_found_by_some_seed():
    body = "if (threadIdx.x == 0) x[blockIdx.x] = blockIdx.x ? x[blockIdx.x - 1] + 1 : 1;"
    results = {run(body, blocks=4, n=4, seed=seed).tobytes() for seed in range(8)}
    assert len(results) > 1


def test_one_thread_may_wait_until_no_other_can_run():
    body = """__shared__ int done;
    if (threadIdx.x == 0) done = 0;
    __syncthreads();
    __syncwarp();
    int n = atomicAdd(&done, 1);
    __syncwarp();
    x[threadIdx.x] = n;"""
    lasts = set()
    for seed in range(8, 72):
        x = run(body, threads=64, seed=seed)
        assert sorted(x) == list(range(64))
        lasts.add(int(np.argmax(x)))
    assert len(lasts) > 8
