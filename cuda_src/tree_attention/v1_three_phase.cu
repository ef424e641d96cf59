// tree_attention/v1_three_phase.cu: one block per row; scores, softmax and weighted sum as three plain phases.
//
// Computes   out[n, h] = sum_j softmax_j(sm_scale * (q_nope[n, h].ckv[j] + q_pe[n, h].kpe[j])) ckv[j]
//            j over the context and the nodes visible from n, or one of the two parts (keys)
// Letters    B requests, N nodes, H heads, C latent width, R rope width, W = ceil(N / 32), P pages; S the most
//            keys that a request can have, T the keys that it has
// Inputs     queries  T q_nope[B, N, H, C], q_pe[B, N, H, R]; int32 num_nodes[B]; uint32 visibility_bits[B, N, W]
//            cache    T ckv[P, page_size, C], kpe[P, page_size, R]; int32 page_table[B, max_pages], context_lens[B]
//            The last axis of q_nope, q_pe, ckv, kpe is contiguous, their other strides are given (common/inputs.cuh).
// Outputs    out T[B, N, H, C], lse float32[B, N, H] in nats; every entry is written, 0 and -inf for empty rows
// Work       grid (H, N, B), block 128; a block owns one row (request, node, head). Threads stride over keys in phases
//            1 and 2 and over latent dimensions in phase 3. Shared: (C + R + S + 4) floats.
// Numerics   float32; base-2 exponentials with scale * log2(e) folded in; no running sum of more than 1,024 terms
//            (C, R <= 1,024; keys are summed in tiles); each row in a fixed order, whatever the batch
//            Hidden keys are left out of the sums, not weighed by 0, as they may hold NaN or inf.
// Requires   S * 4 bytes of scores fit into shared memory; C and R multiples of 16; dtypes and shapes checked
// Versions   v1_three_phase: this, readable, short context | v2_split_kv: any length, keys shared by 8 or 16 rows
// Speed      each thread reads its own key, so nothing coalesces: 64 heads x 64 nodes x 1,024 keys take 13.4 ms on an
//            H200 (0.7 TFLOP/s, 2026-11-30)
// Reference  ddtree_cupy/tree_attention/reference.py
// Source     own
#include "common/inputs.cuh"
#include "common/softmax_state.cuh"
#include "common/warp.cuh"

constexpr int THREADS = 128;
constexpr int KEYS_PER_SUM = 1024;

// Four chains, since one long chain of float32 sums loses bits; width is a multiple of 16.
template <class T>
__device__ float dot(const float* q, const T* key, int width) {
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int c = 0; c < width; c += 4)
    for (int i = 0; i < 4; ++i) sum[i] = fmaf(q[c + i], to_float(key[c + i]), sum[i]);
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

template <class T>
__global__ void __launch_bounds__(THREADS, 8) tree_attention_v1(  // 64 registers
    Queries<T> queries, Cache<const T> cache, T* __restrict__ out, float* __restrict__ lse, int C, int R,
    float sm_scale, int keys) {
  const int head = blockIdx.x;     // 0..H-1
  const int node = blockIdx.y;     // 0..N-1
  const int request = blockIdx.z;  // 0..B-1
  const int thread = threadIdx.x;  // 0..127
  extern __shared__ float shared[];
  float* q = shared;            // [C + R]
  float* scores = q + C + R;    // [S], then the weights
  __shared__ float scratch[THREADS / WARP_SIZE];

  const PageTable table = cache.table(request);
  const int count = queries.count(request);
  const KeyRange range = key_range(keys, cache.context_len(request), count, table);
  const unsigned* bits = queries.bits(request, node);
  const long long row = ((long long)request * queries.N + node) * queries.H + head;
  const int num_keys = node < count ? range.count : 0;

  // the query, widened once
  const T* row_nope = queries.nope(request, node, head);
  const T* row_pe = queries.pe(request, node, head);
  if (node < count) {
    for (int c = thread; c < C; c += THREADS) q[c] = to_float(row_nope[c]);
    for (int r = thread; r < R; r += THREADS) q[C + r] = to_float(row_pe[r]);
  }
  __syncthreads();

  // phase 1: scores in base 2; invisible keys are not read
  const float scale = sm_scale * LOG2_E;
  float largest = NEGATIVE_INFINITY;
  for (int j = thread; j < num_keys; j += THREADS) {
    const int position = range.first + j;
    float score = NEGATIVE_INFINITY;
    if (is_visible(bits, position - range.context_len)) {
      const float nope = dot(q, cache.ckv + cache.ckv_row(table, position), C);
      const float rope = dot(q + C, cache.kpe + cache.kpe_row(table, position), R);
      score = (nope + rope) * scale;
    }
    scores[j] = score;
    largest = fmaxf(largest, score);
  }

  // phase 2: one maximum, weights in place, one sum
  largest = block_max(largest, scratch);
  const float shift = softmax_shift(largest);
  float sum = 0.0f;
  for (int j = thread; j < num_keys; j += THREADS) {
    const float weight = exp2f(scores[j] - shift);
    sum += weight;
    scores[j] = is_visible(bits, range.first + j - range.context_len) ? weight : HIDDEN_WEIGHT;
  }
  const float total = block_sum(sum, scratch);
  if (thread == 0) lse[row] = state_score(largest, total) * LN_2;

  // phase 3: the weighted sum of the values that the node sees; other values, which may be NaN, are not read
  const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
  for (int c = thread; c < C; c += THREADS) {
    float value = 0.0f;
    for (int start = 0; start < num_keys; start += KEYS_PER_SUM) {
      const int stop = min(start + KEYS_PER_SUM, num_keys);
      float part = 0.0f;
      for (int j = start; j < stop; ++j) {
        const float weight = scores[j];
        if (is_hidden(weight)) continue;
        const T* key = cache.ckv + cache.ckv_row(table, range.first + j);
        part = fmaf(weight, to_float(key[c]), part);
      }
      value += part;
    }
    out[row * C + c] = from_float<T>(value * inverse);
  }
}
