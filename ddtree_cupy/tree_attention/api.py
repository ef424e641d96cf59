"""Public functions of tree_attention: docstrings, checks and dispatch."""

from typing import Any

import numpy as np

from ddtree_cupy._check import FLOATS, FLOATS_AND_F64, Checker, deliver_arrays
from ddtree_cupy._dispatch import backend_of
from ddtree_cupy.containers import DraftTree, PagedKV, Visibility
from ddtree_cupy.containers.topology import words_per_row
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from ddtree_cupy.tree_attention import kernel, reference
from ddtree_cupy.tree_attention.call import Call

Array = Any

KEYS = ("all", "context", "tree")
LARGEST_SCALE = float(np.finfo(np.float32).max) / np.log2(np.e)  # kernels take exponentials of base 2


def write_kv(
    kv: PagedKV,
    ckv_rows: Array,
    kpe_rows: Array,
    *,
    num_rows: int | Array,
    workspace: Array | None = None,
    checked: bool = True,
) -> None:
    """Write the key rows of tree nodes into the cache, row i to logical position context_len + i.

    Parameters
    ----------
    kv : PagedKV
        Modified in place; `context_lens` is not.
    ckv_rows, kpe_rows : same dtype as the cache, shape ([B,] N, C) and ([B,] N, R)
        Rows that lie in the pools of `kv` are refused, since the result would depend on the order of writing.
    num_rows : int, or int32 array, shape ([B])
        Rows to write of each request; later rows are not read.
    workspace : array, optional
        Ignored: no scratch is needed.
    checked : bool
        False skips the metadata checks, for hot loops that have passed them once.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, ArgumentError
        Also when a position has no page; nothing is written then.

    Examples
    --------
    >>> kv = PagedKV.allocate(8, page_size=4, head_dim_ckv=16, head_dim_kpe=16)
    >>> write_kv(kv, np.ones((3, 16), np.float32), np.ones((3, 16), np.float32), num_rows=2)
    >>> kv.ckv[0, :, 0].tolist()
    [1.0, 1.0, 0.0, 0.0]
    """
    check = Checker("write_kv")
    if not checked and (backend := backend_of(check, ckv_rows=ckv_rows)) != "numpy" and ckv_rows.ndim == 3:
        kernel.write_kv(kv, ckv_rows, kpe_rows, num_rows=num_rows, backend=backend, checked=False)
        return
    backend, batched = _check_kv(check, kv, ckv_rows=ckv_rows, kpe_rows=kpe_rows)
    for name, rows, width in (("ckv_rows", ckv_rows, "head_dim_ckv"), ("kpe_rows", kpe_rows, "head_dim_kpe")):
        check.array(name, rows, (*batched, "num_rows", width), last_contiguous=True)
    check.same_dtype(ckv=kv.ckv, ckv_rows=ckv_rows, kpe_rows=kpe_rows)
    pools = {"kv.ckv": kv.ckv, "kv.kpe": kv.kpe}
    for name, pool in pools.items():
        check.array(name, pool, pool.shape, writable=True)
    capacity = ckv_rows.shape[-2]
    if not hasattr(num_rows, "shape") or isinstance(num_rows, np.generic):
        num_rows = check.integer("num_rows", num_rows, low=0, high=capacity)
    else:
        check.backend(num_rows=num_rows, **{"kv.ckv": kv.ckv})
        check.array("num_rows", num_rows, batched, ("int32",), contiguous=True)
    tables = {"kv.page_table": kv.page_table, "kv.context_lens": kv.context_lens, "num_rows": num_rows}
    check.separate(pools, {"ckv_rows": ckv_rows, "kpe_rows": kpe_rows, **tables})
    if not batched:
        kv, ckv_rows, kpe_rows = kv.with_batch(), ckv_rows[None], kpe_rows[None]
        num_rows = num_rows if isinstance(num_rows, int) else num_rows[None]
    if backend != "numpy":
        kernel.write_kv(kv, ckv_rows, kpe_rows, num_rows=num_rows, backend=backend)
        return
    counts = np.full(len(kv.context_lens), num_rows, np.int32) if isinstance(num_rows, int) else num_rows
    if (counts < 0).any() or (counts > capacity).any():
        raise ArgumentError(f"write_kv: `num_rows` is {counts.tolist()}, expected values in 0..{capacity}")
    reference.write_kv(kv, ckv_rows, kpe_rows, num_rows=counts)


