// common/select.cuh: the largest values of a block's list, and a sort, both exact whatever the ties.
//
// Computes   the threshold t and the quota for which "all values > t and the first quota values == t" are those wanted
// Letters    a list of unsigned values, where 0 is not a candidate. Warp w holds a run of 32 * items values; item j of
//            lane l is value 32 * j + l of the run, so warps, items and lanes follow the order of the list.
// Numerics   integers: the threshold is found bit by bit, with one count over the block for each of at most 32 bits
// Requires   every thread of the block calls together
// Source     own; a radix select by ballots in place of histograms, so no shared atomics
#pragma once

#include "block.cuh"

struct Selection {
  unsigned threshold;
  int quota;  // of the values equal to the threshold, the first ones
};

// value_at(j) is this thread's item j. If there are fewer candidates than `wanted`, all of them are selected.
template <class ValueAt>
__device__ __forceinline__ Selection select_largest(int items, ValueAt value_at, int wanted, BlockTotals& totals) {
  const auto count_from = [&](unsigned least) {
    int mine = 0;
#pragma unroll
    for (int j = 0; j < items; ++j) mine += value_at(j) >= least;
    return totals.sum(mine);
  };

  unsigned largest = 0, smallest = 0xffffffffu;
#pragma unroll
  for (int j = 0; j < items; ++j) {
    const unsigned value = value_at(j);
    largest = value > largest ? value : largest;
    if (value > 0) smallest = value < smallest ? value : smallest;
  }
  largest = totals.max(largest);
  smallest = totals.min(smallest);

  // Invariant: at least `wanted` values are >= threshold, and every later bit is still 0.
  if (count_from(1) <= wanted) return {0u, 0};
  unsigned threshold = 0;
  for (unsigned bit = 1u << 31; bit > 0; bit >>= 1) {
    const unsigned next = threshold | bit;
    if (next > largest) continue;  // no value is
    if (next <= smallest) {        // all values are
      threshold = next;
      continue;
    }
    const int count = count_from(next);
    if (count >= wanted) threshold = next;
    if (count == wanted) return {threshold - 1, 0};
  }
  return {threshold, wanted - (threshold < largest ? count_from(threshold + 1) : 0)};
}

// Call keep(j, position) for this thread's selected items; positions count up in the order of the list.
// Returns how many the block kept.
template <class ValueAt, class Keep>
__device__ __forceinline__ int compact(int items, ValueAt value_at, Selection chosen, BlockTotals& totals, Keep keep) {
  const unsigned lower_lanes = (1u << threadIdx.x % WARP_SIZE) - 1;

  // what this warp holds, then what the warps before it hold
  int above = 0, level = 0;
#pragma unroll
  for (int j = 0; j < items; ++j) {
    const unsigned value = value_at(j);
    above += __popc(__ballot_sync(FULL_WARP, value > chosen.threshold));
    level += __popc(__ballot_sync(FULL_WARP, value == chosen.threshold));
  }
  const int all_above = totals.sum(threadIdx.x % WARP_SIZE == 0 ? above : 0);
  above = totals.before(above);
  level = totals.before(level);

#pragma unroll
  for (int j = 0; j < items; ++j) {
    const unsigned value = value_at(j);
    const unsigned lanes_above = __ballot_sync(FULL_WARP, value > chosen.threshold);
    const unsigned lanes_level = __ballot_sync(FULL_WARP, value == chosen.threshold);
    const int level_before = level + __popc(lanes_level & lower_lanes);
    const bool is_kept = value > chosen.threshold || (value == chosen.threshold && level_before < chosen.quota);
    const int taken = level_before < chosen.quota ? level_before : chosen.quota;
    if (is_kept) keep(j, above + __popc(lanes_above & lower_lanes) + taken);
    above += __popc(lanes_above);
    level += __popc(lanes_level);
  }
  return all_above + chosen.quota;
}

// Sort `size` keys, a power of two, in shared or global memory; a bitonic network. Ends with a barrier.
__device__ __forceinline__ void sort_descending(unsigned long long* keys, unsigned size) {
  __syncthreads();
  for (unsigned width = 2; width <= size && width > 0; width *= 2) {
    for (unsigned step = width / 2; step > 0; step /= 2) {
      for (unsigned i = threadIdx.x; i < size / 2; i += blockDim.x) {
        const unsigned low = 2 * i - (i & (step - 1));  // i with a bit 0 inserted at the place of `step`
        const unsigned high = low + step;
        const bool is_descending = (low & width) == 0;
        const unsigned long long a = keys[low], b = keys[high];
        if ((a < b) == is_descending) {
          keys[low] = b;
          keys[high] = a;
        }
      }
      __syncthreads();
    }
  }
}
