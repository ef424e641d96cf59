// tree_attention/v3_merge.cu: combines the pieces of each row, which v3_mma.cu left, into one result.
//
// Computes   out = sum_i w_i out_i / sum_i w_i with w_i = exp2(score_i - max), lse = ln 2 (max + log2 sum_i w_i)
// Letters    as v3_mma.cu; `blocks` is the size of its grid; a lane has IN_FLIGHT loads in flight
// Inputs     page_table, context_lens, num_nodes as there; partial_out, partial_score and cuts as it left them
// Outputs    out T[B, N, H, C], lse float32[B, N, H]: rows of several pieces; 0 and -inf for rows of padding nodes and
//            rows without keys. Rows of one piece are left as v3_mma.cu wrote them
// Work       grid (ceil(N * H / 2), B), block 64 * ceil(C / 128); a warp owns 128 columns of one row
// Numerics   pieces in the order of their keys: sums of 32 in float32, their sum in float64
// Requires   the same launch sizes as v3_mma.cu, which ran before on the same stream; partial_out starts at a multiple
//            of 16 bytes
// Versions   this
// Speed      timed together with v3_mma.cu: 4 loads in flight are faster for few pieces, 16 for many (docs/v3_log.md)
// Reference  merge_states in ddtree_cupy/tree_attention/reference.py
// Source     the split reduction of FlashDecoding
#include "common/softmax_state.cuh"
#include "tree_attention/v3_layout.cuh"
#include "tree_attention/v3_schedule.cuh"

constexpr int MERGED_ROWS = 2;  // rows of a block

constexpr int threads_for(int C) { return WARP_SIZE * MERGED_ROWS * ((C + 127) / 128); }

template <class T, int C, int IN_FLIGHT>
__global__ void __launch_bounds__(threads_for(C), (IN_FLIGHT > 4 ? 512 : 1024) / threads_for(C))  // 128, 64 registers
    tree_attention_v3_merge(Queries<T> queries, Cache<const T> cache, const float* __restrict__ partial_out,
                            const float* __restrict__ partial_score, const int4* __restrict__ cuts,
                            T* __restrict__ out, float* __restrict__ lse, int B, int keys, int blocks) {
  static_assert(WARP_SIZE % IN_FLIGHT == 0, "lanes weigh 32 pieces, which are then added IN_FLIGHT at a time");
  constexpr int CHUNKS = (C + 127) / 128;                    // of 128 columns
  const int N = queries.N, H = queries.H;
  const int b = blockIdx.y;                                  // 0..B-1
  const int warp = threadIdx.x / WARP_SIZE;                  // 0..MERGED_ROWS*CHUNKS-1
  const int lane = threadIdx.x % WARP_SIZE;                  // 0..31
  const int row = blockIdx.x * MERGED_ROWS + warp / CHUNKS;  // 0..N*H-1
  const int c = warp % CHUNKS * 128 + 4 * lane;              // 0..C-1
  const bool has_columns = C % 128 == 0 || c < C;
  if (row >= N * H) return;
  const Tables tables = tables_of(queries, cache, B, keys, 1, 0);
  const Request request = request_of(tables, b);
  const long long final_row = (long long)b * N * H + row;
  T* to = out + final_row * C + c;
  if (row >= request.rows || request.range.count == 0) {
    if (has_columns) store4(to, float4{});
    if (c == 0) lse[final_row] = NEGATIVE_INFINITY;
    return;
  }
  const int4 cut = cuts[(long long)b * row_tiles_of(N, H) + row / TILE_ROWS];
  const int pieces = cut.x;
  if (pieces == 1) return;  // v3_mma.cu wrote the result

  const int start_slot = start_slot_of(cut.y, cut.z, cut.w, blocks), later = cut.w - cut.y;
  const auto slot_at = [&](int i) { return i == cut.y ? start_slot : i + (i < cut.y ? cut.z : later); };
  const int tile_row = row % TILE_ROWS, first = tile_row * C + c;
  const auto score_of = [&](int i) {
    return i < pieces ? partial_score[(long long)slot_at(i) * TILE_ROWS + tile_row] : NEGATIVE_INFINITY;
  };
  float score = score_of(lane), largest = score;  // of every 32nd piece
#pragma unroll 1
  for (int i = lane + WARP_SIZE; i < pieces; i += WARP_SIZE) largest = fmaxf(largest, score_of(i));
  for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, step));
  double sum[4] = {}, total = 0.0;
#pragma unroll 1
  for (int start = 0; start < pieces; start += WARP_SIZE) {
    if (start > 0) score = score_of(start + lane);
    const float weight = state_weight(score, largest);
    float4 some = {};
    float some_total = 0.0f;
#pragma unroll 1
    for (int i = 0; i < min(WARP_SIZE, pieces - start); i += IN_FLIGHT) {
      float4 value[IN_FLIGHT];
#pragma unroll
      for (int k = 0; k < IN_FLIGHT; ++k) {
        const int piece = start + i + k;
        const float* from = partial_out + (long long)slot_at(piece) * (TILE_ROWS * C) + first;
        value[k] = has_columns && piece < pieces ? *reinterpret_cast<const float4*>(from) : float4{};
      }
#pragma unroll
      for (int k = 0; k < IN_FLIGHT; ++k) {
        const float of_piece = __shfl_sync(FULL_WARP, weight, i + k);
        some_total += of_piece;
        some.x = fmaf(of_piece, value[k].x, some.x);
        some.y = fmaf(of_piece, value[k].y, some.y);
        some.z = fmaf(of_piece, value[k].z, some.z);
        some.w = fmaf(of_piece, value[k].w, some.w);
      }
    }
    total += some_total;
    sum[0] += some.x;
    sum[1] += some.y;
    sum[2] += some.z;
    sum[3] += some.w;
  }
  const float all = (float)total, inverse = all > 0.0f ? 1.0f / all : 0.0f;
  if (has_columns)
    store4(to, make_float4((float)sum[0] * inverse, (float)sum[1] * inverse, (float)sum[2] * inverse,
                           (float)sum[3] * inverse));
  if (c == 0) lse[final_row] = state_score(largest, all) * LN_2;
}
