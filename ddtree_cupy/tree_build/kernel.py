"""CUDA kernels of tree_build: specs, and plans by the sizes of a call; `api.py` has the contracts."""

from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from typing import Any

import numpy as np

from ddtree_cupy._arrays import batched_strides
from ddtree_cupy.containers.topology import words_per_row
from ddtree_cupy.errors import UnsupportedError
from ddtree_cupy.kernels import CTYPES, KernelSpec, Plan, Step, constants, layout_of, register
from ddtree_cupy.kernels.workspace import Sizes

Array = Any

CANDIDATES, BEST_FIRST = "tree_build/top_candidates.cu", "tree_build/best_first.cu"
MOST_SHARED_BYTES = 64 * 1024  # of sort keys or tree state; more goes to the workspace
STATIC_SHARED_BYTES = 1024  # room for the kernels' own small arrays
NODE_BYTES = 32  # of best_first's state
_LARGEST_INT = 2**31 - 1


def sort_bytes(sort_size: int) -> int:
    """Dynamic shared memory that merge_candidates sorts `sort_size` keys in."""
    return 8 * sort_size


def state_bytes(num_nodes: int) -> int:
    """Dynamic shared memory (or workspace of a request) that best_first keeps `num_nodes` nodes in."""
    return NODE_BYTES * 32 * words_per_row(num_nodes)


@cache
def find_spec(dtype: str) -> KernelSpec:
    """Spec of the first launch of top_candidates: the best of every slice of a row."""
    return KernelSpec(
        CANDIDATES,
        f"find_candidates<{CTYPES[dtype]}>",
        strided="draft_logits",
        nullable="draft_lens",
        max_threads=512,
        max_registers=64,
    )


MERGE_SPEC = KernelSpec(
    CANDIDATES,
    "merge_candidates",
    nullable="sort_keys",
    max_registers=64,
    shared_bytes=sort_bytes,
    max_shared_bytes=MOST_SHARED_BYTES + STATIC_SHARED_BYTES,
)
BEST_FIRST_SPEC = KernelSpec(
    BEST_FIRST,
    "best_first",
    nullable="budgets root_token_ids state",
    max_threads=32,
    max_registers=128,
    shared_bytes=state_bytes,
    max_shared_bytes=MOST_SHARED_BYTES,
    flush_subnormals=False,
)
TOPOLOGY_SPEC = KernelSpec("tree_build/topology.cu", "topology", max_threads=256, max_registers=40)


@register
def specs() -> Iterator[KernelSpec]:
    """Every kernel of tree_build."""
    yield from map(find_spec, CTYPES)
    yield from (MERGE_SPEC, BEST_FIRST_SPEC, TOPOLOGY_SPEC)


