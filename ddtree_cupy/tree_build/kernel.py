"""CUDA kernels of tree_build: specs, and plans by the sizes of a call; `api.py` has the contracts."""

from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any

import numpy as np

from ddtree_cupy._arrays import batched_strides
from ddtree_cupy.kernels import CTYPES, KernelSpec, Plan, Step, constants, register
from ddtree_cupy.kernels.device import device_of
from ddtree_cupy.tree_build import topology
from ddtree_cupy.tree_build.versions import BEST_FIRST, TreeSizes
from ddtree_cupy.tree_build.versions.common import pack_limits

Array = Any

CANDIDATES = "tree_build/top_candidates.cu"
MOST_SHARED_BYTES = 64 * 1024  # of sort keys; more goes to the workspace
STATIC_SHARED_BYTES = 1024  # room for the kernels' own small arrays


def sort_bytes(sort_size: int) -> int:
    """Dynamic shared memory that merge_candidates sorts `sort_size` keys in."""
    return 8 * sort_size


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


@register
def specs() -> Iterator[KernelSpec]:
    """Every kernel of tree_build."""
    yield from map(find_spec, CTYPES)
    yield from (MERGE_SPEC, topology.SPEC)
    for version in BEST_FIRST.values():
        yield from version.specs()


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
def tree_plan(sizes: TreeSizes, options: tuple[Any, ...]) -> Plan:
    """Return the trees of the first version that takes the sizes; UnsupportedError for too many limits of children."""
    version = next(version for version in BEST_FIRST.values() if not version.refusal(sizes))
    return version.plan(sizes, pack_limits(sizes, *options))


def tree_sizes(shape: tuple[int, int, int], capacity: int, backend: str) -> TreeSizes:
    """Return what decides how trees of candidates (B, L, K) are built."""
    return TreeSizes(*shape, capacity, device_of(backend).shared_limit)


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
def build_plan(vocab_size: int, dtype: str, sizes: TreeSizes, options: tuple[Any, ...]) -> Plan:
    """Return both steps; the candidates between them are scratch."""
    first = candidates_plan((sizes.batch, sizes.draft_len, vocab_size), dtype, sizes.candidates)
    second = tree_plan(sizes, options)
    return Plan(
        first.steps + second.steps,
        second.results,
        {**first.results, **first.scratch, **second.scratch},
        {**first.args, **second.args},
    )
