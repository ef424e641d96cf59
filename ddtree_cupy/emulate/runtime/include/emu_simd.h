// emu_simd.h: CUDA's integer intrinsics on the two halves or four bytes of a word, and dot products of bytes.
#pragma once
#include "emu_language.h"

namespace emu {
template <class T>
struct Wider;  // a type that holds sums and differences
template <> struct Wider<int8_t> { using type = int; };
template <> struct Wider<uint8_t> { using type = int; };
template <> struct Wider<int16_t> { using type = int; };
template <> struct Wider<uint16_t> { using type = int; };

template <class T, class Function>
unsigned by_part(unsigned a, unsigned b, Function function) {
  constexpr int kBits = 8 * sizeof(T), kMask = (1 << kBits) - 1;
  unsigned result = 0;
  for (int at = 0; at < 32; at += kBits) {
    int value = function(typename Wider<T>::type(T(a >> at)), typename Wider<T>::type(T(b >> at)));
    result |= unsigned(value & kMask) << at;
  }
  return result;
}
template <class T>
int clamped(int v) {
  constexpr int low = std::numeric_limits<T>::min(), high = std::numeric_limits<T>::max();
  return v < low ? low : v > high ? high : v;
}
}  // namespace emu

#define EMU_SIMD(name, T, expression) \
  inline unsigned name(unsigned u, unsigned v) { return emu::by_part<T>(u, v, [](int a, int b) { return expression; }); }
#define EMU_SIMD_BOTH(n, S, U)                         \
  EMU_SIMD(__vadd##n, U, a + b)                        \
  EMU_SIMD(__vsub##n, U, a - b)                        \
  EMU_SIMD(__vaddss##n, S, emu::clamped<S>(a + b))     \
  EMU_SIMD(__vaddus##n, U, emu::clamped<U>(a + b))     \
  EMU_SIMD(__vsubss##n, S, emu::clamped<S>(a - b))     \
  EMU_SIMD(__vsubus##n, U, emu::clamped<U>(a - b))     \
  EMU_SIMD(__vmaxs##n, S, a < b ? b : a)               \
  EMU_SIMD(__vmaxu##n, U, a < b ? b : a)               \
  EMU_SIMD(__vmins##n, S, b < a ? b : a)               \
  EMU_SIMD(__vminu##n, U, b < a ? b : a)               \
  EMU_SIMD(__vabsdiffs##n, S, a < b ? b - a : a - b)   \
  EMU_SIMD(__vabsdiffu##n, U, a < b ? b - a : a - b)   \
  EMU_SIMD(__vavgu##n, U, (a + b + 1) >> 1)            \
  EMU_SIMD(__vhaddu##n, U, (a + b) >> 1)               \
  EMU_SIMD(__vcmpeq##n, U, a == b ? -1 : 0)            \
  EMU_SIMD(__vcmpne##n, U, a != b ? -1 : 0)            \
  EMU_SIMD(__vcmpgts##n, S, a > b ? -1 : 0)            \
  EMU_SIMD(__vcmpgtu##n, U, a > b ? -1 : 0)            \
  EMU_SIMD(__vcmpges##n, S, a >= b ? -1 : 0)           \
  EMU_SIMD(__vcmpgeu##n, U, a >= b ? -1 : 0)           \
  EMU_SIMD(__vcmplts##n, S, a < b ? -1 : 0)            \
  EMU_SIMD(__vcmpltu##n, U, a < b ? -1 : 0)            \
  EMU_SIMD(__vseteq##n, U, a == b)                     \
  EMU_SIMD(__vsetgtu##n, U, a > b)                     \
  inline unsigned __vneg##n(unsigned v) { return __vsub##n(0, v); } \
  inline unsigned __vabs##n(unsigned v) { return emu::by_part<S>(v, 0, [](int a, int) { return a < 0 ? -a : a; }); }
EMU_SIMD_BOTH(2, int16_t, uint16_t)
EMU_SIMD_BOTH(4, int8_t, uint8_t)

namespace emu {
template <class T>
int byte_product(unsigned a, unsigned b, int at) { return int(T(a >> 8 * at)) * int(T(b >> 8 * at)); }
template <class H, class T>
int mixed_product(unsigned a, unsigned b, int half, int byte) { return int(H(a >> 16 * half)) * int(T(b >> 8 * byte)); }
}  // namespace emu
#define EMU_DOT(R, T, H)                                                                                               \
  inline R __dp4a(R a, R b, R c) {                                                                                     \
    unsigned sum = unsigned(c);                                                                                        \
    for (int i = 0; i < 4; ++i) sum += unsigned(emu::byte_product<T>(unsigned(a), unsigned(b), i));                    \
    return R(sum);                                                                                                     \
  }                                                                                                                    \
  inline R __dp2a_lo(R a, R b, R c) {                                                                                  \
    return R(unsigned(c) + unsigned(emu::mixed_product<H, T>(unsigned(a), unsigned(b), 0, 0)) +                        \
             unsigned(emu::mixed_product<H, T>(unsigned(a), unsigned(b), 1, 1)));                                      \
  }                                                                                                                    \
  inline R __dp2a_hi(R a, R b, R c) {                                                                                  \
    return R(unsigned(c) + unsigned(emu::mixed_product<H, T>(unsigned(a), unsigned(b), 0, 2)) +                        \
             unsigned(emu::mixed_product<H, T>(unsigned(a), unsigned(b), 1, 3)));                                      \
  }
EMU_DOT(int, int8_t, int16_t)
EMU_DOT(unsigned, uint8_t, uint16_t)
