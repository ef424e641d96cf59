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
template <class T>
inline void multiply_fragments(void** lanes) {
  float A[16][16], B[16][8];  // (row, k), (k, column)
  for (int lane = 0; lane < 32; ++lane) {
    const Fragments* f = static_cast<Fragments*>(lanes[lane]);
    for (int i = 0; i < 4; ++i)
      for (int half = 0; half < 2; ++half)
        A[lane / 4 + 8 * (i % 2)][2 * (lane % 4) + 8 * (i / 2) + half] = half_of<T>(f->a[i], half);
    for (int i = 0; i < 2; ++i)
      for (int half = 0; half < 2; ++half) B[2 * (lane % 4) + 8 * i + half][lane / 4] = half_of<T>(f->b[i], half);
  }
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      double sum = 0;
      for (int k = 0; k < 16; ++k) sum += (double)A[lane / 4 + 8 * (i / 2)][k] * B[k][2 * (lane % 4) + i % 2];
      static_cast<Fragments*>(lanes[lane])->c[i] += (float)sum;
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
