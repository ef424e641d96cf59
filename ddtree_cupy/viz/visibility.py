"""VisibilityDisplay: which nodes may attend to which, and the 32-bit words that hold it."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from ddtree_cupy.containers import DraftTree, Visibility
from ddtree_cupy.containers.drawing import shown
from ddtree_cupy.containers.topology import pack_visibility
from ddtree_cupy.errors import DTypeError, ShapeError
from ddtree_cupy.viz import _base as c
from ddtree_cupy.viz._arguments import Array
from ddtree_cupy.viz._base import Axes, Display


def _points(ax: Axes) -> float:
    """Return points per cell: cells are square, so the tighter direction counts."""
    return min(c.points_per_unit(ax, "x"), c.points_per_unit(ax, "y"))


class VisibilityDisplay(Display):
    """The visibility of one request: row i is the query node, column j the key node, filled = may attend.

    The context, which every node sees, is one block before the tree; the words of one row are below, bit j under
    column j.

    Parameters
    ----------
    visibility : bool array, shape (N, N)
        True = may attend; any matrix is legal.
    context_len : int
        Keys before the tree; 0 draws no block.
    labels : sequence of str, shape (N,), optional
        Names of the nodes instead of their indices.

    Attributes
    ----------
    visibility_bits : uint32 array, shape (N, W)
        The same, packed.
    image_, context_, row_, words_, word_texts_
        Artists: the matrix, the context block, the frame of the highlighted row, its bits, the words in hexadecimal;
        None for what was not drawn.

    Examples
    --------
    >>> display = VisibilityDisplay.from_arrays(np.tri(3, dtype=bool), context_len=100).plot(row=2)
    >>> [text.get_text() for text in display.word_texts_]
    ['0x00000007']
    """

    def __init__(self, visibility: Array, *, context_len: int = 0, labels: Sequence[str] | None = None) -> None:
        check = self._check()
        matrix = check.on_host("visibility", visibility)
        if matrix.dtype != np.bool_:
            raise check.error(f"`visibility` has dtype {matrix.dtype}, expected bool, True = may attend", DTypeError)
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
            raise check.error(f"`visibility` is {matrix.shape}, expected (num_nodes, num_nodes), not empty", ShapeError)
        check.same_length("visibility", matrix, labels=labels)
        self.visibility = matrix
        self.visibility_bits = pack_visibility(matrix)
        self.context_len = check.integer("context_len", context_len, low=0)
        self.labels = [str(n) for n in range(len(matrix))] if labels is None else [shown(str(text)) for text in labels]

    @classmethod
    def from_tree(
        cls,
        tree: DraftTree | Visibility,
        *,
        context_len: int = 0,
        labels: Sequence[str] | None = None,
        request: int | None = None,
    ) -> Self:
        """Take one request of a tree, or of a bare `Visibility`.

        Parameters
        ----------
        tree : DraftTree or Visibility
        context_len : int
            Keys before the tree.
        labels : sequence of str, optional
            At least `num_nodes` of them; default: the tokens of a tree, the indices otherwise.
        request : int, optional
            The index in a batch.
        """
        check = cls._check("from_tree")
        one = check.one_request("tree", tree, request, DraftTree, Visibility)
        count = int(one.num_nodes)
        if labels is None and isinstance(one, DraftTree):
            labels = [str(token) for token in one.token_ids]
        dense = Visibility(one.visibility_bits, one.num_nodes).to_dense()[:count, :count]
        return cls(dense, context_len=context_len, labels=None if labels is None else labels[:count])

    def plot(
        self, ax: Axes = None, *, row: int | None = None, words: bool = True, color: str = c.BLUE, **kw: Any
    ) -> Self:
        """Draw the matrix, the context block and the words of one row.

        Parameters
        ----------
        row : int, optional
            The highlighted node; default the last one. Its words are drawn.
        words : bool
            Whether to draw the highlighted row at all.
        color : colour
            The colour of visible pairs.
        **kw
            Options of `imshow`, which draws the matrix.
        """
        from matplotlib.colors import ListedColormap

        count = len(self.visibility)
        check = self._check("plot")
        row = count - 1 if row is None else check.integer("row", row, low=0, high=count - 1)
        ax = self._on_axes(
            ax, float(np.clip(2.2 + 0.24 * count, 3.2, 8.0)), float(np.clip(2.0 + 0.22 * count, 2.8, 7.4))
        )
        options = {"cmap": ListedColormap(["#FFFFFF", color]), "vmin": 0, "vmax": 1, "interpolation": "nearest", **kw}
        self.image_ = ax.imshow(self.visibility, **options)
        if count <= 72:
            ax.vlines(np.arange(count + 1) - 0.5, -0.5, count - 0.5, colors="#CCCCCC", lw=0.5)
            ax.hlines(np.arange(count + 1) - 0.5, -0.5, count - 0.5, colors="#CCCCCC", lw=0.5)
        cell = max(1.0, count / 24)  # height of the parts outside the matrix, in rows
        left = -0.5 - (3.2 * cell if self.context_len else 0)
        ax.set_xlim(left, count - 0.5)
        ax.set_ylim(count - 0.5 + (3.6 * cell if words else 0), -0.5)
        c.bare(ax, "left", "right", "top", "bottom")
        self.context_ = self._plot_context(ax, cell) if self.context_len else None
        self.row_: Any = None
        self.words_: Any = None
        self.word_texts_: list[Any] = []
        if words:
            self.plot_words(ax, row)
        self._ticks(ax, row if words else None)
        return self

    def plot_words(self, ax: Axes, row: int) -> None:
        """Frame one row of the matrix and draw its bits and words below; `plot` does it for its `row`."""
        from matplotlib.patches import Rectangle

        count = len(self.visibility)
        cell = max(1.0, count / 24)
        top = count - 0.5 + 0.9 * cell
        self.row_ = ax.add_patch(Rectangle((-0.5, row - 0.5), count, 1, fill=False, ec=c.VERMILLION, lw=1.8, zorder=3))
        fill = [c.VERMILLION if bit else "#FFFFFF" for bit in self.visibility[row]]
        edges = "#CCCCCC" if count <= 72 else "none"
        self.words_ = ax.bar(np.arange(count), cell, width=1.0, bottom=top, color=fill, edgecolor=edges, linewidth=0.5)
        self.word_texts_ = []
        room = _points(ax)
        size = 7.0 if count <= 32 else min(7.0, 32 * room / 6.4)  # ten characters of 0.6 em per word
        for word, value in enumerate(self.visibility_bits[row]):
            start, stop = 32 * word - 0.5, min(32 * word + 32, count) - 0.5
            ax.add_patch(Rectangle((start, top), stop - start, cell, fill=False, ec=c.DARK, lw=1.0))
            if word == 0 or (size >= 4.5 and (stop - start) * room >= 6 * size):
                text = ax.text(start, top + 1.25 * cell, f"0x{value:08X}", va="top", fontsize=size, family="monospace")
                self.word_texts_.append(text)
        if count * room >= 46:
            name = "" if self.labels[row] == str(row) else f" ({self.labels[row]})"
            note = f"bits of row {row}{name}"
            looks = {"ha": "left", "va": "bottom", "fontsize": 7, "color": c.DARK, **c.AS_WRITTEN}
            ax.text(-0.5, top - 0.1 * cell, note, **looks)

    def _plot_context(self, ax: Axes, cell: float) -> Any:
        from matplotlib.patches import Rectangle

        count = len(self.visibility)
        left, width = -0.5 - 3.2 * cell, 2.9 * cell
        block = ax.add_patch(Rectangle((left, -0.5), width, count, fc=c.SKY, ec="white", hatch="//", lw=0))
        text = f"{self.context_len:,} context keys: all rows see them"
        short = f"{self.context_len:,} context keys"
        fits = count * _points(ax) >= 3.6 * len(text)
        box = {"fc": "white", "ec": "none", "pad": 1.5}
        middle = (left + width / 2, count / 2 - 0.5)
        ax.text(*middle, text if fits else short, rotation=90, ha="center", va="center", fontsize=7, bbox=box)
        return block

    def _ticks(self, ax: Axes, row: int | None) -> None:
        count = len(self.visibility)
        longest = max(map(len, self.labels))
        across = int(np.ceil((4.6 * longest + 3) / _points(ax)))
        down = int(np.ceil(9 / _points(ax)))
        rows = [n for n in range(0, count, down) if row is None or n == row or abs(n - row) >= down]
        rows += [row] if row is not None and row not in rows else []
        ax.set_yticks(rows, [self.labels[n] for n in rows], fontsize=7, **c.AS_WRITTEN)
        columns = range(0, count, across)
        ax.set_xticks(columns, [self.labels[n] for n in columns], fontsize=7, **c.AS_WRITTEN)
        ax.xaxis.tick_top()
        ax.xaxis.set_label_position("top")
        ax.tick_params(length=0)
        (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
        what = " (tree node)" if count > 3 else ""
        ax.set_xlabel(f"key{what}", fontsize=9, x=1 - count / 2 / (right - left))
        ax.set_ylabel(f"query{what}", fontsize=9, y=1 - count / 2 / (bottom - top))
