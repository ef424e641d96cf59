"""Continuations: how well a drafter goes on below a node that the target accepted, on the spine and off it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import Checker
from ddtree_cupy.errors import ArgumentError
from ddtree_cupy.explore.policies import BestFirst, Policy
from ddtree_cupy.explore.replay import replay
from ddtree_cupy.explore.speedup import Interval, ratio_over_prompts
from ddtree_cupy.explore.traces import Traces

__all__ = ["Continuations", "continuations"]


@dataclass(frozen=True, eq=False)
class Continuations:
    """The target's token below every accepted node, one entry per node: C of them.

    A continuation is on the spine when all nodes above it are the drafter's favourites, rank 0 of their rows. Off the
    spine some node above it is a sibling that the target preferred.

    Attributes
    ----------
    policy : str
    depths : int32 array, shape (C,)
        Depth of the target's token, 2 .. L; the node above it was accepted.
    on_spine : bool array, shape (C,)
    ranks : int32 array, shape (C,)
        Rank of the target's token in the drafter's row of that depth; -1 if it is not among the recorded ranks.
    in_tree : bool array, shape (C,)
        Whether the tree had the token there, so that it was accepted, too.
    favourite_probabilities : float64 array, shape (C,)
        What the drafter itself says of its favourite at that depth; NaN for a bad row.
    prompts : int32 array, shape (C,)
    """

    policy: str
    depths: npt.NDArray[np.int32]
    on_spine: npt.NDArray[np.bool_]
    ranks: npt.NDArray[np.int32]
    in_tree: npt.NDArray[np.bool_]
    favourite_probabilities: npt.NDArray[np.float64]
    prompts: npt.NDArray[np.int32]

    def counts(self, *, on_spine: bool, in_tree: bool = False) -> tuple[int, int]:
        """Return how often the target's token was the drafter's favourite, and of how many continuations.

        Parameters
        ----------
        on_spine : bool
            Which continuations are counted.
        in_tree : bool
            Count only favourites that the tree had.
        """
        chosen, hits = self._hits(on_spine, in_tree)
        return int(hits.sum()), int(chosen.sum())

    def share(self, *, on_spine: bool, in_tree: bool = False, samples: int = 1000, seed: int = 0) -> Interval:
        """Return the first of `counts` over the second, with a bootstrap interval over prompts.

        Parameters
        ----------
        on_spine, in_tree
            As in `counts`.
        samples, seed
            As in `tokens_per_pass`.
        """
        chosen, hits = self._hits(on_spine, in_tree)
        if not chosen.any():
            where = "on" if on_spine else "off"
            raise ArgumentError(
                f"Continuations.share: `on_spine` is {on_spine}, but {self.policy} has no continuation {where} the "
                f"spine, expected at least one"
            )
        check, ones = Checker("Continuations.share"), np.ones(int(chosen.sum()))
        return ratio_over_prompts(check, self.prompts[chosen], hits[chosen].astype(np.float64), ones, samples, seed)

    def _hits(self, on_spine: bool, in_tree: bool) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        chosen = self.on_spine == on_spine
        return chosen, chosen & (self.ranks == 0) & (self.in_tree | (not in_tree))

    def __str__(self) -> str:
        """Return a table: the shares on and off the spine, and what the drafter said of its favourites."""
        both = (True, False)
        rows: list[tuple[str, ...]] = [(f"after {self.policy}", "spine", "sibling")]
        for in_tree, name in ((False, "the favourite is right"), (True, "... and in the tree")):
            counts = [self.counts(on_spine=on_spine, in_tree=in_tree) for on_spine in both]
            rows.append((name, *(f"{hits} of {n}{f' {hits / n:4.0%}' if n else ''}" for hits, n in counts)))
        said = [self.favourite_probabilities[self.on_spine == on_spine] for on_spine in both]
        rows.append(("the drafter expects", *(f"{np.nanmean(p):.0%}" if p.size else "" for p in said)))
        first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines = [
            "  ".join([name.ljust(first), *(cell.rjust(w) for cell, w in zip(cells, widths, strict=True))])
            for name, *cells in rows
        ]
        return "\n".join(lines)


def continuations(traces: Traces, policy: Policy | str | None = None) -> Continuations:
    """Count, below every accepted node of a replay, the ranks of the target's next token.

    A drafter that fills all depths at once cannot know which token was taken above. What it says of depth d + 1 fits
    the favourites above it best, so a sibling may be right and its continuations poor. This counts how poor, given that
    the parent was right, on the spine and off it. Compare the shares with what the drafter expects: siblings are taken
    where the drafter is unsure, which alone makes their continuations worse.

    Parameters
    ----------
    traces : Traces
    policy : Policy or str, optional
        As in `replay`. It decides in which rounds, and after which siblings, one looks. Default: the best-first tree of
        the largest budget for which the traces are exact.

    Notes
    -----
    Each text is decoded once, so every accepted node counts as often as in live decoding; nodes of depth L have no row
    below them. Counting over all positions instead would weigh the hard ones more, where rounds end.

    Examples
    --------
    >>> print(continuations(Traces.load()))
    after best-first 256              spine         sibling
    the favourite is right  439 of 532  83%  62 of 191  32%
    ... and in the tree     438 of 532  82%  51 of 191  27%
    the drafter expects                 72%             35%
    """
    Checker("continuations").kind("traces", traces, Traces)
    result = replay(traces, BestFirst(traces.max_budget) if policy is None else policy)
    at, accepted, depths = result.positions, result.num_accepted[:, None], np.arange(traces.draft_len)
    candidates = traces.candidates.map(lambda array: array[at])
    hits = candidates.token_ids == traces.continuations[at, : traces.draft_len, None]
    ranks = np.where(hits.any(-1), hits.argmax(-1) if traces.width else -1, -1).astype(np.int32)
    off_spine = np.cumsum(result.hit_ranks > 0, axis=1)  # above depth d + 2
    is_below = (depths >= 1) & (depths <= accepted)
    rounds, rows = np.nonzero(is_below)
    best = candidates.logits[..., 0] if traces.width else np.full(ranks.shape, -np.inf, np.float32)
    with np.errstate(invalid="ignore"):
        expected = np.exp(best.astype(np.float64) - candidates.lse)
    return Continuations(
        result.policy,
        (rows + 1).astype(np.int32),
        off_spine[rounds, rows - 1] == 0,
        ranks[rounds, rows],
        rows < result.num_accepted[rounds],
        expected[rounds, rows],
        result.prompts[rounds],
    )
