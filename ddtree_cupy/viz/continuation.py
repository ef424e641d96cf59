"""ContinuationDisplay: how well a drafter goes on below accepted nodes, on the spine and after a sibling."""

from typing import Any, Self

import numpy as np

from ddtree_cupy.errors import DTypeError
from ddtree_cupy.viz import _base as c
from ddtree_cupy.viz._arguments import Array
from ddtree_cupy.viz._base import Axes, Display

_LOOKS = {"spine": (True, c.BLUE, "o", "after the spine"), "sibling": (False, c.VERMILLION, "s", "after a sibling")}


class ContinuationDisplay(Display):
    """The rank of the target's token below every accepted node, for nodes on the spine and for the others.

    Parameters
    ----------
    depths : int array, shape (C,)
        Depth of the target's token, at least 1.
    on_spine : bool array, shape (C,)
        True where all nodes above it are the drafter's favourites.
    ranks : int array, shape (C,)
        Rank of the target's token in the drafter's row; 0 is the favourite, -1 means not among the ranks known.

    Attributes
    ----------
    lines_ : dict of str to Line2D
        "spine" and "sibling", if there are such continuations.
    sizes_ : dict of str to PathCollection
        The markers of kind "depth", whose areas grow with the number of continuations.
    legend_ : matplotlib object

    Examples
    --------
    >>> display = ContinuationDisplay([2, 2, 3, 2], [True, True, True, False], [0, 0, 4, 1])
    >>> display.shares("spine").tolist()  # nan: no depth 1
    [nan, 1.0, 0.0]
    >>> sorted(display.plot().lines_)
    ['sibling', 'spine']
    """

    def __init__(self, depths: Array, on_spine: Array, ranks: Array) -> None:
        check = self._check()
        self.depths = check.integers("depths", depths)
        spine = check.on_host("on_spine", on_spine)
        if spine.dtype != np.bool_ or spine.ndim != 1:
            raise check.error(f"`on_spine` is {spine.dtype} {spine.shape}, expected bool with 1 axis", DTypeError)
        self.on_spine = spine
        self.ranks = check.integers("ranks", ranks)
        check.same_length("depths", self.depths, on_spine=spine, ranks=self.ranks)
        for name, low in (("depths", 1), ("ranks", -1)):
            array = getattr(self, name)
            if not array.size or array.min() < low:
                what = f"holds {array.min()}" if array.size else "is empty"
                raise check.error(f"`{name}` {what}, expected at least one value, none below {low}")

    @classmethod
    def from_continuations(cls, continuations: Any) -> Self:
        """Take the result of `explore.continuations`.

        Parameters
        ----------
        continuations : Continuations

        Examples
        --------
        >>> from ddtree_cupy.explore import Traces, continuations
        >>> found = continuations(Traces.load())
        >>> display = ContinuationDisplay.from_continuations(found)
        >>> display.counts("sibling") == found.counts(on_spine=False)
        True
        """
        check = cls._check("from_continuations")
        names = ("depths", "on_spine", "ranks")
        check.result("continuations", continuations, "the Continuations of explore.continuations", *names)
        return cls(*(getattr(continuations, name) for name in names))

    def counts(self, which: str) -> tuple[int, int]:
        """Return how often the target's token was the drafter's favourite, and of how many continuations.

        Parameters
        ----------
        which : {"spine", "sibling"}
        """
        ranks = self.ranks[self._chosen("counts", which)]
        return int((ranks == 0).sum()), len(ranks)

    def shares(self, which: str) -> Any:
        """Return float64 (deepest,): share of favourites that are right at depth d + 1; NaN where there are none.

        Parameters
        ----------
        which : {"spine", "sibling"}
        """
        hits, counts = self._by_depth("shares", which)
        return np.divide(hits, counts, out=np.full(len(hits), np.nan), where=counts > 0)

    def rank_shares(self, which: str) -> Any:
        """Return float64 (largest rank + 1,): share of continuations whose token is among the first r + 1 ranks.

        Parameters
        ----------
        which : {"spine", "sibling"}
        """
        ranks = self.ranks[self._chosen("rank_shares", which)]
        known = np.bincount(ranks[ranks >= 0], minlength=int(self.ranks.max()) + 1)
        return known.cumsum() / len(ranks) if len(ranks) else np.full(len(known), np.nan)

    def _chosen(self, method: str, which: str) -> Any:
        self._check(method).choice("which", which, tuple(_LOOKS))
        return self.on_spine == _LOOKS[which][0]

    def _by_depth(self, method: str, which: str) -> tuple[Any, Any]:
        """Return hits and continuations at depth 1, 2, ..."""
        chosen, length = self._chosen(method, which), int(self.depths.max()) + 1
        hits = np.bincount(self.depths[chosen & (self.ranks == 0)], minlength=length)
        return hits[1:], np.bincount(self.depths[chosen], minlength=length)[1:]

    def plot(self, ax: Axes = None, *, kind: str = "depth", **kw: Any) -> Self:
        """Draw one of the two pictures.

        Parameters
        ----------
        kind : {"depth", "rank"}
            How often the favourite is right, over the depth, and the mean of all depths dashed; or how often the
            target's token is among the first r ranks, over r.
        **kw
            Options of both lines.
        """
        return self._draw(ax, kind, kw, depth=self._plot_depth, rank=self._plot_rank)

    def _plot_depth(self, ax: Axes, kw: dict[str, Any]) -> None:
        ax = self._on_axes(ax, 5.2, 3.4)
        self.lines_, self.sizes_ = {}, {}
        for which, (_, color, marker, name) in _LOOKS.items():
            (hits, total), counts = self.counts(which), self._by_depth("plot", which)[1]
            if not total:
                continue
            depths, shares = np.arange(1, len(counts) + 1), self.shares(which)
            label = f"{name}: {hits:,} of {total:,}, {hits / total:.0%}"
            self.lines_[which] = ax.plot(depths, shares, **{"color": color, "lw": 1.5, "label": label, **kw})[0]
            areas = 4 + 90 * counts / max(1, counts.max())
            known = counts > 0
            look = {"color": color, "marker": marker, "zorder": 3}
            self.sizes_[which] = ax.scatter(depths[known], shares[known], s=areas[known], **look)
            ax.axhline(hits / total, color=color, lw=1, ls="--")
        ax.set_ylim(-0.05, 1.05)
        ax.xaxis.get_major_locator().set_params(integer=True)
        self._name_axes("depth of the continuation", "the drafter's favourite is right", grid=True)
        self.legend_ = c.legend_above(ax, list(self.lines_.values()), columns=2)

    def _plot_rank(self, ax: Axes, kw: dict[str, Any]) -> None:
        ax = self._on_axes(ax, 5.2, 3.4)
        self.lines_, self.sizes_ = {}, {}
        for which, (_, color, marker, name) in _LOOKS.items():
            shares, total = self.rank_shares(which), self.counts(which)[1]
            if total:
                label = f"{name}: {total:,}"
                look = {"color": color, "marker": marker, "ms": 4, "label": label, **kw}
                self.lines_[which] = ax.plot(np.arange(1, len(shares) + 1), shares, **look)[0]
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:.0f}")
        ax.set_ylim(-0.05, 1.05)
        self._name_axes("first ranks of the drafter's row", "the target's token is among them", grid=True)
        self.legend_ = c.legend_above(ax, list(self.lines_.values()), columns=2)
