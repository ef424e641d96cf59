// tree_attention/v3_layout.cuh: where a block of v3_mma.cu keeps its data, and how its warps wait for each other.
//
// Roles      warps 0..7 are value warps: they load, and each owns 64 rows x C / 8 columns of the weighted values (when
//            C is 64, 32 rows x 16 columns). Warps 8..11 are score warps: warp 8 + 2 * pair + half multiplies rows
//            32 * pair .. + 31 by `half` of the C + R dimensions, then finishes rows 32 * pair + 16 * half .. + 15.
// Letters    here a unit is 16 bytes (8 elements) and a line 128 bytes (64 elements) of a row, other than in
//            v3_schedule.cuh. A half of the dimensions is the lower or upper 64 bytes of every line: STEPS k-steps of
//            16 dimensions, HELD of them in registers
// Shared     keys      T[STAGES][KEYS][LINES][64]      key tiles. Unit u of row r sits at u ^ (r % 8) of its line, so
//                                                      that ldmatrix hits every bank once and copies fill whole
//                                                      lines. The last bytes hold `held` before the first tiles, the
//                                                      first bytes `results` after the last one:
//            held      T[64][2][HELD][16]              queries on their way to registers; a row has an odd number of
//                                                      units, also to avoid bank conflicts
//            results   float[8][16][COLS + 8]          results of a value warp on their way to global memory
//            queries   T[64][2][STEPS - HELD][16]      queries that stay here, in rows like those of `held`
//            exchange  float4[4][KEYS / 8][32]         scores over one half, for the other warp of the pair
//            weights   uint4[BUFFERS][4][KEYS/16][32]  A fragments: [tile % BUFFERS][16 rows][16 keys][lane]
//            factors   float[BUFFERS][64]              [tile % BUFFERS][row]: factors by which the values shrink
//            shrinkage float[BUFFERS][64]              the same for sums that were folded away
//            inverse_totals float[64]                  1 / sum of weights
//            notes     unsigned[BUFFERS][4]            [tile % BUFFERS][score warp]: HAS_FACTORS, HIDES_NON_FINITE
//            seen      unsigned[W]                     keys of the tree that any row of the tile sees
// Barriers   SEEN, QUERIES, HELD_READ, KEYS_LOADED, WEIGHTS and END are for all 384 threads: one role arrives, the
//            other waits. PAIR + pair is for two score warps. docs/v3_schedule.md has the table of who tells whom
//            what, and a picture of both roles within a tile.
// Source     own
#pragma once

#include "common/ptx.cuh"
#include "common/softmax_state.cuh"
#include "tree_attention/v3_schedule.cuh"

constexpr float STALE_BY = 8.0f;              // how far a score, base 2, may exceed the maximum in use
constexpr float LARGEST_EXACT = 16777216.0f;  // 2^24: half an ulp of a score is at most 1, so weights stay below 512
constexpr int FOLD_KEYS = 16384;              // after 1,024 products of 16 keys sums are folded away
constexpr int VALUE_THREADS = 256;
constexpr int SCORE_THREADS = 128;
constexpr int THREADS = VALUE_THREADS + SCORE_THREADS;
constexpr int FIRST_SCORE_THREAD = VALUE_THREADS;

constexpr int least(int a, int b) { return a < b ? a : b; }
constexpr int most(int a, int b) { return a > b ? a : b; }

// what a score warp notes about a tile, one bit each
constexpr unsigned HAS_FACTORS = 1;       // the sums so far must be multiplied by `factors`
constexpr unsigned HIDES_NON_FINITE = 2;  // a row does not see a key that may hold NaN or inf

// ids of named barriers
constexpr int SEEN = 1, QUERIES = 2, HELD_READ = 3, END = 4, WEIGHTS = 5, KEYS_LOADED = 7, PAIR = 9;

// What the loads of every tile need, in a few wide reads.
template <class T>
struct LoadPlan {
  const T* ckv;
  const T* kpe;
  const int* entries;          // page table
  int plain_keys;              // keys before this one are context, in rows that the plain path can copy
  int page_shift;              // log2 of the page size, or -1
  int first, last_page;        // first position; num_pages - 1
  int page_stride, slot_stride;
  int first_tile, last_tile;   // key tiles first_tile .. last_tile - 1
};

