"""The traces: the proposals of a drafter and the tokens of the target, at every position of a text."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import Checker
from ddtree_cupy._files import ArrayFile, open_arrays, write_arrays
from ddtree_cupy.containers import Candidates
from ddtree_cupy.errors import ArgumentError, DTypeError
from ddtree_cupy.explore.logged import logged_fields

__all__ = ["SHIPPED_TRACES", "Traces"]

SHIPPED_TRACES = Path(__file__).parent / "data" / "tiny_heldout.npz"

FORMAT = "ddtree-traces-2"
_OF_POSITIONS = ("row_widths", "root_token_ids", "continuations", "context_lens")
_PLAIN = (*_OF_POSITIONS, "prompt_starts")
_ARRAYS = ("token_ids", "logits", "lse", *_PLAIN)
_ABOUT = ("prompt_names", "vocab_size", "max_budget", "about")


@dataclass(frozen=True, eq=False)
class Traces:
    """Positions of the target's own continuations of some prompts, each ready to start a round from.

    P positions, Q prompts, L draft length, K ranks kept of the widest draft row. A round that starts at a position
    drafts from its candidates, and its tokens are the first ones of its continuation; the next round starts as many
    positions later. Positions of one prompt are consecutive.

    Attributes
    ----------
    candidates : Candidates
        Batched, (P, L, K): float32 logits and the log-sum-exp of the whole row; ranks that were not kept have id -1
        and logit -inf.
    row_widths : int32 array, shape (P, L)
        Ranks kept of each row, at most K.
    root_token_ids : int32 array, shape (P,)
        The committed token before the position.
    continuations : int32 array, shape (P, L + 1)
        The target's own next tokens; column 0 is its token at the position. No tree of depth L needs more.
    context_lens : int32 array, shape (P,)
        Keys in the cache when the round starts, without that of the root.
    prompt_starts : int32 array, shape (Q + 1,)
        Prompt q holds the positions prompt_starts[q] .. prompt_starts[q + 1] - 1, at least one.
    prompt_names : tuple of str
    vocab_size : int
    max_budget : int
        No best-first tree up to this budget uses the last rank kept of a row, unless the row keeps the whole
        vocabulary. This holds for all `max_depth`, `max_children` (one number), `min_path_score` and `spine`.
    about : dict of str to str
        Where the traces come from; `record` writes temperature and seed.

    Examples
    --------
    >>> traces = Traces.load()
    >>> traces
    Traces(prompts=24, positions=768, draft_len=15, width=256)
    """

    candidates: Candidates
    row_widths: npt.NDArray[np.int32]
    root_token_ids: npt.NDArray[np.int32]
    continuations: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    prompt_starts: npt.NDArray[np.int32]
    prompt_names: tuple[str, ...]
    vocab_size: int
    max_budget: int
    about: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_logits(
        cls,
        draft_logits: npt.ArrayLike,
        text: npt.ArrayLike,
        prompt_starts: npt.ArrayLike | None = None,
        *,
        max_budget: int = 256,
        width: int = 64,
        context_lens: npt.ArrayLike | None = None,
        names: Sequence[str] | None = None,
        about: dict[str, str] | None = None,
    ) -> Self:
        """Make traces of what has been logged: the target's own text, and the drafter's logits at its tokens.

        draft_logits[t, i] scores the token text[t + i + 1], drafted when text[.. t] was known. A token of a prompt
        becomes a position if L + 1 tokens of the prompt follow it; the logits of the last L + 1 are not read.

        Parameters
        ----------
        draft_logits : float16 | bfloat16 | float32 | float64 array_like, shape (T, L, V)
            Rounded to float32. A memory-mapped file is read in pieces. A row with NaN or +inf is kept as a bad row.
        text : integer array_like, shape (T,)
            Each token the target's own choice after those before it, or the first of a prompt.
        prompt_starts : integer array_like, shape (Q + 1,), optional
            Prompt q holds text[prompt_starts[q] .. prompt_starts[q + 1] - 1]. Default: one prompt, [0, T].
        max_budget, width, names, about
            As in `record`.
        context_lens : integer array_like, shape (Q,), optional
            Tokens before the first one of each prompt. Default: 0.

        Raises
        ------
        ShapeError, DTypeError, ArgumentError
            An argument does not fit, or a prompt has fewer than L + 2 tokens.

        Examples
        --------
        >>> text = [0, 1, 2, 0, 1, 2, 0, 1]
        >>> draft_logits = np.zeros((8, 2, 3), np.float32)
        >>> for t, i in np.ndindex(7, 2):
        ...     draft_logits[t, i, (t + i + 1) % 3] = 4.0
        >>> Traces.from_logits(draft_logits, text)
        Traces(prompts=1, positions=5, draft_len=2, width=3)
        """
        given = (draft_logits, text, prompt_starts, context_lens, names, about)
        return cls(**logged_fields(*given, max_budget=max_budget, width=width)).validate()

    @property
    def num_positions(self) -> int:
        """P."""
        return len(self.root_token_ids)

    @property
    def num_prompts(self) -> int:
        """Q."""
        return len(self.prompt_names)

    @property
    def draft_len(self) -> int:
        """L."""
        return int(self.candidates.lse.shape[1])

    @property
    def width(self) -> int:
        """K, the ranks kept of the widest row."""
        return int(self.candidates.token_ids.shape[2])

    @property
    def _is_kept(self) -> npt.NDArray[np.bool_]:
        return np.arange(self.width) < self.row_widths[..., None]

    def __repr__(self) -> str:
        return (
            f"Traces(prompts={self.num_prompts}, positions={self.num_positions}, draft_len={self.draft_len}, "
            f"width={self.width})"
        )

    def prompt(self, index: int) -> range:
        """Return the positions of one prompt.

        Parameters
        ----------
        index : int
            0 .. Q - 1; negative numbers are refused.
        """
        index = Checker("Traces.prompt").integer("index", index, low=0, high=self.num_prompts - 1)
        return range(int(self.prompt_starts[index]), int(self.prompt_starts[index + 1]))

    def select(self, prompts: Sequence[int]) -> Self:
        """Return the traces of some prompts, in the order given.

        Parameters
        ----------
        prompts : sequence of int
            Each in 0 .. Q - 1.
        """
        check, high = Checker("Traces.select"), self.num_prompts - 1
        given = check.items("prompts", prompts)
        prompts = [check.integer(f"prompts[{at}]", index, low=0, high=high) for at, index in enumerate(given)]
        chosen = [self.prompt(index) for index in prompts]
        rows = np.concatenate([np.arange(r.start, r.stop) for r in chosen]) if chosen else np.zeros(0, np.int64)
        arrays: dict[str, Any] = {name: getattr(self, name)[rows] for name in _OF_POSITIONS}
        arrays["prompt_starts"] = np.cumsum([0, *map(len, chosen)], dtype=np.int32)
        return replace(
            self,
            candidates=self.candidates.map(lambda array: array[rows]),
            **arrays,
            prompt_names=tuple(self.prompt_names[index] for index in prompts),
        )

    def validate(self) -> Self:
        """Check shapes, dtypes and values and return self.

        Raises
        ------
        ShapeError, DTypeError, ArgumentError
            A field does not fit, or the root or continuation of a position contradicts the position before it.
        """
        self._validate_forms()
        positions, starts = self.num_positions, self.prompt_starts
        if starts[0] != 0 or starts[-1] != positions or (np.diff(starts) <= 0).any():
            raise ArgumentError(
                f"Traces: `prompt_starts` must rise from 0 to {positions}, the number of positions, and each prompt "
                f"must have a position"
            )
        for name, tokens in (
            ("candidates.token_ids", self.candidates.token_ids),
            ("root_token_ids", self.root_token_ids),
            ("continuations", self.continuations),
        ):
            lowest = -1 if name.startswith("candidates") else 0
            if tokens.size and (tokens.min() < lowest or tokens.max() >= self.vocab_size):
                raise ArgumentError(f"Traces: `{name}` leaves {lowest}..{self.vocab_size - 1}")
        if ((self.row_widths < 0) | (self.row_widths > self.width)).any():
            raise ArgumentError(f"Traces: `row_widths` leaves 0..{self.width}, the ranks of `candidates`")
        if (self.candidates.token_ids[~self._is_kept] != -1).any():
            raise ArgumentError("Traces: `candidates.token_ids` has ids past `row_widths`, expected -1 there")
        follows = np.ones(max(positions - 1, 0), bool)  # position p + 1 belongs to the prompt of p
        inner = starts[(starts > 0) & (starts < positions)]
        follows[inner - 1] = False
        wrong = (self.root_token_ids[1:] != self.continuations[:-1, 0]) | (np.diff(self.context_lens) != 1)
        wrong |= (self.continuations[1:, :-1] != self.continuations[:-1, 1:]).any(1)
        if (wrong & follows).any():
            at = int(np.flatnonzero(wrong & follows)[0]) + 1
            raise ArgumentError(f"Traces: position {at} does not continue position {at - 1}")
        return self

    def _validate_forms(self) -> None:
        """Check types, shapes and dtypes."""
        check, kept = Checker("Traces"), self.candidates
        if not isinstance(kept, Candidates):
            raise DTypeError(f"Traces: `candidates` is {type(kept).__name__}, expected Candidates")
        _check_about(**{name: getattr(self, name) for name in _ABOUT})
        named = {f"candidates.{name}": getattr(kept, name) for name in ("token_ids", "logits", "lse")}
        named |= {name: getattr(self, name) for name in _PLAIN}
        for name, array in named.items():
            check.backend(**{name: array})
            if not isinstance(array, np.ndarray):
                raise DTypeError(f"Traces: `{name}` is {type(array).__name__}, expected a NumPy array")
        row = ("num_positions", "draft_len")
        check.array("candidates.token_ids", kept.token_ids, (*row, "width"), ("int32",))
        check.array("candidates.logits", kept.logits, (*row, "width"), ("float32",))
        check.array("candidates.lse", kept.lse, row, ("float32",))
        check.array("row_widths", self.row_widths, ("num_positions", kept.lse.shape[1]), ("int32",))
        for name in ("root_token_ids", "context_lens"):
            check.array(name, named[name], ("num_positions",), ("int32",))
        check.array("continuations", self.continuations, ("num_positions", kept.lse.shape[1] + 1), ("int32",))
        check.array("prompt_starts", self.prompt_starts, (self.num_prompts + 1,), ("int32",))
        kept.validate()

    def save(self, path: str | Path) -> None:
        """Write one compressed `.npz` file, readable without pickle: plain arrays, a JSON header, a checksum.

        Parameters
        ----------
        path : str or path
        """
        self.validate()
        kept, ids = self._is_kept, self.candidates.token_ids[self._is_kept]
        smallest = np.min_scalar_type(self.vocab_size - 1) if (ids >= 0).all() else np.dtype(np.int32)
        arrays: dict[str, npt.NDArray[Any]] = {
            **{name: getattr(self, name) for name in _PLAIN},
            "token_ids": ids.astype(smallest),
            "logits": self.candidates.logits[kept],
            "lse": self.candidates.lse,
        }
        about = {name: getattr(self, name) for name in _ABOUT}
        write_arrays(path, {"format": FORMAT, **about}, arrays, about=about)

    @classmethod
    def load(cls, path: str | Path = SHIPPED_TRACES, *, max_bytes: int | None = None) -> Self:
        """Read a file of `save`; by default the shipped traces of the bundled tiny models on held-out text.

        Parameters
        ----------
        path : str or path
        max_bytes : int, optional
            The most memory that the arrays may take, which is checked before any is expanded. Default: 100 times the
            size of the file, or 256 MiB if that is more.

        Raises
        ------
        WeightsError
            The file is missing, truncated, altered, larger in memory than `max_bytes`, or holds something else.
        """
        path = Path(path)
        if max_bytes is not None:
            max_bytes = Checker("Traces.load").integer("max_bytes", max_bytes, low=0)
        advice = "; Traces.load(path, max_bytes=...) allows more"
        with open_arrays(path, "traces", max_bytes, advice) as file:
            header = file.read_header(FORMAT, _ABOUT, _ARRAYS)
            stored = {name: header[name] for name in _ABOUT}
            names = stored["prompt_names"]
            about = {**stored, "prompt_names": tuple(names) if isinstance(names, list) else names}
            _check_about(**about)
            arrays = file.read_arrays(header, about=stored)
            candidates = _expand(arrays, about["vocab_size"], file)
            fields: dict[str, Any] = {**{name: arrays[name] for name in _PLAIN}, **about}
            return cls(candidates=candidates, **fields).validate()


def _check_about(prompt_names: Any, vocab_size: Any, max_budget: Any, about: Any) -> None:
    """Check the fields that are not arrays, before anything is computed from them."""
    check = Checker("Traces")
    check.integer("vocab_size", vocab_size, low=1, high=2**31 - 1)
    check.integer("max_budget", max_budget, low=0)
    if not isinstance(prompt_names, tuple) or any(not isinstance(name, str) for name in prompt_names):
        raise DTypeError(f"Traces: `prompt_names` is {type(prompt_names).__name__}, expected tuple of str")
    if not isinstance(about, dict) or any(not isinstance(entry, str) for pair in about.items() for entry in pair):
        raise DTypeError(f"Traces: `about` is {type(about).__name__}, expected dict of str to str")


def _expand(arrays: dict[str, npt.NDArray[Any]], vocab_size: int, file: ArrayFile) -> Candidates:
    """Put candidates that were stored row after row, each as long as it is, into rows of one length."""
    row_widths, found, logits = (arrays[name] for name in ("row_widths", "token_ids", "logits"))
    forms = row_widths.dtype == np.int32 and row_widths.ndim == 2
    if not forms or row_widths.min(initial=0) < 0 or row_widths.max(initial=0) > vocab_size:
        raise DTypeError(
            f"`row_widths` is {row_widths.dtype} {row_widths.shape}, expected int32 (P, L) in 0..vocab_size"
        )
    total = int(row_widths.sum(dtype=np.int64))
    is_whole = found.dtype.kind in "iu" and found.shape == (total,)
    if not is_whole or int(found.min(initial=0)) < -1 or int(found.max(initial=0)) >= vocab_size:
        raise DTypeError(f"`token_ids` is {found.dtype} {found.shape}, expected ({total},) ids as `row_widths` says")
    if logits.dtype != np.float32 or logits.shape != (total,):
        raise DTypeError(f"`logits` is {logits.dtype} {logits.shape}, expected float32 ({total},)")
    width = int(row_widths.max(initial=0))
    file.check_bytes(8 * row_widths.size * width)
    kept = np.arange(width) < row_widths[..., None]
    candidates = Candidates(np.full(kept.shape, -1, np.int32), np.full(kept.shape, -np.inf, np.float32), arrays["lse"])
    candidates.token_ids[kept], candidates.logits[kept] = found, logits
    return candidates
