// tree_attention/v3_loads.cuh: how the value warps of v3_mma.cu copy queries and key tiles to shared memory.
//
// Letters    as v3_layout.cuh
// Requires   pages are clamped into the pool; keys that no row of the tile sees are never read and become zeros
// Source     own
#pragma once

#include "tree_attention/v3_layout.cuh"

template <class T, int C, int R, int KEYS, int STAGES, int HELD>
struct TileLoads : TileLayout<T, C, R, KEYS, STAGES, HELD> {
  using Layout = TileLayout<T, C, R, KEYS, STAGES, HELD>;
  using Layout::piece, Layout::keys, Layout::seen, Layout::held, Layout::queries, Layout::is_held;
  using Layout::held_before;
  static constexpr int STEPS = Layout::STEPS, PITCH = Layout::PITCH;
  static constexpr int UNITS = (C + R) / 8;               // of a key
  static constexpr int LOADERS = VALUE_THREADS / KEYS;    // threads that load one key

  int page_ahead;  // page of the thread's key in the tile to be loaded next

  __device__ __forceinline__ TileLoads(char* shared, const Piece<T>& piece) : Layout(shared, piece) {}

  // 0..255. It is read again at every use, so that no registers hold addresses that depend on it.
  __device__ __forceinline__ static unsigned value_thread() { return thread_here(); }

  // Copies one unit, or zeros unless is_read; asynchronously where rows start at multiples of 16 bytes.
  __device__ __forceinline__ static void copy_unit(T* to, const T* from, bool is_read, bool aligned) {
    if (aligned) {
      copy_async_16(shared_address(to), from, is_read);
    } else {
#pragma unroll 1
      for (int i = 0; i < 8; ++i) to[i] = is_read ? from[i] : from_float<T>(0.0f);
    }
  }

  // Where the first unit of a k-step goes in a row of `held` or of `queries`, in elements.
  __device__ __forceinline__ static constexpr int column_of(int half, int step) {
    return 16 * (is_held(step) ? half * HELD + held_before(step)
                               : half * (STEPS - HELD) + step - held_before(step));
  }

  // Loads the queries of 64 rows, as one group of copies: k-steps for registers go to `held`, the others to `queries`.
  __device__ __forceinline__ void load_queries(const T* nope, long long nope_node, long long nope_head, const T* pe,
                                               long long pe_node, long long pe_head) const {
    static_assert(VALUE_THREADS == 4 * TILE_ROWS, "four threads load a row: two k-steps of a half at a time");
    const unsigned thread = value_thread();
    const int row = thread / 4, part = thread % 4;
    const bool is_row = piece.first_row + row < piece.request.rows;
    const int node = is_row ? (piece.first_row + row) / piece.H : 0;
    const int head = is_row ? (piece.first_row + row) % piece.H : 0;
    nope += node * nope_node + head * nope_head + 8 * part;
    pe += node * pe_node + head * pe_head + 8 * part;
    const bool aligned = piece.aligned;
    T* to_held = held() + row * Layout::HELD_PITCH + part % 2 * 8;
    T* to_queries = queries() + row * Layout::QUERY_PITCH + part % 2 * 8;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {  // half i % 2 of line i / 2
      const int step = i / 2 * 2, half = i % 2;
      T* const even = (is_held(step) ? to_held : to_queries) + column_of(half, step);
      T* const odd = (is_held(step + 1) ? to_held : to_queries) + column_of(half, step + 1);
      const T* const from = 4 * i < C / 8 ? nope + 32 * i : pe + (32 * i - C);
      copy_unit(part < 2 ? even : odd, from, is_row && 4 * i + part < UNITS, aligned);
    }
    copy_async_commit();
  }

  __device__ __forceinline__ int entry_of(int position) const {
    const int shift = piece.plan.page_shift;
    return shift >= 0 ? position >> shift : position / piece.request.table.page_size;
  }

  // The number of a page comes from L2, so it is fetched one tile before it is needed.
  __device__ __forceinline__ void fetch_page(int tile, unsigned thread) {
    const int index = tile * KEYS + thread / LOADERS;
    if (tile < piece.plan.last_tile && index < piece.request.range.count)
      page_ahead = piece.plan.entries[entry_of(piece.plan.first + index)];
  }

  // Where a unit of the key goes; the thread loads units part, part + LOADERS, ...
  __device__ __forceinline__ T* place_of(int stage, int key, int part) const {
    return keys(stage) + key * PITCH + part / 8 * 64 + (part ^ key) % 8 * 8;
  }

  // The common tile: context only, pages of a power of two, one aligned buffer for ckv and kpe.
  __device__ __forceinline__ void load_plain_keys(const LoadPlan<T>& plan, int tile, int stage, unsigned thread) {
    const int key = thread / LOADERS, part = thread % LOADERS;
    const int position = plan.first + tile * KEYS + key;
    const int page = min(max(page_ahead, 0), plan.last_page);
    const int slot = position & ((1 << plan.page_shift) - 1);
    const long long offset = (long long)page * plan.page_stride + slot * plan.slot_stride + 8 * part;
    const T* of_ckv = plan.ckv + offset;
    const T* of_kpe = plan.kpe + offset - C;
    const SharedAddress at = shared_address(place_of(stage, key, part));
#pragma unroll
    for (int i = 0; i < UNITS; i += LOADERS)
      if (i + LOADERS <= UNITS || i + part < UNITS)
        copy_async_16(at + 16 * i, (i + part < C / 8 ? of_ckv : of_kpe) + 8 * i, true);
    if ((tile + 2) * KEYS <= plan.plain_keys)
      page_ahead = plan.entries[(position + KEYS) >> plan.page_shift];
    else
      fetch_page(tile + 1, thread);
  }

  // Any tile; keys that no row sees become zeros.
  __device__ __forceinline__ void load_any_keys(int tile, int stage, unsigned thread) {
    const KeyRange& range = piece.request.range;
    const int key = thread / LOADERS, part = thread % LOADERS, index = tile * KEYS + key;
    const int position = piece.plan.first + index;
    const bool is_read = index < range.count && is_visible(seen(), position - range.context_len);
    const T* of_ckv = piece.plan.ckv;
    const T* of_kpe = piece.plan.kpe;
    if (is_read) {
      const long long page = min(max(page_ahead, 0), piece.plan.last_page);
      const int slot = position - entry_of(position) * piece.request.table.page_size;
      of_ckv += page * piece.strides.ckv_page + slot * piece.strides.ckv_slot;
      of_kpe += page * piece.strides.kpe_page + slot * piece.strides.kpe_slot;
    }
    T* to = place_of(stage, key, part);
    for (int i = 0; i + part < UNITS; i += LOADERS) {
      const int unit = i + part;
      copy_unit(to + 8 * i, unit < C / 8 ? of_ckv + 8 * unit : of_kpe + (8 * unit - C), is_read, piece.aligned);
    }
    fetch_page(tile + 1, thread);
  }

  // Loads key tile `tile` into a stage, as one group of copies.
  __device__ __forceinline__ void load_keys(int tile, int stage) {
    const LoadPlan<T> plan = piece.plan;
    const unsigned thread = value_thread();
    if (tile < plan.last_tile) {
      if ((tile + 1) * KEYS <= plan.plain_keys)
        load_plain_keys(plan, tile, stage, thread);
      else
        load_any_keys(tile, stage, thread);
    }
    copy_async_commit();
  }
};