def tree_attention(
    tree: DraftTree | Visibility,
    q_nope: Array,
    q_pe: Array,
    kv: PagedKV,
    *,
    sm_scale: float,
    keys: str = "all",
    variant: str = "auto",
    split_keys: int | None = None,
    out: tuple[Array, Array] | None = None,
    workspace: Array | None = None,
    checked: bool = True,
) -> tuple[Array, Array]:
    """Attend from every draft-tree node to the context and to the nodes it sees.

    out[n, h] = sum_j softmax_j(sm_scale * (q_nope[n, h].ckv[j] + q_pe[n, h].kpe[j])) ckv[j]
    where j runs over all context tokens and the tree nodes visible from n. The key of node i sits in the cache at
    logical position context_len + i (`write_kv` puts it there).

    Parameters
    ----------
    tree : DraftTree or Visibility
        N nodes; only `visibility_bits` and `num_nodes` are read. Any boolean matrix is legal.
    q_nope : float32 | float16 | bfloat16 (NumPy also float64) array, shape ([B,] N, H, C)
        Absorbed query. Last axis contiguous. Not modified.
    q_pe : same dtype, shape ([B,] N, H, R)
        Rope part of the query, already rotated to position context_len + depth.
    kv : PagedKV
        One dtype with the query.
    sm_scale : float
        Dimensionless, no default: 1 / sqrt(head size before absorption), e.g. 1 / sqrt(192) for DeepSeek-V3, times
        mscale**2 under YaRN. It is not 1 / sqrt(C + R).
    keys : "all", "context" or "tree"
        Restrict j to one part, so that another kernel can do the other and `merge_states` join them.
    variant : str
        Kernel version: "v1_three_phase", "v2_split_kv", "v3_mma" (tensor cores), or "auto": the last of these that
        takes the arguments. NumPy arrays know "auto" and "reference".
    split_keys : int, optional
        A multiple of 32. v3_mma cuts the keys so that all multiprocessors are busy, which depends on the whole batch;
        with this it cuts them every `split_keys`, and a request's bits never depend on its neighbours in a batch of
        the same N. Its scratch then takes 4 C bytes for every slice of every row: not for small slices of long
        contexts. v1 and v2 are like that anyway.
    out : tuple of two arrays, optional
        Arrays to write (out, lse) into. `q_nope` itself may be the first; a kernel refuses other memory that it reads.
    workspace : array, optional
        Scratch for a CUDA kernel; NumPy ignores it.
    checked : bool
        False skips the metadata checks, for hot loops that have passed them once.

    Returns
    -------
    out : same dtype as `q_nope`, shape ([B,] N, H, C)
        Zero for rows that see nothing and for rows from num_nodes on.
    lse : float32 (float64 for float64 input), shape ([B,] N, H)
        Natural log; -inf for those rows.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, ArgumentError
        The message names the argument, what it is and what was expected.
    UnsupportedError
        Unknown variant; the message lists the supported ones.

    Notes
    -----
    Numerics: float32 accumulation in sums of at most 1,024 terms (float64 for float64 input); v3_mma rounds the
    softmax weights to the input dtype before the second product. Every version repeats bit for bit.
    A key changes only the rows that see it, also when it holds NaN or inf.
    Cost: reads (T + N)(C + R) elements a request, T = context_len.
    Source: MLA in absorbed form, DeepSeek-V2 (arXiv 2405.04434) section 2.1; tree mask after SpecInfer
    (arXiv 2305.09781).

    Examples
    --------
    >>> tree = DraftTree.from_parents([5, 6, 7], [-1, 0, 0])
    >>> kv = PagedKV.from_dense(np.eye(4, 16), np.zeros((4, 16)), context_lens=1)
    >>> q = np.zeros((3, 1, 16))  # equal scores: every row is the mean of the values it sees
    >>> out, lse = tree_attention(tree, q, q, kv, sm_scale=1.0)
    >>> out[2, 0, :4].round(2).tolist(), float(lse[2, 0].round(3))
    ([0.33, 0.33, 0.0, 0.33], 1.099)
    """
    check = Checker("tree_attention")
    if checked:
        backend = _check_attention(check, tree, q_nope, q_pe, kv, sm_scale, keys, split_keys)
    else:
        backend = backend_of(check, q_nope=q_nope)
    batched = q_nope.ndim == 4
    if checked and backend != "numpy":
        written = _check_out(check, q_nope, out)
        read = {"tree": tree, "q_nope": q_nope, "q_pe": q_pe, "kv": kv}
        check.separate({**written, "workspace": workspace}, read, [("out.out", "q_nope")])
    if not batched:
        tree, q_nope, q_pe, kv = tree.with_batch(), q_nope[None], q_pe[None], kv.with_batch()
    if backend == "numpy":
        if variant not in ("auto", "reference"):
            raise UnsupportedError(
                f"tree_attention: `variant` is {variant!r}, expected for NumPy one of: auto, reference"
            )
        _check_lengths(tree, kv)
        result = reference.tree_attention(tree, q_nope, q_pe, kv, sm_scale=float(sm_scale), keys=keys)
        return _deliver("tree_attention", result if batched else (result[0][0], result[1][0]), out)
    call = Call(tree, q_nope, q_pe, kv, float(sm_scale), keys, split_keys, backend)
    result = kernel.tree_attention(
        call,
        variant=variant,
        out=out if batched or out is None else (out[0][None], out[1][None]),
        workspace=workspace,
        checked=checked,
    )
    if out is not None:
        return out
    return result if batched else (result[0][0], result[1][0])


