"""CUDA kernels of tree_attention: specs, geometry and launches; the contracts live in `api.py`.

Every function is batched and takes `backend`, "cupy" or "emulate".
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from ddtree_cupy._compile import Arg, KernelSpec, get_kernel
from ddtree_cupy._compile.kernel import register
from ddtree_cupy._compile.memory import Workspace, empty, require_given, shared_limit, workspace_bytes
from ddtree_cupy.containers import DraftTree, PagedKV, Visibility
from ddtree_cupy.errors import UnsupportedError

Array = Any

CTYPES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}
KEYS = {"all": 0, "context": 1, "tree": 2}
VARIANTS = ("v1_three_phase", "v2_split_kv")
MOST_WIDTH = 1024  # of C and of R: a float32 sum runs over at most this many terms
STATIC_SHARED_BYTES = 1024  # room for the kernels' own small arrays

# the constants of v2_split_kv.cu
_WARPS, _TILE, _LEAST_KEYS, _MOST_KEYS, _BLOCKS_WANTED = 4, 32, 256, 32768, 256


def _strides(*names: str) -> tuple[Arg, ...]:
    return tuple(Arg.scalar(f"{name}_stride", "int64") for name in names)


_QUERY_STRIDES = _strides(*(f"{q}_{axis}" for q in ("q_nope", "q_pe") for axis in ("request", "node", "head")))
_CACHE_STRIDES = _strides("ckv_page", "ckv_slot", "kpe_page", "kpe_slot")


def _ints(*names: str) -> tuple[Arg, ...]:
    return tuple(Arg.scalar(name, "int32") for name in names)


def _attention_inputs(dtype: str) -> tuple[Arg, ...]:
    strided = [Arg.input(name, dtype, strided=True) for name in ("q_nope", "q_pe", "ckv", "kpe")]
    tables = [Arg.input(name, "int32") for name in ("page_table", "context_lens", "num_nodes")]
    return (*strided, *tables, Arg.input("visibility_bits", "uint32"))


def _results(dtype: str) -> tuple[Arg, ...]:
    return Arg.output("out", dtype), Arg.output("lse", "float32")


def v1_shared_bytes(width: int, most_keys: int) -> int:
    """Dynamic shared memory of v1: one query of `width` = C + R and one score a key, float32."""
    return 4 * (width + most_keys)


@cache
def v1_spec(dtype: str) -> KernelSpec:
    """Spec of v1_three_phase for one dtype; any C and R."""
    return KernelSpec(
        source="tree_attention/v1_three_phase.cu",
        entry=f"tree_attention_v1<{CTYPES[dtype]}>",
        args=(
            *_attention_inputs(dtype),
            *_results(dtype),
            *_ints("N", "H", "C", "R", "num_pages", "page_size", "max_pages", "max_context"),
            *_QUERY_STRIDES,
            *_CACHE_STRIDES,
            Arg.scalar("sm_scale", "float32"),
            Arg.scalar("keys", "int32"),
        ),
        max_threads=128,
        max_registers=64,
        shared_bytes=v1_shared_bytes,
    )


def v2_rows(dtype: str) -> int:
    """Query rows one block of v2 owns."""
    return _WARPS * (2 if dtype == "float32" else 4)


def v2_shared_bytes(dtype: str, width: int) -> int:
    """Dynamic shared memory of v2: a tile of keys of `width` = C + R, the queries and the weights of the block."""
    itemsize = 4 if dtype == "float32" else 2
    return _TILE * (width * itemsize + 16) + v2_rows(dtype) * 4 * (width + _TILE)


@cache
def v2_specs(dtype: str, head_dim_ckv: int, head_dim_kpe: int) -> tuple[KernelSpec, KernelSpec]:
    """Specs of v2_split_kv and of its merge, for one dtype and one pair of head sizes."""
    source, types = "tree_attention/v2_split_kv.cu", f"<{CTYPES[dtype]}, {head_dim_ckv}, {head_dim_kpe}>"
    tables = tuple(Arg.input(name, "int32") for name in ("page_table", "context_lens", "num_nodes"))
    shared = v2_shared_bytes(dtype, head_dim_ckv + head_dim_kpe)
    attend = KernelSpec(
        source=source,
        entry=f"tree_attention_v2{types}",
        args=(
            *_attention_inputs(dtype),
            *_results(dtype),
            Arg.output("partial_out", "float32"),
            Arg.output("partial_score", "float32"),
            *_ints("N", "H"),
            Arg.scalar("region", "int64"),
            *_ints("num_pages", "page_size", "max_pages", "max_context"),
            *_QUERY_STRIDES,
            *_CACHE_STRIDES,
            Arg.scalar("sm_scale", "float32"),
            *_ints("keys", "vectors"),
        ),
        max_threads=128,
        max_registers=224,
        shared_bytes=v2_shared_bytes,
        max_shared_bytes=shared + STATIC_SHARED_BYTES,
    )
    merge = KernelSpec(
        source=source,
        entry=f"tree_attention_v2_merge{types}",
        args=(
            *tables,
            Arg.input("partial_out", "float32"),
            Arg.input("partial_score", "float32"),
            *_results(dtype),
            *_ints("N", "H"),
            Arg.scalar("region", "int64"),
            *_ints("num_pages", "page_size", "max_pages", "max_context", "keys"),
        ),
        max_threads=128,
        max_registers=64,
    )
    return attend, merge


@cache
def merge_spec(dtype: str) -> KernelSpec:
    """Spec of merge_states for one dtype."""
    sides = (
        Arg.input("out_a", dtype),
        Arg.input("lse_a", "float32"),
        Arg.input("out_b", dtype),
        Arg.input("lse_b", "float32"),
    )
    return KernelSpec(
        source="tree_attention/merge_states.cu",
        entry=f"merge_states<{CTYPES[dtype]}>",
        args=(*sides, *_results(dtype), Arg.scalar("M", "int64"), Arg.scalar("C", "int32")),
        max_threads=128,
        max_registers=40,
    )


@cache
def write_kv_spec(dtype: str) -> KernelSpec:
    """Spec of write_kv for one dtype."""
    return KernelSpec(
        source="tree_attention/write_kv.cu",
        entry=f"write_kv<{CTYPES[dtype]}>",
        args=(
            Arg.input("ckv_rows", dtype, strided=True),
            Arg.input("kpe_rows", dtype, strided=True),
            Arg.input("page_table", "int32"),
            Arg.input("context_lens", "int32"),
            Arg.input("num_rows", "int32", nullable=True),
            Arg.output("ckv", dtype, strided=True),
            Arg.output("kpe", dtype, strided=True),
            *_ints("N", "C", "R", "num_pages", "page_size", "max_pages", "rows_of_all"),
            *_strides("ckv_rows_request", "ckv_rows_row", "kpe_rows_request", "kpe_rows_row"),
            *_CACHE_STRIDES,
        ),
        max_threads=128,
        max_registers=64,
    )


for _dtype in CTYPES:
    register(v1_spec(_dtype))
    for _sizes in ((512, 64), (64, 16)):
        for _spec in v2_specs(_dtype, *_sizes):
            register(_spec)
    register(merge_spec(_dtype))
    register(write_kv_spec(_dtype))


def tree_attention(
    tree: DraftTree | Visibility,
    q_nope: Array,
    q_pe: Array,
    kv: PagedKV,
    *,
    sm_scale: float,
    keys: str = "all",
    variant: str = "auto",
    backend: str,
    out: tuple[Array, Array] | None = None,
    workspace: Array | None = None,
    checked: bool = True,
) -> tuple[Array, Array]:
    """Launch one version; `api.tree_attention` says what it computes."""
    require_given("tree_attention", backend, out=out)
    if out is None:
        out = empty(backend, q_nope.shape, q_nope.dtype), empty(backend, q_nope.shape[:3], np.float32)
    run = _VERSIONS[choose_variant(variant, q_nope, q_pe, kv, keys, backend)]
    run(tree, q_nope, q_pe, kv, float(sm_scale), keys, backend, out, workspace, checked)
    return out


def choose_variant(variant: str, q_nope: Array, q_pe: Array, kv: PagedKV, keys: str, backend: str) -> str:
    """Return the version to run; UnsupportedError when the wanted one cannot, by host integers alone."""
    reasons = {
        "v1_three_phase": lambda: _v1_refusal(q_nope, q_pe, kv, keys, backend),
        "v2_split_kv": lambda: _v2_refusal(q_nope, q_pe, backend),
    }
    if variant == "auto":
        found = {name: reasons[name]() for name in ("v2_split_kv", "v1_three_phase")}
        for name, reason in found.items():
            if not reason:
                return name
        listed = "; ".join(f"{name} {reason}" for name, reason in found.items())
        raise UnsupportedError(f"tree_attention: no version fits: {listed}")
    if variant not in reasons:
        raise UnsupportedError(
            f"tree_attention: variant {variant!r} is unknown; supported: auto, {', '.join(VARIANTS)}"
        )
    reason = reasons[variant]()
    if reason:
        raise UnsupportedError(f"tree_attention: {variant} {reason}; variant='auto' picks one that fits")
    return variant


def _width_refusal(q_nope: Array, q_pe: Array) -> str:
    sizes = (q_nope.shape[-1], q_pe.shape[-1])
    if all(size % 16 == 0 and 0 < size <= MOST_WIDTH for size in sizes):
        return ""
    return f"takes head sizes that are multiples of 16 up to {MOST_WIDTH}, got {sizes[0]} and {sizes[1]}"


def _v1_refusal(q_nope: Array, q_pe: Array, kv: PagedKV, keys: str, backend: str) -> str:
    most_keys = _most_keys(q_nope, kv, keys)
    needed = v1_shared_bytes(q_nope.shape[-1] + q_pe.shape[-1], most_keys)
    limit = shared_limit(backend) - STATIC_SHARED_BYTES
    if needed > limit:
        return f"keeps {most_keys} scores in {needed} bytes of shared memory, this device has {limit}"
    return _width_refusal(q_nope, q_pe)


def _v2_refusal(q_nope: Array, q_pe: Array, backend: str) -> str:
    refusal = _width_refusal(q_nope, q_pe)
    if refusal:
        return refusal
    sizes = q_nope.shape[-1], q_pe.shape[-1]
    needed = v2_shared_bytes(q_nope.dtype.name, sum(sizes))
    limit = shared_limit(backend) - STATIC_SHARED_BYTES
    return f"needs {needed} bytes of shared memory, this device has {limit}" if needed > limit else ""


def _most_keys(q_nope: Array, kv: PagedKV, keys: str) -> int:
    return (0 if keys == "tree" else kv.max_context) + (0 if keys == "context" else q_nope.shape[1])


def _query_strides(q_nope: Array, q_pe: Array) -> list[int]:
    return [stride // q.dtype.itemsize for q in (q_nope, q_pe) for stride in q.strides[:3]]


def _cache_strides(kv: PagedKV) -> list[int]:
    return [stride // pool.dtype.itemsize for pool in (kv.ckv, kv.kpe) for stride in pool.strides[:2]]


def _page_sizes(kv: PagedKV) -> list[int]:
    return [kv.ckv.shape[0], kv.ckv.shape[1], kv.page_table.shape[1]]


def _run_v1(
    tree: DraftTree | Visibility,
    q_nope: Array,
    q_pe: Array,
    kv: PagedKV,
    sm_scale: float,
    keys: str,
    backend: str,
    out: tuple[Array, Array],
    workspace: Array | None,
    checked: bool,
) -> None:
    batch, capacity, num_heads, head_dim_ckv = q_nope.shape
    head_dim_kpe = q_pe.shape[-1]
    get_kernel(v1_spec(q_nope.dtype.name), backend)(
        (num_heads, capacity, batch),
        (128,),
        (
            *(q_nope, q_pe, kv.ckv, kv.kpe, kv.page_table, kv.context_lens, tree.num_nodes, tree.visibility_bits),
            *(*out, capacity, num_heads, head_dim_ckv, head_dim_kpe, *_page_sizes(kv), kv.max_context),
            *(*_query_strides(q_nope, q_pe), *_cache_strides(kv), sm_scale, KEYS[keys]),
        ),
        shared_mem=v1_shared_bytes(head_dim_ckv + head_dim_kpe, _most_keys(q_nope, kv, keys)),
        checked=checked,
    )


def _run_v2(
    tree: DraftTree | Visibility,
    q_nope: Array,
    q_pe: Array,
    kv: PagedKV,
    sm_scale: float,
    keys: str,
    backend: str,
    out: tuple[Array, Array],
    workspace: Array | None,
    checked: bool,
) -> None:
    batch, capacity, num_heads, head_dim_ckv = q_nope.shape
    head_dim_kpe = q_pe.shape[-1]
    dtype = q_nope.dtype.name
    attend, merge = v2_specs(dtype, head_dim_ckv, head_dim_kpe)
    blocks, region = _v2_geometry(capacity * num_heads, _most_keys(q_nope, kv, keys), v2_rows(dtype))
    scratch = Workspace("tree_attention", backend, _v2_scratch(batch, region, head_dim_ckv), workspace)
    partials = scratch["partial_out"], scratch["partial_score"]
    tables = kv.page_table, kv.context_lens, tree.num_nodes
    sizes = (*_page_sizes(kv), kv.max_context)
    get_kernel(attend, backend)(
        (blocks, batch),
        (128,),
        (
            *(q_nope, q_pe, kv.ckv, kv.kpe, *tables, tree.visibility_bits, *out, *partials),
            *(capacity, num_heads, region, *sizes, *_query_strides(q_nope, q_pe), *_cache_strides(kv)),
            *(sm_scale, KEYS[keys], int(_rows_are_aligned(kv))),
        ),
        shared_mem=v2_shared_bytes(dtype, head_dim_ckv + head_dim_kpe),
        checked=checked,
    )
    get_kernel(merge, backend)(
        (-(-capacity * num_heads // _WARPS), batch),
        (128,),
        (*tables, *partials, *out, capacity, num_heads, region, *sizes, KEYS[keys]),
        checked=checked,
    )


_VERSIONS: dict[str, Callable[..., None]] = {"v1_three_phase": _run_v1, "v2_split_kv": _run_v2}


def _v2_geometry(rows: int, most_keys: int, rows_per_block: int) -> tuple[int, int]:
    """Return (blocks of a request, rows of its scratch region), for any number of its nodes and keys.

    With n row blocks a request takes at most max(ceil(BLOCKS_WANTED / n), least) slices, so n * slices is at most
    n + BLOCKS_WANTED or n * least; see `slices_of` in the kernel.
    """
    row_blocks = -(-rows // rows_per_block)
    worth, least = -(-most_keys // _LEAST_KEYS), -(-most_keys // _MOST_KEYS)
    wanted = min(row_blocks + _BLOCKS_WANTED, row_blocks * max(worth, 1))
    blocks = max(wanted, row_blocks * max(least, 1))
    return blocks, blocks * rows_per_block if worth > 1 else 0


def _v2_scratch(batch: int, region: int, head_dim_ckv: int) -> dict[str, tuple[tuple[int, ...], Any]]:
    return {
        "partial_out": ((batch, region, head_dim_ckv), np.float32),
        "partial_score": ((batch, region), np.float32),
    }


def attention_scratch_bytes(q_nope: Array, q_pe: Array, kv: PagedKV, keys: str, variant: str, backend: str) -> int:
    """Return the scratch bytes of a batched call; `api.tree_attention_workspace_bytes`."""
    if choose_variant(variant, q_nope, q_pe, kv, keys, backend) == "v1_three_phase":
        return 0
    batch, capacity, num_heads, head_dim_ckv = q_nope.shape
    rows_per_block = v2_rows(q_nope.dtype.name)
    _, region = _v2_geometry(capacity * num_heads, _most_keys(q_nope, kv, keys), rows_per_block)
    return workspace_bytes(_v2_scratch(batch, region, head_dim_ckv))


def _rows_are_aligned(kv: PagedKV) -> bool:
    """Whether every cache row starts at a multiple of 16 bytes."""
    for pool in (kv.ckv, kv.kpe):
        pointer = pool.ctypes.data if isinstance(pool, np.ndarray) else pool.data.ptr
        if pointer % 16 or any(stride % 16 for stride in pool.strides[:2]):
            return False
    return True


def merge_states(
    out_a: Array, lse_a: Array, out_b: Array, lse_b: Array, *, backend: str, out: tuple[Array, Array] | None = None
) -> tuple[Array, Array]:
    """Launch merge_states over any leading axes; `api.merge_states`."""
    require_given("merge_states", backend, out=out)
    if out is None:
        out = empty(backend, out_a.shape, out_a.dtype), empty(backend, lse_a.shape, np.float32)
    args = (out_a, lse_a, out_b, lse_b, *out, lse_a.size, out_a.shape[-1])
    get_kernel(merge_spec(out_a.dtype.name), backend)((-(-lse_a.size // 4),), (128,), args)
    return out


def write_kv(kv: PagedKV, ckv_rows: Array, kpe_rows: Array, *, num_rows: int | Array, backend: str) -> None:
    """Launch write_kv; `api.write_kv`."""
    batch, capacity, head_dim_ckv = ckv_rows.shape
    of_each = None if isinstance(num_rows, int) else num_rows
    of_all = num_rows if isinstance(num_rows, int) else 0
    row_strides = [stride // rows.dtype.itemsize for rows in (ckv_rows, kpe_rows) for stride in rows.strides[:2]]
    get_kernel(write_kv_spec(kv.ckv.dtype.name), backend)(
        (capacity, batch),
        (128,),
        (
            *(ckv_rows, kpe_rows, kv.page_table, kv.context_lens, of_each, kv.ckv, kv.kpe),
            *(capacity, head_dim_ckv, kpe_rows.shape[-1], *_page_sizes(kv), of_all),
            *(*row_strides, *_cache_strides(kv)),
        ),
    )
