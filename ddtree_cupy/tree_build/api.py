"""Public functions of tree_build: docstrings, checks and dispatch."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import FLOATS_AND_F64, Checker
from ddtree_cupy.containers import Candidates, DraftTree
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from ddtree_cupy.tree_build import reference

Array = Any


def top_candidates(
    draft_logits: Array,
    k: int,
    *,
    check_finite: bool = True,
    out: Candidates | None = None,
    workspace: Array | None = None,
) -> Candidates:
    """Take the k best tokens of every draft position, and the log-sum-exp of its whole row.

    token_ids[i, :] are the ids of row i by logit descending, then id ascending; lse[i] = log sum_v exp(logits[i, v]).

    Parameters
    ----------
    draft_logits : float32 | float16 | bfloat16 (NumPy also float64) array, shape ([B,] L, V)
        Row i scores depth i + 1. Upcast to float32 before any arithmetic; -0.0 and float32 subnormals count
        as +0.0. -inf entries are no candidates.
    k : int
        Candidates a row; K = min(k, V).
    check_finite : bool
        NumPy input only: raise on NaN and +inf. Otherwise such a row is bad: ids -1, logits -inf, lse NaN.
    out : Candidates, optional
        Arrays to write the result into.
    workspace : array, optional
        Scratch for a CUDA kernel; NumPy ignores it.

    Returns
    -------
    Candidates
        token_ids int32 ([B,] L, K), logits and lse float32 (float64 for float64 input).

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        The message names the argument, what it is and what was expected.

    Notes
    -----
    An all -inf row gives ids -1 and lse -inf. Exact ties are the normal case with bfloat16 logits; the id order
    makes the result independent of k, of the device and of how a row is split.

    Examples
    --------
    >>> top = top_candidates(np.array([[1, 2, 5, 4, 5]], np.float32), 3)
    >>> top.token_ids.tolist(), top.logits.tolist()
    ([[2, 4, 3]], [[5.0, 5.0, 4.0]])
    """
    check = Checker("top_candidates")
    _require_numpy(check, draft_logits=draft_logits)
    batched = _batch_axis(check, "draft_logits", draft_logits, ("draft_len", "vocab_size"))
    check.array("draft_logits", draft_logits, (*batched, "draft_len", "vocab_size"), FLOATS_AND_F64)
    k = check.integer("k", k, low=0)
    if check_finite:
        _reject_non_finite(check, draft_logits)
    result = reference.top_candidates(draft_logits if batched else draft_logits[None], k)
    return (result if batched else result.without_batch()).deliver("top_candidates", out)


def best_first_tree(
    candidates: Candidates,
    *,
    budget: int | Array,
    root_token_ids: int | Array,
    capacity: int | None = None,
    max_depth: int | None = None,
    max_children: int | Sequence[int] | None = None,
    min_path_score: float | None = None,
    spine: int = 0,
    out: DraftTree | None = None,
    workspace: Array | None = None,
) -> DraftTree:
    """Build the tree of the `budget` most probable prefixes under the draft marginals.

    s(root) = 0 and s(child) = s(parent) + (logit - lse of its depth), in float64. The open node with the highest
    score is taken until the budget is spent; equal scores go to the lexicographically smaller rank path, a prefix
    before its extensions. Nodes are numbered in that order.

    Parameters
    ----------
    candidates : Candidates
        From `top_candidates`; row i scores depth i + 1.
    budget : int, or int32 array, shape ([B])
        Nodes besides the root.
    root_token_ids : int, or int32 array, shape ([B])
        The last committed token; -1 makes a request inactive (num_nodes 0).
    capacity : int, default max(budget)
        Fixes the shapes: N = capacity + 1. Larger budgets are clamped to it.
    max_depth : int, optional
        Deepest level; the draft length bounds it anyway.
    max_children : int or sequence of int, optional
        Most children of a node; a sequence holds one limit for each depth of the parent (missing: 0).
    min_path_score : float, optional
        Keep only nodes whose path score is at least this, in nats.
    spine : int
        First insert the chain of rank-0 candidates to this depth, then continue best first. All other options
        bind the spine too.
    out : DraftTree, optional
        Arrays to write the result into.
    workspace : array, optional
        Scratch for a CUDA kernel; NumPy ignores it.

    Returns
    -------
    DraftTree
        N = capacity + 1; fewer nodes than the budget when candidates run out. `status` bit 0 is set when a row
        of the request is bad (lse NaN); the tree then stops above the first such row.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        The message names the argument, what it is and what was expected.

    Notes
    -----
    Scores never rise along a path, so the result is the set of most probable prefixes, closed under parents: it
    maximises the expected acceptance length under the marginals, and the tree of budget b is the first b + 1
    nodes of the tree of budget b + 1. Source: DDTree, arXiv 2604.12989; the fixed float64 order of operations and
    the tie rule are ours.

    Examples
    --------
    >>> logits = np.log(np.array([[0.6, 0.3, 0.1], [0.5, 0.4, 0.1]], np.float32))
    >>> tree = best_first_tree(top_candidates(logits, 3), budget=5, root_token_ids=9)
    >>> tree.token_ids.tolist(), tree.parents.tolist()
    ([9, 0, 0, 1, 1, 0], [-1, 0, 1, 0, 1, 3])
    >>> np.exp(tree.path_scores).round(2).tolist()
    [1.0, 0.6, 0.3, 0.3, 0.24, 0.15]
    """
    check = Checker("best_first_tree")
    if not isinstance(candidates, Candidates):
        raise DTypeError(f"best_first_tree: `candidates` is {type(candidates).__name__}, expected Candidates")
    _require_numpy(check, token_ids=candidates.token_ids, logits=candidates.logits, lse=candidates.lse)
    batched = ("batch",) if candidates.is_batched else ()
    check.array("candidates.lse", candidates.lse, (*batched, "draft_len"), ("float32", "float64"))
    axes = (*batched, "draft_len", "candidates_per_depth")
    check.array("candidates.logits", candidates.logits, axes, ("float32", "float64"))
    check.array("candidates.token_ids", candidates.token_ids, axes, ("int32",))
    if not batched:
        candidates = candidates.with_batch()
    budgets, capacity = _budgets(check, budget, capacity, len(candidates.lse), bool(batched))
    tree = reference.best_first_tree(
        candidates,
        budgets=budgets,
        root_token_ids=_roots(check, root_token_ids, len(candidates.lse), bool(batched)),
        capacity=capacity,
        max_depth=None if max_depth is None else check.integer("max_depth", max_depth, low=0),
        max_children=_children(check, max_children),
        min_path_score=None if min_path_score is None else check.real("min_path_score", min_path_score),
        spine=check.integer("spine", spine, low=0),
    )
    return (tree if batched else tree.without_batch()).deliver("best_first_tree", out)


def build_tree(
    draft_logits: Array,
    *,
    budget: int | Array,
    root_token_ids: int | Array,
    check_finite: bool = True,
    capacity: int | None = None,
    max_depth: int | None = None,
    max_children: int | Sequence[int] | None = None,
    min_path_score: float | None = None,
    spine: int = 0,
    out: DraftTree | None = None,
    workspace: Array | None = None,
) -> DraftTree:
    """Build the draft tree from drafter logits: `top_candidates`, then `best_first_tree`.

    Parameters
    ----------
    draft_logits : float32 | float16 | bfloat16 (NumPy also float64) array, shape ([B,] L, V)
        Row i scores depth i + 1.
    budget, root_token_ids, capacity, max_depth, max_children, min_path_score, spine, out, workspace
        As in `best_first_tree`.
    check_finite : bool
        As in `top_candidates`.

    Returns
    -------
    DraftTree

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        The message names the argument, what it is and what was expected.

    Notes
    -----
    K = min(capacity, V, max_children) candidates a depth are enough: a node of rank r has r better siblings.
    Source: DDTree, arXiv 2604.12989.

    Examples
    --------
    >>> logits = np.zeros((2, 3), np.float32)
    >>> build_tree(logits, budget=5, root_token_ids=0).parents.tolist()
    [-1, 0, 0, 0, 1, 1]
    """
    check = Checker("build_tree")
    _require_numpy(check, draft_logits=draft_logits)
    batched = _batch_axis(check, "draft_logits", draft_logits, ("draft_len", "vocab_size"))
    batch = draft_logits.shape[0] if batched else 1
    budgets, capacity = _budgets(check, budget, capacity, batch, bool(batched))
    _roots(check, root_token_ids, batch, bool(batched))
    widths = _children(check, max_children)
    k = capacity if widths is None else min(capacity, widths if isinstance(widths, int) else max(widths, default=0))
    candidates = top_candidates(draft_logits, k, check_finite=check_finite)
    return best_first_tree(
        candidates,
        budget=budgets if batched else int(budgets[0]),
        root_token_ids=root_token_ids,
        capacity=capacity,
        max_depth=max_depth,
        max_children=max_children,
        min_path_score=min_path_score,
        spine=spine,
        out=out,
    )


def choose_budget(path_scores: npt.ArrayLike, cost: npt.ArrayLike | Callable[[int], float]) -> int:
    """Choose how many nodes of a best-first tree to verify, given what verifying them costs.

    E(n) = 1 + sum of exp(path_scores[1 .. n]) is the expected number of tokens a pass commits with n nodes besides
    the root (bonus included). Returns the n that maximises E(n) / cost(n), the smallest on ties. Host only.

    Parameters
    ----------
    path_scores : float array_like, shape (N,)
        `DraftTree.path_scores` of one request: root first, nats; trailing -inf is padding.
    cost : array_like or callable
        cost[n] or cost(n) for n = 0 .. number of valid nodes besides the root; positive, any unit.

    Returns
    -------
    int
        Nodes besides the root.

    Raises
    ------
    ShapeError, ArgumentError
        Scores that are no numbers <= 0, a cost that is not positive or covers too few n.

    Notes
    -----
    Source: the surrogate of DDTree (arXiv 2604.12989), divided by a cost.

    Examples
    --------
    >>> scores = np.log([1.0, 0.6, 0.3, 0.3, 0.24])
    >>> choose_budget(scores, cost=lambda n: 1.0)
    4
    >>> choose_budget(scores, cost=lambda n: 10.0 + 2.5 * n)
    1
    """
    scores = np.asarray(path_scores, np.float64)
    if scores.ndim != 1 or scores.size == 0:
        raise ShapeError(f"choose_budget: `path_scores` is {scores.shape}, expected (num_nodes,) with the root first")
    scores = scores[: 1 + np.cumprod(scores[1:] > -np.inf).sum()]
    if not np.all(scores <= 0):
        raise ArgumentError("choose_budget: `path_scores` must be log-probabilities: numbers <= 0, in nats")
    costs = np.asarray([cost(n) for n in range(scores.size)] if callable(cost) else cost, np.float64)
    if costs.ndim != 1 or costs.size < scores.size:
        raise ShapeError(f"choose_budget: `cost` is {costs.shape}, expected at least ({scores.size},): one a budget")
    costs = costs[: scores.size]
    if not (np.all(costs > 0) and np.all(np.isfinite(costs))):
        raise ArgumentError("choose_budget: `cost` must be positive and finite for every budget")
    return reference.choose_budget(scores, costs)


def _require_numpy(check: Checker, **arrays: Array) -> None:
    if check.backend(**arrays) != "numpy":
        raise UnsupportedError(f"{check.function}: no CUDA kernel in this version; supported backends: numpy")


def _batch_axis(check: Checker, name: str, array: Array, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return ("batch",) when `array` has one axis more than `axes`, () when it has as many."""
    if array.ndim not in (len(axes), len(axes) + 1):
        raise ShapeError(f"{check.function}: `{name}` is {array.shape}, expected ([batch,] {', '.join(axes)})")
    return ("batch",) if array.ndim == len(axes) + 1 else ()


