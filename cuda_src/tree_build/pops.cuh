// tree_build/pops.cuh: the tree of the most probable prefixes, one pop after the other; one warp works on a request.
//
// Computes   s(root) = 0, s(child) = s(parent) + (logit - lse of its depth); takes the open child with the highest
//            score until the budget is spent; of equal scores the smaller rank path (a prefix comes first)
// Letters    N nodes; rank = place among siblings. Every chosen node has one open child, its best child that was not
//            taken yet: the one after the last that was.
// Work       open children sit in 32 buckets, node i in bucket i % 32; lane l keeps the best of bucket l in registers.
//            A step takes the best one of all lanes, appends it as a node, opens two children and searches one bucket.
// Numerics   scores are compared as ordered integers, so nothing is flushed
// Requires   values are not trusted: the budget is clamped by the caller, and every index follows from shapes and from
//            nodes written here
// Source     DDTree (arXiv 2604.12989); the buckets and the tie rule are ours
#pragma once

#include "tree_build/candidates.cuh"

// What is known of every chosen node: 32 bytes per node, rounded up to full buckets.
struct Nodes {
  unsigned long long* open_scores;  // ordered score of the open child, 0 if there is none; [bucket][node / 32]
  double* scores;
  int* parents;
  int* ranks;
  int* depths;
  int* open_ranks;  // rank of the open child
  int bucket_size;

  __device__ __forceinline__ unsigned long long& open_score(int node) const {
    return open_scores[node % WARP_SIZE * bucket_size + node / WARP_SIZE];
  }
};

__device__ __forceinline__ Nodes nodes_in(unsigned long long* state, int N) {
  Nodes nodes;
  nodes.bucket_size = (N + WARP_SIZE - 1) / WARP_SIZE;
  const int slots = nodes.bucket_size * WARP_SIZE;
  nodes.open_scores = state;
  nodes.scores = reinterpret_cast<double*>(state + slots);
  nodes.parents = reinterpret_cast<int*>(state + 2 * slots);
  nodes.ranks = nodes.parents + slots;
  nodes.depths = nodes.ranks + slots;
  nodes.open_ranks = nodes.depths + slots;
  return nodes;
}

// Ordered score of a child; 0 when there is no such child.
__device__ __forceinline__ unsigned long long child_score(const Candidates& table, const Limits& limits,
                                                          double score, int depth, int rank) {
  if (depth >= table.L) return 0;
  if (rank >= min(table.K, limits.widths[min(depth, WIDTHS - 1)])) return 0;
  const int token = table.candidate_ids[table.place(depth, rank)];
  const double child = __dadd_rn(score, table.log_probability(depth, rank));
  const bool is_open = token >= 0 && child > (double)NEGATIVE_INFINITY && !(child < limits.min_path_score);
  return is_open ? ordered_bits(child) : 0;
}

// Whether the rank path of node a's open child comes before that of node b's.
__device__ bool comes_first(const Nodes& nodes, int a, int b) {
  int rank_a = nodes.open_ranks[a], rank_b = nodes.open_ranks[b];
  while (a != b) {
    const bool climb_a = nodes.depths[a] >= nodes.depths[b], climb_b = nodes.depths[b] >= nodes.depths[a];
    if (climb_a) {
      rank_a = nodes.ranks[a];
      a = nodes.parents[a];
    }
    if (climb_b) {
      rank_b = nodes.ranks[b];
      b = nodes.parents[b];
    }
  }
  return rank_a < rank_b;
}

// Each lane passes a score and a node; returns the node that is taken first, or -1 when all scores are 0.
__device__ __forceinline__ int first_of_lanes(const Nodes& nodes, unsigned long long score, int node) {
  const unsigned high = (unsigned)(score >> 32);
  const unsigned top_high = __reduce_max_sync(FULL_WARP, high);
  if (top_high == 0) return -1;  // no score has an empty high half
  const unsigned low = high == top_high ? (unsigned)score : 0u;
  const unsigned top_low = __reduce_max_sync(FULL_WARP, low);
  const bool is_top = high == top_high && low == top_low;
  const unsigned lanes = __ballot_sync(FULL_WARP, is_top);
  if (__popc(lanes) == 1) return __shfl_sync(FULL_WARP, node, __ffs(lanes) - 1);

  int best = is_top ? node : -1;
  for (int step = 16; step > 0; step /= 2) {
    const int other = __shfl_xor_sync(FULL_WARP, best, step);
    if (other >= 0 && (best < 0 || comes_first(nodes, other, best))) best = other;
  }
  return best;
}

