"""Preparations of the public functions of tree_attention: checks of metadata and of values, and plans."""

from typing import Any

import numpy as np

from ddtree_cupy._arrays import batched_shape
from ddtree_cupy._cache_struct import facts_of
from ddtree_cupy._call import Call, Form
from ddtree_cupy._check import FLOATS, FLOATS_AND_F64
from ddtree_cupy._overlap import Region, bounds_of
from ddtree_cupy.containers import DraftTree, PagedKV, Visibility
from ddtree_cupy.containers.topology import words_per_row
from ddtree_cupy.errors import ArgumentError, ShapeError, UnsupportedError
from ddtree_cupy.tree_attention import kernel, reference
from ddtree_cupy.tree_attention.call import KEYS, inputs_of, sizes_of

Array = Any

LARGEST_SCALE = float(np.finfo(np.float32).max) / np.log2(np.e)  # kernels take exponentials of base 2
OUT_AND_LSE = Form("out", "lse")


def write_kv(call: Call, kv: PagedKV, ckv_rows: Array, kpe_rows: Array, *, num_rows: int | Array) -> None:
    """Prepare `write_kv`."""
    check = call.check
    ckv_rows, kpe_rows = call.array("ckv_rows", ckv_rows), call.array("kpe_rows", kpe_rows)
    on_device = _choose_backend(call, kv, ckv_rows=ckv_rows, kpe_rows=kpe_rows)
    pools = {"kv.ckv": kv.ckv, "kv.kpe": kv.kpe}
    if call.checks:
        _check_cache(call, kv, on_device)
        for name, rows, width in (("ckv_rows", ckv_rows, "head_dim_ckv"), ("kpe_rows", kpe_rows, "head_dim_kpe")):
            check.array(name, rows, call.axes("num_rows", width), last_contiguous=True)
        check.same_dtype(ckv=kv.ckv, ckv_rows=ckv_rows, kpe_rows=kpe_rows)
        for name, pool in pools.items():
            check.array(name, pool, pool.shape, writable=True)
    capacity = int(ckv_rows.shape[-2])
    num_rows = call.per_request("num_rows", num_rows, 0, capacity)
    tables = {"kv.page_table": kv.page_table, "kv.context_lens": kv.context_lens, "num_rows": num_rows}
    call.written, call.read = pools, {"ckv_rows": ckv_rows, "kpe_rows": kpe_rows, **tables}
    kv, ckv_rows, kpe_rows, num_rows = call.batch(kv, ckv_rows, kpe_rows, num_rows)
    if on_device:
        batch, _, head_dim_ckv = batched_shape(ckv_rows, 3)
        call.plan = kernel.write_plan(facts_of(kv).dtype, batch, capacity, head_dim_ckv, kpe_rows.shape[-1])
        call.inputs = kernel.write_inputs(kv, ckv_rows, kpe_rows, num_rows)
        return
    check.separate(call.written, call.read)
    counts = np.full(len(kv.context_lens), num_rows, np.int32) if isinstance(num_rows, int) else num_rows
    if (counts < 0).any() or (counts > capacity).any():
        raise ArgumentError(f"write_kv: `num_rows` is {counts.tolist()}, expected values in 0..{capacity}")
    call.reference = lambda: reference.write_kv(kv, ckv_rows, kpe_rows, num_rows=counts)


def tree_attention(
    call: Call,
    tree: DraftTree | Visibility,
    q_nope: Array,
    q_pe: Array,
    kv: PagedKV,
    *,
    sm_scale: float,
    keys: str = "all",
    variant: str = "auto",
    split_keys: int | None = None,
) -> None:
    """Prepare `tree_attention`."""
    check = call.check
    check.kind("tree", tree, DraftTree, Visibility)
    q_nope, q_pe = call.array("q_nope", q_nope), call.array("q_pe", q_pe)
    bits = {"tree.visibility_bits": tree.visibility_bits, "tree.num_nodes": tree.num_nodes}
    on_device = _choose_backend(call, kv, q_nope=q_nope, q_pe=q_pe, **bits)
    if call.checks:
        _check_attention(call, tree, q_nope, q_pe, kv, on_device)
        if split_keys is not None and check.integer("split_keys", split_keys, low=32) % 32:
            raise ArgumentError(f"{check.function}: `split_keys` is {split_keys}, expected a multiple of 32")
        check.choice("keys", keys, KEYS)
        if abs(check.real("sm_scale", sm_scale)) > LARGEST_SCALE:
            raise ArgumentError(
                f"{check.function}: `sm_scale` is {sm_scale}, expected one that is finite in float32 when multiplied "
                f"by log2(e): at most {LARGEST_SCALE:.4g} in size"
            )
    scale = float(sm_scale)
    call.form = OUT_AND_LSE
    call.read = {"tree": Region(bounds_of(tree).values(), bits), "q_nope": q_nope, "q_pe": q_pe}
    if call.is_checked and on_device:
        call.read = {**call.read, "kv": Region(facts_of(kv).bounds, kv), "kv.context_lens": kv.context_lens}
    call.in_place = [("out.out", "q_nope")]
    tree, q_nope, q_pe, kv = call.batch(tree, q_nope, q_pe, kv)
    if on_device:
        sizes = sizes_of(q_nope, q_pe, kv, keys, split_keys, call.backend)
        call.plan = kernel.attention_plan(variant, sizes)
        call.inputs = inputs_of(tree, q_nope, q_pe, kv, scale, keys, sizes)
        return
    if variant not in ("auto", "reference"):
        raise UnsupportedError(f"tree_attention: `variant` is {variant!r}, expected for NumPy one of: auto, reference")
    _check_lengths(tree, kv)
    call.reference = lambda: reference.tree_attention(tree, q_nope, q_pe, kv, sm_scale=scale, keys=keys)


