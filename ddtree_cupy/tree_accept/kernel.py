"""CUDA kernels of tree_accept: specs, and plans by the sizes of a call; `api.py` has the contracts."""

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np

from ddtree_cupy._arrays import batched_strides
from ddtree_cupy._cache_struct import CacheFacts, facts_of
from ddtree_cupy._overlap import Place, address_of, overlap
from ddtree_cupy.containers import AcceptResult, PagedKV
from ddtree_cupy.errors import UnsupportedError
from ddtree_cupy.kernels import CTYPES, KernelSpec, Plan, Step, constants, layout_of, register

Array = Any
Layer = tuple[Place, Place, Place, int]  # ckv, kpe, page table, and which array of lengths

COMMIT = "tree_accept/commit_kv.cu"
UNITS = (16, 4, 2)  # bytes that a thread moves at once, the largest that fits


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


def _commit_spec(entry: str, nullable: str, max_registers: int) -> KernelSpec:
    threads = constants(COMMIT)["THREADS"]
    return KernelSpec(COMMIT, entry, nullable=nullable, max_threads=threads, max_registers=max_registers)


ACCEPT_SPEC = KernelSpec("tree_accept/accept.cu", "accept", max_threads=32, max_registers=40)
COMMIT_SPEC = _commit_spec("commit_kv", "staging", 144)
COMMIT_APART_SPEC = _commit_spec("commit_kv_apart", "staging", 144)
ADVANCE_SPEC = _commit_spec("advance_context", "", 32)


@register
def specs() -> Iterator[KernelSpec]:
    """Every kernel of tree_accept."""
    for dtype in CTYPES:
        yield from (greedy_spec(dtype), sample_spec(dtype))
    yield from (ACCEPT_SPEC, COMMIT_SPEC, COMMIT_APART_SPEC, ADVANCE_SPEC)


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
    """Arguments of the kernels by name; `groups` says which of the new lengths a cache gets."""
    lens = {f"old lens {group}": kv.context_lens for kv, group in zip(caches, groups, strict=True)}
    return {"accepted": result.accepted, "num_accepted": result.num_accepted, **lens}


def commit_plan(caches: Sequence[PagedKV], shape: tuple[int, int], groups: Sequence[int]) -> Plan:
    """Return the move of all caches, each memory of equal tables once, and the new lengths.

    Parameters
    ----------
    caches : sequence of PagedKV
    shape : tuple of int
        B and N.
    groups : sequence of int
        Which of the new lengths a cache gets.
    """
    facts = tuple([facts_of(kv) for kv in caches])
    lens = [kv.context_lens for kv in caches]
    if all(each is lens[0] for each in lens):
        numbers = (0,) * len(lens)
    else:
        known: dict[int, int] = {}
        numbers = tuple([known.setdefault(address_of(each), len(known)) for each in lens])
    return _plan_of_facts(facts, numbers, shape, tuple(groups))


@lru_cache(64)
def _plan_of_facts(
    facts: tuple[CacheFacts, ...], numbers: tuple[int, ...], shape: tuple[int, int], groups: tuple[int, ...]
) -> Plan:
    layers = tuple((*of_cache.places, number) for of_cache, number in zip(facts, numbers, strict=True))
    return _commit_plan(layers, shape, groups)  # the same for other containers over the same memory


