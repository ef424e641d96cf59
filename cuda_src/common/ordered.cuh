// common/ordered.cuh: floats as unsigned integers of the same order, so that integer instructions compare them.
//
// Computes   ordered(x) < ordered(y) exactly when x < y; no number maps to 0, which can therefore mean "nothing"
// Numerics   works on the bits, so neither -ftz nor fused arithmetic matters; -0.0 and 0.0 differ until the caller
//            maps one to the other
// Requires   no NaN
// Source     the usual sign trick of radix sorts
#pragma once

#include "dtype.cuh"

constexpr unsigned ORDERED_NEGATIVE_INFINITY = 0x007fffffu;

__device__ __forceinline__ unsigned ordered_bits(float x) {
  const unsigned bits = __float_as_uint(x);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ float from_ordered_bits(unsigned ordered) {
  return __uint_as_float(ordered ^ (ordered >> 31 ? 0x80000000u : 0xffffffffu));
}

__device__ __forceinline__ unsigned long long ordered_bits(double x) {
  const unsigned long long bits = (unsigned long long)__double_as_longlong(x);
  return bits ^ (bits >> 63 ? ~0ull : 1ull << 63);
}

__device__ __forceinline__ double from_ordered_bits(unsigned long long ordered) {
  return __longlong_as_double((long long)(ordered ^ (ordered >> 63 ? 1ull << 63 : ~0ull)));
}

// How many low bits of ordered_bits(float) carry no information when the float was converted from T: they are all 0 or,
// for a negative number, all 1. The remaining bits are the telling bits.
template <class T>
constexpr int SILENT_BITS = 0;
template <>
constexpr int SILENT_BITS<__half> = 13;
template <>
constexpr int SILENT_BITS<__nv_bfloat16> = 16;

// The inverse of ordered_bits(x) >> silent_bits.
__device__ __forceinline__ float from_telling_bits(unsigned telling, int silent_bits) {
  const unsigned ordered = telling << silent_bits;
  return from_ordered_bits(ordered >> 31 ? ordered : ordered | ((1u << silent_bits) - 1));
}
