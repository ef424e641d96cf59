// tree_attention/v3_values.cuh: the value warps of v3_mma.cu: loads and products of weights and values.
//
// Letters    as v3_layout.cuh and v3_accumulators.cuh
// Schedule   per key tile: wait for WEIGHTS, add the products of the tile and announce a later tile whose copies have
//            arrived, load a tile into the stage of the one before. With three stages a tile is announced before the
//            wait. docs/v3_schedule.md has a picture
// Source     own
#pragma once

#include "tree_attention/v3_accumulators.cuh"

template <class T, int C, int R, int KEYS, int STAGES, int HELD>
struct ValueWarp : Accumulators<T, C, R, KEYS, STAGES, HELD> {
  using Layout = TileLayout<T, C, R, KEYS, STAGES, HELD>;
  using Loads = TileLoads<T, C, R, KEYS, STAGES, HELD>;
  using Sums = Accumulators<T, C, R, KEYS, STAGES, HELD>;
  using Layout::piece, Layout::keys, Loads::load_keys, Loads::value_thread;
  using Sums::value, Sums::rescale, Sums::fold, Sums::take_carry;
  using Sums::first_column, Sums::first_fragment, Sums::row_of;
  static constexpr int PITCH = Layout::PITCH, BLOCKS = Layout::BLOCKS;
  static constexpr int COLS = Sums::COLS, FRAGMENTS = Sums::FRAGMENTS;

  __device__ __forceinline__ ValueWarp(char* shared, const Piece<T>& piece) : Sums(shared, piece) {}

  // Tells the score warps that the copies of a tile by this thread have arrived.
  __device__ __forceinline__ void announce(int tile) const {
    if (tile < piece.plan.last_tile) named_arrive(KEYS_LOADED + tile % 2, THREADS);
  }

  // Adds the products of the tile one by one, for each row only with the keys that it sees: tensor cores would multiply
  // the weight 0 of a hidden key by its NaN or inf.
  __device__ __forceinline__ void weigh_one_by_one(int tile, int stage) {
    const int buffer = Layout::buffer(tile);
#pragma unroll
    for (int m = 0; m < FRAGMENTS; ++m) {
      if (Layout::notes(buffer)[first_fragment(value_thread()) + m] & HAS_FACTORS) rescale(m, Layout::factors(buffer));
#pragma unroll
      for (int upper = 0; upper < 2; ++upper)
#pragma unroll 1
        for (int key = 0; key < KEYS; ++key) {
          const unsigned thread = value_thread(), lane = thread % 32;
          if ((Layout::keys_seen(row_of(thread, m, upper), tile) >> key & 1) == 0) continue;
          // the A fragment of v3_layout.cuh: 16 rows, 16 keys, lane, then the two halves of the keys, of the rows
          const int fragment = ((first_fragment(thread) + m) * BLOCKS + key / 16) * 32 + lane / 4 * 4 + key % 8 / 2;
          const T* const weights = reinterpret_cast<const T*>(Layout::weights(buffer));
          const float weight = to_float(weights[8 * fragment + 4 * (key % 16 / 8) + 2 * upper + key % 2]);
          const unsigned first_unit = first_column(thread) / 8;
          const T* const row = keys(stage) + key * PITCH + first_unit / 8 * 64 + 2 * (lane % 4);
#pragma unroll
          for (int n = 0; n < COLS / 8; ++n) {
            const T* const pair = row + ((first_unit + n) ^ key) % 8 * 8;  // XOR as in v3_layout.cuh
#pragma unroll
            for (int i = 2 * upper; i < 2 * upper + 2; ++i)
              value[m][n][i] = fmaf(weight, to_float(pair[i % 2]), value[m][n][i]);
          }
        }
    }
  }

