// tree_attention/v4_values.cuh: the value warpgroups of v4_wgmma.cu: loads, weighted sums, results.
//
// Letters    as v4_layout.cuh; a thread has rows r = 16 * warp + lane / 4 and r + 8 of the row tile, and of each the
//            columns 8j + 2p and 8j + 2p + 1 of its half, p = lane % 4
// Outputs    a whole row tile to out; else to partial_out, in a slot float4[half][j][thread] as the registers are
// Source     own
#pragma once

#include "tree_attention/v4_loads.cuh"
#include "tree_attention/v4_pair.cuh"
#include "tree_attention/v4_results.cuh"
#include "tree_attention/v4_schedule.cuh"

__device__ __forceinline__ void scale_rows(float (&o)[128], float lower, float upper) {
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    o[4 * j] *= lower;
    o[4 * j + 1] *= lower;
    o[4 * j + 2] *= upper;
    o[4 * j + 3] *= upper;
  }
}

// The keys that some row does not see, in a tile where they may hold NaN or inf: their products are added one by one
// for the rows that see them, and this half of the keys becomes 0. All threads of the warpgroup call together.
template <class T>
__device__ __forceinline__ void set_apart(const char* weights, char* values, int row, int barrier, float (&o)[128]) {
  const int lane = threadIdx.x % 32, p = lane % 4;
  unsigned signs = 0;  // of the weights of keys 2 * lane and 2 * lane + 1
#pragma unroll 4
  for (int r = 0; r < TILE_ROWS; ++r)
    signs |= *reinterpret_cast<const unsigned*>(weights + r * 128 + ((lane / 4 ^ r % 8) << 4) + lane % 4 * 4);
  const unsigned even = __ballot_sync(FULL_WARP, signs >> 15 & 1), odd = __ballot_sync(FULL_WARP, signs >> 31);
#pragma unroll 1
  for (int key = 0; key < KEYS; ++key) {
    if (!((key % 2 ? odd : even) >> key / 2 & 1)) continue;
    const int at = row * 128 + ((key / 8 ^ row % 8) << 4) + key % 8 * 2;  // of row + 8: 1,024 bytes further
    const float lower = to_float(*reinterpret_cast<const T*>(weights + at));
    const float upper = to_float(*reinterpret_cast<const T*>(weights + at + 1024));
    const char* const of_key = values + key * 128 + 4 * p;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const T* v = reinterpret_cast<const T*>(of_key + j / 8 * GROUP + ((j % 8 ^ key % 8) << 4));
      const float low = to_float(v[0]), high = to_float(v[1]);
      if (!is_hidden(lower)) {
        o[4 * j] = fmaf(lower, low, o[4 * j]);
        o[4 * j + 1] = fmaf(lower, high, o[4 * j + 1]);
      }
      if (!is_hidden(upper)) {
        o[4 * j + 2] = fmaf(upper, low, o[4 * j + 2]);
        o[4 * j + 3] = fmaf(upper, high, o[4 * j + 3]);
      }
    }
  }
  named_barrier(barrier, WARPGROUP);
#pragma unroll 1
  for (int key = threadIdx.x % WARPGROUP / 32; key < KEYS; key += 4)
    if ((key % 2 ? odd : even) >> key / 2 & 1)
      *reinterpret_cast<uint4*>(values + lane / 8 * GROUP + key * 128 + lane % 8 * 16) = make_uint4(0, 0, 0, 0);
  fence_async_proxy();
  named_barrier(barrier, WARPGROUP);
}

// Keys of a tile that are not part of the call may hold anything: this half of them becomes 0.
__device__ __forceinline__ void clear_rows(char* values, int first, int last) {
#pragma unroll 1
  for (int i = threadIdx.x % WARPGROUP; i < (last - first) * 32; i += WARPGROUP)
    *reinterpret_cast<uint4*>(values + i % 32 / 8 * GROUP + (first + i / 32) * 128 + i % 8 * 16) =
        make_uint4(0, 0, 0, 0);
}

// Sums that were folded away, of one thread: what they are relative to, and 32 float4 that lie 128 apart.
struct Carry {
  float2* scale;
  float4* sums;

