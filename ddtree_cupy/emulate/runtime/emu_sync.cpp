// emu_sync.cpp: block barriers, named barriers and warp collectives.
#include "emu_scheduler.h"

namespace emu_rt {

constexpr int kSyncWarpOperation = 1;  // emu::kSyncWarp of emu_warp.h

// The place that orders what is in its n-th use.
static void* place_of(Order& order, unsigned generation) { return &order.places[generation & 1]; }

static void release_block_barrier() {
  BlockBarrier& b = B->barrier;
  b.result[b.generation & 1] = b.accumulated;
  ++b.generation;
  b.arrived = 0;
  for (unsigned i = 0; i < S.num_threads; ++i)
    if (B->fibers[i].state == State::block_barrier) set_ready(B->fibers[i]);
}

static void release_group(WarpGroup& group, unsigned warp) {
  group.arrived = 0;
  ++group.generation;
  for (unsigned lanes = group.expected; lanes; lanes &= lanes - 1) {
    Fiber& fiber = B->fibers[warp * 32 + __builtin_ctz(lanes)];
    if (fiber.state == State::warp_op && fiber.mask == group.mask) set_ready(fiber);
  }
}

void leave_barriers(Fiber& fiber) {
  unsigned warp_index = fiber.linear >> 5;
  Warp& warp = B->warps[warp_index];
  unsigned bit = 1u << (fiber.linear & 31);
  warp.live &= ~bit;
  if (B->alive && B->barrier.arrived) {
    if (S.launch->strict)
      emu_fail(B->barrier.where, "a thread left the kernel while %u threads wait in this __syncthreads",
               B->barrier.arrived);
    if (B->barrier.arrived == B->alive) release_block_barrier();
  }
  for (int i = 0; i < warp.num_groups; ++i) {
    WarpGroup& group = warp.groups[i];
    if (!group.arrived || !(group.mask & bit)) continue;
    if (S.launch->strict)
      emu_fail(group.where, "a lane of mask %08x left the kernel while others wait in this warp operation",
               group.mask);
    if (group.arrived == (group.mask & warp.live)) {
      group.expected = group.arrived;
      release_group(group, warp_index);
    }
  }
}

void check_named_barriers() {
  for (int id = 0; id < 16; ++id) {
    const NamedBarrier& barrier = B->named[id];
    if (S.launch->strict && barrier.arrived)
      emu_fail(barrier.where, "named barrier %d is half full at the end of the block: %u of %u threads arrived", id,
               barrier.arrived, barrier.count);
  }
}

void reset_barriers() {
  B->barrier = BlockBarrier();
  for (NamedBarrier& barrier : B->named)
    if (barrier.count) barrier = NamedBarrier();  // 8 KiB each: only those that were used
  B->waiting_on_condition = 0;
}

static WarpGroup& group_for(Warp& warp, unsigned mask, emu_where where) {
  for (int i = 0; i < warp.num_groups; ++i)
    if (warp.groups[i].mask == mask) return warp.groups[i];
  if (warp.num_groups < 33) {
    WarpGroup& group = warp.groups[warp.num_groups++];
    group.mask = mask;
    group.arrived = group.generation = 0;
    return group;
  }
  for (WarpGroup& group : warp.groups)
    if (!group.arrived) {
      group.mask = mask;
      return group;
    }
  emu_fail(where, "more than 33 warp operations are pending in one warp");
}

static WarpGroup& arrive(unsigned mask, int op, emu_where where, bool& last) {
  Warp& warp = B->warps[S.current->linear >> 5];
  unsigned lane = S.current->linear & 31;
  if (!(mask >> lane & 1)) emu_fail(where, "lane %u is not in its own mask %08x", lane, mask);
  if (S.launch->strict && (mask & ~warp.live))
    emu_fail(where, "mask %08x names lanes that left the kernel or do not exist (live lanes %08x)", mask, warp.live);
  WarpGroup& group = group_for(warp, mask, where);
  if (!group.arrived) {
    group.op = op;
    group.where = where;
    memset(group.pointers, 0, sizeof group.pointers);
  } else if (group.op != op || (S.launch->strict && !same_place(group.where, where))) {
    emu_fail(where, "lanes of mask %08x are in different warp operations (the others are at %s:%d)", mask,
             group.where.file, group.where.line);
  }
  group.arrived |= 1u << lane;
  last = group.arrived == (mask & warp.live);
  return group;
}

// `orders` tells TSan that memory is ordered, too: among the collectives that is __syncwarp alone.
static void wait_for_group(WarpGroup& group, bool last, bool orders) {
  void* order = place_of(group.order, group.generation);
  if (orders) EMU_RELEASE(order);
  if (last) {
    group.expected = group.arrived;
    release_group(group, S.current->linear >> 5);
  } else {
    S.current->mask = group.mask;
    set_waiting(*S.current, State::warp_op, group.where);
    yield();
  }
  if (orders) EMU_ACQUIRE(order);
}

static bool is_syncthreads(int id, unsigned count) { return id == 0 && count == (S.num_threads + 31) / 32 * 32; }

static NamedBarrier& arrive_named(int id, unsigned count, void* mine, emu_where where) {
  if (id < 0 || id > 15) emu_fail(where, "named barrier %d: ids are 0 to 15", id);
  if (!count || count % 32) emu_fail(where, "named barrier %d: %u threads is not a multiple of 32", id, count);
  if (id == 0 && B->barrier.arrived)
    emu_fail(where, "named barrier 0 is that of __syncthreads, where %u threads wait at %s:%d", B->barrier.arrived,
             B->barrier.where.file, B->barrier.where.line);
  NamedBarrier& barrier = B->named[id];
  if (barrier.arrived && barrier.count != count)
    emu_fail(where, "named barrier %d is used with %u and with %u threads", id, barrier.count, count);
  if (barrier.has_arrived[S.current->linear])
    emu_fail(where, "this thread arrives at named barrier %d again before it has completed: %u of %u threads", id,
             barrier.arrived, count);
  barrier.count = count;
  barrier.where = where;
  barrier.has_arrived[S.current->linear] = true;
  barrier.deposits[S.current->linear] = mine;
  ++barrier.arrived;
  EMU_RELEASE(place_of(barrier.order, barrier.generation));
  return barrier;
}

static void run_on_deposits(const NamedBarrier& barrier, void (*fn)(void** deposits, unsigned count)) {
  void* deposits[1024];
  unsigned n = 0;
  for (unsigned i = 0; i < S.num_threads; ++i)
    if (barrier.deposits[i]) deposits[n++] = barrier.deposits[i];
  fn(deposits, n);
}

// Orders nothing for TSan: every arrival has released, and only those who wait acquire, so that a thread that merely
// arrives (bar.arrive) is ordered after nobody, even if it is the last.
static void complete_named(int id, NamedBarrier& barrier) {
  barrier.arrived = 0;
  ++barrier.generation;
  memset(barrier.deposits, 0, sizeof barrier.deposits);
  memset(barrier.has_arrived, 0, sizeof barrier.has_arrived);
  for (unsigned i = 0; i < S.num_threads; ++i)
    if (B->fibers[i].state == State::named_barrier && B->fibers[i].barrier == id) set_ready(B->fibers[i]);
}

}  // namespace emu_rt

