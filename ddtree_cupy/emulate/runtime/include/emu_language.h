// emu_language.h: CUDA's qualifiers, built-in variables and vector types for a C++17 host compiler.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "../emu_runtime.h"

#define DDTREE_EMULATE 1
#define __global__
#define __device__
#define __host__
#define __constant__ EMU_VARIABLE
#define EMU_VARIABLE __attribute__((used))  // Python may write it
#define __managed__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// All shared objects share one section, so that the runtime can poison them between blocks. The kernel text sits in an
// unnamed namespace: without it, g++ refuses the section for statics of templates. Within it, g++ ignores the section
// there, and emu_shared.ld puts them into it by the tag in their names.
#define __shared__ static __attribute__((section("emu_shared"), used, abi_tag("emu_shared")))
#define EMU_DYNAMIC_SHARED(name, ...) __VA_ARGS__* name = static_cast<__VA_ARGS__*>(emu_ctx.dynamic_shared)
extern "C" char __start_emu_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_emu_shared[] __attribute__((weak, visibility("hidden")));

namespace emu {
inline bool is_shared(const void* address) {
  auto place = static_cast<const char*>(address), dynamic = static_cast<const char*>(emu_ctx.dynamic_shared);
  return (place >= __start_emu_shared && place < __stop_emu_shared) ||
         (place >= dynamic && place < dynamic + emu_ctx.dynamic_bytes);
}
}  // namespace emu

#define threadIdx (emu_ctx.thread_idx)
#define blockIdx (emu_ctx.block_idx)
#define blockDim (emu_ctx.block_dim)
#define gridDim (emu_ctx.grid_dim)
#define warpSize 32
// The last parameters of a twin: the place of its call, which is EMU_CALLER in its body.
#define EMU_FROM const char *emu_file = __builtin_FILE(), int emu_line = __builtin_LINE()
#define EMU_CALLER (emu_where{emu_file, emu_line})

// Not in NVRTC, so a kernel that needs them must not compile here either.
#undef INFINITY
#undef NAN
#undef assert
#define assert(...) ((__VA_ARGS__) ? (void)0 : emu_fail(EMU_HERE, "assert(%s) failed", #__VA_ARGS__))
#define __trap() emu_fail(EMU_HERE, "__trap()")
#define __brkpt() emu_fail(EMU_HERE, "__brkpt()")
#define __builtin_assume(...) ((void)0)
#define __assume(...) ((void)0)
#define __builtin_assume_aligned(pointer, ...) (pointer)

#define EMU_VECTOR3(T, N) \
  struct N##3 { T x, y, z; };
#define EMU_VECTOR(T, N, ALIGN2, ALIGN4)                            \
  struct alignas(ALIGN2) N##2 { T x, y; };                          \
  struct alignas(ALIGN4) N##4 { T x, y, z, w; };                    \
  struct N##1 { T x; };                                             \
  inline N##1 make_##N##1(T x) { return {x}; }                      \
  inline N##2 make_##N##2(T x, T y) { return {x, y}; }              \
  inline N##3 make_##N##3(T x, T y, T z) { return {x, y, z}; }      \
  inline N##4 make_##N##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTOR3(signed char, char)
EMU_VECTOR3(unsigned char, uchar)
EMU_VECTOR3(short, short)
EMU_VECTOR3(unsigned short, ushort)
EMU_VECTOR3(int, int)
EMU_VECTOR3(long, long)
EMU_VECTOR3(unsigned long, ulong)
EMU_VECTOR3(long long, longlong)
EMU_VECTOR3(unsigned long long, ulonglong)
EMU_VECTOR3(float, float)
EMU_VECTOR3(double, double)
EMU_VECTOR(signed char, char, 2, 4)
EMU_VECTOR(unsigned char, uchar, 2, 4)
EMU_VECTOR(short, short, 4, 8)
EMU_VECTOR(unsigned short, ushort, 4, 8)
EMU_VECTOR(int, int, 8, 16)
EMU_VECTOR(unsigned, uint, 8, 16)
EMU_VECTOR(long, long, 16, 16)
EMU_VECTOR(unsigned long, ulong, 16, 16)
EMU_VECTOR(long long, longlong, 16, 16)
EMU_VECTOR(unsigned long long, ulonglong, 16, 16)
EMU_VECTOR(float, float, 8, 16)
EMU_VECTOR(double, double, 16, 16)
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};

// As NVRTC defines them. Not before the headers of the host's compiler, which some of them would change.
#define __CUDACC__ 1
#define __CUDACC_RTC__ 1
#define __CUDA_ARCH__ EMU_ARCH
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
