"""v2_split_kv: online softmax over key tiles that rows share, split over the keys, then a merge of the slices."""

from functools import cache
from typing import Any

import numpy as np

from ddtree_cupy.kernels import CTYPES, Arg, KernelSpec, ints, register
from ddtree_cupy.kernels.workspace import Workspace
from ddtree_cupy.tree_attention.call import CACHE_STRIDES, KEYS, QUERY_STRIDES, TABLES, Call, attention_inputs, results
from ddtree_cupy.tree_attention.versions.common import (
    COMPILED_SIZES,
    STATIC_SHARED_BYTES,
    Plan,
    Step,
    Traits,
    shared_refusal,
    size_refusal,
)

Array = Any

TRAITS = Traits(dtypes=tuple(CTYPES))
WARPS, TILE = 4, 32  # these and the next are constants of v2_slices.cuh
LEAST_KEYS, MOST_KEYS, BLOCKS_WANTED = 256, 32_768, 256
THREADS = 32 * WARPS


def rows_per_block(dtype: str) -> int:
    """Query rows that one block owns."""
    return WARPS * (2 if dtype == "float32" else 4)


def shared_bytes(dtype: str, width: int) -> int:
    """Dynamic shared memory: a tile of keys of `width` = C + R, the queries and the weights of the block."""
    itemsize = 4 if dtype == "float32" else 2
    return TILE * (width * itemsize + 16) + rows_per_block(dtype) * 4 * (width + TILE)


@cache
def specs(dtype: str, head_dim_ckv: int, head_dim_kpe: int) -> tuple[KernelSpec, KernelSpec]:
    """Specs of tree_attention_v2 and of its merge, for one dtype and one pair of head sizes."""
    types = f"<{CTYPES[dtype]}, {head_dim_ckv}, {head_dim_kpe}>"
    attend = KernelSpec(
        source="tree_attention/v2_split_kv.cu",
        entry=f"tree_attention_v2{types}",
        args=(
            *attention_inputs(dtype),
            *results(dtype),
            Arg.output("partial_out", "float32"),
            Arg.output("partial_score", "float32"),
            *ints("N", "H"),
            Arg.scalar("region", "int64"),
            *ints("num_pages", "page_size", "max_pages", "max_context"),
            *QUERY_STRIDES,
            *CACHE_STRIDES,
            Arg.scalar("sm_scale", "float32"),
            *ints("keys", "vectors"),
        ),
        max_threads=THREADS,
        max_registers=224,
        shared_bytes=shared_bytes,
        max_shared_bytes=shared_bytes(dtype, head_dim_ckv + head_dim_kpe) + STATIC_SHARED_BYTES,
    )
    merge = KernelSpec(
        source="tree_attention/v2_merge.cu",
        entry=f"tree_attention_v2_merge{types}",
        args=(
            *TABLES,
            Arg.input("partial_out", "float32"),
            Arg.input("partial_score", "float32"),
            *results(dtype),
            *ints("N", "H"),
            Arg.scalar("region", "int64"),
            *ints("num_pages", "page_size", "max_pages", "max_context", "keys"),
        ),
        max_threads=THREADS,
        max_registers=64,
    )
    return attend, merge


for _dtype in TRAITS.dtypes:
    for _sizes in COMPILED_SIZES:
        for _spec in specs(_dtype, *_sizes):
            register(_spec)


def refusal(call: Call) -> str:
    """Return why v2 cannot take a call, "" when it can; shapes and host integers alone decide."""
    needed = shared_bytes(call.dtype, sum(call.head_sizes))
    return size_refusal(call) or shared_refusal(needed, "needs", call.backend)


def _geometry(rows: int, most_keys: int, rows_per_block: int) -> tuple[int, int]:
    """Return (blocks of a request, rows of its scratch region), for any number of its nodes and keys.

    With n row blocks a request takes at most max(ceil(BLOCKS_WANTED / n), least) slices, so n * slices is at most
    n + BLOCKS_WANTED or n * least; see `slices_of` in the kernel.
    """
    row_blocks = -(-rows // rows_per_block)
    worth, least = -(-most_keys // LEAST_KEYS), -(-most_keys // MOST_KEYS)
    wanted = min(row_blocks + BLOCKS_WANTED, row_blocks * max(worth, 1))
    blocks = max(wanted, row_blocks * max(least, 1))
    return blocks, blocks * rows_per_block if worth > 1 else 0


def plan(call: Call) -> Plan:
    """Return both kernels, the partial results between them, and the rows of a request's scratch region."""
    batch, capacity, num_heads, head_dim_ckv = call.q_nope.shape
    rows = capacity * num_heads
    blocks, region = _geometry(rows, call.most_keys, rows_per_block(call.dtype))
    attend, merge = specs(call.dtype, *call.head_sizes)
    return Plan(
        (
            Step(attend, (blocks, batch), (THREADS,), shared_bytes(call.dtype, sum(call.head_sizes))),
            Step(merge, (-(-rows // WARPS), batch), (THREADS,)),
        ),
        scratch={
            "partial_out": ((batch, region, head_dim_ckv), np.float32),
            "partial_score": ((batch, region), np.float32),
        },
        numbers=(region,),
    )


def launch(plan: Plan, call: Call, out: tuple[Array, Array], scratch: Workspace, checked: bool) -> None:
    """Launch both kernels."""
    attend, merge = plan.steps
    (region,) = plan.numbers
    _, capacity, num_heads, _ = call.q_nope.shape
    partials = scratch["partial_out"], scratch["partial_score"]
    sizes, keys = (capacity, num_heads, region, *call.page_sizes), KEYS[call.keys]
    scalars = (*sizes, *call.strides, call.sm_scale, keys, int(call.cache_is_aligned()))
    attend.launch(call, (*call.inputs, *out, *partials, *scalars), checked)
    merge.launch(call, (*call.tables, *partials, *out, *sizes, keys), checked)
