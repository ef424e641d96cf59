"""Checks of the two models of a loop: that they have the methods, and that each result fits before it is used."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy._arrays import host_array
from ddtree_cupy._call import backend_of
from ddtree_cupy._check import FLOATS, FLOATS_AND_F64, Checker
from ddtree_cupy.containers import DraftTree, PagedKV
from ddtree_cupy.containers.topology import MOST_NODES, fillable_nodes
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError

__all__ = ["PREFILL_NODES", "Models", "prompt_tokens"]

Array = Any

PREFILL_NODES = 128  # prompt tokens of one prefill pass
MOST_POSITIONS = np.iinfo(np.int32).max  # lengths and positions are int32

# name of the argument -> the method that only the second form has, and the parts of both forms
_FORMS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "target": ("verify", ("vocab_size", "allocate", "forward"), ("vocab_size", "start", "verify", "commit")),
    "drafter": ("commit", ("draft_len", "start", "observe", "propose"), ("draft_len", "start", "propose", "commit")),
}


def prompt_tokens(function: str, name: str, prompt: npt.ArrayLike, vocab_size: int) -> npt.NDArray[np.int32]:
    """Return a prompt as int32 (n,), n >= 1, after checking it; messages call it `name`."""
    tokens = host_array(function, name, prompt)
    if tokens.ndim != 1 or tokens.size == 0 or tokens.dtype.kind not in "iu":
        raise ArgumentError(
            f"{function}: `{name}` has shape {tokens.shape} and dtype {tokens.dtype}, expected (n,) integers, n >= 1"
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ArgumentError(f"{function}: `{name}` leaves 0..{vocab_size - 1}")
    return tokens.astype(np.int32)


class Models:
    """A target and perhaps a drafter, used by `function`; a result that does not fit raises before it is used."""

    def __init__(self, function: str, target: Any, drafter: Any, *, needs_drafter: bool) -> None:
        self.function, self.target, self.drafter = function, target, drafter
        check = Checker(function)
        for name, model in (("target", target), ("drafter", drafter)):
            mark, *forms = _FORMS[name]
            missing = [part for part in forms[hasattr(model, mark)] if not hasattr(model, part)]
            if missing and (model is not None or name == "target" or needs_drafter):
                role = name.capitalize()
                raise DTypeError(
                    f"{function}: `{name}` is {type(model).__name__} without `{missing[0]}`, expected what "
                    f"decode.{role} asks: {', '.join(forms[0])}; or decode.Stateful{role}: {', '.join(forms[1])}"
                )
        self.target_is_stateful = hasattr(target, "verify")
        self.drafter_is_stateful = hasattr(drafter, "commit")
        if self.target_is_stateful and drafter is not None and not self.drafter_is_stateful:
            raise DTypeError(
                f"{function}: `drafter` is {type(drafter).__name__}, which observes the features of a decode.Target, "
                f"and `target` gives none; expected what decode.StatefulDrafter asks: {', '.join(_FORMS['drafter'][2])}"
            )
        self.vocab_size = check.integer("target.vocab_size", target.vocab_size, low=1, high=MOST_POSITIONS)
        self.draft_len = 0 if drafter is None else check.integer("drafter.draft_len", drafter.draft_len, low=0)
        self.like: Array = np.zeros(0)  # an array of the library in which trees are built

    def most_nodes(self, name: str, budget: int, depth: int, max_children: Any = None) -> int:
        """Return how many of `budget` nodes a tree can have besides the root, whatever the drafter proposes.

        `name` is the argument with the budget. `build_tree` applies limits of children other than one integer.
        """
        limit = max_children if isinstance(max_children, int) else None
        found = fillable_nodes(budget, self.draft_len, self.vocab_size, depth, limit)
        if found >= MOST_NODES:
            raise ArgumentError(f"{self.function}: `{name}` is {budget}, expected at most {MOST_NODES - 1}")
        return found

    def check_room(self, names: str, max_context: int, max_nodes: int) -> int:
        """Return how many positions the text and one tree may take; the arguments `names` decide that."""
        room = max_context + max_nodes
        if room > MOST_POSITIONS:
            raise ArgumentError(
                f"{self.function}: {names} ask for {room} positions of cache, expected at most {MOST_POSITIONS}"
            )
        return room

    def allocate(self, names: str, max_context: int, max_nodes: int) -> tuple[PagedKV, ...]:
        """Return the target's empty caches; the arguments `names` decide their size."""
        room = self.check_room(names, max_context, max_nodes)
        try:
            found = self.target.allocate(max_context, max_nodes)
        except MemoryError as error:
            raise ArgumentError(
                f"{self.function}: {names} ask for {room} positions of cache, for which `target.allocate` has no "
                f"memory; expected less"
            ) from error
        is_sequence = isinstance(found, Sequence) and len(found) > 0
        if not is_sequence or not all(isinstance(kv, PagedKV) for kv in found):
            raise DTypeError(
                f"{self.function}: `target.allocate` returned {type(found).__name__}, expected a sequence of PagedKV"
            )
        for layer, kv in enumerate(found):
            size = kv.page_table.shape[-1] * kv.page_size
            if kv.is_batched or size < room or int(kv.context_lens) != 0:
                what = "a batch" if kv.is_batched else f"{size} positions, {int(kv.context_lens)} of them in use"
                raise ShapeError(
                    f"{self.function}: `target.allocate(...)[{layer}]` holds {what}, expected an empty unbatched cache "
                    f"of {room} positions, for which {names} ask"
                )
        self.like = found[0].ckv
        return tuple(found)

    def verify(self, tree: DraftTree) -> Array:
        """Return the logits, float (N, V), of a target with a state of its own."""
        name, logits = "target.verify(...)", self.target.verify(tree)
        self._check_on_host(name, logits)
        self._check_logits(name, logits, "num_nodes", len(tree.token_ids))
        return logits

    def propose(self, state: Any, root_token_id: int) -> Array:
        """Return the drafter's logits, float (L or fewer, V), in the array library of the caches."""
        name = "drafter.propose(...)"
        if self.drafter_is_stateful:
            logits = self.drafter.propose()
            self._check_on_host(name, logits)
            logits = logits if logits is None else np.asarray(logits, like=self.like)
        else:
            logits = self.drafter.propose(state, root_token_id)
        self._check_logits(name, logits, "draft_len")
        if len(logits) > self.draft_len:
            raise ShapeError(
                f"{self.function}: `{name}` is {logits.shape}, expected ({self.draft_len}, {self.vocab_size}): at most "
                f"`drafter.draft_len` rows"
            )
        return logits

    def forward(self, tree: DraftTree, kv: Sequence[PagedKV]) -> tuple[Array, Array]:
        """Return the target's logits, float (N, V), and features (N, F), which are checked if there is a drafter."""
        answer = self.target.forward(tree, kv)
        if not isinstance(answer, tuple | list) or len(answer) != 2:
            raise DTypeError(
                f"{self.function}: `target.forward` returned {type(answer).__name__}, expected (logits, features)"
            )
        logits, features = answer
        rows = len(tree.token_ids)
        self._check_logits("target.forward(...)[0]", logits, "num_nodes", rows)
        if self.drafter is not None:
            name = "target.forward(...)[1]"
            check = self._checker(name, features)
            check.array(name, features, (rows, "num_features"))
        return logits, features

    def no_token(self, context_len: int) -> ArgumentError:
        """Return the error for a target that gives no token after `context_len` tokens of text."""
        return ArgumentError(
            f"{self.function}: the target's logits after {context_len} tokens give no token: they hold NaN, nothing "
            f"above -inf, or, while sampling, +inf"
        )

    def _check_on_host(self, name: str, array: Array) -> None:
        if Checker(self.function).backend(**{name: array}) != "numpy":
            raise DTypeError(
                f"{self.function}: `{name}` is a CuPy array, expected a NumPy array from a model with a state of its "
                f"own: cupy.asnumpy({name}) makes one"
            )

    def _checker(self, name: str, array: Array) -> Checker:
        """Return a checker that knows V, after checking that the array is of the same library as the caches."""
        check = Checker(self.function)
        check.backend(**{name: array, "target.allocate(...)[0].ckv": self.like})
        check.sizes["vocab_size"] = (self.vocab_size, "target")
        return check

    def _check_logits(self, name: str, logits: Array, axis: str, rows: int | None = None) -> None:
        check = self._checker(name, logits)
        if rows is not None:
            check.sizes[axis] = (rows, "tree")
        on_reference = backend_of(check, **{name: logits}) == "numpy"
        check.array(name, logits, (axis, "vocab_size"), FLOATS_AND_F64 if on_reference else FLOATS)
