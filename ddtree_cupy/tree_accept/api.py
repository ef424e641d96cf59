"""Public functions of tree_accept: contracts; `prepare.py` says how each of them runs."""

from collections.abc import Sequence
from typing import Any, overload

from ddtree_cupy._call import prepared_by, run
from ddtree_cupy.containers import AcceptResult, DraftTree, PagedKV
from ddtree_cupy.tree_accept import prepare

Array = Any


@prepared_by(prepare.greedy_targets)
def greedy_targets(
    target_logits: Array,
    *,
    num_nodes: int | Array | None = None,
    on_bad_row: str = "auto",
    out: Array | None = None,
    checked: bool = True,
) -> Array:
    """Return the target's most likely token at every node; the lowest id wins a tie, +inf wins.

    Parameters
    ----------
    target_logits : float32 | float16 | bfloat16 (NumPy also float64) array, shape ([B,] N, V)
        The logits by which the target decides, so after penalties and grammar masks.
    num_nodes : int, or int32 array, shape ([B]), default N
        Valid rows; later rows are not read.
    on_bad_row : "auto", "raise" or "mark"
        For a valid row that holds NaN or nothing above -inf: "raise" raises an ArgumentError; "mark" gives -1, which
        ends the walk of `accept` with bonus -1. "auto" raises on NumPy and marks in a kernel, which cannot raise.
    out : int32 array, optional
        Array for the result. A kernel refuses memory that it also reads.
    checked : bool
        False skips the checks of arrays before a kernel, for loops that have passed them once.

    Returns
    -------
    int32 array, shape ([B,] N)
        -1 for rows from num_nodes on, and for bad rows that are marked.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        `target_logits` or `num_nodes` does not fit; on NumPy also a bad row, unless `on_bad_row` is "mark".
    UnsupportedError
        `on_bad_row="raise"` for a kernel.

    Notes
    -----
    Logits are compared exactly: subnormals count, -0.0 equals 0.0. For `sample_targets` rows with +inf are bad, too.

    Examples
    --------
    >>> import numpy as np
    >>> greedy_targets(np.array([[0, 3, 3], [-np.inf, 1, np.inf]])).tolist()
    [1, 2]
    """
    return run(greedy_targets, target_logits, num_nodes=num_nodes, on_bad_row=on_bad_row, out=out, checked=checked)


@prepared_by(prepare.sample_targets)
def sample_targets(
    target_logits: Array,
    uniforms: Array,
    *,
    temperature: float | Array,
    num_nodes: int | Array | None = None,
    on_bad_row: str = "auto",
    out: Array | None = None,
    checked: bool = True,
) -> Array:
    """Sample the target's token at every node from softmax(logits / temperature).

    With w = exp((logit - max) / temperature), the first id with cumsum(w) > u * sum(w) and w > 0; both sums run in
    float64 in id order.

    Parameters
    ----------
    target_logits : float32 | float16 | bfloat16 (NumPy also float64) array, shape ([B,] N, V)
    uniforms : float64 or float32 array, shape ([B,] N)
        Independent draws from [0, 1), one per node. Nodes of one depth may share a draw, since at most one of them is
        on the accepted path. If they do, the text does not depend on the tree.
    temperature : float, or float64 or float32 array, shape ([B])
        Larger than 0.
    num_nodes : int, or int32 array, shape ([B]), default N
        Valid rows; later rows are not read.
    on_bad_row : "auto", "raise" or "mark"
        For a valid row that holds NaN, +inf or nothing above -inf: "raise" raises an ArgumentError; "mark" gives -1,
        which ends the walk of `accept` with bonus -1. "auto" raises on NumPy and marks in a kernel, which cannot raise.
    out : int32 array, optional
        Array for the result. A kernel refuses memory that it also reads.
    checked : bool
        False skips the checks of arrays before a kernel, for loops that have passed them once.

    Returns
    -------
    int32 array, shape ([B,] N)
        -1 for rows from num_nodes on, and for bad rows that are marked.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        Arrays do not fit; on NumPy also u outside [0, 1), a temperature that is not above 0, or a bad row, unless
        `on_bad_row` is "mark".
    UnsupportedError
        `on_bad_row="raise"` for a kernel.

    Notes
    -----
    float32 subnormals among the logits count as 0, on every backend; differences and quotients are taken in float64
    or as exactly as a draw needs, so that any finite logits and any temperature > 0 are legal. `greedy_targets` takes
    rows with +inf.
    `accept` on these tokens is lossless: the committed text has exactly the target's distribution.
    The draw of a kernel is that of the reference unless u * total lies within 1e-6 * total of an edge.

    Examples
    --------
    >>> import numpy as np
    >>> logits = np.log(np.array([[0.5, 0.3, 0.2]] * 3))
    >>> sample_targets(logits, np.array([0.1, 0.6, 0.9]), temperature=1.0).tolist()
    [0, 1, 2]
    """
    return run(
        sample_targets,
        target_logits,
        uniforms,
        temperature=temperature,
        num_nodes=num_nodes,
        on_bad_row=on_bad_row,
        out=out,
        checked=checked,
    )


