// tree_attention/v4_layout.cuh: where a block of v4_wgmma.cu keeps its data, and how its warpgroups wait.
//
// Roles      Warpgroups 0 and 1 are value warpgroups: each owns 64 rows x 256 columns of the weighted values, and
//            thread 0 of each loads that half of every key tile, as its own products are the last to read it. Warpgroup
//            2 is the score warpgroup: it keeps the queries in registers, multiplies them with the keys and does the
//            softmax.
// Letters    a half is 256 of the C = 512 dimensions, a group 64 of them: 64 rows x 128 bytes, swizzled (hopper.cuh)
// Shared     stages     T[3][8][64][64]   key tiles: [tile % 3][group][key]; stage 2 first holds queries on their way
//                                         to registers, stages 0 and 1 last hold sums for the other block of a pair
//            rope       T[64][64]         the last R = 64 dimensions of the keys
//            query_rope T[64][64]         the same of the queries
//            weights    T[2][64][64]      [tile % 2][row][key]
//            factors    float[2][64]      [tile % 2][row]: by what the sums so far shrink; their signs are set where a
//                                         row does not see a key that may hold NaN or inf
//            share      Share             which part of the work the block has left
//            pieces     Piece[2]          [piece % 2]
//            query_step T[64][16]         dimensions 496..511 of the queries; at the end of a piece float2[64], what
//                                         the value warpgroups need of each row
// Barriers   mbarriers, in phases:
//            KEYS_LOADED                  [stage][half]: a half of a key tile is in its stage (thread 0 of a value
//                                         warpgroup, bytes)
//            ROPE_LOADED                  rope is loaded (bytes): the first tile by thread 0 of the score warpgroup,
//                                         later ones by thread 0 of value warpgroup 1
//            QUERIES                      the queries are in shared memory (256 value threads)
//            QUERIES_READ                 stage 2 may take keys (128 score threads)
//            ROPE_READ                    the first rope tile of a piece has been read (128 score threads)
//            WEIGHTS + tile % 2           weights and factors are written (128 score threads); rope has been read
//            WEIGHTS_READ + tile % 2      the value warpgroups are done with them (256 value threads)
//            TOTALS                       totals of a piece are written (128 score threads)
//            PIECE_KNOWN                  the next piece is written (the second warp of value warpgroup 0)
//            PEER_READY, PEER_SUMS, PEER_TOTALS   of pairs: v4_pair.cuh
// Source     own, after the roles of FlashMLA and FlashAttention 3 (arXiv 2407.08608)
#pragma once

#include "common/hopper.cuh"
#include "common/softmax_state.cuh"
#include "tree_attention/v3_schedule.cuh"

constexpr int C = 512;
constexpr int R = 64;
constexpr int KEYS = 64;  // of a key tile
constexpr int WARPGROUP = 128;
constexpr int VALUE_THREADS = 2 * WARPGROUP;
constexpr int THREADS = VALUE_THREADS + WARPGROUP;
constexpr int SCORE_REGISTERS = 184;
constexpr int VALUE_REGISTERS = 160;  // with 128 sums a product needs 154
constexpr int FOLD_TILES = 256;       // after 1,024 products of 16 keys sums are folded away
constexpr int CARRY = TILE_ROWS * C + 2 * VALUE_THREADS;  // floats of a block for them, and what they are relative to
constexpr float LARGEST_EXACT = 16777216.0f;              // 2^24: half an ulp of a score is at most 1

// in bytes, from the start of shared memory
constexpr int GROUP = KEYS * 128;
constexpr int HALF = 4 * GROUP;
constexpr int STAGE = 2 * HALF;
constexpr int ROPE = 3 * STAGE;
constexpr int QUERY_ROPE = ROPE + GROUP;
constexpr int WEIGHTS_AT = QUERY_ROPE + GROUP;
constexpr int FACTORS = WEIGHTS_AT + 2 * GROUP;
constexpr int SHARE = FACTORS + 2 * TILE_ROWS * 4;
constexpr int PIECES = SHARE + 128;
constexpr int QUERY_STEP = SHARE + 256;
constexpr int BARRIERS = QUERY_STEP + TILE_ROWS * 32;
constexpr int CURSORS = BARRIERS + 20 * 8;
constexpr int SHARED_BYTES = CURSORS + 2 * 16;

