"""Public functions of tree_accept: docstrings, checks and dispatch."""

from collections.abc import Sequence
from typing import Any, overload

import numpy as np

from ddtree_cupy._check import FLOATS_AND_F64, Checker, deliver_arrays
from ddtree_cupy.containers import AcceptResult, DraftTree, PagedKV
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from ddtree_cupy.tree_accept import reference

Array = Any


def greedy_targets(
    target_logits: Array,
    *,
    num_nodes: int | Array | None = None,
    out: Array | None = None,
    workspace: Array | None = None,
) -> Array:
    """Return the target's most likely token at every node; the lowest id wins a tie, +inf wins.

    Parameters
    ----------
    target_logits : float32 | float16 | bfloat16 (NumPy also float64) array, shape ([B,] N, V)
        Whatever the target finally decides by: penalties and grammar masks belong in here, row by node.
    num_nodes : int, or int32 array, shape ([B]), default N
        Valid rows; later rows are not read.
    out : int32 array, optional
        Array to write the result into.
    workspace : array, optional
        Scratch for a CUDA kernel; NumPy ignores it.

    Returns
    -------
    int32 array, shape ([B,] N)
        -1 for rows from num_nodes on.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        Also for a valid row that holds NaN or nothing above -inf.

    Examples
    --------
    >>> greedy_targets(np.array([[0, 3, 3], [-np.inf, 1, np.inf]])).tolist()
    [1, 2]
    """
    check = Checker("greedy_targets")
    batched, counts = _check_targets(check, target_logits, num_nodes)
    logits = target_logits if batched else target_logits[None]
    for b, count in enumerate(counts):
        rows = logits[b, :count]
        if np.isnan(rows).any() or (rows.max(axis=1, initial=-np.inf) == -np.inf).any():
            raise ArgumentError(
                f"greedy_targets: `target_logits` of request {b} holds NaN or a row without a value above -inf"
            )
    token_ids = reference.greedy_targets(logits, num_nodes=counts)
    return _deliver("greedy_targets", token_ids if batched else token_ids[0], out)


def sample_targets(
    target_logits: Array,
    uniforms: Array,
    *,
    temperature: float | Array,
    num_nodes: int | Array | None = None,
    out: Array | None = None,
    workspace: Array | None = None,
) -> Array:
    """Sample the target's token at every node from softmax(logits / temperature).

    With w = exp((logit - max) / temperature), the first id with cumsum(w) > u * sum(w) and w > 0; both sums run in
    float64 in id order.

    Parameters
    ----------
    target_logits : float32 | float16 | bfloat16 (NumPy also float64) array, shape ([B,] N, V)
    uniforms : float64 or float32 array, shape ([B,] N)
        Independent draws from [0, 1), one a node. Nodes of one depth may share a draw, since at most one of them
        is on the accepted path; sharing by position makes text independent of the tree.
    temperature : float, or float64 or float32 array, shape ([B])
        Larger than 0.
    num_nodes : int, or int32 array, shape ([B]), default N
        Valid rows; later rows are not read.
    out : int32 array, optional
        Array to write the result into.
    workspace : array, optional
        Scratch for a CUDA kernel; NumPy ignores it.

    Returns
    -------
    int32 array, shape ([B,] N)
        -1 for rows from num_nodes on.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        Also for a valid row that holds NaN, +inf or nothing above -inf, and for u outside [0, 1).

    Notes
    -----
    `accept` on these tokens is lossless: the committed text has exactly the target's distribution.

    Examples
    --------
    >>> logits = np.log(np.array([[0.5, 0.3, 0.2]] * 3))
    >>> sample_targets(logits, np.array([0.1, 0.6, 0.9]), temperature=1.0).tolist()
    [0, 1, 2]
    """
    check = Checker("sample_targets")
    batched, counts = _check_targets(check, target_logits, num_nodes, uniforms=uniforms)
    check.array("uniforms", uniforms, (*batched, "num_nodes"), ("float64", "float32"))
    if not batched:
        target_logits, uniforms = target_logits[None], uniforms[None]
    if isinstance(temperature, np.ndarray):
        check.array("temperature", temperature, batched, ("float64", "float32"))
        temperatures = np.atleast_1d(temperature).astype(np.float64)
        if not np.all(temperatures > 0) or not np.all(np.isfinite(temperatures)):
            raise ArgumentError(f"sample_targets: `temperature` is {temperature.tolist()}, expected finite numbers > 0")
    else:
        temperatures = np.full(len(counts), check.real("temperature", temperature, above=0.0))
    for b, count in enumerate(counts):
        if not np.all((uniforms[b, :count] >= 0) & (uniforms[b, :count] < 1)):
            raise ArgumentError(f"sample_targets: `uniforms` of request {b} leaves [0, 1)")
        if not np.all(np.isfinite(target_logits[b, :count].max(axis=1, initial=-np.inf))):
            raise ArgumentError(
                f"sample_targets: `target_logits` of request {b} holds NaN, +inf or a row without a value above -inf"
            )
    token_ids = reference.sample_targets(target_logits, uniforms, temperature=temperatures, num_nodes=counts)
    return _deliver("sample_targets", token_ids if batched else token_ids[0], out)


