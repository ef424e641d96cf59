"""Hopper's instructions on the emulator: mbarriers, tensor copies, products of a warpgroup, clusters of two blocks."""

import numpy as np
import pytest

from ddtree_cupy import emulate
from ddtree_cupy.errors import CompileError, EmulatorError
from ddtree_cupy.kernels.tensor_map import tensor_map

pytestmark = pytest.mark.emulate

HEAD = '#include "common/hopper.cuh"\n'
BASE = (
    "extern __shared__ __align__(1024) char shared[];\nconst SharedAddress base = shared_address(shared);\n"
    "int t = threadIdx.x;\n"
)
INIT = "if (t == 0) barrier_init(base, {arrivals});\n__syncthreads();\n"


def kernel(body, parameters="int* x", qualifiers=""):
    code = f'{HEAD}extern "C" __global__ void {qualifiers} k({parameters}) {{\n{BASE}{body}\n}}'
    return emulate.Module(code).get_function("k")


def run(body, threads=32, grid=1, *, seed=0, shared_mem=4096, qualifiers=""):
    x = np.zeros(256, np.int32)
    kernel(body, qualifiers=qualifiers)((grid,), (threads,), (x,), shared_mem=shared_mem, seed=seed)
    return x


@pytest.mark.parametrize("seed", range(6))
def test_mbarriers_count_arrivals_in_phases(seed):
    """Thread 0 adds what the others have written, three times; who runs ahead waits for the phase before."""
    body = INIT.format(arrivals=63) + (
        "if (t == 0) barrier_init(base + 8, 1);\n__syncthreads();\n"
        "int* cell = (int*)(shared + 64);\n"
        "for (int i = 0; i < 3; ++i) {\n"
        "  if (t > 0) {\n    if (i > 0) barrier_wait(base + 8, (i - 1) & 1);\n    cell[t] = t + i;\n"
        "    barrier_arrive(base);\n  }\n"
        "  else {\n    barrier_wait(base, i & 1);\n    for (int j = 1; j < 64; ++j) x[i] += cell[j];\n"
        "    barrier_arrive(base + 8);\n  }\n"
        "}"
    )
    assert run(body, 64, seed=seed)[:3].tolist() == [sum(range(1, 64)) + 63 * i for i in range(3)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("barrier_arrive(base);", "this mbarrier was not initialised"),
        (INIT.format(arrivals=32) + "barrier_arrive_expecting(base, 8);\nbarrier_arrive(base);", "more threads arrive"),
        (INIT.format(arrivals=33) + "barrier_arrive(base);\nbarrier_wait(base, 0);", r"deadlock: 32 threads"),
        ("if (t == 0) barrier_init(base + 4, 1);", "multiple of 8 bytes"),
        ("if (t == 0) barrier_init(base, 0);", "an mbarrier for 0 arrivals"),
        ("cluster_arrive();", "no __cluster_dims__"),
        ("store_matrices(base + 8, 0, 0, 0, 0);", "stmatrix: the address of a row is not a multiple of 16 bytes"),
    ],
    ids=["uninitialised", "too many", "too few", "address", "none", "cluster", "stmatrix"],
)
def test_misuse_is_reported_with_its_line(body, message):
    with pytest.raises(EmulatorError, match=rf"block \(0,0,0\) thread \(\d+,0,0\): kernel\.cu:\d+: .*{message}"):
        run(body)


COPY = (
    "if (t == 0) {\n  barrier_init(base, 1);\n  barrier_arrive_expecting(base, 2 * 4 * 128);\n"
    "  copy_box_3d(base + 1024, &map, 0, 2, 1, base);\n}\n__syncthreads();\n"
)
PARAMETERS = "const __grid_constant__ TensorMap map, short* y"


def boxes(body, *, seed=0):
    """Run a kernel that copies rows 2 to 5 of pages 1 and 2 of [3, 5, 64] elements; return them as it stores them."""
    pool = np.arange(3 * 5 * 64, dtype=np.float16).reshape(3, 5, 64)
    found = np.zeros((2 * 4, 64), np.float16)
    box = tensor_map("emulate", pool, (64, 5, 3), (128, 5 * 128), (64, 4, 2))
    kernel(body, PARAMETERS)((1,), (32,), (box, found.view(np.int16)), shared_mem=4096, seed=seed)
    wanted = np.zeros((2, 4, 64), np.float16)
    wanted[:, :3] = pool[1:3, 2:5]  # past the end of a page there are zeros
    return found, wanted.reshape(8, 64)


@pytest.mark.parametrize("seed", range(4))
def test_tensor_copies_bring_swizzled_boxes(seed):
    body = COPY + (
        "barrier_wait(base, 0);\nfor (int i = t; i < 512; i += 32) {\n  int row = i / 64, unit = i % 64 / 8 ^ row;\n"
        "  y[i] = ((short*)(shared + 1024 + row * 128 + unit * 16))[i % 8];\n}"
    )
    found, wanted = boxes(body, seed=seed)
    np.testing.assert_array_equal(found, wanted)


