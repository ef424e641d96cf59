// emu_intrinsics.h: directed rounding, further integer and math functions, clocks, vector atomics, address spaces.
#pragma once
#include <cfenv>

#include "emu_half.h"

namespace emu {
// Runs with another rounding mode; the operands must be volatile, or the compiler would compute with its own.
template <class Compute>
auto rounded(int mode, Compute compute) {
  int before = std::fegetround();
  std::fesetround(mode);
  volatile auto result = compute();
  std::fesetround(before);
  return static_cast<decltype(compute())>(result);
}
}  // namespace emu

#define EMU_ROUNDED1(R, T, name, expression)                                                                         \
  inline R name##_rz(T v) { volatile T a = v; return emu::rounded(FE_TOWARDZERO, [&]() -> R { return expression; }); } \
  inline R name##_ru(T v) { volatile T a = v; return emu::rounded(FE_UPWARD, [&]() -> R { return expression; }); }     \
  inline R name##_rd(T v) { volatile T a = v; return emu::rounded(FE_DOWNWARD, [&]() -> R { return expression; }); }
#define EMU_ROUNDED2(T, name, expression)                                                                 \
  EMU_ROUNDED2_MODE(T, name##_rz, FE_TOWARDZERO, expression)                                              \
  EMU_ROUNDED2_MODE(T, name##_ru, FE_UPWARD, expression)                                                  \
  EMU_ROUNDED2_MODE(T, name##_rd, FE_DOWNWARD, expression)
#define EMU_ROUNDED2_MODE(T, name, mode, expression)                        \
  inline T name(T v, T w) {                                                 \
    volatile T a = v, b = w;                                                \
    return emu::rounded(mode, [&]() -> T { return expression; });           \
  }
#define EMU_ROUNDED3(T, name, mode)                                         \
  inline T name(T u, T v, T w) {                                            \
    volatile T a = u, b = v, c = w;                                         \
    return emu::rounded(mode, [&]() -> T { return std::fma(T(a), T(b), T(c)); }); \
  }
EMU_ROUNDED2(float, __fadd, a + b)
EMU_ROUNDED2(float, __fsub, a - b)
EMU_ROUNDED2(float, __fmul, a * b)
EMU_ROUNDED2(float, __fdiv, a / b)
EMU_ROUNDED2(double, __dadd, a + b)
EMU_ROUNDED2(double, __dsub, a - b)
EMU_ROUNDED2(double, __dmul, a * b)
EMU_ROUNDED2(double, __ddiv, a / b)
EMU_ROUNDED3(float, __fmaf_rz, FE_TOWARDZERO)
EMU_ROUNDED3(float, __fmaf_ru, FE_UPWARD)
EMU_ROUNDED3(float, __fmaf_rd, FE_DOWNWARD)
EMU_ROUNDED3(double, __fma_rz, FE_TOWARDZERO)
EMU_ROUNDED3(double, __fma_ru, FE_UPWARD)
EMU_ROUNDED3(double, __fma_rd, FE_DOWNWARD)
EMU_ROUNDED1(float, float, __fsqrt, std::sqrt(float(a)))
EMU_ROUNDED1(double, double, __dsqrt, std::sqrt(double(a)))
EMU_ROUNDED1(float, float, __frcp, 1.0f / a)
EMU_ROUNDED1(double, double, __drcp, 1.0 / a)
EMU_ROUNDED1(float, double, __double2float, float(a))
EMU_ROUNDED1(float, int, __int2float, float(a))
EMU_ROUNDED1(float, unsigned, __uint2float, float(a))
EMU_ROUNDED1(float, long long, __ll2float, float(a))
EMU_ROUNDED1(float, unsigned long long, __ull2float, float(a))
EMU_ROUNDED1(double, long long, __ll2double, double(a))
EMU_ROUNDED1(double, unsigned long long, __ull2double, double(a))
EMU_FUNCTION(double, __drcp_rn, (double a), 1.0 / a)
EMU_FUNCTION(float, __ull2float_rn, (unsigned long long v), float(v))
EMU_FUNCTION(double, __ull2double_rn, (unsigned long long v), double(v))

#define EMU_TO_INTEGER(From, Result, name)                                                              \
  inline Result name##_rn(From v) { return emu::saturate_cast<Result>(std::nearbyint(v)); }             \
  inline Result name##_rz(From v) { return emu::saturate_cast<Result>(std::trunc(v)); }                 \
  inline Result name##_ru(From v) { return emu::saturate_cast<Result>(std::ceil(v)); }                  \
  inline Result name##_rd(From v) { return emu::saturate_cast<Result>(std::floor(v)); }
EMU_TO_INTEGER(float, int, __float2int)
EMU_TO_INTEGER(float, unsigned, __float2uint)
EMU_TO_INTEGER(float, long long, __float2ll)
EMU_TO_INTEGER(float, unsigned long long, __float2ull)
EMU_TO_INTEGER(double, int, __double2int)
EMU_TO_INTEGER(double, unsigned, __double2uint)
EMU_TO_INTEGER(double, long long, __double2ll)
EMU_TO_INTEGER(double, unsigned long long, __double2ull)

// integers
EMU_FUNCTION(int, __mul24, (int a, int b), (int)((unsigned)(a << 8 >> 8) * (unsigned)(b << 8 >> 8)))
EMU_FUNCTION(unsigned, __umul24, (unsigned a, unsigned b), (a & 0xffffff) * (b & 0xffffff))
EMU_FUNCTION(long long, __mul64hi, (long long a, long long b), (long long)((__int128)a * b >> 64))
EMU_FUNCTION(unsigned, __sad, (int a, int b, unsigned c), (a < b ? unsigned(b) - unsigned(a) : unsigned(a) - unsigned(b)) + c)
EMU_FUNCTION(unsigned, __usad, (unsigned a, unsigned b, unsigned c), (a < b ? b - a : a - b) + c)
EMU_FUNCTION(int, __hadd, (int a, int b), int(((long long)a + b) >> 1))
EMU_FUNCTION(int, __rhadd, (int a, int b), int(((long long)a + b + 1) >> 1))
EMU_FUNCTION(unsigned, __uhadd, (unsigned a, unsigned b), unsigned(((uint64_t)a + b) >> 1))
EMU_FUNCTION(unsigned, __urhadd, (unsigned a, unsigned b), unsigned(((uint64_t)a + b + 1) >> 1))
EMU_FUNCTION(unsigned, __funnelshift_lc, (unsigned low, unsigned high, unsigned n),
             n >= 32 ? low : unsigned(((uint64_t)high << 32 | low) << n >> 32))
EMU_FUNCTION(unsigned, __funnelshift_rc, (unsigned low, unsigned high, unsigned n),
             n >= 32 ? high : unsigned(((uint64_t)high << 32 | low) >> n))

// math
EMU_FUNCTION(float, __tanf, (float a), std::tan(a))
EMU_FUNCTION(float, fdividef, (float a, float b), a / b)
inline void __sincosf(float a, float* s, float* c) { *s = std::sin(a), *c = std::cos(a); }
#define EMU_PI(T, suffix, PI)                                                           \
  inline T sinpi##suffix(T a) { return std::sin(std::fmod(a, T(2)) * T(PI)); }          \
  inline T cospi##suffix(T a) { return std::cos(std::fmod(a, T(2)) * T(PI)); }          \
  inline void sincospi##suffix(T a, T* s, T* c) { *s = sinpi##suffix(a), *c = cospi##suffix(a); } \
  inline T rhypot##suffix(T a, T b) { return 1 / std::hypot(a, b); }                    \
  inline T rcbrt##suffix(T a) { return 1 / std::cbrt(a); }                              \
  inline T norm3d##suffix(T a, T b, T c) { return std::hypot(a, b, c); }                \
  inline T rnorm3d##suffix(T a, T b, T c) { return 1 / std::hypot(a, b, c); }           \
  inline T normcdf##suffix(T a) { return T(0.5 * std::erfc(-double(a) / 1.4142135623730951)); } \
  inline T erfcx##suffix(T a) { return T(std::exp(double(a) * a) * std::erfc(double(a))); }
EMU_PI(float, f, 3.14159265358979323846)
EMU_PI(double, , 3.14159265358979323846)

// clocks only go forward
inline long long clock64() { static long long ticks = 0; return ticks += 16; }
inline long clock() { return long(clock64()); }
inline unsigned long long __globaltimer() { return (unsigned long long)clock64(); }

// vector atomics are one atomic per element, as on a GPU
inline float2 atomicAdd(float2* p, float2 v) { return {atomicAdd(&p->x, v.x), atomicAdd(&p->y, v.y)}; }
inline float4 atomicAdd(float4* p, float4 v) {
  return {atomicAdd(&p->x, v.x), atomicAdd(&p->y, v.y), atomicAdd(&p->z, v.z), atomicAdd(&p->w, v.w)};
}
inline __half2 atomicAdd(__half2* p, __half2 v) { return {atomicAdd(&p->x, v.x), atomicAdd(&p->y, v.y)}; }
inline __nv_bfloat162 atomicAdd(__nv_bfloat162* p, __nv_bfloat162 v) {
  return {atomicAdd(&p->x, v.x), atomicAdd(&p->y, v.y)};
}

// address spaces: a stack is what lies near a local variable
inline bool __isLocal(const void* address) {
  auto here = reinterpret_cast<size_t>(__builtin_frame_address(0)), there = reinterpret_cast<size_t>(address);
  return there - (here & ~size_t(0x3ffff)) < size_t(0x80000) && !emu::is_shared(address);
}
inline bool __isGlobal(const void* address) { return !emu::is_shared(address) && !__isLocal(address); }
