"""Wrong kernels are reported, with block, thread and source line."""

import numpy as np
import pytest

from ddtree_cupy import emulate
from ddtree_cupy.errors import EmulatorError
from tests.emulate.cases import run

pytestmark = pytest.mark.emulate


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("if (threadIdx.x < 40) __syncthreads();\nelse __syncthreads();", r"kernel\.cu:[23]: __syncthreads while"),
        ("if (threadIdx.x == 5) return;\n__syncthreads();", r"kernel\.cu:3: .*left the kernel"),
        ("if (threadIdx.x < 7)\n__syncthreads();", r"kernel\.cu:3: .*left the kernel"),
        ("float v = 1;\nif (threadIdx.x & 1)\nv = __shfl_xor_sync(~0u, v, 2);\nx[0] = v;", r"kernel\.cu:4: .*left"),
        ("if (threadIdx.x < 16) __syncwarp();\nelse __ballot_sync(~0u, 1);", r"kernel\.cu:[23]: .*different warp"),
        ("x[threadIdx.x] = __shfl_sync(0xffffu << (threadIdx.x & 16), 1.f, 20);", r"kernel\.cu:2: .*takes no part"),
        ("__shfl_sync(0xffu, 1.f, 0);", r"kernel\.cu:2: lane \d+ is not in its own mask 000000ff"),
        (
            "if (threadIdx.x && threadIdx.x < 32) __syncwarp(); else __syncthreads();",
            r"deadlock: 64 threads .* thread \(0,0,0\) in __syncthreads at kernel\.cu:2, .*:2 \(mask ffffffff\)",
        ),
        ("assert(threadIdx.x < 60);", r"thread \(6\d,0,0\): kernel\.cu:2: assert\(threadIdx.x < 60\) failed"),
        ("if (threadIdx.x == 9)\n__trap();", r"thread \(9,0,0\): kernel\.cu:3: __trap"),
    ],
    ids=["barriers", "exit", "partial", "shuffle", "ops", "absent", "mask", "deadlock", "assert", "trap"],
)
def test_misuse_is_reported(body, message, seed):
    with pytest.raises(EmulatorError, match=message):
        run(body, seed=seed)
    assert run("x[threadIdx.x] = 1;").sum() == 64  # the emulator is fine afterwards


def test_partial_warp_names_the_missing_lanes():
    with pytest.raises(EmulatorError, match=r"block \(1,0,0\) .*mask ffffffff .*live lanes 0000ffff"):
        run("if (blockIdx.x == 1) x[0] = __shfl_down_sync(0xffffffffu, 1.f, 1);", threads=16, blocks=2)


@pytest.mark.parametrize("seed", range(4))
def test_named_barrier_left_half_full_is_reported(seed):
    arrive = "if (threadIdx.x < 32)\nemu_named_arrive(3, 64, EMU_HERE);\nx[threadIdx.x] = 1;"
    with pytest.raises(EmulatorError, match=r"kernel\.cu:3: named barrier 3 is half full .*: 32 of 64 threads arrived"):
        run(arrive, seed=seed)
    assert run(arrive, seed=seed, strict=False).sum() == 64
    rest = "if (threadIdx.x >= 32) emu_named_barrier(3, 64, nullptr, nullptr, EMU_HERE);"
    assert run(f"{arrive}\n{rest}", seed=seed, blocks=2).sum() == 64


def test_forgiven_misuse_runs_without_strict():
    body = "if (threadIdx.x == 5) return;\n__syncthreads();\nx[threadIdx.x] = 1;"
    assert run(body, strict=False).sum() == 63


@pytest.mark.parametrize("declaration", ["__shared__ float s[64];", "extern __shared__ float s[];"])
@pytest.mark.parametrize("seed", range(3))
def test_uninitialised_shared_memory_is_nan(declaration, seed):
    body = (
        f"{declaration}\nif (threadIdx.x < 10) s[threadIdx.x] = 1;\n__syncthreads();\nx[threadIdx.x] = s[threadIdx.x];"
    )
    for _ in range(2):  # the second launch must not see the values of the first
        x = run(body, seed=seed, shared_mem=256, blocks=2)
        assert np.isnan(x[10:]).all()
        assert (x[:10] == 1).all()


def test_uninitialised_shared_memory_of_templates_is_nan():
    code = """template <class T>
    __device__ T shared(int t) {
      __shared__ T s[64];
      if (t < 10) s[t] = 1;
      __syncthreads();
      return s[t];
    }
    extern "C" __global__ void k(float* x) { x[threadIdx.x] = shared<float>(threadIdx.x); }"""
    function, x = emulate.Module(code).get_function("k"), np.zeros(64, np.float32)
    for _ in range(2):
        function((2,), (64,), (x,))
        assert np.isnan(x[10:]).all()
        assert (x[:10] == 1).all()


def test_missing_barrier_gives_results_that_depend_on_the_schedule():
    body = "__shared__ float s[64];\ns[threadIdx.x] = threadIdx.x;\n{}\nx[threadIdx.x] = s[63 - threadIdx.x];"
    good = [run(body.format("__syncthreads();"), seed=seed) for seed in range(6)]
    bad = [run(body.format(""), seed=seed) for seed in range(6)]
    assert all(np.array_equal(x, np.arange(63, -1, -1)) for x in good)
    assert len({x.tobytes() for x in bad}) > 1


def test_missing_second_barrier_in_a_loop_is_found_by_some_seed():
    body = """__shared__ float s[64];
    float a = 0;
    for (int i = 0; i < 4; ++i) {{
      s[threadIdx.x] = i;
      __syncthreads();
      a += s[63 - threadIdx.x];
      {}
    }}
    x[threadIdx.x] = a;"""
    assert all((run(body.format("__syncthreads();"), seed=seed) == 6).all() for seed in range(6))
    assert not all((run(body.format(""), seed=seed) == 6).all() for seed in range(6))


