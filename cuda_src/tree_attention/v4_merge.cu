// tree_attention/v4_merge.cu: combines the pieces of a row tile that v4_wgmma.cu has cut.
//
// Computes   out = sum_i w_i out_i / sum_i w_i over the pieces i of a row tile, w_i = exp2(score_i - max)
// Letters    as v4_wgmma.cu; a part is 32 of the C columns
// Inputs     cuts int4[B, row tiles] and partial_out, partial_score of v4_wgmma.cu; blocks: its grid
// Outputs    out T[B, N, H, C], lse float32[B, N, H]: of the row tiles of more than one piece
// Work       grid (16 * row tiles, B), block 128: a block owns the 64 rows of a row tile and one part, in the order of
//            the registers of v4_values.cuh, so that every load of a warp is 512 bytes
// Numerics   sums of 32 pieces in float32, of those in float64; in the order of the pieces, so always the same
// Requires   checked shapes; scratch at multiples of 16 bytes
// Reference  merge_states in ddtree_cupy/tree_attention/reference.py
// Source     own
#include "tree_attention/v4_results.cuh"

constexpr int PARTS = C / 32;
constexpr int PIECES_PER_SUM = 32;

template <class T>
__global__ void __launch_bounds__(WARPGROUP)
    tree_attention_v4_merge(Queries<T> queries, const int4* __restrict__ cuts, const float* __restrict__ partial_out,
                            const float* __restrict__ partial_score, T* __restrict__ out, float* __restrict__ lse,
                            int blocks) {
  const int row_tile = blockIdx.x / PARTS, part = blockIdx.x % PARTS, b = blockIdx.y;
  const int thread = threadIdx.x, p = thread % 4, row = thread / 32 * 16 + thread % 32 / 4;  // and row + 8
  const int4 cut = cuts[(long long)b * (gridDim.x / PARTS) + row_tile];
  const int first_row = row_tile * TILE_ROWS, rows = queries.count(b) * queries.H;
  const int pieces = cut.x;
  if (pieces <= 1) return;  // v4_wgmma.cu wrote this row tile

  const int start_slot = start_slot_of(cut.y, cut.z, cut.w, blocks), later = cut.w - cut.y;
  const auto slot_at = [&](int i) {
    return (long long)(i == cut.y ? start_slot : i + (i < cut.y ? cut.z : later));
  };
  const float4* const from = reinterpret_cast<const float4*>(partial_out) + part * 4 * WARPGROUP + thread;
  const auto values_at = [&](int piece, float4(&values)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) values[j] = from[slot_at(piece) * (TILE_ROWS * C / 4) + WARPGROUP * j];
  };
  float4 ahead[2][4];  // of the next two pieces
  values_at(0, ahead[0]);
  values_at(1, ahead[1]);
  float largest[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY};
  for (int i = p; i < pieces; i += 4)
    for (int upper = 0; upper < 2; ++upper)
      largest[upper] = fmaxf(largest[upper], partial_score[slot_at(i) * TILE_ROWS + row + 8 * upper]);
  for (int upper = 0; upper < 2; ++upper) {
    largest[upper] = fmaxf(largest[upper], __shfl_xor_sync(FULL_WARP, largest[upper], 1));
    largest[upper] = fmaxf(largest[upper], __shfl_xor_sync(FULL_WARP, largest[upper], 2));
  }
  double sum[16] = {}, total[2] = {};
#pragma unroll 1
  for (int start = 0; start < pieces; start += PIECES_PER_SUM) {
    float some[16] = {}, some_total[2] = {};
#pragma unroll 2
    for (int i = start; i < min(start + PIECES_PER_SUM, pieces); ++i) {
      float4 values[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        values[j] = ahead[0][j];
        ahead[0][j] = ahead[1][j];
      }
      if (i + 2 < pieces) values_at(i + 2, ahead[1]);
      const long long slot = slot_at(i);
      float weight[2];
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        weight[upper] = state_weight(partial_score[slot * TILE_ROWS + row + 8 * upper], largest[upper]);
        some_total[upper] += weight[upper];
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        some[4 * j] = fmaf(weight[0], values[j].x, some[4 * j]);
        some[4 * j + 1] = fmaf(weight[0], values[j].y, some[4 * j + 1]);
        some[4 * j + 2] = fmaf(weight[1], values[j].z, some[4 * j + 2]);
        some[4 * j + 3] = fmaf(weight[1], values[j].w, some[4 * j + 3]);
      }
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) sum[i] += some[i];
    total[0] += some_total[0];
    total[1] += some_total[1];
  }
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    const float all = (float)total[upper], inverse = all == 0.0f ? 0.0f : 1.0f / all;
    unsigned v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      v[j] = pack2<T>((float)sum[4 * j + 2 * upper] * inverse, (float)sum[4 * j + 2 * upper + 1] * inverse);
    transpose_quad(v);
    const int r = first_row + row + 8 * upper;
    const long long final_row = (long long)b * queries.N * queries.H + r;
    T* const to = out + final_row * C + 32 * part + 8 * p;
    if (r < rows) {
      if (reinterpret_cast<size_t>(to) % 16 == 0)
        store_8<true>(to, v);
      else
        store_8<false>(to, v);
      if (part == 0 && p == 0) lse[final_row] = state_score(largest[upper], all) * LN_2;
    }
  }
}
