"""Kernels of tree_attention, merge_states and write_kv: choice, scratch and launches; `api.py` has the contracts.

The versions of tree_attention are the modules of `versions`. Every function is batched and takes `backend`, "cupy" or
"emulate".
"""

from functools import cache
from typing import Any

import numpy as np

from ddtree_cupy.containers import PagedKV
from ddtree_cupy.errors import UnsupportedError
from ddtree_cupy.kernels import CTYPES, Arg, KernelSpec, get_kernel, ints, register
from ddtree_cupy.kernels.workspace import Workspace, empty, require_given, workspace_bytes
from ddtree_cupy.tree_attention.call import CACHE_STRIDES, Call, results, strides_of
from ddtree_cupy.tree_attention.versions import VERSIONS, Version

Array = Any


def tree_attention(
    call: Call, *, variant: str, out: tuple[Array, Array] | None, workspace: Array | None, checked: bool
) -> tuple[Array, Array]:
    """Launch one version; `api.tree_attention` says what it computes."""
    require_given("tree_attention", call.backend, out=out)
    if out is None:
        shape = call.q_nope.shape
        out = empty(call.backend, shape, call.q_nope.dtype), empty(call.backend, shape[:3], np.float32)
    version = choose_version(variant, call)
    plan = version.plan(call)
    scratch = Workspace("tree_attention", call.backend, plan.scratch, workspace)
    version.launch(plan, call, out, scratch, checked)
    return out


def choose_version(variant: str, call: Call) -> Version:
    """Return the version to run; UnsupportedError when the wanted one cannot, by host integers alone."""
    if variant == "auto":
        found = {}
        for name, version in VERSIONS.items():
            found[name] = version.refusal(call)
            if not found[name]:
                return version
        listed = "; ".join(f"{name} {reason}" for name, reason in found.items())
        raise UnsupportedError(f"tree_attention: no version fits: {listed}")
    if variant not in VERSIONS:
        listed = ", ".join(sorted(VERSIONS))
        raise UnsupportedError(f"tree_attention: `variant` is {variant!r}, expected one of: auto, {listed}")
    reason = VERSIONS[variant].refusal(call)
    if reason:
        fitting = next((name for name, version in VERSIONS.items() if not version.refusal(call)), None)
        hint = f"{fitting} (or 'auto') takes them" if fitting else "no other version takes these arguments either"
        raise UnsupportedError(f"tree_attention: {variant} {reason}; {hint}")
    return VERSIONS[variant]


def scratch_bytes(variant: str, call: Call) -> int:
    """Return the bytes of `workspace`; `api.tree_attention_workspace_bytes`."""
    return workspace_bytes(choose_version(variant, call).plan(call).scratch)


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
        args=(*sides, *results(dtype), Arg.scalar("M", "int64"), Arg.scalar("C", "int32")),
        max_threads=128,
        max_registers=40,
    )


def merge_states(
    out_a: Array,
    lse_a: Array,
    out_b: Array,
    lse_b: Array,
    *,
    backend: str,
    out: tuple[Array, Array] | None = None,
    checked: bool = True,
) -> tuple[Array, Array]:
    """Launch merge_states over any leading axes; `api.merge_states`."""
    require_given("merge_states", backend, out=out)
    if out is None:
        out = empty(backend, out_a.shape, out_a.dtype), empty(backend, lse_a.shape, np.float32)
    args = (out_a, lse_a, out_b, lse_b, *out, lse_a.size, out_a.shape[-1])
    get_kernel(merge_spec(out_a.dtype.name), backend)((-(-lse_a.size // 4),), (128,), args, checked=checked)
    return out


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
            *ints("N", "C", "R", "num_pages", "page_size", "max_pages", "rows_of_all"),
            *strides_of("ckv_rows_request", "ckv_rows_row", "kpe_rows_request", "kpe_rows_row"),
            *CACHE_STRIDES,
        ),
        max_threads=128,
        max_registers=64,
    )


def write_kv(
    kv: PagedKV,
    ckv_rows: Array,
    kpe_rows: Array,
    *,
    num_rows: int | Array,
    backend: str,
    checked: bool = True,
) -> None:
    """Launch write_kv; `api.write_kv`."""
    batch, capacity, head_dim_ckv = ckv_rows.shape
    of_each, of_all = (None, int(num_rows)) if isinstance(num_rows, int | np.integer) else (num_rows, 0)
    num_pages, page_size, _ = kv.ckv.shape
    pairs = ((ckv_rows, kpe_rows), (kv.ckv, kv.kpe))
    strides = [array.strides[axis] // array.dtype.itemsize for pair in pairs for array in pair for axis in (0, 1)]
    get_kernel(write_kv_spec(kv.ckv.dtype.name), backend)(
        (capacity, batch),
        (128,),
        (
            *(ckv_rows, kpe_rows, kv.page_table, kv.context_lens, of_each, kv.ckv, kv.kpe),
            *(capacity, head_dim_ckv, kpe_rows.shape[-1], num_pages, page_size, kv.page_table.shape[1], of_all),
            *strides,
        ),
        checked=checked,
    )


for _dtype in CTYPES:
    register(merge_spec(_dtype))
    register(write_kv_spec(_dtype))
