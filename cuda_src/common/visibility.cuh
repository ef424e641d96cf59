// common/visibility.cuh: which keys one node may attend to.
//
// Letters    N nodes, W = ceil(N / 32) words per row
//            a key is named by its logical position; positions from context_len on belong to tree nodes
// Reference  _visible_keys in ddtree_cupy/tree_attention/reference.py
// Source     own
#pragma once

#include "paging.cuh"

constexpr int KEYS_ALL = 0;
constexpr int KEYS_CONTEXT = 1;
constexpr int KEYS_TREE = 2;

// The keys of one request as one range of positions, first .. first + count - 1.
struct KeyRange {
  int context_len;
  int first;
  int count;
};

__device__ __forceinline__ KeyRange key_range(int keys, int context_len, int num_nodes, const PageTable& table) {
  KeyRange range;
  range.context_len = context_len;
  range.first = keys == KEYS_TREE ? context_len : 0;
  const long long wanted = (keys == KEYS_TREE ? 0 : context_len) + (keys == KEYS_CONTEXT ? 0 : num_nodes);
  const long long mapped = max(table.capacity() - range.first, 0ll);
  range.count = (int)min(wanted, mapped);
  return range;
}

// bits: uint32[W] of the node; key_node = position - context_len, negative for context
__device__ __forceinline__ bool is_visible(const unsigned* bits, int key_node) {
  return key_node < 0 || (bits[key_node >> 5] >> (key_node & 31) & 1u);
}

// The same for 32 keys from key_node on, one bit per key; 0 past the W words of the node.
__device__ __forceinline__ unsigned visible_word(const unsigned* bits, int W, int key_node) {
  if (key_node <= -32) return 0xffffffffu;
  const int word = key_node >> 5, shift = key_node & 31;  // -1 for the word before the first: context
  const unsigned low = word < 0 ? 0xffffffffu : word < W ? bits[word] : 0;
  const unsigned high = word + 1 < W ? bits[word + 1] : 0;
  return __funnelshift_r(low, high, shift);
}
