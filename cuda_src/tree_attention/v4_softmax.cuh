// tree_attention/v4_softmax.cuh: who sees which key, and the softmax, of the score warpgroup of v4_wgmma.cu.
//
// Letters    as v4_layout.cuh; a thread has rows r = 16 * warp + lane / 4 and r + 8 of the row tile, and of each the
//            keys 8j + 2p and 8j + 2p + 1 of a key tile, p = lane % 4
// Numerics   base 2; `largest` may lag behind by STALE_BY. A maximum is in use from the first tile on, as the lowest
//            float, so that nothing is ever subtracted from itself at infinity. Rows do not depend on each other.
// Source     own; the stale maximum after FlashAttention 4
#pragma once

#include "tree_attention/v4_layout.cuh"

constexpr float LOWEST = -3.402823466e38f;

// 32 keys from position `first` on, one bit each: whether a key is part of the call, and whether a node also sees it.
__device__ __forceinline__ unsigned keys_of_call(const Piece& piece, int first) {
  const int before = piece.first_key - first, rest = piece.end_key - first;
  return (before > 0 ? before < 32 ? ~0u << before : 0 : ~0u) & (rest < 32 ? rest > 0 ? ~(~0u << rest) : 0 : ~0u);
}
__device__ __forceinline__ unsigned keys_seen(const Piece& piece, int H, int W, int row, int first) {
  const int of_request = min(piece.first_row + row, piece.rows - 1);
  const unsigned seen = visible_word(piece.bits + (long long)(of_request / H) * W, W, first - piece.context_len);
  return piece.first_row + row < piece.rows ? seen & keys_of_call(piece, first) : 0;
}

// Sets -inf for hidden keys. Returns whether one of them may hold NaN or inf: the product of a row that hides it is
// then not finite. So are all products of a query that holds NaN or inf; such a row says nothing about the keys. It is
// known by products that are never finite, nor those of keys that it sees; `has_maximum` tells of the tiles before.
__device__ __forceinline__ bool hide(const Piece& piece, int H, int W, int row, int tile, const bool (&has_maximum)[2],
                                     float (&s)[32]) {
  constexpr unsigned HIDES = 1, FINITE = 4, SEES = 16;  // of the lower row; those of the upper one are twice as much
  unsigned notes = (has_maximum[0] ? FINITE : 0) | (has_maximum[1] ? 2 * FINITE : 0);
#pragma unroll
  for (int word = 0; word < 2; ++word) {
    const int first = tile * KEYS + 32 * word, shift = 2 * (threadIdx.x % 4);
    const unsigned of_call = keys_of_call(piece, first) >> shift;
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const unsigned seen = keys_seen(piece, H, W, row + 8 * upper, first) >> shift;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& product = s[16 * word + 4 * (i / 2) + 2 * upper + i % 2];
        const unsigned bit = 1u << (8 * (i / 2) + i % 2);
        const bool is_finite = fabsf(product) < POSITIVE_INFINITY;
        if (of_call & bit) notes |= (is_finite ? FINITE : seen & bit ? 0 : HIDES) << upper;
        if (seen & bit) notes |= SEES << upper;
        product = seen & bit ? product : NEGATIVE_INFINITY;
      }
    }
  }
  notes |= __shfl_xor_sync(FULL_WARP, notes, 1);
  notes |= __shfl_xor_sync(FULL_WARP, notes, 2);
  return (notes & (notes / FINITE | ~(notes / SEES)) & (HIDES | HIDES << 1)) != 0;
}

// Writes HIDDEN_WEIGHT for the keys of the call that two rows do not see; the upper one is the eighth after `row`.
template <class T>
__device__ __forceinline__ void mark_hidden(const Piece& piece, int H, int W, int row, int tile, char* weights) {
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const int r = row + 8 * (i % 2), first = tile * KEYS + 32 * (i / 2), p = threadIdx.x % 4;
    const unsigned hidden = keys_of_call(piece, first) & ~keys_seen(piece, H, W, r, first);
#pragma unroll 1
    for (int key = 32 * (i / 2); key < 32 * (i / 2 + 1); ++key)
      if (key / 2 % 4 == p && (hidden >> key % 32 & 1))
        reinterpret_cast<T*>(weights + r * 128 + ((key / 8 ^ r % 8) << 4))[key % 8] = from_float<T>(HIDDEN_WEIGHT);
  }
}

