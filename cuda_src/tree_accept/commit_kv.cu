// tree_accept/commit_kv.cu: the accepted rows of all layers move right behind the context, in one launch.
//
// Computes   row at context_len + accepted[j] goes to context_len + j for j = 0 .. num_accepted, through the page
//            table of each layer; new_context_lens = context_lens + num_accepted + 1
// Letters    B requests, N nodes; a piece is up to COLUMNS columns of one pool (ckv or kpe) of one layer, a column 16,
//            4 or 2 bytes wide, as addresses and strides allow; D pieces share memory with no other one, S pieces may
// Inputs     accepted int32[B, N], num_accepted int32[B] (-1: nothing moves); contiguous
//            pieces  uint32[D + S, 16], each a Piece; the same at every call over the same caches
//            context_lens int32[B] of all layers; commit_kv_apart takes the addresses of several such arrays
// In place   the pools of the pieces, of any dtype, width and strides
//            counters uint32[3 + B], 0 before and after a launch
// Scratch    staging, null if S = 0: the rows of the last S pieces, unit[B, N, width] of each. All of them are staged
//            before any is written back, so that memory of several views or page tables moves once.
// Outputs    new_context_lens int32[B], which may be context_lens itself; after commit_kv_apart by advance_context
// Work       grid B * (D + 2 * S), block THREADS: a block moves the rows of one piece and request, a thread one column,
//            ROWS rows at a time. Where pieces are staged, blocks draw tickets: the first B * S stage, the others write
//            back, and wait only for blocks that run already, so that a GPU of any size will do. The block that reads
//            the length of a request last advances it. advance_context: grid (B / THREADS, lengths), block THREADS.
// Numerics   copies bits
// Requires   checked shapes and strides; accepted ascends, so what a group of ROWS rows writes lies in front of
//            everything read later. Values are not trusted: the count is clamped to N, and a row stays where its source
//            or its target has no page.
// Speed      H200, 2026-12-01, in a graph, 61 layers of 16 rows: 3.2 us for one request, where one latency each for
//            piece and length, page, and row is what counts; 50 us for 64 requests (bytes 34)
// Reference  ddtree_cupy/tree_accept/reference.py
// Source     own; tickets as in single-pass scans (Merrill and Garland, NVR-2016-002)
#include "common/paging.cuh"
#include "common/ptx.cuh"

constexpr int COLUMNS = 64;            // most of a piece, and rows that are looked up together
constexpr int THREADS = COLUMNS + 32;  // one warp more, so that its fence does not delay those that move rows
constexpr int BLOCKS_PER_SM = 4;       // 64 KiB of loads in flight
constexpr int ROWS = 16;
constexpr int MOST_LENGTHS = 240;  // different arrays of lengths, so that parameters stay within 4 KiB

// Places in `counters`: tickets drawn, pieces staged, pieces written back, and from LENGTHS_READ on blocks that have
// read the length of a request.
constexpr int TICKETS = 0;
constexpr int STAGED = 1;
constexpr int UNSTAGED = 2;
constexpr int LENGTHS_READ = 3;

// Columns of one pool; strides and `staging`, the place in the scratch, in bytes.
struct alignas(16) Piece {
  unsigned char* rows;
  const int* page_table;  // [B, max_pages]
  long long page_stride, slot_stride, staging;
  int num_pages, page_size, max_pages;
  int unit, width;  // bytes of a column, number of columns
  int length;       // which array of lengths, for commit_kv_apart
};

struct Lengths {
  unsigned long long old_lens[MOST_LENGTHS];  // addresses
};

struct Advances {
  unsigned long long old_lens[MOST_LENGTHS], new_lens[MOST_LENGTHS];
};

enum Mode { MOVE, STAGE, UNSTAGE };

struct Job {
  unsigned piece, request;
  Mode mode;
};

// The rows of a tile: offsets in the source and the target, in bytes, and a bit for each row that moves.
struct Places {
  long long from[COLUMNS], to[COLUMNS];
  unsigned moving[COLUMNS / 32];
};

__device__ __forceinline__ int num_committed(int num_accepted, int N) {
  return clamp_length(min(num_accepted, N - 1) + 1, N);
}

