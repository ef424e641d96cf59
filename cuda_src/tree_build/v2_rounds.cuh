// tree_build/v2_rounds.cuh: the rounds in which v2_best_first finds all nodes that can be in the tree.
//
// Computes   the nodes whose scores pass a threshold, which rises until little more than the wanted ones do
// Letters    see v2_best_first.cu; a run is a node and its descendants of rank 0, a branch a child of rank 1 or more
// Numerics   scores as in candidates.cuh; see v2_pool.cuh for thresholds
// Source     own
#pragma once

#include "tree_build/v2_pool.cuh"

// Read the rows of a request, a warp each at a time; ends with a barrier.
__device__ __forceinline__ void read_rows(const LogProbabilities& known, const Limits& limits, Rows& rows) {
  const Candidates& table = known.table;
  const int lane = threadIdx.x % WARP_SIZE, warps = blockDim.x / WARP_SIZE;
  if (threadIdx.x == 0) rows.is_odd = 0;
  bool is_bad = false;
  for (int depth = table.L + (int)threadIdx.x; depth < MOST_DEPTHS; depth += blockDim.x) rows.widths[depth] = 0;
  for (int depth = threadIdx.x / WARP_SIZE; depth < table.L; depth += warps) {
    const int most = depth < limits.max_depth ? min(known.columns, max(limits.widths[depth], 0)) : 0;
    const double lse = widen(table.candidate_lse[depth]);
    int width = most;
#pragma unroll 2
    for (int base = 0; base < most; base += WARP_SIZE) {
      const int rank = base + lane;
      const long long place = table.place(depth, min(rank, most - 1));
      const int token = table.candidate_ids[place];
      const double here = __dsub_rn(widen(table.candidate_logits[place]), lse);
      if (known.is_cached && rank < most) known.cached[depth * known.columns + rank] = here;
      if (rank == 0) rows.first[depth] = here;
      const unsigned ends = __ballot_sync(FULL_WARP, token < 0 || !(here > (double)NEGATIVE_INFINITY));
      if (ends) width = min(width, base + __ffs(ends) - 1);
    }
    if (lane == 0) rows.widths[depth] = width;
    is_bad |= lse != lse;
  }
  is_bad = __syncthreads_or(is_bad);
  if (threadIdx.x == 0) rows.has_bad = is_bad;
}

// Let the first warp find the run of the root and a bound of the scores that are wanted.
__device__ __forceinline__ void bound_scores(const LogProbabilities& known, const Limits& limits, int budget,
                                             Rows& rows) {
  const int lane = threadIdx.x;
  const unsigned low_ends = __ballot_sync(FULL_WARP, rows.widths[lane] == 0);
  const unsigned high_ends = __ballot_sync(FULL_WARP, rows.widths[lane + WARP_SIZE] == 0);
  const int depths = low_ends    ? __ffs(low_ends) - 1
                     : high_ends ? WARP_SIZE + __ffs(high_ends) - 1
                                 : MOST_DEPTHS;

  // every lane keeps the scores of its own two depths
  double score = 0.0, spine[2], before[2];
  int spine_nodes = 0;
  const int forced = min(limits.spine, budget);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll 8
    for (int i = 0; i < min(depths - WARP_SIZE * half, WARP_SIZE); ++i) {
      if (lane == i) before[half] = score;
      score = __dadd_rn(score, rows.first[WARP_SIZE * half + i]);
      if (lane == i) spine[half] = score;
      if (WARP_SIZE * half + i < forced && !(score < limits.min_path_score)) spine_nodes = WARP_SIZE * half + i + 1;
    }
  }

  // a row with as many children as are wanted is a bound
  double sum = 0.0;
  unsigned bound = 0;  // high half of ordered bits, so that it is no larger than the score
  if (lane == 0) rows.spine[0] = 0.0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int depth = lane + WARP_SIZE * half;
    if (depth >= depths) continue;
    const int width = rows.widths[depth];
    const double last = known(depth, width - 1);
    rows.spine[depth + 1] = spine[half];
    sum += last;
    if (width >= budget) bound = max(bound, (unsigned)(ordered_bits(__dadd_rn(before[half], last)) >> 32));
  }
  bound = __reduce_max_sync(FULL_WARP, bound);
  double lowest = from_ordered_bits((unsigned long long)bound << 32);

  // else no score is lower than the sum of the last ranks, but for rounding
  if (bound == 0) {
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, step);
    lowest = 1.000001 * sum;
  }
  lowest = fmax(lowest, limits.min_path_score);
  if (lane == 0) {
    rows.depths = depths;
    rows.spine_nodes = spine_nodes;
    rows.lowest = lowest;
    rows.bins_per_score = lowest < 0.0 ? (float)(BINS / -lowest) : 0.0f;
  }
}

