// emu_blocks.cpp: the beginning and the end of a block: its place in the order, its threads, its shared memory.
#include "emu_scheduler.h"

#include <algorithm>
#include <numeric>

namespace emu_rt {

constexpr size_t kMostKept = size_t(1) << 28;  // bytes of shared memory of ended blocks; to free more, the host waits

static void fill_poison(char* begin, size_t bytes) {  // not memset: a sanitizer would check the red zones
#if defined(__x86_64__)
  asm volatile("rep stosb" : "+D"(begin), "+c"(bytes) : "a"(0xFF) : "memory");
#else
  for (volatile char* p = begin; bytes; ++p, --bytes) *p = char(0xFF);
#endif
}

void allocate_threads(Block& block, unsigned n) {
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

size_t guarded_bytes() { return (S.launch->shared_bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

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
bool begin_block(Block& block, uint64_t number, uint64_t of_all) {
  const emu_launch& l = *S.launch;
  const unsigned *grid = l.grid, *dim = l.block, n = S.num_threads;
  unsigned cluster = l.cluster;  // its blocks begin together
  uint64_t place = place_of(number / cluster, of_all / cluster) * cluster + number % cluster;
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
    fiber.has_arrived_cluster = false;
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
void wait_for_blocks() {
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

void end_block(Block& block) {
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

}  // namespace emu_rt