// Strides of the cache, in elements.
struct CacheStrides {
  long long ckv_page, ckv_slot, kpe_page, kpe_slot;

  // Whether both rows of a slot lie at one offset, which fits 32 bits in a page.
  __device__ __forceinline__ bool is_one_buffer(int page_size) const {
    const long long page = ckv_page < 0 ? -ckv_page : ckv_page, slot = ckv_slot < 0 ? -ckv_slot : ckv_slot;
    return ckv_page == kpe_page && ckv_slot == kpe_slot && max(page, slot) * page_size < 1ll << 31;
  }
};

// What one piece of work needs occasionally. It lives in shared memory, because registers hold values and queries.
template <class T>
struct Piece {
  LoadPlan<T> plan;
  Request request;
  CacheStrides strides;
  const unsigned* bits;  // uint32[N, W] of the request
  int H, W, first_row;
  bool aligned;       // whether rows can be copied 16 bytes at a time
  bool is_plain;      // also the cache is one buffer in pages of a power of two, which the plain path can copy
  float scale;        // of the scores, base 2
  float* carry;       // float32[64, C] of the block
  long long result;   // row of out and lse, or of the partial ones
  int4* cut;          // where to tell the merge kernel how the row tile is cut; null unless this is its first piece
  int row_tile, num_units;
  bool is_whole;      // whether it spans all keys of its rows
  // `index` is the next piece of whole length, or the next unit of the line, of this block; it ends at `stop`
  int grid;           // number of blocks, including idle ones
  Line line;
  Place place;
  long long index, stop;
  // a piece to compute last, put_off .. put_off_stop - 1 of the line, since another block began its end; -1 for none
  long long put_off, put_off_stop;
  bool is_put_off;  // whether that is the piece just found
};

// Four adjacent elements of a result, which may start anywhere.
template <class T>
__device__ __forceinline__ void store4(T* to, const float4& v) {
  if (reinterpret_cast<unsigned long long>(to) % 8 == 0) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack2<T>(v.x, v.y), pack2<T>(v.z, v.w));
  } else {
    to[0] = from_float<T>(v.x);
    to[1] = from_float<T>(v.y);
    to[2] = from_float<T>(v.z);
    to[3] = from_float<T>(v.w);
  }
}

template <class T, int C, int R, int KEYS, int STAGES, int HELD>
struct TileLayout {
  static_assert(C == 64 || C == 128 || C == 256 || C == 512, "a value warp has a power of two of columns");
  static_assert(R % 16 == 0, "a k-step has 16 dimensions");
  static_assert(KEYS == 16 || KEYS == 32, "the keys of a tile that a row sees are bits of one word");
  static_assert(STAGES >= 3, "one tile is weighed, one scored, one loaded");
  static_assert(HELD > 0 && HELD < (C + R + 63) / 64 * 2, "some k-steps in registers, some in shared memory");
  static constexpr int LINES = (C + R + 63) / 64, STEPS = 2 * LINES;
  static constexpr int BLOCKS = KEYS / 16;
  static constexpr int PITCH = 64 * LINES, HELD_PITCH = 32 * HELD + 8, QUERY_PITCH = 32 * (STEPS - HELD) + 8;
  static constexpr int TILE_BYTES = KEYS * PITCH * 2, HELD_BYTES = TILE_ROWS * HELD_PITCH * 2;
  static constexpr int RESULT_BYTES = 8 * 16 * (64 + 8) * 4;  // of a warp at most 64 columns
  static constexpr int KEY_BYTES = most(STAGES * TILE_BYTES, most(HELD_BYTES, RESULT_BYTES));
  // first tiles that have room beside the held queries
  static constexpr int EARLY = least((KEY_BYTES - HELD_BYTES) / TILE_BYTES, STAGES - 1);
  static constexpr int QUERY_BYTES = TILE_ROWS * QUERY_PITCH * 2;
  static constexpr bool IS_DEEP = STAGES >= 4;
  static constexpr int BUFFERS = IS_DEEP ? 3 : 2;  // 3, as `shrinkage` is read after the tile after next is announced
  static constexpr int EXCHANGE_BYTES = 4 * KEYS / 8 * 32 * 16;
  static constexpr int WEIGHT_BYTES = 4 * BLOCKS * 32 * 16;  // of a buffer
  static constexpr int FOLD_TILES = FOLD_KEYS / KEYS;

