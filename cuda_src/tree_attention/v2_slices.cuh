// tree_attention/v2_slices.cuh: sizes on which v2_split_kv.cu and v2_merge.cu must agree.
//
// Letters    rows query rows of a request (its nodes times H); a row block is ROWS of them
// Source     own
#pragma once

#include "common/warp.cuh"

constexpr int WARPS = 4;
constexpr int TILE = 32;                 // keys; one per lane
constexpr int LEAST_KEYS = 256;          // a smaller slice is not worth a block
constexpr int MOST_KEYS = 1024 * TILE;   // of a slice, so that no sum runs over more than 1,024 tiles
constexpr int BLOCKS_WANTED = 256;       // blocks of one request that fill a GPU

struct Slices {
  int row_blocks;
  int count;
  int keys;  // of each slice, a multiple of TILE
};

__device__ __forceinline__ Slices slices_of(int rows, int num_keys, int rows_per_block) {
  Slices slices;
  slices.row_blocks = (rows + rows_per_block - 1) / rows_per_block;
  const int wanted = (BLOCKS_WANTED + slices.row_blocks - 1) / max(slices.row_blocks, 1);
  const int worth = (num_keys + LEAST_KEYS - 1) / LEAST_KEYS;
  const int least = (num_keys + MOST_KEYS - 1) / MOST_KEYS;
  slices.count = max(max(min(wanted, worth), least), 1);
  const int keys = (num_keys + slices.count - 1) / slices.count;
  slices.keys = (keys + TILE - 1) / TILE * TILE;
  return slices;
}

template <class T, int C, int R>
struct Layout {
  static_assert(C % 16 == 0 && R % 16 == 0 && C > 0 && R >= 0, "head sizes are multiples of 16");
  static constexpr int ROWS_PER_WARP = sizeof(T) == 4 ? 2 : 4;
  static constexpr int ROWS = WARPS * ROWS_PER_WARP;
  static constexpr int PER_VECTOR = 16 / sizeof(T);
  static constexpr int PITCH = C + R + PER_VECTOR;  // an odd number of 16-byte units: lanes hit different banks
  static constexpr int VECTORS = (C + R) / PER_VECTOR;
  static constexpr int CHUNKS = (C + 127) / 128;  // of 128 dimensions, four per lane
};
