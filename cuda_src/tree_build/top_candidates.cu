// tree_build/top_candidates.cu: the K best tokens of every draft row, and the log-sum-exp of the row.
//
// Computes   token_ids[row] by descending logit, then ascending id; lse = max + log sum_v exp(logit_v - max)
// Letters    B requests, L draft length, V vocabulary, K candidates kept, S slices of a row, E entries that a slice
//            passes on (at most K and at most its size); row = request * L + depth
// Inputs     draft_logits  T[B, L, V]  last axis contiguous, other strides in elements, any sign
//            draft_lens    int32[B]    rows of each request, null: draft_len_of_all for all; later rows are not read
// Scratch    found_values uint32[B*L, S, E], found_ids int32[B*L, S, E]: the best entries of a slice in the order of
//            ids, values as the telling bits of common/ordered.cuh, 0 where the slice has fewer; partial_max float32
//            [B*L, S] and partial_sum, the sum of exp(logit - partial_max): NaN marks a bad slice;
//            sort_keys uint64[B*L, sort_size], null when the keys fit into shared memory
// Outputs    candidate_ids int32[B, L, K], candidate_logits float32[B, L, K], candidate_lse float32[B, L]; contiguous,
//            every entry written
// Work       find_candidates: grid (B*L, S), block 128 or 512 by V alone; a slice has 16 logits per thread, kept in
//            registers.
//            merge_candidates: grid (B*L), block 256 or 1,024; dynamic shared sort_size * 8 bytes, or none with scratch
// Numerics   -0.0 and float32 subnormals count as +0.0; -inf is not a candidate; NaN or +inf makes the row bad: ids -1,
//            logits -inf, lse NaN. Discrete results are exact. A sum has 16 terms per thread, then fixed trees over
//            lanes, warps and slices, so lse depends neither on the batch nor on K. The sum is at least 1: lse >= max.
// Requires   checked dtype, shapes and strides; K <= V
// Speed      H200, 2026-11-30, in a graph, [15, 163840] bf16: 30, 32, 42 and 60 us for K = 16, 64, 256 and 1,024
//            (predicted 13 us for 64); 64 requests 893 us (350 GB/s: the counting passes are the limit, not memory)
// Reference  ddtree_cupy/tree_build/reference.py
// Source     own
#include "common/ordered.cuh"
#include "common/select.cuh"
#include "common/softmax_state.cuh"

constexpr int ITEMS = 16;  // logits of one thread
constexpr int MOST_WARPS = 32;

template <class T>
__global__ void __launch_bounds__(512)
    find_candidates(const T* __restrict__ draft_logits, const int* __restrict__ draft_lens,
                    unsigned* __restrict__ found_values, int* __restrict__ found_ids, float* __restrict__ partial_max,
                    float* __restrict__ partial_sum, int draft_len_of_all, int L, int V, int E,
                    long long request_stride, long long row_stride) {
  const int row = blockIdx.x;    // 0..B*L-1
  const int slice = blockIdx.y;  // 0..S-1
  const int lane = threadIdx.x % WARP_SIZE;
  const int first = (slice * (int)(blockDim.x / WARP_SIZE) + (int)threadIdx.x / WARP_SIZE) * WARP_SIZE * ITEMS + lane;
  const long long partial = (long long)row * gridDim.y + slice;
  unsigned* best_values = found_values + partial * E;

  // a row beyond the draft has no candidates and no sum
  if (row % L >= (draft_lens == nullptr ? draft_len_of_all : draft_lens[row / L])) {
    if (threadIdx.x == 0) {
      partial_max[partial] = NEGATIVE_INFINITY;
      partial_sum[partial] = 0.0f;
    }
    for (int i = threadIdx.x; i < E; i += blockDim.x) best_values[i] = 0;
    return;
  }
  const T* logits = draft_logits + row / L * request_stride + row % L * row_stride;
  __shared__ unsigned long long totals_scratch[2 * WARP_SIZE];
  __shared__ float float_scratch[MOST_WARPS];
  BlockTotals totals = {totals_scratch, 0};

  // the thread's logits: ids first, first + 32, ...
  unsigned values[ITEMS];  // telling bits, 0 where there is no candidate
  float largest = NEGATIVE_INFINITY;
  int is_bad = 0;
#pragma unroll
  for (int j = 0; j < ITEMS; ++j) {
    const int id = first + WARP_SIZE * j;
    const float logit = id < V ? canonical(to_float(logits[id])) : NEGATIVE_INFINITY;
    is_bad |= is_nan(logit) || logit == POSITIVE_INFINITY;
    values[j] = logit > NEGATIVE_INFINITY ? ordered_bits(logit) >> SILENT_BITS<T> : 0u;
    largest = fmaxf(largest, logit);
  }
  is_bad = __syncthreads_or(is_bad);
  if (is_bad) {
    if (threadIdx.x == 0) partial_max[partial] = partial_sum[partial] = QUIET_NAN;
    return;
  }

  // log-sum-exp of the slice
  largest = block_max(largest, float_scratch);
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < ITEMS; ++j)
    sum += values[j] > 0 ? expf(from_telling_bits(values[j], SILENT_BITS<T>) - largest) : 0.0f;
  sum = block_sum(sum, float_scratch);
  if (threadIdx.x == 0) {
    partial_max[partial] = largest;
    partial_sum[partial] = sum;
  }
  if (E == 0) return;

  // the E best of the slice in the order of ids
  int* best_ids = found_ids + partial * E;
  const auto value_at = [&](int j) { return values[j]; };
  const Selection chosen = select_largest(ITEMS, value_at, E, totals);
  const int count = compact(ITEMS, value_at, chosen, totals, [&](int j, int position) {
    best_values[position] = values[j];
    best_ids[position] = first + WARP_SIZE * j;
  });
  for (int i = count + threadIdx.x; i < E; i += blockDim.x) best_values[i] = 0;
}

