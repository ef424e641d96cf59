// tree_attention/v3_tile.cuh: one row tile of v3_mma.cu over a range of key tiles; layout and pipeline.
//
// Letters    group 0..1 of four warps and 32 rows; quarter 0..3 of a warp in its group; r = lane / 4, p = lane % 4
//            STEPS k-steps of 16 dimensions a warp multiplies for the scores; COLS = C / 4 value columns it owns
// Shared     keys      T[STAGES][KEYS][PITCH]          key tiles; an odd number of 16-byte units a row, so that
//                                                      ldmatrix hits every bank once
//            exchange  float4[2][4][KEYS/16][4][32]    partial scores: [group][owner][16 keys][from quarter][lane]
//            weights   uint4[2][2][2][KEYS/16][32]     A fragments: [buffer][group][16 rows][16 keys][lane]
//            factors   float[2][2][32]                 [buffer][group][row]: what the values shrink by
//            row_values float[2][32]                   one number a row, on its way to the whole group
//            seen      unsigned[W]                     keys of the tree that any row of the tile sees
// Schedule   per key tile: X everyone has the tile and is done with the one before last; scores of tile i + 1; Y the
//            group's partial scores are there; values of tile i, softmax of tile i + 1. Group 1 does the last two in
//            the other order, so that one group feeds the tensor cores while the other is in its softmax.
// Source     own
#pragma once

#include "common/ptx.cuh"
#include "common/softmax_state.cuh"
#include "tree_attention/v3_schedule.cuh"

constexpr float STALE_BY = 8.0f;   // log2 of how far a weight may exceed 1
constexpr int FOLD_KEYS = 16384;   // 1,024 products of 16 keys

template <class T>
struct CacheRows {
  const T* ckv;
  const T* kpe;
  long long ckv_page, ckv_slot, kpe_page, kpe_slot;  // strides in elements
  bool aligned;
};

template <class T, int C, int R, int KEYS, int STAGES>
struct RowTile {
  static_assert(C % 64 == 0 && R % 16 == 0 && KEYS % 16 == 0 && STAGES >= 3, "sizes the layout is made for");
  static constexpr int STEPS = ((C + R) / 16 + 3) / 4;
  static constexpr int COLS = C / 4;
  static constexpr int PITCH = C + R + 8;
  static constexpr int BLOCKS = KEYS / 16;
  static constexpr int CHUNKS = (C + R) / 8;      // of 16 bytes a key
  static constexpr int LOADERS = 256 / KEYS;      // threads that load one key
  static constexpr int KEY_BYTES = STAGES * KEYS * PITCH * 2;
  static constexpr int EXCHANGE_BYTES = 2 * 4 * BLOCKS * 4 * 32 * 16;
  static constexpr int WEIGHT_BYTES = 2 * 2 * 2 * BLOCKS * 32 * 16;

  const Request& request;
  const unsigned* bits;
  CacheRows<T> cache;
  T* keys;
  float4* exchange;
  uint4* weights;
  float* factors;
  float* row_values;
  unsigned* seen;
  int N, H, W, first_row;
  int group, quarter, lane;
  unsigned query[2][STEPS][4];
  float value[2][COLS / 8][4];
  float largest, total;            // of the row this lane finishes; total is the lane's own share

  __device__ __forceinline__ RowTile(void* shared, const Request& request, const unsigned* bits, int N, int H,
                                     int row_tile)
      : request(request), bits(bits), N(N), H(H), W((N + 31) / 32), first_row(row_tile * TILE_ROWS) {
    char* at = static_cast<char*>(shared);
    keys = reinterpret_cast<T*>(at);
    exchange = reinterpret_cast<float4*>(at + KEY_BYTES);
    weights = reinterpret_cast<uint4*>(at + KEY_BYTES + EXCHANGE_BYTES);
    factors = reinterpret_cast<float*>(at + KEY_BYTES + EXCHANGE_BYTES + WEIGHT_BYTES);
    row_values = factors + 2 * 2 * 32;
    seen = reinterpret_cast<unsigned*>(row_values + 2 * 32);
    lane = threadIdx.x % 32;
    group = threadIdx.x / 128;
    quarter = threadIdx.x / 32 % 4;

    // which keys of the tree any of the tile's nodes sees; the others are never read
    __syncthreads();  // the tile before is done with shared memory
    const int first_node = first_row / H;
    const int last_node = (min(first_row + TILE_ROWS, request.rows) - 1) / H;
    for (int word = threadIdx.x; word < W; word += 256) {
      unsigned any = 0;
      for (int node = first_node; node <= last_node; ++node) any |= bits[(long long)node * W + word];
      seen[word] = any;
    }
    __syncthreads();
  }

