// tree_accept/targets.cu: the target's token at every node, by argmax or by sampling.
//
// Computes   greedy_targets: the lowest id of the largest logit
//            sample_targets: w_v = exp((logit_v - max) / temperature); the first id with w_0 + .. + w_id > u * sum w
//            and w_id > 0
// Letters    B requests, N nodes, V vocabulary; row = request * N + node
// Inputs     target_logits T[B, N, V]  last axis contiguous, other strides in elements
//            num_nodes int32[B] or null (then num_nodes_of_all); rows from num_nodes on are not read
//            uniforms: one of uniforms_f32 float32[B, N] and uniforms_f64 float64[B, N], the other null
//            temperatures: one of temperatures_f32 float32[B] and temperatures_f64 float64[B], or both null (then
//            temperature_of_all)
// Outputs    token_ids int32[B, N]  contiguous, every entry written; -1 for unused rows, for rows that hold NaN or
//            nothing above -inf, and in sample_targets also for rows that hold +inf
// Work       grid (B * N), block 128 or 512 (sample_targets 256 or 512): a block owns a row. sample_targets cuts the
//            row into 256 segments in the order of ids and shares them out to the warps; then one warp finds the
//            segment of the draw and walks it, 32 ids at a time.
// Numerics   argmax compares bits, exact in every dtype (subnormals count, -0.0 equals 0.0). In sample_targets float32
//            subnormals count as 0, with and without -ftz. Weights are float32 within 4e-7 relative, their sums
//            float64; weights below the range of float32 are 0. The exponent is the sum of two float32, so that a large
//            one stays exact; for temperatures outside 2^-100 .. 2^100, where differences or quotients may leave the
//            range of float32, it is a float64. Hence the draw is that of the reference unless u * total lies within
//            1e-6 * total of an edge. Sums do not depend on the block size.
// Requires   checked shapes and strides. Values are not trusted: num_nodes is clamped, and the kernel ends whatever the
//            uniforms and temperatures are.
// Speed      H200, 2026-11-30, in a graph, 65 rows of 163,840 bf16 logits: greedy 19 us (predicted 9), sampling 72 us
//            (predicted 30); 520 rows: 65 us (2.6 TB/s) and 238 us
// Reference  ddtree_cupy/tree_accept/reference.py
// Source     own
#include "common/ordered.cuh"
#include "common/block.cuh"

constexpr int SEGMENTS = 256;
constexpr int SEGMENTS_PER_LANE = SEGMENTS / WARP_SIZE;

// The largest value of the row as ordered bits (high half) and the lowest id that holds it, inverted (low half); 0 when
// the row is not usable.
template <class T>
__device__ __forceinline__ unsigned long long row_argmax(const T* logits, int V, BlockTotals& totals) {
  unsigned best = ORDERED_NEGATIVE_INFINITY;
  int best_id = -1;
  bool is_bad = false;
  visit_row(logits, V, [&](T element, int id) {
    unsigned bits = __float_as_uint(to_float(element));
    if (bits == 0x80000000u) bits = 0;  // -0.0
    is_bad |= (bits & 0x7fffffffu) > 0x7f800000u;
    const unsigned value = ordered_bits(__uint_as_float(bits));
    if (value > best) {
      best = value;
      best_id = id;
    }
  });
  if (__syncthreads_or(is_bad)) return 0;
  return totals.max(best_id >= 0 ? (unsigned long long)best << 32 | (unsigned)~best_id : 0ull);
}

__device__ __forceinline__ bool is_used(const int* num_nodes, int num_nodes_of_all, int request, int node, int N) {
  return node < min(num_nodes == nullptr ? num_nodes_of_all : num_nodes[request], N);
}

template <class T>
__global__ void __launch_bounds__(512)
    greedy_targets(const T* __restrict__ target_logits, const int* __restrict__ num_nodes,
                   int* __restrict__ token_ids, int num_nodes_of_all, int N, int V, long long request_stride,
                   long long node_stride) {
  const int request = blockIdx.x / N;  // 0..B-1
  const int node = blockIdx.x % N;     // 0..N-1
  __shared__ unsigned long long totals_scratch[2 * WARP_SIZE];
  BlockTotals totals = {totals_scratch, 0};

  int token = -1;
  if (is_used(num_nodes, num_nodes_of_all, request, node, N)) {
    const unsigned long long best =
        row_argmax(target_logits + request * request_stride + node * node_stride, V, totals);
    if (best > 0) token = (int)~(unsigned)best;
  }
  if (threadIdx.x == 0) token_ids[blockIdx.x] = token;
}

