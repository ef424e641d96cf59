"""Models from functions: `tokens -> logits` becomes a target or a drafter of `generate` and `record`."""

from collections.abc import Callable
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from ddtree_cupy._arrays import host_array
from ddtree_cupy._check import Checker
from ddtree_cupy.containers import DraftTree
from ddtree_cupy.errors import DTypeError, ShapeError

__all__ = ["CallableDrafter", "CallableTarget", "from_callable"]

NextLogits = Callable[[npt.NDArray[np.int32]], npt.ArrayLike]


class _FromCallable:
    """A text, and the function that scores its next token."""

    def __init__(self, next_logits: NextLogits, vocab_size: int) -> None:
        self.next_logits, self.vocab_size = next_logits, vocab_size
        self.text: list[int] = []

    def logits_after(self, token_ids: list[int]) -> npt.NDArray[Any]:
        """Return the function's logits (V,) after the text and these tokens."""
        found = self.next_logits(np.array(self.text + token_ids, np.int32))
        logits = host_array("from_callable", "next_logits(...)", found)
        if logits.shape != (self.vocab_size,):
            is_rows = logits.ndim == 2 and logits.shape[1] == self.vocab_size
            advice = "; `lambda tokens: next_logits(tokens)[-1]` returns the last row" if is_rows else ""
            raise ShapeError(
                f"from_callable: `next_logits(...)` is {logits.shape}, expected ({self.vocab_size},): one logit "
                f"for each token of the vocabulary{advice}"
            )
        return logits.astype(np.float64) if logits.dtype.kind in "iu" else logits


class CallableTarget(_FromCallable):
    """A `StatefulTarget` of a function, which it calls once per node; made by `from_callable`."""

    def start(self, prompt_ids: npt.NDArray[np.int32]) -> None:
        """Begin with a prompt; see `StatefulTarget`."""
        self.text = prompt_ids[:-1].tolist()  # without node 0

    def verify(self, tree: DraftTree) -> npt.NDArray[Any]:
        """Return logits (N, V); see `StatefulTarget`."""
        self._token_ids = tree.token_ids
        paths: list[list[int]] = []
        for parent, token in zip(tree.parents.tolist(), tree.token_ids.tolist(), strict=True):
            paths.append([*(paths[parent] if parent >= 0 else []), token])
        return np.stack([self.logits_after(path) for path in paths])

    def commit(self, accepted: npt.NDArray[np.int32]) -> None:
        """Extend the text; see `StatefulTarget`."""
        self.text += self._token_ids[accepted].tolist()


class CallableDrafter(_FromCallable):
    """A `StatefulDrafter` of a function: row i scores the token after its own i likeliest; made by `from_callable`."""

    def __init__(self, next_logits: NextLogits, vocab_size: int, draft_len: int) -> None:
        super().__init__(next_logits, vocab_size)
        self.draft_len = draft_len

    def start(self, prompt_ids: npt.NDArray[np.int32]) -> None:
        """Begin with a prompt; see `StatefulDrafter`."""
        self.text = prompt_ids.tolist()

    def propose(self) -> npt.NDArray[Any]:
        """Return logits (L, V); see `StatefulDrafter`."""
        rows: list[npt.NDArray[Any]] = []
        likeliest: list[int] = []
        for _ in range(self.draft_len):
            rows.append(self.logits_after(likeliest))
            likeliest.append(int(np.argmax(rows[-1])))
        return np.stack(rows) if rows else np.zeros((0, self.vocab_size))

    def commit(self, token_ids: npt.NDArray[np.int32]) -> None:
        """Extend the text; see `StatefulDrafter`."""
        self.text += token_ids.tolist()


@overload
def from_callable(next_logits: NextLogits, *, vocab_size: int) -> CallableTarget: ...
@overload
def from_callable(next_logits: NextLogits, *, vocab_size: int, draft_len: int) -> CallableDrafter: ...
def from_callable(
    next_logits: NextLogits, *, vocab_size: int, draft_len: int | None = None
) -> CallableTarget | CallableDrafter:
    """Make a target, or with `draft_len` a drafter, of a function from a text to the logits of its next token.

    Parameters
    ----------
    next_logits : callable
        Takes the whole text, int32 (n,), n >= 1, and returns real numbers (V,), -inf allowed: log-probabilities or
        anything that differs from them by a constant. An array_like on the host; integers become float64.
    vocab_size : int
        V.
    draft_len : int, optional
        Tokens of a draft. Row 0 of a draft is the function's own answer; row i is its answer when the text goes on
        with the i tokens that it finds most likely.

    Returns
    -------
    CallableTarget or CallableDrafter
        For `generate` and `explore.record`. Nothing is cached: the target calls the function once per node, and the
        drafter once per row.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        An argument does not fit, or, while it decodes, an answer of the function.

    Examples
    --------
    >>> from ddtree_cupy.decode import generate
    >>> def count_up(tokens):
    ...     return [3.0 if token == (tokens[-1] + 1) % 5 else 0.0 for token in range(5)]
    >>> target = from_callable(count_up, vocab_size=5)
    >>> drafter = from_callable(count_up, vocab_size=5, draft_len=3)
    >>> found = generate(target, drafter, [0], budget=8, max_new_tokens=6)
    >>> found.token_ids.tolist(), found.target_passes
    ([1, 2, 3, 4, 0, 1], 2)
    """
    check = Checker("from_callable")
    if not callable(next_logits):
        raise DTypeError(
            f"from_callable: `next_logits` is {type(next_logits).__name__}, expected a function from token ids to "
            f"logits"
        )
    vocab_size = check.integer("vocab_size", vocab_size, low=1)
    if draft_len is None:
        return CallableTarget(next_logits, vocab_size)
    return CallableDrafter(next_logits, vocab_size, check.integer("draft_len", draft_len, low=0))
