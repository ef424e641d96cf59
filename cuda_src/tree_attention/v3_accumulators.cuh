// tree_attention/v3_accumulators.cuh: how a value warp of v3_mma.cu rescales, folds and writes its weighted values.
//
// Letters    as v3_layout.cuh; a lane's accumulators hold rows r = lane / 4 and r + 8 of each 16, columns 2p, 2p + 1
// Source     own
#pragma once

#include "tree_attention/v3_loads.cuh"

template <class T, int C, int R, int KEYS, int STAGES, int HELD>
struct Accumulators : TileLoads<T, C, R, KEYS, STAGES, HELD> {
  using Layout = TileLayout<T, C, R, KEYS, STAGES, HELD>;
  using Loads = TileLoads<T, C, R, KEYS, STAGES, HELD>;
  using Layout::piece, Loads::value_thread;
  static constexpr int ACROSS = C >= 128 ? 8 : C / 16;  // warps that share the columns
  static constexpr int COLS = C / ACROSS, FRAGMENTS = ACROSS / 2;  // of 16 rows

  float value[FRAGMENTS][COLS / 8][4];  // C fragments: [16 rows][8 columns]

  __device__ __forceinline__ Accumulators(char* shared, const Piece<T>& piece) : Loads(shared, piece) {}

  __device__ __forceinline__ static int first_column(unsigned thread) { return thread / 32 % ACROSS * COLS; }
  // a fragment has 16 rows
  __device__ __forceinline__ static int first_fragment(unsigned thread) { return thread / 32 / ACROSS * FRAGMENTS; }
  __device__ __forceinline__ static int row_of(unsigned thread, int m, int upper) {
    return 16 * (first_fragment(thread) + m) + thread % 32 / 4 + 8 * upper;
  }

  // Multiplies the accumulators of 16 rows by one number per row.
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

  // Adds `value` to the carry of the block (or starts it), so that no accumulator takes more than FOLD_KEYS keys. Each
  // thread has entries of its own.
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

  // Passes all results to `write`, four columns of a row at a time. They go through shared memory, so that a warp
  // writes whole lines of a row.
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
