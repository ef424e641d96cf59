"""The recorder: decode a prompt one token at a time and keep the proposals of the drafter at each."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import Checker
from ddtree_cupy._progress import with_progress
from ddtree_cupy.containers import Candidates
from ddtree_cupy.decode.loop import Loop, check_temperature
from ddtree_cupy.decode.models import Models, prompt_tokens
from ddtree_cupy.errors import ArgumentError, ShapeError
from ddtree_cupy.explore.traces import Traces
from ddtree_cupy.tree_build import best_first_tree

__all__ = ["record"]

Array = Any


def record(
    target: Any,
    drafter: Any,
    prompts: Sequence[npt.ArrayLike],
    *,
    num_positions: int,
    max_budget: int = 256,
    width: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    names: Sequence[str] | None = None,
    about: dict[str, str] | None = None,
    progress: bool = True,
) -> Traces:
    """Record traces of your own models: drafts and the target's own tokens at every position.

    Parameters
    ----------
    target, drafter
        Models with the protocols `decode.Target` and `decode.Drafter` (NumPy or CuPy), or `decode.StatefulTarget` and
        `decode.StatefulDrafter`.
    prompts : sequence of integer array_like, each of shape (n,)
        At least one token each. Each is continued by itself.
    num_positions : int
        Positions of each prompt. The target decodes L more tokens, so that every round finds its continuation.
    max_budget : int
        Replays of best-first trees up to this budget are exact, whatever `max_depth`, `max_children` (one number),
        `min_path_score` and `spine`. `replay` refuses other trees where they use the last rank of a row.
    width : int
        The fewest ranks to keep of each draft row. A row keeps more (and `about` says so) where such a tree could use
        its last rank, but never more than the vocabulary.
    temperature, seed
        As in `decode.generate`: 0 takes the most likely token; above 0 there is one uniform draw per text position. A
        live run with the same temperature and seed has the same draws.
    names : sequence of str, optional
        One per prompt.
    about : dict of str to str, optional
        Kept with the traces: models, dtype, text, date.
    progress : bool
        Show a bar in a terminal or a notebook, when tqdm is installed.

    Notes
    -----
    The results of the models are checked before they are used, and a recording that ends in an error returns nothing.
    A row of draft logits that holds NaN or +inf is kept as a bad row (no ranks, lse NaN), above which trees end, as in
    live decoding.
    The state of the drafter at a position depends on the committed text alone, so one pass over the text serves every
    policy. Logits are rounded to float32 before ranks are taken. To find how many ranks suffice, a tree of `max_budget`
    nodes is built for each position and depth, which takes about 10 ms per position for 256 nodes and 15 depths.
    """
    check = Checker("record")
    num_positions = check.integer("num_positions", num_positions, low=1)
    max_budget = check.integer("max_budget", max_budget, low=1)
    width = check.integer("width", width, low=1)
    temperature = check_temperature(check, temperature)
    seed = check.integer("seed", seed, low=0)
    models = Models("record", target, drafter, needs_drafter=True)
    most_nodes = models.most_nodes("max_budget", max_budget, models.draft_len)
    texts = [
        prompt_tokens("record", f"prompts[{index}]", prompt, models.vocab_size)
        for index, prompt in enumerate(check.items("prompts", prompts))
    ]
    if not texts:
        raise ArgumentError("record: `prompts` is empty, expected at least one prompt")
    default = [f"prompt {index}" for index in range(len(texts))]
    labels = tuple(default if names is None else check.items("names", names, str))
    about = {} if about is None else about
    check.kind("about", about, dict)
    if len(labels) != len(texts):
        raise ArgumentError(f"record: `names` has {len(labels)} entries for {len(texts)} prompts")

    tokens, drafts, needed = [], [], []
    for text in with_progress(texts, len(texts), "record", "prompt", progress):
        loop = Loop(
            models,
            text,
            asking="`prompts` and `num_positions`",
            max_new_tokens=num_positions + models.draft_len,
            budget=0,
            temperature=temperature,
            seed=seed,
        )
        # no tree of most_nodes nodes can use rank most_nodes, whatever its limits
        found, draft = _continued(loop, num_positions, max(most_nodes + 1, width))
        tokens.append(found)
        drafts.append(draft)
        needed.append(_ranks_needed(draft, most_nodes, width))
    candidates = Candidates(*(np.concatenate([getattr(d, f.name) for d in drafts]) for f in fields(Candidates)))
    windows = [np.lib.stride_tricks.sliding_window_view(found[1:], models.draft_len + 1) for found in tokens]
    row_widths = np.minimum(np.maximum(width, np.concatenate(needed)), models.vocab_size).astype(np.int32)
    kept = int(row_widths.max(initial=0))
    notes = {"temperature": str(temperature), "seed": str(seed), **about}
    if kept > width:
        notes["width"] = f"{width} ranks widened to up to {kept} for trees of {max_budget} nodes"
    return Traces(
        candidates=_cut(candidates, row_widths),
        row_widths=row_widths,
        root_token_ids=np.concatenate([found[:num_positions] for found in tokens]),
        continuations=np.concatenate(windows),
        context_lens=np.concatenate([text.size - 1 + np.arange(num_positions) for text in texts]).astype(np.int32),
        prompt_starts=np.arange(0, num_positions * len(texts) + 1, num_positions, dtype=np.int32),
        prompt_names=labels,
        vocab_size=models.vocab_size,
        max_budget=max_budget,
        about=notes,
    ).validate()


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


def _continued(loop: Loop, num_positions: int, width: int) -> tuple[npt.NDArray[np.int32], Candidates]:
    """Decode one text without drafts; return its tokens from the first root on, and the draft rows at each position."""
    tokens = [loop.root]
    rows: list[tuple[Array, Array, Array]] = []
    while loop.remaining:
        if len(rows) < num_positions:
            rows.append(_draft_rows(loop, width))
        tokens += loop.round().token_ids
    return np.array(tokens, np.int32), Candidates(*(np.stack(arrays) for arrays in zip(*rows, strict=True)))


def _draft_rows(loop: Loop, width: int) -> tuple[Array, Array, Array]:
    models = loop.models
    logits = loop.text.propose(loop.root)
    if len(logits) != models.draft_len:
        raise ShapeError(
            f"record: `drafter.propose(...)` is {logits.shape}, expected ({models.draft_len}, {models.vocab_size}): "
            f"`drafter.draft_len` rows at every position"
        )
    top = loop.candidates(logits, width)
    return top.token_ids, top.logits, top.lse
