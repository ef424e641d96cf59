// tree_attention/v4_loads.cuh: queries and key tiles of v4_wgmma.cu on their way to shared memory.
//
// Letters    as v4_layout.cuh
// Requires   rows of the cache start at multiples of 16 bytes; pages of a multiple of 64 keys, or with SMALL_PAGES of
//            8, 16 or 32; boxes of the maps are [4 groups or, with SMALL_PAGES, 1][1 page][min(64, page_size) keys][64]
// Source     own
#pragma once

#include "tree_attention/v4_layout.cuh"

// Tensor copies of key tiles, by the lanes of one warp: with SMALL_PAGES each lane brings one box of one page, else
// lane 0 all of a half.
template <class T, bool SMALL_PAGES>
struct KeyLoader {
  const KeyMaps& maps;
  const Cache<const T>& cache;

  __device__ __forceinline__ int lane() const { return thread_here() % 32; }
  __device__ __forceinline__ static const TensorMap* map(const unsigned char* bytes) {
    return reinterpret_cast<const TensorMap*>(bytes);
  }
  __device__ __forceinline__ int pages_per_tile() const {
    return SMALL_PAGES ? KEYS >> (__ffs(cache.page_size) - 1) : 1;
  }
  __device__ __forceinline__ bool is_active(int groups) const {
    return SMALL_PAGES ? lane() < groups * pages_per_tile() : lane() == 0;
  }
  // an entry of the page table, clamped into the pool
  __device__ __forceinline__ int page_at(const int* entries, int index) const {
    return min(max(entries[index], 0), cache.num_pages - 1);
  }
  // with SMALL_PAGES: the page of this lane's box
  __device__ __forceinline__ int small_page(const int* entries, int tile) const {
    const int pages = pages_per_tile();
    return page_at(entries, min(tile * pages + lane() % pages, cache.max_pages - 1));
  }
  // the first key of this lane's box within its tile
  __device__ __forceinline__ int offset() const {
    return SMALL_PAGES ? lane() % pages_per_tile() * cache.page_size : 0;
  }

  __device__ __forceinline__ void begin(Cursor& cursor, int tile) const {
    const int tiles = cache.page_size / KEYS;
    if (SMALL_PAGES || lane() > 0) return;
    cursor.index = tile / tiles;
    cursor.slot = tile % tiles * KEYS;
  }
  // The page, and the first slot, of the tile that `load` brings next.
  __device__ __forceinline__ int2 next_place(const Cursor& cursor, const int* entries, int tile) const {
    if (SMALL_PAGES) return make_int2(small_page(entries, tile), 0);
    return lane() == 0 ? make_int2(page_at(entries, cursor.index), cursor.slot) : make_int2(0, 0);
  }
  // Half of a tile from the place that next_place has found.
  __device__ __forceinline__ void load(Cursor& cursor, int2 place, SharedAddress to, int half,
                                       SharedAddress loaded) const {
    if (lane() == 0) barrier_arrive_expecting(loaded, HALF);
    const int page = place.x, slot = place.y;
    if (SMALL_PAGES) {
      const int group = lane() / pages_per_tile();
      const SharedAddress box = to + group * GROUP + offset() * 128;
      if (is_active(4)) copy_box_4d(box, map(maps.ckv), 0, 0, page, 4 * half + group, loaded);
    } else if (lane() == 0) {
      const int next = slot + KEYS;
      copy_box_4d(to, map(maps.ckv), 0, slot, page, 4 * half, loaded);
      cursor.page = page;
      cursor.page_slot = slot;
      cursor.slot = next == cache.page_size ? 0 : next;
      cursor.index += next == cache.page_size;
    }
  }
  __device__ __forceinline__ void load_rope(SharedAddress base, int page, int slot) const {
    if (lane() == 0) barrier_arrive_expecting(base + ROPE_LOADED, GROUP);
    if (is_active(1)) copy_box_3d(base + ROPE + offset() * 128, map(maps.kpe), 0, slot, page, base + ROPE_LOADED);
  }
  // Of the last tile that this cursor has loaded.
  __device__ __forceinline__ void follow_with_rope(const Cursor& cursor, SharedAddress base, const int* entries,
                                                   int tile) const {
    if (SMALL_PAGES)
      load_rope(base, small_page(entries, tile), 0);
    else if (lane() == 0)
      load_rope(base, cursor.page, cursor.page_slot);
  }
  // Of any tile.
  __device__ __forceinline__ void load_first_rope(SharedAddress base, const int* entries, int tile) const {
    const int tiles = cache.page_size / KEYS;
    if (SMALL_PAGES)
      load_rope(base, small_page(entries, tile), 0);
    else if (lane() == 0)
      load_rope(base, page_at(entries, tile / tiles), tile % tiles * KEYS);
  }
};

