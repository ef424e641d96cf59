// common/paging.cuh: from a logical position of one request to the row of a paged cache.
//
// Letters    P num_pages, max_pages entries of one request's page table
// Numerics   every offset is 64-bit: page * stride passes 2^31 elements in real pools
// Requires   nothing: lengths and page ids come from device memory and may be wrong, so both are bounded here by
//            sizes that the host knows. A wrong id then reads a wrong row, but never an illegal address.
// Reference  PagedKV.locate in ddtree_cupy/containers/cache.py
// Source     own
#pragma once

struct PageTable {
  const int* entries;  // int32[max_pages] of one request
  int max_pages;
  int num_pages;
  int page_size;

  // The number of positions that have an entry; 0 for an empty pool.
  __device__ __forceinline__ long long capacity() const {
    return num_pages > 0 ? (long long)max_pages * page_size : 0;
  }

  // The page of a position in 0..capacity()-1, clamped into the pool.
  __device__ __forceinline__ int page(int position) const {
    return min(max(entries[position / page_size], 0), num_pages - 1);
  }

  // Whether the table holds a page of the pool for this position; writers ask before they write.
  __device__ __forceinline__ bool is_mapped(long long position) const {
    if (position < 0 || position >= capacity()) return false;
    const int page = entries[position / page_size];
    return page >= 0 && page < num_pages;
  }

  // The page of any position, -1 where the table, which must have entries, holds none of the pool; without a branch, so
  // that several reads can be in flight.
  __device__ __forceinline__ int mapped_page(int position) const {
    const int inside = (int)min((long long)max(position, 0), capacity() - 1);
    const int page = entries[inside / page_size];
    return inside == position && page < num_pages ? max(page, -1) : -1;
  }

  // The offset, in elements, of the row of a position in 0..capacity()-1.
  __device__ __forceinline__ long long row(int position, long long page_stride, long long slot_stride) const {
    return page(position) * page_stride + (position % page_size) * slot_stride;
  }
};

__device__ __forceinline__ int clamp_length(int length, int most) { return min(max(length, 0), most); }
