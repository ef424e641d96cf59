// tree_attention/v4_scores.cuh: the score warpgroup of v4_wgmma.cu: products with the keys, and the softmax.
//
// Letters    as v4_softmax.cuh
// Work       36 products a tile: dimensions 0..255, rope, dimensions 256..511. The last 8 are under way when the
//            weights of the tile before are handed over, so that the value warpgroups have work during the softmax.
// Source     own
#pragma once

#include "tree_attention/v4_loads.cuh"
#include "tree_attention/v4_softmax.cuh"

constexpr int STEPS = 36;        // products of 16 dimensions
constexpr int FENCE_STEP = 4;    // behind which the weights of the tile before go to the async proxy
constexpr int TELL_STEPS = 8;    // still to come when they are handed over
constexpr int LAST_LATENT = 31;  // the step of dimensions 496..511, whose queries stay in shared memory

// 124 registers of queries from stage 2; the last step to shared memory, in tiles of 8 rows x 16 bytes.
__device__ __forceinline__ void take_queries(const Shared& shared, unsigned (&q)[4 * LAST_LATENT]) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, row = 16 * warp + lane % 16;
#pragma unroll
  for (int step = 0; step <= LAST_LATENT; ++step) {
    const int group = step / 4, unit = 2 * (step % 4) + lane / 16;
    unsigned a[4];
    load_matrices(a, shared.base + 2 * STAGE + group * GROUP + row * 128 + ((unit ^ row % 8) << 4));
    if (step < LAST_LATENT) {
#pragma unroll
      for (int i = 0; i < 4; ++i) q[4 * step + i] = a[i];
    } else {
      unsigned* to = reinterpret_cast<unsigned*>(shared.memory + QUERY_STEP + 512 * warp) + lane;
      to[0] = a[0];
      to[64] = a[1];
      to[32] = a[2];
      to[96] = a[3];
    }
  }
}

// Everything the score warpgroup does for one piece after another.
template <class T, bool PAIRS, bool SMALL_PAGES>
__device__ __forceinline__ void score_pieces(const Shared& shared, const Queries<T>& queries,
                                             const KeyLoader<T, SMALL_PAGES>& loader, float scale,
                                             float* __restrict__ lse, const Scratch& scratch) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, row = 16 * warp + lane / 4;
  const SharedAddress base = shared.base;
  unsigned q[4 * LAST_LATENT];
  float s[32];
  Softmax<T> softmax;
  unsigned phases = 0, count = 0;  // a bit for each stage; tiles so far
