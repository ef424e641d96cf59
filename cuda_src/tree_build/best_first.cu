// tree_build/best_first.cu: the tree of the most probable prefixes, one warp per request.
//
// Computes   s(root) = 0, s(child) = s(parent) + (logit - lse of its depth); takes the open child with the highest
//            score until the budget is spent; of equal scores the smaller rank path (a prefix comes first)
// Letters    B requests, L draft length, K candidates per depth, N = capacity + 1 nodes; rank = place among siblings.
//            Every chosen node has one open child, its best child that was not taken yet, as scores fall with the rank.
// Inputs     table  int32 candidate_ids[B, L, K], float32 candidate_logits[B, L, K], candidate_lse[B, L]
//            budgets int32[B] or null (then budget_of_all), root_token_ids int32[B] or null (then root_of_all)
//            limits  see struct Limits
// Scratch    state: state_bytes(N) per request, or null, then the state lies in dynamic shared memory
// Outputs    token_ids, parents int32[B, N], path_scores float64[B, N], num_nodes, status int32[B]
//            contiguous, every entry written: padding -1 and -inf; an inactive request (root < 0) is all padding
// Work       grid (B), block 32. Open children sit in 32 buckets, node i in bucket i % 32; lane l keeps the best of
//            bucket l in registers. A step takes the best one of all lanes, appends it as a node, opens two
//            children and searches one bucket.
// Numerics   float64 in the order of the reference, unfused; scores are compared as ordered integers, so nothing is
//            flushed. float32 subnormals are widened exactly although -ftz is on.
// Requires   checked shapes. Values are not trusted: the budget is clamped to 0..N - 1, and every index follows from
//            shapes and from nodes written here.
// Speed      H200, 2026-11-30, in a graph: 56 us for budget 64 (64 requests: 57), 909 us for 1,024; predicted 15 and
//            250, but the chain of shuffles and shared reads of a step is four times as long as counted
// Reference  ddtree_cupy/tree_build/reference.py
// Source     DDTree (arXiv 2604.12989); the buckets, the order of operations and the tie rule are ours
#include "common/ordered.cuh"
#include "common/warp.cuh"

constexpr int WIDTHS = 256;
constexpr int BAD_ROW = 1;  // bit 0 of status

// What bounds the tree, by value.
struct Limits {
  double min_path_score;
  int max_depth;
  int spine;
  int widths[WIDTHS];  // most children of a node by its depth, the last entry for all depths from 255 on
};

// The candidates of a batch, by value; then those of one request, after its bad rows are cut off.
struct Candidates {
  const int* candidate_ids;       // [B, L, K]
  const float* candidate_logits;  // [B, L, K]
  const float* candidate_lse;     // [B, L]
  int L, K;
};

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

// float64 of a float32, subnormals included (the conversion itself would flush them)
__device__ __forceinline__ double widen(float x) {
  const int bits = __float_as_int(x);
  if (bits & 0x7f800000) return (double)x;
  const double magnitude = __dmul_rn((double)(bits & 0x007fffff), 0x1p-149);
  return bits < 0 ? -magnitude : magnitude;
}

// Ordered score of a child; 0 when there is no such child.
__device__ __forceinline__ unsigned long long child_score(const Candidates& table, const Limits& limits,
                                                          double score, int depth, int rank) {
  if (depth >= table.L) return 0;
  if (rank >= min(table.K, limits.widths[min(depth, WIDTHS - 1)])) return 0;
  const long long i = (long long)depth * table.K + rank;
  const int token = table.candidate_ids[i];
  const double child = __dadd_rn(score, __dsub_rn(widen(table.candidate_logits[i]), widen(table.candidate_lse[depth])));
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
  table.candidate_ids += request * L * table.K;
  table.candidate_logits += request * L * table.K;
  table.candidate_lse += request * L;
  int first_bad = L;
  for (int depth = lane; depth < L; depth += WARP_SIZE) {
    if (is_nan(table.candidate_lse[depth])) first_bad = min(first_bad, depth);
  }
  first_bad = __reduce_min_sync(FULL_WARP, first_bad);
  table.L = min(min(L, limits.max_depth), first_bad);

  // the root and its open child, in bucket 0
  for (int i = lane; i < bucket_size * WARP_SIZE; i += WARP_SIZE) nodes.open_scores[i] = 0;
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
    const int token = table.candidate_ids[(long long)depth * table.K + rank];
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
