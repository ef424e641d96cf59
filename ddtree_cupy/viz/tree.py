"""TreeDisplay: a draft tree with its scores, and which of its nodes the target accepted."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import numpy as np

from ddtree_cupy.containers import AcceptResult, DraftTree
from ddtree_cupy.containers.drawing import node_positions, shown
from ddtree_cupy.containers.interactive import MOST_DRAWN, fates, tree_html
from ddtree_cupy.viz import _base as c
from ddtree_cupy.viz._arguments import Arguments, Array
from ddtree_cupy.viz._base import Axes, Display

_CURVE = np.linspace(0.0, 1.0, 13)
_UNREACHED, _IMPORTANT = "#D0D0D0", 36.0  # a colour; the smallest marker area of important nodes, in points squared


class TreeDisplay(Display):
    """A draft tree on a plane: x is the depth, y the order of the leaves.

    Nodes are coloured by score or, if `accepted` is given, by fate: the accepted path, the children at its end that the
    target passed over, the bonus token as a hollow node behind it, and the nodes that the walk never reached.
    A notebook shows a display of at most 256 nodes that `plot` has not drawn as HTML, with a slider over the budget and
    notes on the nodes: the text of the path, its probability, the score at which it entered, the target's next token.

    Parameters
    ----------
    token_ids, parents : int array, shape (N,)
        Valid nodes only; parents[0] = -1 and 0 <= parents[i] < i.
    path_scores : float array, shape (N,), optional
        Nats; the root has 0.
    accepted : int array, optional
        Node indices from the root to the last accepted one.
    bonus_token : int, optional
        The target's token after them; only with `accepted`, -1 draws none.
    target_token_ids : int array, shape (N,), optional
        The target's own token at every node: edges that the target would take are drawn dark, on and off the path.
    labels : sequence of str, shape (N,), or callable, optional
        Text of every node instead of the token id, or a function from a token id to its text.

    Attributes
    ----------
    positions : float array, shape (N,) or (N + 1,), 2
        Depth and height; the last entry belongs to the bonus token, if any.
    nodes_, edges_, labels_, bonus_, legend_, colorbar_
        Artists; None for what was not drawn.

    Examples
    --------
    >>> tree = DraftTree.from_parents([7, 10, 20, 11], [-1, 0, 1, 0])
    >>> display = TreeDisplay.from_tree(tree).plot()
    >>> [text.get_text() for text in display.labels_]
    ['7', '10', '20', '11']
    """

    def __init__(
        self,
        token_ids: Array,
        parents: Array,
        *,
        path_scores: Array | None = None,
        accepted: Array | None = None,
        bonus_token: int | None = None,
        target_token_ids: Array | None = None,
        labels: Sequence[str] | Callable[[int], str] | None = None,
    ) -> None:
        check = self._check()
        self.token_ids = check.integers("token_ids", token_ids)
        self.parents = check.integers("parents", parents)
        count = len(self.token_ids)
        if count == 0:
            raise check.error("`token_ids` is empty, expected at least the root")
        self._say = say = labels if callable(labels) else str
        texts = [say(int(token)) for token in self.token_ids] if labels is None or callable(labels) else labels
        check.same_length("token_ids", self.token_ids, parents=self.parents, labels=texts)
        bad = np.flatnonzero((self.parents >= np.arange(count)) | (self.parents < (np.arange(count) > 0) - 1))
        if bad.size:
            node = int(bad[0])
            wanted = "-1" if node == 0 else f"0..{node - 1}"
            raise check.error(f"`parents[{node}]` is {self.parents[node]}, expected {wanted}")
        self.path_scores = None if path_scores is None else check.floats("path_scores", path_scores, 1)
        targets = None if target_token_ids is None else check.integers("target_token_ids", target_token_ids)
        self.target_token_ids = targets
        check.same_length("token_ids", self.token_ids, path_scores=self.path_scores, target_token_ids=targets)
        self.accepted = None if accepted is None else check.integers("accepted", accepted)
        self.bonus_token = None if bonus_token is None else check.integer("bonus_token", bonus_token, low=-1)
        self._check_path(check)
        with_bonus = self.parents.tolist()
        self._has_texts = labels is not None
        self.labels = [*map(str, texts), *([say(int(self.bonus_token or 0))] if self._has_bonus else [])]
        if self.accepted is not None and self._has_bonus:
            with_bonus.append(int(self.accepted[-1]))
        self.positions = np.array(node_positions(with_bonus))

    def _check_path(self, check: Arguments) -> None:
        path = self.accepted
        if path is None:
            if self.bonus_token is not None:
                raise check.error(f"`bonus_token` is {self.bonus_token}, expected None without `accepted`")
            return
        inside = path.size > 0 and path.min() >= 0 and path.max() < len(self.parents)
        if not inside or path[0] != 0 or (self.parents[path[1:]] != path[:-1]).any():
            wanted = "expected node indices from the root 0 down, each the parent of the next, without padding"
            raise check.error(f"`accepted` is {path.tolist()}, {wanted}")

    @property
    def _has_bonus(self) -> bool:
        return self.accepted is not None and self.bonus_token is not None and self.bonus_token >= 0

    @classmethod
    def from_tree(
        cls,
        tree: DraftTree,
        *,
        result: AcceptResult | None = None,
        target_token_ids: Array | None = None,
        labels: Sequence[str] | Callable[[int], str] | None = None,
        request: int | None = None,
    ) -> Self:
        """Take one request of a tree, and of the result of `accept` for it.

        Parameters
        ----------
        tree : DraftTree
        result : AcceptResult, optional
        target_token_ids : int array, shape ([B,] N), optional
        labels : sequence of str (at least `num_nodes`) or callable, optional
        request : int, optional
            The index in a batch.
        """
        check = cls._check("from_tree")
        one = check.one_request("tree", tree, request, DraftTree)
        count = int(one.num_nodes)
        path, bonus = None, None
        if result is not None:
            found = check.one_request("result", result, request, AcceptResult)
            path, bonus = found.accepted[: int(found.num_accepted) + 1], int(found.bonus_token)
        if target_token_ids is not None:
            batch = len(tree.token_ids) if tree.is_batched else None
            target_token_ids = check.row_of("target_token_ids", target_token_ids, request, batch)[:count]
        return cls(
            one.token_ids[:count],
            one.parents[:count],
            path_scores=None if one.path_scores is None else one.path_scores[:count],
            accepted=path,
            bonus_token=bonus,
            target_token_ids=target_token_ids,
            labels=labels if labels is None or callable(labels) else labels[:count],
        )

    def plot(
        self, ax: Axes = None, *, color: str = "auto", font_size: float = 8.0, legend: bool = True, **kw: Any
    ) -> Self:
        """Draw edges, nodes and as many labels as fit.

        Parameters
        ----------
        color : {"auto", "score", "fate", "plain"}
            "auto" takes the fate when `accepted` is known, else the score when there is one.
        font_size : float
            Font size of the labels, in points; 0 draws no labels.
        legend : bool
            Whether to draw the legend or the colour bar.
        **kw
            Options of `scatter`, which draws the nodes.
        """
        self._check("plot").choice("color", color, ("auto", "score", "fate", "plain"))
        if color == "auto":
            color = "fate" if self.accepted is not None else "score" if self.path_scores is not None else "plain"
        needed = {"score": "path_scores", "fate": "accepted"}.get(color, "parents")
        if getattr(self, needed) is None:
            raise self._check("plot").error(f"`color` is {color!r}, expected `{needed}` to be given then")
        leaves, depth = self.positions[:, 1].max() + 1, self.positions[:, 0].max()
        ax = self._on_axes(ax, min(3.0 + 1.3 * depth, 11.0), float(np.clip(1.0 + 0.26 * leaves, 1.8, 9.0)))
        self.frame(ax)
        self.legend_ = self.colorbar_ = self.bonus_ = None
        self.plot_edges(ax)
        if color == "score" and self.path_scores is not None:
            weights = np.exp(self.path_scores)
            kw = {"c": weights, "cmap": c.SCORES, "norm": c.probability_scale(weights), **kw}
            kw = {"s": np.maximum(_IMPORTANT * weights, self._size(ax)), **kw}
        elif self.accepted is not None and color == "fate":
            on_path = np.isin(np.arange(len(self.parents)), self.accepted)
            kw = {"c": self.fate_colors(), "s": np.maximum(_IMPORTANT * on_path, self._size(ax)), **kw}
        self.plot_nodes(ax, **kw)
        if self._has_bonus:
            look = {"facecolors": "white", "edgecolors": c.ORANGE, "linewidths": 2, "zorder": 3}
            self.bonus_ = ax.scatter(*self.positions[-1], s=max(self._size(ax), _IMPORTANT), **look)
        self.labels_ = self.plot_labels(ax, font_size=font_size) if font_size > 0 else []
        if legend and color == "score":
            self.colorbar_ = c.color_bar(ax, self.nodes_, "path probability")
        elif legend and color == "fate":
            self.legend_ = c.legend_above(ax, self._handles())
        return self

    def frame(self, ax: Axes) -> None:
        """Set limits, ticks and names of the axes; `plot` calls it first."""
        x, y = self.positions.T
        ax.set_xlim(-0.4, x.max() + 0.75)
        ax.set_ylim(y.max() + 0.8, -0.8)
        ax.set_xticks(range(int(x.max()) + 1))
        ax.set_yticks([])
        ax.set_xlabel("depth (tokens after the root)")
        c.bare(ax, "left", "right", "top")
        self.ax_, self.figure_ = ax, ax.figure

    def plot_edges(self, ax: Axes, nodes: Iterable[int] | None = None, **kw: Any) -> Any:
        """Draw the edges that end in `nodes` (all by default) and return their LineCollection."""
        from matplotlib.collections import LineCollection

        chosen = [n for n in (range(1, len(self.parents)) if nodes is None else nodes) if n > 0]
        curves = [self._curve(int(self.parents[n]), n) for n in chosen]
        on_path = set() if self.accepted is None else set(self.accepted.tolist())
        wanted, colors, widths = c.wanted_nodes(self.token_ids, self.parents, self.target_token_ids), [], []
        for n in chosen:
            colors.append(c.GREEN if n in on_path else c.DARK if wanted[n] else "#BBBBBB")
            widths.append(3.0 if n in on_path else 1.8 if wanted[n] else 1.0)
        if nodes is None and self.accepted is not None and self._has_bonus:
            curves.append(self._curve(int(self.accepted[-1]), len(self.parents)))
            colors.append(c.ORANGE)
            widths.append(2.0)
        options = {"colors": colors, "linewidths": widths, "zorder": 1, **kw}
        self.edges_ = ax.add_collection(LineCollection(curves, **options), autolim=False)
        return self.edges_

    def plot_nodes(self, ax: Axes, nodes: Iterable[int] | None = None, **kw: Any) -> Any:
        """Draw `nodes` (all by default) and return their PathCollection; `kw` go to `scatter`."""
        chosen = list(range(len(self.parents)) if nodes is None else nodes)
        size = self._size(ax)
        options = {"s": size, "edgecolors": c.DARK, "linewidths": 0.6 if size > 25 else 0.25, "zorder": 2, **kw}
        if not {"c", "color", "facecolors"} & set(options):
            options["color"] = c.BLUE
        self.nodes_ = ax.scatter(*self.positions[chosen].T, **options)
        return self.nodes_

    def plot_labels(self, ax: Axes, nodes: Iterable[int] | None = None, *, font_size: float = 8.0, **kw: Any) -> Any:
        """Write the labels of `nodes` (all by default) where there is room and return the texts.

        The accepted path comes first, then nodes in their order, so the most probable ones keep their labels.
        """
        order = list(range(len(self.parents)) if nodes is None else nodes)
        if nodes is None and self._has_bonus:
            order.append(len(self.parents))
        if self.accepted is not None:
            first = {*self.accepted.tolist(), len(self.parents)}
            order.sort(key=lambda n: n not in first)
        bonus_parent = [] if self.accepted is None or not self._has_bonus else self.accepted[-1:].tolist()
        inner = {*self.parents.tolist(), *bonus_parent}
        wanted = [(*self.positions[n], shown(self.labels[n]), n in inner) for n in order]
        options = {"fontsize": font_size, "zorder": 4, **kw}
        drawn = dict(zip(order, c.place_labels(ax, wanted, self._size(ax) ** 0.5 / 2, **options), strict=True))
        return [drawn[n] for n in sorted(drawn) if drawn[n] is not None]

    def fate_colors(self) -> list[str]:
        """Return one colour per node: accepted, passed over by the target at the end of the path, or never reached."""
        if self.accepted is None:
            raise self._check("fate_colors").error("`accepted` is None, expected the accepted path")
        colors = {"accepted": c.GREEN, "refused": c.VERMILLION, "unreached": _UNREACHED}
        return [colors[fate] for fate in fates(self.parents.tolist(), self.accepted.tolist())]

    def _repr_html_(self) -> str | None:
        """Draw a tree of at most 256 nodes to play with; None where there are more, or `plot` has drawn it."""
        count = len(self.parents)
        if hasattr(self, "figure_") or count > MOST_DRAWN:
            return None
        path, scores = (None if array is None else array.tolist() for array in (self.accepted, self.path_scores))
        return tree_html(
            self.token_ids.tolist(),
            self.parents.tolist(),
            labels=self.labels[:count] if self._has_texts else None,
            path_scores=scores,
            accepted=path,
            bonus=(int(self.bonus_token or 0), self.labels[-1]) if self._has_bonus else None,
            target_words=self._target_words(),
        )

    def _target_words(self) -> list[str | None] | None:
        """Return the text of the target's token behind each node, None where it is negative, so unknown."""
        if self.target_token_ids is None:
            return None
        nodes = zip(self.parents.tolist(), self.token_ids.tolist(), self.labels, strict=False)
        children = {(parent, token): label for parent, token, label in nodes}
        targets = enumerate(self.target_token_ids.tolist())
        return [None if t < 0 else children.get((n, t)) or self._say(t) for n, t in targets]

    def _curve(self, start: int, stop: int) -> Any:
        (x0, y0), (x1, y1) = self.positions[start], self.positions[stop]
        ease = _CURVE * _CURVE * (3 - 2 * _CURVE)
        return np.column_stack([x0 + (x1 - x0) * _CURVE, y0 + (y1 - y0) * ease])

    def _size(self, ax: Axes) -> float:
        """Return the marker area in points squared that leaves a gap between neighbours."""
        return float(np.clip(0.62 * c.points_per_unit(ax, "y"), 3.0, 9.0) ** 2)

    def _handles(self) -> list[Any]:
        colors = self.fate_colors()
        kinds = [(c.GREEN, c.DARK, "accepted"), (c.VERMILLION, c.DARK, "target disagrees")]
        kinds += [("white", c.ORANGE, "bonus token")] if self._has_bonus else []
        kinds.append((_UNREACHED, c.DARK, "not reached"))
        handles = [c.marker(*kind) for kind in kinds if kind[0] in (*colors, "white")]
        wanted = c.wanted_nodes(self.token_ids, self.parents, self.target_token_ids)
        is_stray = any(hit and color != c.GREEN for hit, color in zip(wanted, colors, strict=True))
        return handles + [c.line(c.DARK, 1.8, "target's choice")] * is_stray
