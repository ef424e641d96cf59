"""ErrorDisplay: how far a kernel is from the reference, and how far it may be."""

from typing import Any, Self

import numpy as np

from ddtree_cupy.errors import ShapeError
from ddtree_cupy.viz import _base as c
from ddtree_cupy.viz._arguments import Arguments, Array, Floats
from ddtree_cupy.viz._base import Axes, Display


class ErrorDisplay(Display):
    """Absolute errors against the errors that the float rule allows, or as a map by node and head.

    Parameters
    ----------
    error : float array
        `|kernel - reference|`; NaN or inf where only one of the two is finite.
    allowed : float array that broadcasts to `error`
        The bound of every entry.
    rms_error, rms_allowed : float, optional
        The second part of the float rule, both or neither: root mean squares over the finite entries, shown in the
        legend. Without them, only the bounds of the entries are shown.
    bias, bias_allowed : float, optional
        The third part, of 16-bit floats, both or neither: the mean error away from zero in ulps, and the largest
        magnitude that it may have.

    Attributes
    ----------
    points_, failures_, diagonal_, legend_ : matplotlib objects
        Artists of kind "scatter": entries within their bound, entries beyond it (or None), and error = allowed.
    image_, marks_, colorbar_, legend_ : matplotlib objects
        Artists of kind "map": the ratio of error and bound, and a cross on every cell above 1 (or None). The legend
        is None if there are neither crosses nor root mean squares.

    Examples
    --------
    >>> reference = np.array([[1.0, 2.0], [3.0, 4.0]])
    >>> kernel = np.array([[1.0, 2.0], [3.0, 4.5]], np.float32)
    >>> display = ErrorDisplay.from_arrays(kernel, reference, reference.astype(np.float32), floor=1e-6)
    >>> display.num_failures, display.passes
    (1, False)
    >>> display.plot(kind="map").ax_.get_ylabel()
    'node'
    """

    def __init__(
        self,
        error: Array,
        allowed: Array,
        *,
        rms_error: float | None = None,
        rms_allowed: float | None = None,
        bias: float | None = None,
        bias_allowed: float | None = None,
    ) -> None:
        check = self._check()
        self.error = check.floats("error", error)
        bound = check.floats("allowed", allowed)
        if not self.error.size:
            raise check.error(f"`error` is {self.error.shape}, expected at least one entry", ShapeError)
        self.allowed = _broadcast(check, "allowed", bound, self.error, " like `error`")
        if (self.error < 0).any() or not (np.isfinite(self.allowed) & (self.allowed >= 0)).all():
            raise check.error("`error` or `allowed` holds values below 0, or `allowed` infinite ones")
        check.both_or_none(rms_error=rms_error, rms_allowed=rms_allowed)
        check.both_or_none(bias=bias, bias_allowed=bias_allowed)
        given = {"rms_error": rms_error, "rms_allowed": rms_allowed, "bias": bias, "bias_allowed": bias_allowed}
        self.rms_error, self.rms_allowed, self.bias, self.bias_allowed = (
            None if value is None else float(check.floats(argument, value, 0)) for argument, value in given.items()
        )

    @classmethod
    def from_judgement(cls, judgement: Any) -> Self:
        """Take the `Judgement` of `ddtree_cupy.testing.tolerance.judge`: its worst entry, and the other two parts.

        Parameters
        ----------
        judgement : Judgement
            It holds no other entries; `from_arrays` draws all of them.

        Examples
        --------
        >>> from ddtree_cupy.testing.tolerance import judge
        >>> judgement = judge([1.0, 2.25], [1.0, 2.0], [1.0, 2.0], floor=0.5)
        >>> display = ErrorDisplay.from_judgement(judgement)
        >>> display.num_failures, display.passes == judgement.passes
        (0, True)
        """
        check = cls._check("from_judgement")
        names = ("max_error", "max_allowed", "rms_error", "rms_allowed", "bias", "bias_allowed")
        check.result("judgement", judgement, "the Judgement of testing.tolerance.judge", *names)
        error, allowed, *others = (getattr(judgement, name) for name in names)
        return cls([error], [allowed], **dict(zip(names[2:], others, strict=True)))

    @classmethod
    def from_arrays(cls, actual: Array, reference: Array, baseline: Array, *, floor: Array) -> Self:
        """Apply the float rule to every entry, then to the root mean squares over the entries finite in `reference`.

        `|actual - reference| <= 2 max|baseline - reference| + floor`
        rms(actual - reference) <= 2 rms(baseline - reference) + floor / 4

        Parameters
        ----------
        actual : float array
            The result to judge.
        reference : float array of that shape
            The same result computed in float64 throughout.
        baseline : float array of that shape
            NumPy's result in the precision of the kernel.
        floor : float or array
            From `ddtree_cupy.testing.out_floor` or `lse_floor`.
        """
        check = cls._check("from_arrays")
        left, exact, base = (
            check.floats(argument, value)
            for argument, value in (("actual", actual), ("reference", reference), ("baseline", baseline))
        )
        for argument, array in (("actual", left), ("baseline", base)):
            if array.shape != exact.shape:
                raise check.error(f"`{argument}` is {array.shape}, expected {exact.shape} like `reference`", ShapeError)
        with np.errstate(invalid="ignore"):
            same = (left == exact) | (np.isnan(left) & np.isnan(exact))
            error = np.where(same, 0.0, np.abs(left - exact))
            finite = np.isfinite(exact)
            of_baseline = np.abs(base - exact)[finite]
        if not np.isfinite(base[finite]).all():
            raise check.error("`baseline` is not finite everywhere, expected that where `reference` is")
        margin = check.floats("floor", floor)
        margins = _broadcast(check, "floor", margin, exact)[finite]
        if not (np.isfinite(margins) & (margins >= 0)).all():
            raise check.error("`floor` holds values below 0 or infinite ones, expected finite ones from 0 on")
        rms_allowed = 2 * _rms(of_baseline) + _rms(margins) / 4
        bound = 2 * of_baseline.max(initial=0.0) + margin
        return cls(error, bound, rms_error=_rms(error[finite]), rms_allowed=rms_allowed)

    @property
    def failures(self) -> Any:
        """Which entries are beyond their bound, NaN included: a bool array."""
        return ~(self.error <= self.allowed)

    @property
    def num_failures(self) -> int:
        """Number of entries beyond their bound."""
        return int(self.failures.sum())

    @property
    def passes(self) -> bool:
        """Whether no entry is beyond its bound, and neither are root mean square and bias, if known."""
        return self.num_failures == 0 and all(value <= allowed for _, value, allowed in self._parts())

    def _parts(self) -> list[tuple[str, float, float]]:
        """Return name, value and bound of the other parts of the rule that are known and apply."""
        parts = []
        if self.rms_error is not None and self.rms_allowed is not None:
            parts.append(("RMS", self.rms_error, self.rms_allowed))
        if self.bias is not None and self.bias_allowed is not None and (self.bias or self.bias_allowed):
            parts.append(("|bias|", abs(self.bias), self.bias_allowed))
        return parts

    def ratios(self) -> Any:
        """Return float64 (N, H): the largest error over its bound of every node and head; inf where none is allowed.

        The first two axes are node and head; the maximum is taken over the others.
        """
        if self.error.ndim < 2:
            wanted = "expected (num_nodes, num_heads, ...)"
            raise self._check().error(f"`error` is {self.error.shape}, {wanted}", ShapeError)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(self.error == 0, 0.0, self.error / self.allowed)
        flat = np.where(np.isnan(ratio), np.inf, ratio).reshape(*self.error.shape[:2], -1)
        return flat.max(axis=2)

    def plot(self, ax: Axes = None, *, kind: str = "scatter", **kw: Any) -> Self:
        """Draw one of the two pictures.

        Parameters
        ----------
        kind : {"scatter", "map"}
            Error over allowed error, both logarithmic; or their ratio by node and head.
        **kw
            Options of `scatter` or `imshow`.
        """
        return self._draw(ax, kind, kw, scatter=self._plot_scatter, map=self._plot_map)

    def _plot_scatter(self, ax: Axes, kw: dict[str, Any]) -> None:
        ax = self._on_axes(ax, 4.6, 4.2)
        error, allowed, failed = self.error.ravel(), self.allowed.ravel(), self.failures.ravel()
        finite = np.isfinite(error)
        both = np.concatenate([error[finite], allowed])
        low, high = (both[both > 0].min() if (both > 0).any() else 1.0) / 4, both.max() * 4 or 1.0
        shown = np.where(finite, np.clip(error, low, None), high)  # exact entries on the lower edge, NaN on the upper
        bound = np.clip(allowed, low, None)
        passing = ~failed
        looks = {"s": 10 if error.size <= 2000 else 3, "alpha": 0.5, "lw": 0, **kw}
        note = f"within its bound: {int(passing.sum()):,}"
        self.points_ = ax.scatter(bound[passing], shown[passing], **{"color": c.BLUE, "label": note, **looks})
        self.failures_ = None
        if failed.any():
            crosses = {"color": c.VERMILLION, "marker": "x", "s": 28, "lw": 1.3, "zorder": 3}
            note = f"beyond it: {int(failed.sum()):,}"
            self.failures_ = ax.scatter(bound[failed], shown[failed], label=note, **crosses)
        ends = [low / 2, high * 2]
        self.diagonal_ = ax.plot(ends, ends, color=c.DARK, lw=1, ls="--", label="error = allowed")[0]
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlim(bound.min() / 4, bound.max() * 4)
        ax.set_ylim(*ends)
        self._name_axes("allowed error (unit of the output)", "|kernel - reference| (exact on the lower edge)")
        self.legend_ = c.legend_above(ax, [*ax.get_legend_handles_labels()[0], *self._notes()], columns=2)

    def _notes(self) -> list[Any]:
        """Return legend entries without a marker that have the other parts of the rule."""
        from matplotlib.lines import Line2D

        notes = []
        for name, value, allowed in self._parts():
            sign, verdict = ("<=", "passes") if value <= allowed else (">", "fails")
            notes.append(Line2D([], [], ls="", label=f"{name} {value:.2g} {sign} {allowed:.2g}: {verdict}"))
        return notes

    def _plot_map(self, ax: Axes, kw: dict[str, Any]) -> None:
        ratios = self.ratios()
        height, width = (float(np.clip(1.6 + 0.2 * n, 2.6, 7.0)) for n in ratios.shape)
        ax = self._on_axes(ax, width + 1.6, height)
        options = {"cmap": c.SCORES, "vmin": 0, "vmax": 1, "aspect": "auto", "interpolation": "nearest", **kw}
        self.image_ = ax.imshow(np.minimum(ratios, 2.0), **options)
        nodes, heads = np.nonzero(ratios > 1)
        self.marks_ = None
        if nodes.size:
            note = f"above 1: {nodes.size:,}"
            self.marks_ = ax.scatter(heads, nodes, marker="x", color=c.VERMILLION, s=24, lw=1.6, label=note)
        handles = [*([] if self.marks_ is None else [self.marks_]), *self._notes()]
        self.legend_ = c.legend_above(ax, handles, columns=2) if handles else None
        ax.set_xlabel("head")
        ax.set_ylabel("node")
        for axis in (ax.xaxis, ax.yaxis):
            axis.get_major_locator().set_params(integer=True)
        self.colorbar_ = c.color_bar(ax, self.image_, "largest error / allowed error", extend="max")


def _broadcast(check: Arguments, name: str, array: Floats, to: Floats, like: str = "") -> Floats:
    try:
        return np.broadcast_to(array, to.shape)
    except ValueError:
        wanted = f"expected to broadcast to {to.shape}{like}"
        raise check.error(f"`{name}` is {array.shape}, {wanted}", ShapeError) from None


def _rms(values: Floats) -> float:
    """Return the root mean square without overflow; inf once a value is not finite."""
    scale = float(np.abs(values).max(initial=0.0))
    if not np.isfinite(scale):
        return float("inf")
    return scale * float(np.sqrt(np.mean(np.square(values / scale)))) if scale > 0 else 0.0