// The max and sum of the row from those of its slices, the same in every warp; both are NaN when a slice is bad.
__device__ __forceinline__ float row_lse(const float* partial_max, const float* partial_sum, int S) {
  const int lane = threadIdx.x % WARP_SIZE;
  float largest = NEGATIVE_INFINITY;
  bool is_bad = false;
  for (int s = lane; s < S; s += WARP_SIZE) {
    is_bad |= is_nan(partial_max[s]);
    largest = fmaxf(largest, partial_max[s]);
  }
  if (__any_sync(FULL_WARP, is_bad)) return QUIET_NAN;
  largest = warp_max(largest);
  if (largest == NEGATIVE_INFINITY) return NEGATIVE_INFINITY;
  float sum = 0.0f;
  for (int s = lane; s < S; s += WARP_SIZE) {
    if (partial_max[s] > NEGATIVE_INFINITY) sum += partial_sum[s] * expf(partial_max[s] - largest);
  }
  return largest + logf(warp_sum(sum));
}

extern "C" __global__ void __launch_bounds__(1024)
    merge_candidates(const unsigned* __restrict__ found_values, const int* __restrict__ found_ids,
                     const float* __restrict__ partial_max, const float* __restrict__ partial_sum,
                     unsigned long long* __restrict__ sort_keys, int* __restrict__ candidate_ids,
                     float* __restrict__ candidate_logits, float* __restrict__ candidate_lse, int S, int E, int K,
                     unsigned sort_size, int silent_bits) {
  extern __shared__ unsigned long long shared_keys[];
  const long long row = blockIdx.x;  // 0..B*L-1
  __shared__ unsigned long long totals_scratch[2 * WARP_SIZE];
  BlockTotals totals = {totals_scratch, 0};

  const float of_row = row_lse(partial_max + row * S, partial_sum + row * S, S);
  if (threadIdx.x == 0) candidate_lse[row] = of_row;
  if (K == 0) return;
  int* row_ids = candidate_ids + row * K;
  float* row_logits = candidate_logits + row * K;
  if (is_nan(of_row)) {
    for (int i = threadIdx.x; i < K; i += blockDim.x) {
      row_ids[i] = -1;
      row_logits[i] = NEGATIVE_INFINITY;
    }
    return;
  }

  // the K best of what the slices found, as unique keys: the value in the high half, the inverted id in the low half
  unsigned long long* keys = sort_keys == nullptr ? shared_keys : sort_keys + row * sort_size;
  const unsigned* values = found_values + row * S * E;
  const int* ids = found_ids + row * S * E;
  const int size = S * E;
  const int items = (size + (int)blockDim.x - 1) / (int)blockDim.x;
  const int first = (int)threadIdx.x / WARP_SIZE * items * WARP_SIZE + (int)threadIdx.x % WARP_SIZE;
  const auto value_at = [&](int j) {
    const int i = first + WARP_SIZE * j;
    return i < size ? values[i] : 0u;
  };
  const Selection chosen = select_largest(items, value_at, K, totals);
  const int count = compact(items, value_at, chosen, totals, [&](int j, int position) {
    const int i = first + WARP_SIZE * j;
    keys[position] = (unsigned long long)values[i] << 32 | (unsigned)~ids[i];
  });
  for (unsigned i = count + threadIdx.x; i < sort_size; i += blockDim.x) keys[i] = 0;
  sort_descending(keys, sort_size);

  for (int i = threadIdx.x; i < K; i += blockDim.x) {
    const unsigned long long key = keys[i];
    row_ids[i] = key > 0 ? (int)~(unsigned)key : -1;
    row_logits[i] = key > 0 ? from_telling_bits((unsigned)(key >> 32), silent_bits) : NEGATIVE_INFINITY;
  }
}
