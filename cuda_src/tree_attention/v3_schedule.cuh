// tree_attention/v3_schedule.cuh: which block computes what, from lengths on the device alone.
//
// docs/v3_schedule.md explains the words (unit, piece, length, end, line, part, slot, cut) with a picture. In short:
// row tiles are cut into pieces of one length, one piece per block. What is left of each row tile, its end, lies on
// one line with the other ends, and the last blocks cut that line evenly. So any number of multiprocessors is filled,
// ragged batches balance, and most blocks walk keys that others walk at the same time, which then come from the L2
// cache.
//
// Letters    B requests, N nodes, H heads; G blocks in the grid
// Requires   B * ceil(N * H / 64) below 2^31; lengths are clamped by host-known sizes in key_range
// Source     stream-K decomposition (arXiv 2301.03598)
#pragma once

#include "common/inputs.cuh"
#include "common/warp.cuh"

constexpr int TILE_ROWS = 64;
// In times of a key tile; docs/v3_schedule.md says how they were chosen.
constexpr int PIECE_UNITS = 8;   // time of a piece beside its keys
constexpr int UNEVEN_UNITS = 1;  // even pieces may be longer than uneven ones by this
constexpr int MERGE_UNITS = 12;  // the same where even pieces would be whole row tiles, which need no merge

constexpr long long MOST_UNITS = 0x7fffffff;

struct Tables {
  const int* page_table;
  const int* context_lens;
  const int* num_nodes;
  int B, N, H, num_pages, page_size, max_pages, max_context, keys;
  int keys_per_tile;   // of one key tile
  int tiles_per_slice;  // key tiles of a slice; 0 without split_keys, where a unit is one key tile
  bool fixed_tiles;     // whether tiles start at multiples of keys_per_tile, not at the first key of the call
};

template <class T>
__device__ __forceinline__ Tables tables_of(const Queries<T>& q, const Cache<const T>& cache, int B, int keys,
                                            int keys_per_tile, int tiles_per_slice, bool fixed_tiles = false) {
  return {cache.page_table, cache.context_lens, q.num_nodes,       B,    q.N,           q.H,            cache.num_pages,
          cache.page_size,  cache.max_pages,    cache.max_context, keys, keys_per_tile, tiles_per_slice,
          fixed_tiles};
}

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
  const int before = t.fixed_tiles && r.range.count > 0 ? r.range.first % t.keys_per_tile : 0;
  r.key_tiles = (before + r.range.count + t.keys_per_tile - 1) / t.keys_per_tile;
  r.units = t.tiles_per_slice > 0 ? (r.key_tiles + t.tiles_per_slice - 1) / t.tiles_per_slice : r.key_tiles;
  return r;
}

// How the units are shared out. With split_keys the length is 1 and nothing lies on the line.
struct Line {
  int length;      // units of a piece of whole length
  int main;        // number of those pieces
  int blocks;      // blocks that cut the line, from block `main` on
  long long ends;  // units on the line

  __device__ __forceinline__ int whole_of(const Request& r) const { return r.units / length; }
  __device__ __forceinline__ int end_of(const Request& r) const { return r.units % length; }
  // the same for all row tiles of a request together
  __device__ __forceinline__ int main_of(const Request& r) const { return r.row_tiles * whole_of(r); }
  __device__ __forceinline__ long long ends_of(const Request& r) const { return (long long)r.row_tiles * end_of(r); }
  // the first unit of a part, and the part that holds a unit
  __device__ __forceinline__ long long start(int part) const { return ends * part / blocks; }
  __device__ __forceinline__ int part_of(long long unit) const {
    return (int)(((unit + 1) * blocks + ends - 1) / ends) - 1;
  }
};

template <class Number>
__device__ __forceinline__ Number sum_of_lanes(Number mine) {
  for (int step = 16; step > 0; step /= 2) mine += __shfl_xor_sync(FULL_WARP, mine, step);
  return mine;
}

