"""CUDA kernels of tree_build: geometry and launches; the contracts live in `api.py`, the specs in `kernel_specs.py`.

Every function is batched and takes `backend`, "cupy" or "emulate".
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ddtree_cupy.containers import Candidates, DraftTree
from ddtree_cupy.containers.topology import Topology, words_per_row
from ddtree_cupy.errors import UnsupportedError
from ddtree_cupy.kernels import get_kernel
from ddtree_cupy.kernels.workspace import Workspace, empty, require_given, workspace_bytes
from ddtree_cupy.tree_build import kernel_specs as specs

Array = Any
Sizes = dict[str, tuple[tuple[int, ...], Any]]

_LARGEST_INT = 2**31 - 1


def top_candidates(
    draft_logits: Array,
    k: int,
    *,
    backend: str,
    out: Candidates | None = None,
    workspace: Array | None = None,
    checked: bool = True,
) -> Candidates:
    """Launch find_candidates and merge_candidates; `api.top_candidates` says what they compute."""
    batch, draft_len, vocab_size = draft_logits.shape
    dtype, k, rows = draft_logits.dtype.name, min(k, vocab_size), batch * draft_len
    if out is None:
        require_given("top_candidates", backend, out=None)
        shape = (batch, draft_len, k)
        lse = empty(backend, shape[:2], np.float32)
        out = Candidates(empty(backend, shape, np.int32), empty(backend, shape, np.float32), lse)
    if rows == 0:
        return out
    threads, slices, entries, sort_size = _slices(vocab_size, k)
    scratch = Workspace("top_candidates", backend, _candidate_sizes(rows, vocab_size, k), workspace)
    found = [scratch[name] for name in ("found_values", "found_ids", "partial_max", "partial_sum")]
    request_stride, row_stride = (stride // draft_logits.dtype.itemsize for stride in draft_logits.strides[:2])
    get_kernel(specs.find_spec(dtype), backend)(
        (rows, slices),
        (threads,),
        (draft_logits, *found, draft_len, vocab_size, entries, request_stride, row_stride),
        checked=checked,
    )
    sort_keys = scratch["sort_keys"] if specs.sort_bytes(sort_size) > specs.MOST_SHARED_BYTES else None
    get_kernel(specs.MERGE_SPEC, backend)(
        (rows,),
        (1024 if slices * entries > 2048 else 256,),
        (
            *(*found, sort_keys, out.token_ids, out.logits, out.lse),
            *(slices, entries, k, sort_size, specs.SILENT_BITS[dtype]),
        ),
        shared_mem=0 if sort_keys is not None else specs.sort_bytes(sort_size),
        checked=checked,
    )
    return out


def _slices(vocab_size: int, k: int) -> tuple[int, int, int, int]:
    """Return (threads of a slice, slices of a row, entries a slice passes on, keys to sort)."""
    threads = 512 if vocab_size > 8192 else 128
    size = threads * specs.ITEMS
    return threads, max(1, -(-vocab_size // size)), min(k, size), 1 << max(k - 1, 0).bit_length()


def _candidate_sizes(rows: int, vocab_size: int, k: int) -> Sizes:
    _, slices, entries, sort_size = _slices(vocab_size, k)
    sorts_outside = specs.sort_bytes(sort_size) > specs.MOST_SHARED_BYTES
    return {
        "found_values": ((rows, slices, entries), np.uint32),
        "found_ids": ((rows, slices, entries), np.int32),
        "partial_max": ((rows, slices), np.float32),
        "partial_sum": ((rows, slices), np.float32),
        "sort_keys": ((rows, sort_size if sorts_outside else 0), np.uint64),
    }


def _state_sizes(batch: int, capacity: int) -> Sizes:
    size = specs.state_bytes(capacity + 1)
    return {"state": ((batch, size // 8 if size > specs.MOST_SHARED_BYTES else 0), np.uint64)}


def _build_sizes(batch: int, draft_len: int, vocab_size: int, k: int, capacity: int) -> Sizes:
    k = min(k, vocab_size)
    return {
        "token_ids": ((batch, draft_len, k), np.int32),
        "logits": ((batch, draft_len, k), np.float32),
        "lse": ((batch, draft_len), np.float32),
        "top_candidates": ((top_candidates_workspace_bytes(batch * draft_len, vocab_size, k),), np.uint8),
        "best_first_tree": ((best_first_workspace_bytes(batch, capacity),), np.uint8),
    }


def top_candidates_workspace_bytes(rows: int, vocab_size: int, k: int) -> int:
    """Return the bytes of `workspace` for B * L rows."""
    return workspace_bytes(_candidate_sizes(rows, vocab_size, min(k, vocab_size)))


def best_first_workspace_bytes(batch: int, capacity: int) -> int:
    """Return the bytes of `workspace`; 0 while the tree fits shared memory."""
    return workspace_bytes(_state_sizes(batch, capacity))


def build_workspace_bytes(batch: int, draft_len: int, vocab_size: int, k: int, capacity: int) -> int:
    """Return the bytes of `workspace` of build_tree: the candidates and the scratch of both steps."""
    return workspace_bytes(_build_sizes(batch, draft_len, vocab_size, k, capacity))


def build_tree(
    draft_logits: Array,
    k: int,
    *,
    capacity: int,
    backend: str,
    out: DraftTree | None = None,
    workspace: Array | None = None,
    checked: bool = True,
    **options: Any,
) -> DraftTree:
    """Launch top_candidates with k candidates a depth, then best_first_tree with `options`."""
    batch, draft_len, vocab_size = draft_logits.shape
    require_given("build_tree", backend, out=out)  # this and what else may be refused before the first launch
    widths_of(options.get("max_children"), draft_len)
    scratch = Workspace("build_tree", backend, _build_sizes(batch, draft_len, vocab_size, k, capacity), workspace)
    candidates = top_candidates(
        draft_logits,
        k,
        backend=backend,
        out=Candidates(scratch["token_ids"], scratch["logits"], scratch["lse"]),
        workspace=scratch["top_candidates"],
        checked=checked,
    )
    return best_first_tree(
        candidates,
        capacity=capacity,
        backend=backend,
        out=out,
        workspace=scratch["best_first_tree"],
        checked=checked,
        **options,
    )


def best_first_tree(
    candidates: Candidates,
    *,
    budgets: Array | int,
    root_token_ids: Array | int,
    capacity: int,
    max_depth: int | None = None,
    max_children: int | Sequence[int] | None = None,
    min_path_score: float | None = None,
    spine: int = 0,
    backend: str,
    out: DraftTree | None = None,
    workspace: Array | None = None,
    checked: bool = True,
) -> DraftTree:
    """Launch best_first and topology; `api.best_first_tree` says what they compute."""
    batch, draft_len, width = candidates.token_ids.shape
    num_nodes = capacity + 1
    if out is None:
        require_given("best_first_tree", backend, out=None)
        out = _empty_tree(backend, batch, num_nodes)
    if batch == 0:
        return out
    state = Workspace("best_first_tree", backend, _state_sizes(batch, capacity), workspace)["state"]
    budget_of_all, root_of_all = (x if isinstance(x, int) else 0 for x in (budgets, root_token_ids))
    get_kernel(specs.BEST_FIRST_SPEC, backend)(
        (batch,),
        (32,),
        (
            *(candidates.token_ids, candidates.logits, candidates.lse),
            *(None if isinstance(x, int) else x for x in (budgets, root_token_ids)),
            *(state if state.size else None, out.token_ids, out.parents, out.path_scores, out.num_nodes, out.status),
            *(min(budget_of_all, capacity), root_of_all, draft_len, width, num_nodes),
            draft_len if max_depth is None else min(max_depth, draft_len),
            -np.inf if min_path_score is None else min_path_score,
            min(spine, capacity),
            widths_of(max_children, draft_len),
        ),
        shared_mem=0 if state.size else specs.state_bytes(num_nodes),
        checked=checked,
    )
    topology(
        out.parents,
        out.num_nodes,
        backend=backend,
        out=Topology(out.depths, out.first_child, out.next_sibling, out.visibility_bits),
        checked=checked,
    )
    return out


def _empty_tree(backend: str, batch: int, num_nodes: int) -> DraftTree:
    def ints(*shape: int) -> Array:
        return empty(backend, shape, np.int32)

    return DraftTree(
        token_ids=ints(batch, num_nodes),
        parents=ints(batch, num_nodes),
        path_scores=empty(backend, (batch, num_nodes), np.float64),
        num_nodes=ints(batch),
        status=ints(batch),
        **_empty_topology(backend, batch, num_nodes)._asdict(),
    )


def _empty_topology(backend: str, batch: int, num_nodes: int) -> Topology:
    depths, first_child, next_sibling = (empty(backend, (batch, num_nodes), np.int32) for _ in range(3))
    bits = empty(backend, (batch, num_nodes, words_per_row(num_nodes)), np.uint32)
    return Topology(depths, first_child, next_sibling, bits)


def widths_of(max_children: int | Sequence[int] | None, draft_len: int) -> Array:
    """Return the kernel's form of `max_children`; UnsupportedError when it has too many entries."""
    if max_children is not None and not isinstance(max_children, int):
        max_children = tuple(max_children)
    return _widths(max_children, draft_len)


