// tree_attention/v3_tile.cuh: one row tile of v3_mma.cu over its key tiles: scores, softmax, values, pipeline.
//
// Letters    as v3_layout.cuh
// Schedule   per key tile: X everyone has the tile and is done with the one before last; scores of tile i + 1; Y the
//            group's partial scores are there; values of tile i, softmax of tile i + 1. Group 1 does the last two in
//            the other order, and loads after its scores rather than before: one group feeds the tensor cores while
//            the other is in its softmax or computes addresses.
// Source     own
#pragma once

#include "tree_attention/v3_loads.cuh"

template <class T, int C, int R, int KEYS, int STAGES>
struct RowTile : TileLoads<T, C, R, KEYS, STAGES> {
  using Layout = TileLayout<T, C, R, KEYS, STAGES>;
  using Loads = TileLoads<T, C, R, KEYS, STAGES>;
  using Layout::piece, Layout::lane, Layout::group, Layout::quarter, Layout::keys, Layout::exchange, Layout::weights;
  using Layout::factors, Layout::row_values, Loads::query, Loads::load_keys, Loads::fetch_page;
  static constexpr int STEPS = Layout::STEPS, COLS = Layout::COLS, PITCH = Layout::PITCH, BLOCKS = Layout::BLOCKS;

  float value[2][COLS / 8][4];  // C fragments: [16 rows][8 columns]
  float largest, total;         // of the row this lane finishes; total is the lane's own share

  __device__ __forceinline__ RowTile(char* shared, const Piece<T>& piece) : Loads(shared, piece) {}

  // B fragments of one k-step of the scores; past the last dimension the query is zero, so any other will do.
  __device__ __forceinline__ static void load_step(unsigned (&b)[4], SharedAddress row, int block, int step) {
    constexpr bool EVEN = STEPS * 4 * 16 == C + R;
    const int k = EVEN ? step : min(step, (C + R) / 16 - 1 - quarter() * STEPS);
    load_matrices(b, row + 2 * (16 * block * PITCH + 16 * k));
  }

  // Scores of the warp's dimensions for 32 rows and all keys of the tile, handed to the warps that finish the rows.
  __device__ __forceinline__ void score(int tile) const {
    const SharedAddress row = shared_address(keys(tile) + (lane() / 16 * 8 + lane() % 8) * PITCH +
                                             16 * quarter() * STEPS + lane() / 8 % 2 * 8);
    unsigned b[2][4];  // one step ahead, so that the tensor cores need not wait for shared memory
    load_step(b[0], row, 0, 0);
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      float c[2][2][4] = {};
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int done = block * STEPS + step;
        if (done + 1 < BLOCKS * STEPS)
          load_step(b[(done + 1) % 2], row, (done + 1) / STEPS, (done + 1) % STEPS);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          multiply_add<T>(c[m][0], query[m][step], b[done % 2][0], b[done % 2][1]);
          multiply_add<T>(c[m][1], query[m][step], b[done % 2][2], b[done % 2][3]);
        }
      }
      float4* to = exchange() + ((group() * 4 * BLOCKS + block) * 4 + quarter()) * 32 + lane();
