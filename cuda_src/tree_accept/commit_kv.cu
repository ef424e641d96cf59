// tree_accept/commit_kv.cu: the accepted rows move right behind the context.
//
// Computes   row at context_len + accepted[j] goes to context_len + j for j = 0 .. num_accepted, through the page
//            table; advance_context: new_context_lens = context_lens + num_accepted + 1
// Letters    B requests, N nodes, P num_pages, C and R widths of ckv and kpe
// Inputs     accepted int32[B, N], num_accepted int32[B] (-1: nothing moves); contiguous
//            cache  int32 page_table[B, max_pages], context_lens[B] (common/inputs.cuh)
// In place   cache  T ckv[P, page_size, C], kpe[P, page_size, R]
// Scratch    staging T[B, N, C + R], only in the modes STAGE (rows to staging) and UNSTAGE (staging to rows). They
//            serve caches that may share memory through different views or page tables: all of them are staged before
//            any is written.
// Outputs    new_context_lens int32[B], which may be context_lens itself
// Work       grid (B, 2), block 128: y = 0 moves ckv, y = 1 kpe. A thread owns columns, 16 bytes each where the strides
//            allow, and moves 8 rows at a time, reading all of them before it writes. advance_context: one thread per
//            request.
// Numerics   copies bits
// Requires   checked shapes and strides; accepted ascends, so what a group of 8 rows writes lies in front of everything
//            read later. Values are not trusted: the count is clamped to N, and a row stays where its source or its
//            target has no page.
// Speed      predicted 3 us per layer on an H200, from one read and one write latency for 8 rows; timed with accept.cu
// Reference  ddtree_cupy/tree_accept/reference.py
// Source     own
#include "common/dtype.cuh"
#include "common/inputs.cuh"

constexpr int MOVE = 0;
constexpr int STAGE = 1;
constexpr int UNSTAGE = 2;
constexpr int TILE = 32;  // rows whose places are looked up together
constexpr int ROWS = 8;   // rows of a thread in flight
constexpr long long STAYS = -0x7fffffffffffffffll - 1;  // no offset has this value; offsets may be negative

// One pool and the staging rows of one request; strides and width in elements.
template <class T>
struct Pool {
  T* rows;
  T* staging;
  long long page_stride;
  long long slot_stride;
  long long staging_stride;
  int width;
};

// Offsets of the rows of a tile in the source and the target; STAYS where a row does not move.
struct Places {
  long long from[TILE];
  long long to[TILE];
};

__device__ __forceinline__ int num_committed(int num_accepted, int N) {
  return clamp_length(min(num_accepted, N - 1) + 1, N);
}

// Whether both positions have a page.
__device__ __forceinline__ bool is_moved(const PageTable& table, long long from, long long to) {
  return max(from, to) < 1ll << 31 && table.is_mapped(from) && table.is_mapped(to);
}

// Move the columns of a tile that this thread owns.
template <class Unit>
__device__ __forceinline__ void move_columns(const Places& places, int count, const Unit* source, Unit* target,
                                             int width) {
  for (int column = threadIdx.x; column < width; column += blockDim.x) {
    for (int first = 0; first < count; first += ROWS) {
      Unit units[ROWS];
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        if (first + i < count && places.from[first + i] != STAYS) units[i] = source[places.from[first + i] + column];
      }
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        if (first + i < count && places.from[first + i] != STAYS) target[places.to[first + i] + column] = units[i];
      }
    }
  }
}

// Move the rows of one pool, 16 bytes at a time where base addresses, strides and width are multiples of 16 bytes.
template <class T>
__device__ __forceinline__ void move_rows(const Pool<T>& pool, const PageTable& table, const int* accepted, int count,
                                          long long context_len, int mode, Places& places) {
  constexpr int PACK = 16 / sizeof(T);
  const long long misfit = (pool.page_stride | pool.slot_stride | pool.staging_stride | pool.width) % PACK;
  const bool is_packed = misfit == 0 && ((size_t)pool.rows | (size_t)pool.staging) % 16 == 0;
  const T* source = mode == UNSTAGE ? pool.staging : pool.rows;
  T* target = mode == STAGE ? pool.staging : pool.rows;

  for (int first = 0; first < count; first += TILE) {
    const int rows = min(count - first, TILE);
    if ((int)threadIdx.x < rows) {
      const int j = first + (int)threadIdx.x;
      const long long from = context_len + accepted[j], to = context_len + j;
      const bool moves = is_moved(table, from, to);
      const long long staged = j * pool.staging_stride;
      const long long source_row =
          mode == UNSTAGE || !moves ? staged : table.row((int)from, pool.page_stride, pool.slot_stride);
      const long long target_row =
          mode == STAGE || !moves ? staged : table.row((int)to, pool.page_stride, pool.slot_stride);
      places.from[threadIdx.x] = moves ? source_row / (is_packed ? PACK : 1) : STAYS;
      places.to[threadIdx.x] = target_row / (is_packed ? PACK : 1);
    }
    __syncthreads();
    if (is_packed)
      move_columns(places, rows, reinterpret_cast<const uint4*>(source), reinterpret_cast<uint4*>(target),
                   pool.width / PACK);
    else
      move_columns(places, rows, source, target, pool.width);
    __syncthreads();
  }
}

template <class T>
__global__ void __launch_bounds__(128)
    commit_kv(const int* __restrict__ accepted, const int* __restrict__ num_accepted, Cache<T> cache, T* staging,
              int mode, int N, int C, int R) {
  const long long request = blockIdx.x;  // 0..B-1
  const PageTable table = cache.table(request);
  const int count = num_committed(num_accepted[request], N);
  const long long staging_stride = staging == nullptr ? 0 : (long long)C + R;
  T* staged = staging == nullptr ? nullptr : staging + request * N * staging_stride;
  __shared__ Places places;

  const Pool<T> pool =
      blockIdx.y == 0
          ? Pool<T>{cache.ckv, staged, cache.ckv_page_stride, cache.ckv_slot_stride, staging_stride, C}
          : Pool<T>{cache.kpe,      staged == nullptr ? nullptr : staged + C, cache.kpe_page_stride,
                    cache.kpe_slot_stride, staging_stride, R};
  move_rows(pool, table, accepted + request * N, count, cache.context_lens[request], mode, places);
}

extern "C" __global__ void __launch_bounds__(128)
    advance_context(const int* context_lens, const int* __restrict__ num_accepted, int* new_context_lens, int B,
                    int N) {
  const int request = blockIdx.x * blockDim.x + threadIdx.x;  // 0..B-1
  if (request >= B) return;
  const unsigned length = context_lens[request];  // unsigned: a wrong length may overflow
  new_context_lens[request] = (int)(length + (unsigned)num_committed(num_accepted[request], N));
}
