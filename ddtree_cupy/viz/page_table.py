"""PageTableDisplay: where the rows of one request lie in the paged cache."""

from typing import Any, Self

import numpy as np

from ddtree_cupy.containers import PagedKV
from ddtree_cupy.viz import _base as c
from ddtree_cupy.viz._arguments import Array
from ddtree_cupy.viz._base import Axes, Display

_LEFT, _RIGHT, _WIDTH = 0.0, 3.0, 1.0
_GAP = 0.35  # between pages, in rows
_CONTEXT, _NODES, _NO_KEY, _FOREIGN = range(4)  # the content of a row
_COLORS = (c.SKY, c.ORANGE, c.PALE, "#FFFFFF")
_NAMES = ("context", "tree nodes", "no key yet", "not of this request")
_HEAD = ("arrowstyle", "connectionstyle", "mutation_scale", "shrinkA", "shrinkB")


class PageTableDisplay(Display):
    """Logical positions of a request on the left, pages of the pool on the right, and arrows between them.

    Parameters
    ----------
    page_table : int array, shape (max_pages,)
        Entry p is the page of positions p * page_size and up; -1 if there is none.
    page_size : int
        Rows per page.
    context_len : int
        Positions that hold context.
    num_nodes : int
        Positions after them that hold the keys of tree nodes.
    num_pages : int, optional
        Pages of the pool; default the largest id of the table plus 1.

    Attributes
    ----------
    logical_, physical_, arrows_, legend_
        Artists: the cells of both sides, one per row, or one per run of equal rows of a page where rows are too thin
        to see; a list with one arrow per row or per page, or, above 256 of them, with one LineCollection.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        An argument does not fit, or a position in use has no page in the pool.

    Examples
    --------
    >>> display = PageTableDisplay.from_arrays([2, 0], page_size=4, context_len=5, num_nodes=2).plot()
    >>> display.rows().tolist()
    [8, 9, 10, 11, 0, 1, 2]
    """

    def __init__(
        self,
        page_table: Array,
        *,
        page_size: int,
        context_len: int,
        num_nodes: int = 0,
        num_pages: int | None = None,
    ) -> None:
        check = self._check()
        self.page_table = check.integers("page_table", page_table)
        self.page_size = check.integer("page_size", page_size, low=1)
        self.context_len = check.integer("context_len", context_len, low=0)
        self.num_nodes = check.integer("num_nodes", num_nodes, low=0)
        largest = int(self.page_table.max(initial=-1))
        self.num_pages = largest + 1 if num_pages is None else check.integer("num_pages", num_pages, low=0)
        used = self.num_entries
        if used > len(self.page_table):
            room, wanted = len(self.page_table) * self.page_size, self.context_len + self.num_nodes
            raise check.error(f"`page_table` has room for {room} positions, expected {wanted}")
        bad = np.flatnonzero((self.page_table[:used] < 0) | (self.page_table[:used] >= self.num_pages))
        if bad.size:
            raise check.error(f"`page_table[{bad[0]}]` is {self.page_table[bad[0]]}, expected 0..{self.num_pages - 1}")
        again = np.setdiff1d(np.arange(used), np.unique(self.page_table[:used], return_index=True)[1])
        if again.size:
            page = self.page_table[again[0]]
            raise check.error(f"`page_table[{again[0]}]` is {page} once more, expected a page only once")

    @classmethod
    def from_kv(cls, kv: PagedKV, *, num_nodes: int = 0, request: int | None = None) -> Self:
        """Take one request of a cache and the number of tree keys behind its context."""
        check = cls._check("from_kv")
        check.kind("kv", kv, PagedKV)
        chosen = check.pick_request(request, kv.page_table.shape[0] if kv.is_batched else None)
        table, lens = check.on_host("kv.page_table", kv.page_table), check.on_host("kv", kv.context_lens)
        if chosen is not None:
            table, lens = table[chosen], lens[chosen]
        pool = {"page_size": kv.page_size, "num_pages": int(kv.ckv.shape[0])}
        return cls(table, context_len=int(lens), num_nodes=num_nodes, **pool)

    @property
    def num_entries(self) -> int:
        """Number of table entries in use."""
        return -(-(self.context_len + self.num_nodes) // self.page_size)

    def rows(self) -> Any:
        """Return int64 (context_len + num_nodes): the pool's row, page * page_size + slot, of every position."""
        positions = np.arange(self.context_len + self.num_nodes)
        return self.page_table[positions // self.page_size] * self.page_size + positions % self.page_size

    def plot(self, ax: Axes = None, *, arrows: str = "auto", **kw: Any) -> Self:
        """Draw both sides and the arrows.

        Parameters
        ----------
        arrows : {"auto", "row", "page"}
            One arrow per row or per page; "auto" changes from rows to pages at 24 rows.
        **kw
            Options of every arrow, a `FancyArrowPatch`; a LineCollection ignores those of the arrow head.
        """
        self._check("plot").choice("arrows", arrows, ("auto", "row", "page"))
        used = self.context_len + self.num_nodes
        if arrows == "auto":
            arrows = "row" if used <= 24 else "page"
        tallest = max(self.num_entries, self.num_pages, 1) * (self.page_size + _GAP)
        ax = self._on_axes(ax, 5.6, float(np.clip(0.9 + 0.2 * tallest, 2.4, 8.5)))
        ax.set_xlim(-0.75, _RIGHT + _WIDTH + 0.75)
        ax.set_ylim(tallest, -0.5)
        ax.set_axis_off()
        self._label_step = int(np.ceil(8 / c.points_per_unit(ax, "y")))
        self._page_step = int(np.ceil(9 / (c.points_per_unit(ax, "y") * (self.page_size + _GAP))))
        kinds = np.repeat([_CONTEXT, _NODES], [self.context_len, self.num_nodes])
        rows = self.rows()
        logical = np.full(self.num_entries * self.page_size, _NO_KEY)
        logical[:used] = kinds
        physical = np.full(self.num_pages * self.page_size, _FOREIGN)
        physical[rows] = kinds
        positions = np.full(len(logical), -1), np.full(len(physical), -1)
        positions[0][:used] = positions[1][rows] = np.arange(used)
        self.logical_ = self._cells(ax, _LEFT, logical, positions[0])
        self.physical_ = self._cells(ax, _RIGHT, physical, positions[1])
        for entry in range(0, self.num_entries, self._page_step):
            self._page_name(ax, _LEFT - 0.1, entry, f"entry {entry}", "right")
        for page in range(0, self.num_pages, self._page_step):
            self._page_name(ax, _RIGHT + _WIDTH + 0.1, page, f"page {page}", "left")
        for x, text in ((_LEFT, "logical position"), (_RIGHT, "row in the pool")):
            ax.text(x + _WIDTH / 2, -0.4, text, ha="center", va="bottom", fontsize=9)
        self.arrows_ = self._arrows(ax, arrows, kw)
        self.legend_ = self._legend(ax)
        return self

    def _height(self, row: Any) -> Any:
        return row + _GAP * (row // self.page_size)

    def _boxes(self, x: float, starts: Any, counts: Any) -> Any:
        """Return float64 (n, 4, 2): corners of the boxes over `counts` rows of one page from `starts` on."""
        top = self._height(starts)
        bottom = top + counts
        across = np.broadcast_to([x, x + _WIDTH, x + _WIDTH, x], (len(top), 4))
        return np.stack([across, np.column_stack([top, top, bottom, bottom])], axis=-1)

    def _cells(self, ax: Axes, x: float, kinds: Any, positions: Any) -> Any:
        """Draw one side: rows of these kinds, which hold these positions (-1 for none)."""
        from matplotlib.collections import PolyCollection
        from matplotlib.colors import to_rgba_array

        dense = self._label_step > 2
        first = np.ones(len(kinds), bool)
        if dense:
            first[1:] = (kinds[1:] != kinds[:-1]) | (np.arange(1, len(kinds)) % self.page_size == 0)
        starts = np.flatnonzero(first)
        boxes = self._boxes(x, starts, np.diff(starts, append=len(kinds)))
        look: dict[str, Any] = {"edgecolors": c.GREY, "linewidths": 0.0 if dense else 0.5}
        cells = PolyCollection(boxes, facecolors=to_rgba_array(_COLORS)[kinds[starts]], **look)
        for row in np.flatnonzero(positions >= 0) if self._label_step == 1 else ():
            where = (x + _WIDTH / 2, self._height(row) + 0.5)
            ax.text(*where, str(positions[row]), ha="center", va="center_baseline", fontsize=7)
        pages = np.arange(0, len(kinds), self.page_size)
        for start in pages[:: self._page_step] if self._label_step > 1 else ():
            held = positions[start : start + self.page_size]
            held = held[held >= 0]
            if held.size:
                where = (x + _WIDTH / 2, self._height(start) + self.page_size / 2)
                ax.text(*where, f"{held[0]}-{held[-1]}", ha="center", va="center_baseline", fontsize=7)
        look = {"facecolors": "none", "edgecolors": c.DARK, "linewidths": 1.0 if self._page_step <= 4 else 0.0}
        frames = PolyCollection(self._boxes(x, pages, self.page_size), zorder=3, **look)
        ax.add_collection(frames, autolim=False)
        return ax.add_collection(cells, autolim=False)

    def _page_name(self, ax: Axes, x: float, page: int, text: str, side: str) -> None:
        middle = self._height(page * self.page_size) + self.page_size / 2
        ax.text(x, middle, text, ha=side, va="center", fontsize=8)

    def _arrows(self, ax: Axes, arrows: str, kw: dict[str, Any]) -> list[Any]:
        from matplotlib.collections import LineCollection
        from matplotlib.patches import FancyArrowPatch

        if arrows == "row":
            rows = self.rows()
            starts, stops = self._height(np.arange(len(rows))) + 0.5, self._height(rows) + 0.5
            groups = np.arange(len(rows)) // self.page_size
        else:
            groups, half = np.arange(self.num_entries), self.page_size / 2
            pages = self.page_table[: self.num_entries]
            starts, stops = (self._height(n * self.page_size) + half for n in (groups, pages))
        left, right = (np.full(len(starts), x) for x in (_LEFT + _WIDTH + 0.04, _RIGHT - 0.04))
        ends = np.stack([np.column_stack([left, starts]), np.column_stack([right, stops])], axis=1)
        colors = [c.CYCLE[group % len(c.CYCLE)] for group in groups]
        width = 1.1 if len(ends) <= 40 else 0.6
        if len(ends) > 256:  # heads would hide each other, and each patch takes milliseconds
            options = {"color": colors, "lw": width, **{key: kw[key] for key in kw if key not in _HEAD}}
            return [ax.add_collection(LineCollection(list(ends), **options), autolim=False)]
        head = {"arrowstyle": "-|>", "mutation_scale": 8, "shrinkA": 0, "shrinkB": 0}
        return [
            ax.add_patch(FancyArrowPatch(*pair, **{"color": color, "lw": width, **head, **kw}))
            for pair, color in zip(ends.tolist(), colors, strict=True)
        ]

    def _legend(self, ax: Axes) -> Any:
        from matplotlib.patches import Patch

        handles = [Patch(fc=color, ec=c.GREY, label=name) for color, name in zip(_COLORS, _NAMES, strict=True)]
        return ax.legend(
            handles=handles,
            loc="upper center",
            bbox_to_anchor=(0.5, 0.0),
            ncols=4,
            frameon=False,
            fontsize=8,
            columnspacing=1.2,
            handlelength=1.2,
        )
