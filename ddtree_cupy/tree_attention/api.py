"""Public functions of tree_attention: contracts; `prepare.py` says how each of them runs."""

from typing import Any

import numpy as np

from ddtree_cupy._arrays import as_array
from ddtree_cupy._call import prepared_by, run
from ddtree_cupy._check import Checker
from ddtree_cupy.containers import DraftTree, PagedKV, Visibility
from ddtree_cupy.errors import ArgumentError
from ddtree_cupy.tree_attention import prepare, reference

Array = Any


@prepared_by(prepare.write_kv)
def write_kv(
    kv: PagedKV,
    ckv_rows: Array,
    kpe_rows: Array,
    *,
    num_rows: int | Array,
    checked: bool = True,
) -> None:
    """Write the key rows of tree nodes into the cache, row i to logical position context_len + i.

    Parameters
    ----------
    kv : PagedKV
        Its pools are modified in place, `context_lens` is not.
    ckv_rows, kpe_rows : same dtype as the cache, shape ([B,] N, C) and ([B,] N, R)
        Rows that lie in the pools of `kv` are refused, since the result would depend on the order of writing.
    num_rows : int, or int32 array, shape ([B])
        Rows to write of each request; later rows are not read.
    checked : bool
        False skips the checks of shapes, dtypes and strides, for loops that have passed them once.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, ArgumentError
        Arrays do not fit, or a position has no page; nothing is written then.

    Examples
    --------
    >>> kv = PagedKV.allocate(8, page_size=4, head_dim_ckv=16, head_dim_kpe=16)
    >>> write_kv(kv, np.ones((3, 16), np.float32), np.ones((3, 16), np.float32), num_rows=2)
    >>> kv.ckv[0, :, 0].tolist()
    [1.0, 1.0, 0.0, 0.0]
    """
    run(write_kv, kv, ckv_rows, kpe_rows, num_rows=num_rows, checked=checked)


@prepared_by(prepare.tree_attention)
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
    logical position context_len + i (`write_kv` writes it there).

    Parameters
    ----------
    tree : DraftTree or Visibility
        N nodes; only `visibility_bits` and `num_nodes` are read. Any boolean matrix is legal.
    q_nope : float32 | float16 | bfloat16 (NumPy also float64) array, shape ([B,] N, H, C)
        Absorbed query. Last axis contiguous. Not modified.
    q_pe : same dtype, shape ([B,] N, H, R)
        Rope part of the query, already rotated to position context_len + depth.
    kv : PagedKV
        The cache, with the dtype of the query.
    sm_scale : float
        Dimensionless, no default: 1 / sqrt(head size before absorption), e.g. 1 / sqrt(192) for DeepSeek-V3, times
        mscale**2 under YaRN. It is not 1 / sqrt(C + R).
    keys : "all", "context" or "tree"
        Restrict j to one part, so that another kernel can compute the other part and `merge_states` joins them.
    variant : str
        Kernel version: "v1_three_phase", "v2_split_kv", "v3_mma" (tensor cores), "v4_wgmma" (Hopper), or "auto": the
        last of these that takes the arguments. NumPy arrays take "auto" and "reference".
    split_keys : int, optional
        A multiple of 32, for v4_wgmma of 64. Without it v3_mma and v4_wgmma cut the keys so that all multiprocessors
        are busy, which depends on the whole batch. With it they cut them every `split_keys`, and the result of a
        request does not depend on the other requests of a batch with the same N. Scratch then takes 4 C bytes for
        every slice of every row, so small slices of long contexts need much memory. v1 and v2 never depend on the
        other requests.
    out : tuple of two arrays, optional
        Arrays for (out, lse). `q_nope` itself may be the first; a kernel refuses other memory that it reads.
    workspace : array, optional
        Scratch of at least `workspace_bytes(tree_attention, ...)`; NumPy ignores it.
    checked : bool
        False skips the checks of shapes, dtypes and strides, for loops that have passed them once.

    Returns
    -------
    out : same dtype as `q_nope`, shape ([B,] N, H, C)
        Zero for rows that see nothing and for rows from num_nodes on.
    lse : float32 (float64 for float64 input), shape ([B,] N, H)
        Natural log; -inf for those rows.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, ArgumentError
        Arrays do not fit in shape, dtype, strides or device; an option is out of its range; on NumPy also counts or
        lengths that are out of range.
    UnsupportedError
        `variant` is unknown, or does not take these arguments.

    Notes
    -----
    Numerics: float32 accumulation in sums of at most 1,024 terms (float64 for float64 input); v3_mma and
    v4_wgmma round the softmax weights to the input dtype before the second product. Every version repeats bit for bit.
    A key changes only the rows that see it, also when it holds NaN or inf.
    Cost: reads (T + N)(C + R) elements per request, T = context_len.
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
    result: tuple[Array, Array] = run(
        tree_attention,
        tree,
        q_nope,
        q_pe,
        kv,
        sm_scale=sm_scale,
        keys=keys,
        variant=variant,
        split_keys=split_keys,
        out=out,
        workspace=workspace,
        checked=checked,
    )
    return result


