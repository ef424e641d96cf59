// common/hopper_twins.cuh: hopper.cuh on the CPU emulator, instruction by instruction.
//
// Products   are only noted, and happen at the wait, or by chance at once; so one whose operands change too early
//            shows. The warps of a warpgroup do theirs apart: what a missing barrier between warps does is found by
//            other means.
// Fences     between proxies order nothing here, as there is one kind of memory access: only the machine tells whether
//            one is missing.
// Requires   the emulator's runtime (emu_runtime.h); included by hopper.cuh alone
// Source     own
#pragma once

inline void barrier_init(SharedAddress barrier, int arrivals, EMU_FROM) {
  emu_mbarrier_init(barrier, arrivals, EMU_CALLER);
}
inline void fence_barrier_init() {}
inline void barrier_arrive(SharedAddress barrier, EMU_FROM) { emu_mbarrier_arrive(barrier, 0, EMU_CALLER); }
inline void barrier_arrive_expecting(SharedAddress barrier, int bytes, EMU_FROM) {
  emu_mbarrier_arrive(barrier, bytes, EMU_CALLER);
}
inline void barrier_wait(SharedAddress barrier, unsigned parity, EMU_FROM) {
  emu_mbarrier_wait(barrier, parity, EMU_CALLER);
}
inline void barrier_wait_cluster(SharedAddress barrier, unsigned parity, EMU_FROM) {
  emu_mbarrier_wait(barrier, parity, EMU_CALLER);
}
inline void fence_async_proxy() {}

// ---- tensor copies; ddtree_cupy/kernels/tensor_map.py writes such a map for the emulator

struct HostMap {
  const char* base;
  long long strides[3];  // in bytes, of the axes after the first
  int sizes[4], box[4];
  int rank, itemsize;
};
static_assert(sizeof(HostMap) <= sizeof(TensorMap), "it takes the place of one");

struct BoxCopy {
  HostMap map;
  char* to;
  int at[4];
};

// the place that the 128-byte swizzle gives to an address
inline char* swizzled(char* at) { return (char*)((size_t)at ^ ((size_t)at >> 7 & 7) << 4); }
inline const char* swizzled(const char* at) { return swizzled(const_cast<char*>(at)); }

inline void perform_box_copy(void* state) {
  const BoxCopy& copy = *static_cast<BoxCopy*>(state);
  const HostMap& map = copy.map;
  const int units = map.box[0] * map.itemsize / 16;  // of a row
  char* to = copy.to;
  for (int w = 0; w < map.box[3]; ++w)
    for (int z = 0; z < map.box[2]; ++z)
      for (int y = 0; y < map.box[1]; ++y, to += 128) {
        const int place[4] = {copy.at[0], copy.at[1] + y, copy.at[2] + z, copy.at[3] + w};
        bool is_inside = true;
        const char* from = map.base + (long long)place[0] * map.itemsize;
        for (int axis = 1; axis < 4; ++axis) {
          is_inside &= place[axis] >= 0 && place[axis] < map.sizes[axis];
          from += place[axis] * map.strides[axis - 1];
        }
        for (int u = 0; u < units; ++u) {
          char* const unit = swizzled(to + 16 * u);
          if (is_inside)
            memcpy(unit, from + 16 * u, 16);
          else
            memset(unit, 0, 16);
        }
      }
}

inline void prefetch_map(const TensorMap*) {}
inline void copy_box(SharedAddress to, const TensorMap* map, int rank, const int (&at)[4], SharedAddress barrier,
                     emu_where where) {
  BoxCopy copy;
  memcpy(&copy.map, map->bytes, sizeof copy.map);
  copy.to = to;
  memcpy(copy.at, at, sizeof at);
  if (copy.map.rank != rank) emu_fail(where, "a tensor copy of %d axes from a map of %d", rank, copy.map.rank);
  if ((size_t)to % 128) emu_fail(where, "a tensor copy goes to a multiple of 128 bytes");
  if (!emu::is_shared(to)) emu_fail(where, "a tensor copy goes to memory that is not shared");
  const int bytes = copy.map.box[0] * copy.map.box[1] * copy.map.box[2] * copy.map.box[3] * copy.map.itemsize;
  emu_defer(barrier, bytes, perform_box_copy, &copy, sizeof copy, where);
}
inline void copy_box_3d(SharedAddress to, const TensorMap* map, int x, int y, int z, SharedAddress barrier, EMU_FROM) {
  copy_box(to, map, 3, {x, y, z, 0}, barrier, EMU_CALLER);
}
inline void copy_box_4d(SharedAddress to, const TensorMap* map, int x, int y, int z, int w, SharedAddress barrier,
                        EMU_FROM) {
  copy_box(to, map, 4, {x, y, z, w}, barrier, EMU_CALLER);
}

