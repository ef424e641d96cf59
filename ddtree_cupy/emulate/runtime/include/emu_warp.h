// emu_warp.h: barriers and warp collectives. Macros, so that the runtime learns the place of each call.
#pragma once
#include "emu_language.h"

#define __syncthreads() ((void)emu_syncthreads(EMU_HERE, 0, 0))
#define __syncthreads_count(...) emu_syncthreads(EMU_HERE, 1, !!(__VA_ARGS__))
#define __syncthreads_and(...) emu_syncthreads(EMU_HERE, 2, !!(__VA_ARGS__))
#define __syncthreads_or(...) emu_syncthreads(EMU_HERE, 3, !!(__VA_ARGS__))
#define __syncwarp(...) emu::syncwarp(EMU_HERE __VA_OPT__(, ) __VA_ARGS__)
#define __shfl_sync(...) emu::shuffle<emu::kIndex>(EMU_HERE, __VA_ARGS__)
#define __shfl_up_sync(...) emu::shuffle<emu::kUp>(EMU_HERE, __VA_ARGS__)
#define __shfl_down_sync(...) emu::shuffle<emu::kDown>(EMU_HERE, __VA_ARGS__)
#define __shfl_xor_sync(...) emu::shuffle<emu::kXor>(EMU_HERE, __VA_ARGS__)
#define __ballot_sync(...) emu::ballot(EMU_HERE, __VA_ARGS__)
#define __any_sync(...) emu::any(EMU_HERE, __VA_ARGS__)
#define __all_sync(...) emu::all(EMU_HERE, __VA_ARGS__)
#define __match_any_sync(...) emu::match_any(EMU_HERE, __VA_ARGS__)
#define __match_all_sync(...) emu::match_all(EMU_HERE, __VA_ARGS__)
#define __reduce_add_sync(...) emu::reduce<emu::kAdd>(EMU_HERE, __VA_ARGS__)
#define __reduce_min_sync(...) emu::reduce<emu::kMin>(EMU_HERE, __VA_ARGS__)
#define __reduce_max_sync(...) emu::reduce<emu::kMax>(EMU_HERE, __VA_ARGS__)
#define __reduce_and_sync(...) emu::reduce<emu::kAnd>(EMU_HERE, __VA_ARGS__)
#define __reduce_or_sync(...) emu::reduce<emu::kOr>(EMU_HERE, __VA_ARGS__)
#define __reduce_xor_sync(...) emu::reduce<emu::kXorBits>(EMU_HERE, __VA_ARGS__)
#define __activemask() (1u << emu_ctx.lane)  // hardware may return more lanes, but promises no more than this one

namespace emu {

// Numbers that tell collectives apart; host twins of PTX instructions count up from kTwin.
enum Operation { kSyncWarp = 1, kVote = 2, kMatch = 3, kShuffle = 16, kReduce = 32, kTwin = 64 };
enum ShuffleMode { kIndex, kUp, kDown, kXor };
enum ReduceMode { kAdd, kMin, kMax, kAnd, kOr, kXorBits };

template <class T>
T deposit(const unsigned char* deposits, unsigned lane) {
  T value;
  __builtin_memcpy(&value, deposits + 16 * lane, sizeof value);
  return value;
}

inline void syncwarp(emu_where where, unsigned mask = 0xffffffffu) {
  unsigned arrived;
  emu_collect(mask, kSyncWarp, nullptr, 0, &arrived, where);
}

template <ShuffleMode mode, class T>
T shuffle(emu_where where, unsigned mask, T value, int argument, int width = 32) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>, "CUDA shuffles types of at most 8 bytes");
  unsigned arrived;
  const unsigned char* deposits = emu_collect(mask, int(kShuffle) + int(mode), &value, sizeof value, &arrived, where);
  int lane = emu_ctx.lane, low = lane & ~(width - 1), high = low + width - 1, source = lane;
  if (width < 1 || width > 32 || (width & (width - 1))) emu_fail(where, "shuffle width %d is no power of two", width);
  if (mode == kIndex) source = low | (argument & (width - 1));
  if (mode == kUp && lane - argument >= low) source = lane - argument;
  if (mode == kDown && lane + argument <= high) source = lane + argument;
  if (mode == kXor && (lane ^ argument) <= high) source = lane ^ argument;
  if (!(arrived >> source & 1))
    emu_fail(where, "lane %d shuffles from lane %d, which takes no part (mask %08x)", lane, source, mask);
  return deposit<T>(deposits, unsigned(source));
}

inline unsigned vote(emu_where where, unsigned mask, int predicate, unsigned* arrived) {
  int mine = predicate != 0;
  const unsigned char* deposits = emu_collect(mask, kVote, &mine, sizeof mine, arrived, where);
  unsigned result = 0;
  for (unsigned lanes = *arrived; lanes; lanes &= lanes - 1) {
    unsigned lane = __builtin_ctz(lanes);
    result |= unsigned(deposit<int>(deposits, lane)) << lane;
  }
  return result;
}
inline unsigned ballot(emu_where where, unsigned mask, int predicate) {
  unsigned arrived;
  return vote(where, mask, predicate, &arrived);
}
inline int any(emu_where where, unsigned mask, int predicate) { return ballot(where, mask, predicate) != 0; }
inline int all(emu_where where, unsigned mask, int predicate) {
  unsigned arrived, votes = vote(where, mask, predicate, &arrived);
  return votes == arrived;
}

template <class T>
unsigned match_any(emu_where where, unsigned mask, T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "CUDA matches 4 and 8 byte types");
  unsigned arrived, result = 0;
  const unsigned char* deposits = emu_collect(mask, kMatch, &value, sizeof value, &arrived, where);
  for (unsigned lanes = arrived; lanes; lanes &= lanes - 1) {
    unsigned lane = __builtin_ctz(lanes);
    if (!memcmp(deposits + 16 * lane, &value, sizeof value)) result |= 1u << lane;
  }
  return result;
}
template <class T>
unsigned match_all(emu_where where, unsigned mask, T value, int* same) {
  *same = match_any(where, mask, value) == mask;
  return *same ? mask : 0;
}

template <ReduceMode mode, class T>
T reduce(emu_where where, unsigned mask, T value) {
  static_assert(std::is_same_v<T, int> || std::is_same_v<T, unsigned>, "CUDA reduces int and unsigned");
  unsigned arrived;
  const unsigned char* deposits = emu_collect(mask, int(kReduce) + int(mode), &value, sizeof value, &arrived, where);
  T result = deposit<T>(deposits, __builtin_ctz(arrived));
  for (unsigned lanes = arrived & (arrived - 1); lanes; lanes &= lanes - 1) {
    T other = deposit<T>(deposits, __builtin_ctz(lanes));
    if (mode == kAdd) result = T(unsigned(result) + unsigned(other));
    if (mode == kMin) result = other < result ? other : result;
    if (mode == kMax) result = result < other ? other : result;
    if (mode == kAnd) result &= other;
    if (mode == kOr) result |= other;
    if (mode == kXorBits) result ^= other;
  }
  return result;
}

}  // namespace emu