@prepared_by(prepare.merge_states)
def merge_states(
    out_a: Array,
    lse_a: Array,
    out_b: Array,
    lse_b: Array,
    *,
    out: tuple[Array, Array] | None = None,
    checked: bool = True,
) -> tuple[Array, Array]:
    """Combine attention over two disjoint key sets into attention over their union.

    out = (w_a out_a + w_b out_b) / (w_a + w_b) with w = exp(lse - max), lse = max + log(w_a + w_b)

    Parameters
    ----------
    out_a, out_b : float array of one dtype, shape (..., H, C)
        Normalised results.
    lse_a, lse_b : float32 array (float64 for float64 `out_a`), shape (..., H)
        In nats; -inf marks an empty side, whose `out` may hold anything. See `convert_lse`.
    out : tuple of two arrays, optional
        Arrays to write (out, lse) into. They may be `out_a` or `out_b`, and `lse_a` or `lse_b`, themselves; a kernel
        refuses other memory that it reads.
    checked : bool
        False skips the checks of shapes, dtypes and strides, for loops that have passed them once.

    Returns
    -------
    out : same dtype and shape as `out_a`
    lse : same dtype and shape as `lse_a`

    Raises
    ------
    ShapeError, DTypeError
        The arrays do not fit each other in shape or dtype.

    Notes
    -----
    A side does not count, whatever its `out` holds, if its lse is -inf, or so far below the other that exp(lse - max)
    is not a normal float32. The bits of the other side's `out` and `lse` are then copied, -0.0 and subnormals too. So
    (0, -inf) is the identity; it is also the result for two empty sides. Elsewhere kernels count subnormals as 0.
    Source: the split reduction of FlashDecoding; the rule for empty sides is our own.

    Examples
    --------
    >>> one, two = np.full((1, 4), 1.0), np.full((1, 4), 2.0)
    >>> out, lse = merge_states(one, np.log([1.0]), two, np.log([3.0]))
    >>> out.round(9).tolist(), np.exp(lse).round(3).tolist()
    ([[1.75, 1.75, 1.75, 1.75]], [4.0])
    """
    result: tuple[Array, Array] = run(merge_states, out_a, lse_a, out_b, lse_b, out=out, checked=checked)
    return result


def convert_lse(lse: Array, *, base: float, empty: float) -> Array:
    """Convert the log-sum-exp of another library to that of this one: nats, and -inf for an empty row.

    Parameters
    ----------
    lse : float32 or float64 array, any shape
        Not modified.
    base : float
        The base of the logarithm there: 2 for FlashInfer, math.e for FlashMLA and FlashAttention.
    empty : float
        The value for an empty row there: math.inf (FlashMLA, FlashAttention 2), -math.inf
        (FlashAttention 3, recent FlashInfer), or a finite bound at or below which a value means empty
        (FlashInfer up to 0.6.18 wrote about -5e4: pass -4e4).

    Returns
    -------
    array like `lse`

    Raises
    ------
    DTypeError, ArgumentError
        `lse` is not a float array, or `base` or `empty` is out of its range.

    Examples
    --------
    >>> convert_lse(np.array([1.0, np.inf]), base=2, empty=np.inf).round(4).tolist()
    [0.6931, -inf]
    """
    check = Checker("convert_lse")
    lse = as_array("convert_lse", "lse", lse)
    check.backend(lse=lse)
    check.array("lse", lse, lse.shape, ("float32", "float64"))
    base = check.real("base", base, above=1.0)
    if isinstance(empty, bool) or not isinstance(empty, int | float | np.floating) or np.isnan(empty):
        raise ArgumentError(f"convert_lse: `empty` is {empty!r}, expected math.inf, -math.inf or a finite bound")
    return reference.convert_lse(lse, base=base, empty=float(empty))