#pragma unroll
      for (int owner = 0; owner < 4; ++owner) {  // finishes rows 8 * owner .. 8 * owner + 7
        const float(&low)[4] = c[owner / 2][0];
        const float(&high)[4] = c[owner / 2][1];
        const int i = 2 * (owner % 2);
        to[owner * BLOCKS * 4 * 32] = make_float4(low[i], low[i + 1], high[i], high[i + 1]);
      }
    }
  }

  // -inf for the keys of a block that the lane's row does not see
  __device__ __forceinline__ void hide(float4& s, int key) const {
    const KeyRange& range = piece.request.range;
    const int row = min(piece.first_row + 32 * group() + 8 * quarter() + lane() / 4, piece.request.rows - 1);
    const unsigned* of_node = piece.bits + (long long)(row / piece.H) * piece.W;
    const int node = range.first + key - range.context_len;
    if (key >= range.count || !is_visible(of_node, node)) s.x = NEGATIVE_INFINITY;
    if (key + 1 >= range.count || !is_visible(of_node, node + 1)) s.y = NEGATIVE_INFINITY;
    if (key + 8 >= range.count || !is_visible(of_node, node + 8)) s.z = NEGATIVE_INFINITY;
    if (key + 9 >= range.count || !is_visible(of_node, node + 9)) s.w = NEGATIVE_INFINITY;
  }

  // Softmax of 8 rows over the tile: weights as A fragments, and what the sums so far must shrink by.
  __device__ __forceinline__ void soften(int tile) {
    float4 s[BLOCKS];
    const float scale = piece.scale;
    float tile_largest = NEGATIVE_INFINITY;
    const KeyRange& range = piece.request.range;
    // the context is seen by all; past it, and past the end, each pair counts
    const bool is_masked = (tile + 1) * KEYS > min(range.context_len - range.first, range.count);
    const float4* parts = exchange() + (group() * 4 + quarter()) * BLOCKS * 4 * 32 + lane();
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      const float4 a = parts[128 * block], b = parts[128 * block + 32];
      const float4 c = parts[128 * block + 64], d = parts[128 * block + 96];
      s[block] = make_float4(((a.x + b.x) + (c.x + d.x)) * scale, ((a.y + b.y) + (c.y + d.y)) * scale,
                             ((a.z + b.z) + (c.z + d.z)) * scale, ((a.w + b.w) + (c.w + d.w)) * scale);
    }
    if (is_masked) {
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block) hide(s[block], tile * KEYS + 16 * block + 2 * (lane() % 4));
    }
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block)
      tile_largest = fmaxf(tile_largest, fmaxf(fmaxf(s[block].x, s[block].y), fmaxf(s[block].z, s[block].w)));
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
    unsigned* to =
        reinterpret_cast<unsigned*>(weights() + ((buffer * 2 + group()) * 2 + quarter() / 2) * BLOCKS * 32 + lane()) +
        quarter() % 2;
    float sum = 0.0f;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      const float4 w = make_float4(fast_exp2(s[block].x - shift), fast_exp2(s[block].y - shift),
                                   fast_exp2(s[block].z - shift), fast_exp2(s[block].w - shift));
      sum += (w.x + w.y) + (w.z + w.w);
      to[128 * block] = pack2<T>(w.x, w.y);
      to[128 * block + 2] = pack2<T>(w.z, w.w);
    }
    total += sum;
    if (lane() % 4 == 0) factors()[(buffer * 2 + group()) * 32 + 8 * quarter() + lane() / 4] = factor;
  }

  // The warp's columns of the weighted values: rescale if any row asks for it, then add the tile's products.
  __device__ __forceinline__ void weigh(int tile) {
    const int buffer = tile % 2;
    const float* of_rows = factors() + (buffer * 2 + group()) * 32 + lane() / 4;
    const float f[4] = {of_rows[0], of_rows[8], of_rows[16], of_rows[24]};
    if (__any_sync(FULL_WARP, f[0] != 1.0f || f[1] != 1.0f || f[2] != 1.0f || f[3] != 1.0f)) rescale(f);
    const uint4* of_weights = weights() + (buffer * 2 + group()) * 2 * BLOCKS * 32 + lane();
    const SharedAddress row =
        shared_address(keys(tile) + lane() % 16 * PITCH + quarter() * COLS + lane() / 16 * 8);
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      unsigned a[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const uint4 both = of_weights[(m * BLOCKS + block) * 32];
        a[m][0] = both.x;
        a[m][1] = both.y;
        a[m][2] = both.z;
        a[m][3] = both.w;
      }
#pragma unroll
      for (int columns = 0; columns < COLS / 16; ++columns) {
        unsigned b[4];
        load_matrices_transposed(b, row + 2 * 16 * block * PITCH + 32 * columns);
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
    float* mine = row_values() + group() * 32;
    named_barrier(1 + group(), 128);
    if (lane() % 4 == 0) mine[8 * quarter() + lane() / 4] = of_row;
    named_barrier(1 + group(), 128);
#pragma unroll
    for (int i = 0; i < 4; ++i) of_rows[i] = mine[lane() / 4 + 8 * i];
  }

  // Adds `value` and `total` into the block's carry (or starts it), so that no accumulator takes more than FOLD_KEYS
  // keys; with is_end the other way round, the carry into `value` and `total`. Each thread has its own entries.
  __device__ __forceinline__ void fold(bool starts, bool is_end) {
    float* mine = piece.carry + threadIdx.x;
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

  // All rows over the key tiles of the piece.
  __device__ __forceinline__ void attend() {
    largest = NEGATIVE_INFINITY;
    total = 0.0f;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < COLS / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) value[m][n][i] = 0.0f;

    int tile = piece.first_tile;
    fetch_page(tile);
    for (int ahead = 0; ahead < STAGES - 1; ++ahead) load_keys(tile + ahead);
    copy_async_wait<STAGES - 2>();
    __syncthreads();
    score(tile);
    named_barrier(1 + group(), 128);
    soften(tile);

    for (; tile < piece.last_tile; ++tile) {
      copy_async_wait<STAGES - 3>();
      __syncthreads();  // X
      const bool has_next = tile + 1 < piece.last_tile;
      if (group() == 0) load_keys(tile + STAGES - 1);
      if (has_next) score(tile + 1);
      if (group() == 1) load_keys(tile + STAGES - 1);
      named_barrier(1 + group(), 128);  // Y
      const int done = tile + 1 - piece.first_tile;
      const bool folds = done % (FOLD_KEYS / KEYS) == 0;
      if (has_next && group() == 1 && !folds) soften(tile + 1);
      weigh(tile);
      if (folds) fold(done == FOLD_KEYS / KEYS, false);
      if (has_next && (group() == 0 || folds)) soften(tile + 1);
    }
    if (piece.last_tile - piece.first_tile >= FOLD_KEYS / KEYS) fold(false, true);
    total += __shfl_xor_sync(FULL_WARP, total, 1);
    total += __shfl_xor_sync(FULL_WARP, total, 2);
  }

  // Weighted averages and log-sum-exp of all rows; `total` is complete.
  __device__ __forceinline__ void write_result(T* out, float* lse) {
    float inverse[4];
    share(total > 0.0f ? 1.0f / total : 0.0f, inverse);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 32 * group() + lane() / 4 + 8 * i;
      if (piece.first_row + row >= piece.request.rows) continue;
      unsigned* to = reinterpret_cast<unsigned*>(out + (long long)row * C + quarter() * COLS + 2 * (lane() % 4));
#pragma unroll
      for (int n = 0; n < COLS / 8; ++n)
        to[4 * n] = pack2<T>(value[i / 2][n][2 * (i % 2)] * inverse[i], value[i / 2][n][2 * (i % 2) + 1] * inverse[i]);
    }
    const int mine = 32 * group() + 8 * quarter() + lane() / 4;
    if (lane() % 4 == 0 && piece.first_row + mine < piece.request.rows) lse[mine] = state_score(largest, total) * LN_2;
  }

  __device__ __forceinline__ void write_partial(float* out, float* score) {
    float inverse[4];
    share(total > 0.0f ? 1.0f / total : 0.0f, inverse);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float* to = out + (32 * group() + lane() / 4 + 8 * i) * C + quarter() * COLS + 2 * (lane() % 4);
#pragma unroll
      for (int n = 0; n < COLS / 8; ++n)
        *reinterpret_cast<float2*>(to + 8 * n) = make_float2(value[i / 2][n][2 * (i % 2)] * inverse[i],
                                                             value[i / 2][n][2 * (i % 2) + 1] * inverse[i]);
    }
    if (lane() % 4 == 0) score[32 * group() + 8 * quarter() + lane() / 4] = state_score(largest, total);
  }
};
