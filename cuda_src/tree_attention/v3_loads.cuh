// tree_attention/v3_loads.cuh: queries and key tiles of v3_mma.cu, from global to shared memory, by its value warps.
//
// Letters    as v3_layout.cuh; a unit is 16 bytes, 8 elements
// Requires   pages are clamped into the pool; keys that no row of the tile sees are never read and become zeros
// Source     own
#pragma once

#include "tree_attention/v3_layout.cuh"

template <class T, int C, int R, int KEYS, int STAGES>
struct TileLoads : TileLayout<T, C, R, KEYS, STAGES> {
  using Layout = TileLayout<T, C, R, KEYS, STAGES>;
  using Layout::piece, Layout::keys, Layout::seen, Layout::held, Layout::queries, Layout::is_held;
  using Layout::held_before;
  static constexpr int STEPS = Layout::STEPS, HELD = Layout::HELD, PITCH = Layout::PITCH;
  static constexpr int UNITS = (C + R) / 8;               // of a key
  static constexpr int LOADERS = VALUE_THREADS / KEYS;    // threads that load one key

  int page_ahead;  // page of the thread's key in the tile to be loaded next

  __device__ __forceinline__ TileLoads(char* shared, const Piece<T>& piece) : Layout(shared, piece) {}

  // 0..255. Read anew each time, with all addresses that depend on it: registers hold values.
  __device__ __forceinline__ static unsigned value_thread() { return thread_here() - FIRST_VALUE_THREAD; }

  // One unit, zeros unless is_read; asynchronous where rows start at multiples of 16 bytes.
  __device__ __forceinline__ void copy_unit(T* to, const T* from, bool is_read) const {
    if (piece.aligned) {
      copy_async_16(shared_address(to), from, is_read);
    } else {
      for (int i = 0; i < 8; ++i) to[i] = is_read ? from[i] : from_float<T>(0.0f);
    }
  }

  // The queries of 64 rows, one group of copies: k-steps in registers by way of `held`, the others into `queries`.
  __device__ __forceinline__ void load_queries(const T* nope, long long nope_node, long long nope_head, const T* pe,
                                               long long pe_node, long long pe_head) const {
    constexpr int PARTS = VALUE_THREADS / TILE_ROWS;
    const unsigned thread = value_thread();
    const int row = thread / PARTS;
    const bool is_row = piece.first_row + row < piece.request.rows;
    const int node = is_row ? (piece.first_row + row) / piece.H : 0;
    const int head = is_row ? (piece.first_row + row) % piece.H : 0;
    nope += node * nope_node + head * nope_head;
    pe += node * pe_node + head * pe_head;
    for (int unit = thread % PARTS; unit < 4 * STEPS; unit += PARTS) {
      const int half = unit / (2 * STEPS), step = unit / 2 % STEPS;
      const int column = is_held(step) ? half * HELD + held_before(step)
                                       : half * (STEPS - HELD) + step - held_before(step);
      T* to = (is_held(step) ? held() + row * Layout::HELD_PITCH : queries() + row * Layout::QUERY_PITCH) +
              16 * column + 8 * (unit % 2);
      copy_unit(to, unit < C / 8 ? nope + 8 * unit : pe + (8 * unit - C), is_row && unit < UNITS);
    }
    copy_async_commit();
  }

  // Whether any row sees a key.
  __device__ __forceinline__ bool is_seen(int index) const {
    const KeyRange& range = piece.request.range;
    return index < range.count && is_visible(seen(), range.first + index - range.context_len);
  }
  __device__ __forceinline__ int entry_of(int position) const {
    const int shift = piece.page_shift;
    return shift >= 0 ? position >> shift : position / piece.request.table.page_size;
  }

  // A page's number takes a trip to L2: fetched one tile before it is needed.
  __device__ __forceinline__ void fetch_page(int tile, unsigned thread) {
    const int index = tile * KEYS + thread / LOADERS;
    if (tile < piece.last_tile && index < piece.request.range.count)
      page_ahead = piece.entries[entry_of(piece.first + index)];
  }

  // The common tile: context in a power-of-two page, one buffer for ckv and kpe, aligned. Says whether it was one.
  __device__ __forceinline__ bool load_plain_keys(int tile, int stage, unsigned thread) const {
    if ((tile + 1) * KEYS > piece.plain_keys) return false;
    const int key = thread / LOADERS, part = thread % LOADERS;
    const int position = piece.first + tile * KEYS + key;
    const int shift = piece.page_shift;
    const int page = min(max(page_ahead, 0), piece.last_page);
    const int slot = position & ((1 << shift) - 1);
    const long long offset = (long long)page * piece.page_stride + slot * piece.slot_stride + 8 * part;
    const T* of_ckv = piece.ckv + offset;
    const T* of_kpe = piece.kpe + offset;
    const SharedAddress at = shared_address(keys(stage) + key * PITCH) + 16 * part;
#pragma unroll
    for (int i = 0; i < C / 8 / LOADERS; ++i) copy_async_16(at + 16 * LOADERS * i, of_ckv + 8 * LOADERS * i, true);
    if (C / 8 % LOADERS != 0 && part < C / 8 % LOADERS)
      copy_async_16(at + 16 * (C / 8 / LOADERS * LOADERS), of_ckv + 8 * (C / 8 / LOADERS * LOADERS), true);
#pragma unroll
    for (int i = 0; i < R / 8 / LOADERS; ++i)
      copy_async_16(at + 2 * C + 16 * LOADERS * i, of_kpe + 8 * LOADERS * i, true);
    if (R / 8 % LOADERS != 0 && part < R / 8 % LOADERS)
      copy_async_16(at + 2 * C + 16 * (R / 8 / LOADERS * LOADERS), of_kpe + 8 * (R / 8 / LOADERS * LOADERS), true);
    return true;
  }

  // Key tile `tile` into a stage, one group of copies; keys that no row sees become zeros.
  __device__ __forceinline__ void load_keys(int tile, int stage) {
    if (tile < piece.last_tile) {
      const unsigned thread = value_thread();
      if (!load_plain_keys(tile, stage, thread)) {
        const int index = tile * KEYS + thread / LOADERS;
        const bool is_read = is_seen(index);
        const T* of_ckv = piece.ckv;
        const T* of_kpe = piece.kpe;
        if (is_read) {
          const int position = piece.first + index;
          const long long page = min(max(page_ahead, 0), piece.last_page);
          const int slot = position - entry_of(position) * piece.request.table.page_size;
          of_ckv += page * piece.ckv_page + slot * piece.ckv_slot;
          of_kpe += page * piece.kpe_page + slot * piece.kpe_slot;
        }
        T* to = keys(stage) + thread / LOADERS * PITCH;
        for (int unit = thread % LOADERS; unit < UNITS; unit += LOADERS)
          copy_unit(to + 8 * unit, unit < C / 8 ? of_ckv + 8 * unit : of_kpe + (8 * unit - C), is_read);
      }
      fetch_page(tile + 1, thread);
    }
    copy_async_commit();
  }
};
