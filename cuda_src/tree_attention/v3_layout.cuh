// tree_attention/v3_layout.cuh: what a block of v3_mma.cu keeps where.
//
// Letters    group 0..1 of four warps and 32 rows; quarter 0..3 of a warp in its group; r = lane / 4, p = lane % 4
//            STEPS k-steps of 16 dimensions a warp multiplies for the scores; COLS = C / 4 value columns it owns
// Shared     keys      T[STAGES][KEYS][PITCH]          key tiles; an odd number of 16-byte units a row, so that
//                                                      ldmatrix hits every bank once. Queries pass through it first.
//            exchange  float4[2][4][KEYS/16][4][32]    partial scores: [group][owner][16 keys][from quarter][lane]
//            weights   uint4[2][2][2][KEYS/16][32]     A fragments: [buffer][group][16 rows][16 keys][lane]
//            factors   float[2][2][32]                 [buffer][group][row]: what the values shrink by
//            row_values float[2][32]                   one number a row, on its way to the whole group
//            seen      unsigned[W]                     keys of the tree that any row of the tile sees
// Source     own
#pragma once

#include "common/ptx.cuh"
#include "common/softmax_state.cuh"
#include "tree_attention/v3_schedule.cuh"

constexpr float STALE_BY = 8.0f;   // log2 of how far a weight may exceed 1
constexpr int FOLD_KEYS = 16384;   // 1,024 products of 16 keys

// What one piece of work needs now and then. It lives in shared memory, because registers hold values and queries.
template <class T>
struct Piece {
  // first what the plain path of load_keys needs, in few wide loads
  const T* ckv;
  const T* kpe;
  const int* entries;      // page table
  int plain_keys;          // keys before this one are context, in rows that the plain path can copy
  int page_shift;          // log2 of the page size, or -1
  int first, last_page;    // first position; num_pages - 1
  int page_stride, slot_stride;
  int first_tile, last_tile;  // key tiles first_tile .. last_tile - 1
  Request request;
  const unsigned* bits;  // uint32[N, W] of the request
  long long ckv_page, ckv_slot, kpe_page, kpe_slot;  // strides in elements
  int H, W, first_row, step;                         // step: units from one piece to the next, when they are whole
  bool aligned;
  float scale;                                       // of the scores, base 2
  float* carry;                                      // float32[64, C + 8] of the block
  long long unit, stop, first_unit;                  // of the block's walk over units
};

template <class T, int C, int R, int KEYS, int STAGES>
struct TileLayout {
  static_assert(C % 64 == 0 && R % 16 == 0 && KEYS % 16 == 0, "sizes the layout is made for");
  static_assert(STAGES >= 3 && STAGES * KEYS >= TILE_ROWS, "the queries of a row tile pass through the stages");
  static constexpr int STEPS = ((C + R) / 16 + 3) / 4;
  static constexpr int COLS = C / 4;
  static constexpr int PITCH = C + R + 8;
  static constexpr int BLOCKS = KEYS / 16;
  static constexpr int LOADERS = 256 / KEYS;  // threads that load one key
  static constexpr int KEY_BYTES = STAGES * KEYS * PITCH * 2;
  static constexpr int EXCHANGE_BYTES = 2 * 4 * BLOCKS * 4 * 32 * 16;
  static constexpr int WEIGHT_BYTES = 2 * 2 * 2 * BLOCKS * 32 * 16;

  const Piece<T>& piece;
  char* shared;

  __device__ __forceinline__ TileLayout(char* shared, const Piece<T>& piece) : piece(piece), shared(shared) {}

  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ static int quarter() { return threadIdx.x / 32 % 4; }
  __device__ __forceinline__ static int group() { return threadIdx.x / 128; }
  __device__ __forceinline__ T* keys(int tile) const {
    return reinterpret_cast<T*>(shared) + tile % STAGES * KEYS * PITCH;
  }
  __device__ __forceinline__ float4* exchange() const { return reinterpret_cast<float4*>(shared + KEY_BYTES); }
  __device__ __forceinline__ uint4* weights() const {
    return reinterpret_cast<uint4*>(shared + KEY_BYTES + EXCHANGE_BYTES);
  }
  __device__ __forceinline__ float* factors() const {
    return reinterpret_cast<float*>(shared + KEY_BYTES + EXCHANGE_BYTES + WEIGHT_BYTES);
  }
  __device__ __forceinline__ float* row_values() const { return factors() + 2 * 2 * 32; }
  __device__ __forceinline__ unsigned* seen() const { return reinterpret_cast<unsigned*>(row_values() + 2 * 32); }

  // Which keys of the tree any of the tile's nodes sees; the others are never read.
  __device__ __forceinline__ void find_seen() const {
    const int first_node = piece.first_row / piece.H;
    const int last_node = (min(piece.first_row + TILE_ROWS, piece.request.rows) - 1) / piece.H;
    for (int word = threadIdx.x; word < piece.W; word += 256) {
      unsigned any = 0;
      for (int node = first_node; node <= last_node; ++node) any |= piece.bits[(long long)node * piece.W + word];
      seen()[word] = any;
    }
  }
};