// addresses of mbarriers
constexpr int KEYS_LOADED = BARRIERS;
constexpr int ROPE_LOADED = KEYS_LOADED + 6 * 8;
constexpr int QUERIES = ROPE_LOADED + 8;
constexpr int QUERIES_READ = QUERIES + 8;
constexpr int ROPE_READ = QUERIES_READ + 8;
constexpr int WEIGHTS = ROPE_READ + 8;
constexpr int WEIGHTS_READ = WEIGHTS + 2 * 8;
constexpr int TOTALS = WEIGHTS_READ + 2 * 8;
constexpr int PEER_READY = TOTALS + 8;
constexpr int PEER_SUMS = PEER_READY + 8;
constexpr int PEER_TOTALS = PEER_SUMS + 8;
constexpr int PIECE_KNOWN = PEER_TOTALS + 8;
// ids of named barriers; 1 + w is for value warpgroup w
constexpr int OF_VALUES = 1;
constexpr int OF_SCORES = 3;

// How far a weight's exponent may exceed 0 before the maximum is taken anew: bfloat16 has the range of float32.
template <class T>
constexpr float STALE_BY = 40.0f;
template <>
constexpr float STALE_BY<__half> = 10.0f;

// Tensor maps of both pools.
struct alignas(64) KeyMaps {
  unsigned char ckv[128];
  unsigned char kpe[128];
};

// What blocks leave for the merge, and what they fold away.
struct Scratch {
  float* partial_out;    // [slots, 64, C]
  float* partial_score;  // [slots, 64]
  float* carries;        // [G, CARRY]
  int4* cuts;            // [B, row tiles]
};

// Consecutive key tiles of one row tile.
struct Piece {
  const int* entries;         // page table of the request
  const unsigned* bits;       // uint32[N, W] of the request
  int request, first_row;     // row: node * H + head
  int rows;                   // of the request that exist; 0: there is no further piece
  int first_tile, last_tile;  // tiles first_tile .. last_tile - 1; tile t holds positions 64 t .. 64 t + 63
  int first_key, end_key;     // keys outside are not part of the call
  int context_len;
  int slot;                   // where a part of the keys goes; -1: all keys are here
};

// What a block has left to do.
struct Share {
  Line line;
  long long index, stop;  // the next piece of whole length, or unit of the line, and the end
  long long first;        // where the block began
  long long put_off;      // where its piece ends, if it is computed last, as another block began it; else -1
  int tiles_per_slice;    // as in Tables, where the way of sharing out may have changed it
  int step;               // from one piece of whole length to the next; 0: units of the line
  int parts;              // of each row tile of a single request, where the host has chosen them; 0: by the line
  int is_paired;          // whether the two blocks of a cluster halve the keys of each row tile
};

// The page that a value warpgroup loads next, and the last one that it has loaded.
struct Cursor {
  int index, slot;      // entry of the page table, and first slot of the page
  int page, page_slot;
};
static_assert(sizeof(Share) <= PIECES - SHARE && PIECES + 2 * sizeof(Piece) <= QUERY_STEP, "they overlap");

// A number that all lanes of a warp have: asked so, the compiler keeps what depends on it in registers of the warp.
__device__ __forceinline__ int of_warp(int x) { return __reduce_max_sync(FULL_WARP, x); }

struct Shared {
  char* memory;
  SharedAddress base;

  __device__ __forceinline__ explicit Shared(char* memory) : memory(memory), base(shared_address(memory)) {}
  __device__ __forceinline__ Piece& piece(int number) const {
    return reinterpret_cast<Piece*>(memory + PIECES)[number & 1];
  }
  __device__ __forceinline__ Share& share() const { return *reinterpret_cast<Share*>(memory + SHARE); }
  __device__ __forceinline__ Cursor& cursor(int half) const {
    return reinterpret_cast<Cursor*>(memory + CURSORS)[half];
  }
  __device__ __forceinline__ float* factors(int buffer) const {
    return reinterpret_cast<float*>(memory + FACTORS) + TILE_ROWS * buffer;
  }
  __device__ __forceinline__ float2* totals() const { return reinterpret_cast<float2*>(memory + QUERY_STEP); }

  __device__ __forceinline__ void init_barriers() const {
    for (int i = 0; i < 6; ++i) barrier_init(base + KEYS_LOADED + 8 * i, 1);
    barrier_init(base + ROPE_LOADED, 1);
    barrier_init(base + QUERIES, VALUE_THREADS);
    barrier_init(base + QUERIES_READ, WARPGROUP);
    barrier_init(base + ROPE_READ, WARPGROUP);
    for (int i = 0; i < 2; ++i) {
      barrier_init(base + WEIGHTS + 8 * i, WARPGROUP);
      barrier_init(base + WEIGHTS_READ + 8 * i, VALUE_THREADS);
    }
    barrier_init(base + TOTALS, WARPGROUP);
    barrier_init(base + PIECE_KNOWN, 32);
    barrier_init(base + PEER_READY, 1);
    barrier_init(base + PEER_SUMS, 1);
    barrier_init(base + PEER_TOTALS, WARPGROUP);
    fence_barrier_init();
    fence_async_proxy();
  }
};
