"""What all displays share: one base class, colours, legends and labels."""

from collections.abc import Callable, Sequence
from typing import Any, Self

from ddtree_cupy.viz._arguments import Arguments, Array, Floats, Integers

Axes = Any

# the colours of Okabe and Ito, which people with any colour vision can tell apart
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, PALE, DARK = "#999999", "#E6E6E6", "#444444"
CYCLE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")  # one more than the colours, so that the pairs differ for 56 lines
SCORES = "cividis"  # for values that have an order

# Options of every matplotlib Text with text of the caller: `$` is a character, and no setting makes it TeX
AS_WRITTEN = {"parse_math": False, "usetex": False}


class Display:
    """One picture: data in the constructor, artists in attributes with a trailing underscore once it is drawn.

    Attributes
    ----------
    ax_, figure_ : matplotlib objects
        The Axes and figure of the last `plot`.
    """

    ax_: Axes
    figure_: Any

    @classmethod
    def from_arrays(cls, *arrays: Array, **options: Any) -> Self:
        """Make the display from plain arrays, with the arguments of the constructor."""
        return cls(*arrays, **options)

    @classmethod
    def _check(cls, method: str = "") -> Arguments:
        """Return the checker for the arguments of the constructor or of a method."""
        return Arguments(f"{cls.__name__}.{method}" if method else cls.__name__)

    def _on_axes(self, ax: Axes, width: float, height: float) -> Axes:
        """Keep and return `ax`, or the Axes of a new figure of this size in inches."""
        if ax is None:
            try:
                import matplotlib.pyplot as plt
            except ModuleNotFoundError as error:
                if error.name != "matplotlib":
                    raise
                message = "pictures need matplotlib, the extra `viz`: pip install 'matplotlib>=3.9'"
                raise ModuleNotFoundError(message, name="matplotlib") from error
            ax = plt.subplots(figsize=(width, height), layout="constrained")[1]
        self.ax_, self.figure_ = ax, ax.figure
        return ax

    def _draw(
        self, ax: Axes, kind: str, kw: dict[str, Any], **pictures: Callable[[Axes, dict[str, Any]], None]
    ) -> Self:
        """Draw one of several pictures, the keywords of which are the kinds."""
        self._check("plot").choice("kind", kind, tuple(pictures))
        pictures[kind](ax, kw)
        return self

    def _name_axes(self, x: str, y: str, *, grid: bool = False) -> None:
        """Name both axes of a chart, hide its upper and right line, and draw a grid below the data if wanted."""
        self.ax_.set_xlabel(x)
        self.ax_.set_ylabel(y)
        bare(self.ax_, "top", "right")
        if grid:
            self.ax_.grid(color=PALE, lw=0.6)
            self.ax_.set_axisbelow(True)


def points_per_unit(ax: Axes, axis: str) -> float:
    """Return how many points (1/72 inch) one unit of data takes along `axis`; the limits must be final."""
    box = ax.get_position()
    inches = box.width * ax.figure.bbox.width if axis == "x" else box.height * ax.figure.bbox.height
    low, high = ax.get_xlim() if axis == "x" else ax.get_ylim()
    return float(inches / ax.figure.dpi * 72 / max(abs(high - low), 1e-12))


def bare(ax: Axes, *sides: str) -> None:
    """Hide some of the four lines around an Axes."""
    for side in sides:
        ax.spines[side].set_visible(False)


def color_bar(ax: Axes, artist: Any, label: str, **kw: Any) -> Any:
    """Put a colour bar beside an Axes."""
    return ax.figure.colorbar(artist, ax=ax, label=label, pad=0.02, **kw)


def legend_above(ax: Axes, handles: Sequence[Any], columns: int = 4) -> Any:
    """Put a legend without a frame on top of an Axes, where no data can lie under it."""
    legend = ax.legend(
        handles=handles,
        labels=[handle.get_label() for handle in handles],  # explicit, so that one with a leading underscore is kept
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=columns,
        frameon=False,
        fontsize=8,
        borderaxespad=0.2,
        handletextpad=0.4,
        columnspacing=1.2,
    )
    for text in legend.get_texts():
        text.update(AS_WRITTEN)
    return legend


def probability_scale(probabilities: Floats) -> Any:
    """Return the colour scale of probabilities, logarithmic once they span two decades."""
    from matplotlib.colors import LogNorm, Normalize

    lowest = float(probabilities.min())
    return LogNorm(max(lowest, 1e-12), 1.0) if lowest < 0.01 else Normalize(0.0, 1.0)


def wanted_nodes(token_ids: Integers, parents: Integers, targets: Integers | None) -> list[bool]:
    """Return for each node whether its token is the target's at its parent; without targets none is."""
    if targets is None:
        return [False] * len(parents)
    return [bool(hit) for hit in (parents >= 0) & (targets[parents] == token_ids)]


def line(color: str, width: float, label: str) -> Any:
    """Return a handle of a legend: a line."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=color, lw=width, label=label)


def marker(face: str, edge: str, label: str) -> Any:
    """Return a legend entry that shows a round marker."""
    from matplotlib.lines import Line2D

    return Line2D([], [], ls="", marker="o", mfc=face, mec=edge, mew=1.2, ms=7, label=label)


def place_labels(ax: Axes, texts: Sequence[tuple[float, float, str, bool]], radius: float, **kw: Any) -> list[Any]:
    """Write (x, y, text, above) beside markers of `radius` points, earlier ones first, and skip texts without room.

    `above` writes over the marker, unless another marker is there, else to its right. Returns one Text per entry, or
    None where it was skipped.
    """
    unit, size = points_per_unit(ax, "y"), kw["fontsize"]
    taken: dict[float, list[float]] = {}
    markers: dict[float, list[float]] = {}
    for x, y, _, _ in texts:
        markers.setdefault(x, []).append(y)
    drawn: list[Any] = []
    for x, y, text, above in texts:
        middle = y - (radius + 0.6 * size) / unit if above else y
        covers = above and any(other != y and abs(middle - other) * unit < 0.6 * size for other in markers[x])
        if covers or any(abs(middle - other) * unit < 1.15 * size for other in taken.get(x, [])):
            drawn.append(None)
            continue
        taken.setdefault(x, []).append(middle)
        place: dict[str, Any] = {"xytext": (radius + 2.5, 0), "ha": "left", "va": "center_baseline"}
        if above:
            place = {"xytext": (0, radius + 1), "ha": "center", "va": "bottom"}
        drawn.append(ax.annotate(text, (x, y), textcoords="offset points", **{**AS_WRITTEN, **place, **kw}))
    return drawn
