// tree_attention/v4_schedule.cuh: which block of v4_wgmma.cu computes what, from lengths on the device alone.
//
// Work       Three ways. Cut: as v3_schedule.cuh cuts, with its words. Whole: blocks take whole row tiles in turn,
//            which needs no merge. Paired: the two blocks of a cluster halve the keys of a row tile and exchange sums.
//            For a single request the host chooses into how many parts of equal length each row tile is cut, as its
//            length does not matter then; else the device chooses, which takes it 2 us more.
// Letters    as v3_schedule.cuh; a unit is a key tile of 64 keys, or a slice of `split_keys`
// Source     own
#pragma once

#include "tree_attention/v4_layout.cuh"

constexpr int CUT = 0;
constexpr int WHOLE = 1;
constexpr int PAIRED = 2;
// in times of a key tile
constexpr int PIECE_TIME = 6;   // of a piece beside its keys
constexpr int UNEVEN_TIME = 1;  // by what even pieces may be longer than others
constexpr int MERGE_TIME = 4;   // the same for whole row tiles, which need no merge
constexpr float MOST_UNEVEN = 1.0625f;  // how much longer whole row tiles may take than a perfect share of the keys
constexpr int ANY_LENGTH = 1073741824;  // key tiles of a slice that holds all keys

struct Load {
  long long units;
  int row_tiles, longest;  // of the row tiles that have keys
};

// Totals over the batch; all lanes of a warp call together.
__device__ __forceinline__ Load load_of(const Tables& t) {
  Load load = {0, 0, 0};
  const bool is_single = t.B == 1;  // then all lanes look at the one request, and there is nothing to add
  for (int b = is_single ? 0 : threadIdx.x % WARP_SIZE; b < t.B; b += WARP_SIZE) {
    const Request r = request_of(t, b);
    if (r.units == 0 || r.row_tiles == 0) continue;
    load.units += (long long)r.row_tiles * r.units;
    load.row_tiles += r.row_tiles;
    load.longest = max(load.longest, r.units);
  }
  if (!is_single) {
    load.units = sum_of_lanes(load.units);
    load.row_tiles = sum_of_lanes(load.row_tiles);
    for (int step = 16; step > 0; step /= 2)
      load.longest = max(load.longest, __shfl_xor_sync(FULL_WARP, load.longest, step));
  }
  return load;
}

// The best of the three ways by the time of the longest block, in times of a key tile.
template <bool PAIRS>
__device__ __forceinline__ int choose_way(const Load& load, int blocks) {
  const float piece = PIECE_TIME, longest = load.longest;
  const float cut = ((float)load.units + piece * load.row_tiles) / blocks + piece + MERGE_TIME;
  const float whole = (float)((load.row_tiles + blocks - 1) / blocks) * (longest + piece);
  const float paired = 0.5f * longest + piece;  // one row tile for each pair
  if (PAIRS && 2 * load.row_tiles <= blocks && paired <= fminf(whole, MOST_UNEVEN * cut)) return PAIRED;
  return whole <= MOST_UNEVEN * cut ? WHOLE : CUT;
}

