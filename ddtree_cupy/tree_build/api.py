"""Public functions of tree_build: contracts; `prepare.py` says how each of them runs."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy._arrays import host_array
from ddtree_cupy._call import prepared_by, run
from ddtree_cupy.containers import Candidates, DraftTree
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError
from ddtree_cupy.tree_build import prepare, reference

Array = Any


@prepared_by(prepare.top_candidates)
def top_candidates(
    draft_logits: Array,
    k: int,
    *,
    draft_lens: int | Array | None = None,
    check_finite: bool = True,
    out: Candidates | None = None,
    workspace: Array | None = None,
    checked: bool = True,
) -> Candidates:
    """Take the k best tokens of every draft position, and the log-sum-exp of its whole row.

    token_ids[i, :] are the ids of row i by logit descending, then id ascending; lse[i] = log sum_v exp(logits[i, v]).

    Parameters
    ----------
    draft_logits : float32 | float16 | bfloat16 (NumPy also float64) array, shape ([B,] L, V)
        Row i scores depth i + 1. Upcast to float32 before any arithmetic; -0.0 and float32 subnormals count
        as +0.0. -inf entries are not candidates. For a kernel the last axis is contiguous, other strides are free.
    k : int
        Candidates per row; K = min(k, V).
    draft_lens : int, or int32 array, shape ([B]), default L
        Rows of each request, as where drafts have different lengths. Later rows are not read: they have no candidates
        and lse -inf.
    check_finite : bool
        For NumPy arrays alone: raise on NaN and +inf. Otherwise such a row is bad: ids -1, logits -inf, lse NaN.
    out : Candidates, optional
        Arrays for the result, none of which share memory. A kernel refuses memory that it also reads.
    workspace : uint8 array, shape (n,), optional
        Scratch of at least `workspace_bytes(top_candidates, ...)`; NumPy ignores it.
    checked : bool
        False skips the checks of arrays before a kernel, for loops that have passed them once.

    Returns
    -------
    Candidates
        token_ids int32 ([B,] L, K), logits and lse float32 (float64 for float64 input).

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        `draft_logits` or `k` does not fit; on NumPy also a logit that is NaN or +inf, unless `check_finite` is False.

    Notes
    -----
    An all -inf row gives ids -1 and lse -inf. Exact ties are the normal case with bfloat16 logits; the id order
    makes the result independent of k, of the device and of how a row is split. Probabilities are no logits: a first
    row that is non-negative and sums to 1 raises a `ProbabilityWarning`, on the host alone.

    Examples
    --------
    >>> top = top_candidates(np.array([[1, 2, 5, 4, 5]], np.float32), 3)
    >>> top.token_ids.tolist(), top.logits.tolist()
    ([[2, 4, 3]], [[5.0, 5.0, 4.0]])
    >>> short = top_candidates(np.zeros((2, 3, 4), np.float32), 2, draft_lens=[3, 1])
    >>> short.token_ids[..., 0].tolist()
    [[0, 0, 0], [0, -1, -1]]
    """
    found: Candidates = run(
        top_candidates,
        draft_logits,
        k,
        draft_lens=draft_lens,
        check_finite=check_finite,
        out=out,
        workspace=workspace,
        checked=checked,
    )
    return found


@prepared_by(prepare.best_first_tree)
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
    checked: bool = True,
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
        It decides the shapes: N = capacity + 1, at most 65,535. Larger budgets are clamped to it. It is required where
        `budget` is an array on a device, whose values the host does not read. A default of at most 1,024 stays, and
        nodes that candidates cannot fill are padding. A larger default shrinks to the full tree if that is smaller:
        all candidates that `max_depth` and `max_children` allow, whatever their logits. A given capacity never shrinks.
    max_depth : int, optional
        Deepest level, if that is less than the draft length.
    max_children : int or sequence of int, optional
        The most children of a node; a sequence has one limit for each depth of the parent (0 where it ends).
    min_path_score : float, optional
        Keep only nodes whose path score is at least this, in nats.
    spine : int
        First insert the chain of rank-0 candidates to this depth, then continue best-first. All other options apply
        to the spine, too.
    out : DraftTree, optional
        Arrays for the result, none of which share memory. A kernel refuses memory that it also reads.
    workspace : uint8 array, shape (n,), optional
        Scratch of at least `workspace_bytes(best_first_tree, ...)`; NumPy ignores it.
    checked : bool
        False skips the checks of arrays before a kernel, for loops that have passed them once.

    Returns
    -------
    DraftTree
        N = capacity + 1; fewer nodes than the budget when candidates run out. `status` bit 0 is set when a row
        of the request is bad (lse NaN); the tree then stops above the first such row.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        Arrays do not fit in shape or dtype; an option is out of its range; `budget` is an array of a device and
        `capacity` is missing.

    Notes
    -----
    Scores never rise along a path, so the result is the set of most probable prefixes, closed under parents: it
    maximises the expected acceptance length under the marginals, and the tree of budget b is the first b + 1
    nodes of the tree of budget b + 1. Source: DDTree, arXiv 2604.12989; the fixed order of float64 operations and the
    tie rule are our own.

    Examples
    --------
    >>> logits = np.log(np.array([[0.6, 0.3, 0.1], [0.5, 0.4, 0.1]], np.float32))
    >>> tree = best_first_tree(top_candidates(logits, 3), budget=5, root_token_ids=9)
    >>> tree.token_ids.tolist(), tree.parents.tolist()
    ([9, 0, 0, 1, 1, 0], [-1, 0, 1, 0, 1, 3])
    >>> np.exp(tree.path_scores).round(2).tolist()
    [1.0, 0.6, 0.3, 0.3, 0.24, 0.15]
    """
    tree: DraftTree = run(
        best_first_tree,
        candidates,
        budget=budget,
        root_token_ids=root_token_ids,
        capacity=capacity,
        max_depth=max_depth,
        max_children=max_children,
        min_path_score=min_path_score,
        spine=spine,
        out=out,
        workspace=workspace,
        checked=checked,
    )
    return tree