  __device__ __forceinline__ explicit Carry(float* carries) {
    float* const of_block = carries + (long long)blockIdx.x * CARRY;
    scale = reinterpret_cast<float2*>(of_block + TILE_ROWS * C) + threadIdx.x;
    sums = reinterpret_cast<float4*>(of_block) + threadIdx.x / WARPGROUP * 32 * WARPGROUP + threadIdx.x % WARPGROUP;
  }
  __device__ __forceinline__ void shrink(float lower, float upper) const {
    *scale = make_float2(scale->x * lower, scale->y * upper);
  }
  __device__ __forceinline__ void fold(float (&o)[128], bool is_first) const {
    const float2 f = is_first ? make_float2(0.0f, 0.0f) : *scale;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      float4 v = is_first ? float4{} : sums[WARPGROUP * j];
      v.x = fmaf(v.x, f.x, o[4 * j]);
      v.y = fmaf(v.y, f.x, o[4 * j + 1]);
      v.z = fmaf(v.z, f.y, o[4 * j + 2]);
      v.w = fmaf(v.w, f.y, o[4 * j + 3]);
      sums[WARPGROUP * j] = v;
    }
    *scale = make_float2(1.0f, 1.0f);
  }
  __device__ __forceinline__ void unfold(float (&o)[128]) const {
    const float2 f = *scale;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const float4 v = sums[WARPGROUP * j];
      o[4 * j] = fmaf(v.x, f.x, o[4 * j]);
      o[4 * j + 1] = fmaf(v.y, f.x, o[4 * j + 1]);
      o[4 * j + 2] = fmaf(v.z, f.y, o[4 * j + 2]);
      o[4 * j + 3] = fmaf(v.w, f.y, o[4 * j + 3]);
    }
  }
};