def tree_attention_workspace_bytes(
    tree: DraftTree | Visibility,
    q_nope: Array,
    q_pe: Array,
    kv: PagedKV,
    *,
    keys: str = "all",
    variant: str = "auto",
    split_keys: int | None = None,
) -> int:
    """Return the bytes of `workspace` that `tree_attention` needs for these arguments; 0 on NumPy.

    Parameters
    ----------
    tree, q_nope, q_pe, kv, keys, variant, split_keys
        As in `tree_attention`; only shapes, dtypes and `kv.max_context` matter.

    Returns
    -------
    int
        Pass a uint8 array of at least this size; needed while a CUDA graph is captured.

    Examples
    --------
    >>> tree = DraftTree.from_parents([5], [-1])
    >>> q = np.zeros((1, 2, 16), np.float32)
    >>> tree_attention_workspace_bytes(tree, q, q, PagedKV.allocate(8, head_dim_ckv=16, head_dim_kpe=16))
    0
    """
    check = Checker("tree_attention_workspace_bytes")
    backend = _check_attention(check, tree, q_nope, q_pe, kv, 1.0, keys, split_keys)
    if backend == "numpy":
        return 0
    if q_nope.ndim == 3:
        tree, q_nope, q_pe, kv = tree.with_batch(), q_nope[None], q_pe[None], kv.with_batch()
    return kernel.scratch_bytes(variant, Call(tree, q_nope, q_pe, kv, 1.0, keys, split_keys, backend))