// As line_of of v3_schedule.cuh, from totals that are known. All lanes of a warp call together.
__device__ __forceinline__ Line cut_line(const Tables& t, const Load& load, int blocks) {
  int pieces = blocks;
  bool is_even = false;
  if (load.row_tiles <= blocks && load.units == (long long)load.row_tiles * load.longest) {
    const int even = blocks / load.row_tiles * load.row_tiles;  // equally many pieces for every row tile
    const int beside = even == load.row_tiles ? MERGE_TIME : UNEVEN_TIME;
    is_even = load.units * (blocks - even) <= even * ((long long)PIECE_TIME * load.row_tiles + beside * blocks);
    if (is_even) pieces = even;
  }
  const long long due = load.units + (is_even ? 0 : (long long)PIECE_TIME * load.row_tiles) + pieces - 1;
  Line line = {(int)(due < MOST_UNITS ? (unsigned)due / (unsigned)pieces : min(due / pieces, MOST_UNITS)), 0, 0, 0};
  const bool is_single = t.B == 1;
  for (int b = is_single ? 0 : threadIdx.x % WARP_SIZE; b < t.B; b += WARP_SIZE) {
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

struct Found {
  int request, row_tile, first, last;  // key tiles of the request
  int slot;
  int4 cut;  // for its first piece
};

__device__ __forceinline__ void write_piece(const Request& request, const unsigned* bits, const Found& found,
                                            Piece& piece) {
  const int start = request.range.first / KEYS;
  piece.entries = request.table.entries;
  piece.bits = bits;
  piece.request = found.request;
  piece.first_row = found.row_tile * TILE_ROWS;
  piece.rows = request.rows;
  piece.first_tile = start + found.first;
  piece.last_tile = start + found.last;
  piece.first_key = request.range.first;
  piece.end_key = request.range.first + request.range.count;
  piece.context_len = request.range.context_len;
  piece.slot = found.slot;
}

// Piece `index` of a single request whose row tiles have `parts` pieces each: those of a pair of blocks are adjacent,
// else those of the same keys.
__device__ __forceinline__ Found find_part(const Request& request, int parts, bool is_paired, int index) {
  const int row_tile = is_paired ? index / 2 : index % request.row_tiles;
  const int part = is_paired ? index % 2 : index / request.row_tiles;
  const int least = request.key_tiles / parts, more = request.key_tiles % parts;  // the first `more` have one tile more
  const int first = part * least + min(part, more);
  const int slot = parts == 1 || is_paired ? -1 : row_tile * parts + part;
  const int4 cut = make_int4(parts, parts, row_tile * parts, 0);
  return {0, row_tile, first, first + least + (part < more ? 1 : 0), slot, cut};
}

// Piece or unit `index` of the line. All lanes of a warp call together.
__device__ __forceinline__ Found find_on_line(const Tables& tables, const Share& share, long long index, long long stop,
                                              Request& request, int& num_units) {
  const Line line = share.line;
  const bool is_main = share.step > 0;
  const Place place = find_place(tables, line, is_main, index);
  request = request_of(tables, place.request);
  const int whole = line.whole_of(request), end = line.end_of(request);
  const int of_tile = is_main ? whole : end;  // pieces, or units of the line
  const int local = (int)(index - (is_main ? place.main : place.ends));
  const int row_tile = local / of_tile, rest = local % of_tile;
  const int first_unit = is_main ? rest * line.length : whole * line.length + rest;
  num_units = is_main ? line.length : (int)min(stop - index, (long long)end - rest);
  const int per_unit = max(tables.tiles_per_slice, 1);
  int first = first_unit * per_unit;
  int last = (int)min((long long)(first_unit + num_units) * per_unit, (long long)request.key_tiles);
  if (share.is_paired) {
    const int middle = (first + last) / 2;
    (blockIdx.x % 2 ? first : last) = middle;
  }
  const int number = place.main + row_tile * whole;  // of the first piece of whole length
  const int start_slot = start_slot_of(whole, number, blockIdx.x, gridDim.x);
  const int slot = num_units == request.units ? -1 : is_main ? (int)index : rest == 0 ? start_slot : (int)blockIdx.x;
  const int4 cut = end > 0 ? cut_of(line, place, request, row_tile) : make_int4(whole, whole, number, 0);
  return {place.request, row_tile, first, last, slot, cut};
}

// Finds the piece at `share.index` and writes it; `rows` of it is 0 if there is none. All lanes of a warp call
//            together.
template <class T>
__device__ __forceinline__ void find_piece(Tables tables, const Queries<T>& queries, Share& share, Piece& piece,
                                           int4* cuts) {
  tables.tiles_per_slice = share.tiles_per_slice;
  long long index = share.index, stop = share.stop;
  const long long put_off = share.put_off;
  const bool is_put_off = index >= stop && put_off >= 0, is_writer = threadIdx.x % WARP_SIZE == 0;
  if (is_put_off) {
    index = share.first;
    stop = put_off;
  }
  __syncwarp();
  if (index >= stop) {
    if (is_writer) piece.rows = 0;
    return;
  }
  Request request;
  Found found;
  int num_units = 0;
  if (share.parts > 0) {
    request = request_of(tables, 0);
    found = find_part(request, share.parts, share.is_paired, (int)index);
  } else {
    found = find_on_line(tables, share, index, stop, request, num_units);
  }
  if (!is_writer) return;
  if (is_put_off) {
    share.put_off = -1;
    share.stop = stop;
  }
  share.index = index + (share.step > 0 ? share.step : num_units);
  write_piece(request, queries.bits(found.request, 0), found, piece);
  if (found.first == 0) cuts[(long long)found.request * row_tiles_of(tables.N, tables.H) + found.row_tile] = found.cut;
}

// What this block is to do where its row tiles are cut as the lengths demand. All lanes of a warp call together.
template <bool PAIRS>
__device__ __forceinline__ Share choose_share(Tables& tables) {
  const int blocks = gridDim.x, block = blockIdx.x;
  const Load load = load_of(tables);
  const bool has_slices = tables.tiles_per_slice > 0;
  const int way = has_slices || load.row_tiles == 0 ? CUT : choose_way<PAIRS>(load, blocks);
  Line line = {1, way == CUT ? (int)load.units : load.row_tiles, 0, 0};
  if (way != CUT)
    tables.tiles_per_slice = ANY_LENGTH;
  else if (!has_slices && load.row_tiles > 0)
    line = cut_line(tables, load, blocks);
  const int part = block - line.main;  // of the line, if it is not negative
  const bool is_main = part < 0 || line.blocks == 0, is_paired = PAIRS && way == PAIRED;
  long long index = is_paired ? block / 2 : block, stop = line.main;
  if (!is_main) {
    const bool is_idle = part >= line.blocks;
    index = is_idle ? line.ends : line.start(part);
    stop = is_idle ? line.ends : line.start(part + 1);
  }
  long long put_off = -1;
  const long long first = index;
  if (!is_main && index < stop) {
    const Place place = find_place(tables, line, false, index);
    const int end = line.end_of(request_of(tables, place.request)), rest = (int)((index - place.ends) % end);
    if (rest > 0 && index + end - rest < stop) put_off = index = index + end - rest;
  }
  const int step = !is_main ? 0 : is_paired ? blocks / 2 : blocks;
  return {line, index, stop, first, put_off, tables.tiles_per_slice, step, 0, is_paired};
}

// What this block is to do, and its first piece. `parts`: as in Share. All lanes of a warp call together.
template <bool PAIRS, class T>
__device__ __forceinline__ void begin_share(Tables tables, const Queries<T>& queries, int parts, Share& share,
                                            Piece& piece, int4* cuts) {
  Share mine;
  if (parts > 0) {
    const Request request = request_of(tables, 0);
    const long long pieces = request.range.count > 0 ? (long long)request.row_tiles * parts : 0;
    mine = {{1, 0, 0, 0}, blockIdx.x, pieces, 0, -1, 0, (int)gridDim.x, parts, PAIRS};
  } else {
    mine = choose_share<PAIRS>(tables);
  }
  if (threadIdx.x % WARP_SIZE == 0) share = mine;
  __syncwarp();
  find_piece(tables, queries, share, piece, cuts);
}
