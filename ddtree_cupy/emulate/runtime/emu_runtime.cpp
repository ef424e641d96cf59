// emu_runtime.cpp: launches, the life of a thread, and failure.
#include "emu_scheduler.h"

#include <algorithm>
#include <numeric>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

emu_context emu_ctx;

#if !defined(EMU_UCONTEXT)
// Saves the callee-saved registers on this stack, changes stacks, restores theirs.
asm(".text\n.globl emu_swap\n.hidden emu_swap\n.type emu_swap,@function\nemu_swap:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
    ".size emu_swap,.-emu_swap\n");
#endif

namespace emu_rt {
// For TSan, blocks run one after another, but are not ordered: they take two sets of threads in turn, begin after what
// the host did before the launch, and only the launch as a whole ends before what the host does next. Then races
// between neighbouring blocks are found. Static shared memory, which has one address for all blocks, is made unknown to
// TSan before each of them, and dynamic shared memory is freed at the end.
#if defined(EMU_TSAN)
constexpr bool for_tsan = true;
constexpr size_t kMostKept = size_t(1) << 28;  // bytes; to free more, the host waits for the blocks
#else
constexpr bool for_tsan = false;
#endif
Scheduler S;
Block* B = S.blocks;

// Sets flush-to-zero and denormals-are-zero for the life of the object. The FPU has one switch for both widths, so
// float64 subnormals are flushed as well.
class FlushSubnormals {
 public:
  explicit FlushSubnormals(bool on) {
#if defined(__x86_64__)
    saved_ = _mm_getcsr();
    if (on) _mm_setcsr(saved_ | 0x8040u);
#elif defined(__aarch64__)
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    if (on) asm volatile("msr fpcr, %0" ::"r"(saved_ | (1ull << 24)));
#else
    (void)on;
#endif
  }
  ~FlushSubnormals() {
#if defined(__x86_64__)
    _mm_setcsr(unsigned(saved_));
#elif defined(__aarch64__)
    asm volatile("msr fpcr, %0" ::"r"(saved_));
#endif
  }

