// tree_attention/v4_wgmma.cu: Hopper's tensor cores through wgmma; keys come by tensor copies.
//
// Computes   out[n, h] = sum_j softmax_j(sm_scale * (q_nope[n, h].ckv[j] + q_pe[n, h].kpe[j])) ckv[j]
// Letters    as v1_three_phase.cu; a row is node * H + head; a row tile has 64 rows, a key tile 64 keys; G blocks.
//            docs/v3_schedule.md explains piece, slot, cut and the other words of the schedule.
// Inputs     as v1_three_phase.cu, in 16-bit types; the rows of the cache through tensor maps
//            scale |sm_scale| * log2(e), and the sign of sm_scale, 0 for scales of 0, with 1 for scale
//            parts into how many pieces each row tile of a single request is cut; 0: the device chooses
// Outputs    out T[B, N, H, C], lse float32[B, N, H] in nats: row tiles whose keys one block or one pair of blocks has;
//            v4_merge.cu writes the others
//            scratch: partial_out in the order of v4_values.cuh; carries, sums of pieces of more than FOLD_TILES key
//            tiles; cuts, how a row tile was cut (cut_of in v3_schedule.cuh)
// Work       grid G, block 384, one block per SM, as it uses all registers; v4_schedule.cuh shares out the work. One
//            warpgroup multiplies queries, which it keeps in registers, with keys, and does the softmax; two multiply
//            weights with 256 columns of values each, and load. Who waits for whom: v4_layout.cuh.
// Numerics   float32 accumulation; weights are rounded to T before the second product, their sum is not. Base 2; a
//            maximum is left stale while scores exceed it by at most 40, 10 for float16. At most 1,024 products of 16
//            keys are added to one accumulator before it is folded away. A tile in which a hidden key may hold NaN or
//            inf is weighed without tensor cores, where 0 * NaN would be NaN.
// Requires   sm_90a; C 512, R 64; pages of a multiple of 64 keys, or with SMALL_PAGES of 8, 16 or 32; rows of the cache
//            at multiples of 16 bytes; checked dtypes and shapes; scratch at multiples of 16 bytes (out, lse and the
//            queries may start anywhere)
// Versions   v3_mma: any of C 64 to 512, sm_80 to sm_120 | v4_wgmma: this, sm_90, 1.4 to 2.0 times as fast there
// Speed      64 heads x 64 nodes x 8,192 keys: 109 us in a graph on an H200 (2026-12-01), where v3 takes 211;
//            docs/v4_log.md has the table and what was tried
// Reference  ddtree_cupy/tree_attention/reference.py
// Source     own; wgmma, mbarrier and tensor copies after the PTX ISA; roles after FlashMLA's see-saw of two warpgroups
//            and FlashAttention 3 (arXiv 2407.08608); the stale maximum after FlashAttention 4
#include "tree_attention/v4_scores.cuh"
#include "tree_attention/v4_values.cuh"

// Rows of requests without keys, and of nodes that a request does not have; row tiles of such rows have no pieces.
template <class T>
__device__ __forceinline__ void fill_empty_rows(const Tables& tables, T* __restrict__ out, float* __restrict__ lse,
                                                int4* __restrict__ cuts) {
  const int row_tiles = row_tiles_of(tables.N, tables.H);
  const long long rows = (long long)tables.N * tables.H;
  for (int b = blockIdx.x; b < tables.B; b += gridDim.x) {
    const Request request = request_of(tables, b);
    const bool has_keys = request.range.count > 0;
    const long long first = b * rows + (has_keys ? request.rows : 0), end = (b + 1) * rows;
    const int thread = threadIdx.x % WARPGROUP;
    for (long long i = first * C + thread; i < end * C; i += WARPGROUP) out[i] = from_float<T>(0.0f);
    for (long long row = first + thread; row < end; row += WARPGROUP) lse[row] = NEGATIVE_INFINITY;
    for (int i = (has_keys ? request.row_tiles : 0) + thread; i < row_tiles; i += WARPGROUP)
      cuts[(long long)b * row_tiles + i] = make_int4(0, 0, 0, 0);
  }
}

template <class T, bool PAIRS, bool SMALL_PAGES>
__device__ __forceinline__ void attend(const Queries<T>& queries, const Cache<const T>& cache, const KeyMaps& maps,
                                       T* __restrict__ out, float* __restrict__ lse, const Scratch& scratch, int B,
                                       float scale, float sign, int keys, int tiles_per_slice, int aligned,
                                       int parts) {
  extern __shared__ __align__(1024) char memory[];
  const Shared shared(memory);
  const Tables tables = tables_of(queries, cache, B, keys, KEYS, tiles_per_slice, true);
  const KeyLoader<T, SMALL_PAGES> loader = {maps, cache};
  if (threadIdx.x == WARPGROUP) {
    prefetch_map(loader.map(maps.ckv));
    prefetch_map(loader.map(maps.kpe));
  }
  if (threadIdx.x == 0) shared.init_barriers();
  if (threadIdx.x / WARP_SIZE == VALUE_THREADS / WARP_SIZE)
    begin_share<PAIRS>(tables, queries, parts, shared.share(), shared.piece(0), scratch.cuts);
  __syncthreads();
  if (PAIRS) cluster_arrive();  // waited for before the first message to the other block

  if (threadIdx.x / WARPGROUP == 2) {
    take_registers<SCORE_REGISTERS>();
    score_pieces<T, PAIRS, SMALL_PAGES>(shared, queries, loader, scale, lse, scratch);
    fill_empty_rows(tables, out, lse, scratch.cuts);
  } else {
    give_registers<VALUE_REGISTERS>();
    weigh_pieces<T, PAIRS, SMALL_PAGES>(shared, tables, queries, loader, aligned != 0, sign, out, lse, scratch);
  }
  if (PAIRS) {
    const bool has_waited = shared.share().is_paired && shared.piece(0).rows > 0;
    if (!has_waited) cluster_wait();
    cluster_arrive();
    cluster_wait();  // no block leaves while the other may still write to it
  }
}

template <class T, bool SMALL_PAGES>
__global__ void __launch_bounds__(THREADS, 1)
    tree_attention_v4(const __grid_constant__ Queries<T> queries, const __grid_constant__ Cache<const T> cache,
                      const __grid_constant__ KeyMaps maps, T* __restrict__ out, float* __restrict__ lse,
                      const __grid_constant__ Scratch scratch, int B, float scale, float sign, int keys,
                      int tiles_per_slice, int aligned, int parts) {
  attend<T, false, SMALL_PAGES>(queries, cache, maps, out, lse, scratch, B, scale, sign, keys, tiles_per_slice, aligned,
                                parts);
}

// The same in clusters of two blocks, which can halve the keys of a row tile.
template <class T, bool SMALL_PAGES>
__global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(2, 1, 1)
    tree_attention_v4_pairs(const __grid_constant__ Queries<T> queries, const __grid_constant__ Cache<const T> cache,
                            const __grid_constant__ KeyMaps maps, T* __restrict__ out, float* __restrict__ lse,
                            const __grid_constant__ Scratch scratch, int B, float scale, float sign, int keys,
                            int tiles_per_slice, int aligned, int parts) {
  attend<T, true, SMALL_PAGES>(queries, cache, maps, out, lse, scratch, B, scale, sign, keys, tiles_per_slice, aligned,
                               parts);
}
