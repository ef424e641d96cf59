"""CUDA kernels of tree_accept: specs, and plans by the sizes of a call; `api.py` has the contracts."""

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np

from ddtree_cupy._arrays import batched_strides, numpy_dtype
from ddtree_cupy._cache_struct import CacheFacts, facts_of
from ddtree_cupy._overlap import Place, address_of, overlap
from ddtree_cupy.containers import AcceptResult, PagedKV
from ddtree_cupy.kernels import CTYPES, KernelSpec, Plan, Step, constants, register

Array = Any

THREADS = 128  # of commit_kv and advance_context


@cache
def greedy_spec(dtype: str) -> KernelSpec:
    """Spec of greedy_targets for one dtype."""
    return KernelSpec(
        "tree_accept/targets.cu",
        f"greedy_targets<{CTYPES[dtype]}>",
        strided="target_logits",
        nullable="num_nodes",
        max_threads=512,
        max_registers=64,
    )


@cache
def sample_spec(dtype: str) -> KernelSpec:
    """Spec of sample_targets for one dtype of the logits."""
    return KernelSpec(
        "tree_accept/targets.cu",
        f"sample_targets<{CTYPES[dtype]}>",
        strided="target_logits",
        nullable="uniforms_f32 uniforms_f64 temperatures_f32 temperatures_f64 num_nodes",
        max_threads=512,
        max_registers=80,
        flush_subnormals=False,
    )


@cache
def commit_spec(dtype: str) -> KernelSpec:
    """Spec of commit_kv for one dtype."""
    return KernelSpec(
        "tree_accept/commit_kv.cu",
        f"commit_kv<{CTYPES[dtype]}>",
        strided="ckv kpe",
        nullable="staging",
        max_threads=THREADS,
        max_registers=128,
    )


ACCEPT_SPEC = KernelSpec("tree_accept/accept.cu", "accept", max_threads=32, max_registers=40)
ADVANCE_SPEC = KernelSpec("tree_accept/commit_kv.cu", "advance_context", max_threads=THREADS, max_registers=32)


@register
def specs() -> Iterator[KernelSpec]:
    """Every kernel of tree_accept."""
    for dtype in CTYPES:
        yield from (greedy_spec(dtype), sample_spec(dtype), commit_spec(dtype))
    yield from (ACCEPT_SPEC, ADVANCE_SPEC)


@cache
def targets_plan(shape: tuple[int, int, int], dtype: str, samples: bool) -> Plan:
    """One block for each row."""
    batch, capacity, vocab_size = shape
    if samples:
        spec, threads = sample_spec(dtype), 512 if vocab_size > 8192 else 256
    else:
        spec, threads = greedy_spec(dtype), 512 if vocab_size > 4096 else 128
    return Plan(
        (Step(spec, (batch * capacity,), (threads,)),),
        results={"token_ids": ((batch, capacity), np.int32)},
        args={"N": capacity, "V": vocab_size},
    )


def targets_inputs(target_logits: Array, num_nodes: Array | int) -> dict[str, Any]:
    """Arguments that greedy_targets and sample_targets share."""
    itemsize = target_logits.dtype.itemsize
    request_stride, node_stride, _ = batched_strides(target_logits, 3)
    is_one = isinstance(num_nodes, int)
    return {
        "target_logits": target_logits,
        "num_nodes": None if is_one else num_nodes,
        "num_nodes_of_all": num_nodes if is_one else 0,
        "request_stride": request_stride // itemsize,
        "node_stride": node_stride // itemsize,
    }


def sampling_inputs(uniforms: Array, temperature: Array | float) -> dict[str, Any]:
    """Arguments of sample_targets alone; of each pair of arrays one is null."""
    is_one = isinstance(temperature, float)
    return {
        **_by_width("uniforms", uniforms),
        **_by_width("temperatures", None if is_one else temperature),
        "temperature_of_all": temperature if is_one else 1.0,
    }


