// common/hopper.cuh: the PTX instructions of sm_90a the kernels use, each with a host twin for the CPU emulator.
//
// Letters    a warpgroup is 128 threads, from a multiple of 128 on; a box is what one tensor copy brings
// Products   D[64, n] += A[64, 16] B[16, n] of a warpgroup, n = 64 or 256. A thread has rows r = 16 * warp + lane / 4
//            and r + 8, columns 8j + 2p and 8j + 2p + 1 (p = lane % 4): d[4j], d[4j + 1] of row r, d[4j + 2], d[4j + 3]
//            of row r + 8. A comes from registers, as four fragments of mma.m16n8k16, or from shared memory.
// Layouts    rows of 128 bytes, unit u of 16 bytes of row r at u ^ (r % 8): as tensor copies with the 128-byte swizzle
//            write them; such a matrix starts at a multiple of 1,024 bytes. `rows_of` reads its rows as rows of A or
//            columns of B (64 elements of the summed dimension), `columns_of` its columns as columns of B, where 64
//            more columns of 64 rows follow 8,192 bytes later. `plain_rows_of` is 64 rows of 16 elements in tiles of
//            8 rows x 16 bytes, row tiles first.
// Requires   sm_90a; the warps of a warpgroup reach a product together
// Source     PTX ISA 8.x: wgmma, mbarrier, cp.async.bulk.tensor, fence.proxy.async, setmaxnreg, stmatrix, mapa
#pragma once

#include "ptx.cuh"

// what cuTensorMapEncodeTiled makes; ddtree_cupy/kernels/tensor_map.py
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

#ifdef DDTREE_EMULATE
#include "hopper_twins.cuh"
#else

// ---- barriers in shared memory, 8 bytes each: a phase ends when all have arrived and all expected bytes are there

__device__ __forceinline__ void barrier_init(SharedAddress barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// makes initialised barriers known to tensor copies and to the cluster
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(SharedAddress barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// arrives, and lets the phase wait for so many bytes, too
__device__ __forceinline__ void barrier_arrive_expecting(SharedAddress barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
#define WAIT_UNTIL(TRY)                                                                             \
  "{ .reg .pred p;\nL: mbarrier.try_wait.parity" TRY                                                \
  ".shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra L;\nD: }"
// until the phase of this parity has ended
__device__ __forceinline__ void barrier_wait(SharedAddress barrier, unsigned parity) {
  asm volatile(WAIT_UNTIL("") ::"r"(barrier), "r"(parity) : "memory");
}
// the same for a barrier at which threads of the other block of the cluster arrive
__device__ __forceinline__ void barrier_wait_cluster(SharedAddress barrier, unsigned parity) {
  asm volatile(WAIT_UNTIL(".acquire.cluster") ::"r"(barrier), "r"(parity) : "memory");
}
#undef WAIT_UNTIL
// what this thread wrote to shared memory becomes visible to products and tensor copies
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- tensor copies from global memory

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void copy_box_3d(SharedAddress to, const TensorMap* map, int x, int y, int z,
                                            SharedAddress barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void copy_box_4d(SharedAddress to, const TensorMap* map, int x, int y, int z, int w,
                                            SharedAddress barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
      : "memory");
}

// ---- products of a warpgroup

__device__ __forceinline__ void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// all but the newest ALLOWED groups are complete afterwards
template <int ALLOWED>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(ALLOWED) : "memory");
}
// holds the registers in place between products and other uses
template <int N>
__device__ __forceinline__ void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

typedef unsigned Matrix;  // the low half of a matrix descriptor; + 1 is 16 bytes further
constexpr unsigned SWIZZLED = 1u << 30 | 64, PLAIN = 16;  // high halves

// In a cluster an address holds the number of its block from bit 24 up, which a descriptor must not.
__device__ __forceinline__ Matrix rows_of(SharedAddress at) { return (at & 0xffffff) >> 4 | 1 << 16; }
__device__ __forceinline__ Matrix columns_of(SharedAddress at) { return (at & 0xffffff) >> 4 | 512 << 16; }
__device__ __forceinline__ Matrix plain_rows_of(SharedAddress at) { return (at & 0xffffff) >> 4 | 8 << 16; }
template <unsigned HIGH>
__device__ __forceinline__ unsigned long long descriptor(Matrix low) {
  return (unsigned long long)HIGH << 32 | low;
}

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define REGISTERS_32 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31} "
#define REGISTERS_128 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  " %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  " %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  " %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  " %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127} "