def accept(
    tree: DraftTree, target_token_ids: Array, *, out: AcceptResult | None = None, workspace: Array | None = None
) -> AcceptResult:
    """Walk from the root while the target's token at the current node is one of its children.

    The first target token that is no child is the bonus: the walk commits `num_accepted` drafts and that token.

    Parameters
    ----------
    tree : DraftTree
    target_token_ids : int32 array, shape ([B,] N)
        From `greedy_targets` or `sample_targets`. -1 matches no child: the walk ends there with bonus -1.
    out : AcceptResult, optional
        Arrays to write the result into.
    workspace : array, optional
        Scratch for a CUDA kernel; NumPy ignores it.

    Returns
    -------
    AcceptResult
        All -1 for an inactive request.

    Raises
    ------
    ShapeError, DTypeError
        The message names the argument, what it is and what was expected.

    Notes
    -----
    For a fixed tree the walk is lossless, and no exact rule accepts more. No token is special: stopping at an end
    token is the caller's business. Source: DDTree, arXiv 2604.12989; SpecInfer, arXiv 2305.09781.

    Examples
    --------
    >>> tree = DraftTree.from_parents([9, 10, 20, 11], [-1, 0, 1, 0])
    >>> accept(tree, np.array([10, 20, 33, 0], np.int32))
    AcceptResult(accepted=[0, 1, 2], num_accepted=2, bonus_token=33)
    """
    check = Checker("accept")
    if not isinstance(tree, DraftTree):
        raise DTypeError(f"accept: `tree` is {type(tree).__name__}, expected DraftTree")
    links = {name: getattr(tree, name) for name in ("token_ids", "first_child", "next_sibling")}
    named = {f"tree.{name}": array for name, array in links.items()}
    _require_numpy(check, **named, **{"tree.num_nodes": tree.num_nodes}, target_token_ids=target_token_ids)
    batched = ("batch",) if tree.is_batched else ()
    for name, array in (*named.items(), ("target_token_ids", target_token_ids)):
        check.array(name, array, (*batched, "num_nodes"), ("int32",))
    check.array("tree.num_nodes", tree.num_nodes, batched, ("int32",))
    result = reference.accept(
        tree if batched else tree.with_batch(), target_token_ids if batched else target_token_ids[None]
    )
    return (result if batched else result.without_batch()).deliver("accept", out)


