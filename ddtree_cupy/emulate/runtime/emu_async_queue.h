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
// A product of a warpgroup, as one thread has issued it (cuda_src/common/hopper_twins.cuh).
struct emu_product {
  float* d;
  unsigned registers[4];  // of A, where it comes from them
  const char *a, *b;
  void (*run)(void** lanes);
  int adds;
  unsigned group;
};
struct emu_async_queue {
  std::vector<emu_async_copy> pending;
  unsigned group = 0;  // number of the group being filled
  std::vector<emu_product> products;
  unsigned product_group = 0;
  void reset() {
    pending.clear();
    products.clear();
    group = product_group = 0;
  }
};