template <class T>
struct Softmax {
  float largest[2], total[2];  // of the two rows; `total` of the keys of this thread
  bool rounds;  // for the warp: half an ulp of some score may be more than 1

  __device__ __forceinline__ void begin() {
    largest[0] = largest[1] = LOWEST;
    total[0] = total[1] = 0.0f;
    rounds = false;
  }

  // Raises maxima that lag too far behind and writes the factors of the sums so far; all negative if `is_marked`.
  __device__ __forceinline__ void raise(const float (&s)[32], float scale, float* factors, bool is_marked) {
    float found[2];
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      float most[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        most[j] = fmaxf(fmaxf(s[8 * j + 2 * upper], s[8 * j + 2 * upper + 1]),
                        fmaxf(s[8 * j + 4 + 2 * upper], s[8 * j + 5 + 2 * upper]));
      found[upper] = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
    }
    const float above = fmaxf(fmaf(found[0], scale, -largest[0]), fmaf(found[1], scale, -largest[1]));
    const bool writes = threadIdx.x % 4 == 0;
    if (__any_sync(FULL_WARP, above > STALE_BY<T>)) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        found[upper] = fmaxf(found[upper], __shfl_xor_sync(FULL_WARP, found[upper], 1));
        found[upper] = fmaxf(found[upper], __shfl_xor_sync(FULL_WARP, found[upper], 2));
        float factor = 1.0f;
        if (fmaf(found[upper], scale, -largest[upper]) > STALE_BY<T>) {  // as above, so other rows change nothing
          factor = fast_exp2(largest[upper] - found[upper] * scale);
          total[upper] *= factor;
          largest[upper] = found[upper] * scale;
        }
        if (writes) factors[8 * upper] = is_marked ? -factor : factor;
      }
      rounds = __any_sync(FULL_WARP, is_large(0) || is_large(1));
    } else if (writes) {
      factors[0] = factors[8] = is_marked ? -1.0f : 1.0f;
    }
  }

  // Whether half an ulp of a score of this row may be more than 1.
  __device__ __forceinline__ bool is_large(int upper) const {
    return fabsf(largest[upper]) > LARGEST_EXACT && largest[upper] != LOWEST;
  }

  // Weights of the tile to shared memory, from products times the scales of the two rows: `to` is where this lane's row
  // of the first matrices goes.
  __device__ __forceinline__ void weigh(float (&s)[32], float lower, float upper, SharedAddress to) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int i = 8 * k; i < 8 * k + 8; ++i)
        s[i] = fast_exp2(fmaf(s[i], i / 2 % 2 ? upper : lower, -largest[i / 2 % 2]));
      total[0] += (s[8 * k] + s[8 * k + 1]) + (s[8 * k + 4] + s[8 * k + 5]);
      total[1] += (s[8 * k + 2] + s[8 * k + 3]) + (s[8 * k + 6] + s[8 * k + 7]);
      store_matrices(flip_address(to, 32 * k), pack2<T>(s[8 * k], s[8 * k + 1]),
                     pack2<T>(s[8 * k + 2], s[8 * k + 3]), pack2<T>(s[8 * k + 4], s[8 * k + 5]),
                     pack2<T>(s[8 * k + 6], s[8 * k + 7]));
    }
  }

  __device__ __forceinline__ void end() {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      total[upper] += __shfl_xor_sync(FULL_WARP, total[upper], 1);
      total[upper] += __shfl_xor_sync(FULL_WARP, total[upper], 2);
    }
  }
  // log2 of the total on top of its maximum
  __device__ __forceinline__ float score(int upper) const {
    return total[upper] == 0.0f ? NEGATIVE_INFINITY : largest[upper] + log2f(total[upper]);
  }
};
