"""CUDA kernels of tree_accept: specs, geometry and launches; the contracts live in `api.py`.

Every function is batched and takes `backend`, "cupy" or "emulate".
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

from ddtree_cupy._overlap import Place, overlap
from ddtree_cupy.containers import AcceptResult, DraftTree, PagedKV
from ddtree_cupy.kernels import CTYPES, Arg, KernelSpec, get_kernel, ints, register
from ddtree_cupy.kernels.workspace import Workspace, empty, require_given, workspace_bytes

Array = Any


# the modes of commit_kv.cu
_MOVE, _STAGE, _UNSTAGE = 0, 1, 2


def _strides(*names: str) -> tuple[Arg, ...]:
    return tuple(Arg.scalar(f"{name}_stride", "int64") for name in names)


@cache
def greedy_spec(dtype: str) -> KernelSpec:
    """Spec of greedy_targets for one dtype."""
    return KernelSpec(
        source="tree_accept/targets.cu",
        entry=f"greedy_targets<{CTYPES[dtype]}>",
        args=(
            Arg.input("target_logits", dtype, strided=True),
            Arg.input("num_nodes", "int32", nullable=True),
            Arg.output("token_ids", "int32"),
            *ints("num_nodes_of_all", "N", "V"),
            *_strides("request", "node"),
        ),
        max_threads=512,
        max_registers=64,
    )


@cache
def sample_spec(dtype: str) -> KernelSpec:
    """Spec of sample_targets for one dtype of the logits."""
    return KernelSpec(
        source="tree_accept/targets.cu",
        entry=f"sample_targets<{CTYPES[dtype]}>",
        args=(
            Arg.input("target_logits", dtype, strided=True),
            Arg.input("uniforms_f32", "float32", nullable=True),
            Arg.input("uniforms_f64", "float64", nullable=True),
            Arg.input("temperatures_f32", "float32", nullable=True),
            Arg.input("temperatures_f64", "float64", nullable=True),
            Arg.input("num_nodes", "int32", nullable=True),
            Arg.output("token_ids", "int32"),
            Arg.scalar("temperature_of_all", "float64"),
            *ints("num_nodes_of_all", "N", "V"),
            *_strides("request", "node"),
        ),
        max_threads=512,
        max_registers=80,
        flush_subnormals=False,
    )


ACCEPT_SPEC = KernelSpec(
    source="tree_accept/accept.cu",
    entry="accept",
    args=(
        *(Arg.input(name, "int32") for name in ("token_ids", "first_child", "next_sibling", "num_nodes")),
        Arg.input("target_token_ids", "int32"),
        *(Arg.output(name, "int32") for name in ("accepted", "num_accepted", "bonus_token")),
        *ints("N"),
    ),
    max_threads=32,
    max_registers=40,
)


@cache
def commit_spec(dtype: str) -> KernelSpec:
    """Spec of commit_kv for one dtype."""
    return KernelSpec(
        source="tree_accept/commit_kv.cu",
        entry=f"commit_kv<{CTYPES[dtype]}>",
        args=(
            *(Arg.input(name, "int32") for name in ("accepted", "num_accepted", "page_table", "context_lens")),
            Arg.output("ckv", dtype, strided=True),
            Arg.output("kpe", dtype, strided=True),
            Arg.output("staging", dtype, nullable=True),
            *ints("mode", "N", "C", "R", "num_pages", "page_size", "max_pages"),
            *_strides("ckv_page", "ckv_slot", "kpe_page", "kpe_slot"),
        ),
        max_threads=128,
        max_registers=128,
    )


ADVANCE_SPEC = KernelSpec(
    source="tree_accept/commit_kv.cu",
    entry="advance_context",
    args=(
        Arg.input("context_lens", "int32"),
        Arg.input("num_accepted", "int32"),
        Arg.output("new_context_lens", "int32"),
        *ints("B", "N"),
    ),
    max_threads=128,
    max_registers=32,
)

for _dtype in CTYPES:
    register(greedy_spec(_dtype))
    register(sample_spec(_dtype))
    register(commit_spec(_dtype))
for _spec in (ACCEPT_SPEC, ADVANCE_SPEC):
    register(_spec)


def _targets(
    function: str, target_logits: Array, num_nodes: Array | int, backend: str, out: Array | None
) -> tuple[Array, tuple[Array | None, int], list[int]]:
    """Return the result array, num_nodes as (array or None, int), and the strides in elements."""
    if out is None:
        require_given(function, backend, out=None)
        out = empty(backend, target_logits.shape[:2], np.int32)
    counts = (None, num_nodes) if isinstance(num_nodes, int) else (num_nodes, 0)
    return out, counts, [stride // target_logits.dtype.itemsize for stride in target_logits.strides[:2]]


def greedy_targets(
    target_logits: Array, *, num_nodes: Array | int, backend: str, out: Array | None = None, checked: bool = True
) -> Array:
    """Launch greedy_targets; `api.greedy_targets` says what it computes."""
    batch, capacity, vocab_size = target_logits.shape
    out, (counts, count_of_all), strides = _targets("greedy_targets", target_logits, num_nodes, backend, out)
    get_kernel(greedy_spec(target_logits.dtype.name), backend)(
        (batch * capacity,),
        (512 if vocab_size > 4096 else 128,),
        (target_logits, counts, out, count_of_all, capacity, vocab_size, *strides),
        checked=checked,
    )
    return out


def sample_targets(
    target_logits: Array,
    uniforms: Array,
    *,
    temperature: Array | float,
    num_nodes: Array | int,
    backend: str,
    out: Array | None = None,
    checked: bool = True,
) -> Array:
    """Launch sample_targets; `api.sample_targets` says what it computes."""
    batch, capacity, vocab_size = target_logits.shape
    out, (counts, count_of_all), strides = _targets("sample_targets", target_logits, num_nodes, backend, out)
    of_all = float(temperature) if isinstance(temperature, float | int) else 1.0
    temperatures = None if isinstance(temperature, float | int) else temperature
    get_kernel(sample_spec(target_logits.dtype.name), backend)(
        (batch * capacity,),
        (512 if vocab_size > 8192 else 256,),
        (
            *(target_logits, *_by_width(uniforms), *_by_width(temperatures), counts, out),
            *(of_all, count_of_all, capacity, vocab_size, *strides),
        ),
        checked=checked,
    )
    return out


def _by_width(array: Array | None) -> tuple[Array | None, Array | None]:
    """Return (array, None) for float32, (None, array) for float64."""
    return (None, array) if array is not None and array.dtype.itemsize == 8 else (array, None)


def accept(
    tree: DraftTree,
    target_token_ids: Array,
    *,
    backend: str,
    out: AcceptResult | None = None,
    checked: bool = True,
) -> AcceptResult:
    """Launch accept; `api.accept` says what it computes."""
    batch, capacity = tree.token_ids.shape
    if out is None:
        require_given("accept", backend, out=None)
        paths = empty(backend, (batch, capacity), np.int32)
        out = AcceptResult(paths, *(empty(backend, (batch,), np.int32) for _ in range(2)))
    links = tree.token_ids, tree.first_child, tree.next_sibling, tree.num_nodes
    get_kernel(ACCEPT_SPEC, backend)(
        (batch,),
        (32,),
        (*links, target_token_ids, out.accepted, out.num_accepted, out.bonus_token, capacity),
        checked=checked,
    )
    return out


def commit_kv(
    caches: Sequence[PagedKV],
    result: AcceptResult,
    *,
    backend: str,
    out: Sequence[Array] | None = None,
    workspace: Array | None = None,
    checked: bool = True,
) -> tuple[PagedKV, ...]:
    """Launch commit_kv once for each cache, and advance_context; `api.commit_kv` says what they compute.

    `out` holds the new context_lens of every cache; caches that share context_lens may share it.
    """
    batch, capacity = result.accepted.shape
    if caches:
        require_given("commit_kv", backend, out=out)  # before the first row moves
    moved, staged = _plan(caches)
    scratch = Workspace("commit_kv", backend, _staging_sizes(caches, result, staged), workspace)

    def move(index: int, mode: int) -> None:
        kv = caches[index]
        staging = None if mode == _MOVE else scratch[str(index)]
        pools = [pool.strides[axis] // pool.dtype.itemsize for pool in (kv.ckv, kv.kpe) for axis in (0, 1)]
        get_kernel(commit_spec(kv.ckv.dtype.name), backend)(
            (batch, 2),
            (128,),
            (
                *(result.accepted, result.num_accepted, kv.page_table, kv.context_lens, kv.ckv, kv.kpe, staging),
                *(mode, capacity, kv.ckv.shape[2], kv.kpe.shape[2], kv.ckv.shape[0], kv.ckv.shape[1]),
                *(kv.page_table.shape[1], *pools),
            ),
            checked=checked,
        )

    for index in moved:
        move(index, _MOVE)
    for mode in (_STAGE, _UNSTAGE):
        for index in staged:
            move(index, mode)

    if out is None:
        out = [empty(backend, (batch,), np.int32) for _ in caches]
    new_lens: dict[tuple[Place, Place], Array] = {}
    committed = []
    for kv, lens in zip(caches, out, strict=True):
        pair = Place.of(kv.context_lens), Place.of(lens)
        if pair not in new_lens:
            new_lens[pair] = lens
            get_kernel(ADVANCE_SPEC, backend)(
                (-(-batch // 128),),
                (128,),
                (kv.context_lens, result.num_accepted, lens, batch, capacity),
                checked=checked,
            )
        committed.append(replace(kv, context_lens=lens))
    return tuple(committed)


def commit_workspace_bytes(caches: Sequence[PagedKV], result: AcceptResult) -> int:
    """Return the bytes of `workspace`; 0 unless caches may share memory."""
    return workspace_bytes(_staging_sizes(caches, result, _plan(caches)[1]))


def _staging_sizes(caches: Sequence[PagedKV], result: AcceptResult, staged: Sequence[int]) -> dict[str, Any]:
    batch, capacity = result.accepted.shape
    widths = {index: caches[index].ckv.shape[2] + caches[index].kpe.shape[2] for index in staged}
    return {str(index): ((batch, capacity, width), caches[index].ckv.dtype) for index, width in widths.items()}


def _plan(caches: Sequence[PagedKV]) -> tuple[list[int], list[int]]:
    """Return (caches to move in place, caches to move through staging), each memory of equal tables once.

    Caches that share memory are the same layer if their page tables lead to the same rows, and different layers if they
    do not; that only the device knows. When all of them are read before any is written, both come out right.
    """
    first: dict[tuple[Place, ...], int] = {}
    for index, kv in enumerate(caches):
        places = tuple(Place.of(array) for array in (kv.ckv, kv.kpe, kv.page_table, kv.context_lens))
        first.setdefault(places, index)
    shared = _sharing(tuple(pool for places in first for pool in places[:2]))
    moved = [index for number, index in enumerate(first.values()) if number not in shared]
    return moved, [index for index in first.values() if index not in moved]


@lru_cache(64)
def _sharing(pools: tuple[Place, ...]) -> frozenset[int]:
    """Return which caches may share memory with another, or within themselves; `pools` holds two of each cache."""
    shared: set[int] = set()
    bounds = [pool.bounds for pool in pools]
    open_pools: list[int] = []  # those that start before the current one and reach beyond its start
    for number in sorted(range(len(pools)), key=bounds.__getitem__):
        open_pools = [other for other in open_pools if bounds[other][1] > bounds[number][0]]
        for other in open_pools:
            if overlap(pools[other], pools[number]):
                shared |= {other // 2, number // 2}
        open_pools.append(number)
    return frozenset(shared)
