// tree_attention/v3_loads.cuh: queries and key tiles of v3_mma.cu, from global to shared memory.
//
// Letters    as v3_layout.cuh
// Requires   pages are clamped into the pool; keys that no row of the tile sees are never read and become zeros
// Source     own
#pragma once

#include "tree_attention/v3_layout.cuh"

template <class T, int C, int R, int KEYS, int STAGES>
struct TileLoads : TileLayout<T, C, R, KEYS, STAGES> {
  using Layout = TileLayout<T, C, R, KEYS, STAGES>;
  using Layout::piece, Layout::shared, Layout::lane, Layout::group, Layout::quarter, Layout::keys, Layout::seen;
  static constexpr int STEPS = Layout::STEPS, PITCH = Layout::PITCH, LOADERS = Layout::LOADERS;

  unsigned query[2][STEPS][4];  // A fragments: [16 rows][k-step]
  int page_ahead;               // page of the thread's key in the tile to be loaded next

  __device__ __forceinline__ TileLoads(char* shared, const Piece<T>& piece) : Layout(shared, piece) {}

  // A row of C + R elements into shared memory by `loaders` threads, of which this is number `part`; zeros unless
  // is_read. Rows that start at multiples of 16 bytes are copied asynchronously.
  template <int LOADERS_OF_ROW>
  __device__ __forceinline__ void copy_row(T* to, const T* first, const T* second, bool is_read, bool aligned) const {
    const int part = threadIdx.x % LOADERS_OF_ROW;
    if (aligned) {
      const SharedAddress at = shared_address(to) + 16 * part;
#pragma unroll
      for (int i = 0; i < (C / 8 + LOADERS_OF_ROW - 1) / LOADERS_OF_ROW; ++i)
        if (C / 8 % LOADERS_OF_ROW == 0 || part + LOADERS_OF_ROW * i < C / 8)
          copy_async_16(at + 16 * LOADERS_OF_ROW * i, first + 8 * (part + LOADERS_OF_ROW * i), is_read);
#pragma unroll
      for (int i = 0; i < (R / 8 + LOADERS_OF_ROW - 1) / LOADERS_OF_ROW; ++i)
        if (R / 8 % LOADERS_OF_ROW == 0 || part + LOADERS_OF_ROW * i < R / 8)
          copy_async_16(at + 2 * C + 16 * LOADERS_OF_ROW * i, second + 8 * (part + LOADERS_OF_ROW * i), is_read);
    } else {
      for (int c = part; c < C + R; c += LOADERS_OF_ROW)
        to[c] = is_read ? (c < C ? first[c] : second[c - C]) : from_float<T>(0.0f);
    }
  }

  // The queries of 64 rows through shared memory into A fragments; all threads call together.
  __device__ __forceinline__ void load_queries(const T* nope, long long nope_node, long long nope_head, const T* pe,
                                               long long pe_node, long long pe_head) {
    T* rows = reinterpret_cast<T*>(shared);
    const int row = piece.first_row + threadIdx.x / 4;
    const bool is_read = row < piece.request.rows;
    const int node = is_read ? row / piece.H : 0, head = is_read ? row % piece.H : 0;
    copy_row<4>(rows + threadIdx.x / 4 * PITCH, nope + node * nope_node + head * nope_head,
                pe + node * pe_node + head * pe_head, is_read, piece.aligned);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    const SharedAddress at = shared_address(rows + (32 * group() + lane() % 16) * PITCH + lane() / 16 * 8);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int k = quarter() * STEPS + step;
#pragma unroll
      for (int m = 0; m < 2; ++m)
        if (k < (C + R) / 16) {
          load_matrices(query[m][step], at + 2 * (16 * m * PITCH + 16 * k));
        } else {
          for (int i = 0; i < 4; ++i) query[m][step][i] = 0;
        }
    }
    __syncthreads();
  }

  // Position of the thread's key in a key tile, -1 where no row sees one.
  __device__ __forceinline__ int position_in(int tile) const {
    const KeyRange& range = piece.request.range;
    const int index = tile * KEYS + threadIdx.x / LOADERS;
    const int position = range.first + index;
    return index < range.count && is_visible(seen(), position - range.context_len) ? position : -1;
  }
  __device__ __forceinline__ int entry_of(int position) const {
    const int shift = piece.page_shift;
    return shift >= 0 ? position >> shift : position / piece.request.table.page_size;
  }
  // The common tile: context in a power-of-two page, one buffer for ckv and kpe, aligned. Says whether it was one.
  __device__ __forceinline__ bool load_plain_keys(int tile) {
    if ((tile + 1) * KEYS > piece.plain_keys) return false;
    const int key = threadIdx.x / LOADERS, part = threadIdx.x % LOADERS;
    const int position = piece.first + tile * KEYS + key;
    const int shift = piece.page_shift;
    const int page = min(max(page_ahead, 0), piece.last_page);
    const int slot = position & ((1 << shift) - 1);
    const long long offset = (long long)page * piece.page_stride + slot * piece.slot_stride + 8 * part;
    const T* of_ckv = piece.ckv + offset;
    const T* of_kpe = piece.kpe + offset;
    const SharedAddress at = shared_address(keys(tile) + key * PITCH) + 16 * part;
#pragma unroll
    for (int i = 0; i < C / 8 / LOADERS; ++i) copy_async_16(at + 16 * LOADERS * i, of_ckv + 8 * LOADERS * i, true);
    if (C / 8 % LOADERS != 0 && part < C / 8 % LOADERS)
      copy_async_16(at + 16 * (C / 8 / LOADERS * LOADERS), of_ckv + 8 * (C / 8 / LOADERS * LOADERS), true);
#pragma unroll
    for (int i = 0; i < R / 8 / LOADERS; ++i)
      copy_async_16(at + 2 * C + 16 * LOADERS * i, of_kpe + 8 * LOADERS * i, true);
    if (R / 8 % LOADERS != 0 && part < R / 8 % LOADERS)
      copy_async_16(at + 2 * C + 16 * (R / 8 / LOADERS * LOADERS), of_kpe + 8 * (R / 8 / LOADERS * LOADERS), true);
    if ((tile + 2) * KEYS <= piece.plain_keys)
      page_ahead = piece.entries[(position + KEYS) >> shift];
    else
      fetch_page(tile + 1);
    return true;
  }

  // A page's number takes a trip to L2: fetched one tile before it is needed.
  __device__ __forceinline__ void fetch_page(int tile) {
    const int position = tile < piece.last_tile ? position_in(tile) : -1;
    if (position >= 0) page_ahead = piece.request.table.entries[entry_of(position)];
  }

  // Key tile `tile` into its stage, one group of copies; keys that no row sees become zeros.
  __device__ __forceinline__ void load_keys(int tile) {
    if (tile < piece.last_tile && !load_plain_keys(tile)) {
      const int position = position_in(tile);
      const bool is_read = position >= 0;
      const T* of_ckv = piece.ckv;
      const T* of_kpe = piece.kpe;
      if (is_read) {
        const long long page = min(max(page_ahead, 0), piece.request.table.num_pages - 1);
        const int slot = position - entry_of(position) * piece.request.table.page_size;
        of_ckv += page * piece.ckv_page + slot * piece.ckv_slot;
        of_kpe += page * piece.kpe_page + slot * piece.kpe_slot;
      }
      copy_row<LOADERS>(keys(tile) + threadIdx.x / LOADERS * PITCH, of_ckv, of_kpe, is_read, piece.aligned);
      fetch_page(tile + 1);
    }
    copy_async_commit();
  }
};
