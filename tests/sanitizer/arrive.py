"""Where racecheck misreads `bar.arrive`: `python tests/sanitizer/arrive.py {arrive,sync}` runs one kernel.

Two warps meet at a barrier of their own, write, and arrive at a second barrier; the third warp waits there, and reads.
An arrival orders what its thread wrote before (PTX ISA, "bar, barrier"), so nothing races. racecheck of CUDA 13.0 still
reports each byte; with `sync` the writers wait at the second barrier, too, and it reports none. It seems to order
accesses by how many barriers a thread has waited at, which an arrival does not carry over.
"""

import sys

import numpy as np

SOURCE = r"""
#define WAIT(id, threads) asm volatile("bar.sync " #id ", " #threads ";" ::: "memory")
#ifdef ARRIVE
#define LEAVE(id, threads) asm volatile("bar.arrive " #id ", " #threads ";" ::: "memory")
#else
#define LEAVE(id, threads) WAIT(id, threads)
#endif
extern "C" __global__ void hand_over(int* out) {
  __shared__ int numbers[64];
  const int thread = threadIdx.x;
  if (thread < 64) {
    WAIT(1, 64);
    numbers[thread] = thread;
    LEAVE(2, 96);
  } else {
    WAIT(2, 96);
    out[thread - 64] = numbers[thread - 64] + numbers[thread - 32];
  }
}
"""


def main(form):
    import cupy as cp

    options = ("--std=c++17", "-DARRIVE") if form == "arrive" else ("--std=c++17",)
    out = cp.zeros(32, np.int32)
    cp.RawModule(code=SOURCE, options=options).get_function("hand_over")((1,), (96,), (out,))
    np.testing.assert_array_equal(cp.asnumpy(out), 2 * np.arange(32) + 32)


if __name__ == "__main__":
    main(sys.argv[1])