// The job of this block: by its number, or where pieces are staged by the order in which blocks begin.
__device__ __forceinline__ Job take_job(unsigned* counters, unsigned B, unsigned num_direct, unsigned num_staged) {
  if (blockIdx.x < B * num_direct) return {blockIdx.x / B, blockIdx.x % B, MOVE};
  __shared__ unsigned drawn;
  const unsigned stages = B * num_staged;
  if (threadIdx.x == 0) drawn = atomicInc(&counters[TICKETS], 2 * stages - 1);
  __syncthreads();
  const unsigned number = drawn % stages;
  return {num_direct + number / B, number % B, drawn < stages ? STAGE : UNSTAGE};
}

// Note where row j, that of `node`, goes if j < count; each of the first COLUMNS threads looks up one row.
__device__ __forceinline__ void look_up(const Piece& piece, const Job& job, long long context_len, int node, int j,
                                        int count, int N, Places& places) {
  const PageTable table = {piece.page_table + (long long)job.request * piece.max_pages, piece.max_pages,
                           piece.num_pages, piece.page_size};
  const long long last = (1ll << 31) - 1;
  const int from = context_len + node > last ? -1 : (int)max(context_len + node, -1ll);
  const int to = context_len + j > last ? -1 : (int)max(context_len + j, -1ll);
  const bool is_empty = table.capacity() == 0;
  const int from_page = is_empty ? -1 : table.mapped_page(from), to_page = is_empty ? -1 : table.mapped_page(to);
  const bool moves = j < count && from_page >= 0 && to_page >= 0;
  const unsigned moving = __ballot_sync(~0u, moves);
  if (threadIdx.x % 32 == 0) places.moving[threadIdx.x / 32] = moving;
  if (!moves) return;

  const long long staged = piece.staging + ((long long)job.request * N + j) * piece.width * piece.unit;
  const long long from_row = from_page * piece.page_stride + from % piece.page_size * piece.slot_stride;
  const long long to_row = to_page * piece.page_stride + to % piece.page_size * piece.slot_stride;
  places.from[threadIdx.x] = job.mode == UNSTAGE ? staged : from_row;
  places.to[threadIdx.x] = job.mode == STAGE ? staged : to_row;
}

// Move one column of a tile, ROWS rows at a time, all of which are read before they are written. Pieces that lead to
// the same rows write the same to them, perhaps at the same time.
template <class Unit>
__device__ __forceinline__ void move_column(const Places& places, int count, const unsigned char* source,
                                            unsigned char* target) {
  static_assert(32 % ROWS == 0, "rows in flight together lie in one word of `moving`");
  source += threadIdx.x * sizeof(Unit);
  target += threadIdx.x * sizeof(Unit);
  for (int first = 0; first < count; first += ROWS) {
    const unsigned moving = places.moving[first / 32] >> first % 32;
    Unit units[ROWS] = {};  // so that no value outlives its turn of the loop
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const long long from = places.from[first + i];
      if (moving >> i & 1) units[i] = *reinterpret_cast<const Unit*>(source + from);
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const long long to = places.to[first + i];
      if (moving >> i & 1) store_relaxed(reinterpret_cast<Unit*>(target + to), units[i]);
    }
  }
}

