"""Specs of the CUDA kernels of tree_build: argument tables and limits, beside the constants of their sources."""

from functools import cache

from ddtree_cupy.containers.topology import words_per_row
from ddtree_cupy.kernels import CTYPES, Arg, KernelSpec, ints, register

MOST_SHARED_BYTES = 64 * 1024  # of sort keys or tree state; more goes to the workspace
STATIC_SHARED_BYTES = 1024  # room for the kernels' own small arrays

# the constants of top_candidates.cu, best_first.cu and topology.cu
ITEMS = 16
SILENT_BITS = {"float32": 0, "float16": 13, "bfloat16": 16}
WIDTHS = 256
NODE_BYTES = 32
NODES_PER_BLOCK = 8


@cache
def find_spec(dtype: str) -> KernelSpec:
    """Spec of the first launch of top_candidates: the best of every slice of a row."""
    return KernelSpec(
        source="tree_build/top_candidates.cu",
        entry=f"find_candidates<{CTYPES[dtype]}>",
        args=(
            Arg.input("draft_logits", dtype, strided=True),
            Arg.output("found_values", "uint32"),
            Arg.output("found_ids", "int32"),
            Arg.output("partial_max", "float32"),
            Arg.output("partial_sum", "float32"),
            *ints("L", "V", "E"),
            Arg.scalar("request_stride", "int64"),
            Arg.scalar("row_stride", "int64"),
        ),
        max_threads=512,
        max_registers=64,
    )


def sort_bytes(sort_size: int) -> int:
    """Dynamic shared memory that merge_candidates sorts `sort_size` keys in."""
    return 8 * sort_size


MERGE_SPEC = KernelSpec(
    source="tree_build/top_candidates.cu",
    entry="merge_candidates",
    args=(
        Arg.input("found_values", "uint32"),
        Arg.input("found_ids", "int32"),
        Arg.input("partial_max", "float32"),
        Arg.input("partial_sum", "float32"),
        Arg.output("sort_keys", "uint64", nullable=True),
        Arg.output("token_ids", "int32"),
        Arg.output("logits", "float32"),
        Arg.output("lse", "float32"),
        *ints("S", "E", "K"),
        Arg.scalar("sort_size", "uint32"),
        Arg.scalar("silent_bits", "int32"),
    ),
    max_threads=1024,
    max_registers=64,
    shared_bytes=sort_bytes,
    max_shared_bytes=MOST_SHARED_BYTES + STATIC_SHARED_BYTES,
)


def state_bytes(num_nodes: int) -> int:
    """Dynamic shared memory (or workspace of a request) that best_first keeps `num_nodes` nodes in."""
    return NODE_BYTES * 32 * words_per_row(num_nodes)


BEST_FIRST_SPEC = KernelSpec(
    source="tree_build/best_first.cu",
    entry="best_first",
    args=(
        Arg.input("candidate_ids", "int32"),
        Arg.input("candidate_logits", "float32"),
        Arg.input("candidate_lse", "float32"),
        Arg.input("budgets", "int32", nullable=True),
        Arg.input("root_token_ids", "int32", nullable=True),
        Arg.output("state", "uint64", nullable=True),
        Arg.output("token_ids", "int32"),
        Arg.output("parents", "int32"),
        Arg.output("path_scores", "float64"),
        Arg.output("num_nodes", "int32"),
        Arg.output("status", "int32"),
        *ints("budget_of_all", "root_of_all", "L", "K", "N", "max_depth"),
        Arg.scalar("min_path_score", "float64"),
        Arg.scalar("spine", "int32"),
        Arg.scalar("widths", f"V{4 * WIDTHS}"),
    ),
    max_threads=32,
    max_registers=128,
    shared_bytes=state_bytes,
    max_shared_bytes=MOST_SHARED_BYTES,
    flush_subnormals=False,
)

TOPOLOGY_SPEC = KernelSpec(
    source="tree_build/topology.cu",
    entry="topology",
    args=(
        Arg.input("parents", "int32"),
        Arg.input("num_nodes", "int32"),
        Arg.output("depths", "int32"),
        Arg.output("first_child", "int32"),
        Arg.output("next_sibling", "int32"),
        Arg.output("visibility_bits", "uint32"),
        *ints("N", "W"),
    ),
    max_threads=256,
    max_registers=40,
)

for _dtype in CTYPES:
    register(find_spec(_dtype))
for _spec in (MERGE_SPEC, BEST_FIRST_SPEC, TOPOLOGY_SPEC):
    register(_spec)