def _by_width(name: str, array: Array | None) -> dict[str, Array | None]:
    is_wide = array is not None and array.dtype.itemsize == 8
    return {f"{name}_f32": None if is_wide else array, f"{name}_f64": array if is_wide else None}


@cache
def accept_plan(shape: tuple[int, int]) -> Plan:
    """One warp for each request."""
    batch, capacity = shape
    return Plan(
        (Step(ACCEPT_SPEC, (batch,), (32,)),),
        results={
            "accepted": ((batch, capacity), np.int32),
            "num_accepted": ((batch,), np.int32),
            "bonus_token": ((batch,), np.int32),
        },
        args={"N": capacity},
    )


def commit_inputs(caches: Sequence[PagedKV], result: AcceptResult, groups: Sequence[int]) -> dict[str, Any]:
    """Arguments of commit_kv and advance_context by name; `groups` says which of the new lengths a cache gets."""
    lens = {f"old lens {group}": kv.context_lens for kv, group in zip(caches, groups, strict=True)}
    return {"accepted": result.accepted, "num_accepted": result.num_accepted, **lens}


def commit_plan(caches: Sequence[PagedKV], shape: tuple[int, int], groups: Sequence[int]) -> Plan:
    """Return the moves of all caches, each memory of equal tables once, and then the new lengths."""
    facts = tuple([facts_of(kv) for kv in caches])
    lens = [kv.context_lens for kv in caches]
    same = all(each is lens[0] for each in lens)
    places = (address_of(lens[0]),) * len(lens) if same and lens else tuple(map(address_of, lens))
    return _commit_plan(facts, places, shape, tuple(groups))


@lru_cache(64)
def _commit_plan(
    facts: tuple[CacheFacts, ...], lens: tuple[int, ...], shape: tuple[int, int], groups: tuple[int, ...]
) -> Plan:
    batch, capacity = shape
    moved, staged = _moves(facts, lens)
    modes = constants("tree_accept/commit_kv.cu")

    def move(index: int, mode: str) -> Step:
        width, rope = facts[index].widths
        args = {"cache": facts[index].packed(lens[index]), "mode": modes[mode], "C": width, "R": rope}
        names = {"staging": f"staging {index}"}
        if mode == "MOVE":
            args["staging"] = None
        return Step(commit_spec(facts[index].dtype), (batch, 2), (THREADS,), 0, args, names)

    steps = [move(index, "MOVE") for index in moved]
    steps += [move(index, mode) for mode in ("STAGE", "UNSTAGE") for index in staged]
    scratch = {
        f"staging {index}": ((batch, capacity, sum(facts[index].widths)), numpy_dtype(facts[index].dtype))
        for index in staged
    }
    results: dict[str, Any] = {}
    for group in range(max(groups, default=-1) + 1):
        results[f"lens {group}"] = (batch,), np.int32
        names = {"context_lens": f"old lens {group}", "new_context_lens": f"lens {group}"}
        steps.append(Step(ADVANCE_SPEC, (-(-batch // THREADS),), (THREADS,), names=names))
    return Plan(tuple(steps), results, scratch, {"B": batch, "N": capacity})


def _moves(facts: tuple[CacheFacts, ...], lens: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Return (caches to move in place, caches to move through staging), each memory of equal tables once.

    Caches that share memory are the same layer if their page tables lead to the same rows, and different layers if they
    do not; that only the device knows. When all of them are read before any is written, both come out right.
    """
    first: dict[tuple[Any, ...], int] = {}
    for index, of_cache in enumerate(facts):
        first.setdefault((*of_cache.places, lens[index]), index)
    shared = _sharing([pool for places in first for pool in places[:2]])
    moved = [index for number, index in enumerate(first.values()) if number not in shared]
    return moved, [index for index in first.values() if index not in moved]


def _sharing(pools: Sequence[Place]) -> set[int]:
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
    return shared