// A number as the sum of two float32.
struct Pair {
  float high;
  float low;
};

// The same value as a float64; the plain conversion would flush subnormals to 0.
__device__ __forceinline__ double widened(float positive) {
  const unsigned bits = __float_as_uint(positive);
  return (bits & 0x7f800000u) == 0 ? (double)(bits & 0x7fffffu) * 0x1p-149 : (double)positive;
}

// exp((logit - largest) * inverse), inverse = 1 / temperature; `largest` is not subnormal
__device__ __forceinline__ float weight(float logit, float largest, Pair inverse) {
  const float below = __fsub_rn(logit, largest);
  if (below == 0.0f) return 1.0f;
  const float exponent = __fmul_rn(below, inverse.high);
  if (!(exponent > -104.0f)) return 0.0f;  // -inf, or NaN

  // what rounding took from the difference and from the product
  const float back = __fsub_rn(below, logit);
  const float below_low = __fsub_rn(__fsub_rn(logit, __fsub_rn(below, back)), __fadd_rn(largest, back));
  const float low = fmaf(below, inverse.high, -exponent) + below * inverse.low + below_low * inverse.high;
  return expf(exponent) * (1.0f + low);
}

// The same where the difference or its product may leave the range of float32.
__device__ __forceinline__ float weight(float logit, float largest, double inverse) {
  const double below = (double)canonical(logit) - (double)largest;
  const double exponent = below == 0.0 ? 0.0 : below * inverse;  // whatever the temperature
  if (!(exponent > -104.0)) return 0.0f;
  const float high = (float)exponent;
  return expf(high) * (1.0f + (float)(exponent - (double)high));
}

__device__ __forceinline__ double warp_sum(double x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(FULL_WARP, x, step);
  return x;
}

// Sum over this lane and the lower ones.
__device__ __forceinline__ double sum_up_to_lane(double x) {
  for (int step = 1; step < WARP_SIZE; step *= 2) {
    const double lower = __shfl_up_sync(FULL_WARP, x, step);
    if ((int)threadIdx.x % WARP_SIZE >= step) x += lower;
  }
  return x;
}

// The id that is drawn from a row whose segments have these sums; called by one warp.
template <class T, class Inverse>
__device__ __forceinline__ int draw(const T* logits, int V, const double* segment_sums, int segment_size, double u,
                                    float largest, Inverse inverse) {
  const int lane = threadIdx.x % WARP_SIZE;
  double of_lane = 0.0;
  for (int i = 0; i < SEGMENTS_PER_LANE; ++i) of_lane += segment_sums[lane * SEGMENTS_PER_LANE + i];
  const double up_to_lane = sum_up_to_lane(of_lane);
  double target = u * __shfl_sync(FULL_WARP, up_to_lane, WARP_SIZE - 1);

  // the lane whose segments cross the target; if none does (u * total was rounded up to total), the last with a weight
  unsigned lanes = __ballot_sync(FULL_WARP, of_lane > 0.0 && up_to_lane > target);
  if (lanes == 0) lanes = 0x80000000u >> __clz(__ballot_sync(FULL_WARP, of_lane > 0.0));
  const int crossing = __ffs(lanes) - 1;
  double before = __shfl_sync(FULL_WARP, up_to_lane - of_lane, crossing);
  int segment = crossing * SEGMENTS_PER_LANE, last = segment;
  for (; segment < (crossing + 1) * SEGMENTS_PER_LANE; ++segment) {
    const double sum = segment_sums[segment];
    if (sum > 0.0) last = segment;
    if (sum > 0.0 && before + sum > target) break;
    before += sum;
  }
  if (segment == (crossing + 1) * SEGMENTS_PER_LANE) {
    segment = last;
    target = (double)POSITIVE_INFINITY;  // within rounding of its upper edge
  }

  // the ids of the segment in order; the last one with a weight when none crosses the target
  int token = -1;
  const int end = min((segment + 1) * segment_size, V);
  for (int base = segment * segment_size; base < end; base += WARP_SIZE) {
    const int id = base + lane;
    const float of_id = id < end ? weight(to_float(logits[id]), largest, inverse) : 0.0f;
    const double up_to_id = before + sum_up_to_lane((double)of_id);
    const unsigned weighty = __ballot_sync(FULL_WARP, of_id > 0.0f);
    const unsigned found = __ballot_sync(FULL_WARP, of_id > 0.0f && up_to_id > target);
    if (found) return base + __ffs(found) - 1;
    if (weighty) token = base + 31 - __clz(weighty);
    before = __shfl_sync(FULL_WARP, up_to_id, WARP_SIZE - 1);
  }
  return token;
}

