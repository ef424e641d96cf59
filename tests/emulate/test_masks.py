"""Warp operations on any partition of a warp into masks, under any schedule."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_cupy import emulate

pytestmark = pytest.mark.emulate

MASKS = r"""
extern "C" __global__ void masks(const unsigned* mask, const int* x, const int* source, int rounds, int* out) {
  int t = threadIdx.x, v = x[t];
  for (int r = 0; r < rounds; ++r) {
    unsigned m = mask[r * blockDim.x + t];
    if (m == 0) continue;  // sits this round out
    v += __shfl_sync(m, v, source[r * blockDim.x + t]);
    v ^= (int)__ballot_sync(m, v & 1);
    v += __reduce_min_sync(m, v);
    if (__any_sync(m, v & 2)) __syncwarp(m);
  }
  out[t] = v;
}
"""


def masks_reference(mask, x, source):
    values = x.astype(np.int32).copy()
    for r in range(mask.shape[0]):
        for warp in range(0, x.size, 32):
            for m in set(mask[r, warp : warp + 32].tolist()) - {0}:
                lanes = [warp + i for i in range(32) if m >> i & 1]
                v = values[lanes] + values[warp + source[r, lanes]]
                ballot = sum(int(bit) << (lane - warp) for lane, bit in zip(lanes, v & 1, strict=True))
                v = v ^ np.array(ballot, np.uint32).view(np.int32)
                values[lanes] = v + v.min()
    return values


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.sampled_from([32, 64, 96]), st.integers(0, 2**20))
def test_any_partition_into_masks_matches_numpy(data_seed, rounds, threads, schedule):
    rng = np.random.default_rng(data_seed)
    mask = np.zeros((rounds, threads), np.uint32)
    source = np.zeros((rounds, threads), np.int32)
    for r in range(rounds):
        for warp in range(0, threads, 32):
            group = rng.integers(0, rng.integers(1, 7), 32)
            for g in range(7):  # group 0 sits out
                lanes = np.flatnonzero(group == g)
                if g and lanes.size:
                    mask[r, warp + lanes] = (1 << lanes.astype(np.uint64)).sum()
                    source[r, warp + lanes] = rng.choice(lanes, lanes.size)
    x, out = rng.integers(-100, 100, threads).astype(np.int32), np.zeros(threads, np.int32)
    function = emulate.Module(MASKS).get_function("masks")
    function((1,), (threads,), (mask, x, source, np.int32(rounds), out), seed=schedule)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(out, masks_reference(mask, x, source))
