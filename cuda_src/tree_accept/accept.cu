// tree_accept/accept.cu: the longest path from the root that the target itself would have taken.
//
// Computes   node = root; while a child of node holds the target's token at node: node = that child. The first of the
//            target's tokens that no child holds is the bonus.
// Letters    B requests, N nodes incl. root
// Inputs     token_ids, first_child, next_sibling int32[B, N], num_nodes int32[B], target_token_ids int32[B, N]
//            contiguous; a negative target (-1) matches no child
// Outputs    accepted int32[B, N] (padding -1), num_accepted, bonus_token int32[B]  contiguous, every entry written;
//            all -1 for a request without nodes
// Work       grid (B), block 32: the lanes of the warp walk together and share the writing of the padding
// Requires   checked shapes. Values are not trusted: every link must lead to a larger index below num_nodes, so the
//            walk reads inside the arrays and ends after at most N links.
// Speed      H200, 2026-11-30, in a graph, together with commit_kv of 9 rows of one layer: 9 us, and 10 us for 64
//            requests; predicted 3 us for 64 nodes, from one or two L1 reads per link
// Reference  ddtree_cupy/tree_accept/reference.py
// Source     SpecInfer (arXiv 2305.09781), greedy walk
#include "common/warp.cuh"

extern "C" __global__ void __launch_bounds__(32)
    accept(const int* __restrict__ token_ids, const int* __restrict__ first_child,
           const int* __restrict__ next_sibling, const int* __restrict__ num_nodes,
           const int* __restrict__ target_token_ids, int* __restrict__ accepted, int* __restrict__ num_accepted,
           int* __restrict__ bonus_token, int N) {
  const long long request = blockIdx.x;  // 0..B-1
  const int lane = threadIdx.x;          // 0..31
  const long long row = request * N;
  const int count = min(num_nodes[request], N);

  int length = 0, bonus = -1;
  for (int node = count > 0 ? 0 : -1; node >= 0;) {
    if (lane == 0) accepted[row + length] = node;
    ++length;
    bonus = max(target_token_ids[row + node], -1);
    int child = bonus >= 0 ? first_child[row + node] : -1;
    int least = node + 1;
    while (child >= least && child < count && token_ids[row + child] != bonus) {
      least = child + 1;
      child = next_sibling[row + child];
    }
    node = child >= least && child < count ? child : -1;
  }

  for (int i = length + lane; i < N; i += WARP_SIZE) accepted[row + i] = -1;
  if (lane == 0) {
    num_accepted[request] = length - 1;
    bonus_token[request] = bonus;
  }
}
