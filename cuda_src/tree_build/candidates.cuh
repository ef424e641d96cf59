// tree_build/candidates.cuh: the candidates that a tree is built from, what bounds it, and the score of a child.
//
// Computes   score(child) = score(parent) + (logit - lse of its depth), in float64 and in this order
// Numerics   unfused, so that scores are those of the reference; float32 subnormals are widened exactly although -ftz
//            is on
// Source     DDTree (arXiv 2604.12989); the order of operations is ours
#pragma once

#include "common/ordered.cuh"
#include "common/warp.cuh"

constexpr int WIDTHS = 256;
constexpr int BAD_ROW = 1;  // bit 0 of status

// What bounds the tree, by value.
struct Limits {
  double min_path_score;
  int max_depth;
  int spine;
  int widths[WIDTHS];  // most children of a node by its depth, the last entry for all depths from 255 on
};

// float64 of a float32, subnormals included (the conversion itself would flush them)
__device__ __forceinline__ double widen(float x) {
  const int bits = __float_as_int(x);
  if (bits & 0x7f800000) return (double)x;
  const double magnitude = __dmul_rn((double)(bits & 0x007fffff), 0x1p-149);
  return bits < 0 ? -magnitude : magnitude;
}

// The candidates of a batch, by value; then those of one request.
struct Candidates {
  const int* candidate_ids;       // [B, L, K]
  const float* candidate_logits;  // [B, L, K]
  const float* candidate_lse;     // [B, L]
  int L, K;

  __device__ __forceinline__ void choose(long long request) {
    candidate_ids += request * L * K;
    candidate_logits += request * L * K;
    candidate_lse += request * L;
  }

  __device__ __forceinline__ long long place(int depth, int rank) const { return (long long)depth * K + rank; }

  __device__ __forceinline__ double log_probability(int depth, int rank) const {
    return __dsub_rn(widen(candidate_logits[place(depth, rank)]), widen(candidate_lse[depth]));
  }
};
