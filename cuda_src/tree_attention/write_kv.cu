// tree_attention/write_kv.cu: writes the key rows of tree nodes into the paged cache.
//
// Computes   ckv[position(context_len + i)] = ckv_rows[i], the same for kpe, for i < num_rows
// Letters    B requests, N rows per request, C latent width, R rope width, P pages
// Inputs     ckv_rows, kpe_rows  T[B, N, C], T[B, N, R]; last axis contiguous, other strides given
//            num_rows int32[B], or null: rows_of_all for every request
//            cache  int32 page_table[B, max_pages], context_lens[B] (common/inputs.cuh)
// Outputs    cache  T ckv[P, page_size, C], kpe[P, page_size, R]: only those rows are written
// Work       grid (N, B), block 128; a block owns one row, threads stride over its elements
// Numerics   none: bits are copied
// Requires   dtypes, shapes and strides checked; a position without a page of the pool is skipped
// Versions   this
// Reference  ddtree_cupy/tree_attention/reference.py
// Source     own
#include "common/dtype.cuh"
#include "common/inputs.cuh"

template <class T>
__global__ void __launch_bounds__(128)
    write_kv(const T* __restrict__ ckv_rows, const T* __restrict__ kpe_rows, const int* __restrict__ num_rows,
             Cache<T> cache, int N, int C, int R, int rows_of_all, long long ckv_request_stride,
             long long ckv_row_stride, long long kpe_request_stride, long long kpe_row_stride) {
  const int i = blockIdx.x;        // 0..N-1
  const int request = blockIdx.y;  // 0..B-1
  const int count = min(num_rows == nullptr ? rows_of_all : num_rows[request], N);
  const PageTable table = cache.table(request);
  const long long position = (long long)cache.context_lens[request] + i;
  if (i >= count || !table.is_mapped(position)) return;

  T* ckv_row = cache.ckv + cache.ckv_row(table, (int)position);
  T* kpe_row = cache.kpe + cache.kpe_row(table, (int)position);
  const T* from_ckv = ckv_rows + request * ckv_request_stride + i * ckv_row_stride;
  const T* from_kpe = kpe_rows + request * kpe_request_stride + i * kpe_row_stride;
  for (int c = threadIdx.x; c < C; c += blockDim.x) ckv_row[c] = from_ckv[c];
  for (int r = threadIdx.x; r < R; r += blockDim.x) kpe_row[r] = from_kpe[r];
}
