// tree_attention/v2_split_kv.cu: online softmax over key tiles that rows share, split over the keys; any length.
//
// Computes   out[n, h] = sum_j softmax_j(sm_scale * (q_nope[n, h].ckv[j] + q_pe[n, h].kpe[j])) ckv[j]
//            j over the context and the nodes visible from n, or one of the two parts (keys)
// Letters    B requests, N nodes, H heads, C latent width, R rope width, W = ceil(N / 32), P pages; T keys of a request
// Inputs     as v1_three_phase.cu
// Outputs    out T[B, N, H, C], lse float32[B, N, H] in nats; with v2_merge.cu every entry is written
//            partial_out float32[B, region, C], partial_score float32[B, region]: scratch; the row of a slice is
//            slice * rows + row
// Work       tree_attention_v2: grid (x, B), block 128; a block owns ROWS query rows (row = node * H + head) and one
//            slice of the keys. x counts the slices of all row blocks; blocks that the request does not need return.
//            A warp owns ROWS / 4 rows. Scores: lane = key of the tile; values: lane = four latent dimensions.
//            Shared: 32 keys of C + R + 16 bytes, ROWS queries and ROWS * 32 weights in float32.
// Numerics   float32; base-2 exponentials; a tile of 32 keys is summed on its own and a slice has at most 1,024 tiles.
//            Hidden keys are left out of the sums, not weighed by 0, as they may hold NaN or inf.
//            Slices depend on T and the rows of the request alone, so a result never depends on the batch.
// Requires   C and R multiples of 16, C <= 1,024; checked dtypes and shapes; `vectors` says that all rows of the cache
//            start at multiples of 16 bytes
// Versions   v1_three_phase: readable, short context | v2_split_kv: this, CUDA cores | v3: tensor cores
// Speed      shared memory feeds 4 products with 5 reads: half of the float32 peak at best. H200, 2026-11-30, bfloat16:
//            64 heads x 64 nodes x 8,192 keys 4.6 ms, x 131,072 keys 80 ms (15 TFLOP/s)
// Reference  ddtree_cupy/tree_attention/reference.py
// Source     online softmax (arXiv 1805.02867); splitting after FlashDecoding
#include "common/inputs.cuh"
#include "common/softmax_state.cuh"
#include "common/vector_load.cuh"
#include "common/warp.cuh"
#include "tree_attention/v2_slices.cuh"

// Which keys of the tile any row of this block sees, and where their rows are; one thread per key.
struct TileKeys {
  long long ckv_row[TILE];
  long long kpe_row[TILE];
  bool is_seen[TILE];
};

template <class T, int C, int R>
__device__ void load_tile(T* tile, const TileKeys& where, const T* ckv, const T* kpe, bool vectors) {
  using L = Layout<T, C, R>;
  if (vectors) {
    for (int unit = threadIdx.x; unit < TILE * L::VECTORS; unit += blockDim.x) {
      const int key = unit / L::VECTORS;
      const int c = unit % L::VECTORS * L::PER_VECTOR;
      const T* from = c < C ? ckv + where.ckv_row[key] + c : kpe + where.kpe_row[key] + (c - C);
      const uint4 value = where.is_seen[key] ? __ldg(reinterpret_cast<const uint4*>(from)) : make_uint4(0, 0, 0, 0);
      *reinterpret_cast<uint4*>(tile + key * L::PITCH + c) = value;
    }
  } else {
    for (int element = threadIdx.x; element < TILE * (C + R); element += blockDim.x) {
      const int key = element / (C + R);
      const int c = element % (C + R);
      const T* from = c < C ? ckv + where.ckv_row[key] + c : kpe + where.kpe_row[key] + (c - C);
      tile[key * L::PITCH + c] = where.is_seen[key] ? *from : from_float<T>(0.0f);
    }
  }
}

// part[r] += sum over the tile's keys of weights[r][key] * value[key], for the lane's four dimensions. With IS_MASKED,
// hidden keys are left out: a NaN or inf in their values would give NaN even with a weight of 0.
template <bool IS_MASKED, int ROWS, int PITCH, class T>
__device__ __forceinline__ void add_values(float4 (&part)[ROWS], const T* values, const float* weights) {
  for (int key = 0; key < TILE; ++key) {
    const float4 value = load4(values + key * PITCH);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float weight = weights[r * TILE + key];
      if (IS_MASKED && is_hidden(weight)) continue;
      part[r].x = fmaf(weight, value.x, part[r].x);
      part[r].y = fmaf(weight, value.y, part[r].y);
      part[r].z = fmaf(weight, value.z, part[r].z);
      part[r].w = fmaf(weight, value.w, part[r].w);
    }
  }
}

