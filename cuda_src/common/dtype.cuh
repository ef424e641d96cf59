// common/dtype.cuh: float32 values of the three input types, and constants for which NVRTC has no macro.
//
// Numerics   widening is exact; narrowing rounds to nearest even, as NumPy and ml_dtypes do
// Reference  numpy.ndarray.astype
// Source     own
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define NEGATIVE_INFINITY __int_as_float(0xff800000)
#define POSITIVE_INFINITY __int_as_float(0x7f800000)
#define QUIET_NAN __int_as_float(0x7fc00000)

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// -0.0 and float32 subnormals count as +0.0 (design rule of tree_build, independent of -ftz)
__device__ __forceinline__ float canonical(float x) { return fabsf(x) < 1.17549435e-38f ? 0.0f : x; }

__device__ __forceinline__ bool is_nan(float x) { return x != x; }