// ---- products of a warpgroup

inline void products_fence() {}
inline void run_products(unsigned allowed) {
  emu_async_queue& queue = *emu_thread_queue();
  size_t done = 0;
  while (done < queue.products.size() && queue.products[done].group + allowed < queue.product_group) {
    emu_product mine = queue.products[done++];
    emu_collect_fn(0xffffffffu, emu::kTwin + 4, &mine, mine.run, EMU_HERE);
  }
  queue.products.erase(queue.products.begin(), queue.products.begin() + done);
}
inline void products_commit() { ++emu_thread_queue()->product_group; }
template <int ALLOWED>
inline void products_wait() {
  run_products(ALLOWED);
}
template <int N>
inline void pin(float (&)[N]) {}

struct Matrix {
  const char* at;
  Matrix operator+(int units) const { return {at + 16 * units}; }
};
constexpr unsigned SWIZZLED = 1, PLAIN = 0;
inline Matrix rows_of(SharedAddress at) { return {at}; }
inline Matrix columns_of(SharedAddress at) { return {at}; }
inline Matrix plain_rows_of(SharedAddress at) { return {at}; }

enum Operand { kRegisters, kSwizzledRows, kPlainRows };

template <class T>
inline float element_at(const char* at) {
  T value;
  memcpy(&value, at, 2);
  return to_float(value);
}

// The product of one warp, which has 16 rows of A.
template <class T, int N, Operand A_FROM, bool COLUMNS>
inline void multiply_warp(void** lanes) {
  const emu_product& first = *static_cast<emu_product*>(lanes[0]);
  const int first_row = emu_ctx.linear / 32 % 4 * 16;
  float A[16][16], B[16][N];  // of the thread that arrives last
  int exponent_of_A[16][16], exponent_of_B[16][N];
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k) {
      if (A_FROM == kRegisters) {
        const emu_product& p = *static_cast<emu_product*>(lanes[row % 8 * 4 + k % 8 / 2]);
        A[row][k] = half_of<T>(p.registers[row / 8 + k / 8 * 2], k % 2);
      } else if (A_FROM == kSwizzledRows) {
        A[row][k] = element_at<T>(swizzled(first.a + (first_row + row) * 128 + k * 2));
      } else {
        const int r = first_row + row;
        A[row][k] = element_at<T>(first.a + r / 8 * 256 + k / 8 * 128 + r % 8 * 16 + k % 8 * 2);
      }
      exponent_of_A[row][k] = aligned_exponent<T>(A[row][k]);
    }
  for (int k = 0; k < 16; ++k)
    for (int n = 0; n < N; ++n) {
      const char* const at = COLUMNS ? first.b + n / 64 * 8192 + k * 128 + n % 64 * 2 : first.b + n * 128 + k * 2;
      B[k][n] = element_at<T>(swizzled(at));
      exponent_of_B[k][n] = aligned_exponent<T>(B[k][n]);
    }
  for (int lane = 0; lane < 32; ++lane) {
    const emu_product& p = *static_cast<emu_product*>(lanes[lane]);
    for (int i = 0; i < N / 2; ++i) {
      const int row = lane / 4 + i / 2 % 2 * 8, n = i / 4 * 8 + lane % 4 * 2 + i % 2;
      const float c = p.adds ? p.d[i] : 0.0f;
      double products[16], sum = 0;
      for (int k = 0; k < 16; ++k) {
        products[k] = (double)A[row][k] * B[k][n];
        sum += products[k];
      }
      if (emu_ctx.cut_sums && isfinite(c + sum)) {
        int largest = aligned_exponent<float>(c);
        for (int k = 0; k < 16; ++k) {
          const int exponent = exponent_of_A[row][k] + exponent_of_B[k][n];
          largest = exponent > largest ? exponent : largest;
        }
        p.d[i] = add_cut_off(c, products, largest);
      } else {
        p.d[i] = c + (float)sum;
      }
    }
  }
}