// add: 1 to add to d, 0 to overwrite it
template <class T>
struct Warpgroup;

#define WARPGROUP(T, TYPE)                                                                                            \
  template <>                                                                                                         \
  struct Warpgroup<T> {                                                                                               \
    static __device__ __forceinline__ void multiply_64(float (&d)[32], unsigned a0, unsigned a1, unsigned a2,         \
                                                       unsigned a3, Matrix b, int add) {                              \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"                                                         \
                   "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " REGISTERS_32                       \
                   ", {%32, %33, %34, %35}, %36, p, 1, 1, 0; }\n"                                                     \
                   : D16(0), D16(16)                                                                                  \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(descriptor<SWIZZLED>(b)), "r"(add));                     \
    }                                                                                                                 \
    template <unsigned A_HIGH>                                                                                        \
    static __device__ __forceinline__ void multiply_64(float (&d)[32], Matrix a, Matrix b) {                          \
      asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " " REGISTERS_32                       \
                   ", %32, %33, 1, 1, 1, 0, 0;\n"                                                                     \
                   : D16(0), D16(16)                                                                                  \
                   : "l"(descriptor<A_HIGH>(a)), "l"(descriptor<SWIZZLED>(b)));                                       \
    }                                                                                                                 \
    static __device__ __forceinline__ void multiply_256(float (&d)[128], Matrix a, Matrix b, int add) {               \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %130, 0;\n"                                                        \
                   "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " " REGISTERS_128                     \
                   ", %128, %129, p, 1, 1, 0, 1; }\n"                                                                 \
                   : D16(0), D16(16), D16(32), D16(48), D16(64), D16(80), D16(96), D16(112)                           \
                   : "l"(descriptor<SWIZZLED>(a)), "l"(descriptor<SWIZZLED>(b)), "r"(add));                           \
    }                                                                                                                 \
  };
WARPGROUP(__nv_bfloat16, "bf16")
WARPGROUP(__half, "f16")
#undef WARPGROUP
#undef REGISTERS_32
#undef REGISTERS_128
#undef D16
#undef D4

// ---- registers, matrices to shared memory

template <int N>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
// four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8
__device__ __forceinline__ void store_matrices(SharedAddress row, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r0), "r"(r1), "r"(r2),
               "r"(r3)
               : "memory");
}
// whether the predicate holds for any of `threads` threads at a named barrier
__device__ __forceinline__ bool named_barrier_or(int id, int threads, bool predicate) {
  int found;
  asm volatile(
      "{ .reg .pred p, q; setp.ne.b32 p, %1, 0; barrier.cta.red.or.pred q, %2, %3, p; selp.b32 %0, 1, 0, q; }"
      : "=r"(found)
      : "r"((int)predicate), "r"(id), "r"(threads)
      : "memory");
  return found != 0;
}

// to shared memory, without a branch
__device__ __forceinline__ void store_if(bool condition, int& to, int value) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p st.shared.b32 [%0], %1; }" ::"r"(shared_address(&to)),
               "r"(value), "r"((int)condition)
               : "memory");
}
__device__ __forceinline__ void store_if(bool condition, long long& to, long long value) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p st.shared.b64 [%0], %1; }" ::"r"(shared_address(&to)),
               "l"(value), "r"((int)condition)
               : "memory");
}
template <class T>
__device__ __forceinline__ void store_if(bool condition, const T*& to, const T* value) {
  store_if(condition, reinterpret_cast<long long&>(to), reinterpret_cast<long long>(value));
}

// ---- a cluster of two blocks

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// what both blocks wrote before they arrived is visible to both after they have waited
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// the same place in the shared memory of a block of the cluster
__device__ __forceinline__ SharedAddress place_in_block(SharedAddress at, unsigned rank) {
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  return there;
}
__device__ __forceinline__ void barrier_arrive_there(SharedAddress barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ float2 load_there(SharedAddress at) {
  float2 v;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
  return v;
}
// from this block's shared memory to the other's, whose barrier gets the bytes
__device__ __forceinline__ void copy_there(SharedAddress to, SharedAddress from, int bytes, SharedAddress barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

#endif