REDUCE = """__shared__ float scratch[4];
  const int warp = threadIdx.x / 32;
  for (int i = 0; i < 2; ++i) {{
    float value = threadIdx.x + i;
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    if (threadIdx.x % 32 == 0) scratch[warp] = value;
    __syncthreads();
    x[2 * (blockIdx.x * blockDim.x + threadIdx.x) + i] = scratch[0] + scratch[1] + scratch[2] + scratch[3];
    {}
  }}"""


def sums_that_differ(barrier, seed, blocks=1):
    """Return, by block, how many threads read another sum than that of their block."""
    x = run(REDUCE.format(barrier), threads=128, blocks=blocks, n=256 * blocks, seed=seed).reshape(blocks, 128, 2)
    return (x != [127 * 64, 127 * 64 + 128]).any(2).sum(1)


@pytest.mark.parametrize("seed", range(8))
def test_missing_trailing_barrier_is_found_in_every_unfair_block(seed):
    unfair = (np.arange(8) ^ seed) >> 1 & 1 == 0
    assert sums_that_differ("", seed, blocks=8)[unfair].all()
    assert not sums_that_differ("__syncthreads();", seed, blocks=8).any()


def test_unfair_schedules_let_one_warp_run_ahead_and_fair_ones_do_not():
    body = """__shared__ int clock;
    if (threadIdx.x == 0) clock = 0;
    __syncthreads();
    for (int i = 0; i < 20; ++i) __syncwarp();
    x[blockIdx.x * 64 + threadIdx.x] = atomicAdd(&clock, 1);"""
    ahead = {0: [], 1: []}
    for seed in range(8):
        for block, order in enumerate(run(body, blocks=4, n=256, seed=seed).reshape(4, 2, 32)):
            first = order.argmin() // 32
            ahead[(block ^ seed) >> 1 & 1].append(order[first].max() == 31)  # the other warp has not begun
            if seed == 0 and block < 2:
                assert first == block
    assert all(ahead[0])
    assert not all(ahead[1])


@pytest.mark.parametrize("seed", [0, 1, 4])
def test_a_warp_may_wait_for_another_one_in_a_loop(seed):
    body = """__shared__ volatile int flag[2];
    const int warp = threadIdx.x / 32;
    flag[warp] = 0;
    __syncthreads();
    flag[warp] = 1;
    while (__shfl_sync(~0u, flag[1 - warp], 0) == 0) {}
    x[threadIdx.x] = 1;"""
    assert run(body, seed=seed, blocks=2).all()


@pytest.mark.parametrize("seed", [1, 2**64 - 1, 1_018_231_460_777_725_123])
def test_no_seed_stops_the_random_numbers(seed):
    """The last seed times the factor of the generator, plus 1, is 0 modulo 2**64."""
    assert len(set(run("x[threadIdx.x] = emu_random() % 1000003;", threads=8, n=8, seed=seed))) == 8


def test_blocks_run_backwards_for_odd_seeds():
    body = "if (threadIdx.x == 0) x[0] = blockIdx.x;"
    assert run(body, blocks=5, seed=2)[0] == 4
    assert run(body, blocks=5, seed=3)[0] == 0


OVERLAP = """__shared__ int s[64];
    extern __shared__ int d[];
    const int t = threadIdx.x, id = 100 * blockIdx.x;
    for (int i = 0; i < 8; ++i) {{
      s[t] = id + t + i;
      d[t] = id - t - i;
      {state}[t] = id + t;
      __syncthreads();
      const bool good = s[63 - t] == id + 63 - t + i && d[63 - t] == id - 63 + t - i && {state}[63 - t] == id + 63 - t;
      x[64 * blockIdx.x + t] += good;
      __syncthreads();
    }}"""


@pytest.mark.parametrize("seed", range(6))
def test_overlapping_state_of_neighbouring_blocks_is_found(seed):
    blocks = 5  # an odd number: the last one has no neighbour
    own = OVERLAP.format(state="(x + 320 + 64 * blockIdx.x)")
    assert (run(own, seed=seed, blocks=blocks, n=640, shared_mem=256)[:320] == 8).all()
    shifted = OVERLAP.format(state="(x + 320 + 32 * blockIdx.x)")
    good = run(shifted, seed=seed, blocks=blocks, n=640, shared_mem=256)[:320]
    assert (good == 8).all() == (seed == 0)  # seed 0 takes one block after another


def test_same_seed_gives_the_same_schedule():
    body = "__shared__ int n;\nif (threadIdx.x == 0) n = 0;\n__syncthreads();\nx[threadIdx.x] = atomicAdd(&n, 1);"
    first = [run(body, seed=seed) for seed in range(4)]
    second = [run(body, seed=seed) for seed in range(4)]
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert len({x.tobytes() for x in first}) == 4
    assert first[0].tolist() == list(range(64))


def test_lines_are_those_of_the_included_file(tmp_path):
    (tmp_path / "help.cuh").write_text("#pragma once\n\n__device__ inline void meet() {\n  __syncthreads();\n}\n")
    (tmp_path / "main.cu").write_text(
        '#include "help.cuh"\nextern "C" __global__ void k() {\n  if (threadIdx.x) meet();\n  __syncthreads();\n}\n'
    )
    with pytest.raises(
        EmulatorError, match=r"main\.cu:4: __syncthreads while .*at help\.cuh:4|help\.cuh:4: .*main\.cu:4"
    ):
        emulate.Module(tmp_path / "main.cu").get_function("k")((1,), (32,), ())