// Totals over the batch; all lanes call together.
__device__ __forceinline__ Line line_of(const Tables& t, int blocks, int piece_units = PIECE_UNITS,
                                        int uneven_units = UNEVEN_UNITS, int merge_units = MERGE_UNITS) {
  long long units = 0;
  int row_tiles = 0, longest = 0;
  const bool is_single = t.B == 1;  // then all lanes look at the one request, and there is nothing to add
  const int first = is_single ? 0 : threadIdx.x % WARP_SIZE;
  for (int b = first; b < t.B; b += WARP_SIZE) {
    const Request r = request_of(t, b);
    units += (long long)r.row_tiles * r.units;
    row_tiles += r.row_tiles;
    if (r.row_tiles > 0) longest = max(longest, r.units);
  }
  if (!is_single) {
    units = sum_of_lanes(units);
    row_tiles = sum_of_lanes(row_tiles);
    for (int step = 16; step > 0; step /= 2) longest = max(longest, __shfl_xor_sync(FULL_WARP, longest, step));
  }
  if (t.tiles_per_slice > 0 || units == 0) return {1, (int)units, 0, 0};

  int pieces = blocks;
  bool is_even = false;
  if (row_tiles <= blocks && units == (long long)row_tiles * longest) {
    const int even = blocks / row_tiles * row_tiles;  // equally many pieces for every row tile
    const int beside = even == row_tiles ? merge_units : uneven_units;
    is_even = units * (blocks - even) <= even * ((long long)piece_units * row_tiles + beside * blocks);
    if (is_even) pieces = even;
  }
  const long long due = units + (is_even ? 0 : (long long)piece_units * row_tiles);
  Line line = {(int)min((due + pieces - 1) / pieces, MOST_UNITS), 0, 0, 0};
  for (int b = first; b < t.B; b += WARP_SIZE) {
    const Request r = request_of(t, b);
    line.main += line.main_of(r);
    line.ends += line.ends_of(r);
  }
  if (!is_single) {
    line.main = sum_of_lanes(line.main);
    line.ends = sum_of_lanes(line.ends);
  }
  line.blocks = (int)min((long long)pieces - line.main, line.ends);
  return line;
}

// Where a piece of whole length, or a unit of the line, belongs.
struct Place {
  int request;  // B for an index past the last one
  int main;     // pieces of whole length, and below units of the line, of all requests before this one
  long long ends;
};

// All lanes call together.
__device__ __forceinline__ Place find_place(const Tables& t, const Line& line, bool is_main, long long index) {
  if (t.B == 1) return {0, 0, 0};
  const int lane = threadIdx.x % WARP_SIZE;
  int main = 0;
  long long ends = 0;
  for (int start = 0; start < t.B; start += WARP_SIZE) {
    int own_main = 0;
    long long own_ends = 0;
    if (start + lane < t.B) {
      const Request r = request_of(t, start + lane);
      own_main = line.main_of(r);
      own_ends = line.ends_of(r);
    }
    int main_up_to = own_main;  // inclusive prefix sums
    long long ends_up_to = own_ends;
    for (int step = 1; step < WARP_SIZE; step *= 2) {
      const int other_main = __shfl_up_sync(FULL_WARP, main_up_to, step);
      const long long other_ends = __shfl_up_sync(FULL_WARP, ends_up_to, step);
      if (lane >= step) {
        main_up_to += other_main;
        ends_up_to += other_ends;
      }
    }
    const unsigned holds = __ballot_sync(FULL_WARP, index < (is_main ? main + main_up_to : ends + ends_up_to));
    if (holds) {
      const int found = __ffs(holds) - 1;
      return {start + found, main + __shfl_sync(FULL_WARP, main_up_to - own_main, found),
              ends + __shfl_sync(FULL_WARP, ends_up_to - own_ends, found)};
    }
    main += __shfl_sync(FULL_WARP, main_up_to, WARP_SIZE - 1);
    ends += __shfl_sync(FULL_WARP, ends_up_to, WARP_SIZE - 1);
  }
  return {t.B, main, ends};
}

// How a row tile is cut, for the merge kernel: {pieces, pieces of whole length, number of the first of these, block
// with the first piece of the end}.
__device__ __forceinline__ int4 cut_of(const Line& line, const Place& place, const Request& r, int row_tile) {
  const int whole = line.whole_of(r), end = line.end_of(r);
  int pieces = whole, block = 0;
  if (end > 0) {
    const long long unit = place.ends + (long long)row_tile * end;
    const int first = line.part_of(unit);
    pieces += line.part_of(unit + end - 1) - first + 1;
    block = line.main + first;
  }
  return make_int4(pieces, whole, place.main + row_tile * whole, block);
}

// The slot for the first piece of an end: `blocks` + the number of the first piece of whole length of its row tile, or
// `blocks` + its own block where the row tile has none. A piece of whole length has the slot of its number, any other
// piece of an end that of its block; docs/v3_schedule.md says why no two pieces share one.
__device__ __forceinline__ int start_slot_of(int whole, int number, int block, int blocks) {
  return blocks + (whole > 0 ? number : block);
}

__device__ __forceinline__ int row_tiles_of(int N, int H) {
  return (int)(((long long)N * H + TILE_ROWS - 1) / TILE_ROWS);
}