def _reject_non_finite(check: Checker, draft_logits: Array) -> None:
    bad = np.isnan(draft_logits) | (draft_logits == np.inf)
    if bad.any():
        where = [int(i) for i in np.argwhere(bad)[0]]
        raise ArgumentError(
            f"{check.function}: `draft_logits`{where} is {draft_logits[tuple(where)]}, expected numbers below +inf; "
            f"check_finite=False cuts the tree there instead"
        )


def _budgets(
    check: Checker, budget: int | Array, capacity: int | None, batch: int, batched: bool
) -> tuple[npt.NDArray[np.int32], int]:
    """Return the budget of every request and the capacity."""
    if capacity is not None:
        capacity = check.integer("capacity", capacity, low=0)
    if isinstance(budget, np.ndarray):
        check.array("budget", budget, (batch,) if batched else (), ("int32",))
        budgets = np.atleast_1d(budget)
        if (budgets < 0).any():
            raise ArgumentError(f"{check.function}: `budget` holds {budgets.min()}, expected integers >= 0")
    else:
        budgets = np.full(batch, check.integer("budget", budget, low=0, high=2**31 - 2), np.int32)
    return budgets, int(budgets.max(initial=0)) if capacity is None else capacity


def _roots(check: Checker, root_token_ids: int | Array, batch: int, batched: bool) -> npt.NDArray[np.int32]:
    if isinstance(root_token_ids, np.ndarray):
        check.array("root_token_ids", root_token_ids, (batch,) if batched else (), ("int32",))
        roots = np.atleast_1d(root_token_ids)
        if (roots < -1).any():
            raise ArgumentError(f"{check.function}: `root_token_ids` holds {roots.min()}, expected -1 or a token id")
        return roots
    return np.full(batch, check.integer("root_token_ids", root_token_ids, low=-1, high=2**31 - 1), np.int32)


def _children(check: Checker, max_children: int | Sequence[int] | None) -> int | tuple[int, ...] | None:
    if max_children is None:
        return None
    if isinstance(max_children, Sequence | np.ndarray) and not isinstance(max_children, str):
        return tuple(check.integer("max_children", limit, low=0) for limit in max_children)
    return check.integer("max_children", max_children, low=0)
