// common/ptx.cuh: the PTX instructions the kernels use, each with a host twin for the CPU emulator.
//
// Fragments  of mma.m16n8k16, by lane: row r = lane / 4, pair p = lane % 4
//            A  a[0] = (r, 2p..2p+1)  a[1] = (r + 8, 2p..)  a[2] = (r, 2p + 8..)  a[3] = (r + 8, 2p + 8..)
//            B  b0 = (k 2p..2p+1, n r)  b1 = (k 2p + 8.., n r)
//            C  c[0..1] = (r, 2p..2p+1)  c[2..3] = (r + 8, 2p..2p+1)
// Numerics   matrix products accumulate in float32; the twin sums each 16-term product in float64 first, or cuts sums
//            off as sm_90 does (`emulate.active(cut_sums=True)`)
// Requires   sm_80; ldmatrix row addresses are multiples of 16 bytes; all 32 lanes call together
// Source     PTX ISA 8.x: cp.async, st.relaxed, ldmatrix, mma.m16n8k16, bar.sync, cvt, ex2
#pragma once

#include "dtype.cuh"

#ifdef DDTREE_EMULATE
#include "ptx_twins.cuh"
#else

typedef unsigned SharedAddress;  // 32 bits, to save registers

__device__ __forceinline__ SharedAddress shared_address(const void* pointer) {
  return (unsigned)__cvta_generic_to_shared(pointer);
}

// the address with some of its bits flipped, for an XOR swizzle: an addition could carry into other bits
__device__ __forceinline__ SharedAddress flip_address(SharedAddress at, unsigned bits) { return at ^ bits; }

// 16 bytes from global to shared memory; zeros, and no read, unless is_read
__device__ __forceinline__ void copy_async_16(SharedAddress to, const void* from, bool is_read) {
  const int bytes = is_read ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// all but the newest ALLOWED groups of this thread are complete afterwards
template <int ALLOWED>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(ALLOWED) : "memory");
}

// stores that may meet others of the same values at the same time
__device__ __forceinline__ void store_relaxed(uint4* to, uint4 value) {
  asm volatile("st.relaxed.gpu.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}
__device__ __forceinline__ void store_relaxed(unsigned* to, unsigned value) {
  asm volatile("st.relaxed.gpu.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ void store_relaxed(unsigned short* to, unsigned short value) {
  asm volatile("st.relaxed.gpu.u16 [%0], %1;" ::"l"(to), "h"(value) : "memory");
}

// four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(unsigned (&r)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

template <class T>
__device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
template <>
__device__ __forceinline__ void multiply_add<__nv_bfloat16>(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                                            unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply_add<__half>(float (&c)[4], const unsigned (&a)[4], unsigned b0,
                                                     unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// threadIdx.x, read at this place: the compiler cannot move what depends on it to an earlier place
__device__ __forceinline__ unsigned thread_here() {
  unsigned thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// 2^x with a relative error of 2^-22; subnormal results are 0
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// two floats rounded to T, the first in the low half
template <class T>
__device__ __forceinline__ unsigned pack2(float low, float high);
template <>
__device__ __forceinline__ unsigned pack2<__nv_bfloat16>(float low, float high) {
  unsigned both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
template <>
__device__ __forceinline__ unsigned pack2<__half>(float low, float high) {
  unsigned both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// a barrier for `threads` threads of the block, a multiple of 32; `id` is 1..15
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// arrives at the same barrier without waiting there. When the barrier completes, what this thread wrote before is
// visible to the threads that wait, and what it read before has been read (PTX ISA, "bar, barrier")
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

#endif
