// tree_attention/v3_scores.cuh: the score warps of v3_mma.cu: scores of 64 rows over the key tiles, softmax.
//
// Letters    as v3_layout.cuh; a lane finishes rows r = lane / 4 and r + 8 of its warp's 16, keys 2p and 2p + 1 of
//            every 8, p = lane % 4: the C fragments of the scores are the A fragments of the values
// Schedule   per key tile: wait for KEYS_LOADED, multiply, arrive at WEIGHTS for the tile before, swap halves within
//            the pair, softmax. With three stages arrive for the same tile, after its softmax.
// Source     own
#pragma once

#include "tree_attention/v3_layout.cuh"

template <class T, int C, int R, int KEYS, int STAGES, int HELD>
struct ScoreWarp : TileLayout<T, C, R, KEYS, STAGES, HELD> {
  using Layout = TileLayout<T, C, R, KEYS, STAGES, HELD>;
  using Layout::piece, Layout::keys, Layout::is_held, Layout::held_before;
  static constexpr int STEPS = Layout::STEPS, PITCH = Layout::PITCH, LINES = Layout::LINES;
  static constexpr int BLOCKS = Layout::BLOCKS;

  unsigned query[2][HELD][4];  // A fragments: [16 rows, the warp's own first][k-step]
  float largest[2], total[2];  // of the lane's two rows; total is the lane's own share
  float folded_largest[2], folded_total[2];
  const unsigned thread;  // 0..127, read for each piece: addresses that depend on it take no registers before

  __device__ __forceinline__ ScoreWarp(char* shared, const Piece<T>& piece)
      : Layout(shared, piece), thread(thread_here() - FIRST_SCORE_THREAD) {}

  __device__ __forceinline__ int lane() const { return thread % 32; }
  __device__ __forceinline__ int warp() const { return thread / 32; }
  __device__ __forceinline__ int pair() const { return warp() / 2; }
  __device__ __forceinline__ int half() const { return warp() % 2; }
  __device__ __forceinline__ int own_row() const { return 16 * warp() + lane() / 4; }  // and this + 8

  // Which keys of the tree any of the tile's nodes sees; the others are never read.
  __device__ __forceinline__ void find_seen() const {
    const int first_node = piece.first_row / piece.H;
    const int last_node = (min(piece.first_row + TILE_ROWS, piece.request.rows) - 1) / piece.H;
    for (int word = thread; word < piece.W; word += SCORE_THREADS) {
      unsigned any = 0;
      for (int node = first_node; node <= last_node; ++node) any |= piece.bits[(long long)node * piece.W + word];
      Layout::seen()[word] = any;
    }
  }