  // row 0..31 of the group -> row of the request
  __device__ __forceinline__ int row_of(int row) const { return first_row + 32 * group + row; }

  __device__ __forceinline__ static unsigned load_pair(const T* from, bool aligned) {
    if (aligned) return *reinterpret_cast<const unsigned*>(from);
    const T both[2] = {from[0], from[1]};
    return pack2<T>(to_float(both[0]), to_float(both[1]));
  }

  __device__ __forceinline__ void load_queries(const T* nope, long long nope_node, long long nope_head, const T* pe,
                                               long long pe_node, long long pe_head, bool aligned) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // rows r, r + 8, r + 16, r + 24 of the group
      const int row = row_of(lane / 4 + 8 * i);
      const int node = row / H, head = row % H;
      const T* of_nope = nope + node * nope_node + head * nope_head;
      const T* of_pe = pe + node * pe_node + head * pe_head;
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int c = (quarter * STEPS + step) * 16 + 8 * half + 2 * (lane % 4);
          unsigned pair = 0;
          if (row < request.rows && c < C + R) pair = load_pair(c < C ? of_nope + c : of_pe + (c - C), aligned);
          query[i / 2][step][i % 2 + 2 * half] = pair;
        }
    }
  }

  // Key tile `tile` into its stage; keys that no row sees become zeros.
  __device__ __forceinline__ void load_keys(int tile) const {
    const int key = threadIdx.x / LOADERS;
    const int index = tile * KEYS + key;
    const int position = request.range.first + index;
    const int key_node = position - request.range.context_len;
    const bool is_read = index < request.range.count && is_visible(seen, key_node);
    const T* of_ckv = cache.ckv;
    const T* of_kpe = cache.kpe;
    if (is_read) {
      of_ckv += request.table.row(position, cache.ckv_page, cache.ckv_slot);
      of_kpe += request.table.row(position, cache.kpe_page, cache.kpe_slot);
    }
    T* to = keys + (tile % STAGES * KEYS + key) * PITCH;
    if (cache.aligned) {
      const SharedAddress at = shared_address(to);
#pragma unroll
      for (int chunk = threadIdx.x % LOADERS; chunk < CHUNKS; chunk += LOADERS)
        copy_async_16(at + 16 * chunk, chunk < C / 8 ? of_ckv + 8 * chunk : of_kpe + (8 * chunk - C), is_read);
    } else {
      for (int c = threadIdx.x % LOADERS; c < C + R; c += LOADERS)
        to[c] = is_read ? (c < C ? of_ckv[c] : of_kpe[c - C]) : from_float<T>(0.0f);
    }
  }

  // Scores of the warp's dimensions for 32 rows and all keys of the tile, handed to the warps that finish the rows.
  __device__ __forceinline__ void score(int tile) const {
    const T* from = keys + tile % STAGES * KEYS * PITCH;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      float c[2][2][4] = {};
      const SharedAddress row = shared_address(from + (16 * block + lane / 16 * 8 + lane % 8) * PITCH);
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int k = min(quarter * STEPS + step, (C + R) / 16 - 1);  // past the end the query is zero
        unsigned b[4];
        load_matrices(b, row + 2 * (16 * k + lane / 8 % 2 * 8));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          multiply_add<T>(c[m][0], query[m][step], b[0], b[1]);
          multiply_add<T>(c[m][1], query[m][step], b[2], b[3]);
        }
      }
