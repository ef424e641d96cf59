// tree_build/v1_best_first.cu: the tree of the most probable prefixes, popped by one warp per request.
//
// Computes   s(root) = 0, s(child) = s(parent) + (logit - lse of its depth); takes the open child with the highest
//            score until the budget is spent; of equal scores the smaller rank path (a prefix comes first)
// Letters    B requests, L draft length, K candidates per depth, N = capacity + 1 nodes; rank = place among siblings.
// Inputs     table  int32 candidate_ids[B, L, K], float32 candidate_logits[B, L, K], candidate_lse[B, L]
//            budgets int32[B] or null (then budget_of_all), root_token_ids int32[B] or null (then root_of_all)
//            limits  see struct Limits
// Scratch    state: state_bytes(N) per request, or null, then the state lies in dynamic shared memory
// Outputs    token_ids, parents int32[B, N], path_scores float64[B, N], num_nodes, status int32[B]
//            contiguous, every entry written: padding -1 and -inf; an inactive request (root < 0) is all padding
// Work       grid (B), block 32; see pops.cuh
// Numerics   see candidates.cuh and pops.cuh
// Requires   checked shapes. Values are not trusted: the budget is clamped to 0..N - 1, and every index follows from
//            shapes and from nodes written here.
// Speed      H200, 2026-11-30, in a graph: 56 us for budget 64 (64 requests: 57), 909 us for 1,024; predicted 15 and
//            250, but the chain of shuffles and shared reads of a step is four times as long as counted
// Reference  ddtree_cupy/tree_build/reference.py
// Source     DDTree (arXiv 2604.12989); the buckets, the order of operations and the tie rule are ours
#include "tree_build/pops.cuh"

extern "C" __global__ void __launch_bounds__(32)
    best_first(Candidates table, const int* __restrict__ budgets, const int* __restrict__ root_token_ids,
               unsigned long long* __restrict__ state, int* __restrict__ token_ids, int* __restrict__ parents,
               double* __restrict__ path_scores, int* __restrict__ num_nodes, int* __restrict__ status,
               int budget_of_all, int root_of_all, int N, const __grid_constant__ Limits limits) {
  extern __shared__ unsigned long long shared_state[];
  const long long request = blockIdx.x;  // 0..B-1
  const int lane = threadIdx.x;          // 0..31
  const int bucket_size = (N + WARP_SIZE - 1) / WARP_SIZE;
  const Nodes nodes = nodes_in(state == nullptr ? shared_state : state + request * bucket_size * WARP_SIZE * 4, N);
  const int root = root_token_ids == nullptr ? root_of_all : root_token_ids[request];
  const int wanted = budgets == nullptr ? budget_of_all : budgets[request];
  const int budget = min(max(wanted, 0), N - 1);
  token_ids += request * N;
  parents += request * N;
  path_scores += request * N;

  // the first bad row ends the tree
  const int L = table.L;
  table.choose(request);
  int first_bad = L;
  for (int depth = lane; depth < L; depth += WARP_SIZE) {
    if (is_nan(table.candidate_lse[depth])) first_bad = min(first_bad, depth);
  }
  first_bad = __reduce_min_sync(FULL_WARP, first_bad);
  table.L = min(min(L, limits.max_depth), first_bad);

  const int count = pop_nodes(nodes, table, limits, root, budget, token_ids, parents, path_scores);
  for (int i = count + lane; i < N; i += WARP_SIZE) {
    token_ids[i] = -1;
    parents[i] = -1;
    path_scores[i] = (double)NEGATIVE_INFINITY;
  }
  if (lane == 0) {
    num_nodes[request] = count;
    status[request] = root >= 0 && first_bad < L ? BAD_ROW : 0;
  }
}
