"""What the displays share: colours, a new Axes, one request of a batch, and checks that name the argument."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import Checker, library_of, refuse_odd_array
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError

Array = Any
Axes = Any
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

# Okabe and Ito's set, which people with any colour vision can tell apart
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY, PALE, DARK = "#999999", "#E6E6E6", "#444444"
CYCLE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")  # one more than colors: the pairs differ for 56 lines
SCORES = "cividis"  # for what has an order

# Options of every matplotlib Text that shows a caller's words: `$` is a character, and no setting makes it TeX
AS_WRITTEN = {"parse_math": False, "usetex": False}


def new_axes(ax: Axes, width: float, height: float) -> Axes:
    """Return `ax`, or the Axes of a new figure of this size in inches."""
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        message = "pictures need matplotlib, the extra `viz`: pip install 'matplotlib>=3.9'"
        raise ModuleNotFoundError(message, name="matplotlib") from error
    return plt.subplots(figsize=(width, height), layout="constrained")[1]


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


def legend_above(ax: Axes, handles: Sequence[Any], columns: int = 4) -> Any:
    """Put a legend without a frame on top of an Axes, where no data can lie under it."""
    legend = ax.legend(
        handles=handles,
        labels=[handle.get_label() for handle in handles],  # given, so that one with a leading underscore is kept
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
    """Write (x, y, text, above) beside markers of `radius` points, earlier ones first, and skip what has no room.

    `above` writes over the marker, unless another marker is there, else to its right. Returns one Text an entry, or
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


def on_host(function: str, name: str, array: Array) -> npt.NDArray[Any]:
    """Return a NumPy array; one on a GPU is copied."""
    refuse_odd_array(function, name, array)
    try:
        return np.asarray(array.get() if library_of(array) == "cupy" else array)
    except (TypeError, ValueError) as error:
        kind = ShapeError if isinstance(error, ValueError) else DTypeError
        raise kind(
            f"{function}: `{name}` is {type(array).__name__}, expected an array or even lists ({error})"
        ) from None


def integers(function: str, name: str, value: Array, ndim: int = 1) -> Integers:
    """Return `value` as int64 with `ndim` axes."""
    array = on_host(function, name, value)
    if array.size and array.dtype.kind not in "iu":
        raise DTypeError(f"{function}: `{name}` has dtype {array.dtype}, expected integers")
    return _with_axes(function, name, array, ndim).astype(np.int64)


def floats(function: str, name: str, value: Array, ndim: int | None = None) -> Floats:
    """Return `value` as float64, with `ndim` axes unless None."""
    array = on_host(function, name, value)
    if array.dtype.kind in "bOSUc" or (array.dtype.kind == "V" and array.dtype.name != "bfloat16"):
        raise DTypeError(f"{function}: `{name}` has dtype {array.dtype}, expected real numbers")
    return _with_axes(function, name, array, ndim).astype(np.float64)


def _with_axes(function: str, name: str, array: npt.NDArray[Any], ndim: int | None) -> npt.NDArray[Any]:
    if ndim is not None and array.ndim != ndim:
        raise ShapeError(f"{function}: `{name}` is {array.shape}, expected {ndim} axes")
    return array


def same_length(function: str, expected: int, of: str, /, **arrays: Any) -> None:
    """Check that all `arrays` (None skipped) have as many entries as `of`."""
    for name, array in arrays.items():
        if array is not None and len(array) != expected:
            raise ShapeError(f"{function}: `{name}` has {len(array)} entries, expected {expected} like `{of}`")


def pick_request(function: str, request: int | None, batch: int | None) -> int | None:
    """Return `request` when it fits: None without a batch, else an index into it (0 may be left out for one)."""
    if batch is None:
        if request is not None:
            raise ArgumentError(f"{function}: `request` is {request}, expected None without a request axis")
        return None
    if request is None and batch == 1:
        return 0
    if request is None:
        raise ArgumentError(f"{function}: `request` is None, expected 0..{batch - 1} to pick one of the batch")
    return Checker(function).integer("request", request, low=0, high=batch - 1)


def container(function: str, name: str, value: Any, *kinds: type) -> None:
    """Check that `value` is one of these containers."""
    if not isinstance(value, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise DTypeError(f"{function}: `{name}` is {type(value).__name__}, expected {wanted}")


def one_request(function: str, name: str, value: Any, request: int | None, *kinds: type) -> Any:
    """Return the host container of one request, its arrays without the request axis; a tree must have nodes."""
    container(function, name, value, *kinds)
    first = next(array for array in vars(value).values() if array is not None)
    chosen = pick_request(function, request, first.shape[0] if value.is_batched else None)
    host = value._on_host()
    one = host if chosen is None else host._map(lambda array: array[chosen, ...])
    if getattr(one, "num_nodes", 1) == 0:
        raise ArgumentError(f"{function}: `{name}` has no nodes (an inactive request)")
    return one


def row_of(function: str, name: str, value: Array, request: int | None, batch: int | None) -> Integers:
    """Return one request's row of an integer array that has a request axis when the tree has."""
    array = integers(function, name, value, 1 if batch is None else 2)
    chosen = pick_request(function, request, batch)
    if chosen is None:
        return array
    if len(array) != batch:
        raise ShapeError(f"{function}: `{name}` is {array.shape}, expected {batch} requests like `tree`")
    return array[chosen, :]