#pragma unroll
      for (int owner = 0; owner < 4; ++owner) {  // finishes rows 8 * owner .. 8 * owner + 7
        const float(&low)[4] = c[owner / 2][0];
        const float(&high)[4] = c[owner / 2][1];
        const int i = 2 * (owner % 2);
        exchange[(((group * 4 + owner) * BLOCKS + block) * 4 + quarter) * 32 + lane] =
            make_float4(low[i], low[i + 1], high[i], high[i + 1]);
      }
    }
  }

  // Softmax of 8 rows over the tile: weights as A fragments, and what the sums so far must shrink by.
  __device__ __forceinline__ void soften(int tile, float scale) {
    float4 s[BLOCKS];
    float tile_largest = NEGATIVE_INFINITY;
    const int first_key = request.range.first + tile * KEYS;
    const bool is_masked = first_key + KEYS > request.range.context_len || (tile + 1) * KEYS > request.range.count;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      const float4* parts = exchange + ((group * 4 + quarter) * BLOCKS + block) * 4 * 32 + lane;
      const float4 a = parts[0], b = parts[32], c = parts[64], d = parts[96];
      s[block] = make_float4(((a.x + b.x) + (c.x + d.x)) * scale, ((a.y + b.y) + (c.y + d.y)) * scale,
                             ((a.z + b.z) + (c.z + d.z)) * scale, ((a.w + b.w) + (c.w + d.w)) * scale);
      if (is_masked) {
        const int row = min(row_of(8 * quarter + lane / 4), request.rows - 1);
        const unsigned* of_node = bits + (long long)(row / H) * W;
        const int key = tile * KEYS + 16 * block + 2 * (lane % 4);
        const int node = request.range.first + key - request.range.context_len;
        const int count = request.range.count;
        if (key >= count || !is_visible(of_node, node)) s[block].x = NEGATIVE_INFINITY;
        if (key + 1 >= count || !is_visible(of_node, node + 1)) s[block].y = NEGATIVE_INFINITY;
        if (key + 8 >= count || !is_visible(of_node, node + 8)) s[block].z = NEGATIVE_INFINITY;
        if (key + 9 >= count || !is_visible(of_node, node + 9)) s[block].w = NEGATIVE_INFINITY;
      }
      tile_largest = fmaxf(tile_largest, fmaxf(fmaxf(s[block].x, s[block].y), fmaxf(s[block].z, s[block].w)));
    }
    tile_largest = fmaxf(tile_largest, __shfl_xor_sync(FULL_WARP, tile_largest, 1));
    tile_largest = fmaxf(tile_largest, __shfl_xor_sync(FULL_WARP, tile_largest, 2));

    float factor = 1.0f;
    if (tile_largest > largest + STALE_BY) {
      factor = exp2f(largest - softmax_shift(tile_largest));
      largest = tile_largest;
      total *= factor;
    }
    const float shift = softmax_shift(largest);
    const int buffer = tile % 2;
    unsigned* to = reinterpret_cast<unsigned*>(weights + ((buffer * 2 + group) * 2 + quarter / 2) * BLOCKS * 32);
    float sum = 0.0f;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      const float4 w = make_float4(exp2f(s[block].x - shift), exp2f(s[block].y - shift), exp2f(s[block].z - shift),
                                   exp2f(s[block].w - shift));
      sum += (w.x + w.y) + (w.z + w.w);
      to[(block * 32 + lane) * 4 + quarter % 2] = pack2<T>(w.x, w.y);
      to[(block * 32 + lane) * 4 + quarter % 2 + 2] = pack2<T>(w.z, w.w);
    }
    total += sum;
    if (lane % 4 == 0) factors[(buffer * 2 + group) * 32 + 8 * quarter + lane / 4] = factor;
  }

  // The warp's columns of the weighted values: rescale if any row asks for it, then add the tile's products.
  __device__ __forceinline__ void weigh(int tile) {
    const int buffer = tile % 2;
    const float* of_rows = factors + (buffer * 2 + group) * 32 + lane / 4;
    const float f[4] = {of_rows[0], of_rows[8], of_rows[16], of_rows[24]};
    if (__any_sync(FULL_WARP, f[0] != 1.0f || f[1] != 1.0f || f[2] != 1.0f || f[3] != 1.0f)) rescale(f);
    const T* from = keys + tile % STAGES * KEYS * PITCH;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      unsigned a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const uint4 both = weights[(((buffer * 2 + group) * 2 + m) * BLOCKS + block) * 32 + lane];
        a[m][0] = both.x;
        a[m][1] = both.y;
        a[m][2] = both.z;
        a[m][3] = both.w;
      }
      const SharedAddress row =
          shared_address(from + (16 * block + lane % 16) * PITCH + quarter * COLS + lane / 16 * 8);
