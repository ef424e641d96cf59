// tree_accept/commit_kv.cu: the accepted rows move right behind the context.
//
// Computes   row at context_len + accepted[j] goes to context_len + j for j = 0 .. num_accepted, through the page table;
//            advance_context: new_context_lens = context_lens + num_accepted + 1
// Letters    B requests, N nodes, P num_pages, C and R widths of ckv and kpe
// Inputs     accepted int32[B, N], num_accepted int32[B] (-1: nothing moves), page_table int32[B, max_pages],
//            context_lens int32[B]  contiguous
// In place   ckv T[P, page_size, C], kpe T[P, page_size, R]  last axis contiguous, other strides in elements
// Scratch    staging T[B, N, C + R], only in the modes STAGE (rows to staging) and UNSTAGE (staging to rows), for
//            caches that may be one memory under several page tables: all of them are staged before any is written
// Outputs    new_context_lens int32[B], which may be context_lens itself
// Work       grid (B), block 128: a thread owns columns, 16 bytes each where the strides allow, and moves 8 rows at a
//            time, reading all of them before it writes. advance_context: one thread a request.
// Numerics   copies bits
// Requires   checked shapes and strides; accepted ascends, so what a batch of rows writes lies in front of everything
//            read later. Values are not trusted: the count is clamped to N, a row without a page on either side stays.
// Speed      one read and one write latency for 8 rows: expected 3 us a layer on an H200
// Reference  ddtree_cupy/tree_accept/reference.py
// Source     own
#include "common/dtype.cuh"
#include "common/paging.cuh"

constexpr int MOVE = 0;
constexpr int STAGE = 1;
constexpr int UNSTAGE = 2;
constexpr int TILE = 32;  // rows whose places are looked up together
constexpr int ROWS = 8;   // rows of a thread in flight
constexpr long long STAYS = -0x7fffffffffffffffll - 1;  // no offset: strides may be negative

// Element offsets of the rows of a tile in one pool, STAYS where a row does not move.
struct Places {
  long long from[TILE];
  long long to[TILE];
};

__device__ __forceinline__ int num_committed(int num_accepted, int N) {
  return clamp_length(min(num_accepted, N - 1) + 1, N);
}

// Whether both are positions with a page.
__device__ __forceinline__ bool is_moved(const PageTable& table, long long from, long long to) {
  return max(from, to) < 1ll << 31 && table.is_mapped(from) && table.is_mapped(to);
}

// Move the columns this thread owns of one tile; offsets in elements, `width` in units of `pack` elements.
template <class Unit>
__device__ __forceinline__ void move_columns(const Places& places, int count, Unit* pool, Unit* staging, int width,
                                             int pack, long long staging_stride, int mode) {
  for (int column = threadIdx.x; column < width; column += blockDim.x) {
    for (int first = 0; first < count; first += ROWS) {
      Unit units[ROWS];
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        const int j = first + i;
        if (j >= count || places.from[j] == STAYS) continue;
        units[i] = mode == UNSTAGE ? staging[j * staging_stride / pack + column] : pool[places.from[j] / pack + column];
      }
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        const int j = first + i;
        if (j >= count || places.from[j] == STAYS) continue;
        (mode == STAGE ? staging[j * staging_stride / pack + column] : pool[places.to[j] / pack + column]) = units[i];
      }
    }
  }
}

// The same for one pool, in units of 16 bytes where base, strides and width are multiples of them.
template <class T>
__device__ __forceinline__ void move_rows(const Places& places, int count, T* pool, T* staging, long long page_stride,
                                          long long slot_stride, int width, long long staging_stride, int mode) {
  constexpr int PACK = 16 / sizeof(T);
  const long long misfit = (page_stride | slot_stride | staging_stride | width) % PACK;
  if (misfit == 0 && ((size_t)pool | (size_t)staging) % 16 == 0)
    move_columns(places, count, reinterpret_cast<uint4*>(pool), reinterpret_cast<uint4*>(staging), width / PACK, PACK,
                 staging_stride, mode);
  else
    move_columns(places, count, pool, staging, width, 1, staging_stride, mode);
}

template <class T>
__global__ void __launch_bounds__(128)
    commit_kv(const int* __restrict__ accepted, const int* __restrict__ num_accepted,
              const int* __restrict__ page_table, const int* __restrict__ context_lens, T* ckv, T* kpe, T* staging,
              int mode, int N, int C, int R, int num_pages, int page_size, int max_pages, long long ckv_page_stride,
              long long ckv_slot_stride, long long kpe_page_stride, long long kpe_slot_stride) {
  const long long request = blockIdx.x;  // 0..B-1
  const PageTable table = {page_table + request * max_pages, max_pages, num_pages, page_size};
  const long long context_len = context_lens[request];
  const int count = num_committed(num_accepted[request], N);
  const long long staging_stride = staging == nullptr ? 0 : (long long)C + R;
  __shared__ Places ckv_places, kpe_places;

  for (int first = 0; first < count; first += TILE) {
    const int rows = min(count - first, TILE);
    if ((int)threadIdx.x < rows) {
      const int j = first + (int)threadIdx.x;
      const long long from = context_len + accepted[request * N + j], to = context_len + j;
      const bool moves = is_moved(table, from, to);
      ckv_places.from[threadIdx.x] = moves ? table.row((int)from, ckv_page_stride, ckv_slot_stride) : STAYS;
      kpe_places.from[threadIdx.x] = moves ? table.row((int)from, kpe_page_stride, kpe_slot_stride) : STAYS;
      ckv_places.to[threadIdx.x] = moves ? table.row((int)to, ckv_page_stride, ckv_slot_stride) : STAYS;
      kpe_places.to[threadIdx.x] = moves ? table.row((int)to, kpe_page_stride, kpe_slot_stride) : STAYS;
    }
    __syncthreads();

    T* staged = staging == nullptr ? nullptr : staging + (request * N + first) * staging_stride;
    T* staged_kpe = staging == nullptr ? nullptr : staged + C;
    move_rows(ckv_places, rows, ckv, staged, ckv_page_stride, ckv_slot_stride, C, staging_stride, mode);
    move_rows(kpe_places, rows, kpe, staged_kpe, kpe_page_stride, kpe_slot_stride, R, staging_stride, mode);
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(128)
    advance_context(const int* context_lens, const int* __restrict__ num_accepted, int* new_context_lens, int B,
                    int N) {
  const int request = blockIdx.x * blockDim.x + threadIdx.x;  // 0..B-1
  if (request < B) new_context_lens[request] = context_lens[request] + num_committed(num_accepted[request], N);
}
