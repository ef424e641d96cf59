// One block per row: the maximum, the sum of exponentials, the quotient.
extern "C" __global__ void softmax(const float* x, float* y, int n) {
  extern __shared__ float part[];
  int t = threadIdx.x;
  x += blockIdx.x * (long long)n;
  y += blockIdx.x * (long long)n;

  float largest = -3.4e38f;
  for (int i = t; i < n; i += blockDim.x) largest = fmaxf(largest, x[i]);
  part[t] = largest;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (t < half) part[t] = fmaxf(part[t], part[t + half]);
    __syncthreads();
  }
  largest = part[0];
  __syncthreads();

  float sum = 0;
  for (int i = t; i < n; i += blockDim.x) sum += expf(x[i] - largest);
  part[t] = sum;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (t < half) part[t] += part[t + half];
    __syncthreads();
  }
  for (int i = t; i < n; i += blockDim.x) y[i] = expf(x[i] - largest) / part[0];
}