#pragma unroll
      for (int columns = 0; columns < COLS / 16; ++columns) {
        unsigned b[4];
        load_matrices_transposed(b, row + 32 * columns);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          multiply_add<T>(value[m][2 * columns], a[m], b[0], b[1]);
          multiply_add<T>(value[m][2 * columns + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void rescale(const float (&f)[4]) {
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < COLS / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) value[m][n][i] *= f[2 * m + i / 2];
  }

  // One number of each of the lane's four rows, from the lanes that finish them; the group calls together.
  __device__ __forceinline__ void share(float of_row, float (&of_rows)[4]) {
    named_barrier(1 + group, 128);
    if (lane % 4 == 0) row_values[group * 32 + 8 * quarter + lane / 4] = of_row;
    named_barrier(1 + group, 128);
#pragma unroll
    for (int i = 0; i < 4; ++i) of_rows[i] = row_values[group * 32 + lane / 4 + 8 * i];
  }

  // Adds `value` and `total` into the block's carry (or starts it), so that no accumulator takes more than FOLD_KEYS
  // keys; with is_end the other way round, the carry into `value` and `total`. Each thread has its own entries.
  __device__ __forceinline__ void fold(float* carry, bool starts, bool is_end) {
    float* mine = carry + threadIdx.x;
    float* row = mine + TILE_ROWS * C;  // [0] total, [256] the maximum both refer to
    const float shrink = starts ? 0.0f : exp2f(row[256] - softmax_shift(largest));
    float f[4];
    share(shrink, f);
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < COLS / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float* at = mine + ((m * (COLS / 8) + n) * 4 + i) * 256;
          const float sum = starts ? value[m][n][i] : fmaf(*at, f[2 * m + i / 2], value[m][n][i]);
          if (!is_end) *at = sum;
          value[m][n][i] = is_end ? sum : 0.0f;
        }
    const float sum = starts ? total : fmaf(row[0], shrink, total);
    row[0] = sum;
    row[256] = largest;
    total = is_end ? sum : 0.0f;
  }

  // All rows over the key tiles first .. last - 1.
  __device__ __forceinline__ void attend(int first, int last, float scale, float* carry) {
    largest = NEGATIVE_INFINITY;
    total = 0.0f;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < COLS / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) value[m][n][i] = 0.0f;

    for (int ahead = 0; ahead < STAGES - 1; ++ahead) {
      if (first + ahead < last) load_keys(first + ahead);
      copy_async_commit();
    }
    copy_async_wait<STAGES - 2>();
    __syncthreads();
    score(first);
    named_barrier(1 + group, 128);
    soften(first, scale);

    bool is_folded = false;
    for (int tile = first; tile < last; ++tile) {
      copy_async_wait<STAGES - 3>();
      __syncthreads();  // X
      const bool has_next = tile + 1 < last;
      if (tile + STAGES - 1 < last) load_keys(tile + STAGES - 1);
      copy_async_commit();
      if (has_next) score(tile + 1);
      named_barrier(1 + group, 128);  // Y
      const bool folds = (tile + 1 - first) % (FOLD_KEYS / KEYS) == 0;
      if (has_next && group == 1 && !folds) soften(tile + 1, scale);
      weigh(tile);
      if (folds) {
        fold(carry, !is_folded, false);
        is_folded = true;
      }
      if (has_next && (group == 0 || folds)) soften(tile + 1, scale);
    }
    if (is_folded) fold(carry, false, true);
    total += __shfl_xor_sync(FULL_WARP, total, 1);
    total += __shfl_xor_sync(FULL_WARP, total, 2);
  }

  // Weighted averages and log-sum-exp of all rows; `total` is complete.
  __device__ __forceinline__ void write_result(T* out, float* lse) {
    float inverse[4];
    share(total > 0.0f ? 1.0f / total : 0.0f, inverse);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 32 * group + lane / 4 + 8 * i;
      if (first_row + row >= request.rows) continue;
      unsigned* to = reinterpret_cast<unsigned*>(out + (long long)row * C + quarter * COLS + 2 * (lane % 4));
#pragma unroll
      for (int n = 0; n < COLS / 8; ++n)
        to[4 * n] = pack2<T>(value[i / 2][n][2 * (i % 2)] * inverse[i], value[i / 2][n][2 * (i % 2) + 1] * inverse[i]);
    }
    const int mine = 32 * group + 8 * quarter + lane / 4;
    if (lane % 4 == 0 && first_row + mine < request.rows) lse[mine] = state_score(largest, total) * LN_2;
  }

  __device__ __forceinline__ void write_partial(float* out, float* score) {
    float inverse[4];
    share(total > 0.0f ? 1.0f / total : 0.0f, inverse);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float* to = out + (32 * group + lane / 4 + 8 * i) * C + quarter * COLS + 2 * (lane % 4);
#pragma unroll
      for (int n = 0; n < COLS / 8; ++n)
        *reinterpret_cast<float2*>(to + 8 * n) = make_float2(value[i / 2][n][2 * (i % 2)] * inverse[i],
                                                             value[i / 2][n][2 * (i % 2) + 1] * inverse[i]);
    }
    if (lane % 4 == 0) score[32 * group + 8 * quarter + lane / 4] = state_score(largest, total);
  }
};
