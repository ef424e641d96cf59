// tree_attention/v4_results.cuh: rows of results from the registers of a value warpgroup to global memory.
//
// Letters    as v4_layout.cuh; a thread has rows r = 16 * warp + lane / 4 and r + 8 of the row tile, and of each the
//            columns 8j + 2p and 8j + 2p + 1 of its half, p = lane % 4
// Source     own
#pragma once

#include "tree_attention/v4_layout.cuh"

// Eight elements, 16 bytes at once where `to` is a multiple of 16 bytes.
template <bool ALIGNED, class T>
__device__ __forceinline__ void store_8(T* to, const unsigned (&v)[4]) {
  if (ALIGNED) {
    *reinterpret_cast<uint4*>(to) = make_uint4(v[0], v[1], v[2], v[3]);
  } else {
    unsigned short* const elements = reinterpret_cast<unsigned short*>(to);
#pragma unroll
    for (int i = 0; i < 8; ++i) elements[i] = (unsigned short)(v[i / 2] >> 16 * (i % 2));
  }
}

// Lane p of four has pair p of four groups of columns; afterwards it has the four pairs of group p.
__device__ __forceinline__ void transpose_quad(unsigned (&v)[4]) {
  const int p = threadIdx.x % 4;
  unsigned of_group[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int j = p ^ k;
    unsigned x = j & 2 ? (j & 1 ? v[3] : v[2]) : (j & 1 ? v[1] : v[0]);
    if (k > 0) x = __shfl_xor_sync(FULL_WARP, x, k);
#pragma unroll
    for (int u = 0; u < 4; ++u)
      if (j == u) of_group[u] = x;
  }
#pragma unroll
  for (int u = 0; u < 4; ++u) v[u] = of_group[u];
}

// 64 rows x 256 columns times a factor of each row. `to` is column 256 * half of row 0 of the row tile.
template <bool ALIGNED, class T>
__device__ __forceinline__ void store_half(const float (&o)[128], const float (&factor)[2], T* to, int rows) {
  const int row = threadIdx.x % WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4, p = threadIdx.x % 4;
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    const int r = row + 8 * upper;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      unsigned v[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int i = 4 * (4 * c + k) + 2 * upper;
        v[k] = pack2<T>(o[i] * factor[upper], o[i + 1] * factor[upper]);
      }
      transpose_quad(v);
      if (r < rows) store_8<ALIGNED>(to + r * C + 32 * c + 8 * p, v);
    }
  }
}

template <class T>
__device__ __forceinline__ void store_rows(const float (&o)[128], const float (&factor)[2], T* to, int rows) {
  if (reinterpret_cast<size_t>(to) % 16 == 0)
    store_half<true>(o, factor, to, rows);
  else
    store_half<false>(o, factor, to, rows);
}
