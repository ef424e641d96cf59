// tree_attention/v4_pair.cuh: two blocks of a cluster that have halved the keys of a row tile exchange their sums.
//
// Letters    as v4_layout.cuh; block r of the cluster finishes the columns of value warpgroup r
// Barriers   PEER_READY   the other block's half may be written to (its thread 0)
//            PEER_SUMS    the other block's sums are in stages 0 and 1 of this half (bytes)
//            PEER_TOTALS  the other block's totals may be read (128 score threads)
//            A cluster has at most one row tile, so each has one phase.
// Source     own
#pragma once

#include "tree_attention/v4_results.cuh"

template <class T>
__device__ __forceinline__ void exchange_halves(const Shared& shared, float (&o)[128], int half, T* to, int rows,
                                                float* lse) {
  const int thread = threadIdx.x % WARPGROUP, row = thread / 32 * 16 + thread % 32 / 4;
  const SharedAddress base = shared.base;
  const unsigned rank = cluster_rank();
  constexpr int FLOATS4 = HALF / 16;  // of a half of a stage
  if (half != (int)rank) {
    named_barrier(OF_VALUES + half, WARPGROUP);  // this half of the stages has been read
    float4* const sums = reinterpret_cast<float4*>(shared.memory + half * HALF) + thread;
#pragma unroll
    for (int j = 0; j < 32; ++j)
      sums[(j < 16 ? 0 : 2 * FLOATS4) + WARPGROUP * (j % 16)] =
          make_float4(o[4 * j], o[4 * j + 1], o[4 * j + 2], o[4 * j + 3]);
    fence_async_proxy();
    named_barrier(OF_VALUES + half, WARPGROUP);
    cluster_wait();
    if (thread == 0) {
      barrier_wait_cluster(base + PEER_READY, 0);
#pragma unroll
      for (int stage = 0; stage < 2; ++stage) {
        const SharedAddress from = base + stage * STAGE + half * HALF;
        copy_there(place_in_block(from, rank ^ 1), from, HALF, place_in_block(base + PEER_SUMS, rank ^ 1));
      }
    }
    __syncwarp();
    return;
  }
  named_barrier(OF_VALUES + half, WARPGROUP);  // this half of the stages has been read
  cluster_wait();
  if (thread == 0) {
    barrier_arrive_expecting(base + PEER_SUMS, 2 * HALF);
    barrier_arrive_there(place_in_block(base + PEER_READY, rank ^ 1));
  }
  __syncwarp();
  barrier_wait(base + TOTALS, 0);
  barrier_wait_cluster(base + PEER_TOTALS, 0);
  float own[2], others[2];
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    const int r = row + 8 * upper;
    const float2 mine = shared.totals()[r];  // largest, total
    const float2 other = load_there(place_in_block(base + QUERY_STEP + 8 * r, rank ^ 1));
    const float largest = fmaxf(mine.x, other.x);
    const float of_mine = fast_exp2(mine.x - largest), of_other = fast_exp2(other.x - largest);
    const float total = mine.y * of_mine + other.y * of_other, inverse = total == 0.0f ? 0.0f : 1.0f / total;
    own[upper] = of_mine * inverse;
    others[upper] = of_other * inverse;
    if (rank == 0 && thread % 4 == 0 && r < rows)
      lse[r] = total == 0.0f ? NEGATIVE_INFINITY : (largest + log2f(total)) * LN_2;
  }
  barrier_wait(base + PEER_SUMS, 0);
  const float4* const sums = reinterpret_cast<const float4*>(shared.memory + half * HALF) + thread;
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    const float4 x = sums[(j < 16 ? 0 : 2 * FLOATS4) + WARPGROUP * (j % 16)];
    o[4 * j] = own[0] * o[4 * j] + others[0] * x.x;
    o[4 * j + 1] = own[0] * o[4 * j + 1] + others[0] * x.y;
    o[4 * j + 2] = own[1] * o[4 * j + 2] + others[1] * x.z;
    o[4 * j + 3] = own[1] * o[4 * j + 3] + others[1] * x.w;
  }
  const float one[2] = {1.0f, 1.0f};
  store_rows<T>(o, one, to, rows);
}
