"""v4_wgmma: Hopper's tensor cores through wgmma, keys by tensor copies, then a merge where row tiles were cut."""

from collections.abc import Iterator
from functools import cache

import numpy as np

from ddtree_cupy._cache_struct import BOX_KEYS, BOX_WIDTHS, SMALL_PAGES
from ddtree_cupy.kernels import CTYPES, KernelSpec, Plan, Step, constants, register
from ddtree_cupy.tree_attention.call import Sizes
from ddtree_cupy.tree_attention.versions.common import MOST_GRID, Traits, results

SOURCE, MERGE_SOURCE = "tree_attention/v4_wgmma.cu", "tree_attention/v4_merge.cu"
ARCH = "sm_90"
TRAITS = Traits(
    dtypes=("float16", "bfloat16"),
    head_sizes=(BOX_WIDTHS,),
    page_sizes=(*SMALL_PAGES, BOX_KEYS),
    least_arch=90,
    most_arch=90,
    cuts_keys=True,
    tensor_cores=True,
)
MOST_UNEVEN = 17 / 16  # how much longer pieces of equal length may take than a perfect share of the keys


@cache
def attend_spec(dtype: str, pairs: bool, small_pages: bool) -> KernelSpec:
    """Spec of tree_attention_v4, or with `pairs` of the kernel whose blocks come in clusters of two."""
    return KernelSpec(
        SOURCE,
        f"tree_attention_v4{'_pairs' if pairs else ''}<{CTYPES[dtype]}, {str(small_pages).lower()}>",
        strided="q_nope q_pe ckv kpe",
        arch_specific=f"{ARCH}a",
        max_threads=constants(SOURCE)["THREADS"],
        max_registers=168,
        max_spill_bytes=640,  # of numbers that a piece needs once; beside products there are none or next to none
        max_shared_bytes=constants(SOURCE)["SHARED_BYTES"],
    )


@cache
def merge_spec(dtype: str) -> KernelSpec:
    """Spec of tree_attention_v4_merge."""
    return KernelSpec(
        MERGE_SOURCE,
        f"tree_attention_v4_merge<{CTYPES[dtype]}>",
        strided="q_nope q_pe",
        arch_specific=f"{ARCH}a",
        max_threads=constants(MERGE_SOURCE)["WARPGROUP"],
        max_registers=144,
    )


@register
def specs() -> Iterator[KernelSpec]:
    """Every kernel of v4."""
    for dtype in TRAITS.dtypes:
        yield from (attend_spec(dtype, pairs, small) for pairs in (False, True) for small in (False, True))
        yield merge_spec(dtype)


def refusal(sizes: Sizes) -> str:
    """Return why v4 cannot take a call of these sizes, "" when it can."""
    if sizes.dtype not in TRAITS.dtypes:
        return f"takes {' and '.join(TRAITS.dtypes)}, got {sizes.dtype}"
    if sizes.head_sizes != BOX_WIDTHS:
        return f"takes head sizes (C, R) of {BOX_WIDTHS}, got {sizes.head_sizes}"
    found = sizes.device.arch
    if found and found != ARCH:
        return f"needs {ARCH}, this device is {found}"
    if not sizes.device.compiles_exactly:
        return "needs NVRTC 12.9 or later, which compiles for one architecture alone"
    if not sizes.box_keys:
        return (
            "takes caches in pages of 8, 16, 32 or a multiple of 64 keys, whose rows start at multiples of 16 bytes at "
            "positive strides"
        )
    if sizes.split_keys is not None and sizes.split_keys % _tile_keys():
        return f"takes `split_keys` in multiples of {_tile_keys()}, got {sizes.split_keys}"
    if sizes.batch > MOST_GRID or sizes.batch * _row_tiles(sizes) * _key_tiles(sizes) >= 2**31:
        rows = f"{sizes.capacity} x {sizes.num_heads}"
        return f"takes at most {MOST_GRID} requests and 2**31 tiles, got {sizes.batch} of {rows} rows"
    return ""


def _tile_keys() -> int:
    return constants(SOURCE)["KEYS"]


def _row_tiles(sizes: Sizes) -> int:
    return -(-sizes.rows // constants(SOURCE)["TILE_ROWS"])


def _key_tiles(sizes: Sizes) -> int:
    """Return the key tiles of a row tile at most; tiles start at multiples of their size."""
    return -(-max(sizes.most_keys, 1) // _tile_keys()) + 1


def parts_of(sizes: Sizes, blocks: int) -> tuple[int, bool]:
    """Return into how many pieces row tiles are cut, 0 to let the device choose, and whether blocks come in pairs.

    The lengths of a batch decide it, and only the device knows them; that of a single request does not matter.
    """
    row_tiles = _row_tiles(sizes)
    all_tiles = sizes.batch * row_tiles
    if sizes.split_keys is not None or not all_tiles:
        return 0, False
    pairs = 2 * all_tiles <= blocks < 3 * all_tiles
    if sizes.batch > 1:
        return 0, pairs
    if pairs:
        return 2, True
    rounds, parts = -(-row_tiles // blocks), max(1, blocks // row_tiles)
    is_even = rounds * blocks <= MOST_UNEVEN * row_tiles * parts
    return (min(parts, _key_tiles(sizes)) if is_even else 0), False


def plan(sizes: Sizes, *, blocks: int | None = None, parts: int | None = None, pairs: bool | None = None) -> Plan:
    """Return the kernel, and the one that merges where row tiles may be cut.

    The device decides the number of blocks, one per multiprocessor, and how they share the work, unless that is given.
    """
    blocks = blocks or sizes.device.multiprocessors
    row_tiles = _row_tiles(sizes)
    best_parts, best_pairs = parts_of(sizes, blocks)
    if pairs is None:
        pairs = best_pairs and parts is None
    parts = best_parts if parts is None else parts
    if pairs:
        blocks -= blocks % 2
    merges = parts != 1 and not (parts and pairs)
    tiles_per_slice, slots = 0, (row_tiles * parts if parts else 2 * blocks) if merges else 0
    if sizes.split_keys is not None:
        tiles_per_slice = min(sizes.split_keys // _tile_keys(), _key_tiles(sizes))
        slices = -(-_key_tiles(sizes) // tiles_per_slice)
        slots = sizes.batch * row_tiles * slices
    found = constants(SOURCE)
    tile_rows, width = found["TILE_ROWS"], sizes.head_dim_ckv
    carries = blocks if _key_tiles(sizes) > found["FOLD_TILES"] else 0
    attend = attend_spec(sizes.dtype, pairs, sizes.box_keys < _tile_keys())
    merge = merge_spec(sizes.dtype)
    is_empty = sizes.batch * sizes.rows == 0
    steps = [Step(attend, (0 if is_empty else blocks,), (attend.max_threads,), attend.max_shared_bytes)]
    if merges:
        steps.append(Step(merge, (row_tiles * width // 32, sizes.batch), (merge.max_threads,)))
    return Plan(
        tuple(steps),
        results(sizes),
        scratch={
            "partial_out": ((slots, tile_rows, width), np.float32),
            "partial_score": ((slots, tile_rows), np.float32),
            "carries": ((carries, tile_rows * width + 512), np.float32),
            "cuts": ((sizes.batch, row_tiles, 4), np.int32),
        },
        args={"B": sizes.batch, "tiles_per_slice": tiles_per_slice, "blocks": blocks, "parts": parts},
    )