@lru_cache(256)
def candidates_plan(shape: tuple[int, int, int], dtype: str, k: int) -> Plan:
    """Return the best of every slice of a row, and their merge; the slices follow from the vocabulary alone."""
    batch, draft_len, vocab_size = shape
    rows, k = batch * draft_len, min(k, vocab_size)
    threads = 512 if vocab_size > 8192 else 128
    slice_size = threads * constants(CANDIDATES)["ITEMS"]
    slices, entries = max(1, -(-vocab_size // slice_size)), min(k, slice_size)
    sort_size = 1 << max(k - 1, 0).bit_length()
    shared = sort_bytes(sort_size)
    sorts_outside = shared > MOST_SHARED_BYTES
    scratch: dict[str, Any] = {
        "found_values": ((rows, slices, entries), np.uint32),
        "found_ids": ((rows, slices, entries), np.int32),
        "partial_max": ((rows, slices), np.float32),
        "partial_sum": ((rows, slices), np.float32),
    }
    args = {"L": draft_len, "V": vocab_size, "S": slices, "E": entries, "K": k, "sort_size": sort_size}
    if sorts_outside:
        scratch["sort_keys"] = (rows, sort_size), np.uint64
    else:
        args["sort_keys"] = None  # type: ignore[assignment]
    merge_threads = 1024 if slices * entries > 2048 else 256
    return Plan(
        (
            Step(find_spec(dtype), (rows, slices), (threads,)),
            Step(MERGE_SPEC, (rows,), (merge_threads,), 0 if sorts_outside else shared),
        ),
        results={
            "candidate_ids": ((batch, draft_len, k), np.int32),
            "candidate_logits": ((batch, draft_len, k), np.float32),
            "candidate_lse": ((batch, draft_len), np.float32),
        },
        scratch=scratch,
        args={**args, "silent_bits": _silent_bits(dtype)},
    )


def _silent_bits(dtype: str) -> int:
    """Return how many low bits of a float32 say nothing where it was widened from a smaller type."""
    found = constants("common/ordered.cuh")
    return found.get(f"SILENT_BITS<{CTYPES[dtype]}>", found["SILENT_BITS"])


def logits_inputs(draft_logits: Array, draft_lens: int | Array) -> dict[str, Any]:
    """Arguments of top_candidates by name: an int stands for all requests."""
    itemsize = draft_logits.dtype.itemsize
    request_stride, row_stride, _ = batched_strides(draft_logits, 3)
    return {
        "draft_logits": draft_logits,
        "draft_lens": None if isinstance(draft_lens, int) else draft_lens,
        "draft_len_of_all": draft_lens if isinstance(draft_lens, int) else 0,
        "request_stride": request_stride // itemsize,
        "row_stride": row_stride // itemsize,
    }


@lru_cache(256)
def tree_plan(
    shape: tuple[int, int, int],
    capacity: int,
    max_depth: int | None,
    max_children: int | tuple[int, ...] | None,
    min_path_score: float | None,
    spine: int,
) -> Plan:
    """Return best_first and topology for candidates (B, L, K); UnsupportedError for too many limits of children."""
    batch, draft_len, width = shape
    num_nodes = capacity + 1
    shared = state_bytes(num_nodes)
    in_workspace = shared > MOST_SHARED_BYTES
    nodes = batch, num_nodes
    limits = layout_of(BEST_FIRST, "Limits").pack(
        min_path_score=-np.inf if min_path_score is None else min_path_score,
        max_depth=draft_len if max_depth is None else min(max_depth, draft_len),
        spine=min(spine, capacity),
        widths=_widths(max_children, draft_len),
    )
    topology = topology_plan(batch, num_nodes)
    links = topology.results
    return Plan(
        (Step(BEST_FIRST_SPEC, (batch,), (32,), 0 if in_workspace else shared), *topology.steps),
        results={  # in the order of DraftTree
            "token_ids": (nodes, np.int32),
            "parents": (nodes, np.int32),
            "depths": links["depths"],
            "path_scores": (nodes, np.float64),
            "num_nodes": ((batch,), np.int32),
            "status": ((batch,), np.int32),
            "visibility_bits": links["visibility_bits"],
            "first_child": links["first_child"],
            "next_sibling": links["next_sibling"],
        },
        scratch={"state": ((batch, shared // 8), np.uint64)} if in_workspace else {},
        args={
            **topology.args,
            **({} if in_workspace else {"state": None}),
            "limits": limits,
            "L": draft_len,
            "K": width,
        },
    )


def _widths(max_children: int | tuple[int, ...] | None, draft_len: int) -> list[int]:
    """Return the most children of a node by its depth."""
    size = constants(BEST_FIRST)["WIDTHS"]
    if max_children is None or isinstance(max_children, int):
        return [_LARGEST_INT if max_children is None else min(max_children, _LARGEST_INT)] * size
    limits = [min(limit, _LARGEST_INT) for limit in max_children[:draft_len]]
    if len(limits) >= size:
        raise UnsupportedError(
            f"best_first_tree: `max_children` has {len(limits)} entries, a kernel takes at most {size - 1}"
        )
    return limits + [0] * (size - len(limits))


def tree_inputs(budget: int | Array, root_token_ids: int | Array, capacity: int) -> dict[str, Any]:
    """Arguments of best_first by name: an int stands for all requests."""
    budgets, roots = (None if isinstance(value, int) else value for value in (budget, root_token_ids))
    return {
        "budgets": budgets,
        "budget_of_all": min(budget, capacity) if budgets is None else 0,
        "root_token_ids": roots,
        "root_of_all": root_token_ids if roots is None else 0,
    }


@lru_cache(256)
def build_plan(shape: tuple[int, int, int], dtype: str, k: int, capacity: int, options: tuple[Any, ...]) -> Plan:
    """Return both steps; the candidates between them are scratch."""
    batch, draft_len, vocab_size = shape
    first = candidates_plan(shape, dtype, k)
    second = tree_plan((batch, draft_len, min(k, vocab_size)), capacity, *options)
    return Plan(
        first.steps + second.steps,
        second.results,
        {**first.results, **first.scratch, **second.scratch},
        {**first.args, **second.args},
    )


@lru_cache(256)
def topology_plan(batch: int, num_nodes: int) -> Plan:
    """Return the kernel that derives depths, child links and visibility from parents."""
    words, warps = words_per_row(num_nodes), constants(TOPOLOGY_SPEC.source)["WARPS"]
    links: Sizes = dict.fromkeys(("depths", "first_child", "next_sibling"), ((batch, num_nodes), np.int32))
    return Plan(
        (Step(TOPOLOGY_SPEC, (batch, -(-num_nodes // warps)), (32 * warps,)),),
        results={**links, "visibility_bits": ((batch, num_nodes, words), np.uint32)},
        args={"N": num_nodes, "W": words},
    )


def topology(parents: Array, num_nodes: Array, *, backend: str) -> Mapping[str, Array]:
    """Derive the links of parents (B, N) and num_nodes (B), int32 and C-contiguous, by name."""
    return topology_plan(*parents.shape).allocate_and_run("topology", backend, parents=parents, num_nodes=num_nodes)