def test_tensor_copies_arrive_at_the_wait():
    body = COPY + "for (int i = t; i < 512; i += 32) y[i] = ((short*)(shared + 1024))[i];\n"
    body += "__syncthreads();\nbarrier_wait(base, 0);"
    assert np.isnan(boxes(body)[0]).all()  # poison


def test_a_copy_that_nobody_awaits_is_reported():
    with pytest.raises(EmulatorError, match=r"kernel\.cu:\d+: nobody has waited for this copy"):
        boxes(COPY)


PRODUCT = (
    "float d[32];\nfor (int i = 0; i < 32; ++i) d[i] = 1;\n"
    "__half* a = (__half*)shared;\n__half* b = (__half*)(shared + 8192);\n"
    "for (int i = t; i < 64 * 64; i += 128) {\n"
    "  int row = i / 64, at = row * 64 + (i % 64 / 8 ^ row % 8) * 8 + i % 8;\n"
    "  a[at] = __int2half_rn(row % 7 - i % 64 % 5);\n  b[at] = __int2half_rn(row % 3 + i % 4);\n}\n"
    "fence_async_proxy();\n__syncthreads();\nproducts_fence();\n"
    "for (int k = 0; k < 4; ++k)\n"
    "  Warpgroup<__half>::multiply_64<SWIZZLED>(d, rows_of(base) + 2 * k, rows_of(base + 8192) + 2 * k);\n"
    "products_commit();\n"
)
STORE = (
    "for (int i = 0; i < 32; ++i) {\n  int row = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8;\n"
    "  y[row * 64 + i / 4 * 8 + t % 4 * 2 + i % 2] = d[i];\n}\n"
)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("waits", [True, False])
def test_products_of_a_warpgroup_are_there_after_the_wait(seed, waits):
    y = np.zeros((64, 64), np.float32)
    body = PRODUCT + ("products_wait<0>();\n" + STORE if waits else STORE + "products_wait<0>();\n")
    kernel(body, "float* y")((1,), (128,), (y,), shared_mem=16384, seed=seed)
    row, column = np.arange(64)[:, None], np.arange(64)
    a, b = row % 7 - column % 5, row % 3 + column % 4
    np.testing.assert_array_equal(y, 1.0 + a @ b.T if waits else np.ones((64, 64)))


EXCHANGE = (
    "if (t == 0) barrier_init(base, 1);\n__syncthreads();\nint* mine = (int*)(shared + 64);\n"
    "mine[t] = 100 * blockIdx.x + t;\n"
    "mine[32 + t] = -1;\nif (t == 0) barrier_arrive_expecting(base, 128);\ncluster_arrive();\ncluster_wait();\n"
    "unsigned other = cluster_rank() ^ 1;\nfence_async_proxy();\n__syncthreads();\n"
    "if (t == 0) copy_there(place_in_block(base + 192, other), base + 64, 128, place_in_block(base, other));\n"
    "barrier_wait(base, 0);\nx[32 * blockIdx.x + t] = mine[32 + t];\ncluster_arrive();\ncluster_wait();"
)


@pytest.mark.parametrize("seed", range(6))
def test_blocks_of_a_cluster_exchange_shared_memory(seed):
    found = run(EXCHANGE, grid=4, seed=seed, qualifiers="__cluster_dims__(2, 1, 1)")[:128].reshape(4, 32)
    np.testing.assert_array_equal(found, 100 * np.array([[1], [0], [3], [2]]) + np.arange(32))


@pytest.mark.parametrize("seed", range(4))
def test_blocks_of_a_cluster_that_forget_each_other_are_reported(seed):
    body = EXCHANGE.replace("cluster_arrive();\ncluster_wait();", "if (blockIdx.x == 0) cluster_arrive();", 1).replace(
        "cluster_wait();\nunsigned", "unsigned"
    )
    with pytest.raises(EmulatorError, match=r"deadlock|has ended|without having arrived|not initialised|twice"):
        run(body, grid=2, seed=seed, qualifiers="__cluster_dims__(2, 1, 1)")


def test_grids_and_clusters_that_cannot_be_are_refused():
    with pytest.raises(EmulatorError, match=r"no GPU accepts grid \(3,1,1\) with clusters of 2 blocks"):
        run("x[t] = 1;", grid=3, qualifiers="__cluster_dims__(2, 1, 1)")
    for sizes in ("4, 1, 1", "2, 2", "N"):
        with pytest.raises(CompileError, match=r"kernel `k` has __cluster_dims__.*takes one or two blocks along x"):
            run("x[t] = 1;", qualifiers=f"__cluster_dims__({sizes})")