  // Adds the products of the tile, after rescaling the rows whose maximum rose; the first loads are issued before that.
  // With four stages or more, announces the tile after next when its copies have had time to arrive.
  __device__ __forceinline__ void weigh(int tile, int stage) {
    const int buffer = Layout::buffer(tile);
    const unsigned thread = value_thread(), lane = thread % 32;
    const uint4* weights = Layout::weights(buffer) + first_fragment(thread) * BLOCKS * 32 + lane;
    const unsigned unit = (first_column(thread) / 8 + lane / 16) ^ (lane % 8);  // XOR as in v3_layout.cuh
    const SharedAddress row = shared_address(keys(stage) + lane % 16 * PITCH + unit * 8);
    constexpr int STEPS_OF_BLOCK = COLS / 16;
    unsigned a[FRAGMENTS][4], b[2][4];  // keys one step ahead of their products
    const auto load_weights = [&](int block) {
#pragma unroll
      for (int m = 0; m < FRAGMENTS; ++m) {
        const uint4 both = weights[(m * BLOCKS + block) * 32];
        a[m][0] = both.x;
        a[m][1] = both.y;
        a[m][2] = both.z;
        a[m][3] = both.w;
      }
    };
    load_matrices_transposed(b[0], row);
    load_weights(0);
    const uint4 of_score_warps = *reinterpret_cast<const uint4*>(Layout::notes(buffer));
    const unsigned notes = of_score_warps.x | of_score_warps.y | of_score_warps.z | of_score_warps.w;
    if (notes != 0) {
      if (notes & HIDES_NON_FINITE) {
        weigh_one_by_one(tile, stage);
        if constexpr (Layout::IS_DEEP) {
          copy_async_wait<STAGES - 4>();
          announce(tile + 2);
        }
        return;
      }
#pragma unroll
      for (int m = 0; m < FRAGMENTS; ++m)
        if (Layout::notes(buffer)[first_fragment(value_thread()) + m] & HAS_FACTORS)
          rescale(m, Layout::factors(buffer));
    }
#pragma unroll
    for (int step = 0; step < BLOCKS * STEPS_OF_BLOCK; ++step) {
      const int block = step / STEPS_OF_BLOCK, columns = step % STEPS_OF_BLOCK;
      const int next_block = (step + 1) / STEPS_OF_BLOCK, next_columns = (step + 1) % STEPS_OF_BLOCK;
      if (columns == 0 && step > 0) load_weights(block);
      if constexpr (Layout::IS_DEEP) {
        if (step == BLOCKS * STEPS_OF_BLOCK / 4) {
          copy_async_wait<STAGES - 4>();
          announce(tile + 2);
        }
      }
      if (next_block < BLOCKS)
        load_matrices_transposed(b[(step + 1) % 2],
                                 flip_address(row, 32 * next_columns) + 2 * 16 * next_block * PITCH);
#pragma unroll
      for (int m = 0; m < FRAGMENTS; ++m) {
        multiply_add<T>(value[m][2 * columns], a[m], b[step % 2][0], b[step % 2][1]);
        multiply_add<T>(value[m][2 * columns + 1], a[m], b[step % 2][2], b[step % 2][3]);
      }
    }
  }

  // EARLIER groups of copies were issued after the queries.
  template <int EARLIER>
  __device__ __forceinline__ static void hand_over_queries() {
    copy_async_wait<EARLIER>();
    named_arrive(QUERIES, THREADS);
    named_barrier(HELD_READ, THREADS);
  }

  // Computes all rows over the key tiles of the piece, divided by their totals.
  __device__ __forceinline__ void attend(const T* nope, long long nope_node, long long nope_head, const T* pe,
                                         long long pe_node, long long pe_head) {
    constexpr int EARLY = Layout::EARLY;
    const int first = piece.plan.first_tile;
    Loads::load_queries(nope, nope_node, nope_head, pe, pe_node, pe_head);
    Loads::fetch_page(first, value_thread());
    named_barrier(SEEN, THREADS);
#pragma unroll 1
    for (int ahead = 0; ahead < STAGES - 1; ++ahead) {
      if (ahead == EARLY) hand_over_queries<EARLY>();
      load_keys(first + ahead, ahead);
    }
    if (EARLY == STAGES - 1) hand_over_queries<EARLY>();
    copy_async_wait<STAGES - 2>();
    announce(first);
    if (Layout::IS_DEEP) {
      copy_async_wait<STAGES - 3>();
      announce(first + 1);
    }
#pragma unroll
    for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
      for (int n = 0; n < COLS / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) value[m][n][i] = 0.0f;

    int stage = 0;
#pragma unroll 1
    for (int tile = first; tile < piece.plan.last_tile; ++tile) {
      if (!Layout::IS_DEEP) {
        copy_async_wait<STAGES - 3>();
        announce(tile + 1);
      }
      named_barrier(WEIGHTS + tile % 2, THREADS);
      weigh(tile, stage);
      load_keys(tile + STAGES - 1, Layout::stage_before(stage));
      stage = Layout::next_stage(stage);
      if (Layout::is_long() && Layout::folds(tile, piece.plan.first_tile, piece.plan.last_tile)) fold(tile);
    }
    if (Layout::is_long()) take_carry();
    named_barrier(END, THREADS);
#pragma unroll
    for (int m = 0; m < FRAGMENTS; ++m) rescale(m, Layout::inverse_totals());
  }
};
