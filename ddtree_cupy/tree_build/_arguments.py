"""What the public functions of tree_build share: checks of metadata, and arguments brought to one form."""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import FLOATS, FLOATS_AND_F64, Checker
from ddtree_cupy._dispatch import backend_of
from ddtree_cupy.containers import Candidates, DraftTree
from ddtree_cupy.containers.topology import MOST_NODES, fillable_nodes, words_per_row
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError

Array = Any
MOST_PADDED = 1024  # a larger default capacity is no larger than the full tree; memory grows with its square
Container = TypeVar("Container", Candidates, DraftTree)


def check_logits(check: Checker, draft_logits: Array, checked: bool) -> tuple[str, tuple[str, ...]]:
    """Return the backend, and the batch axis as a tuple of names."""
    if draft_logits is None:
        raise DTypeError(f"{check.function}: `draft_logits` is None, expected a float array")
    backend = backend_of(check, draft_logits=draft_logits)
    axes = ("draft_len", "vocab_size")
    if draft_logits.ndim not in (2, 3):
        raise ShapeError(
            f"{check.function}: `draft_logits` is {draft_logits.shape}, expected ([batch,] {', '.join(axes)})"
        )
    batched = ("batch",) if draft_logits.ndim == 3 else ()
    if checked or backend == "numpy":
        on_device = backend != "numpy"
        dtypes = FLOATS if on_device else FLOATS_AND_F64
        check.array("draft_logits", draft_logits, (*batched, *axes), dtypes, last_contiguous=on_device)
    return backend, batched


def check_candidates(check: Checker, candidates: Candidates, checked: bool) -> tuple[str, tuple[str, ...]]:
    """Return the backend, and the batch axis as a tuple of names."""
    if not isinstance(candidates, Candidates):
        raise DTypeError(f"{check.function}: `candidates` is {type(candidates).__name__}, expected Candidates")
    arrays = {f"candidates.{name}": getattr(candidates, name) for name in ("lse", "logits", "token_ids")}
    backend = backend_of(check, **arrays)
    batched = ("batch",) if candidates.is_batched else ()
    if checked or backend == "numpy":
        on_device = backend != "numpy"
        floats = ("float32",) if on_device else ("float32", "float64")
        rows = (*batched, "draft_len")
        check.array("candidates.lse", candidates.lse, rows, floats, contiguous=on_device)
        row = (*rows, "candidates_per_depth")
        check.array("candidates.logits", candidates.logits, row, floats, contiguous=on_device)
        check.array("candidates.token_ids", candidates.token_ids, row, ("int32",), contiguous=on_device)
    return backend, batched


def reject_non_finite(check: Checker, draft_logits: Array, active: Array | bool = True) -> None:
    """Refuse NaN and +inf in the requests that are `active`, shape (B,)."""
    bad = np.isnan(draft_logits) | (draft_logits == np.inf)
    bad &= np.reshape(active, (-1, 1, 1)[-draft_logits.ndim :])
    if bad.any():
        where = [int(i) for i in np.argwhere(bad)[0]]
        raise ArgumentError(
            f"{check.function}: `draft_logits`{where} is {draft_logits[tuple(where)]}, expected numbers below +inf; "
            f"check_finite=False cuts the tree there instead"
        )


def per_request(
    check: Checker,
    name: str,
    value: int | Array,
    batch: int,
    batched: tuple[str, ...],
    bounds: tuple[int, int],
    checked: bool,
    given: dict[str, Array],
) -> int | Array:
    """Return an int, or an int32 array of shape (batch,) whose values nobody has read."""
    if batched and isinstance(value, Sequence):
        raise DTypeError(
            f"{check.function}: `{name}` is {type(value).__name__}, expected an integer or an int32 array of shape "
            f"({batch},)"
        )
    if isinstance(value, np.generic) or not hasattr(value, "shape"):
        return check.integer(name, value, low=bounds[0], high=bounds[1])
    if checked:
        on_device = backend_of(check, **given, **{name: value}) != "numpy"
        check.array(name, value, (batch,) if batched else (), ("int32",), contiguous=on_device)
    array: Array = value
    return array if batched else array[None]


