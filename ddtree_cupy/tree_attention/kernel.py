"""Kernels of tree_attention, merge_states and write_kv: the choice of a version, specs, and plans by sizes.

The versions of tree_attention are the modules of `versions`; `api.py` has the contracts.
"""

from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any

import numpy as np

from ddtree_cupy._arrays import batched_strides, numpy_dtype
from ddtree_cupy._cache_struct import packed_cache
from ddtree_cupy.containers import PagedKV
from ddtree_cupy.errors import UnsupportedError
from ddtree_cupy.kernels import CTYPES, KernelSpec, Plan, Step, register
from ddtree_cupy.tree_attention.call import Sizes
from ddtree_cupy.tree_attention.versions import VERSIONS, Version

Array = Any

THREADS = 128  # of merge_states and write_kv


@lru_cache(256)
def attention_plan(variant: str, sizes: Sizes) -> Plan:
    """Return the plan of the wanted version, or of the first that takes the sizes; calls of equal sizes share it."""
    return choose_version(variant, sizes).plan(sizes)


def choose_version(variant: str, sizes: Sizes) -> Version:
    """Return the version to run; UnsupportedError when the wanted one cannot."""
    if variant == "auto":
        found = {}
        for name, version in VERSIONS.items():
            found[name] = version.refusal(sizes)
            if not found[name]:
                return version
        listed = "; ".join(f"{name} {reason}" for name, reason in found.items())
        raise UnsupportedError(f"tree_attention: no version fits: {listed}")
    if variant not in VERSIONS:
        listed = ", ".join(sorted(VERSIONS))
        raise UnsupportedError(f"tree_attention: `variant` is {variant!r}, expected one of: auto, {listed}")
    reason = VERSIONS[variant].refusal(sizes)
    if reason:
        fitting = next((name for name, version in VERSIONS.items() if not version.refusal(sizes)), None)
        hint = f"{fitting} (or 'auto') takes them" if fitting else "no other version takes these arguments either"
        raise UnsupportedError(f"tree_attention: {variant} {reason}; {hint}")
    return VERSIONS[variant]


@cache
def merge_spec(dtype: str) -> KernelSpec:
    """Spec of merge_states for one dtype."""
    return KernelSpec(
        "tree_attention/merge_states.cu", f"merge_states<{CTYPES[dtype]}>", max_threads=THREADS, max_registers=40
    )


@lru_cache(256)
def merge_plan(shape: tuple[int, ...], dtype: str) -> Plan:
    """One warp for each row of any leading axes."""
    rows = int(np.prod(shape[:-1], dtype=np.int64))
    return Plan(
        (Step(merge_spec(dtype), (-(-rows // (THREADS // 32)),), (THREADS,)),),
        results={"out": (shape, numpy_dtype(dtype)), "lse": (shape[:-1], np.float32)},
        args={"M": rows, "C": shape[-1]},
    )


@cache
def write_spec(dtype: str) -> KernelSpec:
    """Spec of write_kv for one dtype."""
    return KernelSpec(
        "tree_attention/write_kv.cu",
        f"write_kv<{CTYPES[dtype]}>",
        strided="ckv_rows kpe_rows ckv kpe",
        nullable="num_rows",
        max_threads=THREADS,
        max_registers=64,
    )


@lru_cache(256)
def write_plan(dtype: str, batch: int, capacity: int, head_dim_ckv: int, head_dim_kpe: int) -> Plan:
    """One block for each row."""
    return Plan(
        (Step(write_spec(dtype), (capacity, batch), (THREADS,)),),
        args={"N": capacity, "C": head_dim_ckv, "R": head_dim_kpe},
    )


def write_inputs(kv: PagedKV, ckv_rows: Array, kpe_rows: Array, num_rows: int | Array) -> dict[str, Any]:
    """Arguments of write_kv by name."""
    is_one, itemsize = isinstance(num_rows, int), ckv_rows.dtype.itemsize
    ckv_strides, kpe_strides = batched_strides(ckv_rows, 3), batched_strides(kpe_rows, 3)
    return {
        "cache": packed_cache(kv),
        "ckv_rows": ckv_rows,
        "kpe_rows": kpe_rows,
        "num_rows": None if is_one else num_rows,
        "rows_of_all": num_rows if is_one else 0,
        "ckv_request_stride": ckv_strides[0] // itemsize,
        "ckv_row_stride": ckv_strides[1] // itemsize,
        "kpe_request_stride": kpe_strides[0] // itemsize,
        "kpe_row_stride": kpe_strides[1] // itemsize,
    }


@register
def specs() -> Iterator[KernelSpec]:
    """The kernels of `merge_states` and `write_kv`."""
    for dtype in CTYPES:
        yield from (merge_spec(dtype), write_spec(dtype))