def merge_states(call: Call, out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> None:
    """Prepare `merge_states`."""
    check = call.check
    given = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    arrays = {name: call.array(name, value) for name, value in given.items()}
    out_a, lse_a, out_b, lse_b = arrays.values()
    on_device = call.choose_backend(**arrays)
    if call.checks:
        if out_a.ndim == 0:
            raise ShapeError("merge_states: `out_a` is (), expected (..., num_heads, head_dim_ckv)")
        check.array("out_a", out_a, out_a.shape, FLOATS if on_device else FLOATS_AND_F64, contiguous=on_device)
        check.array("out_b", out_b, out_a.shape, (out_a.dtype.name,), contiguous=on_device)
        lse_dtype = ("float64",) if out_a.dtype.name == "float64" else ("float32",)
        check.array("lse_a", lse_a, out_a.shape[:-1], lse_dtype, contiguous=on_device)
        check.array("lse_b", lse_b, out_a.shape[:-1], lse_dtype, contiguous=on_device)
    call.form = OUT_AND_LSE
    call.read = arrays
    call.in_place = [(f"out.{name}", f"{name}_{side}") for name in ("out", "lse") for side in "ab"]
    if on_device:
        call.plan = kernel.merge_plan(out_a.shape, out_a.dtype.name)
        call.inputs = arrays
        return
    call.reference = lambda: reference.merge_states(out_a, lse_a, out_b, lse_b)


def _choose_backend(call: Call, kv: PagedKV, **arrays: Array) -> bool:
    """Choose the backend by the arrays, and whether there is a request axis by the page table."""
    call.check.kind("kv", kv, PagedKV)
    tables = {"kv.page_table": kv.page_table, "kv.context_lens": kv.context_lens}
    on_device = call.choose_backend(**arrays, **{"kv.ckv": kv.ckv, "kv.kpe": kv.kpe}, **tables)
    call.is_batched = kv.page_table.ndim == 2
    return on_device


def _check_cache(call: Call, kv: PagedKV, on_device: bool) -> None:
    check = call.check
    check.array("kv.page_table", kv.page_table, call.axes("max_pages"), ("int32",), contiguous=on_device)
    check.array("kv.context_lens", kv.context_lens, call.axes(), ("int32",), contiguous=on_device)
    dtypes = FLOATS if on_device else FLOATS_AND_F64
    for name, pool in (("ckv", kv.ckv), ("kpe", kv.kpe)):
        axes = "num_pages", "page_size", f"head_dim_{name}"
        check.array(f"kv.{name}", pool, axes, dtypes, last_contiguous=True)
    if kv.page_size < 1:
        raise ShapeError(f"{check.function}: `kv.ckv` is {kv.ckv.shape}, expected a page size of at least 1")


def _check_attention(
    call: Call, tree: DraftTree | Visibility, q_nope: Array, q_pe: Array, kv: PagedKV, on_device: bool
) -> None:
    check = call.check
    _check_cache(call, kv, on_device)
    check.array("tree.num_nodes", tree.num_nodes, call.axes(), ("int32",), contiguous=on_device)
    bits = tree.visibility_bits
    words = words_per_row(bits.shape[-2] if bits.ndim > 1 else 0)
    bits_axes: tuple[str | int, ...] = (*call.axes("num_nodes"), words)
    check.array("tree.visibility_bits", bits, bits_axes, ("uint32",), contiguous=on_device)
    axes = call.axes("num_nodes", "num_heads")
    check.array("q_nope", q_nope, (*axes, "head_dim_ckv"), FLOATS_AND_F64, last_contiguous=True)
    check.array("q_pe", q_pe, (*axes, "head_dim_kpe"), FLOATS_AND_F64, last_contiguous=True)
    check.same_dtype(q_nope=q_nope, q_pe=q_pe, ckv=kv.ckv, kpe=kv.kpe)


def _check_lengths(tree: DraftTree | Visibility, kv: PagedKV) -> None:
    """Check the values of a batched host call that would otherwise end in an unnamed NumPy error."""
    capacity = tree.visibility_bits.shape[1]
    if ((tree.num_nodes < 0) | (tree.num_nodes > capacity)).any():
        raise ArgumentError(
            f"tree_attention: `tree.num_nodes` is {tree.num_nodes.tolist()}, expected values in 0..{capacity}"
        )
    active = tree.num_nodes > 0
    if (active & ((kv.context_lens < 0) | (kv.context_lens > kv.max_context))).any():
        raise ArgumentError(
            f"tree_attention: `kv.context_lens` is {kv.context_lens.tolist()}, expected values in 0..{kv.max_context}, "
            f"which is `kv.max_context`"
        )
