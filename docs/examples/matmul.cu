// C = A B for row-major matrices of any size, in tiles of 16 x 16 in shared memory.
extern "C" __global__ void matmul(const float* a, const float* b, float* c, int rows, int inner, int columns) {
  __shared__ float tile_a[16][16], tile_b[16][16];
  int x = threadIdx.x, y = threadIdx.y;
  int row = blockIdx.y * 16 + y, column = blockIdx.x * 16 + x;
  float sum = 0;
  for (int k = 0; k < inner; k += 16) {
    tile_a[y][x] = row < rows && k + x < inner ? a[row * inner + k + x] : 0;
    tile_b[y][x] = k + y < inner && column < columns ? b[(k + y) * columns + column] : 0;
    __syncthreads();
    for (int i = 0; i < 16; ++i) sum += tile_a[y][i] * tile_b[i][x];
    __syncthreads();
  }
  if (row < rows && column < columns) c[row * columns + column] = sum;
}