  // Where ldmatrix reads the A fragment of the warp's own 16 rows (0) or of its partner's (1).
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
        // past the last dimension the query is zero, so those of the first line will do
        const int line = 64 * LINES == C + R || Layout::k_step(half(), ahead) < (C + R) / 16 ? ahead / 2 : 0;
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block)
          load_matrices(b[ahead % RING][block], (ahead % 2 ? odd : even) + 2 * (16 * block * PITCH + 64 * line));
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

  // Adds the other half of the dimensions to the warp's own rows.
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

  // -inf for the keys that the lane's rows do not see
  __device__ __forceinline__ void hide(float (&s)[2 * BLOCKS][4], int tile) const {
    const KeyRange& range = piece.request.range;
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int row = min(piece.first_row + own_row() + 8 * upper, piece.request.rows - 1);
      const unsigned* of_node = piece.bits + (long long)(row / piece.H) * piece.W;
      unsigned seen = visible_word(of_node, piece.W, range.first + tile * KEYS - range.context_len);
      if (range.count - tile * KEYS < 32) seen &= (1u << (range.count - tile * KEYS)) - 1;
      seen >>= 2 * (lane() % 4);
#pragma unroll
      for (int n = 0; n < 2 * BLOCKS; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if ((seen >> (8 * n + i) & 1) == 0) s[n][2 * upper + i] = NEGATIVE_INFINITY;
    }
  }

  // Larger maxima where they grew too much, and what sums over smaller ones must shrink by.
  __device__ __forceinline__ void raise_largest(int buffer, const float (&found)[2]) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      float factor = 1.0f;
      if (found[upper] > largest[upper] + STALE_BY) {
        factor = exp2f(largest[upper] - softmax_shift(found[upper]));
        largest[upper] = found[upper];
      }
      total[upper] *= factor;
      if (lane() % 4 == 0) Layout::factors(buffer)[own_row() + 8 * upper] = factor;
    }
  }

  // Softmax of the warp's 16 rows over the tile: weights as A fragments, and what the sums so far must shrink by.
  __device__ __forceinline__ void soften(int tile, bool is_masked, float scale, float (&s)[2 * BLOCKS][4]) {
    if (scale <= 0.0f) {  // so that the largest product has the largest score
      const float sign = scale < 0.0f ? -1.0f : 0.0f;
#pragma unroll
      for (int n = 0; n < 2 * BLOCKS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] *= sign;
      scale = scale < 0.0f ? -scale : 1.0f;
    }
    if (is_masked) hide(s, tile);

    const int buffer = Layout::buffer(tile);
    float found[2];
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      found[upper] = NEGATIVE_INFINITY;
#pragma unroll
      for (int n = 0; n < 2 * BLOCKS; ++n)
        found[upper] = fmaxf(found[upper], fmaxf(s[n][2 * upper], s[n][2 * upper + 1]));
      found[upper] = fmaxf(found[upper], __shfl_xor_sync(FULL_WARP, found[upper], 1));
      found[upper] = fmaxf(found[upper], __shfl_xor_sync(FULL_WARP, found[upper], 2)) * scale;
    }
    const bool rescales =
        __any_sync(FULL_WARP, found[0] > largest[0] + STALE_BY || found[1] > largest[1] + STALE_BY);
    if (rescales) raise_largest(buffer, found);
    if (lane() == 0) Layout::rescales(buffer)[warp()] = rescales;

    // Where half an ulp of a score is more than 1, products are rounded before the shift as the maximum was: an exact
    // one could lie far above it.
    if (fmaxf(fabsf(largest[0]), fabsf(largest[1])) > LARGEST_EXACT) {
#pragma unroll
      for (int n = 0; n < 2 * BLOCKS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][i] *= scale;
      scale = 1.0f;
    }
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const float shift = softmax_shift(largest[upper]);
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < 2 * BLOCKS; ++n) {
        s[n][2 * upper] = fast_exp2(fmaf(s[n][2 * upper], scale, -shift));
        s[n][2 * upper + 1] = fast_exp2(fmaf(s[n][2 * upper + 1], scale, -shift));
        sum += s[n][2 * upper] + s[n][2 * upper + 1];
      }
      total[upper] += sum;
    }
    uint4* to = Layout::weights(buffer) + warp() * BLOCKS * 32 + lane();
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      const float(&low)[4] = s[2 * block];
      const float(&high)[4] = s[2 * block + 1];
      to[32 * block] = make_uint4(pack2<T>(low[0], low[1]), pack2<T>(low[2], low[3]), pack2<T>(high[0], high[1]),
                                  pack2<T>(high[2], high[3]));
    }
  }

  // Adds `total` into the sums folded so far, and tells the value warps what those shrink by.
  __device__ __forceinline__ void fold(int tile) {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const float shrink = exp2f(folded_largest[upper] - softmax_shift(largest[upper]));
      folded_total[upper] = fmaf(folded_total[upper], shrink, total[upper]);
      folded_largest[upper] = largest[upper];
      total[upper] = 0.0f;
      if (lane() % 4 == 0) Layout::shrinkage(Layout::buffer(tile))[own_row() + 8 * upper] = shrink;
    }
  }

  // All rows over the key tiles of the piece; the totals are complete afterwards.
  __device__ __forceinline__ void attend() {
    find_seen();
    named_arrive(SEEN, THREADS);
    named_barrier(QUERIES, THREADS);
    take_queries();
    named_arrive(HELD_READ, THREADS);
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      largest[upper] = folded_largest[upper] = NEGATIVE_INFINITY;
      total[upper] = folded_total[upper] = 0.0f;
    }
    // the context is seen by all; past it, and past the end, each pair counts
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
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      float& sum = folded_total[upper];
      sum += __shfl_xor_sync(FULL_WARP, sum, 1);
      sum += __shfl_xor_sync(FULL_WARP, sum, 2);
      if (lane() % 4 == 0) Layout::inverse_totals()[own_row() + 8 * upper] = sum > 0.0f ? 1.0f / sum : 0.0f;
    }
    named_arrive(END, THREADS);
  }

  // Log-sum-exp of the rows times `unit`, for as many as there are from `to` on.
  __device__ __forceinline__ void write_scores(float* to, int rows, float unit) const {
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int row = own_row() + 8 * upper;
      if (lane() % 4 == 0 && row < rows) to[row] = state_score(largest[upper], folded_total[upper]) * unit;
    }
  }
};
