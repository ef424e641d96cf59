"""CUDA kernels of tree_attention: versions, geometry and launches; the contracts live in `api.py`.

Specs are in `kernel_specs.py`, the tensor-core version in `kernel_mma.py`. Every function is batched and takes
`backend`, "cupy" or "emulate".
"""

from typing import Any

import numpy as np

from ddtree_cupy._compile import get_kernel
from ddtree_cupy._compile.memory import Workspace, empty, require_given, shared_limit, workspace_bytes
from ddtree_cupy.containers import PagedKV
from ddtree_cupy.errors import UnsupportedError
from ddtree_cupy.tree_attention import kernel_mma
from ddtree_cupy.tree_attention import kernel_specs as specs
from ddtree_cupy.tree_attention.kernel_call import Call

Array = Any
Sizes = dict[str, tuple[tuple[int, ...], Any]]

AUTOMATIC = ("v3_mma", "v2_split_kv", "v1_three_phase")  # in this order
MOST_WIDTH = 1024  # of C and of R: a float32 sum runs over at most this many terms

# the constants of v2_slices.cuh
_LEAST_KEYS, _MOST_KEYS, _BLOCKS_WANTED = 256, 32768, 256


def tree_attention(
    call: Call, *, variant: str, out: tuple[Array, Array] | None, workspace: Array | None, checked: bool
) -> tuple[Array, Array]:
    """Launch one version; `api.tree_attention` says what it computes."""
    require_given("tree_attention", call.backend, out=out)
    if out is None:
        shape = call.q_nope.shape
        out = empty(call.backend, shape, call.q_nope.dtype), empty(call.backend, shape[:3], np.float32)
    chosen = choose_variant(variant, call)
    scratch = Workspace("tree_attention", call.backend, scratch_sizes(chosen, call), workspace)
    run = {"v1_three_phase": _run_v1, "v2_split_kv": _run_v2, "v3_mma": kernel_mma.run}[chosen]
    run(call, out, scratch, checked)
    return out


def choose_variant(variant: str, call: Call) -> str:
    """Return the version to run; UnsupportedError when the wanted one cannot, by host integers alone."""
    refusals = {"v2_split_kv": _v2_refusal, "v1_three_phase": _v1_refusal, "v3_mma": kernel_mma.refusal}
    if variant == "auto":
        found = {}
        for name in AUTOMATIC:
            found[name] = refusals[name](call)
            if not found[name]:
                return name
        listed = "; ".join(f"{name} {reason}" for name, reason in found.items())
        raise UnsupportedError(f"tree_attention: no version fits: {listed}")
    if variant not in refusals:
        listed = ", ".join(sorted(refusals))
        raise UnsupportedError(f"tree_attention: `variant` is {variant!r}, expected one of: auto, {listed}")
    reason = refusals[variant](call)
    if reason:
        fitting = next((name for name in AUTOMATIC if not refusals[name](call)), None)
        hint = f"{fitting} (or 'auto') takes them" if fitting else "no other version takes these arguments either"
        raise UnsupportedError(f"tree_attention: {variant} {reason}; {hint}")
    return variant


def scratch_sizes(variant: str, call: Call) -> Sizes:
    """Return the scratch arrays of a version."""
    if variant == "v3_mma":
        return kernel_mma.scratch_sizes(call)
    if variant == "v2_split_kv":
        batch, capacity, num_heads, head_dim_ckv = call.q_nope.shape
        _, region = _v2_geometry(capacity * num_heads, call.most_keys, specs.v2_rows(call.dtype))
        return {
            "partial_out": ((batch, region, head_dim_ckv), np.float32),
            "partial_score": ((batch, region), np.float32),
        }
    return {}


def scratch_bytes(variant: str, call: Call) -> int:
    """Return the bytes of `workspace`; `api.tree_attention_workspace_bytes`."""
    return workspace_bytes(scratch_sizes(choose_variant(variant, call), call))


