// emu_runtime.cpp: launches, the life of a thread, and failure.
#include "emu_scheduler.h"

#include <algorithm>

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

#if defined(EMU_ASAN)
static void name_thread(const char*) {
  const uint3 &b = emu_ctx.block_idx, &t = emu_ctx.thread_idx;
  fprintf(stderr, "in block (%u,%u,%u) thread (%u,%u,%u)\n", b.x, b.y, b.z, t.x, t.y, t.z);
}
#endif

void entry() {
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
    check_deferred();
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
  if (good && l.grid[0] % l.cluster) {
    snprintf(l.error, l.error_bytes, "no GPU accepts grid (%u,%u,%u) with clusters of %u blocks", l.grid[0], l.grid[1],
             l.grid[2], l.cluster);
    return false;
  }
  return good;
}

// Runs the block that began first, until one has ended.
static void run_blocks() {
  Block* first = nullptr;
  for (Block& block : S.blocks)
    if (block.alive && (!first || block.number < first->number)) first = &block;
  enter_block(*first);
  S.current = &S.host;
  EMU_RELEASE(&S.start_tag);
  Fiber* next = next_ready(0);
  if (!next) {  // what is left of a cluster
    poll_conditions();
    next = next_ready(0);
  }
  if (next) {
    run(*next);
  } else {
    S.failed = true;
    snprintf(S.launch->error, S.launch->error_bytes, "deadlock: block (%u,%u,%u) waits for one that has ended",
             B->index.x, B->index.y, B->index.z);
  }
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
  S.num_blocks = l.cluster > 1 || (!for_tsan && l.seed && blocks > 1) ? 2 : 1;
  S.cluster_arrived = S.cluster_generation = 0;
  forget_deferred();
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
    const bool both = l.cluster < 2 || !(S.blocks[0].alive || S.blocks[1].alive);  // a cluster begins as a whole
    for (unsigned i = 0; both && i < S.num_blocks && begun < blocks && !S.failed; ++i) {
      Block& block = S.blocks[for_tsan && l.cluster < 2 ? begun & 1 : i];
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
