// common/softmax_state.cuh: weights for combining normalised attention over disjoint key sets.
//
// Computes   w_i = exp2(s_i - max), out = sum w_i out_i / sum w_i, s = max + log2(sum w_i)
// Numerics   base 2 inside, nats at the border; an empty set has s = -inf and weight 0, so that -inf - -inf never
//            occurs and (0, -inf) is the identity, except for the sign of a zero and for subnormals
// Reference  merge_states in ddtree_cupy/tree_attention/reference.py
// Source     the split reduction of FlashDecoding; the rule for empty sets is ours
#pragma once

#include "dtype.cuh"

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

// The weight of a key that a row does not see, below all others: such a key is left out, since 0 * NaN is NaN.
constexpr float HIDDEN_WEIGHT = -1.0f;

__device__ __forceinline__ bool is_hidden(float weight) { return weight < 0.0f; }

// What to subtract from a score: the largest one, or 0 when there is none.
__device__ __forceinline__ float softmax_shift(float largest) { return largest == NEGATIVE_INFINITY ? 0.0f : largest; }

__device__ __forceinline__ float state_weight(float score, float largest) {
  return score == NEGATIVE_INFINITY ? 0.0f : exp2f(score - softmax_shift(largest));
}

// log2 of a sum of weights on top of their shift; -inf for an empty set, NaN for one with a NaN
__device__ __forceinline__ float state_score(float largest, float total) {
  if (total > 0.0f) return softmax_shift(largest) + log2f(total);
  return total == 0.0f ? NEGATIVE_INFINITY : total;
}
