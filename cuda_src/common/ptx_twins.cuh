// common/ptx_twins.cuh: ptx.cuh on the CPU emulator, instruction by instruction.
//
// Requires   the emulator's runtime (emu_async.h, emu_runtime.h); included by ptx.cuh alone
// Source     own
#pragma once

#include "dtype.cuh"

typedef char* SharedAddress;

inline SharedAddress shared_address(const void* pointer) { return (char*)pointer; }

inline SharedAddress flip_address(SharedAddress at, unsigned bits) { return (SharedAddress)((size_t)at ^ bits); }

inline void copy_async_16(SharedAddress to, const void* from, bool is_read, EMU_FROM) {
  emu::async_copy(to, from, 16, is_read ? 16 : 0, EMU_CALLER);
}
inline void copy_async_commit() { emu::async_commit(); }
template <int ALLOWED>
inline void copy_async_wait() {
  emu::async_wait(ALLOWED);
}

inline void store_relaxed(unsigned* to, unsigned value) { __atomic_store_n(to, value, __ATOMIC_RELAXED); }
inline void store_relaxed(unsigned short* to, unsigned short value) { __atomic_store_n(to, value, __ATOMIC_RELAXED); }
inline void store_relaxed(uint4* to, uint4 value) {
  store_relaxed(&to->x, value.x);
  store_relaxed(&to->y, value.y);
  store_relaxed(&to->z, value.z);
  store_relaxed(&to->w, value.w);
}

struct MatrixRow {
  const unsigned short* row;
  unsigned* r;
};

// matrix i, element (row, column), from the addresses of all lanes
inline unsigned matrix_element(void** lanes, int i, int row, int column) {
  return static_cast<MatrixRow*>(lanes[8 * i + row])->row[column];
}
inline void gather_matrices(void** lanes) {
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4, column = 2 * (lane % 4);
      static_cast<MatrixRow*>(lanes[lane])->r[i] =
          matrix_element(lanes, i, row, column) | matrix_element(lanes, i, row, column + 1) << 16;
    }
}
inline void gather_matrices_transposed(void** lanes) {
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const int column = lane / 4, row = 2 * (lane % 4);
      static_cast<MatrixRow*>(lanes[lane])->r[i] =
          matrix_element(lanes, i, row, column) | matrix_element(lanes, i, row + 1, column) << 16;
    }
}
inline MatrixRow matrix_row(SharedAddress row, unsigned* r, emu_where where) {
  if (!emu::is_shared((const void*)row)) emu_fail(where, "ldmatrix reads memory that is not shared");
  if ((size_t)row % 16) emu_fail(where, "ldmatrix: the address of a row is not a multiple of 16 bytes");
  return {(const unsigned short*)row, r};
}
inline void load_matrices(unsigned (&r)[4], SharedAddress row, EMU_FROM) {
  MatrixRow mine = matrix_row(row, r, EMU_CALLER);
  emu_collect_fn(0xffffffffu, emu::kTwin, &mine, gather_matrices, EMU_CALLER);
}
inline void load_matrices_transposed(unsigned (&r)[4], SharedAddress row, EMU_FROM) {
  MatrixRow mine = matrix_row(row, r, EMU_CALLER);
  emu_collect_fn(0xffffffffu, emu::kTwin + 1, &mine, gather_matrices_transposed, EMU_CALLER);
}

template <class T>
inline float half_of(unsigned both, int half) {
  const unsigned short bits = (unsigned short)(both >> (16 * half));
  T value;
  memcpy(&value, &bits, 2);
  return to_float(value);
}

struct Fragments {
  float* c;
  const unsigned* a;
  unsigned b[2];
};
// The exponent by which a tensor core aligns a number of type T. A subnormal number has that of the smallest normal
// one, and 0 has one below all others. Sums with NaN or inf are not aligned, so for these any value will do.
template <class T>
inline int aligned_exponent(float x) {
  const int least = std::is_same<T, __half>::value ? -14 : -126;
  unsigned bits;
  memcpy(&bits, &x, 4);
  const int exponent = (int)(bits >> 23 & 255);
  if (x == 0 || exponent == 255) return -400;
  return exponent - 127 > least ? exponent - 127 : least;
}

// The sum of 16 products and an accumulator as a tensor core of sm_90 computes it. `largest` is the largest of their
// exponents: 24 + 2 bits of each are kept, and their sum is rounded toward zero. The exponent of a product is the sum
// of the exponents of its factors. `tensor_core_matmul` in ddtree_cupy/testing/tolerance.py names the source.
inline float add_cut_off(float accumulator, const double (&products)[16], int largest) {
  const double parts = ldexp(1.0, 25 - largest);  // of 1
  long long sum = (long long)(accumulator * parts);
  for (int k = 0; k < 16; ++k) sum += (long long)(products[k] * parts);
  double exact = (double)sum / parts;
  unsigned long long bits;
  memcpy(&bits, &exact, 8);
  bits &= ~0ull << 29;  // a float32 has 29 bits less
  memcpy(&exact, &bits, 8);
  return (float)exact;
}

template <class T>
inline void multiply_fragments(void** lanes) {
  float A[16][16], B[16][8];  // (row, k), (k, column)
  int exponent_of_A[16][16], exponent_of_B[16][8];
  const auto put = [](float& to, int& exponent, unsigned both, int half) {
    to = half_of<T>(both, half);
    exponent = aligned_exponent<T>(to);
  };
  for (int lane = 0; lane < 32; ++lane) {
    const Fragments* f = static_cast<Fragments*>(lanes[lane]);
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + 8 * (i % 2), k = 2 * (lane % 4) + 8 * (i / 2) + half;
        put(A[row][k], exponent_of_A[row][k], f->a[i], half);
      }
      for (int i = 0; i < 2; ++i) {
        const int k = 2 * (lane % 4) + 8 * i + half, column = lane / 4;
        put(B[k][column], exponent_of_B[k][column], f->b[i], half);
      }
    }
  }
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
      float& c = static_cast<Fragments*>(lanes[lane])->c[i];
      double products[16], sum = 0;
      int largest = aligned_exponent<float>(c);
      for (int k = 0; k < 16; ++k) {
        sum += products[k] = (double)A[row][k] * B[k][column];
        const int exponent = exponent_of_A[row][k] + exponent_of_B[k][column];
        largest = exponent > largest ? exponent : largest;
      }
      c = emu_ctx.cut_sums && isfinite(c + sum) ? add_cut_off(c, products, largest) : c + (float)sum;
    }
}
template <class T>
inline void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  Fragments mine{c, a, {b0, b1}};
  emu_collect_fn(0xffffffffu, emu::kTwin + 2, &mine, multiply_fragments<T>, EMU_HERE);
}

inline unsigned thread_here() { return threadIdx.x; }

inline float fast_exp2(float x) { return exp2f(x); }

template <class T>
inline unsigned pack2(float low, float high) {
  const T both[2] = {from_float<T>(low), from_float<T>(high)};
  unsigned bits;
  memcpy(&bits, both, 4);
  return bits;
}

inline void named_barrier(int id, int threads, EMU_FROM) {
  emu_named_barrier(id, threads, nullptr, nullptr, EMU_CALLER);
}
inline void named_arrive(int id, int threads, EMU_FROM) { emu_named_arrive(id, threads, EMU_CALLER); }
