// tree_build/v2_best_first.cu: the tree of the most probable prefixes, found in rounds by one block per request.
//
// Computes   s(root) = 0, s(child) = s(parent) + (logit - lse of its depth); the nodes with the highest scores until
//            the budget is spent, after a spine; of equal scores the smaller rank path (a prefix comes first)
// Letters    B requests, L draft length, K candidates per depth, N = capacity + 1 nodes, W = ceil(N / 32), T threads,
//            m nodes of the spine; rank = place among siblings. A run is a node and its descendants of rank 0, a branch
//            is a child of rank 1 or more.
// Inputs     table  int32 candidate_ids[B, L, K], float32 candidate_logits[B, L, K], candidate_lse[B, L]
//            budgets int32[B] or null (then budget_of_all), root_token_ids int32[B] or null (then root_of_all)
//            limits  see struct Limits
// Outputs    tree    see struct Tree; num_nodes, status int32[B]; contiguous, every entry written; an inactive request
//            (root < 0) is all padding
// Work       grid (B), block T; dynamic shared memory for pool_size slots and, if is_cached, for L * min(K, N - 1)
//            log probabilities. Scores fall along paths and ranks, so the order of pops is the order of scores, and
//            nothing has to be popped:
//            1. The run of the root and its branches give a first threshold that as many nodes pass as are wanted.
//            2. Rounds: every branch found last is followed down its run, then every node of these runs opens the
//               branches that pass. A histogram of the scores found so far raises the threshold after either half. A
//               node among the best n has ranks with product (rank + 1) <= n, so there are at most log2(n) + 1 rounds;
//               three are usual.
//            3. Bins of the histogram sort the nodes, ranks within a bin are counted.
//            Rows whose scores do not fall, which top_candidates never makes, and pools that overflow are left to
//            pop_nodes.
// Numerics   see candidates.cuh. Thresholds are approximate and only leave nodes out that cannot be wanted.
// Requires   checked shapes; L <= MOST_DEPTHS, N - 1 <= MOST_CANDIDATES, pool_size < 2^15, shared memory that is enough
//            for pop_nodes, too. Values are not trusted: the budget is clamped to 0..N - 1, every index follows from
//            shapes and from nodes written here.
// Speed      H200, 2026-12-01, in a graph, L = 15: 12 us for budget 64 (64 requests 16, 256 requests 19), 26 for 256,
//            90 to 106 for 1,024. Latency of shared memory and of float64 is what counts: 161 slots in 2.5 rounds.
// Reference  ddtree_cupy/tree_build/reference.py
// Source     DDTree (arXiv 2604.12989) for the order of choice; the rounds are ours
#include "tree_build/pops.cuh"
#include "tree_build/v2_rounds.cuh"
#include "tree_build/v2_tree.cuh"

// Write the nodes of the spine and the best of the others; returns the number of nodes. Ends with a barrier.
__device__ __forceinline__ int choose_nodes(const Candidates& table, const Pool& pool, const Rows& rows, int slots,
                                            int budget, int last_bin, const Tree& tree, Histogram& histogram,
                                            Links& links) {
  const int spine = rows.spine_nodes;
  if (threadIdx.x < WARP_SIZE) histogram.sort_bins();
  for (int slot = threadIdx.x; slot <= spine; slot += blockDim.x) pool.nodes[slot] = slot;
  __syncthreads();
  for (int slot = spine + 1 + (int)threadIdx.x; slot < slots; slot += blockDim.x) {
    const int bin = Histogram::bin_of(rows, pool.scores[slot]);
    if (bin >= last_bin && pool.scores[slot] >= rows.lowest)
      pool.order[atomicAdd(&histogram.starts[Histogram::place(bin)], 1)] = slot;
  }
  __syncthreads();

  // every start has become an end; the rank of a node within its bin makes its place
  const int kept = histogram.starts[Histogram::place(last_bin)];
  for (int i = threadIdx.x; i < kept; i += blockDim.x) {
    const int slot = pool.order[i], place = Histogram::place(Histogram::bin_of(rows, pool.scores[slot]));
    const int end = histogram.starts[place], begin = end - histogram.counts[place];
    int node = spine + 1 + begin;
    for (int j = begin; j < end; ++j) node += j != i && pool.comes_first(pool.order[j], slot);
    pool.nodes[slot] = node;
  }
  __syncthreads();

  // places 0..spine - 1 are the spine's slots, then come those in order
  const int count = min(spine + kept, budget) + 1;
  const auto visit = [&](auto write) {
    for (int i = threadIdx.x; i < spine + kept; i += blockDim.x) {
      const int slot = i < spine ? i + 1 : pool.order[i - spine], node = pool.nodes[slot];
      if (node < count) write(slot, node, pool.nodes[pool.parent(slot)], pool.rank(slot));
    }
  };
  visit([&](int slot, int node, int parent, int rank) {
    const int depth = pool.depth(slot);
    tree.put(node, table.candidate_ids[table.place(depth - 1, rank)], parent, depth, pool.scores[slot]);
    links.put(node, parent, rank);
  });
  __syncthreads();
  visit([&](int slot, int node, int parent, int rank) {
    if (rank > 0) tree.next_sibling[rank > 1 ? pool.nodes[slot - 1] : links.first[parent]] = node;
  });
  return count;
}

