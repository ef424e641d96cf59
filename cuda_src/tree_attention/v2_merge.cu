// tree_attention/v2_merge.cu: combines the slices of each row, which v2_split_kv.cu left, into one result.
//
// Computes   out = sum_i w_i out_i / sum_i w_i with w_i = exp2(score_i - max), lse = ln 2 (max + log2 sum_i w_i)
// Letters    as v2_split_kv.cu
// Inputs     queries, cache as there; partial_out float32[B, region, C], partial_score
//            float32[B, region]; the row of a slice is slice * rows + row
// Outputs    out T[B, N, H, C], lse float32[B, N, H]: rows of several slices; 0 and -inf for rows of padding nodes.
//            Rows of one slice are left as v2_split_kv.cu wrote them
// Work       grid (ceil(N * H / 4), B), block 128; a warp owns one row
// Numerics   float32, slices in the order of their keys; empty slices have weight 0
// Requires   the same launch sizes as v2_split_kv.cu, which ran before on the same stream
// Versions   this
// Reference  merge_states in ddtree_cupy/tree_attention/reference.py
// Source     the split reduction of FlashDecoding
#include "common/inputs.cuh"
#include "common/softmax_state.cuh"
#include "tree_attention/v2_slices.cuh"

template <class T, int C, int R>
__global__ void __launch_bounds__(WARPS* WARP_SIZE) tree_attention_v2_merge(
    Queries<T> queries, Cache<const T> cache, const float* __restrict__ partial_out,
    const float* __restrict__ partial_score, T* __restrict__ out, float* __restrict__ lse, long long region, int keys) {
  const int N = queries.N, H = queries.H;
  const int request = blockIdx.y;                                     // 0..B-1
  const int row = blockIdx.x * WARPS + threadIdx.x / WARP_SIZE;       // 0..N*H-1
  const int lane = threadIdx.x % WARP_SIZE;                           // 0..31
  if (row >= N * H) return;
  const int rows = queries.count(request) * H;
  const KeyRange range = key_range(keys, cache.context_len(request), queries.count(request), cache.table(request));
  const Slices slices = slices_of(rows, range.count, Layout<T, C, R>::ROWS);
  const long long final_row = (long long)request * N * H + row;
  if (row >= rows) {
    for (int c = lane; c < C; c += WARP_SIZE) out[final_row * C + c] = from_float<T>(0.0f);
    if (lane == 0) lse[final_row] = NEGATIVE_INFINITY;
    return;
  }
  if (slices.count == 1) return;  // v2_split_kv.cu wrote the result

  const float* scores = partial_score + request * region + row;  // with a stride of `rows`
  float largest = NEGATIVE_INFINITY;
  for (int slice = 0; slice < slices.count; ++slice) largest = fmaxf(largest, scores[(long long)slice * rows]);
  float total = 0.0f;
  for (int slice = 0; slice < slices.count; ++slice) total += state_weight(scores[(long long)slice * rows], largest);
  const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
  for (int c = lane; c < C; c += WARP_SIZE) {
    float value = 0.0f;
    for (int slice = 0; slice < slices.count; ++slice) {
      const float weight = state_weight(scores[(long long)slice * rows], largest);
      value = fmaf(weight, partial_out[(request * region + (long long)slice * rows + row) * C + c], value);
    }
    out[final_row * C + c] = from_float<T>(value * inverse);
  }
  if (lane == 0) lse[final_row] = state_score(largest, total) * LN_2;
}
