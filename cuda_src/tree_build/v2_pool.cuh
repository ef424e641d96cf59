// tree_build/v2_pool.cuh: what v2_best_first keeps in shared memory: the rows, the nodes found, a histogram of scores.
//
// Letters    a slot is the place of a node among those found, 0 that of the root; a bin is a range of scores
// Numerics   `bin_of` rises with the score, whatever it rounds. A threshold lies a little below the edge of its bin, so
//            that no node of the bin is missed; which nodes are kept is decided by bins and ranks, never by it.
// Source     own
#pragma once

#include "tree_build/candidates.cuh"

constexpr int MOST_DEPTHS = 64;
constexpr int MOST_CANDIDATES = 1024;  // of a row, and nodes besides the root
constexpr int BINS = 256;
constexpr int BINS_OF_LANE = BINS / WARP_SIZE;

// The rows of a request: children come in the order of ranks, and none has a better score than its parent.
struct Rows {
  double first[MOST_DEPTHS];      // log probability of rank 0
  double spine[MOST_DEPTHS + 1];  // scores of the root and of its run
  int widths[MOST_DEPTHS];        // children of a node, 0 where the tree ends
  double lowest;                  // no node that is wanted has a lower score
  float bins_per_score;
  int depths;       // of the run of the root
  int spine_nodes;  // besides the root
  int is_odd;       // scores do not fall along ranks or paths
  int has_bad;      // a row is bad
};

// Log probabilities of the first `columns` ranks of every row: in shared memory, or computed anew without room.
struct LogProbabilities {
  Candidates table;
  double* cached;  // [L, columns]
  bool is_cached;
  int columns;

  __device__ __forceinline__ double operator()(int depth, int rank) const {
    return is_cached ? cached[depth * columns + rank] : table.log_probability(depth, rank);
  }
};

// Nodes found, in dynamic shared memory; POOL_BYTES for each slot.
constexpr int POOL_BYTES = 16;

struct Pool {
  double* scores;
  unsigned* links;        // parent's slot << 17 | rank << 7 | depth
  unsigned short* order;  // slots by bins, the best one first
  unsigned short* nodes;  // the node that a slot becomes
  int size;

  __device__ __forceinline__ int parent(int slot) const { return links[slot] >> 17; }
  __device__ __forceinline__ int rank(int slot) const { return links[slot] >> 7 & 1023; }
  __device__ __forceinline__ int depth(int slot) const { return links[slot] & 127; }

  __device__ __forceinline__ void put(int slot, int parent, int rank, int depth, double score) const {
    scores[slot] = score;
    links[slot] = (unsigned)parent << 17 | (unsigned)rank << 7 | (unsigned)depth;
  }

  // Whether slot a comes before slot b: by score, then by rank path, where a prefix comes first.
  __device__ bool comes_first(int a, int b) const {
    if (scores[a] != scores[b]) return scores[a] > scores[b];
    int rank_a = -1, rank_b = -1;
    while (a != b) {
      const bool climb_a = depth(a) >= depth(b), climb_b = depth(b) >= depth(a);
      if (climb_a) {
        rank_a = rank(a);
        a = parent(a);
      }
      if (climb_b) {
        rank_b = rank(b);
        b = parent(b);
      }
    }
    return rank_a < rank_b;
  }
};

__device__ __forceinline__ Pool pool_in(unsigned long long* memory, int size) {
  Pool pool;
  pool.size = size;
  pool.scores = reinterpret_cast<double*>(memory);
  pool.links = reinterpret_cast<unsigned*>(pool.scores + size);
  pool.order = reinterpret_cast<unsigned short*>(pool.links + size);
  pool.nodes = pool.order + size;
  return pool;
}

// How many nodes have a score in each bin, the best scores in the last one.
struct Histogram {
  int counts[BINS];  // at `place`, so that the lanes of a warp read different banks
  int starts[BINS];  // nodes in better bins, once `sort_bins` has run; at `place`, too

  __device__ __forceinline__ static int bin_of(const Rows& rows, double score) {
    return (int)fminf(fmaxf((float)(score - rows.lowest) * rows.bins_per_score, 0.0f), BINS - 1.0f);
  }

  __device__ __forceinline__ static int place(int bin) {
    return bin % BINS_OF_LANE * WARP_SIZE + bin / BINS_OF_LANE;
  }

  __device__ __forceinline__ void add(const Rows& rows, double score) {
    if (score >= rows.lowest) atomicAdd(&counts[place(bin_of(rows, score))], 1);
  }

  // The counts of this lane's bins, BINS_OF_LANE * lane and on; returns the nodes in the bins of better lanes.
  __device__ __forceinline__ int read(int (&of_bins)[BINS_OF_LANE], int& of_lane) const {
    const int lane = threadIdx.x % WARP_SIZE;
    of_lane = 0;
#pragma unroll
    for (int i = 0; i < BINS_OF_LANE; ++i) of_lane += of_bins[i] = counts[i * WARP_SIZE + lane];
    int sum = of_lane;
#pragma unroll
    for (int step = 1; step < WARP_SIZE; step *= 2) {
      const int other = __shfl_down_sync(FULL_WARP, sum, step);
      if (lane + step < WARP_SIZE) sum += other;
    }
    return sum - of_lane;
  }

  // The best bin that has, with all better ones, `wanted` nodes; 0 when there are not so many. Every warp by itself.
  __device__ __forceinline__ int bin_of_last(int wanted) const {
    int of_bins[BINS_OF_LANE], of_lane;
    int before = read(of_bins, of_lane);
    const unsigned lanes = __ballot_sync(FULL_WARP, before + of_lane >= wanted);
    int bin = (int)threadIdx.x % WARP_SIZE * BINS_OF_LANE;
    bool is_found = false;
#pragma unroll
    for (int i = BINS_OF_LANE - 1; i >= 0; --i) {
      before += of_bins[i];
      if (before >= wanted && !is_found) bin += i;
      is_found |= before >= wanted;
    }
    return lanes == 0 ? 0 : __shfl_sync(FULL_WARP, bin, 31 - __clz(lanes));
  }

  // Let the first warp find where every bin starts when the best scores come first.
  __device__ __forceinline__ void sort_bins() {
    int of_bins[BINS_OF_LANE], of_lane;
    int before = read(of_bins, of_lane);
#pragma unroll
    for (int i = BINS_OF_LANE - 1; i >= 0; --i) {
      starts[i * WARP_SIZE + (int)threadIdx.x % WARP_SIZE] = before;
      before += of_bins[i];
    }
  }
};