@lru_cache(64)
def _widths(max_children: int | tuple[int, ...] | None, draft_len: int) -> Array:
    """Return `struct Widths`: the most children of a node by its depth, as one element of bytes."""
    if max_children is None or isinstance(max_children, int):
        limit = _LARGEST_INT if max_children is None else min(max_children, _LARGEST_INT)
        widths = np.full(specs.WIDTHS, limit, np.int32)
    else:
        limits = [min(limit, _LARGEST_INT) for limit in max_children[:draft_len]]
        if len(limits) >= specs.WIDTHS:
            raise UnsupportedError(
                f"best_first_tree: `max_children` has {len(limits)} entries, a kernel takes at most {specs.WIDTHS - 1}"
            )
        widths = np.zeros(specs.WIDTHS, np.int32)
        widths[: len(limits)] = limits
    return widths.view(f"V{4 * specs.WIDTHS}")


def topology(
    parents: Array, num_nodes: Array, *, backend: str, out: Topology | None = None, checked: bool = True
) -> Topology:
    """Derive depths, child links and visibility from int32 parents (B, N) and num_nodes (B,), both C-contiguous."""
    batch, capacity = parents.shape
    if out is None:
        require_given("topology", backend, out=None)
        out = _empty_topology(backend, batch, capacity)
    get_kernel(specs.TOPOLOGY_SPEC, backend)(
        (batch, -(-capacity // specs.NODES_PER_BLOCK)),
        (32 * specs.NODES_PER_BLOCK,),
        (parents, num_nodes, *out, capacity, out.visibility_bits.shape[-1]),
        checked=checked,
    )
    return out