// The 16 bytes at `from`, which may start anywhere; elements times `sign`, unless that is 1. Zeros unless is_read.
template <class T>
__device__ __forceinline__ void copy_scaled_16(char* to, const T* from, bool is_read, float sign) {
  T* const elements = reinterpret_cast<T*>(to);
#pragma unroll 1
  for (int i = 0; i < 8; ++i) {
    const T x = is_read ? from[i] : from_float<T>(0.0f);
    elements[i] = sign == 1.0f ? x : from_float<T>(to_float(x) * sign);
  }
}

// Rows 16 * warp .. + 15 of the row tile, UNITS lanes to a row: 16 bytes a lane to where `place` says. Rows that the
// request cannot have become 0.
template <int UNITS, class T, class Place>
__device__ __forceinline__ void load_rows(const Shared& shared, const T* base, long long node_stride,
                                          long long head_stride, int H, int first_row, int num_rows, bool aligned,
                                          float sign, Place place) {
  constexpr int ROWS = 32 / UNITS, LOADS = TILE_ROWS / 4 / ROWS;  // of a warp at once; of a thread
  const int lane = threadIdx.x % 32, warp = threadIdx.x % WARPGROUP / 32, unit = lane % UNITS;
  const int start = 16 * warp + lane / UNITS * LOADS;  // a thread has consecutive rows
  int head = (first_row + start) % H;
  const T* from = base + (first_row + start) / H * node_stride + head * head_stride + 8 * unit;
  const long long wrap = node_stride - H * head_stride;
  const auto each = [&](auto copy) {
    copy(place(start, unit), first_row + start < num_rows);
#pragma unroll 1
    for (int row = start + 1; row < start + LOADS; ++row) {
      ++head;
      from += head_stride + (head == H ? wrap : 0);
      head = head == H ? 0 : head;
      copy(place(row, unit), first_row + row < num_rows);
    }
  };
  if (aligned && sign == 1.0f) {
    each([&](int to, bool is_row) { copy_async_16(shared.base + to, from, is_row); });
  } else {
    each([&](int to, bool is_row) { copy_scaled_16(shared.memory + to, from, is_row, sign); });
  }
}

// A half of the latent dimensions of 64 queries into stage 2, and by value warpgroup 0 the rope dimensions, times
// `sign`: that of the scale, which is positive afterwards, or 0 for a scale of 0.
template <class T>
__device__ __forceinline__ void load_queries(const Shared& shared, const Queries<T>& queries, const Piece& piece,
                                             int half, bool aligned, float sign) {
  const int num_rows = queries.N * queries.H;
  load_rows<32>(shared, queries.nope(piece.request, 0, 0) + half * (C / 2), queries.nope_node_stride,
                queries.nope_head_stride, queries.H, piece.first_row, num_rows, aligned, sign, [&](int row, int unit) {
                  return 2 * STAGE + half * HALF + unit / 8 * GROUP + row * 128 + (unit % 8 ^ row % 8) * 16;
                });
  if (half == 0)
    load_rows<8>(shared, queries.pe(piece.request, 0, 0), queries.pe_node_stride, queries.pe_head_stride, queries.H,
                 piece.first_row, num_rows, aligned, sign,
                 [](int row, int unit) { return QUERY_ROPE + row * 128 + (unit ^ row % 8) * 16; });
  copy_async_commit();
}
