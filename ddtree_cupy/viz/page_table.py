"""PageTableDisplay: where the rows of one request lie in the paged cache."""

from typing import Any, Self

import numpy as np

from ddtree_cupy.containers import PagedKV
from ddtree_cupy.errors import ArgumentError
from ddtree_cupy.viz import _common as c

Array = Any
Axes = Any

_LEFT, _RIGHT, _WIDTH = 0.0, 3.0, 1.0
_GAP = 0.35  # between pages, in rows


class PageTableDisplay:
    """Logical positions of a request on the left, the pool's pages on the right, an arrow from each to its place.

    Parameters
    ----------
    page_table : int array, shape (max_pages,)
        Entry p holds the page of positions p * page_size and up; -1 for none.
    page_size : int
        Rows a page.
    context_len : int
        Positions that hold context.
    num_nodes : int
        Positions after them that hold the keys of tree nodes.
    num_pages : int, optional
        Pages of the pool; default the largest id of the table plus 1.

    Attributes
    ----------
    ax_, figure_ : matplotlib objects
    logical_, physical_, arrows_, legend_
        Artists: cells of both sides, one arrow a row or a page.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        Also when a position that is used has no page in the pool.

    Examples
    --------
    >>> import matplotlib
    >>> matplotlib.use("Agg")
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
        name = "PageTableDisplay"
        self.page_table = c.integers(name, "page_table", page_table)
        for argument, value, least in (
            ("page_size", page_size, 1),
            ("context_len", context_len, 0),
            ("num_nodes", num_nodes, 0),
        ):
            if value < least:
                raise ArgumentError(f"{name}: `{argument}` is {value}, expected at least {least}")
        self.page_size, self.context_len, self.num_nodes = int(page_size), int(context_len), int(num_nodes)
        self.num_pages = int(self.page_table.max(initial=-1)) + 1 if num_pages is None else int(num_pages)
        used = self.num_entries
        if used > len(self.page_table):
            room = len(self.page_table) * self.page_size
            raise ArgumentError(
                f"{name}: `page_table` has room for {room} positions, expected {self.context_len + self.num_nodes}"
            )
        bad = np.flatnonzero((self.page_table[:used] < 0) | (self.page_table[:used] >= self.num_pages))
        if bad.size:
            raise ArgumentError(
                f"{name}: `page_table[{bad[0]}]` is {self.page_table[bad[0]]}, expected 0..{self.num_pages - 1}"
            )

    @classmethod
    def from_kv(cls, kv: PagedKV, *, num_nodes: int = 0, request: int | None = None) -> Self:
        """Take one request of a cache and the number of tree keys behind its context."""
        chosen = c.pick_request("PageTableDisplay.from_kv", request, kv.page_table.shape[0] if kv.is_batched else None)
        table, lens = c.on_host(kv.page_table), c.on_host(kv.context_lens)
        if chosen is not None:
            table, lens = table[chosen], lens[chosen]
        return cls(
            table,
            page_size=kv.page_size,
            context_len=int(lens),
            num_nodes=num_nodes,
            num_pages=int(kv.ckv.shape[0]),
        )

    @classmethod
    def from_arrays(cls, page_table: Array, **options: Any) -> Self:
        """Take a page table; `options` as in the constructor."""
        return cls(page_table, **options)

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
        ax : matplotlib Axes, optional
        arrows : {"auto", "row", "page"}
            One arrow a row or a page; "auto" changes at 24 rows.
        **kw
            To every arrow, a `FancyArrowPatch`.
        """
        c.choice("PageTableDisplay.plot", "arrows", arrows, ("auto", "row", "page"))
        used = self.context_len + self.num_nodes
        if arrows == "auto":
            arrows = "row" if used <= 24 else "page"
        tallest = max(self.num_entries, self.num_pages, 1) * (self.page_size + _GAP)
        ax = c.new_axes(ax, 5.6, float(np.clip(0.9 + 0.2 * tallest, 2.4, 8.5)))
        ax.set_xlim(-0.75, _RIGHT + _WIDTH + 0.75)
        ax.set_ylim(tallest, -0.5)
        ax.set_axis_off()
        self.ax_, self.figure_ = ax, ax.figure
        self._label_step = int(np.ceil(8 / c.points_per_unit(ax, "y")))

        kinds = np.array([c.SKY] * self.context_len + [c.ORANGE] * self.num_nodes)
        rows = self.rows()
        logical = np.full(self.num_entries * self.page_size, c.PALE, dtype="<U7")
        logical[:used] = kinds
        physical = np.full(self.num_pages * self.page_size, "#FFFFFF", dtype="<U7")
        physical[rows] = kinds
        names = {int(row): position for position, row in enumerate(rows)}
        self.logical_ = self._cells(ax, _LEFT, logical, {n: n for n in range(used)})
        self.physical_ = self._cells(ax, _RIGHT, physical, names)
        for entry in range(self.num_entries):
            self._page_name(ax, _LEFT - 0.1, entry, f"entry {entry}", "right")
        for page in range(self.num_pages):
            self._page_name(ax, _RIGHT + _WIDTH + 0.1, page, f"page {page}", "left")
        for x, text in ((_LEFT, "logical position"), (_RIGHT, "row in the pool")):
            ax.text(x + _WIDTH / 2, -0.4, text, ha="center", va="bottom", fontsize=9)
        self.arrows_ = self._arrows(ax, arrows, kw)
        self.legend_ = self._legend(ax)
        return self

    def _every(self) -> int:
        """Return how many pages one line of text takes."""
        return int(np.ceil(9 / (c.points_per_unit(self.ax_, "y") * (self.page_size + _GAP))))

    def _height(self, row: float) -> float:
        return row + _GAP * (row // self.page_size)

    def _cells(self, ax: Axes, x: float, colors: Any, names: dict[int, int]) -> Any:
        from matplotlib.collections import PatchCollection
        from matplotlib.patches import Rectangle

        boxes = [Rectangle((x, self._height(row)), _WIDTH, 1) for row in range(len(colors))]
        dense = self._label_step > 2
        cells = PatchCollection(boxes, facecolors=colors, edgecolors=c.GREY, linewidths=0.0 if dense else 0.5)
        for row in sorted(names) if self._label_step == 1 else ():
            where = (x + _WIDTH / 2, self._height(row) + 0.5)
            ax.text(*where, str(names[row]), ha="center", va="center_baseline", fontsize=7)
        every = self._every()
        for page, start in enumerate(range(0, len(colors), self.page_size)):
            held = [names[row] for row in range(start, start + self.page_size) if row in names]
            if held and self._label_step > 1 and page % every == 0:
                where = (x + _WIDTH / 2, self._height(start) + self.page_size / 2)
                ax.text(*where, f"{held[0]}-{held[-1]}", ha="center", va="center_baseline", fontsize=7)
            where = (x, self._height(start))
            ax.add_patch(Rectangle(where, _WIDTH, self.page_size, fill=False, ec=c.DARK, lw=1.0, zorder=3))
        return ax.add_collection(cells, autolim=False)

    def _page_name(self, ax: Axes, x: float, page: int, text: str, side: str) -> None:
        if page % self._every() == 0:
            middle = self._height(page * self.page_size) + self.page_size / 2
            ax.text(x, middle, text, ha=side, va="center", fontsize=8)

    def _arrows(self, ax: Axes, arrows: str, kw: dict[str, Any]) -> list[Any]:
        from matplotlib.patches import FancyArrowPatch

        used = self.context_len + self.num_nodes
        if arrows == "row":
            pairs = [(self._height(n) + 0.5, self._height(int(row)) + 0.5) for n, row in enumerate(self.rows())]
            groups = np.arange(used) // self.page_size
        else:
            half = self.page_size / 2
            pages = self.page_table[: self.num_entries]
            pairs = [
                (self._height(n * self.page_size) + half, self._height(int(page) * self.page_size) + half)
                for n, page in enumerate(pages)
            ]
            groups = np.arange(self.num_entries)
        drawn = []
        for (start, stop), group in zip(pairs, groups, strict=True):
            options = {
                "arrowstyle": "-|>",
                "mutation_scale": 8,
                "color": c.CYCLE[group % len(c.CYCLE)],
                "lw": 1.1 if len(pairs) <= 40 else 0.6,
                "shrinkA": 0,
                "shrinkB": 0,
                **kw,
            }
            ends = ((_LEFT + _WIDTH + 0.04, start), (_RIGHT - 0.04, stop))
            drawn.append(ax.add_patch(FancyArrowPatch(*ends, **options)))
        return drawn

    def _legend(self, ax: Axes) -> Any:
        from matplotlib.patches import Patch

        kinds = [
            (c.SKY, "context"),
            (c.ORANGE, "tree nodes"),
            (c.PALE, "no key yet"),
            ("#FFFFFF", "not of this request"),
        ]
        handles = [Patch(fc=color, ec=c.GREY, label=label) for color, label in kinds]
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
