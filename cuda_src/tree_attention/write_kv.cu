// tree_attention/write_kv.cu: writes the key rows of tree nodes into the paged cache.
//
// Computes   ckv[position(context_len + i)] = ckv_rows[i], the same for kpe, for i < num_rows
// Letters    B requests, N rows per request, C latent width, R rope width, P pages
// Inputs     ckv_rows, kpe_rows  T[B, N, C], T[B, N, R]; last axis contiguous, other strides given
//            page_table int32[B, max_pages]; context_lens int32[B]
//            num_rows int32[B], or null: rows_of_all for every request
// Outputs    ckv, kpe T[P, page_size, C or R]; last axis contiguous, other strides given; only those rows are written
// Work       grid (N, B), block 128; a block owns one row, threads stride over its elements
// Numerics   none: bits are copied
// Requires   dtypes, shapes and strides checked; a position without a page of the pool is skipped
// Versions   this
// Reference  ddtree_cupy/tree_attention/reference.py
// Source     own
#include "common/dtype.cuh"
#include "common/paging.cuh"

template <class T>
__global__ void __launch_bounds__(128)
    write_kv(const T* __restrict__ ckv_rows, const T* __restrict__ kpe_rows, const int* __restrict__ page_table,
             const int* __restrict__ context_lens, const int* __restrict__ num_rows, T* __restrict__ ckv,
             T* __restrict__ kpe, int N, int C, int R, int num_pages, int page_size, int max_pages, int rows_of_all,
             long long ckv_rows_request_stride, long long ckv_rows_row_stride, long long kpe_rows_request_stride,
             long long kpe_rows_row_stride, long long ckv_page_stride, long long ckv_slot_stride,
             long long kpe_page_stride, long long kpe_slot_stride) {
  const int i = blockIdx.x;        // 0..N-1
  const int request = blockIdx.y;  // 0..B-1
  const int count = min(num_rows == nullptr ? rows_of_all : num_rows[request], N);
  const PageTable table = {page_table + (long long)request * max_pages, max_pages, num_pages, page_size};
  const long long position = (long long)context_lens[request] + i;
  if (i >= count || !table.is_mapped(position)) return;

  T* ckv_row = ckv + table.row((int)position, ckv_page_stride, ckv_slot_stride);
  T* kpe_row = kpe + table.row((int)position, kpe_page_stride, kpe_slot_stride);
  const T* from_ckv = ckv_rows + request * ckv_rows_request_stride + i * ckv_rows_row_stride;
  const T* from_kpe = kpe_rows + request * kpe_rows_request_stride + i * kpe_rows_row_stride;
  for (int c = threadIdx.x; c < C; c += blockDim.x) ckv_row[c] = from_ckv[c];
  for (int r = threadIdx.x; r < R; r += blockDim.x) kpe_row[r] = from_kpe[r];
}
