// emu_fault.cpp: a signal inside a kernel ends the launch with a message instead of ending the process.
//
// The handler runs on a stack of its own. It notes what happened and where, and returns into `land`, on the fiber's
// stack, which leaves the kernel for good: the fiber is never continued. Ctrl-C and the time limit end a launch in the
// same way, but only where the kernel's own code runs; elsewhere they leave a note that `yield` reads.
#include "emu_scheduler.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

namespace emu_rt {

#if defined(EMU_ASAN) || defined(EMU_TSAN)

FaultHandlers::FaultHandlers() {}  // the sanitizer has handlers, and reports more
FaultHandlers::~FaultHandlers() {}

#else

static const int kTimeLimit = SIGRTMAX - 2;
static const int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGINT, kTimeLimit};
constexpr int kNumSignals = 7;
constexpr int kFramesToAbort = 6;  // from the handler to the caller of abort(); more: the heap is broken, let it end

static struct sigaction previous[kNumSignals];
static char handler_stack[64 * 1024];
static stack_t previous_stack;
static pthread_t owner;
static timer_t timer;
static bool has_timer;
static uint64_t text_begin, text_end, text_base;  // of the library of the kernel

static int find_text(dl_phdr_info* info, size_t, void* wanted) {
  uint64_t address = reinterpret_cast<uint64_t>(wanted);
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& segment = info->dlpi_phdr[i];
    uint64_t begin = info->dlpi_addr + segment.p_vaddr;
    if (segment.p_type != PT_LOAD || address < begin || address >= begin + segment.p_memsz) continue;
    text_base = info->dlpi_addr;
    text_begin = begin;
    text_end = begin + segment.p_memsz;
    return 1;
  }
  return 0;
}

static bool is_kernel_code(uint64_t pc) { return pc >= text_begin && pc < text_end; }

static uint64_t program_counter(const ucontext_t& context) {
#if defined(__x86_64__)
  return context.uc_mcontext.gregs[REG_RIP];
#else
  return context.uc_mcontext.pc;
#endif
}

static void land();

static void return_into_land(ucontext_t& context) {
  uint64_t top = reinterpret_cast<uint64_t>(S.current->stack + kStackBytes) - 64;
#if defined(__x86_64__)
  context.uc_mcontext.gregs[REG_RIP] = reinterpret_cast<greg_t>(&land);
  context.uc_mcontext.gregs[REG_RSP] = greg_t(top - 8);  // as behind a call
  context.uc_mcontext.gregs[REG_EFL] &= ~greg_t(0x400);  // string instructions go forward
#else
  context.uc_mcontext.pc = reinterpret_cast<uint64_t>(&land);
  context.uc_mcontext.sp = top;
  context.uc_mcontext.regs[30] = 0;
#endif
}

// Notes the calls that are in the kernel's code; returns how many frames lie above the innermost one.
static int note_places(uint64_t pc) {
  emu_fault& fault = S.launch->fault;
  if (is_kernel_code(pc)) fault.places[fault.num_places++] = pc - text_base;
  void* frames[48];
  int found = backtrace(frames, 48), above = found;
  for (int i = 0; i < found; ++i) {
    uint64_t frame = reinterpret_cast<uint64_t>(frames[i]);
    if (!is_kernel_code(frame)) continue;
    if (above == found) above = i;
    if (frame != pc && fault.num_places < 16) fault.places[fault.num_places++] = frame - 1 - text_base;
  }
  return above;
}

static void pass_on(int number, siginfo_t* info, void* context) {
  int i = 0;
  while (kSignals[i] != number) ++i;
  const struct sigaction& other = previous[i];
  if (number != SIGINT && number != kTimeLimit) {
    sigaction(number, &other, nullptr);  // and the instruction is tried again
  } else if (other.sa_flags & SA_SIGINFO) {
    other.sa_sigaction(number, info, context);
  } else if (other.sa_handler != SIG_DFL && other.sa_handler != SIG_IGN) {
    other.sa_handler(number);
  }
}

