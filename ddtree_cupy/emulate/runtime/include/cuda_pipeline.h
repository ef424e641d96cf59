// cuda_pipeline.h: the primitives for asynchronous copies into shared memory.
#pragma once
#include "ddtree_emulate.h"
inline void __pipeline_memcpy_async(void* to, const void* from, size_t bytes, size_t zeros = 0, EMU_FROM) {
  emu::async_copy(to, from, unsigned(bytes), unsigned(bytes - zeros), EMU_CALLER);
}
inline void __pipeline_commit() { emu::async_commit(); }
inline void __pipeline_wait_prior(size_t newest) { emu::async_wait(unsigned(newest)); }
