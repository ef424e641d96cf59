"""Preparations of the public functions of tree_build: checks of metadata, of values for the reference, and plans."""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ddtree_cupy._arrays import batched_shape
from ddtree_cupy._call import Call, Form
from ddtree_cupy._check import FLOATS, FLOATS_AND_F64, Checker
from ddtree_cupy._overlap import Region, bounds_of
from ddtree_cupy.containers import Candidates, DraftTree
from ddtree_cupy.containers.topology import MOST_NODES, fillable_nodes
from ddtree_cupy.errors import ArgumentError, DTypeError, ProbabilityWarning, ShapeError
from ddtree_cupy.tree_build import kernel, reference

Array = Any
MOST_PADDED = 1024  # a larger default capacity is no larger than the full tree; memory grows with its square
SUM_OF_ROUNDED = 0.01  # how far from 1 the sum of 16-bit probabilities may lie
TREE = Form(kind=DraftTree)


class Options(NamedTuple):
    """What bounds a tree besides its budget, checked."""

    max_depth: int | None
    max_children: int | tuple[int, ...] | None
    min_path_score: float | None
    spine: int


def top_candidates(
    call: Call, draft_logits: Array, k: int, *, draft_lens: int | Array | None = None, check_finite: bool = True
) -> None:
    """Prepare `top_candidates`."""
    rows = _Rows(call, draft_logits, draft_lens)
    k = call.check.integer("k", k, low=0)
    call.form = Form(kind=Candidates)
    call.read = rows.read
    if call.backend != "numpy":
        call.plan = kernel.candidates_plan(batched_shape(rows.logits, 3), rows.logits.dtype.name, k)
        call.inputs = kernel.logits_inputs(rows.logits, rows.lens)
        return
    lens = rows.values()
    if check_finite:
        rows.reject_non_finite(lens)
    call.reference = lambda: reference.top_candidates(rows.logits, k, draft_lens=lens)


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
    call.read = {"candidates": Region(bounds_of(candidates).values(), candidates), **call.read}
    candidates = call.batch(candidates)
    if on_device:
        call.plan = kernel.tree_plan(kernel.tree_sizes((batch, *rows), tree.capacity, call.backend), tree.options)
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
    draft_lens: int | Array | None = None,
    check_finite: bool = True,
    capacity: int | None = None,
    **options: Any,
) -> None:
    """Prepare `build_tree`."""
    rows = _Rows(call, draft_logits, draft_lens)
    logits = rows.logits
    shape = batched_shape(logits, 3)
    tree = _Tree(call, shape[0], shape[1:], budget, root_token_ids, capacity, options)
    call.read = {**rows.read, **call.read}
    k = _most_candidates(tree.capacity, tree.options.max_children)
    if call.backend != "numpy":
        sizes = kernel.tree_sizes((*shape[:2], min(k, shape[2])), tree.capacity, call.backend)
        call.plan = kernel.build_plan(shape[2], logits.dtype.name, sizes, tree.options)
        call.inputs = {
            **kernel.logits_inputs(logits, rows.lens),
            **kernel.tree_inputs(tree.budget, tree.roots, tree.capacity),
        }
        return
    budgets, roots = tree.values()
    lens = rows.values()
    if check_finite:
        rows.reject_non_finite(np.where(roots >= 0, lens, 0))  # an inactive request is not read
    call.reference = lambda: reference.best_first_tree(
        reference.top_candidates(logits, k, draft_lens=lens),
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
        budget = call.per_request("budget", budget, 0, 2**31 - 2)
        roots = call.per_request("root_token_ids", root_token_ids, -1, 2**31 - 1)
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
        elif call.backend != "cupy":
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


class _Rows:
    """The draft rows of a call, checked and with a request axis, and how many of them each request has."""

    def __init__(self, call: Call, draft_logits: Array, draft_lens: int | Array | None) -> None:
        self.check = check = call.check
        logits = call.array("draft_logits", draft_logits)
        on_device = call.choose_backend(draft_logits=logits)
        axes = ("draft_len", "vocab_size")
        if logits.ndim not in (2, 3):
            raise ShapeError(
                f"{check.function}: `draft_logits` is {logits.shape}, expected ([batch,] {', '.join(axes)})"
            )
        call.is_batched = logits.ndim == 3
        if call.checks:
            dtypes = FLOATS if on_device else FLOATS_AND_F64
            check.array("draft_logits", logits, call.axes(*axes), dtypes, last_contiguous=on_device)
        if call.backend == "numpy" or (call.backend == "emulate" and call.is_checked):
            _warn_of_probabilities(check, logits)
        most = int(logits.shape[-2])
        lens = most if draft_lens is None else call.per_request("draft_lens", draft_lens, 0, most)
        self.read = {"draft_logits": logits, "draft_lens": lens}
        self.logits, self.lens = call.batch(logits, lens)

    def values(self) -> npt.NDArray[np.int32]:
        """Return the lengths for the reference as an array, its values checked."""
        batch, most, _ = self.logits.shape
        lens = np.full(batch, self.lens, np.int32) if isinstance(self.lens, int) else self.lens
        if ((lens < 0) | (lens > most)).any():
            raise ArgumentError(f"{self.check.function}: `draft_lens` is {lens.tolist()}, expected values in 0..{most}")
        return lens

    def reject_non_finite(self, lens: Array) -> None:
        """Refuse NaN and +inf in the first rows of each request."""
        bad = np.isnan(self.logits) | (self.logits == np.inf)
        bad &= (np.arange(bad.shape[1]) < lens[:, None])[..., None]
        if bad.any():
            where = [int(i) for i in np.argwhere(bad)[0]]
            place = where if "batch" in self.check.sizes else where[1:]
            raise ArgumentError(
                f"{self.check.function}: `draft_logits`{place} is {self.logits[tuple(where)]}, expected numbers below "
                f"+inf; check_finite=False cuts the tree there instead"
            )


def _warn_of_probabilities(check: Checker, draft_logits: Array) -> None:
    """Warn when the first row looks like probabilities, whose tree is a wrong one that nobody would notice."""
    row = draft_logits[(0,) * (draft_logits.ndim - 1)] if draft_logits.size else draft_logits
    with np.errstate(invalid="ignore"):
        if row.size < 2 or not (row[:64] >= 0).all() or not (row >= 0).all():  # most logits end at the second of these
            return
    if abs(float(row.sum(dtype=np.float64)) - 1) < SUM_OF_ROUNDED:
        warnings.warn(
            f"{check.function}: the first row of `draft_logits` is non-negative and sums to 1 like probabilities, "
            f"expected logits; numpy.log(draft_logits) makes them of probabilities",
            ProbabilityWarning,
            stacklevel=6,
        )


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
