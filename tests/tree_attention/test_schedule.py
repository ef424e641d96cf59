"""How v2 and v3 cut their work, as numbers alone: at sizes that no emulated launch reaches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import emulate

pytestmark = pytest.mark.emulate

LINE = r"""
#include "tree_attention/v3_schedule.cuh"
extern "C" __global__ void cut_line(long long ends, int blocks, const long long* units, int num_units,
                                    long long* starts, int* parts) {
  const Line line = {1, 0, blocks, ends};
  for (int part = threadIdx.x; part <= blocks; part += blockDim.x) starts[part] = line.start(part);
  for (int i = threadIdx.x; i < num_units; i += blockDim.x) parts[i] = line.part_of(units[i]);
}
"""
EXAMPLE = r"""
#include "tree_attention/v3_schedule.cuh"
extern "C" __global__ void share_out(const int* page_table, const int* context_lens, const int* num_nodes, int nodes,
                                     int pages, int blocks, long long* line_of_work, long long* starts, int* cuts,
                                     int* start_slots) {
  const Tables tables = {page_table, context_lens, num_nodes, 1, nodes, 1, pages, 32, pages, 32 * pages, 1, 32, 0};
  const Line line = line_of(tables, blocks);
  const Request request = request_of(tables, 0);
  if (threadIdx.x > 0) return;
  const long long found[] = {line.length, line.main, line.blocks, line.ends};
  for (int i = 0; i < 4; ++i) line_of_work[i] = found[i];
  for (int part = 0; part <= line.blocks; ++part) starts[part] = line.start(part);
  for (int tile = 0; tile < request.row_tiles; ++tile) {
    const int4 cut = cut_of(line, {0, 0, 0}, request, tile);
    const int numbers[] = {cut.x, cut.y, cut.z, cut.w};
    for (int i = 0; i < 4; ++i) cuts[4 * tile + i] = numbers[i];
    start_slots[tile] = start_slot_of(cut.y, cut.z, cut.w, blocks);
  }
}
"""
SLICES = r"""
#include "tree_attention/v2_slices.cuh"
extern "C" __global__ void cut_keys(const int* rows, const int* num_keys, int rows_per_block, int* row_blocks,
                                    int* count, int* keys) {
  const Slices slices = slices_of(rows[threadIdx.x], num_keys[threadIdx.x], rows_per_block);
  row_blocks[threadIdx.x] = slices.row_blocks;
  count[threadIdx.x] = slices.count;
  keys[threadIdx.x] = slices.keys;
}
"""
TILE, MOST_TILES = 32, 1024  # of v2: keys of a tile, tiles of a slice


@given(
    ends=st.integers(1, 2**20) | st.integers(2**31 - 2, 2**36),
    blocks=st.integers(1, 200) | st.sampled_from([132, 1_024]),
    seed=st.integers(0, 99),
)
def test_blocks_share_the_line_of_ends_evenly(ends, blocks, seed):
    """Ends of any number, also beyond 2^31 units, in parts that differ by one unit at most."""
    blocks = min(blocks, ends)
    units = np.random.default_rng(seed).integers(0, ends, 40)
    units[:2] = 0, ends - 1
    starts, parts = np.zeros(blocks + 1, np.int64), np.zeros(len(units), np.int32)
    cut_line = emulate.Module(LINE).get_function("cut_line")
    cut_line((1,), (32,), (np.int64(ends), np.int32(blocks), units, np.int32(len(units)), starts, parts))
    assert starts.tolist() == [ends * part // blocks for part in range(blocks + 1)]
    assert (starts[parts] <= units).all()
    assert (units < starts[parts + 1]).all()


def test_example_of_the_schedule_page_is_what_the_kernel_does():
    """The numbers of docs/v3_schedule.md and its picture: 5 row tiles of 100 key tiles, 8 blocks."""
    line, starts, cuts, slots = np.zeros(4, int), np.zeros(4, int), np.zeros((5, 4), np.int32), np.zeros(5, np.int32)
    lengths, nodes = np.array([3_200], np.int32), np.array([320], np.int32)
    share_out = emulate.Module(EXAMPLE).get_function("share_out")
    sizes = np.int32(320), np.int32(100), np.int32(8)
    share_out((1,), (32,), (np.arange(100, dtype=np.int32), lengths, nodes, *sizes, line, starts, cuts, slots))
    assert line.tolist() == [68, 5, 3, 160]  # length, pieces of it, blocks on the line, units there
    assert starts.tolist() == [0, 53, 106, 160]
    assert cuts.tolist() == [[2, 1, 0, 5], [3, 1, 1, 5], [2, 1, 2, 6], [3, 1, 3, 6], [2, 1, 4, 7]]
    assert slots.tolist() == [8, 9, 10, 11, 12]


@given(rows=st.integers(1, 2**17), num_keys=st.integers(0, 2**22), rows_per_block=st.sampled_from([8, 16]))
def test_slices_of_v2_cover_the_keys_in_sums_of_bounded_length(rows, num_keys, rows_per_block):
    row_blocks, count, keys = (np.zeros(1, np.int32) for _ in range(3))
    cut_keys = emulate.Module(SLICES).get_function("cut_keys")
    arguments = np.array([rows], np.int32), np.array([num_keys], np.int32), np.int32(rows_per_block)
    cut_keys((1,), (1,), (*arguments, row_blocks, count, keys))
    assert row_blocks[0] == -(-rows // rows_per_block)
    assert count[0] >= 1
    assert count[0] * keys[0] >= num_keys
    assert keys[0] % TILE == 0
    assert keys[0] <= MOST_TILES * TILE
