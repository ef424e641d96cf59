"""Public functions of tree_build: docstrings, checks and dispatch."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import Checker, refuse_odd_array
from ddtree_cupy.containers import Candidates, DraftTree
from ddtree_cupy.errors import ArgumentError, ShapeError
from ddtree_cupy.tree_build import kernel, reference
from ddtree_cupy.tree_build._arguments import (
    capacity_of,
    check_candidates,
    check_logits,
    check_out,
    children_of,
    most_candidates,
    options_of,
    per_request,
    reject_non_finite,
    require_scores,
    tree_shapes,
    values_of,
    with_batch,
)

Array = Any


def top_candidates(
    draft_logits: Array,
    k: int,
    *,
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
        as +0.0. -inf entries are no candidates. For a kernel the last axis is contiguous, other strides are free.
    k : int
        Candidates a row; K = min(k, V).
    check_finite : bool
        NumPy input only: raise on NaN and +inf. Otherwise such a row is bad: ids -1, logits -inf, lse NaN.
    out : Candidates, optional
        Arrays to write the result into, each with memory of its own. A kernel refuses memory that it also reads.
    workspace : uint8 array, shape (n,), optional
        Scratch of at least `top_candidates_workspace_bytes`; NumPy ignores it.
    checked : bool
        False skips a kernel's checks of arrays, in hot loops.

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
    backend, batched = check_logits(check, draft_logits, checked)
    k = check.integer("k", k, low=0)
    logits = draft_logits if batched else draft_logits[None]
    if backend == "numpy":
        if check_finite:
            reject_non_finite(check, draft_logits)
        result = reference.top_candidates(logits, k)
        return (result if batched else result.without_batch()).deliver("top_candidates", out)
    if checked and out is not None:
        rows = draft_logits.shape[:-1]
        row = (*rows, min(k, draft_logits.shape[-1]))
        expected = {"token_ids": (row, "int32"), "logits": (row, "float32"), "lse": (rows, "float32")}
        check_out(check, out, Candidates, expected, draft_logits=draft_logits)
    if checked:
        check.separate({"out": out, "workspace": workspace}, {"draft_logits": draft_logits})
    result = kernel.top_candidates(
        logits, k, backend=backend, out=with_batch(out, batched), workspace=workspace, checked=checked
    )
    return out or (result if batched else result.without_batch())


def top_candidates_workspace_bytes(draft_logits: Array, k: int) -> int:
    """Return the bytes of `workspace` that `top_candidates` needs for these arguments; 0 on NumPy.

    Parameters
    ----------
    draft_logits : array, shape ([B,] L, V)
        Only its shape and dtype matter.
    k : int

    Returns
    -------
    int
        Pass a uint8 array of at least this size; needed while a CUDA graph is captured.

    Examples
    --------
    >>> top_candidates_workspace_bytes(np.zeros((15, 1000), np.float32), 64)
    0
    """
    check = Checker("top_candidates_workspace_bytes")
    backend, _ = check_logits(check, draft_logits, checked=True)
    if backend == "numpy":
        return 0
    *rows, vocab_size = draft_logits.shape
    return kernel.top_candidates_workspace_bytes(math.prod(rows), vocab_size, check.integer("k", k, low=0))


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
        Fixes the shapes: N = capacity + 1, at most 65,535. Larger budgets are clamped to it. A kernel, which does not
        read a `budget` array on the host, needs it. A default of at most 1,024 stays, and what candidates cannot fill
        is padding; a larger one shrinks to the full tree, if that is smaller: all candidates that `max_depth` and
        `max_children` allow, whatever their logits. A given capacity never shrinks.
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
        Arrays to write the result into, each with memory of its own. A kernel refuses memory that it also reads.
    workspace : uint8 array, shape (n,), optional
        Scratch of at least `best_first_tree_workspace_bytes`; NumPy ignores it.
    checked : bool
        False skips a kernel's checks of arrays, in hot loops.

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
    backend, batched = check_candidates(check, candidates, checked)
    batch = candidates.lse.shape[0] if batched else 1
    given = {"candidates.lse": candidates.lse}
    budget = per_request(check, "budget", budget, batch, batched, (0, 2**31 - 2), checked, given)
    roots = per_request(check, "root_token_ids", root_token_ids, batch, batched, (-1, 2**31 - 1), checked, given)
    options = options_of(check, max_depth, max_children, min_path_score, spine)
    draft_len, width = candidates.token_ids.shape[-2:]
    capacity = capacity_of(check, backend, budget, capacity, (draft_len, width), options)
    require_scores(check, out)
    if not batched:
        candidates = candidates.with_batch()
    if backend == "numpy":
        budgets, roots = values_of(check, batch, budget=budget, root_token_ids=roots)
        tree = reference.best_first_tree(
            candidates, budgets=budgets, root_token_ids=roots, capacity=capacity, **options
        )
        return (tree if batched else tree.without_batch()).deliver("best_first_tree", out)
    if checked and out is not None:
        check_out(check, out, DraftTree, tree_shapes((batch,) if batched else (), capacity), **given)
    if checked:
        read = {"candidates": candidates, "budget": budget, "root_token_ids": roots}
        check.separate({"out": out, "workspace": workspace}, read)
    tree = kernel.best_first_tree(
        candidates,
        budgets=budget,
        root_token_ids=roots,
        capacity=capacity,
        **options,
        backend=backend,
        out=with_batch(out, batched),
        workspace=workspace,
        checked=checked,
    )
    return out or (tree if batched else tree.without_batch())


def best_first_tree_workspace_bytes(candidates: Candidates, *, capacity: int) -> int:
    """Return the bytes of `workspace` that `best_first_tree` needs; 0 on NumPy and for small trees.

    Parameters
    ----------
    candidates : Candidates
        Only shapes and dtypes matter.
    capacity : int
        The largest budget.

    Returns
    -------
    int
        Pass a uint8 array of at least this size; needed while a CUDA graph is captured.

    Examples
    --------
    >>> best_first_tree_workspace_bytes(top_candidates(np.zeros((2, 3), np.float32), 3), capacity=5)
    0
    """
    check = Checker("best_first_tree_workspace_bytes")
    backend, batched = check_candidates(check, candidates, checked=True)
    batch = candidates.lse.shape[0] if batched else 1
    capacity = check.integer("capacity", capacity, low=0)
    return 0 if backend == "numpy" else kernel.best_first_workspace_bytes(batch, capacity)


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
    checked: bool = True,
) -> DraftTree:
    """Build the draft tree from drafter logits: `top_candidates`, then `best_first_tree`.

    Parameters
    ----------
    draft_logits : float32 | float16 | bfloat16 (NumPy also float64) array, shape ([B,] L, V)
        Row i scores depth i + 1.
    budget, root_token_ids, capacity, max_depth, max_children, min_path_score, spine, out, checked
        As in `best_first_tree`.
    check_finite : bool
        As in `top_candidates`.
    workspace : uint8 array, shape (n,), optional
        Scratch of at least `build_tree_workspace_bytes`, which includes the candidates; NumPy ignores it.

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
    backend, batched = check_logits(check, draft_logits, checked)
    batch = draft_logits.shape[0] if batched else 1
    given = {"draft_logits": draft_logits}
    budget = per_request(check, "budget", budget, batch, batched, (0, 2**31 - 2), checked, given)
    roots = per_request(check, "root_token_ids", root_token_ids, batch, batched, (-1, 2**31 - 1), checked, given)
    options = options_of(check, max_depth, max_children, min_path_score, spine)
    draft_len, vocab_size = draft_logits.shape[-2:]
    capacity = capacity_of(check, backend, budget, capacity, (draft_len, vocab_size), options)
    require_scores(check, out)
    k = most_candidates(capacity, options["max_children"])
    logits = draft_logits if batched else draft_logits[None]
    if backend == "numpy":
        budgets, roots = values_of(check, batch, budget=budget, root_token_ids=roots)
        if check_finite:
            reject_non_finite(check, draft_logits, roots >= 0)  # an inactive request is not read
        candidates = reference.top_candidates(logits, k)
        tree = reference.best_first_tree(
            candidates, budgets=budgets, root_token_ids=roots, capacity=capacity, **options
        )
        return (tree if batched else tree.without_batch()).deliver("build_tree", out)
    if checked and out is not None:
        check_out(check, out, DraftTree, tree_shapes((batch,) if batched else (), capacity), **given)
    if checked:
        read = {"draft_logits": draft_logits, "budget": budget, "root_token_ids": roots}
        check.separate({"out": out, "workspace": workspace}, read)
    tree = kernel.build_tree(
        logits,
        k,
        budgets=budget,
        root_token_ids=roots,
        capacity=capacity,
        **options,
        backend=backend,
        out=with_batch(out, batched),
        workspace=workspace,
        checked=checked,
    )
    return out or (tree if batched else tree.without_batch())