def _size_refusal(call: Call) -> str:
    batch, capacity = call.q_nope.shape[:2]
    if max(batch, capacity) > specs.MOST_GRID:
        return f"takes at most {specs.MOST_GRID} requests of {specs.MOST_GRID} nodes, got {batch} of {capacity}"
    head_dim_ckv, head_dim_kpe = call.head_sizes
    if head_dim_ckv > 0 and all(size % 16 == 0 and size <= MOST_WIDTH for size in call.head_sizes):
        return ""
    return (
        f"takes head sizes C in 16..{MOST_WIDTH} and R in 0..{MOST_WIDTH}, both multiples of 16, "
        f"got C = {head_dim_ckv} and R = {head_dim_kpe}"
    )


def _shared_refusal(needed: int, what: str, backend: str) -> str:
    limit = shared_limit(backend) - specs.STATIC_SHARED_BYTES
    return f"{what} {needed} bytes of shared memory, this device has {limit}" if needed > limit else ""


def _v1_refusal(call: Call) -> str:
    needed = specs.v1_shared_bytes(sum(call.head_sizes), call.most_keys)
    return _size_refusal(call) or _shared_refusal(needed, f"keeps {call.most_keys} scores in", call.backend)


def _v2_refusal(call: Call) -> str:
    needed = specs.v2_shared_bytes(call.dtype, sum(call.head_sizes))
    return _size_refusal(call) or _shared_refusal(needed, "needs", call.backend)


def _run_v1(call: Call, out: tuple[Array, Array], scratch: Workspace, checked: bool) -> None:
    batch, capacity, num_heads, _ = call.q_nope.shape
    get_kernel(specs.v1_spec(call.dtype), call.backend)(
        (num_heads, capacity, batch),
        (128,),
        (
            *(*call.inputs, *out, capacity, num_heads, *call.head_sizes, *call.page_sizes),
            *(*call.strides, call.sm_scale, specs.KEYS[call.keys]),
        ),
        shared_mem=specs.v1_shared_bytes(sum(call.head_sizes), call.most_keys),
        checked=checked,
    )


def _run_v2(call: Call, out: tuple[Array, Array], scratch: Workspace, checked: bool) -> None:
    batch, capacity, num_heads, _ = call.q_nope.shape
    attend, merge = specs.v2_specs(call.dtype, *call.head_sizes)
    blocks, region = _v2_geometry(capacity * num_heads, call.most_keys, specs.v2_rows(call.dtype))
    partials = scratch["partial_out"], scratch["partial_score"]
    sizes = (capacity, num_heads, region, *call.page_sizes)
    keys = specs.KEYS[call.keys]
    get_kernel(attend, call.backend)(
        (blocks, batch),
        (128,),
        (
            *(*call.inputs, *out, *partials, *sizes, *call.strides),
            *(call.sm_scale, keys, int(call.cache_is_aligned())),
        ),
        shared_mem=specs.v2_shared_bytes(call.dtype, sum(call.head_sizes)),
        checked=checked,
    )
    get_kernel(merge, call.backend)(
        (-(-capacity * num_heads // specs.WARPS), batch),
        (128,),
        (*call.tables, *partials, *out, *sizes, keys),
        checked=checked,
    )


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
    get_kernel(specs.merge_spec(out_a.dtype.name), backend)((-(-lse_a.size // 4),), (128,), args, checked=checked)
    return out


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
    get_kernel(specs.write_kv_spec(kv.ckv.dtype.name), backend)(
        (capacity, batch),
        (128,),
        (
            *(ckv_rows, kpe_rows, kv.page_table, kv.context_lens, of_each, kv.ckv, kv.kpe),
            *(capacity, head_dim_ckv, kpe_rows.shape[-1], num_pages, page_size, kv.page_table.shape[1], of_all),
            *strides,
        ),
        checked=checked,
    )
