"""Preparations of the public functions of tree_build: checks of metadata, of values for the reference, and plans."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ddtree_cupy._call import Call, Form
from ddtree_cupy._check import FLOATS, FLOATS_AND_F64, Checker
from ddtree_cupy.containers import Candidates, DraftTree
from ddtree_cupy.containers.topology import MOST_NODES, fillable_nodes
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError
from ddtree_cupy.tree_build import kernel, reference

Array = Any
MOST_PADDED = 1024  # a larger default capacity is no larger than the full tree; memory grows with its square
TREE = Form(kind=DraftTree)


class Options(NamedTuple):
    """What bounds a tree besides its budget, checked."""

    max_depth: int | None
    max_children: int | tuple[int, ...] | None
    min_path_score: float | None
    spine: int


def top_candidates(call: Call, draft_logits: Array, k: int, *, check_finite: bool = True) -> None:
    """Prepare `top_candidates`."""
    on_device = _check_logits(call, draft_logits)
    k = call.check.integer("k", k, low=0)
    call.form = Form(kind=Candidates)
    call.read = {"draft_logits": draft_logits}
    logits = call.batch(draft_logits)
    if on_device:
        call.plan = kernel.candidates_plan(logits.shape, logits.dtype.name, k)
        call.inputs = kernel.logits_inputs(logits)
        return
    if check_finite:
        _reject_non_finite(call.check, draft_logits)
    call.reference = lambda: reference.top_candidates(logits, k)


def best_first_tree(
    call: Call,
    candidates: Candidates,
    *,
    budget: int | Array,
    root_token_ids: int | Array,
    capacity: int | None = None,
    **options: Any,
) -> None:
    """Prepare `best_first_tree`."""
    on_device = _check_candidates(call, candidates)
    batch = candidates.lse.shape[0] if call.is_batched else 1
    rows = candidates.token_ids.shape[-2:]
    tree = _Tree(call, batch, rows, budget, root_token_ids, capacity, options)
    call.read = {"candidates": candidates, **call.read}
    candidates = call.batch(candidates)
    if on_device:
        call.plan = kernel.tree_plan((batch, *rows), tree.capacity, *tree.options)
        names = {"candidate_ids": "token_ids", "candidate_logits": "logits", "candidate_lse": "lse"}
        table = {name: getattr(candidates, field) for name, field in names.items()}
        call.inputs = {**table, **kernel.tree_inputs(tree.budget, tree.roots, tree.capacity)}
        return
    budgets, roots = tree.values()
    call.reference = lambda: reference.best_first_tree(
        candidates, budgets=budgets, root_token_ids=roots, capacity=tree.capacity, **tree.options._asdict()
    )


def build_tree(
    call: Call,
    draft_logits: Array,
    *,
    budget: int | Array,
    root_token_ids: int | Array,
    check_finite: bool = True,
    capacity: int | None = None,
    **options: Any,
) -> None:
    """Prepare `build_tree`."""
    on_device = _check_logits(call, draft_logits)
    batch = draft_logits.shape[0] if call.is_batched else 1
    tree = _Tree(call, batch, draft_logits.shape[-2:], budget, root_token_ids, capacity, options)
    call.read = {"draft_logits": draft_logits, **call.read}
    k = _most_candidates(tree.capacity, tree.options.max_children)
    logits = call.batch(draft_logits)
    if on_device:
        call.plan = kernel.build_plan(logits.shape, logits.dtype.name, k, tree.capacity, tree.options)
        call.inputs = {
            **kernel.logits_inputs(logits),
            **kernel.tree_inputs(tree.budget, tree.roots, tree.capacity),
        }
        return
    budgets, roots = tree.values()
    if check_finite:
        _reject_non_finite(call.check, draft_logits, roots >= 0)  # an inactive request is not read
    call.reference = lambda: reference.best_first_tree(
        reference.top_candidates(logits, k),
        budgets=budgets,
        root_token_ids=roots,
        capacity=tree.capacity,
        **tree.options._asdict(),
    )


class _Tree:
    """Budget, roots, options and capacity of a call, checked and with a request axis."""

    def __init__(
        self,
        call: Call,
        batch: int,
        rows: tuple[int, int],
        budget: int | Array,
        root_token_ids: int | Array,
        capacity: int | None,
        options: dict[str, Any],
    ) -> None:
        self.check, self.batch = call.check, batch
        call.form = TREE
        budget = _per_request(call, "budget", budget, batch, (0, 2**31 - 2))
        roots = _per_request(call, "root_token_ids", root_token_ids, batch, (-1, 2**31 - 1))
        call.read = {"budget": budget, "root_token_ids": roots}
        self.options = _options_of(call.check, **options)
        self.capacity = self._capacity_of(call, budget, capacity, rows)
        if isinstance(call.out, DraftTree) and call.out.path_scores is None:
            raise DTypeError(f"{call.check.function}: `out.path_scores` is None, expected a float64 array")
        self.budget, self.roots = call.batch(budget, roots)

    def _capacity_of(self, call: Call, budget: int | Array, capacity: int | None, rows: tuple[int, int]) -> int:
        """Return the most nodes besides the root; `rows` are the draft length and the candidates of a depth."""
        check, options = self.check, self.options
        if capacity is not None:
            return check.integer("capacity", capacity, low=0, high=MOST_NODES - 1)
        if isinstance(budget, int):
            largest = budget
        elif call.backend == "numpy":
            largest = int(budget.max(initial=0))
        else:
            raise ArgumentError(
                f"{check.function}: `budget` is an array, which is not read on the host: pass `capacity=`, the largest "
                f"budget"
            )
        if largest <= MOST_PADDED:
            return largest
        filled = fillable_nodes(largest, *rows, options.max_depth, options.max_children)
        if filled >= MOST_NODES:
            raise ArgumentError(
                f"{check.function}: `budget` is {largest}, expected at most {MOST_NODES - 1} where the candidates can "
                f"fill as many nodes"
            )
        return filled

    def values(self) -> list[npt.NDArray[np.int32]]:
        """Return budgets and roots for the reference as arrays, their values checked."""
        arrays = []
        for name, value, lowest in (("budget", self.budget, 0), ("root_token_ids", self.roots, -1)):
            arrays.append(np.full(self.batch, value, np.int32) if isinstance(value, int) else value)
            if (arrays[-1] < lowest).any():
                wanted = "integers >= 0" if name == "budget" else "-1 or a token id"
                raise ArgumentError(f"{self.check.function}: `{name}` holds {arrays[-1].min()}, expected {wanted}")
        return arrays


def _check_logits(call: Call, draft_logits: Array) -> bool:
    """Check the logits; return whether kernels run."""
    check = call.check
    if draft_logits is None:
        raise DTypeError(f"{check.function}: `draft_logits` is None, expected a float array")
    on_device = call.choose_backend(draft_logits=draft_logits)
    axes = ("draft_len", "vocab_size")
    if draft_logits.ndim not in (2, 3):
        raise ShapeError(
            f"{check.function}: `draft_logits` is {draft_logits.shape}, expected ([batch,] {', '.join(axes)})"
        )
    call.is_batched = draft_logits.ndim == 3
    if call.checks:
        dtypes = FLOATS if on_device else FLOATS_AND_F64
        check.array("draft_logits", draft_logits, call.axes(*axes), dtypes, last_contiguous=on_device)
    return on_device


def _check_candidates(call: Call, candidates: Candidates) -> bool:
    """Check the candidates; return whether kernels run."""
    check = call.check
    check.kind("candidates", candidates, Candidates)
    arrays = {f"candidates.{name}": getattr(candidates, name) for name in ("lse", "logits", "token_ids")}
    on_device = call.choose_backend(**arrays)
    call.is_batched = candidates.is_batched
    if call.checks:
        floats = ("float32",) if on_device else ("float32", "float64")
        rows, row = call.axes("draft_len"), call.axes("draft_len", "candidates_per_depth")
        check.array("candidates.lse", candidates.lse, rows, floats, contiguous=on_device)
        check.array("candidates.logits", candidates.logits, row, floats, contiguous=on_device)
        check.array("candidates.token_ids", candidates.token_ids, row, ("int32",), contiguous=on_device)
    return on_device


def _reject_non_finite(check: Checker, draft_logits: Array, active: Array | bool = True) -> None:
    """Refuse NaN and +inf in the requests that are `active`, shape (B,)."""
    bad = np.isnan(draft_logits) | (draft_logits == np.inf)
    bad &= np.reshape(active, (-1, 1, 1)[-draft_logits.ndim :])
    if bad.any():
        where = [int(i) for i in np.argwhere(bad)[0]]
        raise ArgumentError(
            f"{check.function}: `draft_logits`{where} is {draft_logits[tuple(where)]}, expected numbers below +inf; "
            f"check_finite=False cuts the tree there instead"
        )


def _per_request(call: Call, name: str, value: int | Array, batch: int, bounds: tuple[int, int]) -> int | Array:
    """Return an int, or an int32 array whose values nobody has read."""
    check = call.check
    if call.is_batched and isinstance(value, Sequence):
        raise DTypeError(
            f"{check.function}: `{name}` is {type(value).__name__}, expected an integer or an int32 array of shape "
            f"({batch},)"
        )
    if isinstance(value, np.generic) or not hasattr(value, "shape"):
        return check.integer(name, value, low=bounds[0], high=bounds[1])
    if call.checks:
        call.require_library(name, value)
        axes = (batch,) if call.is_batched else ()
        check.array(name, value, axes, ("int32",), contiguous=call.backend != "numpy")
    array: Array = value
    return array


def _options_of(
    check: Checker,
    max_depth: int | None = None,
    max_children: int | Sequence[int] | None = None,
    min_path_score: float | None = None,
    spine: int = 0,
) -> Options:
    return Options(
        None if max_depth is None else check.integer("max_depth", max_depth, low=0),
        _children_of(check, max_children),
        None if min_path_score is None else check.real("min_path_score", min_path_score),
        check.integer("spine", spine, low=0),
    )


def _children_of(check: Checker, max_children: int | Sequence[int] | None) -> int | tuple[int, ...] | None:
    if max_children is None:
        return None
    if isinstance(max_children, np.ndarray):
        max_children = max_children.tolist()
    if isinstance(max_children, Sequence) and not isinstance(max_children, str):
        return tuple(check.integer("max_children", limit, low=0) for limit in max_children)
    return check.integer("max_children", max_children, low=0)


def _most_candidates(capacity: int, max_children: int | tuple[int, ...] | None) -> int:
    """Return how many candidates a depth can need, as a node of rank r has r better siblings."""
    if max_children is None:
        return capacity
    return min(capacity, max_children if isinstance(max_children, int) else max(max_children, default=0))
