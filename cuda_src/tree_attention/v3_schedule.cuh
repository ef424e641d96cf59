// tree_attention/v3_schedule.cuh: who computes what, from device lengths alone.
//
// A request has ceil(rows / 64) row tiles and ceil(T / KEYS) key tiles. Without split_keys all (row tile, key tile)
// units of all requests form one line, cut into equal pieces, one a block (stream-K): any number of SMs is filled and
// ragged batches balance. A few blocks stay idle where that costs less than pieces that cross into another row tile.
// A block that ends another one's row tile does so last: its other pieces start at first keys, as those of all blocks
// do, and the one put off goes on about where they stopped. So keys are read by all at one time, and come from L2.
// That needs cuts that fall alike in many row tiles: 16 row tiles in 132 pieces share four to a place, 17 do not share.
// With split_keys a unit is a whole slice of split_keys keys, so that the sums of a request never depend on its
// neighbours; blocks then take units in turn.
//
// Letters    B requests, N nodes, H heads; G blocks of the grid
// Requires   B * ceil(N * H / 64) below 2^31; lengths are clamped by host-known sizes in key_range
// Source     stream-K decomposition (arXiv 2301.03598)
#pragma once

#include "common/visibility.cuh"
#include "common/warp.cuh"

constexpr int TILE_ROWS = 64;
constexpr int CROSSING_UNITS = 6;  // what a second piece of a block takes, in times of a key tile

struct Tables {
  const int* page_table;
  const int* context_lens;
  const int* num_nodes;
  int B, N, H, num_pages, page_size, max_pages, max_context, keys;
  int keys_per_tile;   // of one key tile
  int tiles_per_slice;  // key tiles of one unit; 0: units are single key tiles, cut freely
};

struct Request {
  PageTable table;
  KeyRange range;
  int rows, row_tiles, key_tiles;
  int units;  // of one row tile
};

__device__ __forceinline__ Request request_of(const Tables& t, int b) {
  Request r;
  r.table = {t.page_table + (long long)b * t.max_pages, t.max_pages, t.num_pages, t.page_size};
  const int count = clamp_length(t.num_nodes[b], t.N);
  r.range = key_range(t.keys, clamp_length(t.context_lens[b], t.max_context), count, r.table);
  r.rows = count * t.H;
  r.row_tiles = (r.rows + TILE_ROWS - 1) / TILE_ROWS;
  r.key_tiles = (r.range.count + t.keys_per_tile - 1) / t.keys_per_tile;
  r.units = t.tiles_per_slice > 0 ? (r.key_tiles + t.tiles_per_slice - 1) / t.tiles_per_slice : r.key_tiles;
  return r;
}

struct Place {
  int request;      // B when the unit lies past the end
  long long first;  // units of all requests before this one
};

// The request that holds a unit. All lanes call together.
__device__ __forceinline__ Place find_unit(const Tables& t, long long unit) {
  const int lane = threadIdx.x % WARP_SIZE;
  long long before = 0;
  for (int start = 0; start < t.B; start += WARP_SIZE) {
    long long mine = 0;
    if (start + lane < t.B) {
      const Request r = request_of(t, start + lane);
      mine = (long long)r.row_tiles * r.units;
    }
    long long up_to = mine;  // inclusive prefix sum
    for (int step = 1; step < WARP_SIZE; step *= 2) {
      const long long other = __shfl_up_sync(FULL_WARP, up_to, step);
      if (lane >= step) up_to += other;
    }
    const unsigned holds = __ballot_sync(FULL_WARP, unit < before + up_to);
    if (holds) {
      const int found = __ffs(holds) - 1;
      return {start + found, before + __shfl_sync(FULL_WARP, up_to - mine, found)};
    }
    before += __shfl_sync(FULL_WARP, up_to, WARP_SIZE - 1);
  }
  return {t.B, before};
}

// The line of all units, cut into `pieces` parts.
struct Line {
  long long units;
  int pieces;

  __device__ __forceinline__ long long start(int piece) const { return units * piece / pieces; }
  __device__ __forceinline__ int piece_of(long long unit) const {
    return (int)(((unit + 1) * pieces + units - 1) / units) - 1;
  }
};

// Totals over the batch; all lanes call together.
__device__ __forceinline__ Line line_of(const Tables& t, int blocks) {
  long long units = 0;
  int row_tiles = 0;
  for (int b = threadIdx.x % WARP_SIZE; b < t.B; b += WARP_SIZE) {
    const Request r = request_of(t, b);
    units += (long long)r.row_tiles * r.units;
    row_tiles += r.row_tiles;
  }
  for (int step = 16; step > 0; step /= 2) {
    units += __shfl_xor_sync(FULL_WARP, units, step);
    row_tiles += __shfl_xor_sync(FULL_WARP, row_tiles, step);
  }
  int pieces = blocks;
  if (t.tiles_per_slice == 0 && row_tiles > 0 && row_tiles <= blocks) {
    const int even = blocks / row_tiles * row_tiles;  // as many pieces for every row tile of equal length
    const int crossing = even == row_tiles ? 2 * CROSSING_UNITS : CROSSING_UNITS;  // whole row tiles need no merge
    if (units * (blocks - even) <= (long long)crossing * even * blocks) pieces = even;
  }
  return {units, (int)min((long long)pieces, units)};
}

// Scratch slot of a piece of a row tile. A block has at most two pieces that are not whole: its first (it starts
// inside a row tile) and its last (it starts a row tile and does not finish it).
__device__ __forceinline__ long long slot_of(int block, bool starts_tile) { return 2ll * block + starts_tile; }

__device__ __forceinline__ int row_tiles_of(int N, int H) {
  return (int)(((long long)N * H + TILE_ROWS - 1) / TILE_ROWS);
}

// How a row tile of `units` is cut, for the merge kernel: its pieces, the slot of the first, of the second, and the
// step from there on. `unit` is its first one, in this block.
__device__ __forceinline__ int4 cut_of(const Line& line, long long unit, int units, bool is_sliced) {
  if (is_sliced) return make_int4(units, (int)unit, (int)unit + 1, 1);
  const int pieces = line.piece_of(unit + units - 1) - blockIdx.x + 1;
  return make_int4(pieces, (int)slot_of(blockIdx.x, true), (int)slot_of(blockIdx.x + 1, false), 2);
}
