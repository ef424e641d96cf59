// common/block.cuh: integer totals over a block; a block that reads a row in packs of 16 bytes.
//
// Numerics   integers only: exact in any order
// Requires   every thread of a block of full warps calls together, at most 32 warps; sm_80 for the warp reductions
// Source     own
#pragma once

#include "warp.cuh"

// Totals with one barrier each: two halves of the scratch take turns, so no call overwrites what another still reads.
struct BlockTotals {
  unsigned long long* scratch;  // 64, shared
  int turn;

  template <class Value, class Reduce>
  __device__ __forceinline__ Value over_block(Value of_warp, Value nothing, Reduce reduce) {
    Value* slots = reinterpret_cast<Value*>(scratch + WARP_SIZE * turn);
    turn ^= 1;
    if (threadIdx.x % WARP_SIZE == 0) slots[threadIdx.x / WARP_SIZE] = of_warp;
    __syncthreads();
    const int lane = threadIdx.x % WARP_SIZE;
    return reduce(lane < (int)blockDim.x / WARP_SIZE ? slots[lane] : nothing);
  }

  __device__ __forceinline__ int sum(int x) {
    const auto reduce = [](int of_lane) { return __reduce_add_sync(FULL_WARP, of_lane); };
    return over_block(reduce(x), 0, reduce);
  }

  __device__ __forceinline__ unsigned max(unsigned x) {
    const auto reduce = [](unsigned of_lane) { return __reduce_max_sync(FULL_WARP, of_lane); };
    return over_block(reduce(x), 0u, reduce);
  }

  __device__ __forceinline__ unsigned min(unsigned x) {
    const auto reduce = [](unsigned of_lane) { return __reduce_min_sync(FULL_WARP, of_lane); };
    return over_block(reduce(x), 0xffffffffu, reduce);
  }

  __device__ __forceinline__ unsigned long long max(unsigned long long x) {
    const auto reduce = [](unsigned long long of_lane) {
      for (int step = 16; step > 0; step /= 2) {
        const unsigned long long other = __shfl_xor_sync(FULL_WARP, of_lane, step);
        if (other > of_lane) of_lane = other;
      }
      return of_lane;
    };
    return over_block(reduce(x), 0ull, reduce);
  }

  // Sum of x over the warps before this one; each warp counts the x of its first lane.
  __device__ __forceinline__ int before(int x) {
    const int warp = threadIdx.x / WARP_SIZE;
    return over_block(x, 0, [warp](int of_lane) {
      const bool counts = (int)threadIdx.x % WARP_SIZE < warp;
      return __reduce_add_sync(FULL_WARP, counts ? of_lane : 0);
    });
  }
};

// Call visit(element, index) for every element of a row, each thread by ascending index. The row may start anywhere.
template <class T, class Visit>
__device__ __forceinline__ void visit_row(const T* row, int size, Visit visit) {
  constexpr int PACK = 16 / sizeof(T);
  struct alignas(16) Pack {
    T elements[PACK];
  };
  const int before = (int)((16 - (size_t)row % 16) % 16 / sizeof(T));
  const int head = before < size ? before : size;  // elements in front of the first 16-byte boundary
  const int packs = (size - head) / PACK;
  const int tail = head + packs * PACK;

  if ((int)threadIdx.x < head) visit(row[threadIdx.x], (int)threadIdx.x);
#pragma unroll 4
  for (int i = threadIdx.x; i < packs; i += blockDim.x) {
    const Pack pack = reinterpret_cast<const Pack*>(row + head)[i];
#pragma unroll
    for (int j = 0; j < PACK; ++j) visit(pack.elements[j], head + i * PACK + j);
  }
  if ((int)threadIdx.x < size - tail) visit(row[tail + threadIdx.x], tail + (int)threadIdx.x);
}
