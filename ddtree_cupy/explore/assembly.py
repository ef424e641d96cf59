"""From texts and draft rows to the fields of traces, and how many ranks of each row they must keep."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import Checker
from ddtree_cupy.containers import Candidates
from ddtree_cupy.errors import ArgumentError
from ddtree_cupy.tree_build import best_first_tree

__all__ = ["checked_names", "trace_fields"]


def checked_names(check: Checker, names: Any, about: Any, num_prompts: int) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return names, by default numbers, and notes, after checking these arguments of a recorder.

    Parameters
    ----------
    check : Checker
    names, about
        As in `record`.
    num_prompts : int
    """
    default = [f"prompt {index}" for index in range(num_prompts)]
    labels = tuple(default if names is None else check.items("names", names, str))
    about = {} if about is None else about
    check.kind("about", about, dict)
    if len(labels) != num_prompts:
        raise ArgumentError(f"{check.function}: `names` has {len(labels)} entries for {num_prompts} prompts")
    return labels, about


def trace_fields(
    tokens: Sequence[npt.NDArray[np.int32]],
    drafts: Sequence[Candidates],
    first_context_lens: Sequence[int],
    *,
    max_budget: int,
    most_nodes: int,
    width: int,
    vocab_size: int,
    about: dict[str, str],
) -> dict[str, Any]:
    """Return all fields of `Traces` but the names of the prompts.

    Parameters
    ----------
    tokens : sequence of int32 array, each of shape (P + L + 1,)
        The text of each prompt with P positions: the first root, and all tokens after it.
    drafts : sequence of Candidates, each (P, L, K)
        At least max(most_nodes + 1, width) ranks, or the whole vocabulary.
    first_context_lens : sequence of int
        Keys in the cache at the first position of each prompt.
    max_budget, width, vocab_size, about
        As in `record`.
    most_nodes : int
        The most nodes besides the root that a tree of `max_budget` can have.
    """
    candidates = Candidates(*(np.concatenate([getattr(d, f.name) for d in drafts]) for f in fields(Candidates)))
    needed = np.concatenate([_ranks_needed(draft, most_nodes, width) for draft in drafts])
    row_widths = np.minimum(np.maximum(width, needed), vocab_size).astype(np.int32)
    kept = int(row_widths.max(initial=0))
    if kept > width:
        about = {**about, "width": f"{width} ranks widened to up to {kept} for trees of {max_budget} nodes"}
    draft_len = candidates.lse.shape[1]
    counts = [len(found) - draft_len - 1 for found in tokens]
    windows = [np.lib.stride_tricks.sliding_window_view(found[1:], draft_len + 1) for found in tokens]
    lengths = [first + np.arange(count) for first, count in zip(first_context_lens, counts, strict=True)]
    return {
        "candidates": _cut(candidates, row_widths),
        "row_widths": row_widths,
        "root_token_ids": np.concatenate([found[:count] for found, count in zip(tokens, counts, strict=True)]),
        "continuations": np.concatenate(windows),
        "context_lens": np.concatenate(lengths).astype(np.int32),
        "prompt_starts": np.cumsum([0, *counts], dtype=np.int32),
        "vocab_size": vocab_size,
        "max_budget": max_budget,
        "about": about,
    }


def _cut(candidates: Candidates, row_widths: npt.NDArray[np.int32]) -> Candidates:
    """Keep this number of ranks of each row."""
    width = int(row_widths.max(initial=0))
    kept = np.arange(width) < row_widths[..., None]
    token_ids = np.where(kept, candidates.token_ids[..., :width], -1).astype(np.int32)
    return Candidates(token_ids, np.where(kept, candidates.logits[..., :width], np.float32(-np.inf)), candidates.lse)


def _ranks_needed(candidates: Candidates, budget: int, width: int) -> npt.NDArray[np.int64]:
    """Return, for each row, one rank more than best-first trees of `budget` nodes can use of it.

    A tree takes the best nodes that its limits allow, so a rank is in it only if the best path to that rank, which
    goes over ranks 0, reaches the worst score taken. More children per node raise that score, so no tree with `width`
    or more children goes below the tree with `width`; a tree with fewer never gets to rank `width` - 1. Smaller
    budgets, a spine or a `min_path_score` only end earlier.
    """
    batch, draft_len, _ = candidates.token_ids.shape
    logits, lse = candidates.logits.astype(np.float64), candidates.lse.astype(np.float64)
    scores = np.full_like(logits, -np.inf)
    np.subtract(logits, lse[..., None], out=scores, where=logits > -np.inf)
    best = np.cumsum(np.pad(scores[..., 0], ((0, 0), (1, 0))), axis=1)[:, :-1, None] + scores
    needed = np.ones((batch, draft_len), np.int64)
    for max_depth in range(1, draft_len + 1):
        limits: dict[str, Any] = {"max_depth": max_depth, "max_children": width}
        tree = best_first_tree(candidates, budget=budget, root_token_ids=np.zeros(batch, np.int32), **limits)
        taken = np.where(tree.depths > 0, tree.path_scores, 0.0)  # type: ignore[arg-type]
        worst = taken.min(1) - 1e-9  # the sums may be rounded differently
        worst[tree.num_nodes <= budget] = -np.inf
        used = (best[:, :max_depth] >= worst[:, None, None]).sum(-1)
        np.maximum(needed[:, :max_depth], used + 1, out=needed[:, :max_depth])
    np.minimum(needed, candidates.token_ids.shape[2], out=needed)
    return needed