template <class T, int C, int R>
__global__ void __launch_bounds__(WARPS* WARP_SIZE, 1) tree_attention_v2(
    Queries<T> queries, Cache<const T> cache, T* __restrict__ out, float* __restrict__ lse,
    float* __restrict__ partial_out, float* __restrict__ partial_score, long long region, float sm_scale, int keys,
    int vectors) {
  using L = Layout<T, C, R>;
  const int request = blockIdx.y;               // 0..B-1
  const int warp = threadIdx.x / WARP_SIZE;     // 0..3
  const int lane = threadIdx.x % WARP_SIZE;     // 0..31
  const int N = queries.N, H = queries.H;
  const PageTable table = cache.table(request);
  const int count = queries.count(request);
  const KeyRange range = key_range(keys, cache.context_len(request), count, table);
  const int rows = count * H;
  const Slices slices = slices_of(rows, range.count, L::ROWS);
  const int slice = slices.row_blocks > 0 ? blockIdx.x / slices.row_blocks : slices.count;
  if (slice >= slices.count) return;
  const int first_row = blockIdx.x % slices.row_blocks * L::ROWS;
  const int last_row = min(first_row + L::ROWS, rows) - 1;
  const int W = queries.words();
  const unsigned* bits = queries.bits(request, 0);

  extern __shared__ uint4 shared[];
  T* tile = reinterpret_cast<T*>(shared);                                // [TILE][PITCH]
  float* query_rows = reinterpret_cast<float*>(tile + TILE * L::PITCH);  // [ROWS][C + R]
  float* weights = query_rows + L::ROWS * (C + R);                       // [ROWS][TILE]
  __shared__ TileKeys where;

  // the queries of the block, widened once
  for (int element = threadIdx.x; element < L::ROWS * (C + R); element += blockDim.x) {
    const int row = first_row + element / (C + R);
    const int c = element % (C + R);
    float value = 0.0f;
    if (row < rows) {
      const int node = row / H;
      const int head = row % H;
      value = c < C ? to_float(queries.nope(request, node, head)[c]) : to_float(queries.pe(request, node, head)[c - C]);
    }
    query_rows[element] = value;
  }

  float largest[L::ROWS_PER_WARP], total[L::ROWS_PER_WARP];
  float4 average[L::ROWS_PER_WARP][L::CHUNKS];
#pragma unroll
  for (int r = 0; r < L::ROWS_PER_WARP; ++r) {
    largest[r] = NEGATIVE_INFINITY;
    total[r] = 0.0f;
#pragma unroll
    for (int chunk = 0; chunk < L::CHUNKS; ++chunk) average[r][chunk] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }

  const int stop = min((slice + 1) * (long long)slices.keys, (long long)range.count);
  for (int start = slice * slices.keys; start < stop; start += TILE) {
    // where the keys are; a key that no row of the block sees counts as zeros and is not read
    if (threadIdx.x < TILE) {
      const int position = range.first + start + threadIdx.x;
      const int key_node = position - range.context_len;
      bool is_seen = start + (int)threadIdx.x < stop;
      if (is_seen && key_node >= 0) {
        is_seen = false;
        for (int node = first_row / H; node <= last_row / H; ++node)
          is_seen |= is_visible(bits + (long long)node * W, key_node);
      }
      where.is_seen[threadIdx.x] = is_seen;
      where.ckv_row[threadIdx.x] = is_seen ? cache.ckv_row(table, position) : 0;
      where.kpe_row[threadIdx.x] = is_seen ? cache.kpe_row(table, position) : 0;
    }
    __syncthreads();
    load_tile<T, C, R>(tile, where, cache.ckv, cache.kpe, vectors != 0);
    __syncthreads();

    // scores of the warp's rows against the lane's key, in four chains each: long chains lose bits
    float4 score[L::ROWS_PER_WARP];
#pragma unroll
    for (int r = 0; r < L::ROWS_PER_WARP; ++r) score[r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int c = 0; c < C + R; c += 4) {
      const float4 key = load4(tile + lane * L::PITCH + c);
#pragma unroll
      for (int r = 0; r < L::ROWS_PER_WARP; ++r) {
        const float4 query = load4(query_rows + (warp * L::ROWS_PER_WARP + r) * (C + R) + c);
        score[r].x = fmaf(query.x, key.x, score[r].x);
        score[r].y = fmaf(query.y, key.y, score[r].y);
        score[r].z = fmaf(query.z, key.z, score[r].z);
        score[r].w = fmaf(query.w, key.w, score[r].w);
      }
    }

    // weights of the tile, and the factors by which the running state must shrink
    float correction[L::ROWS_PER_WARP];
#pragma unroll
    for (int r = 0; r < L::ROWS_PER_WARP; ++r) {
      const int row = first_row + warp * L::ROWS_PER_WARP + r;
      const int key_node = range.first + start + lane - range.context_len;
      const bool is_in = row < rows && start + lane < stop && is_visible(bits + (long long)(row / H) * W, key_node);
      const float sum = (score[r].x + score[r].y) + (score[r].z + score[r].w);
      const float scaled = is_in ? sum * (sm_scale * LOG2_E) : NEGATIVE_INFINITY;
      const float larger = fmaxf(largest[r], warp_max(scaled));
      const float weight = exp2f(scaled - softmax_shift(larger));
      correction[r] = exp2f(largest[r] - softmax_shift(larger));
      total[r] = total[r] * correction[r] + warp_sum(weight);
      largest[r] = larger;
      weights[(warp * L::ROWS_PER_WARP + r) * TILE + lane] = is_in ? weight : HIDDEN_WEIGHT;
    }
    __syncwarp();

    // the tile's weighted values, summed on their own and then added; the context is seen by all
    const bool is_masked = range.first + start + TILE > range.context_len;
    const float* of_warp = weights + warp * L::ROWS_PER_WARP * TILE;
#pragma unroll
    for (int chunk = 0; chunk < L::CHUNKS; ++chunk) {
      const int c = 4 * (lane + WARP_SIZE * chunk);
      if (c >= C) break;
      float4 part[L::ROWS_PER_WARP];
#pragma unroll
      for (int r = 0; r < L::ROWS_PER_WARP; ++r) part[r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (is_masked)
        add_values<true, L::ROWS_PER_WARP, L::PITCH>(part, tile + c, of_warp);
      else
        add_values<false, L::ROWS_PER_WARP, L::PITCH>(part, tile + c, of_warp);
#pragma unroll
      for (int r = 0; r < L::ROWS_PER_WARP; ++r) {
        average[r][chunk].x = fmaf(average[r][chunk].x, correction[r], part[r].x);
        average[r][chunk].y = fmaf(average[r][chunk].y, correction[r], part[r].y);
        average[r][chunk].z = fmaf(average[r][chunk].z, correction[r], part[r].z);
        average[r][chunk].w = fmaf(average[r][chunk].w, correction[r], part[r].w);
      }
    }
    __syncthreads();
  }

  // the result itself if there is one slice, else a normalised partial result
#pragma unroll
  for (int r = 0; r < L::ROWS_PER_WARP; ++r) {
    const int row = first_row + warp * L::ROWS_PER_WARP + r;
    if (row >= rows) break;
    const float inverse = total[r] > 0.0f ? 1.0f / total[r] : 0.0f;
    const float score = state_score(largest[r], total[r]);
    const long long final_row = (long long)request * N * H + row;
    const long long partial_row = request * region + (long long)slice * rows + row;
#pragma unroll
    for (int chunk = 0; chunk < L::CHUNKS; ++chunk) {
      const int c = 4 * (lane + WARP_SIZE * chunk);
      if (c >= C) break;
      float4 value = average[r][chunk];
      value = make_float4(value.x * inverse, value.y * inverse, value.z * inverse, value.w * inverse);
      if (slices.count > 1) {
        *reinterpret_cast<float4*>(partial_out + partial_row * C + c) = value;
        continue;
      }
      T* to = out + final_row * C + c;
      to[0] = from_float<T>(value.x);
      to[1] = from_float<T>(value.y);
      to[2] = from_float<T>(value.z);
      to[3] = from_float<T>(value.w);
    }
    if (lane > 0) continue;
    if (slices.count > 1) {
      partial_score[partial_row] = score;
    } else {
      lse[final_row] = score * LN_2;
    }
  }
}