using namespace emu_rt;

EMU_API int emu_syncthreads(emu_where where, int kind, int predicate) {
  BlockBarrier& b = B->barrier;
  if (S.launch->strict && B->alive != S.num_threads)
    emu_fail(where, "__syncthreads after %u threads of the block left the kernel", S.num_threads - B->alive);
  if (B->named[0].arrived)
    emu_fail(where, "__syncthreads is named barrier 0, where %u threads arrived at %s:%d", B->named[0].arrived,
             B->named[0].where.file, B->named[0].where.line);
  if (!b.arrived) {
    b.where = where;
    b.kind = kind;
    b.accumulated = kind == 2;
  } else if (b.kind != kind || (S.launch->strict && !same_place(b.where, where))) {
    emu_fail(where, "__syncthreads while %u threads wait in another one, at %s:%d", b.arrived, b.where.file,
             b.where.line);
  }
  if (kind == 1) b.accumulated += predicate != 0;
  if (kind == 2) b.accumulated &= predicate != 0;
  if (kind == 3) b.accumulated |= predicate != 0;
  unsigned generation = b.generation;
  EMU_RELEASE(place_of(b.order, generation));
  ++b.arrived;
  set_waiting(*S.current, State::block_barrier, where);
  if (b.arrived == B->alive) release_block_barrier();
  yield();
  EMU_ACQUIRE(place_of(b.order, generation));
  return b.result[generation & 1];
}

