"""Logits that somebody has logged, checked and made into the fields of traces; the contract is `Traces.from_logits`."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy._arrays import host_array
from ddtree_cupy._check import FLOATS_AND_F64, Checker
from ddtree_cupy.containers import Candidates
from ddtree_cupy.containers.topology import MOST_NODES, fillable_nodes
from ddtree_cupy.decode.models import prompt_tokens
from ddtree_cupy.errors import ArgumentError, ShapeError
from ddtree_cupy.explore.assembly import checked_names, trace_fields
from ddtree_cupy.tree_build import top_candidates

__all__ = ["logged_fields"]

_FUNCTION = "Traces.from_logits"
_ROWS = 64  # positions whose logits are read at a time


def logged_fields(
    draft_logits: Any,
    text: Any,
    prompt_starts: Any,
    context_lens: Any,
    names: Any,
    about: Any,
    *,
    max_budget: int,
    width: int,
) -> dict[str, Any]:
    """Return all fields of `Traces`, after checking the arguments.

    Parameters
    ----------
    draft_logits, text, prompt_starts, context_lens, names, about, max_budget, width
        As in `Traces.from_logits`.
    """
    check = Checker(_FUNCTION)
    max_budget = check.integer("max_budget", max_budget, low=1, high=MOST_NODES - 1)
    width = check.integer("width", width, low=1)
    logits = host_array(_FUNCTION, "draft_logits", draft_logits)
    check.array("draft_logits", logits, ("num_tokens", "draft_len", "vocab_size"), FLOATS_AND_F64)
    size, draft_len, vocab_size = logits.shape
    if vocab_size == 0:
        raise ShapeError(f"{_FUNCTION}: `draft_logits` is {logits.shape}, expected a vocabulary of at least one token")
    tokens = prompt_tokens(_FUNCTION, "text", text, vocab_size)
    if tokens.size != size:
        raise ShapeError(
            f"{_FUNCTION}: `text` is {tokens.shape}, expected ({size},): one token for each of `draft_logits`"
        )
    starts = np.array([0, size]) if prompt_starts is None else _integers("prompt_starts", prompt_starts)
    if starts.size < 2 or starts[0] != 0 or starts[-1] != size or (np.diff(starts) <= draft_len + 1).any():
        raise ArgumentError(
            f"{_FUNCTION}: `prompt_starts` is {_shown(starts)}, expected numbers that rise from 0 to {size}, the "
            f"number of tokens, by at least {draft_len + 2} each: a position, and L + 1 tokens after it"
        )
    prompts = [range(*pair) for pair in zip(starts.tolist(), starts[1:].tolist(), strict=False)]
    before = np.zeros(len(prompts), np.int64) if context_lens is None else _integers("context_lens", context_lens)
    if before.shape != (len(prompts),) or before.min() < 0 or before.max() + size > np.iinfo(np.int32).max:
        raise ArgumentError(
            f"{_FUNCTION}: `context_lens` is {_shown(before)}, expected {len(prompts)} lengths of at least 0, one per "
            f"prompt, such that all positions fit into int32"
        )
    labels, about = checked_names(check, names, about, len(prompts))
    most_nodes = fillable_nodes(max_budget, draft_len, vocab_size)
    ranks = min(max(most_nodes + 1, width), vocab_size)
    fields = trace_fields(
        [tokens[prompt.start : prompt.stop] for prompt in prompts],
        [_ranked(logits[prompt.start : prompt.stop - draft_len - 1], ranks) for prompt in prompts],
        before.tolist(),
        max_budget=max_budget,
        most_nodes=most_nodes,
        width=width,
        vocab_size=vocab_size,
        about=about,
    )
    return {**fields, "prompt_names": labels}


def _integers(name: str, values: Any) -> npt.NDArray[np.int64]:
    array = host_array(_FUNCTION, name, values)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ArgumentError(
            f"{_FUNCTION}: `{name}` has shape {array.shape} and dtype {array.dtype}, expected (n,) integers"
        )
    return array.astype(np.int64)


def _shown(array: npt.NDArray[np.int64]) -> str:
    """Return an array in words that stay short."""
    return np.array2string(array, threshold=8, separator=", ")


def _ranked(logits: npt.NDArray[Any], ranks: int) -> Candidates:
    """Return the best ranks of logits (P, L, V), read piece by piece."""
    parts = []
    for start in range(0, len(logits), _ROWS):
        piece = logits[start : start + _ROWS]
        piece = piece.astype(np.float32) if piece.dtype == np.float64 else piece
        parts.append(top_candidates(piece, ranks, check_finite=False))
    arrays = zip(*((part.token_ids, part.logits, part.lse) for part in parts), strict=True)
    return Candidates(*map(np.concatenate, arrays))
