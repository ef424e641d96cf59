// emu_async_queue.h: the cp.async copies one thread has issued and not yet waited for.
#pragma once
#include <cstddef>
#include <vector>

struct emu_async_copy {
  void* to;
  const void* from;
  unsigned bytes, source_bytes;  // the rest, bytes - source_bytes, is filled with zeros
  unsigned group;
};
struct emu_async_queue {
  std::vector<emu_async_copy> pending;
  unsigned group = 0;  // number of the group being filled
  void reset() {
    pending.clear();
    group = 0;
  }
};