@prepared_by(prepare.accept)
def accept(
    tree: DraftTree,
    target_token_ids: Array,
    *,
    out: AcceptResult | None = None,
    checked: bool = True,
) -> AcceptResult:
    """Walk from the root while the target's token at the current node is one of its children.

    The first target token that is not a child is the bonus: the walk commits `num_accepted` drafts and that token.

    Parameters
    ----------
    tree : DraftTree
    target_token_ids : int32 array, shape ([B,] N)
        From `greedy_targets` or `sample_targets`. -1 matches no child: the walk ends there with bonus -1.
    out : AcceptResult, optional
        Arrays for the result, none of which share memory. A kernel refuses memory that it also reads.
    checked : bool
        False skips the checks of arrays before a kernel, for loops that have passed them once.

    Returns
    -------
    AcceptResult
        All -1 for an inactive request.

    Raises
    ------
    ShapeError, DTypeError
        `tree` and `target_token_ids` do not fit each other.

    Notes
    -----
    For a fixed tree the walk is lossless, and no exact rule accepts more. No token is special: the caller stops at an
    end token. Source: DDTree, arXiv 2604.12989; SpecInfer, arXiv 2305.09781.

    Examples
    --------
    >>> import numpy as np
    >>> tree = DraftTree.from_parents([9, 10, 20, 11], [-1, 0, 1, 0])
    >>> accept(tree, np.array([10, 20, 33, 0], np.int32))
    AcceptResult(accepted=[0, 1, 2], num_accepted=2, bonus_token=33)
    """
    result: AcceptResult = run(accept, tree, target_token_ids, out=out, checked=checked)
    return result


@overload
def commit_kv(
    kv: PagedKV,
    result: AcceptResult,
    *,
    out: Array | None = None,
    workspace: Array | None = None,
    checked: bool = True,
) -> PagedKV: ...
@overload
def commit_kv(
    kv: Sequence[PagedKV],
    result: AcceptResult,
    *,
    out: Array | Sequence[Array] | None = None,
    workspace: Array | None = None,
    checked: bool = True,
) -> tuple[PagedKV, ...]: ...
@prepared_by(prepare.commit_kv)
def commit_kv(
    kv: PagedKV | Sequence[PagedKV],
    result: AcceptResult,
    *,
    out: Array | Sequence[Array] | None = None,
    workspace: Array | None = None,
    checked: bool = True,
) -> PagedKV | tuple[PagedKV, ...]:
    """Move the accepted tree rows right behind the context and return caches that count them.

    Row context_len + accepted[j] goes to position context_len + j for j = 0 .. num_accepted (the root is j = 0).

    Parameters
    ----------
    kv : PagedKV, or a sequence of them (one per layer)
        Pages are modified in place; everything is read before anything is written. So rows that layers share move
        once, whatever views and page tables the layers use for them.
    result : AcceptResult
    out : int32 array, shape ([B]), or a sequence of them (one per cache), optional
        Arrays for the new `context_lens`; a sequence of caches that share `context_lens` takes one array. It may be the
        old array itself, but must not share memory with any other array of the call.
    workspace : uint8 array, shape (n,), optional
        Scratch of at least `workspace_bytes(commit_kv, kv, result)`: 0 unless caches may share memory and are not the
        same arrays throughout. NumPy ignores it.
    checked : bool
        False skips the checks of arrays before a kernel, for loops that have passed them once.

    Returns
    -------
    PagedKV, or a tuple of them
        The same pages with a new `context_lens`: old + num_accepted + 1, unchanged for an inactive request.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, ArgumentError
        Arrays do not fit; on NumPy also a position without a page, and nothing is moved then. A kernel leaves such a
        row where it is.
    UnsupportedError
        More than 240 different arrays `context_lens` in a call of kernels.

    Notes
    -----
    One launch moves the rows of all caches, whatever their dtypes, sizes and strides. It advances the lengths too where
    all caches share one array `context_lens`; otherwise a second launch does. A table of the pools stays in device
    memory from the first call on: 64 bytes for each 1,024 bytes of a row, never freed, since a captured graph may read
    it. Caches that may share memory by their addresses, shapes and strides are read into scratch before any of them is
    written, unless all their arrays are the same. Where their tables give one row two contents, a kernel leaves either.

    Examples
    --------
    >>> import numpy as np
    >>> rows = np.arange(8.0)[:, None].repeat(16, axis=1)
    >>> kv = PagedKV.from_dense(rows, rows, page_size=4, context_lens=2)  # rows 2..7 belong to the tree
    >>> path = AcceptResult(np.array([0, 2, 3, -1, -1, -1], np.int32), np.array(2, np.int32), np.array(7, np.int32))
    >>> after = commit_kv(kv, path)
    >>> int(after.context_lens), after.ckv.reshape(-1, 16)[:5, 0].tolist()
    (5, [0.0, 1.0, 2.0, 4.0, 5.0])
    """
    committed: PagedKV | tuple[PagedKV, ...] = run(commit_kv, kv, result, out=out, workspace=workspace, checked=checked)
    return committed