@lru_cache(64)
def _commit_plan(layers: tuple[Layer, ...], shape: tuple[int, int], groups: tuple[int, ...]) -> Plan:
    """Return one launch where the layers have one array of lengths; else a second one advances the lengths."""
    batch, capacity = shape
    sizes = constants(COMMIT)
    # a number for each of the new lengths, those that come from one array in sequence; and the old ones by that number
    sources = dict(zip(groups, (number for *_, number in layers), strict=True))
    order = sorted(sources, key=sources.__getitem__)
    if len(order) > sizes["MOST_LENGTHS"]:
        raise UnsupportedError(
            f"commit_kv: `kv` holds caches with {len(order)} different pairs of old and new `context_lens`, expected "
            f"at most {sizes['MOST_LENGTHS']}; layers may share one array"
        )
    first_of = {number: order.index(group) for group, number in reversed(sources.items())}
    moved, staged = _moves(layers)
    table = _PieceTable(batch * capacity, sizes["COLUMNS"])
    for *places, number in moved:
        table.add(places, first_of[number])
    num_direct = len(table.pieces)
    for *places, number in staged:
        table.add(places, first_of[number], is_staged=True)
    num_staged = len(table.pieces) - num_direct

    old, new = (tuple(f"{which} {group}" for group in order) for which in ("old lens", "lens"))
    args: dict[str, Any] = {"num_direct": num_direct, "num_staged": num_staged}
    if not num_staged:
        args["staging"] = None
    grid, block = (batch * (num_direct + 2 * num_staged),), (sizes["THREADS"],)
    steps = []
    if len(order) == 1 and table.pieces:
        steps = [Step(COMMIT_SPEC, grid, block, 0, args, {"context_lens": old[0], "new_context_lens": new[0]})]
    elif order:
        steps = [Step(COMMIT_APART_SPEC, grid, block, 0, args, {"old_lens": old})] if table.pieces else []
        by_request = -(-batch // sizes["THREADS"]), len(order)
        names = {"old_lens": old, "new_lens": new}
        steps.append(Step(ADVANCE_SPEC, by_request, block, 0, {"num_lengths": len(order)}, names))
    return Plan(
        tuple(steps),
        results={f"lens {group}": ((batch,), np.int32) for group in range(len(order))},
        scratch={"staging": ((table.staged_bytes,), np.uint8)} if num_staged else {},
        args={"B": batch, "N": capacity},
        resident=table.arrays(sizes["LENGTHS_READ"] + batch) if table.pieces else {},
    )


class _PieceTable:
    """What `commit_kv.cu` reads of the pools, in pieces of so many columns at most."""

    def __init__(self, rows: int, columns: int) -> None:
        self._rows, self._columns = rows, columns
        self._layout = layout_of(COMMIT, "Piece")
        self.pieces: list[Array] = []
        self.staged_bytes = 0

    def add(self, places: Sequence[Place], length: int, *, is_staged: bool = False) -> None:
        """Add both pools of a layer; `length` says which array of lengths it has."""
        *pools, page_table = places
        for pool in pools:
            (num_pages, page_size, width), (page_stride, slot_stride, _) = pool.shape, pool.strides
            num_bytes = width * pool.itemsize
            all_of_them = pool.address | page_stride | slot_stride | num_bytes
            unit = next((unit for unit in UNITS if all_of_them % unit == 0), UNITS[-1])
            for start in range(0, num_bytes, unit * self._columns):
                columns = min(num_bytes - start, unit * self._columns) // unit
                piece = self._layout.pack(
                    rows=np.uint64(pool.address + start),
                    page_table=np.uint64(page_table.address),
                    page_stride=page_stride,
                    slot_stride=slot_stride,
                    staging=self.staged_bytes,
                    num_pages=num_pages,
                    page_size=page_size,
                    max_pages=page_table.shape[-1],
                    unit=unit,
                    width=columns,
                    length=length,
                )
                self.pieces.append(piece)
                if is_staged:
                    self.staged_bytes += -(-self._rows * columns * unit // 16) * 16

    def arrays(self, num_counters: int) -> dict[str, Array]:
        """Return what stays in device memory."""
        pieces = np.stack(self.pieces).view(np.uint32)
        return {"pieces": pieces.reshape(len(self.pieces), -1), "counters": np.zeros(num_counters, np.uint32)}


def _moves(layers: Sequence[Layer]) -> tuple[list[Layer], list[Layer]]:
    """Return (layers to move in place, layers to move through staging), each memory of equal tables once.

    Layers that share memory are the same one if their page tables lead to the same rows, and different ones if they do
    not; that only the device knows. When all of them are read before any is written, both come out right.
    """
    different = list(dict.fromkeys(layers))
    shared = _sharing([pool for layer in different for pool in layer[:2]])
    moved = [layer for number, layer in enumerate(different) if number not in shared]
    return moved, [layer for number, layer in enumerate(different) if number in shared]


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