// Grow the tree of one request, whose bad rows are cut off, by up to `budget` nodes; returns the number of nodes.
__device__ __forceinline__ int pop_nodes(const Nodes& nodes, const Candidates& table, const Limits& limits, int root,
                                         int budget, int* token_ids, int* parents, double* path_scores) {
  const int lane = threadIdx.x % WARP_SIZE;
  // the root and its open child, in bucket 0
  for (int i = lane; i < nodes.bucket_size * WARP_SIZE; i += WARP_SIZE) nodes.open_scores[i] = 0;
  __syncwarp();
  if (lane == 0) {
    nodes.scores[0] = 0.0;
    nodes.parents[0] = -1;
    nodes.ranks[0] = 0;
    nodes.depths[0] = 0;
    nodes.open_ranks[0] = 0;
    nodes.open_score(0) = child_score(table, limits, 0.0, 0, 0);
    if (root >= 0) {
      token_ids[0] = root;
      parents[0] = -1;
      path_scores[0] = 0.0;
    }
  }
  __syncwarp();
  int count = root >= 0 ? 1 : 0;
  unsigned long long best_score = lane == 0 ? nodes.open_score(0) : 0;  // of this lane's bucket
  int best_node = lane;

  bool on_spine = true;
  while (count > 0 && count <= budget) {
    on_spine = on_spine && count <= limits.spine && nodes.open_score(count - 1) > 0;
    const int from = on_spine ? count - 1 : first_of_lanes(nodes, best_score, best_node);
    if (from < 0) break;
    const int added = count++;
    const int rank = nodes.open_ranks[from];
    const int depth = nodes.depths[from];  // of `from`; its children are candidates of row `depth`
    const double added_score = from_ordered_bits(nodes.open_score(from));
    const double from_score = nodes.scores[from];
    const int token = table.candidate_ids[table.place(depth, rank)];
    __syncwarp();

    // lane 0 opens the next child of `from`, lane 1 the first child of the node added, lane 2 writes that node
    if (lane < 2) {
      const int node = lane == 0 ? from : added;
      const int open_rank = lane == 0 ? rank + 1 : 0;
      nodes.open_ranks[node] = open_rank;
      nodes.open_score(node) =
          child_score(table, limits, lane == 0 ? from_score : added_score, depth + lane, open_rank);
    } else if (lane == 2) {
      nodes.scores[added] = added_score;
      nodes.parents[added] = from;
      nodes.ranks[added] = rank;
      nodes.depths[added] = depth + 1;
      token_ids[added] = token;
      parents[added] = from;
      path_scores[added] = added_score;
    }
    __syncwarp();

    // the bucket of `from` lost its best child and is searched; that of the added node can only gain one
    const int bucket = from % WARP_SIZE;
    unsigned long long score = 0;
    int node = -1;
    for (int i = bucket + lane * WARP_SIZE; i < count; i += WARP_SIZE * WARP_SIZE) {
      const unsigned long long other = nodes.open_score(i);
      if (other > score || (other > 0 && other == score && comes_first(nodes, i, node))) {
        score = other;
        node = i;
      }
    }
    const int alone = nodes.open_score(from) > 0 ? from : -1;  // a bucket of one needs no search
    const int best = count <= WARP_SIZE ? alone : first_of_lanes(nodes, score, node);
    if (lane == bucket) {
      best_score = best < 0 ? 0 : nodes.open_score(best);
      best_node = best;
    } else if (lane == added % WARP_SIZE) {
      const unsigned long long gained = nodes.open_score(added);
      if (gained > best_score || (gained > 0 && gained == best_score && comes_first(nodes, added, best_node))) {
        best_score = gained;
        best_node = added;
      }
    }
  }
  return count;
}
