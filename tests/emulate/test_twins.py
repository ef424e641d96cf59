"""What host twins of PTX instructions are built from: cp.async queues, warp functions, named barriers, waits."""

import numpy as np
import pytest

from ddtree_cupy import emulate
from ddtree_cupy.errors import EmulatorError

pytestmark = pytest.mark.emulate

ASYNC = r"""
extern "C" __global__ void stages(const int4* x, int4* y, int n, int wait) {
  __shared__ int4 s[2][32];
  int t = threadIdx.x;
  emu::async_copy(&s[0][t], x + t, 16, 16, EMU_HERE);
  emu::async_commit();
  for (int i = 0; i < n; ++i) {
    if (i + 1 < n) emu::async_copy(&s[(i + 1) & 1][t], x + (i + 1) * 32 + t, 16, 16, EMU_HERE);
    emu::async_commit();
    if (wait) emu::async_wait(1);
    __syncthreads();
    y[i * 32 + t] = s[i & 1][31 - t];
    __syncthreads();
  }
}
extern "C" __global__ void tail(const int4* x, int4* y) {
  __shared__ int4 s[1];
  emu::async_copy(s, x, 16, 4, EMU_HERE);
  emu::async_wait_all();
  y[0] = s[0];
}
extern "C" __global__ void skewed(const int4* x) {
  __shared__ int4 s[2];
  emu::async_copy((char*)s + 4, x, 16, 16, EMU_HERE);
}
"""


@pytest.mark.parametrize("seed", range(6))
def test_async_copies_complete_only_at_the_wait(seed):
    x = np.arange(4 * 32 * 4, dtype=np.int32).reshape(4, 32, 4)
    function = emulate.Module(ASYNC).get_function("stages")
    results = []
    for wait in (1, 0):
        y = np.zeros_like(x)
        function((1,), (32,), (x, y, np.int32(4), np.int32(wait)), seed=seed)
        results.append(np.array_equal(y, x[:, ::-1]))
    assert results == [True, False]


def test_async_copy_fills_with_zeros_and_checks_alignment():
    x, y = np.arange(1, 5, dtype=np.int32), np.full(4, 9, np.int32)
    module = emulate.Module(ASYNC)
    module.get_function("tail")((1,), (1,), (x, y))
    assert y.tolist() == [1, 0, 0, 0]
    with pytest.raises(EmulatorError, match="not aligned"):
        module.get_function("skewed")((1,), (1,), (x,))


COLLECTIVE = r"""
struct Lane { int in, out; };
void rotate(void** lanes) {
  for (int i = 0; i < 32; ++i) static_cast<Lane*>(lanes[i])->out = static_cast<Lane*>(lanes[(i + 1) % 32])->in;
}
void total(void** deposits, unsigned n) {
  int sum = 0;
  for (unsigned i = 0; i < n; ++i) sum += static_cast<Lane*>(deposits[i])->in;
  for (unsigned i = 0; i < n; ++i) static_cast<Lane*>(deposits[i])->out = sum + int(n);
}
extern "C" __global__ void warps(const int* x, int* y) {
  Lane lane{x[threadIdx.x], 0};
  emu_collect_fn(0xffffffffu, emu::kTwin, &lane, rotate, EMU_HERE);
  y[threadIdx.x] = lane.out;
}
extern "C" __global__ void groups(const int* x, int* y) {
  Lane lane{x[threadIdx.x], 0};
  emu_named_barrier(1 + threadIdx.x / 128, 128, &lane, total, EMU_HERE);
  y[threadIdx.x] = lane.out;
}
struct Flag { int* at; int wanted; };
int reached(void* state) {
  Flag* flag = static_cast<Flag*>(state);
  return __atomic_load_n(flag->at, __ATOMIC_RELAXED) >= flag->wanted;
}
extern "C" __global__ void pipe(const int* x, int* y, int rounds, int broken) {
  __shared__ int full, empty, slot;
  if (threadIdx.x == 0) full = empty = 0;
  __syncthreads();
  if (threadIdx.x < 32) {
    for (int i = 0; i < rounds && threadIdx.x == 0; ++i) {
      Flag flag{&empty, i};
      emu_wait_until(reached, &flag, EMU_HERE);
      slot = x[i];
      if (!broken) atomicAdd(&full, 1);
    }
  } else if (threadIdx.x == 32) {
    for (int i = 0; i < rounds; ++i) {
      Flag flag{&full, i + 1};
      emu_wait_until(reached, &flag, EMU_HERE);
      y[i] = slot;
      atomicAdd(&empty, 1);
    }
  }
}
"""


@pytest.mark.parametrize("seed", range(4))
def test_collective_functions_see_every_thread(seed):
    module = emulate.Module(COLLECTIVE)
    x, y = np.arange(256, dtype=np.int32), np.zeros(256, np.int32)
    module.get_function("warps")((1,), (256,), (x, y), seed=seed)
    np.testing.assert_array_equal(y.reshape(8, 32), np.roll(x.reshape(8, 32), -1, axis=1))
    module.get_function("groups")((1,), (256,), (x, y), seed=seed)
    np.testing.assert_array_equal(y, np.repeat(x.reshape(2, 128).sum(1) + 128, 128))


@pytest.mark.parametrize("seed", range(4))
def test_waits_pass_data_from_warp_to_warp(seed):
    function = emulate.Module(COLLECTIVE).get_function("pipe")
    x, y = np.arange(10, 15, dtype=np.int32), np.zeros(5, np.int32)
    function((2,), (64,), (x, y, np.int32(5), np.int32(0)), seed=seed)
    np.testing.assert_array_equal(y, x)
    with pytest.raises(EmulatorError, match=r"deadlock: .*a wait at kernel\.cu:\d+"):
        function((1,), (64,), (x, y, np.int32(5), np.int32(1)), seed=seed)
