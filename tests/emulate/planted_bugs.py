"""Small kernels with one fault each, what finds it, and the smallest case in which it shows.

`{}` in a kernel is the line that is right or wrong. A launch and its result follow from one number, n. Bugs with a
report re-state a fault of a public system in a kernel of our own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ddtree_cupy import emulate
from ddtree_cupy.errors import EmulatorError

I32, F32 = np.int32, np.float32
NO_STEPS = 200_000  # far more than any of these kernels needs
LARGEST = 100  # n


@dataclass(frozen=True)
class Case:
    """One launch: what `emulate.check` takes, and the results by the place of their argument."""

    grid: int
    block: int
    args: tuple[Any, ...]
    results: dict[int, Any]
    shared_mem: int = 0


@dataclass(frozen=True)
class Bug:
    """A fault; `modes` finds it at n = `shows`, the first of them from n = `smallest` on.

    A mode that is not listed may find it, too: sanitizers by luck, `steps` whatever `check` finds.
    """

    name: str
    kind: str
    parameters: str
    code: str
    right: str
    wrong: str
    case: Callable[[int], Case]
    shows: int
    modes: tuple[str, ...]
    smallest: int
    report: str = ""
    sizes: tuple[int, ...] = field(default=(1, 2, 7, 32, 33, 64))

    def kernel(self, *, is_wrong: bool) -> emulate.Function:
        """Return the kernel with or without the fault."""
        body = self.code.replace("{}", self.wrong if is_wrong else self.right)
        return emulate.Module(f'extern "C" __global__ void k({self.parameters}) {{\n{body}\n}}').get_function("k")

    @property
    def lines(self) -> list[int]:
        """The lines of which an error must name one: those that end in `//!`, or else the faulty one."""
        lines = self.code.split("\n")
        marked = [2 + at for at, line in enumerate(lines) if line.endswith("//!")]
        return marked or [2 + at for at, line in enumerate(lines) if "{}" in line]


MODES = {  # the options of `emulate.check` for each
    "result": {"guard": "none"},
    "check": {},
    "start": {"guard": "start"},
    "seeds": {},
    "steps": {"max_steps": NO_STEPS},
    "asan": {"sanitizer": "asan"},
    "tsan": {"sanitizer": "tsan"},
}


def find(bug: Bug, mode: str, n: int, *, is_wrong: bool = True) -> str:
    """Return what a mode says of a launch: the message of an error, "wrong result", or "" where it finds nothing."""
    kernel = bug.kernel(is_wrong=is_wrong)
    for seed in range(1, 17) if mode == "seeds" else (0,):
        case = bug.case(n)
        args = tuple(value.copy() if isinstance(value, np.ndarray) else value for value in case.args)
        options: dict[str, Any] = {"seed": seed, **MODES[mode]}
        options["timeout"] = (
            None if "sanitizer" in options else 0.5
        )  # of a child it is wall time, which a busy machine takes
        try:
            emulate.check(kernel, (case.grid,), (case.block,), args, shared_mem=case.shared_mem, **options)
        except EmulatorError as error:
            return str(error)
        if not all(np.array_equal(args[place], wanted) for place, wanted in case.results.items()):
            return "wrong result"
    return ""


def zeros(n: int, dtype: Any = I32) -> Any:
    return np.zeros(n, dtype)


def up(n: int, dtype: Any = I32) -> Any:
    return np.arange(n, dtype=dtype)


INDEX = "int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
T = "int t = threadIdx.x;\n"


def blocks(n: int, threads: int = 32) -> int:
    return (n + threads - 1) // threads


def _reversed(n: int) -> Case:
    return Case(1, 128, (up(n), zeros(n), n), {1: up(n)[::-1]})


BUGS = (
    Bug(
        "copy_past_the_end",
        "off by one in global memory",
        "const int* x, int* y, int n",
        INDEX + "{}\ny[i] = x[i];  //!",
        "if (i < n)",
        "if (i <= n)",
        lambda n: Case(blocks(n + 1), 32, (up(n), zeros(n), n), {1: up(n)}),
        5,
        ("check", "seeds", "asan"),
        1,
    ),
    Bug(
        "difference_before_the_start",
        "off by one in global memory",
        "const int* x, int* y, int n",
        INDEX + "if (i < n)\n{}",
        "y[i] = i ? x[i] - x[i - 1] : 0;",
        "y[i] = x[i] - x[i - 1];",
        lambda n: Case(blocks(n), 32, (7 + zeros(n), zeros(n), n), {1: zeros(n)}),
        5,
        ("start", "asan"),
        1,
    ),
    Bug(
        "page_table_prefetch",
        "off by one in global memory",
        "const int* table, const int* pool, int* y, int pages",
        "int page = table[0], sum = 0;\nfor (int p = 0; p < pages; ++p) {\nint next = 0;\n{}\nsum += pool[page];\n"
        "page = next;\n}\ny[0] = sum;",
        "if (p + 1 < pages) next = table[p + 1];",
        "next = table[p + 1];",
        lambda n: Case(1, 1, (up(n), up(n), zeros(1), n), {2: [n * (n - 1) // 2]}),
        4,
        ("check", "seeds", "asan"),
        1,
        "ROCm/rocm-libraries#6932: the next entry of the page table is read one past its end",
    ),
    Bug(
        "mask_of_padded_batch",
        "off by one in global memory",
        "const int* mask, const int* starts, int* y, int requests",
        T + "int sum = 0;\n{}\nfor (int j = starts[t]; j < starts[t + 1]; ++j) sum += mask[j];  //!\n"
        "if (t < requests) y[t] = sum;",
        "if (t < requests)",
        "if (t < requests + 1)  // as many as the batch is padded to",
        lambda n: Case(
            1, 128, (1 + zeros(2 * n), np.append(2 * up(n + 1), 2 * n + 2).astype(I32), zeros(n), n), {2: 2 + zeros(n)}
        ),
        4,
        ("check", "seeds", "asan"),
        1,
        "sgl-project/sglang#13740: a mask for the real batch is read with offsets of the padded one",
    ),
    Bug(
        "mask_without_draft_columns",
        "off by one in global memory",
        "int* mask, int context, int nodes",
        T + "if (t == 0) for (int j = 0; j < context; ++j) mask[j] = 1;\n{}\nmask[context + t] = 1;  //!",
        "if (t < nodes - 1)",
        "if (t < nodes)  // the buffer was sized for the context alone, plus what was thought to be left",
        lambda n: Case(1, 128, (zeros(2 * n), n + 1, n), {0: 1 + zeros(2 * n)}),
        6,
        ("check", "seeds", "asan"),
        1,
        "sgl-project/sglang#29450: a mask buffer of max_context columns lacks those of the draft tokens",
    ),
    Bug(
        "window_before_the_past",
        "negative index",
        "int* mask, int past, int window, int nodes",
        T + "if (t >= nodes) return;\nint column = past - window + t;\n{}\nmask[column] = 1;  //!",
        "if (column >= 0)",
        "// a negative column wraps around",
        lambda n: Case(1, 128, (zeros(n), 2, 4, n), {0: [1] * max(n - 2, 0) + [0] * min(n, 2)}),
        6,
        ("start", "asan"),
        1,
        "Luce-Org/lucebox@6ed0014c: a window that begins before the past gives a negative column",
    ),
    Bug(
        "offset_in_32_bits",
        "32-bit offset",
        "const int* pool, int page, int page_size, int width, int* y",
        "{}\ny[0] = pool[offset >> 40];  //!",
        "long long offset = (long long)page * page_size * width;",
        "long long offset = (int)((unsigned)page * page_size * width);",
        lambda n: Case(1, 1, (7 + zeros(1), 80 * n, 480, 576, zeros(1)), {4: [7]}),
        100,
        ("start", "asan"),
        98,
        "vllm-project/vllm#47671: page * stride overflows 32 bits, and the offset is negative",
        (1, 2, 50),
    ),
    Bug(
        "heap_larger_than_the_row",
        "off by one in shared memory",
        "const int* row, int* y, int vocabulary, int k",
        T + "__shared__ int heap[64];\nheap[t] = 0;\n__syncthreads();\nif (t == 0)\n{}\n"
        "heap[j] = row[j % vocabulary];  //!\n"
        "__syncthreads();\nif (t < vocabulary) y[t] = heap[t];",
        "for (int j = 0; j < k && j < vocabulary; ++j)",
        "for (int j = 0; j < k; ++j)",
        lambda n: Case(1, 64, (up(min(n, 64)), zeros(min(n, 64)), min(n, 64), n), {1: up(min(n, 64))}),
        70,
        ("result", "check", "start", "seeds", "asan"),
        65,
        "Luce-Org/lucebox: a heap of top-k is filled without a check of k against the vocabulary",
        (1, 2, 7, 33, 64),
    ),
    Bug(
        "static_shared_past_the_end",
        "off by one in shared memory",
        "int* x, int n",
        T + "__shared__ int s[32];\n{}\ns[t] = t;  //!\n__syncthreads();\nif (t < n) x[t] = t < 32 ? s[t] : t;",
        "if (t < 32)",
        "if (t < n)",
        lambda n: Case(1, 128, (zeros(n), n), {0: up(n)}),
        40,
        ("result", "check", "start", "seeds", "asan"),
        33,
    ),
    Bug(
        "dynamic_shared_past_the_end",
        "off by one in shared memory",
        "int* x, int n",
        T + "extern __shared__ int s[];\n{}\ns[t] = t;  //!\n__syncthreads();\nif (t < n) x[t] = s[t];",
        "if (t < n)",
        "if (t <= n)",
        lambda n: Case(1, 128, (zeros(n), n), {0: up(n)}, 4 * n),
        5,
        ("check", "seeds", "asan"),
        1,
    ),
    Bug(
        "forgotten_dynamic_shared",
        "dynamic shared memory not asked for",
        "int* x, int n, int wanted",
        T + "extern __shared__ int s[];\nif (t < n) {\n{}\nx[t] = t;\n}",
        "if (wanted) s[t] = t;",
        "s[t] = t;",
        lambda n: Case(1, 128, (zeros(n), n, 0), {0: up(n)}),
        5,
        ("result", "check", "start", "seeds"),
        1,
    ),
    Bug(
        "misaligned_vector_load",
        "misaligned access",
        "const float* x, float* y, int n",
        INDEX + "if (i < n)\n{}",
        "for (int j = 0; j < 2; ++j) y[2 * i + j] = x[2 * i + j];",
        "*reinterpret_cast<float2*>(y + 2 * i) = *reinterpret_cast<const float2*>(x + 2 * i + n % 2);",
        lambda n: Case(blocks(n), 32, (up(2 * n + 1, F32), zeros(2 * n, F32), n), {1: up(2 * n, F32)}),
        5,
        ("result", "check", "start", "seeds"),
        1,
    ),
    Bug(
        "missing_barrier",
        "missing barrier",
        "const int* x, int* y, int n",
        T + "__shared__ int s[128];\nif (t < n) s[t] = x[t];  //!\n{}\nif (t < n) y[t] = s[n - 1 - t];  //!",
        "__syncthreads();",
        "",
        _reversed,
        40,
        ("result", "check", "start", "seeds", "tsan"),
        2,
    ),
    Bug(
        "index_reset_without_barrier",
        "race in shared memory",
        "const int* next, int* y, int steps",
        T
        + "__shared__ int at;\nint sum = 0;\nif (t == 0) at = 0;\n__syncthreads();\nfor (int j = 0; j < steps; ++j) {\n"
        "int now = at;  //!\n{}\nif (t == 0) at = next[now];  //!\n__syncthreads();\nsum += now;\n}\ny[t] = sum;",
        "__syncthreads();",
        "",
        lambda n: Case(1, 64, (1 + up(n), zeros(64), n), {1: [n * (n - 1) // 2] * 64}),
        3,
        ("result", "check", "start", "seeds", "tsan"),
        1,
        "Edge-LLM: the shared index of the next node is overwritten while other threads still read it",
    ),
    Bug(
        "copies_of_other_threads",
        "missing barrier",
        "const float* x, float* y, int n",
        T + "__shared__ __align__(16) float s[512];\nemu::async_copy(s + 4 * t, x + 4 * t, 16, 16, EMU_HERE);\n"
        "emu::async_wait_all();  //!\n{}\nif (t < n) y[t] = s[4 * (127 - t)];  //!",
        "__syncthreads();",
        "",
        lambda n: Case(1, 128, (up(512, F32), zeros(n, F32), n), {1: 4 * (127 - up(n, F32))}),
        40,
        ("result", "check", "start", "seeds", "tsan"),
        1,
        "ashalliants/ninfer-3090#49: cp.async.wait completes a thread's own copies, not those of the others",
    ),
    Bug(
        "histogram_of_threads",
        "race in global memory",
        "const int* x, int* counts, int n",
        T + "if (t < n)\n{}",
        "atomicAdd(&counts[x[t]], 1);",
        "counts[x[t]] += 1;",
        lambda n: Case(1, 128, (zeros(n), zeros(4), n), {1: [n, 0, 0, 0]}),
        40,
        ("tsan",),
        2,
    ),
    Bug(
        "histogram_of_blocks",
        "race in global memory",
        "const int* x, int* counts, int n",
        "int b = blockIdx.x;\n{}",
        "atomicAdd(&counts[x[b]], 1);",
        "counts[x[b]] += 1;",
        lambda n: Case(n, 1, (zeros(n), zeros(4), n), {1: [n, 0, 0, 0]}),
        8,
        ("tsan",),
        2,
    ),
    Bug(
        "missing_fence",
        "missing fence between blocks",
        "int* parts, unsigned* ticket, int* y",
        "int b = blockIdx.x;\nparts[b] = b;  //!\n{}\nif (atomicAdd(ticket, 1u) == gridDim.x - 1)\n"
        "for (int j = 0; j < gridDim.x; ++j) y[0] += parts[j];  //!",
        "__threadfence();",
        "",
        lambda n: Case(n, 1, (zeros(n), zeros(1, np.uint32), zeros(1)), {2: [n * (n - 1) // 2]}),
        8,
        ("tsan",),
        2,
    ),
    Bug(
        "order_of_blocks",
        "reliance on the order of blocks",
        "int* y",
        "int b = blockIdx.x;\n{}",
        "y[b] = b + 1;",
        "y[b] = b ? y[b - 1] + 1 : 1;",
        lambda n: Case(n, 1, (zeros(n),), {0: 1 + up(n)}),
        8,
        ("seeds", "tsan"),
        2,
    ),
    Bug(
        "barrier_under_a_branch",
        "barrier under a branch",
        "int* x, int n",
        T + "__shared__ int s[128];\ns[t] = t;\n{}\n__syncthreads();  //!\nif (t < n) x[t] = s[t];",
        "",
        "if (t < n)",
        lambda n: Case(1, 128, (zeros(n), n), {0: up(n)}),
        40,
        ("result", "check", "start", "seeds", "asan", "tsan"),
        1,
    ),
    Bug(
        "uninitialised_shared",
        "uninitialised shared memory",
        "int* x, int n",
        T + "__shared__ int count;\n{}\n__syncthreads();\nif (t < n) atomicAdd(&count, 1);\n__syncthreads();\n"
        "if (t == 0) x[0] = count;",
        "if (t == 0) count = 0;",
        "",
        lambda n: Case(1, 128, (zeros(1), n), {0: [n]}),
        40,
        ("result", "check", "start", "seeds", "asan", "tsan"),
        1,
    ),
    Bug(
        "endless_loop",
        "endless loop",
        "int* x, int n",
        "int j = 0;\nwhile (j < n) {  //!\nx[j] = j;  //!\n{}  //!\n}",
        "++j;",
        "j += j < n - 1;",
        lambda n: Case(1, 1, (zeros(n), n), {0: up(n)}),
        5,
        ("steps", "result", "check", "start", "seeds"),
        1,
    ),
    Bug(
        "division_by_zero",
        "division by zero",
        "int* x, int n",
        INDEX + "if (i < n)\n{}",
        "x[i] = i ? n / i : 0;",
        "x[i] = n / i;",
        lambda n: Case(blocks(n), 32, (zeros(n), n), {0: [0, *(n // i for i in range(1, n))]}),
        5,
        ("result", "check", "start", "seeds"),
        1,
    ),
    Bug(
        "shift_by_32",
        "shift out of range",
        "unsigned* x, int n",
        INDEX + "if (i < n)\n{}",
        "x[i] = i < 32 ? 1u << i : 0;",
        "x[i] = 1u << i;",
        lambda n: Case(
            blocks(n), 32, (zeros(n, np.uint32), n), {0: np.array([1 << i if i < 32 else 0 for i in range(n)])}
        ),
        40,
        ("result", "check", "start", "seeds"),
        33,
    ),
    Bug(
        "float_out_of_range",
        "conversion out of range",
        "int* x, int n, float scale",
        INDEX + "if (i < n)\n{}",
        "x[i] = i < 20 ? int(i * scale) : -1;",
        "x[i] = int(i * scale);",
        lambda n: Case(blocks(n), 32, (zeros(n), n, 1e8), {0: [i * 10**8 if i < 20 else -1 for i in range(n)]}),
        40,
        ("result", "check", "start", "seeds"),
        21,
    ),
    Bug(
        "stack_overflow",
        "stack overflow",
        "int* x, int n",
        "volatile int small[1];\nint bytes = n > 40 ? 300000 : 16;\nsmall[0] = n;\n{}\nx[0] = small[0];",
        "",
        "{ volatile char* big = (volatile char*)__builtin_alloca(bytes); big[0] = 1; big[bytes - 1] = 2; }",
        lambda n: Case(1, 1, (zeros(1), n), {0: [n]}),
        50,
        ("result", "check", "start", "seeds"),
        41,
    ),
    Bug(
        "wrong_shuffle_mask",
        "wrong shuffle mask",
        "int* x, int n",
        T + "int v = t;\nif (t < n) {\n{}\n"
        "for (int o = 1; o < 32; o *= 2) v = max(v, __shfl_xor_sync(mask, v, o));  //!\nx[t] = v;\n}",
        "unsigned mask = 0xffffffffu;",
        "unsigned mask = 0xffffu;",
        lambda n: Case(1, 32, (zeros(32), 32 if n > 2 else 0), {0: [31 if n > 2 else 0] * 32}),
        5,
        ("result", "check", "start", "seeds", "asan", "tsan"),
        3,
    ),
    Bug(
        "active_mask",
        "__activemask taken for a mask",
        "int* x, int n",
        T + "int v = t;\n{}\nfor (int o = 16; o; o /= 2) v += __shfl_down_sync(mask, v, o);  //!\n"
        "if (t == 0 && n > 2) x[0] = v;",
        "unsigned mask = 0xffffffffu;",
        "unsigned mask = n > 2 ? __activemask() : 0xffffffffu;",
        lambda n: Case(1, 32, (zeros(1), n), {0: [496 if n > 2 else 0]}),
        5,
        ("result", "check", "start", "seeds", "asan", "tsan"),
        3,
    ),
    Bug(
        "write_after_read_across_shuffle",
        "shuffle taken for a barrier",
        "int* x, int n",
        T + "__shared__ int s[32];\ns[t] = t;\n__syncwarp();\nint v = s[(t + 1) % 32];  //!\n{}\n"
        "if (t < n) s[t] = v;  //!\n"
        "__syncwarp();\nx[t] = s[t];",
        "__syncwarp();",
        "__shfl_sync(0xffffffffu, v, 0);",
        lambda n: Case(1, 32, (zeros(32), n), {0: [(i + 1) % 32 if i < n else i for i in range(32)]}),
        5,
        ("tsan",),
        1,
        sizes=(1, 2, 7, 32),
    ),
    Bug(
        "unused_slots_of_a_page",
        "reads what is not there",
        "const float* page, float* y, int length, int size",
        "float sum = 0;\nfor (int j = 0; j < size; ++j) {\nfloat weight = j < length;\n{}\n"
        "sum += weight * page[j];\n}\ny[0] = sum;",
        "if (weight > 0)",
        "// 0 * NaN is NaN",
        lambda n: Case(1, 1, (np.append(1 + zeros(n, F32), F32(np.nan)), zeros(1, F32), n, n + 1), {1: [n]}),
        5,
        ("result", "check", "start", "seeds", "asan", "tsan"),
        1,
        "flashinfer-ai/flashinfer#941: NaN in unused slots of the last page reaches the result with weight 0",
    ),
)


# What compute-sanitizer reported on an H200 (CUDA 13.0, CuPy 14.2, 2026-12-01, `python tests/sanitizer/planted.py`).
ON_A_GPU = {
    **dict.fromkeys(
        (
            "copy_past_the_end",
            "difference_before_the_start",
            "mask_of_padded_batch",
            "mask_without_draft_columns",
            "window_before_the_past",
            "offset_in_32_bits",
            "heap_larger_than_the_row",
            "static_shared_past_the_end",
            "dynamic_shared_past_the_end",
            "forgotten_dynamic_shared",
            "misaligned_vector_load",
        ),
        "memcheck",
    ),
    **dict.fromkeys(("missing_barrier", "index_reset_without_barrier", "write_after_read_across_shuffle"), "racecheck"),
    **dict.fromkeys(("copies_of_other_threads", "stack_overflow"), "not CUDA as it stands"),
}


def table() -> str:
    """Return the page of the documentation that says what finds what."""
    heads = {
        "result": "result",
        "check": "`check`",
        "start": 'guard="start"',
        "seeds": "16 seeds",
        "steps": "max_steps",
        "asan": '"asan"',
        "tsan": '"tsan"',
    }
    rows = [
        "# Planted bugs, and what finds them",
        "",
        f"{len(BUGS)} kernels of {len({bug.kind for bug in BUGS})} kinds of faults, each with one wrong line "
        "(`tests/emulate/planted_bugs.py`). A cross says that the mode finds the fault every time and, where it is an "
        "error, names the line. Modes are options of `emulate.check`; *result* is the comparison with what the kernel "
        "should compute, at seed 0, which all the others make, too. `check` stands for its defaults. No mode finds "
        "anything in the right version of a kernel, and Python goes on after each of them. *Smallest* is the least n "
        "that shows the fault, to which Hypothesis shrinks.",
        "",
        "The last column is what compute-sanitizer reports of the same kernels on an H200 (CUDA 13.0, 2026-12-01, "
        "`python tests/sanitizer/planted.py`; its four tools, at the same n). Where it reports nothing, the result is "
        "wrong or, for the machine, undefined behaviour that happens to work; the endless loop hangs.",
        "",
        "| fault | kind | " + " | ".join(heads.values()) + " | smallest n | compute-sanitizer |",
        "|---|---|" + "---|" * len(heads) + "---|---|",
    ]
    for bug in BUGS:
        crosses = " | ".join("x" if mode in bug.modes else "" for mode in heads)
        on_gpu = ON_A_GPU.get(bug.name, "")
        rows.append(f"| {bug.name.replace('_', ' ')} | {bug.kind} | {crosses} | {bug.smallest} | {on_gpu} |")
    rows += ["", "Faults that public systems had, re-stated in kernels of our own:", ""]
    rows += [f"- {bug.name.replace('_', ' ')}: {bug.report}" for bug in BUGS if bug.report]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(table(), end="")
