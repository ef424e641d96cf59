"""The recorder: decode a prompt one token at a time and keep the proposals of the drafter at each."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import Checker
from ddtree_cupy._progress import with_progress
from ddtree_cupy.containers import Candidates
from ddtree_cupy.decode.loop import Loop, check_temperature
from ddtree_cupy.decode.models import Models, prompt_tokens
from ddtree_cupy.errors import ArgumentError, ShapeError
from ddtree_cupy.explore.assembly import checked_names, trace_fields
from ddtree_cupy.explore.traces import Traces

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
    labels, about = checked_names(check, names, about, len(texts))

    tokens, drafts = [], []
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
    notes = {"temperature": str(temperature), "seed": str(seed), **about}
    fields = trace_fields(
        tokens,
        drafts,
        [text.size - 1 for text in texts],
        max_budget=max_budget,
        most_nodes=most_nodes,
        width=width,
        vocab_size=models.vocab_size,
        about=notes,
    )
    return Traces(**fields, prompt_names=labels).validate()


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
