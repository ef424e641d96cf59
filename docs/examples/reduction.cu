// The sum of an array: shuffles within warps, one atomic per block.
extern "C" __global__ void reduction(const int* x, int* total, int n) {
  __shared__ int of_warps[32];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += x[i];
  for (int half = 16; half > 0; half /= 2) sum += __shfl_down_sync(0xffffffffu, sum, half);
  if (lane == 0) of_warps[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    sum = lane < blockDim.x / 32 ? of_warps[lane] : 0;
    for (int half = 16; half > 0; half /= 2) sum += __shfl_down_sync(0xffffffffu, sum, half);
    if (lane == 0) atomicAdd(total, sum);
  }
}
