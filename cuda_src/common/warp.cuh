// common/warp.cuh: reductions over the 32 lanes of a warp and over the warps of a block.
//
// Numerics   sums run over a fixed butterfly, so their order never changes
// Requires   all 32 lanes call together; a block reduction is called by every thread of a block of full warps
// Source     own
#pragma once

constexpr unsigned FULL_WARP = 0xffffffffu;
constexpr int WARP_SIZE = 32;

__device__ __forceinline__ float warp_max(float x) {
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, step));
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(FULL_WARP, x, step);
  return x;
}

// Every thread gets the result. `scratch` holds one float per warp and may be reused after the call.
template <class Combine>
__device__ __forceinline__ float block_reduce(float of_warp, float* scratch, Combine combine) {
  const int warp = threadIdx.x / WARP_SIZE;
  const int num_warps = blockDim.x / WARP_SIZE;
  if (threadIdx.x % WARP_SIZE == 0) scratch[warp] = of_warp;
  __syncthreads();
  float result = scratch[0];
  for (int other = 1; other < num_warps; ++other) result = combine(result, scratch[other]);
  __syncthreads();
  return result;
}

__device__ __forceinline__ float block_max(float x, float* scratch) {
  return block_reduce(warp_max(x), scratch, [](float a, float b) { return fmaxf(a, b); });
}

__device__ __forceinline__ float block_sum(float x, float* scratch) {
  return block_reduce(warp_sum(x), scratch, [](float a, float b) { return a + b; });
}