def capacity_of(
    check: Checker,
    backend: str,
    budget: int | Array,
    capacity: int | None,
    rows: tuple[int, int],
    options: dict[str, Any],
) -> int:
    """Return the most nodes besides the root; `rows` are the draft length and the candidates of a depth."""
    if capacity is not None:
        return check.integer("capacity", capacity, low=0, high=MOST_NODES - 1)
    if isinstance(budget, int):
        largest = budget
    elif backend == "numpy":
        largest = int(budget.max(initial=0))
    else:
        raise ArgumentError(
            f"{check.function}: `budget` is an array, which is not read on the host: pass `capacity=`, the largest "
            f"budget"
        )
    if largest <= MOST_PADDED:
        return largest
    filled = fillable_nodes(largest, *rows, options["max_depth"], options["max_children"])
    if filled >= MOST_NODES:
        raise ArgumentError(
            f"{check.function}: `budget` is {largest}, expected at most {MOST_NODES - 1} where the candidates can fill "
            f"as many nodes"
        )
    return filled


def values_of(check: Checker, batch: int, **given: int | Array) -> list[npt.NDArray[np.int32]]:
    """Return budgets and roots of the reference as arrays, their values checked."""
    lowest = {"budget": 0, "root_token_ids": -1}
    arrays = []
    for name, value in given.items():
        arrays.append(np.full(batch, value, np.int32) if isinstance(value, int) else value)
        if (arrays[-1] < lowest[name]).any():
            wanted = "integers >= 0" if name == "budget" else "-1 or a token id"
            raise ArgumentError(f"{check.function}: `{name}` holds {arrays[-1].min()}, expected {wanted}")
    return arrays


def options_of(
    check: Checker,
    max_depth: int | None,
    max_children: int | Sequence[int] | None,
    min_path_score: float | None,
    spine: int,
) -> dict[str, Any]:
    return {
        "max_depth": None if max_depth is None else check.integer("max_depth", max_depth, low=0),
        "max_children": children_of(check, max_children),
        "min_path_score": None if min_path_score is None else check.real("min_path_score", min_path_score),
        "spine": check.integer("spine", spine, low=0),
    }


def children_of(check: Checker, max_children: int | Sequence[int] | None) -> int | tuple[int, ...] | None:
    if max_children is None:
        return None
    if isinstance(max_children, np.ndarray):
        max_children = max_children.tolist()
    if isinstance(max_children, Sequence) and not isinstance(max_children, str):
        return tuple(check.integer("max_children", limit, low=0) for limit in max_children)
    return check.integer("max_children", max_children, low=0)


def most_candidates(capacity: int, max_children: int | tuple[int, ...] | None) -> int:
    """Return how many candidates a depth can need: a node of rank r has r better siblings."""
    if max_children is None:
        return capacity
    return min(capacity, max_children if isinstance(max_children, int) else max(max_children, default=0))


def tree_shapes(batch: tuple[int, ...], capacity: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of every array of a tree."""
    nodes = (*batch, capacity + 1)
    links = ("token_ids", "parents", "depths", "first_child", "next_sibling")
    return {
        **dict.fromkeys(links, (nodes, "int32")),
        "path_scores": (nodes, "float64"),
        "num_nodes": (batch, "int32"),
        "status": (batch, "int32"),
        "visibility_bits": ((*nodes, words_per_row(capacity + 1)), "uint32"),
    }


def check_out(
    check: Checker,
    out: Container,
    kind: type[Container],
    expected: dict[str, tuple[tuple[int, ...], str]],
    **given: Array,
) -> None:
    """Check the arrays a kernel is to write; `given` is an array that says where the others are."""
    if not isinstance(out, kind):
        raise DTypeError(f"{check.function}: `out` is {type(out).__name__}, expected {kind.__name__}")
    for name, (shape, dtype) in expected.items():
        array = getattr(out, name)
        check.backend(**given, **{f"out.{name}": array})
        check.array(f"out.{name}", array, shape, (dtype,), contiguous=True, writable=True)


def require_scores(check: Checker, out: DraftTree | None) -> None:
    """Raise for a tree made by hand: this call writes scores."""
    if isinstance(out, DraftTree) and out.path_scores is None:
        raise DTypeError(f"{check.function}: `out.path_scores` is None, expected a float64 array")


def with_batch(out: Container | None, batched: tuple[str, ...]) -> Container | None:
    return out if out is None or batched else out.with_batch()