inline void issue(const emu_product& product) {
  emu_async_queue& queue = *emu_thread_queue();
  queue.products.push_back(product);
  queue.products.back().group = queue.product_group;
}

template <class T>
struct Warpgroup {
  static void multiply_64(float (&d)[32], unsigned a0, unsigned a1, unsigned a2, unsigned a3, Matrix b, int add) {
    issue({d, {a0, a1, a2, a3}, nullptr, b.at, multiply_warp<T, 64, kRegisters, false>, add, 0});
  }
  template <unsigned A_HIGH>
  static void multiply_64(float (&d)[32], Matrix a, Matrix b) {
    issue({d, {}, a.at, b.at, multiply_warp<T, 64, A_HIGH == SWIZZLED ? kSwizzledRows : kPlainRows, false>, 1, 0});
  }
  static void multiply_256(float (&d)[128], Matrix a, Matrix b, int add) {
    issue({d, {}, a.at, b.at, multiply_warp<T, 256, kSwizzledRows, true>, add, 0});
  }
};

// ---- registers, matrices to shared memory

template <int N>
inline void take_registers() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256, "setmaxnreg takes multiples of 8 from 24 to 256");
}
template <int N>
inline void give_registers() {
  take_registers<N>();
}

struct StoredRow {
  char* row;
  unsigned r[4];
};
inline void scatter_matrices(void** lanes) {
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const StoredRow& mine = *static_cast<StoredRow*>(lanes[lane]);
      memcpy(static_cast<StoredRow*>(lanes[8 * i + lane / 4])->row + lane % 4 * 4, &mine.r[i], 4);
    }
}
inline void store_matrices(SharedAddress row, unsigned r0, unsigned r1, unsigned r2, unsigned r3, EMU_FROM) {
  if (!emu::is_shared(row)) emu_fail(EMU_CALLER, "stmatrix writes memory that is not shared");
  if ((size_t)row % 16) emu_fail(EMU_CALLER, "stmatrix: the address of a row is not a multiple of 16 bytes");
  StoredRow mine{row, {r0, r1, r2, r3}};
  emu_collect_fn(0xffffffffu, emu::kTwin + 3, &mine, scatter_matrices, EMU_CALLER);
}

inline void or_predicates(void** deposits, unsigned count) {
  bool found = false;
  for (unsigned i = 0; i < count; ++i) found |= *static_cast<bool*>(deposits[i]);
  for (unsigned i = 0; i < count; ++i) *static_cast<bool*>(deposits[i]) = found;
}
inline bool named_barrier_or(int id, int threads, bool predicate, EMU_FROM) {
  emu_named_barrier(id, threads, &predicate, or_predicates, EMU_CALLER);
  return predicate;
}

template <class T>
inline void store_if(bool condition, T& to, std::common_type_t<T> value) {
  if (condition) to = value;
}

// ---- a cluster of two blocks

inline unsigned cluster_rank(EMU_FROM) { return emu_cluster_rank(EMU_CALLER); }
inline void cluster_arrive(EMU_FROM) { emu_cluster_arrive(EMU_CALLER); }
inline void cluster_wait(EMU_FROM) { emu_cluster_wait(EMU_CALLER); }
inline SharedAddress place_in_block(SharedAddress at, unsigned rank, EMU_FROM) {
  return (SharedAddress)emu_cluster_place(at, rank, EMU_CALLER);
}
inline void barrier_arrive_there(SharedAddress barrier, EMU_FROM) { emu_mbarrier_arrive(barrier, 0, EMU_CALLER); }
inline float2 load_there(SharedAddress at) { return *reinterpret_cast<const float2*>(at); }

struct BulkCopy {
  char* to;
  const char* from;
  int bytes;
};
inline void perform_bulk_copy(void* state) {
  const BulkCopy& copy = *static_cast<BulkCopy*>(state);
  memcpy(copy.to, copy.from, copy.bytes);
}
inline void copy_there(SharedAddress to, SharedAddress from, int bytes, SharedAddress barrier, EMU_FROM) {
  const BulkCopy copy{to, from, bytes};
  emu_defer(barrier, bytes, perform_bulk_copy, &copy, sizeof copy, EMU_CALLER);
}