// Count the run of the root, but for the spine, and its branches; see whether scores fall.
__device__ __forceinline__ void count_first(const LogProbabilities& known, Rows& rows, Histogram& histogram) {
  const int lane = threadIdx.x % WARP_SIZE, warps = blockDim.x / WARP_SIZE;
  for (int depth = threadIdx.x / WARP_SIZE; depth < rows.depths; depth += warps) {
    const double of_parent = rows.spine[depth];
    const bool counts_first = depth >= rows.spine_nodes;
    const int width = rows.widths[depth];
#pragma unroll 2
    for (int rank = lane; rank < width; rank += WARP_SIZE) {
      const double here = known(depth, rank), before = rank > 0 ? known(depth, rank - 1) : 0.0;
      if (!(here <= before)) atomicOr(&rows.is_odd, 1);
      if (rank > 0 || counts_first) histogram.add(rows, __dadd_rn(of_parent, here));
    }
  }
}

// The lowest score that passes: a little below the edge of a bin.
__device__ __forceinline__ double threshold_of(const Rows& rows, int bin) {
  return bin == 0 ? rows.lowest : rows.lowest * (1.0 - (bin - 0.125) / BINS);
}

// Reserve `count` slots for each lane of a warp; returns the lane's first one, which may lie beyond the pool.
__device__ __forceinline__ int reserve(int count, int* found) {
  const int lane = threadIdx.x % WARP_SIZE;
  int sum = count;
#pragma unroll
  for (int step = 1; step < WARP_SIZE; step *= 2) {
    const int other = __shfl_up_sync(FULL_WARP, sum, step);
    if (lane >= step) sum += other;
  }
  int first = 0;
  if (lane == WARP_SIZE - 1) first = atomicAdd(found, sum);
  return __shfl_sync(FULL_WARP, first, WARP_SIZE - 1) + sum - count;
}

// Put the part of the root's run into the pool that passes, the spine whatever its scores; returns how many slots
// are taken. Each warp finds the number by itself.
__device__ __forceinline__ int put_first_run(const Rows& rows, const Pool& pool, double threshold) {
  int count = 1;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int depth = 1 + (int)threadIdx.x % WARP_SIZE + WARP_SIZE * half;
    const bool passes = depth <= rows.depths && (depth <= rows.spine_nodes || rows.spine[depth] >= threshold);
    count += __popc(__ballot_sync(FULL_WARP, passes));
  }
  for (int depth = threadIdx.x; depth < min(count, pool.size); depth += blockDim.x)
    pool.put(depth, max(depth - 1, 0), 0, depth, rows.spine[depth]);
  return count;
}

// Follow the run of each slot begin..end - 1. How long it is follows from the run of the root, but for rounding; a slot
// too many is filled with a score that never passes.
__device__ __forceinline__ void follow_runs(const Rows& rows, const Pool& pool, int begin, int end, double threshold,
                                            int* found) {
  const int warp_base = (int)threadIdx.x / WARP_SIZE * WARP_SIZE;
  for (int base = begin + warp_base; base < end; base += blockDim.x) {
    const int slot = base + (int)threadIdx.x % WARP_SIZE;
    const int depth = slot < end ? pool.depth(slot) : rows.depths;
    double score = slot < end ? pool.scores[slot] : 0.0;

    const double of_root = rows.spine[depth] - score + threshold + 1e-9 * threshold;  // passes in the run of the root
    int low = 0, high = rows.depths - depth + 1;
    while (low + 1 < high) {
      const int length = low == 0 ? 1 : (low + high) / 2;  // most runs are short
      if (rows.spine[depth + length] >= of_root)
        low = length;
      else
        high = length;
    }
    if (!__any_sync(FULL_WARP, low > 0)) continue;
    const int first = reserve(low, found), stop = min(low, pool.size - first);
    for (int i = 0; i < stop; ++i) {
      score = __dadd_rn(score, rows.first[depth + i]);
      if (!(score >= threshold)) score = (double)NEGATIVE_INFINITY;
      pool.put(first + i, i == 0 ? slot : first + i - 1, 0, depth + i + 1, score);
    }
  }
}

