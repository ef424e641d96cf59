// emu_math.h: bit casts, conversions, integer and float intrinsics.
//
// Nothing here is fused or approximate: __expf, rsqrtf and the like are the accurate functions, while a GPU is allowed
// a few units in the last place. Compare floats by tolerance, never bit by bit with a GPU.
#pragma once
#include "emu_language.h"

namespace emu {
template <class To, class From>
To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
// max.f32 and min.f32 of PTX: a NaN loses against a number, -0 is below +0.
template <class T>
T maximum(T a, T b) {
  if (a != a) return b;
  if (a == b) return std::signbit(a) ? b : a;
  return a < b ? b : a;
}
template <class T>
T minimum(T a, T b) {
  if (a != a) return b;
  if (a == b) return std::signbit(a) ? a : b;
  return b < a ? b : a;
}
// cvt.*.s32.f32 and friends: NaN gives 0, out-of-range values the nearest end.
template <class To, class From>
To saturate_cast(From v) {
  if (v != v) return 0;
  if (v <= From(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
  if (v >= From(std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
  return To(v);
}
}  // namespace emu

#define fmaxf(a, ...) emu::maximum<float>(a, __VA_ARGS__)
#define fminf(a, ...) emu::minimum<float>(a, __VA_ARGS__)
using std::isfinite;
using std::isinf;
using std::isnan;
using std::signbit;

#define EMU_MINMAX(T)                              \
  inline T max(T a, T b) { return a < b ? b : a; } \
  inline T min(T a, T b) { return b < a ? b : a; }
EMU_MINMAX(int)
EMU_MINMAX(unsigned)
EMU_MINMAX(long)
EMU_MINMAX(unsigned long)
EMU_MINMAX(long long)
EMU_MINMAX(unsigned long long)
#undef EMU_MINMAX
inline unsigned max(int a, unsigned b) { return max(unsigned(a), b); }
inline unsigned max(unsigned a, int b) { return max(a, unsigned(b)); }
inline unsigned min(int a, unsigned b) { return min(unsigned(a), b); }
inline unsigned min(unsigned a, int b) { return min(a, unsigned(b)); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
inline double max(double a, double b) { return emu::maximum(a, b); }
inline double min(double a, double b) { return emu::minimum(a, b); }

#define EMU_FUNCTION(result, name, parameters, expression) \
  inline result name parameters { return expression; }
// bit casts
EMU_FUNCTION(float, __int_as_float, (int v), emu::bits<float>(v))
EMU_FUNCTION(int, __float_as_int, (float v), emu::bits<int>(v))
EMU_FUNCTION(float, __uint_as_float, (unsigned v), emu::bits<float>(v))
EMU_FUNCTION(unsigned, __float_as_uint, (float v), emu::bits<unsigned>(v))
EMU_FUNCTION(double, __longlong_as_double, (long long v), emu::bits<double>(v))
EMU_FUNCTION(long long, __double_as_longlong, (double v), emu::bits<long long>(v))
EMU_FUNCTION(int, __double2hiint, (double v), int(emu::bits<uint64_t>(v) >> 32))
EMU_FUNCTION(int, __double2loint, (double v), int(emu::bits<uint64_t>(v)))
EMU_FUNCTION(double, __hiloint2double, (int high, int low),
             emu::bits<double>(uint64_t(uint32_t(high)) << 32 | uint32_t(low)))
// integers
EMU_FUNCTION(int, __popc, (unsigned v), __builtin_popcount(v))
EMU_FUNCTION(int, __popcll, (unsigned long long v), __builtin_popcountll(v))
EMU_FUNCTION(int, __clz, (int v), v ? __builtin_clz(unsigned(v)) : 32)
EMU_FUNCTION(int, __clzll, (long long v), v ? __builtin_clzll((unsigned long long)v) : 64)
EMU_FUNCTION(int, __ffs, (int v), __builtin_ffs(v))
EMU_FUNCTION(int, __ffsll, (long long v), __builtin_ffsll(v))
inline unsigned __brev(unsigned v) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (v >> i & 1) << (31 - i);
  return reversed;
}
EMU_FUNCTION(unsigned long long, __brevll, (unsigned long long v),
             (unsigned long long)__brev(unsigned(v)) << 32 | __brev(unsigned(v >> 32)))
EMU_FUNCTION(int, __mulhi, (int a, int b), int((long long)a * b >> 32))
EMU_FUNCTION(unsigned, __umulhi, (unsigned a, unsigned b), unsigned((uint64_t)a * b >> 32))
EMU_FUNCTION(unsigned long long, __umul64hi, (unsigned long long a, unsigned long long b),
             (unsigned long long)((unsigned __int128)a * b >> 64))
EMU_FUNCTION(unsigned, __funnelshift_l, (unsigned low, unsigned high, unsigned n),
             unsigned(((uint64_t)high << 32 | low) << (n & 31) >> 32))
EMU_FUNCTION(unsigned, __funnelshift_r, (unsigned low, unsigned high, unsigned n),
             unsigned(((uint64_t)high << 32 | low) >> (n & 31)))
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  uint64_t bytes = (uint64_t)b << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    unsigned select = selector >> (4 * i), byte = unsigned(bytes >> (8 * (select & 7))) & 0xff;
    if (select & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << (8 * i);
  }
  return result;
}
// conversions
EMU_FUNCTION(float, __double2float_rn, (double v), float(v))
EMU_FUNCTION(float, __int2float_rn, (int v), float(v))
EMU_FUNCTION(float, __uint2float_rn, (unsigned v), float(v))
EMU_FUNCTION(float, __ll2float_rn, (long long v), float(v))
EMU_FUNCTION(double, __int2double_rn, (int v), double(v))
EMU_FUNCTION(double, __uint2double_rn, (unsigned v), double(v))
EMU_FUNCTION(double, __ll2double_rn, (long long v), double(v))
// float32 arithmetic
EMU_FUNCTION(float, __fadd_rn, (float a, float b), a + b)
EMU_FUNCTION(float, __fsub_rn, (float a, float b), a - b)
EMU_FUNCTION(float, __fmul_rn, (float a, float b), a * b)
EMU_FUNCTION(float, __fdiv_rn, (float a, float b), a / b)
EMU_FUNCTION(float, __fmaf_rn, (float a, float b, float c), std::fma(a, b, c))
EMU_FUNCTION(float, __fsqrt_rn, (float a), std::sqrt(a))
EMU_FUNCTION(float, __frcp_rn, (float a), 1.0f / a)
EMU_FUNCTION(float, __fdividef, (float a, float b), a / b)
EMU_FUNCTION(float, rsqrtf, (float a), float(1.0 / std::sqrt(double(a))))
EMU_FUNCTION(float, __frsqrt_rn, (float a), rsqrtf(a))
EMU_FUNCTION(float, __saturatef, (float a), a > 0 ? (a < 1 ? a : 1.0f) : 0.0f)
EMU_FUNCTION(float, __expf, (float a), std::exp(a))
EMU_FUNCTION(float, __exp2f, (float a), std::exp2(a))
EMU_FUNCTION(float, __exp10f, (float a), float(std::pow(10.0, double(a))))
EMU_FUNCTION(float, __logf, (float a), std::log(a))
EMU_FUNCTION(float, __log2f, (float a), std::log2(a))
EMU_FUNCTION(float, __log10f, (float a), std::log10(a))
EMU_FUNCTION(float, __powf, (float a, float b), std::pow(a, b))
EMU_FUNCTION(float, __sinf, (float a), std::sin(a))
EMU_FUNCTION(float, __cosf, (float a), std::cos(a))
EMU_FUNCTION(float, __tanhf, (float a), std::tanh(a))
// float64 arithmetic
EMU_FUNCTION(double, __dadd_rn, (double a, double b), a + b)
EMU_FUNCTION(double, __dsub_rn, (double a, double b), a - b)
EMU_FUNCTION(double, __dmul_rn, (double a, double b), a * b)
EMU_FUNCTION(double, __ddiv_rn, (double a, double b), a / b)
EMU_FUNCTION(double, __dsqrt_rn, (double a), std::sqrt(a))
EMU_FUNCTION(double, __fma_rn, (double a, double b, double c), std::fma(a, b, c))
EMU_FUNCTION(double, rsqrt, (double a), 1.0 / std::sqrt(a))

inline size_t __cvta_generic_to_shared(const void* address) { return reinterpret_cast<size_t>(address); }
inline bool __isShared(const void* address) { return emu::is_shared(address); }
