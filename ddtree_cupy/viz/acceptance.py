"""AcceptanceDisplay: how far rounds get, and which sibling the target takes."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from ddtree_cupy.containers import AcceptResult, DraftTree
from ddtree_cupy.errors import ShapeError
from ddtree_cupy.viz import _base as c
from ddtree_cupy.viz._arguments import Array
from ddtree_cupy.viz._base import Axes, Display

_RANKS = {
    "sibling": "rank among siblings (0 = the drafter's favourite)",
    "drafter": "rank in the drafter's row (0 = its favourite)",
}


class AcceptanceDisplay(Display):
    """Accepted draft tokens of many rounds: a histogram over the depth, and hits by rank.

    Parameters
    ----------
    num_accepted : int array, shape (rounds,)
        Draft tokens accepted, root and bonus excluded; rounds with -1 (inactive) are left out.
    hit_ranks : int array, shape (rounds, L), optional
        Rank (0 = the drafter's favourite) of the node accepted at depth d + 1; -1 for none.
    rank_of : {"sibling", "drafter"}
        Whether ranks count the siblings in the tree, as in `from_rounds`, or all tokens of the drafter's row, as in
        `explore.Replay.hit_ranks`. The axis is named accordingly.

    Attributes
    ----------
    bars_, line_, mean_, legend_ : matplotlib objects
        Artists of kind "depth".
    image_, texts_ : matplotlib objects
        Artists of kind "rank".

    Examples
    --------
    >>> display = AcceptanceDisplay.from_arrays([0, 2, 1, 2], hit_ranks=[[-1, -1], [0, 1], [1, -1], [0, 0]])
    >>> display.plot().ax_.get_ylabel()
    'fraction of 4 rounds'
    >>> display.stop_rates().tolist()
    [0.25, 0.25, 0.5]
    >>> display.rank_rates().tolist()
    [[0.5, 0.25], [0.25, 0.25]]
    """

    def __init__(self, num_accepted: Array, *, hit_ranks: Array | None = None, rank_of: str = "sibling") -> None:
        check = self._check()
        counts = check.integers("num_accepted", num_accepted)
        ranks = None if hit_ranks is None else check.integers("hit_ranks", hit_ranks, 2)
        check.choice("rank_of", rank_of, tuple(_RANKS))
        self.rank_of = rank_of
        check.same_length("num_accepted", counts, hit_ranks=ranks)
        active = counts >= 0
        if not active.any() or (counts < -1).any():
            raise check.error(f"`num_accepted` is {_shown(counts)}, expected an active round, values from -1")
        self.num_accepted = counts[active]
        self.hit_ranks = None if ranks is None else ranks[active]
        if self.hit_ranks is not None:
            if self.hit_ranks.min(initial=0) < -1:
                raise check.error(f"`hit_ranks` holds {self.hit_ranks.min()}, expected ranks and -1 for none")
            deep = np.arange(self.hit_ranks.shape[1])
            wrong = (self.hit_ranks >= 0) != (deep < self.num_accepted[:, None])
            if wrong.any() or self.num_accepted.max() > len(deep):
                raise check.error("`hit_ranks` does not hold one rank for each of `num_accepted` depths")

    @classmethod
    def from_rounds(cls, trees: Sequence[DraftTree], results: Sequence[AcceptResult]) -> Self:
        """Take the trees of many rounds, batched or not, and the result of `accept` for each.

        Parameters
        ----------
        trees : sequence of DraftTree
        results : sequence of AcceptResult
            As many, with the same request axes.
        """
        check = cls._check("from_rounds")
        if len(trees) != len(results):
            raise check.error(f"`results` has {len(results)} entries, expected {len(trees)} like `trees`", ShapeError)
        found = []
        for tree, result in zip(trees, results, strict=True):
            check.kind("trees", tree, DraftTree)
            check.kind("results", result, AcceptResult)
            if tree.token_ids.shape != result.accepted.shape:
                shapes = f"{result.accepted.shape}, expected {tree.token_ids.shape} like its tree"
                raise check.error(f"`accepted` of a result is {shapes}", ShapeError)
            tree, result = tree.to("numpy"), result.to("numpy")
            if not tree.is_batched:
                tree, result = tree.with_batch(), result.with_batch()
            for b, count in enumerate(result.num_accepted.tolist()):
                if count >= 0:
                    found.append(_ranks(tree.parents[b], result.accepted[b, 1 : count + 1]))
        return cls._from_ranks(found)

    @classmethod
    def from_tree(cls, tree: DraftTree, result: AcceptResult) -> Self:
        """Take one tree, usually a batched one, and its result."""
        return cls.from_rounds([tree], [result])

    @classmethod
    def from_replay(cls, replay: Any) -> Self:
        """Take the rounds of `explore.replay`, or of `explore.score` all positions; ranks are those of the drafter.

        Parameters
        ----------
        replay : Replay or Outcomes

        Examples
        --------
        >>> from ddtree_cupy.explore import Traces, replay
        >>> result = replay(Traces.load(), "best-first 64")
        >>> bool(AcceptanceDisplay.from_replay(result).num_accepted.mean() + 1 == result.tokens_per_pass)
        True
        """
        check = cls._check("from_replay")
        check.result("replay", replay, "the Replay of explore.replay", "num_accepted", "hit_ranks")
        return cls(replay.num_accepted, hit_ranks=replay.hit_ranks, rank_of="drafter")

    @classmethod
    def from_generation(cls, *generations: Any) -> Self:
        """Take all rounds of `decode.generate`, of one text or several; ranks are those among siblings.

        Parameters
        ----------
        *generations : Generation
            At least one. A round counts the drafts that became text, so one that ended the text may count fewer than
            were accepted.
        """
        check = cls._check("from_generation")
        found: list[list[int]] = []
        for at, generation in enumerate(generations):
            check.result(f"generations[{at}]", generation, "the Generation of decode.generate", "rounds")
            for r in generation.rounds:
                tree, path = r.tree.to("numpy"), [0]
                for token in r.token_ids[: r.num_drafted]:
                    is_next = (tree.parents == path[-1]) & (tree.token_ids == token)
                    path.append(int(np.flatnonzero(is_next)[0]))
                found.append(_ranks(tree.parents, np.array(path[1:], np.int64)))
        return cls._from_ranks(found)

    @classmethod
    def _from_ranks(cls, found: list[list[int]]) -> Self:
        """Take the rank of each accepted node of each round."""
        ranks = np.full((len(found), max(map(len, found), default=0)), -1)
        for row, values in zip(ranks, found, strict=True):
            row[: len(values)] = values
        return cls(np.array([len(values) for values in found], np.int64), hit_ranks=ranks)

    def stop_rates(self) -> Any:
        """Return float64 (deepest + 1,): fraction of rounds that accepted exactly d tokens."""
        return np.bincount(self.num_accepted) / len(self.num_accepted)

    def rank_rates(self) -> Any:
        """Return float64 (L, ranks): fraction of rounds whose accepted node at depth d + 1 had that rank."""
        if self.hit_ranks is None:
            raise self._check("rank_rates").error("`hit_ranks` is None, expected to be given")
        rates = np.zeros((self.hit_ranks.shape[1], int(self.hit_ranks.max(initial=0)) + 1))
        for depth, column in enumerate(self.hit_ranks.T):
            rates[depth] = np.bincount(column[column >= 0], minlength=rates.shape[1]) / len(column)
        return rates

    def plot(self, ax: Axes = None, *, kind: str = "depth", **kw: Any) -> Self:
        """Draw one of the two pictures.

        Parameters
        ----------
        kind : {"depth", "rank"}
            How many tokens were accepted; or which sibling was accepted at which depth.
        **kw
            Options of `bar` or `imshow`.
        """
        return self._draw(ax, kind, kw, depth=self._plot_depth, rank=self._plot_rank)

    def _plot_depth(self, ax: Axes, kw: dict[str, Any]) -> None:
        ax = self._on_axes(ax, 5.2, 3.2)
        rates = self.stop_rates()
        depths = np.arange(len(rates))
        self.bars_ = ax.bar(depths, rates, **{"color": c.SKY, "width": 0.8, "label": "rounds that stop here", **kw})
        reached = rates[::-1].cumsum()[::-1]
        self.line_ = ax.plot(depths, reached, color=c.BLUE, marker="o", ms=4, label="rounds that get this far")[0]
        mean = float(self.num_accepted.mean())
        self.mean_ = ax.axvline(mean, color=c.VERMILLION, ls="--", lw=1.5, label=f"mean {mean:.2f}")
        ax.set_ylim(0, 1.05)
        ax.set_xticks(depths[:: max(1, len(depths) // 16)])
        self._name_axes("accepted draft tokens (depth)", f"fraction of {len(self.num_accepted):,} rounds")
        self.legend_ = ax.legend(frameon=False, fontsize=8)

    def _plot_rank(self, ax: Axes, kw: dict[str, Any]) -> None:
        rates = self.rank_rates()
        if not rates.size:
            raise self._check("plot").error("no round accepted a token, expected one for kind 'rank'")
        height, width = (float(np.clip(1.3 + 0.34 * n, 2.2, 6.5)) for n in rates.shape)
        ax = self._on_axes(ax, width + 1.4, height)
        self.image_ = ax.imshow(rates, **{"cmap": c.SCORES, "vmin": 0, "aspect": "auto", **kw})
        middle = sum(self.image_.get_clim()) / 2
        self.texts_ = []
        if rates.shape[1] <= 12 and rates.shape[0] <= 20:
            for (depth, rank), rate in np.ndenumerate(rates):
                if rate > 0:
                    ink = "black" if rate > middle else "white"
                    text = f"{100 * rate:.0f}" if rate >= 0.005 else "<1"
                    self.texts_.append(ax.text(rank, depth, text, ha="center", va="center", color=ink, fontsize=7))
        ax.set_yticks(range(0, len(rates), max(1, len(rates) // 12)))
        ax.set_yticklabels([str(int(tick) + 1) for tick in ax.get_yticks()])
        ax.set_xticks(range(0, rates.shape[1], max(1, rates.shape[1] // 12)))
        ax.set_xlabel(_RANKS[self.rank_of])
        ax.set_ylabel("depth of the accepted node")
        c.color_bar(ax, self.image_, "fraction of rounds (cells: %)")


def _shown(values: Any) -> str:
    return str(values.tolist()) if values.size <= 12 else f"{values[:12].tolist()} and {values.size - 12} more"


def _ranks(parents: Any, accepted: Any) -> list[int]:
    """Return the rank of every accepted node among its siblings, which stand in order of score."""
    return [int((parents[:node] == parents[node]).sum()) for node in accepted.tolist()]