 private:
  uint64_t saved_ = 0;
};

static void fill_poison(char* begin, size_t bytes) {  // not memset: a sanitizer would check the red zones
#if defined(__x86_64__)
  asm volatile("rep stosb" : "+D"(begin), "+c"(bytes) : "a"(0xFF) : "memory");
#else
  for (volatile char* p = begin; bytes; ++p, --bytes) *p = char(0xFF);
#endif
}

#if defined(EMU_ASAN)
static void name_thread(const char*) {
  const uint3 &b = emu_ctx.block_idx, &t = emu_ctx.thread_idx;
  fprintf(stderr, "in block (%u,%u,%u) thread (%u,%u,%u)\n", b.x, b.y, b.z, t.x, t.y, t.z);
}
#endif

static void entry() {
  on_fiber_entry(S.host_stack);
  EMU_ACQUIRE(&S.start_tag);
  S.thunk(S.args);

  Fiber& me = *S.current;
  set_waiting(me, State::done, emu_where{"", 0});
  --B->alive;
  EMU_RELEASE(&S.done_tag);
  leave_barriers(me);
  if (B->alive) {
    yield();
  } else {
    check_named_barriers();
    run(S.host);
  }
  abort();  // nobody switches back to a finished thread
}

static bool check_launch(const emu_launch& l, uint64_t threads) {
  bool good = threads && threads <= 1024 && l.block[2] <= 64 && l.grid[0] && l.grid[0] <= 2147483647u && l.grid[1] &&
              l.grid[1] <= 65535 && l.grid[2] && l.grid[2] <= 65535;
  if (!good)
    snprintf(l.error, l.error_bytes, "no GPU accepts grid (%u,%u,%u) block (%u,%u,%u)", l.grid[0], l.grid[1],
             l.grid[2], l.block[0], l.block[1], l.block[2]);
  return good;
}

static void allocate_threads(Block& block, unsigned n) {
  size_t have = block.fibers.size();
  if (have < n) {
    block.fibers.resize(n);
    for (size_t i = have; i < n; ++i) allocate_stack(block.fibers[i]);
  }
  if (block.queues.size() < n) block.queues.resize(n);
#if defined(EMU_TSAN)
  for (unsigned i = 0; i < n; ++i)
    if (!block.fibers[i].tsan) block.fibers[i].tsan = __tsan_create_fiber(0);
#endif
  unsigned warps = (n + 31) / 32;
  if (block.warps.size() < warps) block.warps.resize(warps);
  block.order.assign((n + 63) / 64 * 64, 0);
  block.position.assign(n, 0);
  block.ready.assign((n + 63) / 64, 0);
}

// Chooses the order of a block's threads: by a random schedule shuffled, else by index, in odd blocks backwards. An
// unfair schedule keeps warps together, so that the first warp of the order can run ahead of the others; with bit 3 of
// the seed it does not, so that the last thread of the order waits until no other one can run.
static void order_threads(unsigned n, uint64_t block) {
  auto end = B->order.begin() + n;
  std::iota(B->order.begin(), end, 0u);
  B->fair = (block ^ S.launch->seed) >> 1 & 1;
  if (emu_ctx.random_schedule) {
    for (unsigned i = n - 1; i; --i) std::swap(B->order[i], B->order[next_random() % (i + 1)]);
    unsigned rank[32];
    for (unsigned i = n; i--;) rank[B->order[i] >> 5] = i;
    auto by_warp = [&](unsigned a, unsigned b) { return rank[a >> 5] < rank[b >> 5]; };
    if (!B->fair && !(S.launch->seed & 8)) std::stable_sort(B->order.begin(), end, by_warp);
  } else if (block & 1) {
    std::reverse(B->order.begin(), end);
  }
  for (unsigned i = 0; i < n; ++i) B->position[B->order[i]] = i;
}

void enter_block(Block& block) {
  char* begin = S.launch->static_begin;
  size_t bytes = S.launch->static_end - begin;
  if (S.loaded != &block) {
    if (S.loaded && S.loaded->alive) copy_unwatched(S.loaded->static_shared.data(), begin, bytes);
    copy_unwatched(begin, block.static_shared.data(), bytes);
  }
  S.loaded = B = &block;
  emu_ctx.block_idx = block.index;
  emu_ctx.dynamic_shared = block.dynamic_shared ? block.dynamic_shared : reinterpret_cast<void*>(kNoShared);
}

// Gives a block dynamic shared memory; false where there is no memory.
static bool allocate_shared(Block& block) {
  const emu_launch& l = *S.launch;
  if (l.guard_shared == kGuardNone) {
    if (posix_memalign(&block.allocated, 2 * l.shared_alignment, l.shared_alignment + l.shared_bytes)) {
      block.allocated = nullptr;
      return false;
    }
#if defined(EMU_ASAN)
    __asan_poison_memory_region(block.allocated, l.shared_alignment);  // so that s[-1] is reported
#endif
    block.dynamic_shared = static_cast<char*>(block.allocated) + l.shared_alignment;
    return true;
  }
  if (!block.guarded) {
    void* pages = mmap(nullptr, guarded_bytes() + 2 * kPageBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) return false;
    block.guarded = static_cast<char*>(pages) + kPageBytes;
    mprotect(block.guarded, guarded_bytes(), PROT_READ | PROT_WRITE);
  }
  char* last = block.guarded + guarded_bytes();
  size_t bytes = l.shared_bytes;
  if (l.guard_shared == kGuardAlignedEnd) bytes = (bytes + l.shared_alignment - 1) & ~(l.shared_alignment - 1);
  block.dynamic_shared = l.guard_shared == kGuardStart ? block.guarded : last - bytes;
  return true;
}

// Makes static shared memory unknown to TSan: an allocation by its interface for other languages does that.
static void forget_shared() {
#if defined(EMU_TSAN)
  static bool is_ready = false;
  if (!is_ready) __tsan_java_init(4096, (uintptr_t(1) << 47) - 8192);
  is_ready = true;
  uintptr_t begin = reinterpret_cast<uintptr_t>(S.launch->static_begin) & ~uintptr_t(7);
  uintptr_t end = (reinterpret_cast<uintptr_t>(S.launch->static_end) + 7) & ~uintptr_t(7);
  if (end == begin) return;
  __tsan_java_alloc(begin, end - begin);
  __tsan_java_free(begin, end - begin);
  __tsan_java_alloc(begin, end - begin);
#endif
}

// Which block is the n-th to run: odd seeds take them backwards, those with bit 2 in an order that jumps.
static uint64_t place_of(uint64_t number, uint64_t of_all) {
  uint64_t seed = S.launch->seed, hash = seed * 0x9E3779B97F4A7C15ull;
  if (seed & 4) {
    uint64_t first = (hash >> 16) % of_all, step = (hash >> 40) % of_all;
    while (std::gcd(step, of_all) != 1) ++step;  // at the latest at of_all + 1
    return uint64_t(((unsigned __int128)number * step + first) % of_all);
  }
  return seed & 1 ? of_all - 1 - number : number;
}

// Makes every thread of a block ready to run.
static bool begin_block(Block& block, uint64_t number, uint64_t of_all) {
  const emu_launch& l = *S.launch;
  const unsigned *grid = l.grid, *dim = l.block, n = S.num_threads;
  uint64_t place = place_of(number, of_all);
  block.number = number;
  block.index = {unsigned(place % grid[0]), unsigned(place / grid[0] % grid[1]), unsigned(place / grid[0] / grid[1])};
  block.static_shared.assign(l.static_end - l.static_begin, char(0xFF));
  block.has_fenced = false;
  forget_shared();
  if (S.loaded == &block) S.loaded = nullptr;
  if (l.shared_bytes) {
    if (!allocate_shared(block)) {
      snprintf(l.error, l.error_bytes, "no memory for %llu bytes of dynamic shared memory",
               (unsigned long long)l.shared_bytes);
      return false;
    }
    fill_poison(static_cast<char*>(block.dynamic_shared), l.shared_bytes);
  }
  B = &block;
  reset_barriers();
  order_threads(n, place);
  for (unsigned w = 0; w * 32 < n; ++w) {
    block.warps[w].num_groups = 0;
    block.warps[w].live = n - w * 32 >= 32 ? ~0u : (1u << (n - w * 32)) - 1;
  }
  for (unsigned i = 0; i < n; ++i) {
    Fiber& fiber = block.fibers[i];
    fiber.linear = i;
    fiber.index = {i % dim[0], i / dim[0] % dim[1], i / dim[0] / dim[1]};
    block.queues[i].reset();
    prepare(fiber, entry);
#if defined(EMU_TSAN)
    char name[96];
    snprintf(name, sizeof name, "block (%u,%u,%u) thread (%u,%u,%u)", block.index.x, block.index.y, block.index.z,
             fiber.index.x, fiber.index.y, fiber.index.z);
    __tsan_set_fiber_name(fiber.tsan, name);
#endif
    set_ready(fiber);
  }
  block.alive = n;
  return true;
}

// Tells TSan that all threads have ended before what the host does next, also those that a fault has left behind.
static void wait_for_blocks() {
#if defined(EMU_TSAN)
  EMU_ACQUIRE(&S.done_tag);
  for (Block& block : S.blocks)
    for (Fiber& fiber : block.fibers)
      if (fiber.state != State::done && fiber.tsan) {
        __tsan_switch_to_fiber(fiber.tsan, 0);  // 0: what this thread did is ordered before what follows
        __tsan_switch_to_fiber(S.host.tsan, 0);
      }
  for (void* memory : S.kept) free(memory);
  S.kept.clear();
  S.kept_bytes = 0;
#endif
}

static void end_block(Block& block) {
#if defined(EMU_ASAN)
  if (block.allocated) __asan_unpoison_memory_region(block.allocated, S.launch->shared_alignment);
#endif
#if defined(EMU_TSAN)
  if (block.allocated) S.kept.push_back(block.allocated);
  S.kept_bytes += S.launch->shared_bytes;
  block.allocated = nullptr;
  if (S.kept_bytes > kMostKept) wait_for_blocks();
#endif
  free(block.allocated);
  block.allocated = block.dynamic_shared = nullptr;
  block.alive = 0;
}

// Runs the block that began first, until one has ended.
static void run_blocks() {
  Block* first = nullptr;
  for (Block& block : S.blocks)
    if (block.alive && (!first || block.number < first->number)) first = &block;
  enter_block(*first);
  S.current = &S.host;
  EMU_RELEASE(&S.start_tag);
  run(*next_ready(0));
}

}  // namespace emu_rt