// Let the first warp pop the nodes; returns how many there are. Begins and ends with a barrier.
__device__ __forceinline__ int pop_tree(Candidates table, const Limits& limits, unsigned long long* memory, int root,
                                        int budget, int N, const Tree& tree, int* found, Links& links) {
  const Nodes nodes = nodes_in(memory, N);
  __syncthreads();
  if (threadIdx.x < WARP_SIZE) {
    int depths = 0;
    while (depths < min(table.L, limits.max_depth) && !is_nan(table.candidate_lse[depths])) ++depths;
    table.L = depths;
    const int count = pop_nodes(nodes, table, limits, root, budget, tree.token_ids, tree.parents, tree.path_scores);
    if (threadIdx.x == 0) *found = count;
  }
  __syncthreads();
  const int count = *found;
  for (int node = 1 + (int)threadIdx.x; node < count; node += blockDim.x) {
    tree.depths[node] = nodes.depths[node];
    tree.next_sibling[node] = -1;
    links.put(node, nodes.parents[node], nodes.ranks[node]);
  }
  __syncthreads();
  for (int node = 1 + (int)threadIdx.x; node < count; node += blockDim.x) {
    int before = nodes.ranks[node] > 0 ? node - 1 : 0;
    while (before > 0 && (nodes.parents[before] != nodes.parents[node] || nodes.ranks[before] != nodes.ranks[node] - 1))
      --before;
    if (before > 0) tree.next_sibling[before] = node;
  }
  return count;
}

extern "C" __global__ void __launch_bounds__(1024)
    best_first_v2(Candidates table, const int* __restrict__ budgets, const int* __restrict__ root_token_ids, Tree tree,
                  int* __restrict__ num_nodes, int* __restrict__ status, int budget_of_all, int root_of_all, int N,
                  int W, int pool_size, int is_cached, const __grid_constant__ Limits limits) {
  extern __shared__ unsigned long long memory[];
  __shared__ Rows rows;
  __shared__ Histogram histogram;
  __shared__ Links links;
  __shared__ int found;
  const long long request = blockIdx.x;  // 0..B-1
  const int root = root_token_ids == nullptr ? root_of_all : root_token_ids[request];
  const int budget = min(max(budgets == nullptr ? budget_of_all : budgets[request], 0), N - 1);
  table.choose(request);
  tree.choose(request, N, W);
  const int columns = min(table.K, budget);  // no rank beyond is wanted
  const LogProbabilities known = {table, reinterpret_cast<double*>(memory), is_cached != 0, columns};
  const Pool pool = pool_in(memory + (is_cached ? table.L * min(table.K, N - 1) : 0), pool_size);

  for (int i = threadIdx.x; i < BINS; i += blockDim.x) histogram.counts[i] = 0;
  for (int i = threadIdx.x; i < N; i += blockDim.x) links.first[i] = 0;
  int count = 0;
  if (root >= 0) {
    read_rows(known, limits, rows);
    if (threadIdx.x < WARP_SIZE) bound_scores(known, limits, budget, rows);
    __syncthreads();
    count_first(known, rows, histogram);
    int last_bin;
    const int slots = find_nodes(known, rows, pool, budget - rows.spine_nodes, &found, histogram, last_bin);
    const bool has_found = slots >= 0 && !rows.is_odd;
    count = has_found ? choose_nodes(table, pool, rows, slots, budget, last_bin, tree, histogram, links) : -1;
    if (count < 0) count = pop_tree(table, limits, memory, root, budget, N, tree, &found, links);
    if (threadIdx.x == 0) tree.put(0, root, -1, 0, 0.0);
  }
  __syncthreads();
  finish_tree(tree, links, count, N, W);
  if (threadIdx.x == 0) {
    num_nodes[request] = count;
    status[request] = root >= 0 && rows.has_bad ? BAD_ROW : 0;
  }
}
