// emu_fiber.h: a stack per CUDA thread and the switch between them.
//
// x86-64 saves six registers by hand (20 to 50 ns a switch); other machines, and -DEMU_UCONTEXT, use swapcontext,
// which is about ten times slower because it makes system calls. This file and the rest of the runtime are never
// instrumented by a sanitizer: they only tell it about the switches.
#pragma once
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "emu_runtime.h"

#if !defined(__x86_64__) && !defined(EMU_UCONTEXT)
#define EMU_UCONTEXT
#endif
#if defined(EMU_UCONTEXT)
#include <ucontext.h>
#endif
#if defined(EMU_ASAN)
extern "C" void __asan_set_error_report_callback(void (*)(const char*));
extern "C" void __sanitizer_start_switch_fiber(void**, const void*, size_t);
extern "C" void __sanitizer_finish_switch_fiber(void*, const void**, size_t*);
extern "C" void __asan_poison_memory_region(void const volatile*, size_t);
extern "C" void __asan_unpoison_memory_region(void const volatile*, size_t);
#endif
#if defined(EMU_TSAN)
extern "C" void* __tsan_create_fiber(unsigned);
extern "C" void __tsan_destroy_fiber(void*);
extern "C" void __tsan_switch_to_fiber(void*, unsigned);
extern "C" void* __tsan_get_current_fiber(void);
extern "C" void __tsan_set_fiber_name(void*, const char*);
extern "C" void __tsan_java_init(uintptr_t, uintptr_t);
extern "C" void __tsan_java_alloc(uintptr_t, uintptr_t);
extern "C" void __tsan_java_free(uintptr_t, uintptr_t);
extern "C" void __tsan_acquire(void*);
extern "C" void __tsan_release(void*);
#define EMU_ACQUIRE(p) __tsan_acquire((void*)(p))
#define EMU_RELEASE(p) __tsan_release((void*)(p))
#else
#define EMU_ACQUIRE(p) ((void)(p))
#define EMU_RELEASE(p) ((void)(p))
#endif

namespace emu_rt {

constexpr size_t kStackBytes = 256 * 1024;  // address space only; a page below it is protected
constexpr size_t kPageBytes = 4096 * 16;  // a whole number of pages, of 64 KiB at most
constexpr size_t kGuardBytes = kPageBytes;   // 64 KiB: also right for large-page kernels

enum class State : unsigned char { ready, block_barrier, named_barrier, warp_op, condition, done };

struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  uint3 index{};
  unsigned linear = 0;
  State state = State::done;
  emu_where where{"", 0};
  unsigned mask = 0;        // of the warp operation it waits in
  int barrier = 0;          // named barrier it waits at
  bool has_arrived_cluster = false;  // and not yet waited
  unsigned cluster_generation = 0;   // in which it has
  int (*ready)(void*) = nullptr;
  void* ready_state = nullptr;
  void* tsan = nullptr;
  void* fake_stack = nullptr;
#if defined(EMU_UCONTEXT)
  ucontext_t context;
#endif
};

inline void allocate_stack(Fiber& fiber) {
  void* base = mmap(nullptr, kStackBytes + kGuardBytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED || mprotect(base, kGuardBytes, PROT_NONE)) {
    perror("ddtree_cupy.emulate: no memory for a thread stack");
    abort();
  }
  fiber.stack = static_cast<char*>(base) + kGuardBytes;
}

#if !defined(EMU_UCONTEXT)
extern "C" void emu_swap(void** save, void* load);  // emu_runtime.cpp
#endif

// Makes `fiber` start in `entry` at its next switch.
inline void prepare(Fiber& fiber, void (*entry)()) {
  fiber.fake_stack = nullptr;
#if defined(EMU_ASAN)
  __asan_unpoison_memory_region(fiber.stack, kStackBytes);  // a failed launch leaves frames behind
#endif
#if defined(EMU_UCONTEXT)
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
#else
  void** top = reinterpret_cast<void**>(fiber.stack + kStackBytes);
  *--top = nullptr;  // keeps the ABI's alignment at entry, and ends back traces
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.stack_pointer = top;
#endif
}

// The host side's stack, learnt at the first switch away from it (ASan wants it on the way back).
struct HostStack {
  const void* bottom = nullptr;
  size_t bytes = 0;
};

inline void switch_stacks(Fiber& from, Fiber& to, bool from_host, bool to_host, HostStack& host) {
  (void)from_host, (void)to_host, (void)host;
#if defined(EMU_TSAN)
  __tsan_switch_to_fiber(to.tsan, 1);  // 1: the switch itself orders nothing, only barriers do
#endif
#if defined(EMU_ASAN)
  bool leaving_for_good = from.state == State::done && !from_host;
  __sanitizer_start_switch_fiber(leaving_for_good ? nullptr : &from.fake_stack, to_host ? host.bottom : to.stack,
                                 to_host ? host.bytes : kStackBytes);
#endif
#if defined(EMU_UCONTEXT)
  swapcontext(&from.context, &to.context);
#else
  emu_swap(&from.stack_pointer, to.stack_pointer);
#endif
#if defined(EMU_ASAN)
  const void* bottom;
  size_t bytes;
  __sanitizer_finish_switch_fiber(from.fake_stack, &bottom, &bytes);
#endif
}

// First thing a fiber does.
inline void on_fiber_entry(HostStack& host) {
  (void)host;
#if defined(EMU_ASAN)
  const void* bottom;
  size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (!host.bottom) host = {bottom, bytes};
#endif
}

}  // namespace emu_rt
