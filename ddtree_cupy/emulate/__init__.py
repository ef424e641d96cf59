"""Run CUDA kernels on the CPU, without a GPU: the same `.cu` files, compiled by g++ or clang++.

Every CUDA thread of a block is a fiber with its own stack; blocks run one after another, or two at a time. Between two
synchronisation points a thread is never interrupted. At each of them a seed decides which thread continues, fairly or
not, which fuzzes the schedule (see `active`). Shared memory is filled with 0xFF (NaN, -1) before each block. Misuse of
barriers and warp operations, wild pointers, traps and full stacks are reported as `EmulatorError` with block, thread
and source line, and Python goes on; `check` guards every array, too, and ends endless loops; sanitizers find the rest
(`sanitizer_environment`).

    active(seed=0)                  with-block: NumPy arrays run the library's kernels here
    Module(code_or_path, ...)       your own `.cu`, with the interface of cupy.RawModule
    check(kernel, grid, block, args)  one launch on guarded copies of the arrays
    available()                     (True, "") or (False, why not)
    sanitizer_environment(kind)     variables for a child process under asan, ubsan, asan+ubsan or tsan (g++)
    sparse_array(shape, dtype)      huge arrays that take memory only where they are touched

What it is not
--------------
- No performance model, no coalescing, no occupancy, no registers.
- Races between two synchronisation points show only through the seeds and under `tsan`, which sees those between
  blocks, too. A block that spins on another one is reported as a deadlock or reaches the time limit.
- Floats do not equal those of a GPU bit for bit: only `fmaf` is fused, `__expf` and `rsqrtf` are accurate, and matrix
  instructions sum in another order, unless `active(cut_sums=True)` makes them cut sums off as those of an H200 do.
  Compare floats by tolerance; integers and comparisons are exact. Subnormals are flushed by default, float64 ones too
  (see `Module`).
- Threads run one after another, so memory is always consistent: fences matter to `tsan` alone, and code that relies on
  `volatile` works here although it may fail on a GPU.
- The host compiler accepts code that NVRTC rejects, and the reverse: run the compile check, too (`ddtree kernels`).
- Inline PTX needs a host twin under `#ifdef DDTREE_EMULATE`, as in `cuda_src/common/ptx.cuh`; `emu_runtime.h` and
  `emu_async.h` in `runtime/` offer what twins need. Textures, CUB, `mma.h`, groups of blocks and some more are refused
  by name (docs/check_kernels.md), as are `__shared__` objects with constructors and dynamic shared memory declared
  outside a function.
- A pointer that is wrong, but leads into memory of this process, is found by `check` and sanitizers alone.
- One launch at a time per process. Linux on x86-64; aarch64 through `ucontext`, slower.
"""

from ddtree_cupy.emulate._build import find_compiler as _find_compiler
from ddtree_cupy.emulate._build import sanitizer_environment, unsupported_reason
from ddtree_cupy.emulate._checked_launch import check
from ddtree_cupy.emulate._module import Function, Module
from ddtree_cupy.emulate._sparse import sparse_array
from ddtree_cupy.emulate._state import active, current_seed, is_active

__all__ = [
    "Function",
    "Module",
    "active",
    "available",
    "check",
    "compiler",
    "current_seed",
    "is_active",
    "sanitizer_environment",
    "sparse_array",
]


def available() -> tuple[bool, str]:
    """Return whether kernels can run on the CPU here, and if not, why not."""
    reason = unsupported_reason()
    return not reason, reason


def compiler() -> str:
    """Return the path and version of the compiler in use."""
    found = _find_compiler()
    return f"{found.path} ({found.version})"
