// tree_attention/merge_states.cu: from attention over two disjoint key sets to attention over their union.
//
// Computes   out = (w_a out_a + w_b out_b) / (w_a + w_b), w = exp(lse - max), lse = max + log(w_a + w_b)
// Letters    M rows (any leading axes times heads), C width
// Inputs     out_a, out_b T[M, C]; lse_a, lse_b float32[M] in nats, -inf for an empty side
// Outputs    out T[M, C], lse float32[M]; every entry is written
// Work       grid ceil(M / 4), block 128; one warp owns one row, lanes stride over C
// Numerics   float32, natural exponentials. A side of weight 0 does not count, whatever its out holds: the bits of the
//            other side are copied without arithmetic. Two empty sides give (0, -inf).
// Requires   contiguous arrays; out may be out_a or out_b and lse may be lse_a or lse_b, since each entry is read
//            before it is written
// Versions   this
// Reference  ddtree_cupy/tree_attention/reference.py
// Source     the split reduction of FlashDecoding; the rule for empty sides is ours
#include "common/softmax_state.cuh"
#include "common/warp.cuh"

template <class T>
__global__ void __launch_bounds__(128)
    merge_states(const T* out_a, const float* lse_a, const T* out_b, const float* lse_b, T* out, float* lse,
                 long long M, int C) {
  const long long row = (long long)blockIdx.x * 4 + threadIdx.x / WARP_SIZE;  // 0..M-1
  const int lane = threadIdx.x % WARP_SIZE;
  if (row >= M) return;
  const float a = lse_a[row];
  const float b = lse_b[row];
  const float largest = fmaxf(a, b);
  const float weight_a = a == NEGATIVE_INFINITY ? 0.0f : expf(a - softmax_shift(largest));
  const float weight_b = b == NEGATIVE_INFINITY ? 0.0f : expf(b - softmax_shift(largest));
  const float total = weight_a + weight_b;
  const bool is_a = weight_a == 1.0f && weight_b == 0.0f;
  const bool is_b = weight_b == 1.0f && weight_a == 0.0f;
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;

  if (is_a || is_b) {
    const T* only = is_a ? out_a : out_b;
    for (int c = lane; c < C; c += WARP_SIZE) out[row * C + c] = only[row * C + c];
  } else {
    for (int c = lane; c < C; c += WARP_SIZE) {
      const float part_a = weight_a == 0.0f ? 0.0f : weight_a * to_float(out_a[row * C + c]);
      const float part_b = weight_b == 0.0f ? 0.0f : weight_b * to_float(out_b[row * C + c]);
      out[row * C + c] = from_float<T>((part_a + part_b) * inverse);
    }
  }
  __syncwarp();  // lse may be lse_a, which all lanes have read by now
  if (lane == 0) lse[row] = is_a ? a : is_b ? b : total == 0.0f ? NEGATIVE_INFINITY : largest + logf(total);
}
