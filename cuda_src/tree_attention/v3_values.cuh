// tree_attention/v3_values.cuh: the value warps of v3_mma.cu: loads, weighted values, results.
//
// Letters    as v3_layout.cuh; a lane's accumulators hold rows r = lane / 4 and r + 8 of each 16, columns 2p, 2p + 1
// Schedule   per key tile: wait for WEIGHTS, add the tile's products, load a tile into the stage of the one before. A
//            later tile whose copies are there is announced meanwhile, or before it all with three stages.
// Source     own
#pragma once

#include "tree_attention/v3_loads.cuh"

template <class T, int C, int R, int KEYS, int STAGES, int HELD>
struct ValueWarp : TileLoads<T, C, R, KEYS, STAGES, HELD> {
  using Layout = TileLayout<T, C, R, KEYS, STAGES, HELD>;
  using Loads = TileLoads<T, C, R, KEYS, STAGES, HELD>;
  using Layout::piece, Layout::keys, Loads::load_keys, Loads::value_thread;
  static constexpr int PITCH = Layout::PITCH, BLOCKS = Layout::BLOCKS;
  static constexpr int ACROSS = C >= 128 ? 8 : C / 16;  // warps that share the columns
  static constexpr int COLS = C / ACROSS, FRAGMENTS = ACROSS / 2;  // of 16 rows

  float value[FRAGMENTS][COLS / 8][4];  // C fragments: [16 rows][8 columns]

  __device__ __forceinline__ ValueWarp(char* shared, const Piece<T>& piece) : Loads(shared, piece) {}

  __device__ __forceinline__ static int first_column(unsigned thread) { return thread / 32 % ACROSS * COLS; }
  // a fragment has 16 rows
  __device__ __forceinline__ static int first_fragment(unsigned thread) { return thread / 32 / ACROSS * FRAGMENTS; }
  __device__ __forceinline__ static int row_of(unsigned thread, int m, int upper) {
    return 16 * (first_fragment(thread) + m) + thread % 32 / 4 + 8 * upper;
  }

  // Multiplies the accumulators of 16 rows by their numbers.
  __device__ __forceinline__ void rescale(int m, const float* of_rows) {
    const unsigned thread = value_thread();
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const float factor = of_rows[row_of(thread, m, upper)];
#pragma unroll
      for (int n = 0; n < COLS / 8; ++n) {
        value[m][n][2 * upper] *= factor;
        value[m][n][2 * upper + 1] *= factor;
      }
    }
  }

  // Tells the score warps that this thread's copies of a tile are there.
  __device__ __forceinline__ void announce(int tile) const {
    if (tile < piece.plan.last_tile) named_arrive(KEYS_LOADED + tile % 2, THREADS);
  }

  // Adds the tile's products one by one, of each row with the keys it sees: on tensor cores the weight 0 of a hidden key
  // would meet its NaN or inf.
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

  // Adds the tile's products, after rescaling rows that ask for it; the first loads are under way meanwhile. With four
  // stages and more, announces the tile after next as soon as its copies have had time to arrive.
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

  // Adds `value` into the block's carry (or starts it), so that no accumulator takes more than FOLD_KEYS keys. Each
  // thread has its own entries.
  __device__ __forceinline__ void fold(int tile) {
    const unsigned thread = value_thread();
    const bool starts = tile + 1 - piece.plan.first_tile == Layout::FOLD_TILES;
    float* mine = piece.carry + thread;
#pragma unroll
    for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const float shrink = Layout::shrinkage(Layout::buffer(tile))[row_of(thread, m, upper)];
#pragma unroll
        for (int n = 0; n < COLS / 8; ++n)
#pragma unroll
          for (int i = 2 * upper; i < 2 * upper + 2; ++i) {
            float* at = mine + ((m * (COLS / 8) + n) * 4 + i) * VALUE_THREADS;
            *at = starts ? value[m][n][i] : fmaf(*at, shrink, value[m][n][i]);
            value[m][n][i] = 0.0f;
          }
      }
  }

  __device__ __forceinline__ void take_carry() {
    const float* mine = piece.carry + value_thread();
#pragma unroll
    for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
      for (int n = 0; n < COLS / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) value[m][n][i] = mine[((m * (COLS / 8) + n) * 4 + i) * VALUE_THREADS];
  }

  // After the queries EARLIER groups of copies were made.
  template <int EARLIER>
  __device__ __forceinline__ static void hand_over_queries() {
    copy_async_wait<EARLIER>();
    named_arrive(QUERIES, THREADS);
    named_barrier(HELD_READ, THREADS);
  }

  // All rows over the key tiles of the piece, divided by their totals.
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

  // Hands `write` all results, four columns of a row at a time, through shared memory: whole lines for each row.
  template <class Write>
  __device__ __forceinline__ void write_rows(Write write) const {
    constexpr int PITCH_OUT = COLS + 8, LANES = COLS / 4;  // of a row
    const unsigned thread = value_thread(), lane = thread % 32;
    float* results = reinterpret_cast<float*>(this->shared) + thread / 32 * 16 * PITCH_OUT;
#pragma unroll
    for (int m = 0; m < FRAGMENTS; ++m) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper)
#pragma unroll
        for (int n = 0; n < COLS / 8; ++n)
          *reinterpret_cast<float2*>(results + (lane / 4 + 8 * upper) * PITCH_OUT + 8 * n + 2 * (lane % 4)) =
              make_float2(value[m][n][2 * upper], value[m][n][2 * upper + 1]);
      __syncwarp();
#pragma unroll 2
      for (int row = lane / LANES; row < 16; row += 32 / LANES)
        write(16 * (first_fragment(thread) + m) + row, first_column(thread) + 4 * (lane % LANES),
              *reinterpret_cast<const float4*>(results + row * PITCH_OUT + 4 * (lane % LANES)));
      __syncwarp();
    }
  }

  __device__ __forceinline__ void write_result(T* out) const {
    const int rows = piece.request.rows - piece.first_row;
    write_rows([=](int row, int column, const float4& v) {
      if (row < rows) store4(out + (long long)row * C + column, v);
    });
  }

  __device__ __forceinline__ void write_partial(float* out) const {
    const int rows = piece.request.rows - piece.first_row;
    write_rows([=](int row, int column, const float4& v) {
      if (row < rows) *reinterpret_cast<float4*>(out + row * C + column) = v;
    });
  }
};