// Open the branches of slots begin..end - 1 that pass. A lane sees whether a slot has any, as most have none; then its
// warp looks through the ranks.
__device__ __forceinline__ void open_branches(const LogProbabilities& known, const Rows& rows, const Pool& pool,
                                              int begin, int end, double threshold, bool counts, int* found,
                                              Histogram& histogram) {
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE, warps = blockDim.x / WARP_SIZE;
  for (int base = begin + warp; base < end; base += blockDim.x) {
    const int of_lane = base + warps * lane;
    bool has_branch = false;
    if (of_lane < end) {
      const int depth = pool.depth(of_lane);
      has_branch = depth < rows.depths && rows.widths[depth] > 1 &&
                   __dadd_rn(pool.scores[of_lane], known(depth, 1)) >= threshold;
    }
    for (unsigned lanes = __ballot_sync(FULL_WARP, has_branch); lanes > 0; lanes &= lanes - 1) {
      const int parent = base + warps * (__ffs(lanes) - 1), depth = pool.depth(parent), width = rows.widths[depth];
      const double of_parent = pool.scores[parent];
      int branches = 0, in_pass;
      do {
        const int rank = 1 + branches + lane;
        const bool passes = rank < width && __dadd_rn(of_parent, known(depth, rank)) >= threshold;
        in_pass = __popc(__ballot_sync(FULL_WARP, passes));
        branches += in_pass;
      } while (in_pass == WARP_SIZE);
      int first = 0;
      if (lane == 0) first = atomicAdd(found, branches);
      first = __shfl_sync(FULL_WARP, first, 0);
      for (int i = lane; i < branches && first + i < pool.size; i += WARP_SIZE) {
        const double score = __dadd_rn(of_parent, known(depth, i + 1));
        pool.put(first + i, parent, i + 1, depth + 1, score);
        if (counts) histogram.add(rows, score);
      }
    }
  }
}

// Find all nodes that can be wanted; returns how many slots they take, or -1 when the pool is too small. `last_bin` is
// that of the last node wanted. Begins and ends with a barrier.
__device__ __forceinline__ int find_nodes(const LogProbabilities& known, const Rows& rows, const Pool& pool, int wanted,
                                          int* found, Histogram& histogram, int& last_bin) {
  __syncthreads();
  last_bin = histogram.bin_of_last(wanted);
  int begin = 0, end = put_first_run(rows, pool, threshold_of(rows, last_bin));
  if (threadIdx.x == 0) *found = end;
  bool is_first = true;  // the branches of the root's run are counted
  while (true) {
    __syncthreads();
    if (end > pool.size) return -1;
    open_branches(known, rows, pool, begin, end, threshold_of(rows, last_bin), !is_first, found, histogram);
    __syncthreads();
    begin = end;
    end = *found;
    if (begin == end) return end;
    if (!is_first) last_bin = histogram.bin_of_last(wanted);
    __syncthreads();
    if (end > pool.size) return -1;
    follow_runs(rows, pool, begin, end, threshold_of(rows, last_bin), found);
    __syncthreads();
    const int runs_begin = end;
    end = *found;
    for (int slot = runs_begin + (int)threadIdx.x; slot < min(end, pool.size); slot += blockDim.x)
      histogram.add(rows, pool.scores[slot]);
    __syncthreads();
    last_bin = histogram.bin_of_last(wanted);
    is_first = false;
  }
}