def build_tree_workspace_bytes(
    draft_logits: Array, *, capacity: int, max_children: int | Sequence[int] | None = None
) -> int:
    """Return the bytes of `workspace` that `build_tree` needs for these arguments; 0 on NumPy.

    Parameters
    ----------
    draft_logits : array, shape ([B,] L, V)
        Only its shape and dtype matter.
    capacity, max_children
        As in `build_tree`.

    Returns
    -------
    int
        Pass a uint8 array of at least this size; needed while a CUDA graph is captured.

    Examples
    --------
    >>> build_tree_workspace_bytes(np.zeros((15, 1000), np.float32), capacity=64)
    0
    """
    check = Checker("build_tree_workspace_bytes")
    backend, batched = check_logits(check, draft_logits, checked=True)
    capacity = check.integer("capacity", capacity, low=0)
    k = most_candidates(capacity, children_of(check, max_children))
    if backend == "numpy":
        return 0
    batch = draft_logits.shape[0] if batched else 1
    draft_len, vocab_size = draft_logits.shape[-2:]
    return kernel.build_workspace_bytes(batch, draft_len, vocab_size, k, capacity)


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
    for name, given in (("path_scores", path_scores), ("cost", cost)):
        refuse_odd_array("choose_budget", name, given)
    scores = np.asarray(path_scores, np.float64)
    if scores.ndim != 1 or scores.size == 0:
        raise ShapeError(f"choose_budget: `path_scores` is {scores.shape}, expected (num_nodes,) with the root first")
    scores = scores[: 1 + np.cumprod(scores[1:] != -np.inf).sum()]
    if not np.all(scores <= 0):
        raise ArgumentError("choose_budget: `path_scores` must be log-probabilities: numbers <= 0, in nats")
    costs = np.asarray([cost(n) for n in range(scores.size)] if callable(cost) else cost, np.float64)
    if costs.ndim != 1 or costs.size < scores.size:
        raise ShapeError(f"choose_budget: `cost` is {costs.shape}, expected at least ({scores.size},): one a budget")
    costs = costs[: scores.size]
    if not (np.all(costs > 0) and np.all(np.isfinite(costs))):
        raise ArgumentError("choose_budget: `cost` must be positive and finite for every budget")
    return reference.choose_budget(scores, costs)