  const Piece<T>& piece;
  char* shared;

  __device__ __forceinline__ TileLayout(char* shared, const Piece<T>& piece) : piece(piece), shared(shared) {}
  __device__ __forceinline__ T* keys(int stage) const { return reinterpret_cast<T*>(shared + stage * TILE_BYTES); }
  __device__ __forceinline__ static int next_stage(int stage) { return stage + 1 < STAGES ? stage + 1 : 0; }
  __device__ __forceinline__ static int stage_before(int stage) { return stage > 0 ? stage - 1 : STAGES - 1; }
  __device__ __forceinline__ T* held() const { return reinterpret_cast<T*>(shared + KEY_BYTES - HELD_BYTES); }
  __device__ __forceinline__ T* queries() const { return reinterpret_cast<T*>(shared + KEY_BYTES); }
  __device__ __forceinline__ char* after_queries() const { return shared + KEY_BYTES + QUERY_BYTES; }
  __device__ __forceinline__ float4* exchange() const { return reinterpret_cast<float4*>(after_queries()); }
  __device__ __forceinline__ static int buffer(int tile) { return (unsigned)tile % BUFFERS; }
  __device__ __forceinline__ uint4* weights(int buffer) const {
    return reinterpret_cast<uint4*>(after_queries() + EXCHANGE_BYTES + buffer * WEIGHT_BYTES);
  }
  __device__ __forceinline__ float* row_numbers() const {
    return reinterpret_cast<float*>(after_queries() + EXCHANGE_BYTES + BUFFERS * WEIGHT_BYTES);
  }
  __device__ __forceinline__ float* factors(int buffer) const { return row_numbers() + buffer * TILE_ROWS; }
  __device__ __forceinline__ float* shrinkage(int buffer) const {
    return row_numbers() + (BUFFERS + buffer) * TILE_ROWS;
  }
  __device__ __forceinline__ float* inverse_totals() const { return row_numbers() + 2 * BUFFERS * TILE_ROWS; }
  __device__ __forceinline__ unsigned* notes(int buffer) const {
    return reinterpret_cast<unsigned*>(row_numbers() + (2 * BUFFERS + 1) * TILE_ROWS) + buffer * 4;
  }
  __device__ __forceinline__ unsigned* seen() const { return notes(BUFFERS); }

  // Which keys of a tile a row of the row tile sees, one bit per key.
  __device__ __forceinline__ unsigned keys_seen(int row_of_tile, int tile) const {
    const KeyRange& range = piece.request.range;
    const int row = min(piece.first_row + row_of_tile, piece.request.rows - 1);
    const unsigned* of_node = piece.bits + (long long)(row / piece.H) * piece.W;
    const unsigned word = visible_word(of_node, piece.W, range.first + tile * KEYS - range.context_len);
    const int left = range.count - tile * KEYS;
    return left < 32 ? word & ((1u << left) - 1) : word;
  }

  // The index, among all k-steps, of a k-step of a half.
  __device__ __forceinline__ static constexpr int k_step(int half, int step) {
    return step / 2 * 4 + 2 * half + step % 2;
  }
  // K-steps in registers and in shared memory alternate, so that the load on shared memory is even.
  __device__ __forceinline__ static constexpr int held_before(int step) { return step * HELD / STEPS; }
  __device__ __forceinline__ static constexpr bool is_held(int step) {
    return held_before(step + 1) > held_before(step);
  }

  // Whether sums are folded away after this tile: when they hold enough keys, and at the end of the piece.
  __device__ __forceinline__ static bool folds(int tile, int first_tile, int last_tile) {
    return (tile + 1 - first_tile) % FOLD_TILES == 0 || tile + 1 == last_tile;
  }
  // Whether that happens before the end of the piece; if not, values never leave their registers.
  __device__ __forceinline__ bool is_long() const {
    return piece.plan.last_tile - piece.plan.first_tile > FOLD_TILES;
  }
};
