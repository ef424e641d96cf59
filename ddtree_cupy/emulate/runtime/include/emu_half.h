// emu_half.h: __half, __nv_bfloat16 and their pairs, bit for bit.
//
// Every operation is computed in a wider type and rounded once, to nearest even. Where the wide result may itself be
// rounded (fma, conversions from float64) it is rounded to odd first, which makes the second rounding the only one.
#pragma once
#include "emu_math.h"

namespace emu {

// float64 to float32, inexact results with the last bit set.
inline float to_float_odd(double v) {
  uint64_t u = bits<uint64_t>(v);
  uint32_t sign = uint32_t(u >> 32) & 0x80000000u;
  int exponent = int(u >> 52 & 0x7ff) - 1023;
  uint64_t fraction = u & 0xfffffffffffffull;
  if (exponent == 1024) return bits<float>(sign | 0x7f800000u | (fraction ? 0x400000u : 0u));
  if (exponent > 127) return bits<float>(sign | 0x7f7fffffu);  // odd: the next rounding decides about infinity
  if (exponent < -150) return bits<float>(sign | (u << 1 ? 1u : 0u));
  int drop = 29;
  uint64_t significand = fraction;
  if (exponent < -126) {  // a float32 subnormal
    significand |= 1ull << 52;
    drop += -126 - exponent;
    exponent = -127;
  }
  uint32_t kept = uint32_t(significand >> drop);
  if (significand & ((1ull << drop) - 1)) kept |= 1;
  return bits<float>(sign | ((uint32_t(exponent + 127) << 23) + kept));
}

// a * b + c in float64, rounded to odd; a * b must be exact in float64.
inline double fma_odd(double a, double b, double c) {
  double product = a * b, sum = product + c;
  double back = sum - product, error = (product - (sum - back)) + (c - back);
  if (error == 0 || error != error || std::fabs(sum) > 1e300) return sum;
  int64_t u = bits<int64_t>(sum);
  if (u & 1) return sum;
  bool away = (error > 0) == (sum > 0);
  return bits<double>(away ? u + 1 : u - 1);
}

struct Half {
  static constexpr bool kIsHalf = true;
  static uint16_t encode(float f) {
    uint32_t u = bits<uint32_t>(f), sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;
    if (u > 0x7f800000) return 0x7fff;
    if (u >= 0x477ff000) return uint16_t(sign | 0x7c00);
    if (u < 0x33000001) return uint16_t(sign);  // at most half of the smallest subnormal
    uint32_t significand, drop, result;
    if (u < 0x38800000) {  // subnormal result
      significand = (u & 0x7fffff) | 0x800000;
      drop = 126 - (u >> 23);
      result = significand >> drop;
    } else {
      significand = u;
      drop = 13;
      result = (u - 0x38000000) >> 13;
    }
    uint32_t rest = significand & ((1u << drop) - 1), half = 1u << (drop - 1);
    result += rest > half || (rest == half && (result & 1));
    return uint16_t(sign | result);
  }
  static float decode(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ff;
    if (exponent == 31) return bits<float>(sign | 0x7f800000 | fraction << 13);
    if (exponent) return bits<float>(sign | (exponent + 112) << 23 | fraction << 13);
    float tiny = float(fraction) * 5.9604644775390625e-8f;  // 2^-24
    return bits<float>(sign | bits<uint32_t>(tiny));
  }
};
struct Bfloat16 {
  static constexpr bool kIsHalf = false;
  static uint16_t encode(float f) {
    uint32_t u = bits<uint32_t>(f);
    if ((u & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
  }
  static float decode(uint16_t h) { return bits<float>(uint32_t(h) << 16); }
};

template <class Format>
struct alignas(2) Small {
  unsigned short bits_;
  struct Raw {
    unsigned short x;
  };
  Small() = default;
  Small(float f) : bits_(Format::encode(f)) {}
  Small(double f) : bits_(Format::encode(to_float_odd(f))) {}
  Small(int v) : Small(double(v)) {}
  Small(unsigned v) : Small(double(v)) {}
  Small(Raw raw) : bits_(raw.x) {}
  operator float() const { return Format::decode(bits_); }
  operator Raw() const { return {bits_}; }
  Small operator-() const { return Raw{static_cast<unsigned short>(bits_ ^ 0x8000)}; }
  Small& operator+=(Small o) { return *this = *this + o; }
  Small& operator-=(Small o) { return *this = *this - o; }
  Small& operator*=(Small o) { return *this = *this * o; }
  Small& operator/=(Small o) { return *this = *this / o; }
  friend Small operator+(Small a, Small b) { return float(a) + float(b); }
  friend Small operator-(Small a, Small b) { return float(a) - float(b); }
  friend Small operator*(Small a, Small b) { return float(a) * float(b); }
  friend Small operator/(Small a, Small b) { return float(a) / float(b); }
  friend bool operator<(Small a, Small b) { return float(a) < float(b); }
  friend bool operator>(Small a, Small b) { return float(a) > float(b); }
  friend bool operator<=(Small a, Small b) { return float(a) <= float(b); }
  friend bool operator>=(Small a, Small b) { return float(a) >= float(b); }
  friend bool operator==(Small a, Small b) { return float(a) == float(b); }
  friend bool operator!=(Small a, Small b) { return float(a) != float(b); }
};
template <class Format>
struct alignas(4) SmallPair {
  Small<Format> x, y;
  SmallPair operator-() const { return {-x, -y}; }
  SmallPair& operator+=(SmallPair o) { return *this = *this + o; }
  SmallPair& operator-=(SmallPair o) { return *this = *this - o; }
  SmallPair& operator*=(SmallPair o) { return *this = *this * o; }
  SmallPair& operator/=(SmallPair o) { return *this = *this / o; }
  friend SmallPair operator+(SmallPair a, SmallPair b) { return {a.x + b.x, a.y + b.y}; }
  friend SmallPair operator-(SmallPair a, SmallPair b) { return {a.x - b.x, a.y - b.y}; }
  friend SmallPair operator*(SmallPair a, SmallPair b) { return {a.x * b.x, a.y * b.y}; }
  friend SmallPair operator/(SmallPair a, SmallPair b) { return {a.x / b.x, a.y / b.y}; }
  friend bool operator==(SmallPair a, SmallPair b) { return a.x == b.x && a.y == b.y; }
  friend bool operator!=(SmallPair a, SmallPair b) { return a.x != b.x && a.y != b.y; }
  friend bool operator<(SmallPair a, SmallPair b) { return a.x < b.x && a.y < b.y; }
  friend bool operator>(SmallPair a, SmallPair b) { return a.x > b.x && a.y > b.y; }
  friend bool operator<=(SmallPair a, SmallPair b) { return a.x <= b.x && a.y <= b.y; }
  friend bool operator>=(SmallPair a, SmallPair b) { return a.x >= b.x && a.y >= b.y; }
};

}  // namespace emu

using __half = emu::Small<emu::Half>;
using __half2 = emu::SmallPair<emu::Half>;
using __half_raw = __half::Raw;
using __nv_bfloat16 = emu::Small<emu::Bfloat16>;
using __nv_bfloat162 = emu::SmallPair<emu::Bfloat16>;
using __nv_bfloat16_raw = __nv_bfloat16::Raw;
using half = __half;
using half2 = __half2;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

#include "emu_half_functions.h"
