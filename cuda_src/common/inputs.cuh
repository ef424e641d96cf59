// common/inputs.cuh: what kernels take by value: the cache of one layer, and the queries of a batch.
//
// Letters    B requests, N nodes, H heads, C latent width, R rope width, W = ceil(N / 32), P num_pages
// Inputs     the wrapper fills every member; strides count elements, the last axis of every array is contiguous
// Requires   checked dtypes, shapes and strides; lengths and page ids come from device memory and are bounded here
// Reference  PagedKV in ddtree_cupy/containers/cache.py
// Source     own
#pragma once

#include "paging.cuh"
#include "visibility.cuh"

// T is const where a kernel reads only.
template <class T>
struct Cache {
  T* ckv;                   // [P, page_size, C]
  T* kpe;                   // [P, page_size, R]
  const int* page_table;    // [B, max_pages]
  const int* context_lens;  // [B]
  long long ckv_page_stride, ckv_slot_stride, kpe_page_stride, kpe_slot_stride;
  int num_pages, page_size, max_pages, max_context;

  __device__ __forceinline__ PageTable table(long long request) const {
    return {page_table + request * max_pages, max_pages, num_pages, page_size};
  }
  __device__ __forceinline__ int context_len(long long request) const {
    return clamp_length(context_lens[request], max_context);
  }
  // Offsets of the rows of a position that the table has an entry for.
  __device__ __forceinline__ long long ckv_row(const PageTable& table, int position) const {
    return table.row(position, ckv_page_stride, ckv_slot_stride);
  }
  __device__ __forceinline__ long long kpe_row(const PageTable& table, int position) const {
    return table.row(position, kpe_page_stride, kpe_slot_stride);
  }
};

template <class T>
struct Queries {
  const T* q_nope;                  // [B, N, H, C]
  const T* q_pe;                    // [B, N, H, R]
  const int* num_nodes;             // [B]
  const unsigned* visibility_bits;  // [B, N, W]
  long long nope_request_stride, nope_node_stride, nope_head_stride, pe_request_stride, pe_node_stride, pe_head_stride;
  int N, H;

  __device__ __forceinline__ int count(long long request) const { return clamp_length(num_nodes[request], N); }
  __device__ __forceinline__ int words() const { return (N + 31) / 32; }
  __device__ __forceinline__ const unsigned* bits(long long request, int node) const {
    return visibility_bits + (request * N + node) * words();
  }
  __device__ __forceinline__ const T* nope(long long request, int node, int head) const {
    return q_nope + request * nope_request_stride + node * nope_node_stride + head * nope_head_stride;
  }
  __device__ __forceinline__ const T* pe(long long request, int node, int head) const {
    return q_pe + request * pe_request_stride + node * pe_node_stride + head * pe_head_stride;
  }
};
