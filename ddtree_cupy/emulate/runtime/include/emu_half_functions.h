// emu_half_functions.h: the intrinsics of cuda_fp16.h and cuda_bf16.h that kernels use.
#pragma once

// Names that both headers spell alike.
#define EMU_SMALL_FUNCTIONS(T, T2)                                                                        \
  inline T __hadd(T a, T b) { return a + b; }                                                             \
  inline T __hsub(T a, T b) { return a - b; }                                                             \
  inline T __hmul(T a, T b) { return a * b; }                                                             \
  inline T __hdiv(T a, T b) { return a / b; }                                                             \
  inline T __hneg(T a) { return -a; }                                                                     \
  inline T __habs(T a) { return T::Raw{static_cast<unsigned short>(a.bits_ & 0x7fff)}; }                  \
  inline T __hfma(T a, T b, T c) { return emu::fma_odd(float(a), float(b), float(c)); }                   \
  inline T __hmax(T a, T b) { return emu::maximum<float>(a, b); }                                         \
  inline T __hmin(T a, T b) { return emu::minimum<float>(a, b); }                                         \
  inline bool __hlt(T a, T b) { return a < b; }                                                           \
  inline bool __hle(T a, T b) { return a <= b; }                                                          \
  inline bool __hgt(T a, T b) { return a > b; }                                                           \
  inline bool __hge(T a, T b) { return a >= b; }                                                          \
  inline bool __heq(T a, T b) { return a == b; }                                                          \
  inline bool __hne(T a, T b) { return !(float(a) != float(a) || float(b) != float(b)) && a != b; }       \
  inline bool __hisnan(T a) { return float(a) != float(a); }                                              \
  inline T2 __hadd2(T2 a, T2 b) { return {a.x + b.x, a.y + b.y}; }                                        \
  inline T2 __hsub2(T2 a, T2 b) { return {a.x - b.x, a.y - b.y}; }                                        \
  inline T2 __hmul2(T2 a, T2 b) { return {a.x * b.x, a.y * b.y}; }                                        \
  inline T2 __hneg2(T2 a) { return {-a.x, -a.y}; }                                                        \
  inline T2 __hfma2(T2 a, T2 b, T2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }          \
  inline T2 __hmax2(T2 a, T2 b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }                          \
  inline T2 __hmin2(T2 a, T2 b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }                          \
  inline float __low2float(T2 a) { return a.x; }                                                          \
  inline float __high2float(T2 a) { return a.y; }
EMU_SMALL_FUNCTIONS(__half, __half2)
EMU_SMALL_FUNCTIONS(__nv_bfloat16, __nv_bfloat162)
#undef EMU_SMALL_FUNCTIONS

// Names that carry the type: (element, pair, its spelling, bit-cast spelling, pair from floats, pair from one,
// pair from two, pair to float2, float2 to pair).
#define EMU_SMALL_NAMES(T, T2, NAME, BITS, FROM_FLOATS, FROM_ONE, FROM_TWO, TO_FLOAT2, FROM_FLOAT2)   \
  inline T __float2##NAME(float f) { return f; }                                                      \
  inline T __float2##NAME##_rn(float f) { return f; }                                                 \
  inline T __double2##NAME(double f) { return f; }                                                    \
  inline T __int2##NAME##_rn(int v) { return v; }                                                     \
  inline float __##NAME##2float(T h) { return h; }                                                    \
  inline unsigned short __##BITS##_as_ushort(T h) { return h.bits_; }                                 \
  inline short __##BITS##_as_short(T h) { return static_cast<short>(h.bits_); }                       \
  inline T __ushort_as_##BITS(unsigned short v) { return T::Raw{v}; }                                 \
  inline T __short_as_##BITS(short v) { return T::Raw{static_cast<unsigned short>(v)}; }              \
  inline T2 FROM_FLOATS(float a, float b) { return {a, b}; }                                          \
  inline T2 FROM_ONE(T a) { return {a, a}; }                                                          \
  inline T2 FROM_TWO(T a, T b) { return {a, b}; }                                                     \
  inline float2 TO_FLOAT2(T2 a) { return {a.x, a.y}; }                                                \
  inline T2 FROM_FLOAT2(float2 a) { return {a.x, a.y}; }                                              \
  inline T __low2##NAME(T2 a) { return a.x; }                                                         \
  inline T __high2##NAME(T2 a) { return a.y; }
EMU_SMALL_NAMES(__half, __half2, half, half, __floats2half2_rn, __half2half2, __halves2half2, __half22float2,
                __float22half2_rn)
EMU_SMALL_NAMES(__nv_bfloat16, __nv_bfloat162, bfloat16, bfloat16, __floats2bfloat162_rn, __bfloat162bfloat162,
                __halves2bfloat162, __bfloat1622float2, __float22bfloat162_rn)
#undef EMU_SMALL_NAMES
inline __half2 __float2half2_rn(float f) { return {f, f}; }
inline __nv_bfloat162 __float2bfloat162_rn(float f) { return {f, f}; }
inline __half2 make_half2(__half a, __half b) { return {a, b}; }
inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return {a, b}; }