EMU_API const unsigned char* emu_collect(unsigned mask, int op, const void* in, unsigned bytes, unsigned* arrived,
                                         emu_where where) {
  bool last;
  WarpGroup& group = arrive(mask, op, where, last);
  unsigned phase = group.generation & 1;
  if (bytes) copy_unwatched(group.deposits[phase][S.current->linear & 31], in, bytes);
  wait_for_group(group, last, op == kSyncWarpOperation);
  *arrived = group.expected;
  return &group.deposits[phase][0][0];
}

EMU_API void emu_collect_fn(unsigned mask, int op, void* mine, void (*fn)(void** lanes), emu_where where) {
  bool last;
  WarpGroup& group = arrive(mask, op, where, last);
  group.pointers[S.current->linear & 31] = mine;
  void* order = place_of(group.order, group.generation);
  EMU_RELEASE(order);
  if (last) {
    EMU_ACQUIRE(order);
    fn(group.pointers);
  }
  wait_for_group(group, last, true);
}

EMU_API void emu_named_barrier(int id, unsigned count, void* mine, void (*fn)(void** deposits, unsigned count),
                               emu_where where) {
  if (is_syncthreads(id, count)) {
    B->named[0].count = count;  // so that reset_barriers forgets what a failed launch leaves
    B->named[0].deposits[S.current->linear] = mine;
    void* order = place_of(B->barrier.order, B->barrier.generation);
    EMU_RELEASE(order);
    if (fn && B->barrier.arrived + 1 == B->alive) {
      EMU_ACQUIRE(order);
      run_on_deposits(B->named[0], fn);
    }
    emu_syncthreads(where, 0, 0);
    B->named[0].deposits[S.current->linear] = nullptr;
    return;
  }
  NamedBarrier& barrier = arrive_named(id, count, mine, where);
  void* order = place_of(barrier.order, barrier.generation);
  if (barrier.arrived == count) {
    if (fn) {
      EMU_ACQUIRE(order);
      run_on_deposits(barrier, fn);
      EMU_RELEASE(order);
    }
    complete_named(id, barrier);
  } else {
    S.current->barrier = id;
    set_waiting(*S.current, State::named_barrier, where);
    yield();
  }
  EMU_ACQUIRE(order);
}

EMU_API void emu_named_arrive(int id, unsigned count, emu_where where) {
  if (is_syncthreads(id, count))
    emu_fail(where, "named barrier 0 for %u threads is __syncthreads: use 1 to 15 to arrive without waiting", count);
  NamedBarrier& barrier = arrive_named(id, count, nullptr, where);
  if (barrier.arrived == count) complete_named(id, barrier);
  if (emu_ctx.random_schedule && (next_random() & 1)) yield();  // else what follows would never come too late
}

EMU_API void emu_wait_until(int (*ready)(void* state), void* state, emu_where where) {
  if (!ready(state)) {
    S.current->ready = ready;
    S.current->ready_state = state;
    ++B->waiting_on_condition;
    set_waiting(*S.current, State::condition, where);
    yield();
  }
}
