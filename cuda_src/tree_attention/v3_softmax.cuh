// tree_attention/v3_softmax.cuh: the softmax of v3_mma.cu, over 16 rows of a score warp and one key tile at a time.
//
// Letters    as v3_layout.cuh; a lane has rows r = lane / 4 and r + 8 of its warp's 16, keys 2p and 2p + 1 of every 8,
//            p = lane % 4: the C fragments of the scores are the A fragments of the values
// Numerics   base 2; `largest` may lag behind by up to STALE_BY. Sums in use are relative to it, folded ones to
//            `folded_largest`.
// Source     own; the stale maximum after FlashAttention 4
#pragma once

#include "tree_attention/v3_layout.cuh"

template <class T, int C, int R, int KEYS, int STAGES, int HELD>
struct RowSoftmax : TileLayout<T, C, R, KEYS, STAGES, HELD> {
  using Layout = TileLayout<T, C, R, KEYS, STAGES, HELD>;
  using Layout::piece;
  static constexpr int BLOCKS = Layout::BLOCKS;

  float largest[2], total[2];  // of the two rows of the lane; total covers the keys of this lane only
  float folded_largest[2], folded_total[2];
  const unsigned thread;  // 0..127, read for each piece: addresses that depend on it take no registers earlier

  __device__ __forceinline__ RowSoftmax(char* shared, const Piece<T>& piece)
      : Layout(shared, piece), thread(thread_here() - FIRST_SCORE_THREAD) {}

  __device__ __forceinline__ int lane() const { return thread % 32; }
  __device__ __forceinline__ int warp() const { return thread / 32; }
  __device__ __forceinline__ int own_row() const { return 16 * warp() + lane() / 4; }  // and this + 8

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      largest[upper] = folded_largest[upper] = NEGATIVE_INFINITY;
      total[upper] = folded_total[upper] = 0.0f;
    }
  }

  // Sets -inf for the keys that the rows of the lane do not see. Returns whether one of those products was not finite,
  // which is so for every product of a key that holds NaN or inf.
  __device__ __forceinline__ bool hide(float (&s)[2 * BLOCKS][4], int tile) const {
    bool is_non_finite = false;
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const unsigned seen = Layout::keys_seen(own_row() + 8 * upper, tile) >> 2 * (lane() % 4);
#pragma unroll
      for (int n = 0; n < 2 * BLOCKS; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& product = s[n][2 * upper + i];
          if (seen >> (8 * n + i) & 1) continue;
          is_non_finite |= !(fabsf(product) < POSITIVE_INFINITY);
          product = NEGATIVE_INFINITY;
        }
    }
    return is_non_finite;
  }

  // Raises maxima that lag too far behind, and writes the factors by which sums relative to the old ones must shrink.
  __device__ __forceinline__ void raise_largest(int buffer, const float (&found)[2]) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      float factor = 1.0f;
      if (found[upper] > largest[upper] + STALE_BY) {
        factor = exp2f(largest[upper] - softmax_shift(found[upper]));
        largest[upper] = found[upper];
      }
      total[upper] *= factor;
      if (lane() % 4 == 0) Layout::factors(buffer)[own_row() + 8 * upper] = factor;
    }
  }

  // Softmax of the 16 rows of the warp over the tile: weights as A fragments, and factors for the sums so far.
  __device__ __forceinline__ void soften(int tile, bool is_masked, float scale, float (&s)[2 * BLOCKS][4]) {
    if (scale <= 0.0f) {  // so that the largest product has the largest score
      const float sign = scale < 0.0f ? -1.0f : 0.0f;
#pragma unroll
      for (int n = 0; n < 2 * BLOCKS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] *= sign;
      scale = scale < 0.0f ? -scale : 1.0f;
    }
    unsigned notes = 0;
    if (is_masked && __any_sync(FULL_WARP, hide(s, tile))) notes = HIDES_NON_FINITE;

    const int buffer = Layout::buffer(tile);
    float found[2];
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      found[upper] = NEGATIVE_INFINITY;
#pragma unroll
      for (int n = 0; n < 2 * BLOCKS; ++n)
        found[upper] = fmaxf(found[upper], fmaxf(s[n][2 * upper], s[n][2 * upper + 1]));
      found[upper] = fmaxf(found[upper], __shfl_xor_sync(FULL_WARP, found[upper], 1));
      found[upper] = fmaxf(found[upper], __shfl_xor_sync(FULL_WARP, found[upper], 2)) * scale;
    }
    const bool rescales =
        __any_sync(FULL_WARP, found[0] > largest[0] + STALE_BY || found[1] > largest[1] + STALE_BY);
    if (rescales) {
      raise_largest(buffer, found);
      notes |= HAS_FACTORS;
    }
    if (lane() == 0) Layout::notes(buffer)[warp()] = notes;

    // Where half an ulp of a score is more than 1, products are rounded before the shift, as the maximum was: an exact
    // product could lie far above the rounded maximum.
    if (fmaxf(fabsf(largest[0]), fabsf(largest[1])) > LARGEST_EXACT) {
#pragma unroll
      for (int n = 0; n < 2 * BLOCKS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] *= scale;
      scale = 1.0f;
    }
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const float shift = softmax_shift(largest[upper]);
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < 2 * BLOCKS; ++n) {
        s[n][2 * upper] = fast_exp2(fmaf(s[n][2 * upper], scale, -shift));
        s[n][2 * upper + 1] = fast_exp2(fmaf(s[n][2 * upper + 1], scale, -shift));
        sum += s[n][2 * upper] + s[n][2 * upper + 1];
      }
      total[upper] += sum;
    }
    uint4* to = Layout::weights(buffer) + warp() * BLOCKS * 32 + lane();
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      const float(&low)[4] = s[2 * block];
      const float(&high)[4] = s[2 * block + 1];
      to[32 * block] = make_uint4(pack2<T>(low[0], low[1]), pack2<T>(low[2], low[3]), pack2<T>(high[0], high[1]),
                                  pack2<T>(high[2], high[3]));
    }
  }

  // Adds `total` to the sums folded so far, and tells the value warps by what their folded sums shrink.
  __device__ __forceinline__ void fold(int tile) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const float shrink = exp2f(folded_largest[upper] - softmax_shift(largest[upper]));
      folded_total[upper] = fmaf(folded_total[upper], shrink, total[upper]);
      folded_largest[upper] = largest[upper];
      total[upper] = 0.0f;
      if (lane() % 4 == 0) Layout::shrinkage(Layout::buffer(tile))[own_row() + 8 * upper] = shrink;
    }
  }

  // The totals of whole rows, when everything is folded; values are divided by them.
  __device__ __forceinline__ void end() {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      float& sum = folded_total[upper];
      sum += __shfl_xor_sync(FULL_WARP, sum, 1);
      sum += __shfl_xor_sync(FULL_WARP, sum, 2);
      if (lane() % 4 == 0) Layout::inverse_totals()[own_row() + 8 * upper] = sum > 0.0f ? 1.0f / sum : 0.0f;
    }
  }

  // Writes the log-sum-exp of each row, times `unit`, for the first `rows` rows of the row tile.
  __device__ __forceinline__ void write_scores(float* to, int rows, float unit) const {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int row = own_row() + 8 * upper;
      if (lane() % 4 == 0 && row < rows) to[row] = state_score(largest[upper], folded_total[upper]) * unit;
    }
  }
};