using namespace emu_rt;

EMU_API int emu_run(emu_launch* launch, emu_thunk thunk, void** args) {
  emu_launch& l = *launch;
  uint64_t threads = uint64_t(l.block[0]) * l.block[1] * l.block[2];
  l.error[0] = 0;
  if (!check_launch(l, threads)) return 1;
  unsigned n = unsigned(threads);
  S.launch = launch;
  S.thunk = thunk;
  S.args = args;
  S.failed = false;
  S.switches = 0;
  S.random_state = std::max<uint64_t>(l.seed * 0x9E3779B97F4A7C15ull + 1, 1);  // from 0, all numbers would be 0
  S.host_stack = HostStack();
  uint64_t blocks = uint64_t(l.grid[0]) * l.grid[1] * l.grid[2];
  S.num_threads = n;
  S.num_blocks = !for_tsan && l.seed && blocks > 1 ? 2 : 1;
  S.loaded = nullptr;
  for (unsigned i = 0; i < (for_tsan ? 2 : S.num_blocks); ++i) allocate_threads(S.blocks[i], n);
#if defined(EMU_TSAN)
  S.host.tsan = __tsan_get_current_fiber();
#endif
#if defined(EMU_ASAN)
  __asan_set_error_report_callback(name_thread);
#endif
  emu_ctx.block_dim = {l.block[0], l.block[1], l.block[2]};
  emu_ctx.grid_dim = {l.grid[0], l.grid[1], l.grid[2]};
  emu_ctx.dynamic_bytes = l.shared_bytes;
  emu_ctx.random_schedule = l.seed != 0;
  emu_ctx.cut_sums = l.cut_sums;

  FlushSubnormals flush(l.flush_subnormals);
  FaultHandlers handlers;
  uint64_t begun = 0;
  while (!S.failed) {
    for (unsigned i = 0; i < S.num_blocks && begun < blocks && !S.failed; ++i) {
      Block& block = S.blocks[for_tsan ? begun & 1 : i];
      if (!block.alive) S.failed = !begin_block(block, begun++, blocks);
    }
    if (S.failed || !(S.blocks[0].alive || S.blocks[1].alive)) break;
    run_blocks();
    if (!S.failed) end_block(*B);
  }
  wait_for_blocks();
  for (Block& block : S.blocks) {
    end_block(block);
    if (block.guarded) munmap(block.guarded - kPageBytes, guarded_bytes() + 2 * kPageBytes);
    block.guarded = nullptr;
  }
  l.switches = S.switches;
#if defined(EMU_TSAN)
  if (S.failed)  // their shadow call stacks are in the middle of the kernel
    for (Block& block : S.blocks)
      for (Fiber& fiber : block.fibers)
        if (fiber.tsan) {
          __tsan_destroy_fiber(fiber.tsan);
          fiber.tsan = nullptr;
        }
#endif
  if (S.stop == kFaultInterrupt) l.fault.kind = kFaultInterrupt;  // also where it came too late to end the launch
  return S.failed;
}

EMU_API void emu_fail(emu_where where, const char* format, ...) {
  if (!S.failed) {
    S.failed = true;
    char* out = S.launch->error;
    size_t room = S.launch->error_bytes;
    const uint3 &b = emu_ctx.block_idx, &t = emu_ctx.thread_idx;
    int used = snprintf(out, room, "block (%u,%u,%u) thread (%u,%u,%u): %s:%d: ", b.x, b.y, b.z, t.x, t.y, t.z,
                        where.file, where.line);
    va_list list;
    va_start(list, format);
    if (used > 0 && size_t(used) < room) vsnprintf(out + used, room - used, format, list);
    va_end(list);
  }
  EMU_RELEASE(&S.done_tag);
  run(S.host);
  abort();
}

EMU_API uint64_t emu_random(void) { return next_random(); }
EMU_API emu_async_queue* emu_thread_queue(void) { return &B->queues[S.current->linear]; }
EMU_API void emu_fence(void) { B->has_fenced = true; }
EMU_API void emu_order_atomic(const void* address) {
  (void)address;
  EMU_ACQUIRE(address);
  if (B->has_fenced) EMU_RELEASE(address);
}