// Do a job; return what thread COLUMNS found in `lengths_read`, which it has counted up.
__device__ __forceinline__ unsigned do_job(const Job& job, const Piece& piece, const int* accepted, int num_accepted,
                                           int context_len, unsigned char* staging, unsigned* counters,
                                           unsigned stages, unsigned* lengths_read, unsigned readers, int N) {
  __shared__ Places places;
  int row = threadIdx.x;
  int node = row < min(N, COLUMNS) ? accepted[row] : 0;  // in flight together with what the caller has read
  const int count = num_committed(num_accepted, N);
  const unsigned char* source = job.mode == UNSTAGE ? staging : piece.rows;
  unsigned char* target = job.mode == STAGE ? staging : piece.rows;
  unsigned read_before = 0;
  int first = 0;
  do {
    const int rows = min(count - first, COLUMNS);
    if (threadIdx.x < COLUMNS) look_up(piece, job, context_len, node, row, count, N, places);
    __syncthreads();

    // all threads have read the length; what the counter held is not needed before the rows have moved
    if (first == 0 && lengths_read != nullptr && threadIdx.x == COLUMNS) {
      __threadfence();
      read_before = atomicInc(lengths_read, readers - 1);
    }

    // all pieces are staged before the first one is written back
    if (first == 0 && job.mode == UNSTAGE) {
      while (!__syncthreads_or(threadIdx.x == 0 && atomicAdd(&counters[STAGED], 0u) == stages)) {
      }
      __threadfence();
    }

    if ((int)threadIdx.x < piece.width) {
      if (piece.unit == 16)
        move_column<uint4>(places, rows, source, target);
      else if (piece.unit == 4)
        move_column<unsigned>(places, rows, source, target);
      else
        move_column<unsigned short>(places, rows, source, target);
    }
    __syncthreads();
    first += COLUMNS;
    row += COLUMNS;
    if (row < count) node = accepted[row];
  } while (first < count);

  if (job.mode == STAGE && threadIdx.x == 0) {
    __threadfence();
    atomicAdd(&counters[STAGED], 1u);
  }
  if (job.mode == UNSTAGE && threadIdx.x == 0 && atomicInc(&counters[UNSTAGED], stages - 1) == stages - 1)
    atomicExch(&counters[STAGED], 0u);
  return read_before;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    commit_kv(const int* __restrict__ accepted, const int* __restrict__ num_accepted,
              const uint4* __restrict__ pieces, const int* context_lens, int* new_context_lens, unsigned char* staging,
              unsigned* counters, int B, int N, int num_direct, int num_staged) {
  const Job job = take_job(counters, B, num_direct, num_staged);
  const Piece piece = reinterpret_cast<const Piece*>(pieces)[job.piece];
  const int context_len = context_lens[job.request], last_accepted = num_accepted[job.request];
  const unsigned readers = num_direct + 2 * num_staged;

  const unsigned read_before =
      do_job(job, piece, accepted + (long long)job.request * N, last_accepted, context_len, staging, counters,
             B * num_staged, counters + LENGTHS_READ + job.request, readers, N);
  if (threadIdx.x == COLUMNS && read_before == readers - 1)  // a wrong length may overflow
    new_context_lens[job.request] = (int)((unsigned)context_len + (unsigned)num_committed(last_accepted, N));
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    commit_kv_apart(const int* __restrict__ accepted, const int* __restrict__ num_accepted,
                    const uint4* __restrict__ pieces, Lengths lengths, unsigned char* staging, unsigned* counters,
                    int B, int N, int num_direct, int num_staged) {
  const Job job = take_job(counters, B, num_direct, num_staged);
  const Piece piece = reinterpret_cast<const Piece*>(pieces)[job.piece];
  const int* context_lens = reinterpret_cast<const int*>(lengths.old_lens[piece.length]);
  do_job(job, piece, accepted + (long long)job.request * N, num_accepted[job.request], context_lens[job.request],
         staging, counters, B * num_staged, nullptr, 1, N);
}

// Arrays of one address follow one another in `lengths`; one thread advances them all, since one may be in place.
extern "C" __global__ void __launch_bounds__(THREADS)
    advance_context(const int* __restrict__ num_accepted, Advances lengths, int num_lengths, int B, int N) {
  const int request = blockIdx.x * blockDim.x + threadIdx.x;  // 0..B-1
  const int number = blockIdx.y;                              // 0..num_lengths-1
  if (request >= B) return;
  const unsigned long long address = lengths.old_lens[number];
  if (number > 0 && lengths.old_lens[number - 1] == address) return;
  const unsigned length = reinterpret_cast<const int*>(address)[request];  // unsigned: a wrong length may overflow
  const unsigned count = num_committed(num_accepted[request], N);
  for (int n = number; n < num_lengths && lengths.old_lens[n] == address; ++n)
    reinterpret_cast<int*>(lengths.new_lens[n])[request] = (int)(length + count);
}
