// tree_build/v2_tree.cuh: the tree that v2_best_first writes, links and visibility included.
//
// Computes   as best_first and topology do for v1
// Letters    N nodes incl. root, W = ceil(N / 32) words per row of visibility
// Outputs    every entry is written: padding is -1, -inf for scores and 0 for bits
// Source     own
#pragma once

#include "tree_build/v2_pool.cuh"

// The trees of a batch, by value; then that of one request.
struct Tree {
  int* token_ids;             // [B, N]
  int* parents;               // [B, N]
  int* depths;                // [B, N]
  double* path_scores;        // [B, N]
  int* first_child;           // [B, N]
  int* next_sibling;          // [B, N]
  unsigned* visibility_bits;  // [B, N, W]

  __device__ __forceinline__ void choose(long long request, int N, int W) {
    token_ids += request * N;
    parents += request * N;
    depths += request * N;
    path_scores += request * N;
    first_child += request * N;
    next_sibling += request * N;
    visibility_bits += request * N * W;
  }

  __device__ __forceinline__ void put(int node, int token, int parent, int depth, double score) const {
    token_ids[node] = token;
    parents[node] = parent;
    depths[node] = depth;
    path_scores[node] = score;
    next_sibling[node] = -1;
  }
};

// What the links of a node follow from, in shared memory.
struct Links {
  unsigned short parents[MOST_CANDIDATES + 1];
  unsigned short first[MOST_CANDIDATES + 1];  // the child of rank 0, 0 if there is none

  // Note a node below the root; a barrier later its siblings can be linked.
  __device__ __forceinline__ void put(int node, int parent, int rank) {
    parents[node] = parent;
    if (rank == 0) first[parent] = node;
  }
};

// Write what follows from the links of `count` nodes, and the padding; called by the whole block after a barrier.
__device__ __forceinline__ void finish_tree(const Tree& tree, const Links& links, int count, int N, int W) {
  for (int node = threadIdx.x; node < N; node += blockDim.x) {
    if (node >= count) tree.put(node, -1, -1, -1, (double)NEGATIVE_INFINITY);
    const int child = node < count ? links.first[node] : 0;
    tree.first_child[node] = child > 0 ? child : -1;
  }

  // a thread climbs to the root for each word of a row
  for (int i = threadIdx.x; i < N * W; i += blockDim.x) {
    const int node = i / W, word = i % W;
    unsigned bits = 0;
    if (node < count) {
      int at = node;
      while (true) {
        if (at / 32 == word) bits |= 1u << at % 32;
        if (at / 32 < word || at == 0) break;  // ancestors come first
        at = links.parents[at];
      }
    }
    tree.visibility_bits[i] = bits;
  }
}
