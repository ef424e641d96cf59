// tree_attention/v3_scores.cuh: the score warps of v3_mma.cu: products of queries and keys, then the softmax.
//
// Letters    as v3_layout.cuh and v3_softmax.cuh
// Schedule   per key tile: wait for KEYS_LOADED, multiply, arrive at WEIGHTS for the tile before, swap halves within
//            the pair, softmax. With three stages arrive for the same tile, after its softmax. docs/v3_schedule.md
// Source     own
#pragma once

#include "tree_attention/v3_softmax.cuh"

template <class T, int C, int R, int KEYS, int STAGES, int HELD>
struct ScoreWarp : RowSoftmax<T, C, R, KEYS, STAGES, HELD> {
  using Layout = TileLayout<T, C, R, KEYS, STAGES, HELD>;
  using Softmax = RowSoftmax<T, C, R, KEYS, STAGES, HELD>;
  using Layout::piece, Layout::keys, Layout::is_held, Layout::held_before;
  using Softmax::thread, Softmax::lane, Softmax::warp, Softmax::begin, Softmax::soften, Softmax::fold, Softmax::end;
  static constexpr int STEPS = Layout::STEPS, PITCH = Layout::PITCH, LINES = Layout::LINES;
  static constexpr int BLOCKS = Layout::BLOCKS;

  unsigned query[2][HELD][4];  // A fragments: [16 rows, the warp's own first][k-step]

  __device__ __forceinline__ ScoreWarp(char* shared, const Piece<T>& piece) : Softmax(shared, piece) {}

  __device__ __forceinline__ int pair() const { return warp() / 2; }
  __device__ __forceinline__ int half() const { return warp() % 2; }

  // Which keys of the tree any node of the row tile sees; the others are never read.
  __device__ __forceinline__ void find_seen() const {
    const int first_node = piece.first_row / piece.H;
    const int last_node = (min(piece.first_row + TILE_ROWS, piece.request.rows) - 1) / piece.H;
    for (int word = thread; word < piece.W; word += SCORE_THREADS) {
      unsigned any = 0;
      for (int node = first_node; node <= last_node; ++node) any |= piece.bits[(long long)node * piece.W + word];
      Layout::seen()[word] = any;
    }
  }

  // Where ldmatrix reads the A fragment of the 16 rows of the warp itself (m = 0) or of its partner (m = 1).
  __device__ __forceinline__ SharedAddress fragment_address(const T* rows, int pitch, int column, int m) const {
    const int row = 32 * pair() + 16 * (m ^ half()) + lane() % 16;
    return shared_address(rows + row * pitch + 16 * column + lane() / 16 * 8);
  }