// The id that is drawn from a row, for the threads of the first warp; called by the whole block.
template <class T, class Inverse>
__device__ __forceinline__ int sample(const T* logits, int V, double* segment_sums, double u, float largest,
                                      Inverse inverse) {
  const int lane = threadIdx.x % WARP_SIZE;
  const int segment_size = ((V + SEGMENTS - 1) / SEGMENTS + WARP_SIZE - 1) / WARP_SIZE * WARP_SIZE;

  // every warp sums segments
  for (int segment = threadIdx.x / WARP_SIZE; segment < SEGMENTS; segment += blockDim.x / WARP_SIZE) {
    const int end = min((segment + 1) * segment_size, V);
    double sum = 0.0;
#pragma unroll 8
    for (int id = segment * segment_size + lane; id < end; id += WARP_SIZE)
      sum += (double)weight(to_float(logits[id]), largest, inverse);
    if (segment * segment_size < V) sum = warp_sum(sum);
    if (lane == 0) segment_sums[segment] = sum;
  }
  __syncthreads();
  return threadIdx.x < WARP_SIZE ? draw(logits, V, segment_sums, segment_size, u, largest, inverse) : -1;
}

template <class T>
__global__ void __launch_bounds__(512, 2)
    sample_targets(const T* __restrict__ target_logits, const float* __restrict__ uniforms_f32,
                   const double* __restrict__ uniforms_f64, const float* __restrict__ temperatures_f32,
                   const double* __restrict__ temperatures_f64, const int* __restrict__ num_nodes,
                   int* __restrict__ token_ids, double temperature_of_all, int num_nodes_of_all, int N, int V,
                   long long request_stride, long long node_stride) {
  const int request = blockIdx.x / N;  // 0..B-1
  const int node = blockIdx.x % N;     // 0..N-1
  __shared__ unsigned long long totals_scratch[2 * WARP_SIZE];
  __shared__ double segment_sums[SEGMENTS];
  BlockTotals totals = {totals_scratch, 0};

  const T* logits = target_logits + request * request_stride + node * node_stride;
  const unsigned long long best =
      is_used(num_nodes, num_nodes_of_all, request, node, N) ? row_argmax(logits, V, totals) : 0;
  const float largest = canonical(from_ordered_bits((unsigned)(best >> 32)));
  if (best == 0 || largest == POSITIVE_INFINITY) {
    if (threadIdx.x == 0) token_ids[blockIdx.x] = -1;
    return;
  }
  double temperature = temperature_of_all;
  if (temperatures_f32 != nullptr) temperature = widened(temperatures_f32[request]);
  if (temperatures_f64 != nullptr) temperature = temperatures_f64[request];
  const double inverse = 1.0 / temperature;
  const double u = uniforms_f64 != nullptr ? uniforms_f64[blockIdx.x] : (double)uniforms_f32[blockIdx.x];

  int token;
  if (temperature >= 0x1p-100 && temperature <= 0x1p100) {
    const float high = (float)inverse;
    token = sample(logits, V, segment_sums, u, largest, Pair{high, (float)(inverse - (double)high)});
  } else {
    token = sample(logits, V, segment_sums, u, largest, inverse);
  }
  if (threadIdx.x == 0) token_ids[blockIdx.x] = token;
}