@prepared_by(prepare.build_tree)
def build_tree(
    draft_logits: Array,
    *,
    budget: int | Array,
    root_token_ids: int | Array,
    draft_lens: int | Array | None = None,
    check_finite: bool = True,
    capacity: int | None = None,
    max_depth: int | None = None,
    max_children: int | Sequence[int] | None = None,
    min_path_score: float | None = None,
    spine: int = 0,
    out: DraftTree | None = None,
    workspace: Array | None = None,
    checked: bool = True,
) -> DraftTree:
    """Build the draft tree from drafter logits: `top_candidates`, then `best_first_tree`.

    Parameters
    ----------
    draft_logits : float32 | float16 | bfloat16 (NumPy also float64) array, shape ([B,] L, V)
        Row i scores depth i + 1.
    budget, root_token_ids, capacity, max_depth, max_children, min_path_score, spine, out, checked
        As in `best_first_tree`.
    draft_lens, check_finite
        As in `top_candidates`: the tree of a request is that of its first draft_lens rows.
    workspace : uint8 array, shape (n,), optional
        Scratch of at least `workspace_bytes(build_tree, ...)`, which includes the candidates; NumPy ignores it.

    Returns
    -------
    DraftTree

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        As in `top_candidates` and `best_first_tree`.

    Notes
    -----
    K = min(capacity, V, max_children) candidates per depth are enough, as a node of rank r has r better siblings.
    Source: DDTree, arXiv 2604.12989.

    Examples
    --------
    >>> logits = np.zeros((2, 3), np.float32)
    >>> build_tree(logits, budget=5, root_token_ids=0).parents.tolist()
    [-1, 0, 0, 0, 1, 1]
    >>> two = build_tree(np.stack([logits, logits]), budget=[5, 4], root_token_ids=[7, 8], draft_lens=[2, 1])
    >>> two.parents.tolist()
    [[-1, 0, 0, 0, 1, 1], [-1, 0, 0, 0, -1, -1]]
    """
    tree: DraftTree = run(
        build_tree,
        draft_logits,
        budget=budget,
        root_token_ids=root_token_ids,
        draft_lens=draft_lens,
        check_finite=check_finite,
        capacity=capacity,
        max_depth=max_depth,
        max_children=max_children,
        min_path_score=min_path_score,
        spine=spine,
        out=out,
        workspace=workspace,
        checked=checked,
    )
    return tree


def choose_budget(path_scores: npt.ArrayLike, cost: npt.ArrayLike | Callable[[int], float]) -> int:
    """Choose how many nodes of a best-first tree to verify, given the cost of verifying them.

    E(n) = 1 + sum of exp(path_scores[1 .. n]) is the expected number of tokens that a pass commits with n nodes besides
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
        Scores that are not numbers <= 0, a cost that is not positive or covers too few n.

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
    scores = _numbers("path_scores", path_scores)
    if scores.ndim != 1 or scores.size == 0:
        raise ShapeError(f"choose_budget: `path_scores` is {scores.shape}, expected (num_nodes,) with the root first")
    scores = scores[: 1 + np.cumprod(scores[1:] != -np.inf).sum()]
    if not np.all(scores <= 0):
        raise ArgumentError("choose_budget: `path_scores` must be log-probabilities: numbers <= 0, in nats")
    costs = _numbers("cost", [cost(n) for n in range(scores.size)] if callable(cost) else cost)
    if costs.ndim != 1 or costs.size < scores.size:
        raise ShapeError(f"choose_budget: `cost` is {costs.shape}, expected at least ({scores.size},): one per budget")
    costs = costs[: scores.size]
    if not (np.all(costs > 0) and np.all(np.isfinite(costs))):
        raise ArgumentError("choose_budget: `cost` must be positive and finite for every budget")
    return reference.choose_budget(scores, costs)


def _numbers(name: str, values: Any) -> npt.NDArray[np.float64]:
    array = host_array("choose_budget", name, values)
    if array.dtype.kind in "OSU":
        raise DTypeError(f"choose_budget: `{name}` is {type(values).__name__}, expected numbers")
    return np.asarray(array, np.float64)