// Everything a value warpgroup does for one piece after another.
template <class T, bool PAIRS, bool SMALL_PAGES>
__device__ __forceinline__ void weigh_pieces(const Shared& shared, const Tables& tables, const Queries<T>& queries,
                                             const KeyLoader<T, SMALL_PAGES>& loader, bool aligned, float sign,
                                             T* __restrict__ out, float* __restrict__ lse, const Scratch& scratch) {
  const int half = threadIdx.x / WARPGROUP;
  const bool loads = threadIdx.x % WARPGROUP < 32, loads_rope = loads && half == 1;
  const SharedAddress base = shared.base;
  const auto row = [] { return thread_here() % WARPGROUP / 32 * 16 + thread_here() % 32 / 4; };
  float o[128];
  unsigned count = 0;  // tiles so far
#pragma unroll 1
  for (int number = 0;; ++number) {
    const Piece& piece = shared.piece(number);
    if (of_warp(piece.rows) == 0) break;
    const int last = of_warp(piece.last_tile);
    const auto load = [&](int stage, int2 place) {
      loader.load(shared.cursor(half), place, base + stage * STAGE + half * HALF, half,
                  base + KEYS_LOADED + 16 * stage + 8 * half);
    };
    load_queries(shared, queries, piece, half, aligned, sign);
    if (loads) {
      const int first = piece.first_tile;
      loader.begin(shared.cursor(half), first);
      for (int i = 0; i < 2; ++i)
        if (first + i < last) load(i, loader.next_place(shared.cursor(half), piece.entries, first + i));
    }
    copy_async_wait<0>();
    fence_async_proxy();
    barrier_arrive(base + QUERIES);
    if (loads) {
      const int first = piece.first_tile;
      if (first + 2 < last) {
        const int2 place = loader.next_place(shared.cursor(half), piece.entries, first + 2);
        barrier_wait(base + QUERIES_READ, number & 1);
        load(2, place);
      }
      if (half == 1 && first < last) {  // rope of the second tile; that of later tiles follows the weights in the loop
        barrier_wait(base + ROPE_READ, number & 1);
        if (first + 1 < last) loader.load_first_rope(base, piece.entries, first + 1);
      }
    }
    if (threadIdx.x / 32 == 1) {  // while there are no weights yet, and all threads know this piece
      barrier_wait(base + QUERIES_READ, number & 1);
      find_piece(tables, queries, shared.share(), shared.piece(number + 1), scratch.cuts);
      __syncwarp();
      barrier_arrive(base + PIECE_KNOWN);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 128; ++i) o[i] = 0.0f;
    int stage = 0;
#pragma unroll 1
    for (int tile = of_warp(piece.first_tile); tile < last; ++tile, ++count) {
      const int buffer = count & 1;
      int2 place = make_int2(0, 0);
      if (loads && last - tile > 3) place = loader.next_place(shared.cursor(half), piece.entries, tile + 3);
      barrier_wait(base + WEIGHTS + 8 * buffer, count >> 1 & 1);
      bool adds = tile > piece.first_tile && (last - tile) % FOLD_TILES != 0;
      const float lower = shared.factors(buffer)[row()], upper = shared.factors(buffer)[row() + 8];
      bool is_marked = false;
      if (__any_sync(FULL_WARP, lower != 1.0f || upper != 1.0f)) {
        is_marked = __float_as_int(lower) < 0;
        if (adds) scale_rows(o, fabsf(lower), fabsf(upper));
        if ((last - piece.first_tile - 1) / FOLD_TILES > (last - tile - 1) / FOLD_TILES)
          Carry(scratch.carries).shrink(fabsf(lower), fabsf(upper));
      }
      if (tile * KEYS < piece.first_key || (tile + 1) * KEYS > piece.end_key) {
        char* const values = shared.memory + stage * STAGE + half * HALF;
        clear_rows(values, 0, min(max(piece.first_key - tile * KEYS, 0), KEYS));
        clear_rows(values, min(max(piece.end_key - tile * KEYS, 0), KEYS), KEYS);
        fence_async_proxy();
        named_barrier(OF_VALUES + half, WARPGROUP);
      }
      if (is_marked) {
        if (!adds) {
#pragma unroll
          for (int i = 0; i < 128; ++i) o[i] = 0.0f;
        }
        adds = true;
        set_apart<T>(shared.memory + WEIGHTS_AT + GROUP * buffer, shared.memory + stage * STAGE + half * HALF, row(),
                     OF_VALUES + half, o);
      }
      pin(o);
      const Matrix weights = rows_of(base + WEIGHTS_AT + GROUP * buffer);
      const Matrix values = columns_of(base + stage * STAGE + half * HALF);
      products_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) Warpgroup<T>::multiply_256(o, weights + 2 * k, values + 128 * k, k > 0 || adds);
      products_commit();
      if (loads_rope && last - tile > 2) loader.follow_with_rope(shared.cursor(half), base, piece.entries, tile + 2);
      __syncwarp();
      products_wait<0>();
      pin(o);
      barrier_arrive(base + WEIGHTS_READ + 8 * buffer);
      named_barrier(OF_VALUES + half, WARPGROUP);  // all warps have read this half of the stage
      if (loads && last - tile > 3) load(stage, place);
      __syncwarp();
      if ((last - tile) % FOLD_TILES == 1 && last - tile > 1)
        Carry(scratch.carries).fold(o, (last - piece.first_tile - 1) / FOLD_TILES == (last - tile - 1) / FOLD_TILES);
      stage = stage == 2 ? 0 : stage + 1;
    }
    if (last - piece.first_tile > FOLD_TILES) Carry(scratch.carries).unfold(o);

    const int rows = piece.rows - piece.first_row;
    const long long first_row = (long long)piece.request * queries.N * queries.H + piece.first_row;
    T* const to = out + first_row * C + C / 2 * half;
    if (PAIRS && shared.share().is_paired) {
      exchange_halves<T>(shared, o, half, to, rows, lse + first_row);
      barrier_wait(base + PIECE_KNOWN, number & 1);
      continue;
    }
    barrier_wait(base + TOTALS, number & 1);
    const float factor[2] = {shared.totals()[row()].x, shared.totals()[row() + 8].x};
    if (piece.slot >= 0) {
      float4* const part = reinterpret_cast<float4*>(scratch.partial_out) +
                           (long long)piece.slot * (TILE_ROWS * C / 4) + half * 32 * WARPGROUP +
                           thread_here() % WARPGROUP;
#pragma unroll
      for (int j = 0; j < 32; ++j)
        part[WARPGROUP * j] = make_float4(o[4 * j] * factor[0], o[4 * j + 1] * factor[0], o[4 * j + 2] * factor[1],
                                          o[4 * j + 3] * factor[1]);
    } else {
      store_rows<T>(o, factor, to, rows);
    }
    named_barrier(OF_VALUES + half, WARPGROUP);  // this half of the stages has been read
    barrier_wait(base + PIECE_KNOWN, number & 1);
  }
}