#pragma unroll 1
  for (int number = 0;; ++number) {
    int left, masked;  // tiles, and those of them from which on not all keys are seen
    {
      const Piece& piece = shared.piece(number);
      if (of_warp(piece.rows) == 0) break;
      left = of_warp(piece.last_tile - piece.first_tile);
      masked = of_warp(piece.last_tile - piece.context_len / KEYS);
      if (warp == 0 && left > 0) loader.load_first_rope(base, piece.entries, piece.first_tile);
    }
    barrier_wait(base + QUERIES, number & 1);
    take_queries(shared, q);
    fence_async_proxy();
    named_barrier(OF_SCORES, WARPGROUP);
    barrier_arrive(base + QUERIES_READ);
    softmax.begin();
    unsigned stage = 0;
    bool has_weights = false;
#pragma unroll 1
    for (; left > 0; --left, ++count) {
      const Matrix keys = rows_of(base + stage * STAGE), rope = rows_of(base + ROPE);
      barrier_wait(base + KEYS_LOADED + 16 * stage, phases >> stage & 1);
      products_fence();
#pragma unroll
      for (int i = 0; i < STEPS; ++i) {
        const int step = i < 16 ? i : i < 20 ? i + 16 : i - 4;  // 32..35 are those of rope
        if (i == FENCE_STEP) {
          fence_async_proxy();
          __syncwarp();
          products_fence();
        }
        if (i == 16) {
          barrier_wait(base + ROPE_LOADED, count & 1);
          products_fence();
        }
        if (i == 20) {
          products_commit();
          barrier_wait(base + KEYS_LOADED + 16 * stage + 8, phases >> stage & 1);
          products_fence();
        }
        if (i == STEPS - TELL_STEPS) {  // a product is issued when there is room, so about TELL_STEPS before the end
          products_commit();
          products_wait<1>();  // rope has been read
          barrier_arrive(base + (has_weights ? WEIGHTS + 8 * (count & 1 ^ 1) : ROPE_READ));
          barrier_wait(base + WEIGHTS_READ + 8 * (count & 1), count >> 1 & 1 ^ 1);
          products_fence();
        }
        if (step == LAST_LATENT)
          Warpgroup<T>::template multiply_64<PLAIN>(s, plain_rows_of(base + QUERY_STEP), keys + (7 * GROUP / 16 + 6));
        else if (step < LAST_LATENT)
          Warpgroup<T>::multiply_64(s, q[4 * step], q[4 * step + 1], q[4 * step + 2], q[4 * step + 3],
                                    keys + (step / 4 * (GROUP / 16) + step % 4 * 2), i > 0);
        else
          Warpgroup<T>::template multiply_64<SWIZZLED>(s, rope + (GROUP / 16 + step % 4 * 2), rope + step % 4 * 2);
      }
      products_commit();
      products_wait<0>();
      pin(s);
      phases ^= 1u << stage;

      bool is_marked = false;
      if (left <= masked) {
        const Piece& piece = shared.piece(number);
        const bool has_maximum[2] = {softmax.largest[0] != LOWEST, softmax.largest[1] != LOWEST};
        is_marked = hide(piece, queries.H, queries.words(), row, piece.last_tile - left, has_maximum, s);
        is_marked = named_barrier_or(OF_SCORES, WARPGROUP, is_marked);
      }
      const int buffer = count & 1;
      const SharedAddress to =
          base + WEIGHTS_AT + GROUP * buffer + (16 * warp + lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4);
      softmax.raise(s, scale, shared.factors(buffer) + row, is_marked);
      if (softmax.rounds) {  // as the maximum was: an exact product could lie far above the rounded maximum
#pragma unroll
        for (int i = 0; i < 32; ++i) s[i] = softmax.is_large(i / 2 % 2) ? s[i] * scale : s[i];
        softmax.weigh(s, softmax.is_large(0) ? 1.0f : scale, softmax.is_large(1) ? 1.0f : scale, to);
      } else {
        softmax.weigh(s, scale, scale, to);
      }
      __syncwarp();
      if (is_marked) {
        const Piece& piece = shared.piece(number);
        mark_hidden<T>(piece, queries.H, queries.words(), row, piece.last_tile - left,
                       shared.memory + WEIGHTS_AT + GROUP * buffer);
      }
      has_weights = true;
      stage = stage == 2 ? 0 : stage + 1;
    }
    fence_async_proxy();
    if (has_weights) barrier_arrive(base + WEIGHTS + 8 * (count & 1 ^ 1));
    softmax.end();
    const Piece& piece = shared.piece(number);
    named_barrier(OF_SCORES, WARPGROUP);  // the queries of the last step have been read
    const bool is_paired = PAIRS && shared.share().is_paired;
    if (lane % 4 == 0) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const int r = row + 8 * upper;
        const float total = softmax.total[upper], inverse = total == 0.0f ? 0.0f : 1.0f / total;
        shared.totals()[r] = is_paired ? make_float2(softmax.largest[upper], total) : make_float2(inverse, 0.0f);
        if (is_paired) continue;
        if (piece.slot >= 0)
          scratch.partial_score[(long long)piece.slot * TILE_ROWS + r] = softmax.score(upper);
        else if (piece.first_row + r < piece.rows)
          lse[(long long)piece.request * queries.N * queries.H + piece.first_row + r] = softmax.score(upper) * LN_2;
      }
    }
    if (is_paired) cluster_wait();
    barrier_arrive(base + TOTALS);
    if (is_paired) barrier_arrive_there(place_in_block(base + PEER_TOTALS, cluster_rank() ^ 1));
    barrier_wait(base + PIECE_KNOWN, number & 1);
  }
}
