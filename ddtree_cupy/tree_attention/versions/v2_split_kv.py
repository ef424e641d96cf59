"""v2_split_kv: online softmax over key tiles that rows share, split over the keys, then a merge of the slices."""

from collections.abc import Iterator
from functools import cache

import numpy as np

from ddtree_cupy.kernels import CTYPES, KernelSpec, Plan, Step, constants, register
from ddtree_cupy.tree_attention.call import Sizes
from ddtree_cupy.tree_attention.versions.common import (
    COMPILED_SIZES,
    STATIC_SHARED_BYTES,
    Traits,
    results,
    shared_refusal,
    size_refusal,
)

SOURCE = "tree_attention/v2_split_kv.cu"
TRAITS = Traits(dtypes=tuple(CTYPES))


def _threads() -> int:
    return 32 * constants(SOURCE)["WARPS"]


def rows_per_block(dtype: str) -> int:
    """Query rows that one block owns."""
    return constants(SOURCE)["WARPS"] * (2 if dtype == "float32" else 4)


def shared_bytes(dtype: str, width: int) -> int:
    """Dynamic shared memory: a tile of keys of `width` = C + R, the queries and the weights of the block."""
    itemsize, tile = (4 if dtype == "float32" else 2), constants(SOURCE)["TILE"]
    return tile * (width * itemsize + 16) + rows_per_block(dtype) * 4 * (width + tile)


@cache
def specs_of(dtype: str, head_dim_ckv: int, head_dim_kpe: int) -> tuple[KernelSpec, KernelSpec]:
    """Specs of tree_attention_v2 and of its merge, for one dtype and one pair of head sizes."""
    types = f"<{CTYPES[dtype]}, {head_dim_ckv}, {head_dim_kpe}>"
    attend = KernelSpec(
        SOURCE,
        f"tree_attention_v2{types}",
        strided="q_nope q_pe ckv kpe",
        max_threads=_threads(),
        max_registers=224,
        shared_bytes=shared_bytes,
        max_shared_bytes=shared_bytes(dtype, head_dim_ckv + head_dim_kpe) + STATIC_SHARED_BYTES,
    )
    merge = KernelSpec(
        "tree_attention/v2_merge.cu",
        f"tree_attention_v2_merge{types}",
        strided="q_nope q_pe ckv kpe",
        max_threads=_threads(),
        max_registers=64,
    )
    return attend, merge


@register
def specs() -> Iterator[KernelSpec]:
    """Every kernel of v2, for the head sizes that the library names."""
    for dtype in TRAITS.dtypes:
        for head_sizes in COMPILED_SIZES:
            yield from specs_of(dtype, *head_sizes)


def refusal(sizes: Sizes) -> str:
    """Return why v2 cannot take a call of these sizes, "" when it can."""
    return size_refusal(sizes) or shared_refusal(shared_bytes(sizes.dtype, sizes.width), "needs", sizes)


def _geometry(rows: int, most_keys: int, rows_per_block: int) -> tuple[int, int]:
    """Return (blocks of a request, rows of its scratch region), for any number of its nodes and keys.

    With n row blocks a request takes at most max(ceil(BLOCKS_WANTED / n), least) slices, so n * slices is at most
    n + BLOCKS_WANTED or n * least; see `slices_of` in the kernel.
    """
    limits = constants(SOURCE)
    row_blocks = -(-rows // rows_per_block)
    worth, least = -(-most_keys // limits["LEAST_KEYS"]), -(-most_keys // limits["MOST_KEYS"])
    wanted = min(row_blocks + limits["BLOCKS_WANTED"], row_blocks * max(worth, 1))
    blocks = max(wanted, row_blocks * max(least, 1))
    return blocks, blocks * rows_per_block if worth > 1 else 0


def plan(sizes: Sizes) -> Plan:
    """Return both kernels, the partial results between them, and the rows of a request's scratch region."""
    blocks, region = _geometry(sizes.rows, sizes.most_keys, rows_per_block(sizes.dtype))
    attend, merge = specs_of(sizes.dtype, *sizes.head_sizes)
    shared, threads = shared_bytes(sizes.dtype, sizes.width), (_threads(),)
    merge_blocks = -(-sizes.rows // constants(SOURCE)["WARPS"])
    return Plan(
        (Step(attend, (blocks, sizes.batch), threads, shared), Step(merge, (merge_blocks, sizes.batch), threads)),
        results(sizes),
        scratch={
            "partial_out": ((sizes.batch, region, sizes.head_dim_ckv), np.float32),
            "partial_score": ((sizes.batch, region), np.float32),
        },
        args={"region": region},
    )
