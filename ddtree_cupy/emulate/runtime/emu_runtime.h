// emu_runtime.h: what translated kernels may ask of the emulator runtime.
//
// One CUDA block runs on one host thread; each CUDA thread of the block is a fiber. A fiber gives way only inside
// the functions below, so everything between two of them is atomic as far as the schedule is concerned.
#pragma once
#include <cstddef>
#include <cstdint>

#define EMU_API extern "C" __attribute__((visibility("default")))

struct uint3 {  // CUDA's, of threadIdx and its relatives
  unsigned x, y, z;
};

// A place in the kernel source, as the `#line` directives of the flattened text name it.
struct emu_where {
  const char* file;
  int line;
};
#define EMU_HERE (emu_where{__FILE__, __LINE__})

constexpr uintptr_t kNoShared = 0x8000;  // an address that no memory has, to tell this fault from a null pointer

// The fiber that runs now.
struct emu_context {
  uint3 thread_idx, block_idx, block_dim, grid_dim;
  unsigned lane, linear;       // linear = x + dim.x * (y + dim.y * z), lane = linear % 32
  void* dynamic_shared;        // exactly `dynamic_bytes` long; kNoShared when that is 0
  size_t dynamic_bytes;
  unsigned random_schedule;    // 0 for seed 0
  unsigned cut_sums;           // as in emu_launch
};
EMU_API emu_context emu_ctx;

// How a launch was ended from outside the kernel's own code: by a signal or a limit.
struct emu_fault {
  int kind;              // 0: it was not; else one of emu_fault_kind
  int signal, code;      // of a signal, as in siginfo_t
  unsigned is_write, is_stack;
  uint64_t address;      // that could not be accessed
  int64_t shared_offset;  // of it in dynamic shared memory, if a page beside that was hit
  uint64_t shared_bytes;  // 0 else
  unsigned num_places;
  uint64_t places[16];   // offsets into the library of the kernel, the innermost call first
};
// Where dynamic shared memory lies: anywhere; directly in front of a protected page, there at a multiple of 16 or of the
// declared alignment; directly behind a protected page.
enum emu_guard { kGuardNone, kGuardEnd, kGuardAlignedEnd, kGuardStart };
enum emu_fault_kind { kFaultSignal = 1, kFaultSteps, kFaultTimeout, kFaultInterrupt };

// One launch, filled by Python (ctypes twin: emulate/_native.py).
struct emu_launch {
  unsigned grid[3], block[3];
  uint64_t shared_bytes;       // dynamic shared memory
  uint64_t shared_alignment;   // its address is a multiple of this power of two, and of no larger one
  char *static_begin, *static_end;  // the section that holds every `__shared__` object of the module
  uint64_t seed;               // of the schedule, see order_threads; 0: nothing is random
  unsigned strict;             // 1: report barrier and mask misuse that some GPUs would forgive
  unsigned flush_subnormals;   // 1: the FPU treats subnormals as zero, as CuPy's -ftz=true does
  unsigned cut_sums;           // 1: twins of matrix instructions cut sums off as tensor cores do
  unsigned cluster;            // blocks of a cluster, 1 or 2, along x
  char* error;                 // message out
  uint64_t error_bytes;
  uint64_t switches;           // fiber switches done, out
  unsigned guard_shared;       // one of emu_guard
  uint64_t max_steps;          // basic blocks that may run, in a module that counts them; 0: any number
  uint64_t timeout_ns;         // CPU time that the launch may take; 0: any
  emu_fault fault;             // out
};
typedef void (*emu_thunk)(void** args);
EMU_API int emu_run(emu_launch* launch, emu_thunk thunk, void** args);  // 0 or, with `error` filled, 1

// Ends the launch with a message that names block, thread and place. Does not return.
EMU_API void emu_fail(emu_where where, const char* format, ...) __attribute__((noreturn, format(printf, 2, 3)));

// __syncthreads and its relatives; `kind` 0 plain, 1 count, 2 and, 3 or.
EMU_API int emu_syncthreads(emu_where where, int kind, int predicate);

// Warp collective. Deposits up to 16 bytes and returns the 32 deposits (16-byte slots), valid until the second next
// collective on this mask. `op` tells operations apart, `arrived` receives the lanes that took part.
EMU_API const unsigned char* emu_collect(unsigned mask, int op, const void* in, unsigned bytes, unsigned* arrived,
                                         emu_where where);

// Warp collective for host twins of PTX instructions: every lane deposits a pointer, the last one to arrive runs
// `fn(lanes)` once (lanes[i] is null for lanes outside the mask), then all go on.
EMU_API void emu_collect_fn(unsigned mask, int op, void* mine, void (*fn)(void** lanes), emu_where where);

// bar.sync / bar.arrive `id` (0..15) for `count` threads. The last thread to arrive runs `fn(deposits, count)` if
// given, with the pointers in the order of thread numbers (a twin of a warpgroup-wide instruction). Barrier 0 for all
// threads of the block is __syncthreads; for fewer threads it must not be in use at the same time as __syncthreads.
EMU_API void emu_named_barrier(int id, unsigned count, void* mine, void (*fn)(void** deposits, unsigned count),
                               emu_where where);
// emu_named_arrive does not wait for them, but in a random schedule others may run before it returns. It does not take
// barrier 0 for all threads of the block.
EMU_API void emu_named_arrive(int id, unsigned count, emu_where where);

// For TSan, to which relaxed atomics order nothing: an atomic access acquires its address, and releases it once a thread
// of its block has executed __threadfence.
EMU_API void emu_fence(void);
EMU_API void emu_order_atomic(const void* address);

// Blocks this thread until `ready(state)` is true (twin of an mbarrier wait). A wait that can never end is a
// reported deadlock.
EMU_API void emu_wait_until(int (*ready)(void* state), void* state, emu_where where);

// Twins of mbarriers, 8 bytes of shared memory each. An arrival may expect bytes, which copies bring that were deferred
// to the barrier; `state` of such a copy has at most 128 bytes.
EMU_API void emu_mbarrier_init(void* barrier, unsigned arrivals, emu_where where);
EMU_API void emu_mbarrier_arrive(void* barrier, unsigned expected_bytes, emu_where where);
EMU_API void emu_mbarrier_wait(void* barrier, unsigned parity, emu_where where);
EMU_API void emu_defer(void* barrier, unsigned bytes, void (*perform)(void* state), const void* state,
                       unsigned state_bytes, emu_where where);

// Twins of a cluster of two blocks: which one this is, a place in the other's dynamic shared memory, and the barrier of
// all threads of both.
EMU_API unsigned emu_cluster_rank(emu_where where);
EMU_API void* emu_cluster_place(const void* address, unsigned rank, emu_where where);
EMU_API void emu_cluster_arrive(emu_where where);
EMU_API void emu_cluster_wait(emu_where where);

EMU_API uint64_t emu_random(void);         // next number of the schedule's generator
EMU_API struct emu_async_queue* emu_thread_queue(void);  // this thread's pending cp.async copies (emu_async.h)