  __device__ __forceinline__ void take_queries() {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const SharedAddress at = fragment_address(Layout::held(), Layout::HELD_PITCH, half() * HELD, m);
#pragma unroll
      for (int step = 0; step < HELD; ++step) load_matrices(query[m][step], at + 32 * step);
    }
  }

  // Scores of 32 rows over half of the dimensions and all keys of the tile: C fragments [16 rows][8 keys]. Fragments
  // are loaded AHEAD k-steps before their products.
  __device__ __forceinline__ void multiply(int stage, float (&c)[2][2 * BLOCKS][4]) const {
    constexpr int AHEAD = 2, RING = AHEAD + 1;
    const int row = lane() / 16 * 8 + lane() % 8;  // of 16 keys; the XOR of v3_layout.cuh with row % 8
    const SharedAddress even =
        shared_address(keys(stage) + row * PITCH + ((4 * half() + lane() / 8 % 2) ^ (row % 8)) * 8);
    const SharedAddress odd =
        shared_address(keys(stage) + row * PITCH + ((4 * half() + lane() / 8 % 2) ^ (row % 8) ^ 2) * 8);
    const SharedAddress stay = fragment_address(Layout::queries(), Layout::QUERY_PITCH, half() * (STEPS - HELD), 0);
    const int to_other = 32 * Layout::QUERY_PITCH * (half() == 0 ? 1 : -1);  // bytes to the partner's rows
    unsigned a[RING][2][4], b[RING][BLOCKS][4];
#pragma unroll
    for (int ahead = 0; ahead < STEPS + AHEAD; ++ahead) {
      if (ahead < STEPS) {
        const bool is_past_last = 64 * LINES != C + R && Layout::k_step(half(), ahead) >= (C + R) / 16;
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
          if (is_past_last) {  // keys are not loaded there
#pragma unroll
            for (int i = 0; i < 4; ++i) b[ahead % RING][block][i] = 0;
          } else {
            load_matrices(b[ahead % RING][block],
                          (ahead % 2 ? odd : even) + 2 * (16 * block * PITCH + 64 * (ahead / 2)));
          }
#pragma unroll
        for (int m = 0; m < 2; ++m)
          if (!is_held(ahead))
            load_matrices(a[ahead % RING][m], stay + m * to_other + 32 * (ahead - held_before(ahead)));
      }
      const int step = ahead - AHEAD;
      if (step < 0) continue;
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          unsigned of_query[4];
#pragma unroll
          for (int i = 0; i < 4; ++i)
            of_query[i] = is_held(step) ? query[m][held_before(step)][i] : a[step % RING][m][i];
          const unsigned(&of_keys)[4] = b[step % RING][block];
          multiply_add<T>(c[m][2 * block], of_query, of_keys[0], of_keys[1]);
          multiply_add<T>(c[m][2 * block + 1], of_query, of_keys[2], of_keys[3]);
        }
    }
  }

  // Adds the other half of the dimensions to the rows of the warp itself.
  __device__ __forceinline__ void swap_halves(float (&c)[2][2 * BLOCKS][4]) const {
    float4* to = Layout::exchange() + (warp() ^ 1) * 2 * BLOCKS * 32 + lane();
    const float4* from = Layout::exchange() + warp() * 2 * BLOCKS * 32 + lane();
#pragma unroll
    for (int n = 0; n < 2 * BLOCKS; ++n) to[32 * n] = make_float4(c[1][n][0], c[1][n][1], c[1][n][2], c[1][n][3]);
    named_barrier(PAIR + pair(), 64);
#pragma unroll
    for (int n = 0; n < 2 * BLOCKS; ++n) {
      const float4 other = from[32 * n];
      c[0][n][0] += other.x;
      c[0][n][1] += other.y;
      c[0][n][2] += other.z;
      c[0][n][3] += other.w;
    }
  }

  // All rows over the key tiles of the piece; the totals are complete afterwards.
  __device__ __forceinline__ void attend() {
    find_seen();
    named_arrive(SEEN, THREADS);
    named_barrier(QUERIES, THREADS);
    take_queries();
    named_arrive(HELD_READ, THREADS);
    begin();
    // every row sees the context; from there on, and past the last key, each pair is looked up
    const int unmasked = min(piece.request.range.context_len - piece.request.range.first, piece.request.range.count);
    const int last_tile = piece.plan.last_tile, first_masked = unmasked / KEYS;
    const float scale = piece.scale;
    const int first_tile = piece.plan.first_tile;
    int stage = 0;
    for (int tile = first_tile; tile < last_tile; ++tile) {
      named_barrier(KEYS_LOADED + tile % 2, THREADS);
      float c[2][2 * BLOCKS][4] = {};
      multiply(stage, c);
      stage = Layout::next_stage(stage);
      if (Layout::IS_DEEP && tile > first_tile) named_arrive(WEIGHTS + (tile - 1) % 2, THREADS);
      swap_halves(c);
      soften(tile, tile >= first_masked, scale, c[0]);
      if (Layout::folds(tile, first_tile, last_tile)) fold(tile);
      if (!Layout::IS_DEEP || tile + 1 == last_tile) named_arrive(WEIGHTS + tile % 2, THREADS);
    }
    end();
    named_arrive(END, THREADS);
  }
};