@overload
def commit_kv(kv: PagedKV, result: AcceptResult, *, workspace: Array | None = None) -> PagedKV: ...
@overload
def commit_kv(
    kv: Sequence[PagedKV], result: AcceptResult, *, workspace: Array | None = None
) -> tuple[PagedKV, ...]: ...
def commit_kv(
    kv: PagedKV | Sequence[PagedKV], result: AcceptResult, *, workspace: Array | None = None
) -> PagedKV | tuple[PagedKV, ...]:
    """Move the accepted tree rows right behind the context and return caches that count them.

    Row context_len + accepted[j] goes to position context_len + j for j = 0 .. num_accepted (the root is j = 0).

    Parameters
    ----------
    kv : PagedKV, or a sequence of them (one a layer)
        Pages are modified in place; everything is read before anything is written. Layers that share one cache
        are moved once.
    result : AcceptResult
    workspace : array, optional
        Scratch for a CUDA kernel; NumPy ignores it.

    Returns
    -------
    PagedKV, or a tuple of them
        The same pages with a new `context_lens`: old + num_accepted + 1, unchanged for an inactive request.

    Raises
    ------
    ShapeError, DTypeError, LayoutError, ArgumentError
        Also when a position has no page; nothing is moved then.

    Examples
    --------
    >>> rows = np.arange(8.0)[:, None].repeat(16, axis=1)
    >>> kv = PagedKV.from_dense(rows, rows, page_size=4, context_lens=2)  # rows 2..7 belong to the tree
    >>> path = AcceptResult(np.array([0, 2, 3, -1, -1, -1], np.int32), np.array(2, np.int32), np.array(7, np.int32))
    >>> after = commit_kv(kv, path)
    >>> int(after.context_lens), after.ckv.reshape(-1, 16)[:5, 0].tolist()
    (5, [0.0, 1.0, 2.0, 4.0, 5.0])
    """
    check = Checker("commit_kv")
    if not isinstance(result, AcceptResult):
        raise DTypeError(f"commit_kv: `result` is {type(result).__name__}, expected AcceptResult")
    single = isinstance(kv, PagedKV)
    caches: Sequence[PagedKV] = [kv] if isinstance(kv, PagedKV) else list(kv)
    for cache in caches:
        if not isinstance(cache, PagedKV):
            raise DTypeError(f"commit_kv: `kv` holds {type(cache).__name__}, expected PagedKV or a sequence of them")
    batched = ("batch",) if result.is_batched else ()
    check.array("result.accepted", result.accepted, (*batched, "num_nodes"), ("int32",))
    check.array("result.num_accepted", result.num_accepted, batched, ("int32",))
    for cache in caches:
        pools = {"kv.ckv": cache.ckv, "kv.kpe": cache.kpe}
        tables = {"kv.page_table": cache.page_table, "kv.context_lens": cache.context_lens}
        _require_numpy(check, **pools, **tables, **{"result.accepted": result.accepted})
        for name, pool in pools.items():
            check.array(name, pool, pool.shape, FLOATS_AND_F64, writable=True)
        if len(cache.page_table.shape) != len(batched) + 1:
            raise ShapeError(
                f"commit_kv: `kv.page_table` is {cache.page_table.shape}, expected {len(batched) + 1} axes like "
                f"`result`, whose `accepted` is {result.accepted.shape}"
            )
        check.array("kv.page_table", cache.page_table, (*batched, cache.page_table.shape[-1]), ("int32",))
        check.array("kv.context_lens", cache.context_lens, batched, ("int32",))
    if not batched:
        result = result.with_batch()
        caches = [cache.with_batch() for cache in caches]
    _check_path(result)
    committed = reference.commit_kv(caches, result)
    if not batched:
        committed = tuple(cache.without_batch() for cache in committed)
    return committed[0] if single else committed


def _require_numpy(check: Checker, **arrays: Array) -> None:
    if check.backend(**arrays) != "numpy":
        raise UnsupportedError(f"{check.function}: no CUDA kernel in this version; supported backends: numpy")


def _deliver(function: str, token_ids: Array, out: Array | None) -> Array:
    if out is None:
        return token_ids
    deliver_arrays(function, "", {"out": token_ids}, [out])
    return out


def _check_targets(
    check: Checker, target_logits: Array, num_nodes: int | Array | None, **others: Array
) -> tuple[tuple[str, ...], Array]:
    """Check the logits; return the batch axis as a tuple of names and the number of valid rows of each request."""
    _require_numpy(check, target_logits=target_logits, **others)
    batched = ("batch",) if target_logits.ndim == 3 else ()
    check.array("target_logits", target_logits, (*batched, "num_nodes", "vocab_size"), FLOATS_AND_F64)
    batch = target_logits.shape[0] if batched else 1
    capacity = target_logits.shape[-2]
    if num_nodes is None:
        return batched, np.full(batch, capacity, np.int32)
    if isinstance(num_nodes, np.ndarray):
        check.array("num_nodes", num_nodes, batched, ("int32",))
        counts = np.atleast_1d(num_nodes)
        if (counts < 0).any() or (counts > capacity).any():
            raise ArgumentError(f"{check.function}: `num_nodes` is {num_nodes.tolist()}, expected 0..{capacity}")
        return batched, counts
    return batched, np.full(batch, check.integer("num_nodes", num_nodes, low=0, high=capacity), np.int32)


def _check_path(result: AcceptResult) -> None:
    """Raise unless every path starts at the root and ascends inside the tree."""
    capacity = result.accepted.shape[1]
    for b, last in enumerate(result.num_accepted.tolist()):
        path = result.accepted[b, : last + 1]
        fits = -1 <= last < max(capacity, 1) and len(path) == last + 1
        if not fits or (last >= 0 and (path[0] != 0 or (np.diff(path) <= 0).any() or path[-1] >= capacity)):
            raise ArgumentError(
                f"commit_kv: `result.accepted` of request {b} is {path.tolist()} with num_accepted {last}, expected "
                f"ascending node indices from the root (0) inside 0..{capacity - 1}"
            )
