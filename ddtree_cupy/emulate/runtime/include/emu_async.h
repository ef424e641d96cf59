// emu_async.h: building blocks for the host twins of cp.async (cuda_src/common/ptx.cuh).
//
// A copy is only queued; it happens at the wait. A kernel that reads the target without waiting therefore reads poison.
// With a schedule seed each copy happens at once or at the wait, by chance, so that a buffer refilled while others
// still read it is found too. Copies that nobody waits for never happen.
#pragma once
#include "../emu_async_queue.h"
#include "emu_language.h"

namespace emu {

inline void perform(const emu_async_copy& copy) {
  memcpy(copy.to, copy.from, copy.source_bytes);
  memset(static_cast<char*>(copy.to) + copy.source_bytes, 0, copy.bytes - copy.source_bytes);
}

// cp.async: `bytes` (4, 8 or 16) from global to shared memory; of these only `source_bytes` are read.
inline void async_copy(void* to, const void* from, unsigned bytes, unsigned source_bytes, emu_where where) {
  if (bytes != 4 && bytes != 8 && bytes != 16) emu_fail(where, "cp.async of %u bytes: 4, 8 or 16", bytes);
  if (source_bytes > bytes) emu_fail(where, "cp.async reads %u of %u bytes", source_bytes, bytes);
  if (reinterpret_cast<size_t>(to) % bytes || (source_bytes && reinterpret_cast<size_t>(from) % bytes))
    emu_fail(where, "cp.async of %u bytes: an address is not aligned to them", bytes);
  if (!is_shared(to)) emu_fail(where, "cp.async writes to memory that is not shared");
  if (source_bytes && is_shared(from)) emu_fail(where, "cp.async reads shared memory: it is for global memory");
  emu_async_queue& queue = *emu_thread_queue();
  emu_async_copy copy{to, from, bytes, source_bytes, queue.group};
  if (emu_ctx.random_schedule && (emu_random() & 1))
    perform(copy);
  else
    queue.pending.push_back(copy);
}

// cp.async.commit_group
inline void async_commit() { ++emu_thread_queue()->group; }

// cp.async.wait_group `allowed`: all but the `allowed` newest groups are complete afterwards.
inline void async_wait(unsigned allowed) {
  emu_async_queue& queue = *emu_thread_queue();
  size_t kept = 0;
  for (size_t i = 0; i < queue.pending.size(); ++i) {
    emu_async_copy copy = queue.pending[i];
    if (copy.group + allowed < queue.group)
      perform(copy);
    else
      queue.pending[kept++] = copy;
  }
  queue.pending.resize(kept);
}
// cp.async.wait_all
inline void async_wait_all() {
  async_commit();
  async_wait(0);
}

}  // namespace emu
