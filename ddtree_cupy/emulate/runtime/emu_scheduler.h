// emu_scheduler.h: which fiber runs next, and how a launch is ended with a message.
#pragma once
#include <cstdarg>
#include <vector>

#include "emu_async_queue.h"
#include "emu_fiber.h"

namespace emu_rt {

// What orders threads for TSan: those who arrive release it, those who go on acquire it. There are two, taken in turn:
// a fast thread arrives for the next time before a slow one has gone on from this time.
struct Order {
  char places[2];
};

// Lanes that meet under one mask. Deposits are double-buffered: a lane may reach the next collective before a slow
// one has read the results of this one.
struct WarpGroup {
  unsigned mask, arrived, expected, generation;
  Order order;
  int op;
  emu_where where;
  alignas(16) unsigned char deposits[2][32][16];
  void* pointers[32];
};
struct Warp {
  unsigned live = 0;
  int num_groups = 0;
  WarpGroup groups[33];
};
struct BlockBarrier {
  unsigned arrived = 0, generation = 0;
  emu_where where{"", 0};
  int kind = 0, accumulated = 0, result[2] = {0, 0};
  Order order{};
};
struct NamedBarrier {
  unsigned count = 0, arrived = 0, generation = 0;
  Order order{};
  emu_where where{"", 0};       // of the newest arrival
  void* deposits[1024] = {};
  bool has_arrived[1024] = {};  // by thread, since the barrier last completed
};

// A block that has begun and not ended, while `alive` is above 0.
struct Block {
  uint64_t number = 0;  // in the order of their beginnings
  uint3 index{};
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<emu_async_queue> queues;    // one per thread
  std::vector<unsigned> order, position;  // schedule order -> thread, and back
  std::vector<uint64_t> ready;            // bit per place in `order`
  unsigned alive = 0, waiting_on_condition = 0;
  bool fair = false;                      // see yield
  bool has_fenced = false;                // a thread has executed __threadfence
  BlockBarrier barrier;
  NamedBarrier named[16];
  std::vector<char> static_shared;        // while another block is in its place
  void *allocated = nullptr, *dynamic_shared = nullptr;
  char* guarded = nullptr;                // the first page of dynamic shared memory that has protected pages around it
};

// A copy that is under way: it happens when someone waits for its barrier, or at once, by chance.
struct Deferred {
  void* barrier;
  unsigned bytes;
  void (*perform)(void* state);
  alignas(16) char state[128];
  emu_where where;
};

struct Scheduler {
  emu_launch* launch = nullptr;
  emu_thunk thunk = nullptr;
  void** args = nullptr;
  bool failed = false;
  uint64_t random_state = 1, switches = 0;
  unsigned num_threads = 0;  // of a block
  Block blocks[2];
  unsigned num_blocks = 1;   // of these in use; 2: their threads are interleaved
  Deferred deferred[1024];    // copies under way; not a vector, whose memory a sanitizer would watch
  unsigned num_deferred = 0;
  unsigned cluster_arrived = 0, cluster_generation = 0;
  char cluster_order[2] = {};  // as those of Order
  Block* loaded = nullptr;   // the one whose static shared memory is in place
  std::vector<void*> kept;   // dynamic shared memory of blocks that have ended, for TSan
  size_t kept_bytes = 0;
  Fiber* current = nullptr;
  Fiber host;
  HostStack host_stack;
  char start_tag = 0, done_tag = 0;  // addresses that order threads for TSan
  uint64_t steps_left = 0;
  volatile int stop = 0;     // an emu_fault_kind: the launch is to end as soon as that is safe
};
extern Scheduler S;
extern Block* B;  // the block that runs

inline uint64_t next_random() {
  S.random_state ^= S.random_state << 13;
  S.random_state ^= S.random_state >> 7;
  S.random_state ^= S.random_state << 17;
  return S.random_state;
}

// Not memcpy, which a sanitizer would watch.
inline void copy_unwatched(void* to, const void* from, size_t bytes) {
#if defined(__x86_64__)
  asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
#else
  for (size_t i = 0; i < bytes; ++i) static_cast<volatile char*>(to)[i] = static_cast<const char*>(from)[i];
#endif
}

inline bool same_place(emu_where a, emu_where b) {
  return a.line == b.line && (a.file == b.file || !strcmp(a.file, b.file));
}

inline void set_ready(Fiber& fiber) {
  fiber.state = State::ready;
  unsigned place = B->position[fiber.linear];
  B->ready[place >> 6] |= 1ull << (place & 63);
}
inline void set_waiting(Fiber& fiber, State state, emu_where where) {
  fiber.state = state;
  fiber.where = where;
  unsigned place = B->position[fiber.linear];
  B->ready[place >> 6] &= ~(1ull << (place & 63));
}

// Leaves the current fiber and runs `to`; returns when someone switches back.
inline void run(Fiber& to) {
  Fiber& from = *S.current;
  S.current = &to;
  ++S.switches;
  bool to_host = &to == &S.host;
  if (!to_host) {
    emu_ctx.thread_idx = to.index;
    emu_ctx.linear = to.linear;
    emu_ctx.lane = to.linear & 31;
  }
  switch_stacks(from, to, &from == &S.host, to_host, S.host_stack);
}

// The next ready fiber in schedule order, starting at place `from`; null when all wait.
inline Fiber* next_ready(unsigned from) {
  unsigned words = B->ready.size(), word = (from >> 6) % words;
  uint64_t bits = B->ready[word] & (~0ull << (from & 63));
  for (unsigned i = 0; i <= words; ++i) {
    if (bits) return &B->fibers[B->order[(word << 6) + __builtin_ctzll(bits)]];
    word = word + 1 == words ? 0 : word + 1;
    bits = B->ready[word];
  }
  return nullptr;
}

inline void poll_conditions() {
  for (unsigned i = 0; B->waiting_on_condition && i < S.num_threads; ++i) {
    Fiber& fiber = B->fibers[i];
    if (fiber.state == State::condition && fiber.ready(fiber.ready_state)) {
      --B->waiting_on_condition;
      set_ready(fiber);
    }
  }
}

[[noreturn]] inline void report_deadlock() {
  static const char* const kNames[] = {"", "__syncthreads", "a named barrier", "a warp operation", "a wait"};
  char text[1024];
  int used = 0;
  unsigned shown = 0, waiting = 0;
  text[0] = 0;
  for (unsigned i = 0; i < S.num_threads; ++i) {
    const Fiber& f = B->fibers[i];
    if (f.state == State::ready || f.state == State::done) continue;
    ++waiting;
    if (shown == 6) continue;
    ++shown;
    used += snprintf(text + used, sizeof text - used, "%s thread (%u,%u,%u) in %s at %.80s:%d", shown > 1 ? "," : "",
                     f.index.x, f.index.y, f.index.z, kNames[int(f.state)], f.where.file, f.where.line);
    if (f.state == State::warp_op) used += snprintf(text + used, sizeof text - used, " (mask %08x)", f.mask);
  }
  emu_fail(S.current->where, "deadlock: %u threads wait for one another:%s%s", waiting, text,
           waiting > shown ? ", ..." : "");
}

// Fair: every ready thread gets its turn, the next place or a random one. Unfair: always the first ready thread of the
// order, so that some run as far ahead of the others as barriers allow. The two take turns after many switches, so that
// a thread may wait for another one in a loop.
inline bool is_fair() { return B->fair != bool(S.switches >> 20 & 1); }

// emu_blocks.cpp
void enter_block(Block& block);
void allocate_threads(Block& block, unsigned n);
bool begin_block(Block& block, uint64_t number, uint64_t of_all);  // false, with a message, where memory is missing
void end_block(Block& block);
void wait_for_blocks();  // for TSan
size_t guarded_bytes();  // of dynamic shared memory between protected pages
void entry();            // emu_runtime.cpp: what a thread does

// emu_cluster.cpp
void forget_deferred();
void check_deferred();  // at the end of a block

// For TSan, blocks run one after another, but are not ordered: they take two sets of threads in turn, begin after what
// the host did before the launch, and only the launch as a whole ends before what the host does next. Then races
// between neighbouring blocks are found. Static shared memory, which has one address for all blocks, is made unknown to
// TSan before each of them, and dynamic shared memory is freed at the end.
#if defined(EMU_TSAN)
constexpr bool for_tsan = true;
#else
constexpr bool for_tsan = false;
#endif

// emu_fault.cpp: signals and limits.
[[noreturn]] void stop_here(emu_where where);  // ends the launch for the reason in S.stop
class FaultHandlers {                           // in place while a launch runs
 public:
  FaultHandlers();
  ~FaultHandlers();
};

// Gives way after the current fiber was marked as waiting; returns when it is ready again.
inline void yield() {
  Fiber& me = *S.current;
  if (S.stop) stop_here(me.where);
  bool random = emu_ctx.random_schedule;
  if (random && B->waiting_on_condition && (next_random() & 3) == 0) poll_conditions();
  unsigned from = 0;
  if (is_fair()) from = random ? next_random() % S.num_threads : (B->position[me.linear] + 1) % S.num_threads;
  Fiber* next = next_ready(from);
  if (!next) {
    poll_conditions();
    next = next_ready(from);
  }
  if (!next && S.launch->cluster > 1 && S.blocks[B == S.blocks].alive) {  // perhaps the other block goes on
    enter_block(S.blocks[B == S.blocks]);
    poll_conditions();
    next = next_ready(0);
  }
  if (!next) report_deadlock();
  if (S.num_blocks > 1 && random && (next_random() & 63) == 0) {
    Block& other = S.blocks[B == S.blocks];
    if (other.alive) {  // outside of a cluster one of its threads is ready: else it would not have been left
      Block& mine = *B;
      enter_block(other);
      Fiber* of_other = next_ready(is_fair() ? next_random() % S.num_threads : 0);
      if (of_other)
        next = of_other;
      else
        enter_block(mine);
    }
  }
  if (next != &me) run(*next);
}

// emu_sync.cpp: what a thread that leaves the kernel changes for those who wait.
void leave_barriers(Fiber& fiber);
void reset_barriers();
void check_named_barriers();  // at the end of a block

}  // namespace emu_rt
