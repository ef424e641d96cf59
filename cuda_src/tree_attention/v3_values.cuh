// tree_attention/v3_values.cuh: the value warps of v3_mma.cu: loads, weighted values, results.
//
// Letters    as v3_layout.cuh; a lane's accumulators hold rows r = lane / 4 and r + 8 of each 16, columns 2p, 2p + 1
// Schedule   per key tile: own copies of the next tile are there, arrive at KEYS_LOADED; wait for WEIGHTS; load a
//            tile into the stage of the tile before; add the tile's products. Half of the warps load after their
//            products rather than before, so that not all compute addresses at once.
// Source     own
#pragma once

#include "tree_attention/v3_loads.cuh"

template <class T, int C, int R, int KEYS, int STAGES>
struct ValueWarp : TileLoads<T, C, R, KEYS, STAGES> {
  using Layout = TileLayout<T, C, R, KEYS, STAGES>;
  using Loads = TileLoads<T, C, R, KEYS, STAGES>;
  using Layout::piece, Layout::lane, Layout::keys, Loads::load_keys, Loads::fetch_page;
  static constexpr int PITCH = Layout::PITCH, BLOCKS = Layout::BLOCKS;
  static constexpr int ACROSS = C >= 128 ? 8 : C / 16;  // warps that share the columns
  static constexpr int COLS = C / ACROSS, M = ACROSS / 2;

  float value[M][COLS / 8][4];  // C fragments: [16 rows][8 columns]

  __device__ __forceinline__ ValueWarp(char* shared, const Piece<T>& piece) : Loads(shared, piece) {}

  __device__ __forceinline__ static int first_column() { return threadIdx.x / 32 % ACROSS * COLS; }
  __device__ __forceinline__ static int first_fragment() { return threadIdx.x / 32 / ACROSS * M; }  // of 16 rows
  __device__ __forceinline__ static int row_of(int m, int upper) {
    return 16 * (first_fragment() + m) + lane() / 4 + 8 * upper;
  }

  // Multiplies each row's accumulators by its number.
  __device__ __forceinline__ void rescale(const float* of_rows) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const float factor = of_rows[row_of(m, upper)];
#pragma unroll
        for (int n = 0; n < COLS / 8; ++n) {
          value[m][n][2 * upper] *= factor;
          value[m][n][2 * upper + 1] *= factor;
        }
      }
  }

  // Rescales if any row asks for it, then adds the tile's products.
  __device__ __forceinline__ void weigh(int tile) {
    const uint4 rescales = *reinterpret_cast<const uint4*>(Layout::rescales(tile));
    if ((rescales.x | rescales.y | rescales.z | rescales.w) != 0) rescale(Layout::factors(tile));
    const uint4* weights = Layout::weights(tile) + first_fragment() * BLOCKS * 32 + lane();
    const SharedAddress row =
        shared_address(keys(tile) + lane() % 16 * PITCH + first_column() + lane() / 16 * 8);
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      unsigned a[M][4];
#pragma unroll
      for (int m = 0; m < M; ++m) {
        const uint4 both = weights[(m * BLOCKS + block) * 32];
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
        for (int m = 0; m < M; ++m) {
          multiply_add<T>(value[m][2 * columns], a[m], b[0], b[1]);
          multiply_add<T>(value[m][2 * columns + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // Adds `value` into the block's carry (or starts it), so that no accumulator takes more than FOLD_KEYS keys; with
  // is_end the other way round, the carry into `value`. Each thread has its own entries.
  __device__ __forceinline__ void fold(bool starts, bool is_end) {
    float* mine = piece.carry + threadIdx.x;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const float shrink = Layout::shrinkage()[row_of(m, upper)];
#pragma unroll
        for (int n = 0; n < COLS / 8; ++n)
#pragma unroll
          for (int i = 2 * upper; i < 2 * upper + 2; ++i) {
            float* at = mine + ((m * (COLS / 8) + n) * 4 + i) * VALUE_THREADS;
            const float sum = starts ? value[m][n][i] : fmaf(*at, shrink, value[m][n][i]);
            if (!is_end) *at = sum;
            value[m][n][i] = is_end ? sum : 0.0f;
          }
      }
  }

  // All rows over the key tiles of the piece, divided by their totals.
  __device__ __forceinline__ void attend(const T* nope, long long nope_node, long long nope_head, const T* pe,
                                         long long pe_node, long long pe_head) {
    constexpr int EARLY = Layout::EARLY < STAGES - 1 ? Layout::EARLY : STAGES - 1;
    const int first = piece.first_tile;
    Loads::load_queries(nope, nope_node, nope_head, pe, pe_node, pe_head);
    fetch_page(first);
    named_barrier(SEEN, THREADS);
#pragma unroll
    for (int ahead = 0; ahead < EARLY; ++ahead) load_keys(first + ahead);
    copy_async_wait<EARLY>();
    named_arrive(QUERIES, THREADS);
    named_barrier(HELD_READ, THREADS);
#pragma unroll
    for (int ahead = EARLY; ahead < STAGES - 1; ++ahead) load_keys(first + ahead);
    copy_async_wait<STAGES - 2>();
    named_arrive(KEYS_LOADED + first % 2, THREADS);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < COLS / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) value[m][n][i] = 0.0f;

    const bool loads_first = threadIdx.x < VALUE_THREADS / 2;
    for (int tile = first; tile < piece.last_tile; ++tile) {
      copy_async_wait<STAGES - 3>();
      if (tile + 1 < piece.last_tile) named_arrive(KEYS_LOADED + (tile + 1) % 2, THREADS);
      named_barrier(WEIGHTS + tile % 2, THREADS);
      if (loads_first) load_keys(tile + STAGES - 1);
      weigh(tile);
      if (!loads_first) load_keys(tile + STAGES - 1);
      if (Layout::folds(tile)) fold(tile + 1 - first == Layout::FOLD_TILES, false);
    }
    named_barrier(END, THREADS);
    if (Layout::has_folded()) fold(false, true);
    rescale(Layout::inverse_totals());
  }

  __device__ __forceinline__ void write_result(T* out) const {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        if (piece.first_row + row_of(m, upper) >= piece.request.rows) continue;
        T* to = out + (long long)row_of(m, upper) * C + first_column() + 2 * (lane() % 4);
#pragma unroll
        for (int n = 0; n < COLS / 8; ++n)
          *reinterpret_cast<unsigned*>(to + 8 * n) = pack2<T>(value[m][n][2 * upper], value[m][n][2 * upper + 1]);
      }
  }

  __device__ __forceinline__ void write_partial(float* out) const {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        float* to = out + row_of(m, upper) * C + first_column() + 2 * (lane() % 4);
#pragma unroll
        for (int n = 0; n < COLS / 8; ++n)
          *reinterpret_cast<float2*>(to + 8 * n) = make_float2(value[m][n][2 * upper], value[m][n][2 * upper + 1]);
      }
  }
};
