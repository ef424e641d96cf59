"""What CUDA has and the emulator has not: named where a source does not compile, with what to use instead."""

import re
from typing import NamedTuple

from ddtree_cupy.emulate._translate import blank_comments, place_of


class Refusal(NamedTuple):
    """A feature, how a source shows that it uses it, and what runs here."""

    feature: str
    pattern: str
    instead: str


REFUSALS = (
    Refusal(
        "textures and surfaces",
        r"\b(?:tex[123]D\w*|texCubemap\w*|surf[123]D\w*|cudaTextureObject_t|cudaSurfaceObject_t)\b",
        "read global memory with `__ldg`",
    ),
    Refusal("CUB", r"#\s*include\s*<cub/|\bcub::", "reduce or scan with shared memory or shuffles"),
    Refusal("Thrust", r"#\s*include\s*<thrust/|\bthrust::", "do this step in NumPy, or write it as a kernel"),
    Refusal(
        "mma.h",
        r"#\s*include\s*<mma\.h>|\bnvcuda::|\bwmma::",
        "use `mma.sync` behind a function with a host twin, as `common/ptx.cuh` has",
    ),
    Refusal(
        "groups of cooperative_groups that are not a thread block or a tile",
        r"\b(?:this_grid|this_cluster|this_multi_grid|grid_group|cluster_group|coalesced_threads|coalesced_group"
        r"|labeled_partition|binary_partition|invoke_one)\b",
        "launch a second kernel where the grid must wait; of a warp take `tiled_partition<32>` with a predicate",
    ),
    Refusal(
        "memcpy_async of cooperative_groups",
        r"\bmemcpy_async\b",
        "use `__pipeline_memcpy_async` of <cuda_pipeline.h>",
    ),
    Refusal(
        "libcu++ beyond the headers that C++ has, too",
        r"#\s*include\s*<cuda/(?!std/)|#\s*include\s*<cuda/std/(?:atomic|barrier|semaphore|latch)>"
        r"|\bcuda::(?!std\b)\w+",
        "use atomic functions, `__syncthreads` and `__pipeline_...`",
    ),
    Refusal("cuRAND", r"#\s*include\s*<curand|\bcurand\w*", "draw the numbers in NumPy and pass them"),
    Refusal("launches from a kernel", r"<<<", "launch from Python"),
    Refusal(
        "the CUDA runtime API in device code",
        r"\bcuda(?:Malloc|Free|Memcpy|Memset|DeviceSynchronize|StreamCreate|GetLastError|LaunchKernel)\w*\s*\(",
        "allocate and copy in Python",
    ),
    Refusal(
        "thread block clusters",
        r"\b__cluster(?!_dims__)\w*\s*\(|\bcluster(?:Dim|Idx)\b",
        "use the blocks of one grid, or for two blocks the functions of `common/hopper.cuh`",
    ),
    Refusal(
        "inverse error functions and Bessel functions of CUDA's math library",
        r"\b(?:erfinv|erfcinv|normcdfinv|cyl_bessel_i[01])f?\b",
        "compute them in NumPy and pass a table",
    ),
    Refusal(
        "video instructions beyond sums, differences, extremes and comparisons",
        r"\b__v(?:abs|add|avg|cmp|had|ib|im|max|min|neg|sad|set|sub)\w*[24]\s*\(",
        "unpack the halves or bytes with shifts",
    ),
    Refusal("the address space of constants", r"\b__is(?:Constant|GridConstant)\b", "`__isGlobal` and `__isShared`"),
    Refusal(
        "inline PTX without a host twin",
        r"\basm\b",
        "put it into a function that is C++ under `#ifdef DDTREE_EMULATE`, as in `common/ptx.cuh`",
    ),
)


def refusal_in(code: str) -> str:
    """Return in words the first feature of a source that does not run here, with its place; "" where there is none."""
    text = blank_comments(code)
    found = [(match.start(), refusal) for refusal in REFUSALS if (match := re.search(refusal.pattern, text))]
    if not found:
        return ""
    position, refusal = min(found, key=lambda pair: pair[0])
    return f"{place_of(text, position)}: {refusal.feature}: not in the emulator; {refusal.instead}"


def table() -> str:
    """Return the refusals as a table of the documentation."""
    rows = ["| not in the emulator | instead |", "|---|---|"]
    return "\n".join([*rows, *(f"| {refusal.feature} | {refusal.instead} |" for refusal in REFUSALS)]) + "\n"
