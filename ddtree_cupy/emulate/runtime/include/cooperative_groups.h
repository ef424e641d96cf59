// cooperative_groups.h: thread blocks and tiles of a warp. Groups that span blocks do not run here.
#pragma once
#include "ddtree_emulate.h"

namespace cooperative_groups {

class thread_block {
 public:
  static void sync(EMU_FROM) { emu_syncthreads(EMU_CALLER, 0, 0); }
  static unsigned thread_rank() { return emu_ctx.linear; }
  static unsigned num_threads() { return emu_ctx.block_dim.x * emu_ctx.block_dim.y * emu_ctx.block_dim.z; }
  static unsigned size() { return num_threads(); }
  static dim3 group_index() { return emu_ctx.block_idx; }
  static dim3 thread_index() { return emu_ctx.thread_idx; }
  static dim3 dim_threads() { return emu_ctx.block_dim; }
  static dim3 group_dim() { return emu_ctx.block_dim; }
};
inline thread_block this_thread_block() { return {}; }

template <unsigned kSize, class Parent = thread_block>
class thread_block_tile {
  static_assert(kSize && kSize <= 32 && (kSize & (kSize - 1)) == 0, "a tile has 1, 2, 4, 8, 16 or 32 threads");
  static unsigned mask() { return kSize == 32 ? ~0u : ((1u << kSize % 32) - 1) << (emu_ctx.lane & ~(kSize - 1)); }
  static unsigned lowest() { return emu_ctx.lane & ~(kSize - 1); }

 public:
  static void sync(EMU_FROM) { emu::syncwarp(EMU_CALLER, mask()); }
  static unsigned thread_rank() { return emu_ctx.lane % kSize; }
  static constexpr unsigned num_threads() { return kSize; }
  static constexpr unsigned size() { return kSize; }
  static unsigned meta_group_rank() { return emu_ctx.linear / kSize; }
  static unsigned meta_group_size() { return (thread_block::num_threads() + kSize - 1) / kSize; }
  template <class T>
  T shfl(T v, int rank, EMU_FROM) const { return emu::shuffle<emu::kIndex>(EMU_CALLER, mask(), v, rank, kSize); }
  template <class T>
  T shfl_up(T v, int by, EMU_FROM) const { return emu::shuffle<emu::kUp>(EMU_CALLER, mask(), v, by, kSize); }
  template <class T>
  T shfl_down(T v, int by, EMU_FROM) const { return emu::shuffle<emu::kDown>(EMU_CALLER, mask(), v, by, kSize); }
  template <class T>
  T shfl_xor(T v, int with, EMU_FROM) const { return emu::shuffle<emu::kXor>(EMU_CALLER, mask(), v, with, kSize); }
  int any(int predicate, EMU_FROM) const { return emu::any(EMU_CALLER, mask(), predicate); }
  int all(int predicate, EMU_FROM) const { return emu::all(EMU_CALLER, mask(), predicate); }
  unsigned ballot(int predicate, EMU_FROM) const { return emu::ballot(EMU_CALLER, mask(), predicate) >> lowest(); }
  template <class T>
  unsigned match_any(T v, EMU_FROM) const { return emu::match_any(EMU_CALLER, mask(), v) >> lowest(); }
};
template <unsigned kSize, class Parent>
thread_block_tile<kSize, Parent> tiled_partition(const Parent&) { return {}; }
template <class Group>
void sync(const Group& group, EMU_FROM) { group.sync(emu_file, emu_line); }

template <class T> struct plus { T operator()(T a, T b) const { return a + b; } };
template <class T> struct less { T operator()(T a, T b) const { return b < a ? b : a; } };
template <class T> struct greater { T operator()(T a, T b) const { return a < b ? b : a; } };
template <class T> struct bit_and { T operator()(T a, T b) const { return a & b; } };
template <class T> struct bit_or { T operator()(T a, T b) const { return a | b; } };
template <class T> struct bit_xor { T operator()(T a, T b) const { return a ^ b; } };
template <unsigned kSize, class Parent, class T, class Operation>
T reduce(const thread_block_tile<kSize, Parent>& tile, T v, Operation operation, EMU_FROM) {
  for (unsigned with = kSize / 2; with; with /= 2) v = operation(v, tile.shfl_xor(v, int(with), emu_file, emu_line));
  return v;
}

}  // namespace cooperative_groups
