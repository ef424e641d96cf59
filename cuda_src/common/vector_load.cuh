// common/vector_load.cuh: four consecutive elements of shared memory as float32.
//
// Requires   the address is a multiple of 4 elements (16 bytes for float, 8 for the half types)
// Source     own
#pragma once

#include "dtype.cuh"

__device__ __forceinline__ float4 load4(const float* from) { return *reinterpret_cast<const float4*>(from); }

template <class T>
__device__ __forceinline__ float4 load4(const T* from) {
  struct alignas(8) Four {
    T x, y, z, w;
  };
  const Four four = *reinterpret_cast<const Four*>(from);
  return make_float4(to_float(four.x), to_float(four.y), to_float(four.z), to_float(four.w));
}
