// emu_cluster.cpp: mbarriers, copies that complete at them, and clusters of two blocks.
//
// An mbarrier is 8 bytes of shared memory: bits 0..14 arrivals still to come, 15..29 arrivals of a phase, 30 the parity of
// the phase, 31 zero (poison has it set), 32..63 bytes still to come.
#include <iterator>

#include "emu_scheduler.h"

namespace emu_rt {

constexpr uint64_t kMostArrivals = (1 << 15) - 1;

struct Mbarrier {
  uint64_t* word;
  unsigned pending, arrivals, parity;
  int bytes;

  Mbarrier(void* address, emu_where where) : word(static_cast<uint64_t*>(address)) {
    if (reinterpret_cast<uintptr_t>(address) % 8) emu_fail(where, "an mbarrier starts at a multiple of 8 bytes");
    uint64_t value = *word;
    if (value >> 31 & 1) emu_fail(where, "this mbarrier was not initialised");
    pending = value & kMostArrivals;
    arrivals = value >> 15 & kMostArrivals;
    parity = value >> 30 & 1;
    bytes = int(value >> 32);
  }
  // Ends the phase if nothing is to come.
  void store() {
    if (!pending && !bytes) {
      pending = arrivals;
      parity ^= 1;
    }
    *word = pending | uint64_t(arrivals) << 15 | uint64_t(parity) << 30 | uint64_t(unsigned(bytes)) << 32;
  }
};

static void perform(const Deferred& given) {
  Deferred copy;
  copy_unwatched(&copy, &given, sizeof copy);
  EMU_ACQUIRE(copy.barrier);  // after what its thread did before
  copy.perform(copy.state);
  EMU_RELEASE(copy.barrier);
  Mbarrier barrier(copy.barrier, copy.where);
  barrier.bytes -= int(copy.bytes);
  barrier.store();
}

static void perform_all(void* barrier) {
  for (unsigned i = 0; i < S.num_deferred;) {
    if (S.deferred[i].barrier != barrier) {
      ++i;
      continue;
    }
    perform(S.deferred[i]);
    copy_unwatched(&S.deferred[i], &S.deferred[--S.num_deferred], sizeof(Deferred));
  }
}

void forget_deferred() { S.num_deferred = 0; }

void check_deferred() {
  for (unsigned i = 0; i < S.num_deferred; ++i) {
    const Deferred& copy = S.deferred[i];
    const char *place = static_cast<char*>(copy.barrier), *begin = static_cast<char*>(B->dynamic_shared);
    if (S.launch->strict && begin && place >= begin && place < begin + S.launch->shared_bytes)
      emu_fail(copy.where, "nobody has waited for this copy at the end of the block");
  }
}

struct Waiting {
  void* barrier;
  unsigned parity;
  emu_where where;
};

static int has_ended(void* state) {
  Waiting& w = *static_cast<Waiting*>(state);
  perform_all(w.barrier);
  return Mbarrier(w.barrier, w.where).parity != w.parity;
}

static int all_have_arrived(void* state) { return S.cluster_generation != *static_cast<unsigned*>(state); }

}  // namespace emu_rt

using namespace emu_rt;

EMU_API void emu_mbarrier_init(void* barrier, unsigned arrivals, emu_where where) {
  if (reinterpret_cast<uintptr_t>(barrier) % 8) emu_fail(where, "an mbarrier starts at a multiple of 8 bytes");
  if (!arrivals || arrivals > kMostArrivals) emu_fail(where, "an mbarrier for %u arrivals", arrivals);
  *static_cast<uint64_t*>(barrier) = arrivals | uint64_t(arrivals) << 15;
}

EMU_API void emu_mbarrier_arrive(void* address, unsigned expected_bytes, emu_where where) {
  Mbarrier barrier(address, where);
  if (!barrier.pending) emu_fail(where, "more threads arrive at this mbarrier than its %u", barrier.arrivals);
  EMU_RELEASE(address);
  --barrier.pending;
  barrier.bytes += int(expected_bytes);
  barrier.store();
  if (emu_ctx.random_schedule && (next_random() & 3) == 0) yield();  // else what follows would never come too late
}

EMU_API void emu_mbarrier_wait(void* barrier, unsigned parity, emu_where where) {
  Waiting waiting{barrier, parity & 1, where};
  emu_wait_until(has_ended, &waiting, where);
  EMU_ACQUIRE(barrier);
}

EMU_API void emu_defer(void* barrier, unsigned bytes, void (*perform_copy)(void* state), const void* state,
                       unsigned state_bytes, emu_where where) {
  Mbarrier(barrier, where);  // a fault if it was not initialised
  Deferred copy;
  copy.barrier = barrier;
  copy.bytes = bytes;
  copy.perform = perform_copy;
  copy.where = where;
  copy_unwatched(copy.state, state, state_bytes);
  EMU_RELEASE(barrier);
  if (emu_ctx.random_schedule && (next_random() & 1)) return perform(copy);
  if (S.num_deferred == std::size(S.deferred)) emu_fail(where, "more than 1,024 copies are under way");
  copy_unwatched(&S.deferred[S.num_deferred++], &copy, sizeof copy);
}

EMU_API unsigned emu_cluster_rank(emu_where where) {
  if (S.launch->cluster < 2) emu_fail(where, "this kernel has no __cluster_dims__");
  return B->index.x & 1;
}

EMU_API void* emu_cluster_place(const void* address, unsigned rank, emu_where where) {
  const char *place = static_cast<const char*>(address), *begin = static_cast<const char*>(B->dynamic_shared);
  if (S.launch->cluster < 2 || rank > 1) emu_fail(where, "no block %u in this cluster", rank);
  if (!begin || place < begin || place >= begin + S.launch->shared_bytes)
    emu_fail(where, "the emulator finds dynamic shared memory of other blocks only");
  Block& there = (B->index.x & 1) == rank ? *B : S.blocks[B == S.blocks];
  if (!there.alive) emu_fail(where, "block %u of the cluster has ended", rank);
  return static_cast<char*>(there.dynamic_shared) + (place - begin);
}

EMU_API void emu_cluster_arrive(emu_where where) {
  emu_cluster_rank(where);
  if (S.current->has_arrived_cluster) emu_fail(where, "this thread arrives at the barrier of the cluster twice");
  S.current->has_arrived_cluster = true;
  S.current->cluster_generation = S.cluster_generation;
  EMU_RELEASE(&S.cluster_order[S.cluster_generation & 1]);
  if (++S.cluster_arrived == 2 * S.num_threads) {
    S.cluster_arrived = 0;
    ++S.cluster_generation;
  }
  if (emu_ctx.random_schedule && (next_random() & 1)) yield();
}

EMU_API void emu_cluster_wait(emu_where where) {
  if (!S.current->has_arrived_cluster) emu_fail(where, "this thread waits for the cluster without having arrived");
  unsigned generation = S.current->cluster_generation;
  emu_wait_until(all_have_arrived, &generation, where);
  S.current->has_arrived_cluster = false;
  EMU_ACQUIRE(&S.cluster_order[generation & 1]);
}