static void on_signal(int number, siginfo_t* info, void* raw) {
  ucontext_t& context = *static_cast<ucontext_t*>(raw);
  bool is_mine = S.launch && pthread_equal(pthread_self(), owner);
  bool is_request = number == SIGINT || number == kTimeLimit;
  if (!is_mine || (!is_request && S.current == &S.host)) return pass_on(number, info, raw);
  uint64_t pc = program_counter(context);
  emu_fault& fault = S.launch->fault;
  if (is_request) {
    if (S.failed) return;
    S.stop = number == SIGINT ? kFaultInterrupt : kFaultTimeout;
    if (S.current == &S.host || !is_kernel_code(pc)) return;
    fault.kind = S.stop;
    note_places(pc);
    return return_into_land(context);
  }
  if (note_places(pc) > kFramesToAbort && number == SIGABRT) return pass_on(number, info, raw);
  fault.kind = kFaultSignal;
  fault.signal = number;
  fault.code = info->si_code;
  fault.address = reinterpret_cast<uint64_t>(info->si_addr);
#if defined(__x86_64__)
  fault.is_write = context.uc_mcontext.gregs[REG_ERR] >> 1 & 1;
#endif
  uint64_t stack = reinterpret_cast<uint64_t>(S.current->stack);
  fault.is_stack = fault.address < stack && fault.address >= stack - kGuardBytes;
  uint64_t pages = reinterpret_cast<uint64_t>(B->guarded) - kPageBytes;
  if (B->guarded && fault.address - pages < 2 * kPageBytes + guarded_bytes()) {
    fault.shared_offset = fault.address - reinterpret_cast<uint64_t>(B->dynamic_shared);
    fault.shared_bytes = S.launch->shared_bytes;
  }
  return_into_land(context);
}

// Ends the launch; Python adds the place and what happened.
static void land() {
  S.failed = true;
  const uint3 &b = emu_ctx.block_idx, &t = emu_ctx.thread_idx;
  snprintf(S.launch->error, S.launch->error_bytes, "block (%u,%u,%u) thread (%u,%u,%u): ", b.x, b.y, b.z, t.x, t.y,
           t.z);
  run(S.host);
  abort();
}

FaultHandlers::FaultHandlers() {
  S.stop = 0;
  S.launch->fault = emu_fault();
  S.steps_left = S.launch->max_steps ? S.launch->max_steps : ~0ull;
  owner = pthread_self();
  uint64_t thunk = reinterpret_cast<uint64_t>(S.thunk);
  if (!is_kernel_code(thunk)) {
    static void* warm_up[1];
    backtrace(warm_up, 1);  // loads what it needs, which a signal handler should not
    dl_iterate_phdr(find_text, reinterpret_cast<void*>(S.thunk));
  }
  stack_t stack{};
  stack.ss_sp = handler_stack;
  stack.ss_size = sizeof handler_stack;
  sigaltstack(&stack, &previous_stack);
  struct sigaction action {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  for (int i = 0; i < kNumSignals; ++i) sigaction(kSignals[i], &action, &previous[i]);
  has_timer = false;
  if (S.launch->timeout_ns) {
    sigevent event{};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = kTimeLimit;
    event._sigev_un._tid = pid_t(syscall(SYS_gettid));
    has_timer = !timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer);
    itimerspec limit{};
    limit.it_value.tv_sec = time_t(S.launch->timeout_ns / 1000000000);
    limit.it_value.tv_nsec = long(S.launch->timeout_ns % 1000000000);
    limit.it_interval.tv_nsec = 2000000;  // until one falls into the kernel's own code
    if (has_timer) timer_settime(timer, 0, &limit, nullptr);
  }
}

FaultHandlers::~FaultHandlers() {
  S.launch = nullptr;
  if (has_timer) timer_delete(timer);
  for (int i = 0; i < kNumSignals; ++i) sigaction(kSignals[i], &previous[i], nullptr);
  if (!(previous_stack.ss_flags & SS_ONSTACK)) sigaltstack(&previous_stack, nullptr);
}

#endif

void stop_here(emu_where where) {
  static const char* const kReasons[] = {"", "", "out of steps", "out of time", "interrupted"};
  S.launch->fault.kind = S.stop;
  emu_fail(where, "%s", kReasons[S.stop]);
}

}  // namespace emu_rt

using namespace emu_rt;

// Called at the beginning of every basic block of a module that counts steps.
EMU_API void __sanitizer_cov_trace_pc() {
  if (S.steps_left--) return;
#if !defined(EMU_ASAN) && !defined(EMU_TSAN)
  S.steps_left = 0;
  if (S.current == &S.host || S.failed) return;
  S.launch->fault.kind = kFaultSteps;
  note_places(reinterpret_cast<uint64_t>(__builtin_return_address(0)) - 1);
  land();
#endif
}