def merge_states(
    out_a: Array,
    lse_a: Array,
    out_b: Array,
    lse_b: Array,
    *,
    out: tuple[Array, Array] | None = None,
    workspace: Array | None = None,
    checked: bool = True,
) -> tuple[Array, Array]:
    """Combine attention over two disjoint key sets into attention over their union.

    out = (w_a out_a + w_b out_b) / (w_a + w_b) with w = exp(lse - max), lse = max + log(w_a + w_b)

    Parameters
    ----------
    out_a, out_b : float array of one dtype, shape (..., H, C)
        Normalised results.
    lse_a, lse_b : float32 array (float64 for float64 `out_a`), shape (..., H)
        Nats; -inf marks an empty side, whose `out` may then hold anything. See `convert_lse`.
    out : tuple of two arrays, optional
        Arrays to write (out, lse) into. They may be `out_a` or `out_b`, and `lse_a` or `lse_b`, themselves; a kernel
        refuses other memory that it reads.
    workspace : array, optional
        Ignored: no scratch is needed.
    checked : bool
        False skips the metadata checks, for hot loops that have passed them once.

    Returns
    -------
    out : same dtype and shape as `out_a`
    lse : same dtype and shape as `lse_a`

    Raises
    ------
    ShapeError, DTypeError
        The message names the argument, what it is and what was expected.

    Notes
    -----
    A side whose lse is -inf, or so far below the other that exp(lse - max) is no normal float32, counts for nothing,
    whatever its `out` holds: the bits of the other side's `out` and `lse` are copied, -0.0 and subnormals too. So
    (0, -inf) is the identity; it is also the result for two empty sides. Elsewhere kernels count subnormals as 0.
    Source: FlashDecoding's split reduction; the rule for empty sides is ours.

    Examples
    --------
    >>> one, two = np.full((1, 4), 1.0), np.full((1, 4), 2.0)
    >>> out, lse = merge_states(one, np.log([1.0]), two, np.log([3.0]))
    >>> out.round(9).tolist(), np.exp(lse).round(3).tolist()
    ([[1.75, 1.75, 1.75, 1.75]], [4.0])
    """
    check = Checker("merge_states")
    if not checked and (backend := backend_of(check, out_a=out_a)) != "numpy":
        return kernel.merge_states(out_a, lse_a, out_b, lse_b, backend=backend, out=out, checked=False)
    backend = backend_of(check, out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    on_device = backend != "numpy"
    if out_a.ndim == 0:
        raise ShapeError("merge_states: `out_a` is (), expected (..., num_heads, head_dim_ckv)")
    check.array("out_a", out_a, out_a.shape, FLOATS if on_device else FLOATS_AND_F64, contiguous=on_device)
    check.array("out_b", out_b, out_a.shape, (out_a.dtype.name,), contiguous=on_device)
    lse_dtype = ("float64",) if out_a.dtype.name == "float64" else ("float32",)
    check.array("lse_a", lse_a, out_a.shape[:-1], lse_dtype, contiguous=on_device)
    check.array("lse_b", lse_b, out_a.shape[:-1], lse_dtype, contiguous=on_device)
    if on_device:
        read = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
        in_place = [(f"out.{name}", f"{name}_{side}") for name in ("out", "lse") for side in "ab"]
        check.separate(_check_out(check, out_a, out), read, in_place)
        return kernel.merge_states(out_a, lse_a, out_b, lse_b, backend=backend, out=out)
    return _deliver("merge_states", reference.merge_states(out_a, lse_a, out_b, lse_b), out)


def convert_lse(lse: Array, *, base: float, empty: float) -> Array:
    """Turn another library's log-sum-exp into ours: nats, -inf for an empty row.

    Parameters
    ----------
    lse : float32 or float64 array, any shape
        Not modified.
    base : float
        Base of the producer's logarithm: 2 for FlashInfer, math.e for FlashMLA and FlashAttention.
    empty : float
        What the producer writes for an empty row: math.inf (FlashMLA, FlashAttention 2), -math.inf
        (FlashAttention 3, recent FlashInfer), or a finite bound at or below which a value means empty
        (FlashInfer up to 0.6.18 wrote about -5e4: pass -4e4).

    Returns
    -------
    array like `lse`

    Raises
    ------
    DTypeError, ArgumentError
        The message names the argument, what it is and what was expected.

    Examples
    --------
    >>> convert_lse(np.array([1.0, np.inf]), base=2, empty=np.inf).round(4).tolist()
    [0.6931, -inf]
    """
    check = Checker("convert_lse")
    check.backend(lse=lse)
    check.array("lse", lse, lse.shape, ("float32", "float64"))
    base = check.real("base", base, above=1.0)
    if isinstance(empty, bool) or not isinstance(empty, int | float | np.floating) or np.isnan(empty):
        raise ArgumentError(f"convert_lse: `empty` is {empty!r}, expected math.inf, -math.inf or a finite bound")
    return reference.convert_lse(lse, base=base, empty=float(empty))


def _deliver(function: str, result: tuple[Array, Array], out: tuple[Array, Array] | None) -> tuple[Array, Array]:
    if out is None:
        return result
    deliver_arrays(function, "out.", {"out": result[0], "lse": result[1]}, out)
    return out


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


def _check_out(check: Checker, like: Array, out: tuple[Array, Array] | None) -> dict[str, Array]:
    """Check the arrays a kernel is to write (out, lse) into; return them by name."""
    if out is None:
        return {}
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise ShapeError(f"{check.function}: `out` is {type(out).__name__}, expected a tuple of 2 arrays: out, lse")
    named = {"out.out": out[0], "out.lse": out[1]}
    check.backend(like=like, **named)
    check.array("out.out", out[0], like.shape, (like.dtype.name,), contiguous=True, writable=True)
    check.array("out.lse", out[1], like.shape[:-1], ("float32",), contiguous=True, writable=True)
    return named


def _check_kv(check: Checker, kv: PagedKV, **arrays: Array) -> tuple[str, tuple[str, ...]]:
    """Check the cache and the library of all arrays; return the backend, and the batch axis as a tuple of names."""
    if not isinstance(kv, PagedKV):
        raise DTypeError(f"{check.function}: `kv` is {type(kv).__name__}, expected PagedKV")
    tables = {"kv.page_table": kv.page_table, "kv.context_lens": kv.context_lens}
    backend = backend_of(check, **arrays, **{"kv.ckv": kv.ckv, "kv.kpe": kv.kpe}, **tables)
    on_device = backend != "numpy"
    batched = ("batch",) if kv.page_table.ndim == 2 else ()
    check.array("kv.page_table", kv.page_table, (*batched, "max_pages"), ("int32",), contiguous=on_device)
    check.array("kv.context_lens", kv.context_lens, batched, ("int32",), contiguous=on_device)
    dtypes = FLOATS if on_device else FLOATS_AND_F64
    for name, pool in (("ckv", kv.ckv), ("kpe", kv.kpe)):
        check.array(f"kv.{name}", pool, ("num_pages", "page_size", f"head_dim_{name}"), dtypes, last_contiguous=True)
    if kv.page_size < 1:
        raise ShapeError(f"{check.function}: `kv.ckv` is {kv.ckv.shape}, expected a page size of at least 1")
    return backend, batched


def _check_attention(
    check: Checker,
    tree: DraftTree | Visibility,
    q_nope: Array,
    q_pe: Array,
    kv: PagedKV,
    sm_scale: float,
    keys: str,
    split_keys: int | None,
) -> str:
    """Check everything but the variant; return the backend."""
    if not isinstance(tree, DraftTree | Visibility):
        raise DTypeError(f"{check.function}: `tree` is {type(tree).__name__}, expected DraftTree or Visibility")
    bits = {"tree.visibility_bits": tree.visibility_bits, "tree.num_nodes": tree.num_nodes}
    backend, batched = _check_kv(check, kv, q_nope=q_nope, q_pe=q_pe, **bits)
    on_device = backend != "numpy"
    check.array("tree.num_nodes", tree.num_nodes, batched, ("int32",), contiguous=on_device)
    capacity = tree.visibility_bits.shape[-2] if tree.visibility_bits.ndim > 1 else 0
    words = words_per_row(capacity)
    bits_axes: tuple[str | int, ...] = (*batched, "num_nodes", words)
    check.array("tree.visibility_bits", tree.visibility_bits, bits_axes, ("uint32",), contiguous=on_device)
    axes = (*batched, "num_nodes", "num_heads")
    check.array("q_nope", q_nope, (*axes, "head_dim_ckv"), FLOATS_AND_F64, last_contiguous=True)
    check.array("q_pe", q_pe, (*axes, "head_dim_kpe"), FLOATS_AND_F64, last_contiguous=True)
    check.same_dtype(q_nope=q_nope, q_pe=q_pe, ckv=kv.ckv, kpe=kv.kpe)
    if split_keys is not None and check.integer("split_keys", split_keys, low=32) % 32:
        raise ArgumentError(f"{check.function}: `split_keys` is {split_keys}, expected a multiple of 32")
    if keys not in KEYS:
        raise ArgumentError(f"{check.function}: `keys` is {keys!r}, expected one of {', '.join(KEYS)}")
    if abs(check.real("sm_scale", sm_scale)) > LARGEST_SCALE:
        raise ArgumentError(
            f"{check.function}: `sm_scale` is {sm_scale}, expected one that is finite in float32 when multiplied by "
            f"log2(e): at most {LARGEST_SCALE:.4g} in size"
        )
    return backend
