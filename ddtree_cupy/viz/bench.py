"""BenchDisplay: measured times over the context length, and the same runs under the roofline."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from ddtree_cupy.viz import _base as c
from ddtree_cupy.viz._arguments import Array
from ddtree_cupy.viz._base import Axes, Display

_POSITIVE = ("contexts", "times_us", "low_us", "high_us", "flops", "bytes_moved")
_TIMED = ("event_us", "low_us", "high_us", "tflops", "bytes")  # of every timed row of a report


class BenchDisplay(Display):
    """Measured runs of several kernel versions, one entry per run.

    Parameters
    ----------
    versions : sequence of str, shape (n,)
        The name of the line of each run: a kernel version, or version and shape.
    contexts : float array, shape (n,)
        Keys in the cache.
    times_us : float array, shape (n,)
        Medians in microseconds.
    low_us, high_us : float array, shape (n,), optional
        The 20th and the 80th percentile, both or neither.
    flops, bytes_moved : float array, shape (n,), optional
        Operations of a run and the fewest bytes that it must move; both are needed for the roofline.
    peak_flops_per_second, peak_bytes_per_second : float, optional
        The rates that the card reaches; both are needed for the roofline.

    Attributes
    ----------
    legend_ : matplotlib object
    lines_ : dict of str to Line2D
        One per version.
    bands_ : list
        The 20 to 80 % intervals of kind "time".
    roof_ : Line2D
        The roof of kind "roofline".

    Examples
    --------
    >>> display = BenchDisplay.from_arrays(["v1", "v1", "v2", "v2"], [1024, 8192, 1024, 8192], [90, 700, 60, 410])
    >>> sorted(display.plot().lines_)
    ['v1', 'v2']
    """

    def __init__(
        self,
        versions: Sequence[str],
        contexts: Array,
        times_us: Array,
        *,
        low_us: Array | None = None,
        high_us: Array | None = None,
        flops: Array | None = None,
        bytes_moved: Array | None = None,
        peak_flops_per_second: float | None = None,
        peak_bytes_per_second: float | None = None,
    ) -> None:
        check = self._check()
        self.versions = [str(version) for version in versions]
        if not self.versions:
            raise check.error("`versions` is empty, expected at least one run")
        given = (contexts, times_us, low_us, high_us, flops, bytes_moved)
        arrays = {
            argument: None if value is None else check.floats(argument, value, 1)
            for argument, value in zip(_POSITIVE, given, strict=True)
        }
        check.same_length("versions", self.versions, **arrays)
        for argument, array in arrays.items():
            if array is not None:
                check.positive(argument, array)
        self.contexts: Any = arrays["contexts"]
        self.times_us: Any = arrays["times_us"]
        self.low_us, self.high_us = arrays["low_us"], arrays["high_us"]
        self.flops, self.bytes_moved = arrays["flops"], arrays["bytes_moved"]
        check.both_or_none(low_us=low_us, high_us=high_us)
        peaks = {"peak_flops_per_second": peak_flops_per_second, "peak_bytes_per_second": peak_bytes_per_second}
        for argument, peak in peaks.items():
            if peak is not None:
                check.real(argument, peak, above=0)
        self.peak_flops_per_second, self.peak_bytes_per_second = peak_flops_per_second, peak_bytes_per_second

    @classmethod
    def from_report(cls, report: Mapping[str, Any], *, op: str = "tree_attention") -> Self:
        """Take the output of `python -m ddtree_cupy.bench --json`: the timed rows of one op whose name ends in "T n".

        Parameters
        ----------
        report : mapping
            It has "rows" and, for the roofline, "yardstick_before".
        op : str
            Rows of other ops are left out, and rows that failed their gate or were refused.
        """
        check = cls._check("from_report")
        check.kind("report", report, Mapping)
        rows = []
        for row in report.get("rows", ()):
            check.kind("report['rows']", row, Mapping)
            found = re.fullmatch(r"(.*) T (\d+)", row.get("name", ""))
            if row.get("op") == op and not {"failed", "refused"} & row.keys() and found:
                missing = [key for key in ("variant", *_TIMED) if key not in row]
                if missing:
                    raise check.error(f"`report` has no {missing[0]!r} in row {row['name']!r}, expected one")
                rows.append((f"{row['variant']}, {found[1]}", int(found[2]), row))
        if not rows:
            raise check.error(f"`report` has no timed row of {op} whose name ends in T n")
        peaks = report.get("yardstick_before", {})
        timed = {key: check.floats(key, [row[key] for *_, row in rows], 1) for key in _TIMED}
        return cls(
            [version for version, *_ in rows],
            [context for _, context, _ in rows],
            timed["event_us"],
            low_us=timed["low_us"],
            high_us=timed["high_us"],
            flops=1e6 * timed["tflops"] * timed["event_us"],
            bytes_moved=timed["bytes"],
            peak_flops_per_second=peaks.get("matmul_flops_per_second"),
            peak_bytes_per_second=peaks.get("copy_bytes_per_second"),
        )

    def plot(self, ax: Axes = None, *, kind: str = "time", **kw: Any) -> Self:
        """Draw one of the two pictures.

        Parameters
        ----------
        kind : {"time", "roofline"}
            Microseconds over the context; or operations per second over operations per byte, below the rates of the
            card.
        **kw
            Options of every line.
        """
        self._check("plot").choice("kind", kind, ("time", "roofline"))
        if kind == "roofline":
            needed = ("flops", "bytes_moved", "peak_flops_per_second", "peak_bytes_per_second")
            missing = [argument for argument in needed if getattr(self, argument) is None]
            if missing:
                raise self._check("plot").error(f"`{missing[0]}` is None, expected a value for the roofline")
        ax = self._on_axes(ax, 5.6, 3.8)
        self.bands_: list[Any] = []
        self.lines_ = self._plot_times(ax, kw) if kind == "time" else self._plot_roofline(ax, kw)
        columns = 3 if max(map(len, self.versions)) < 18 else 2
        handles = [*self.lines_.values(), *([self.roof_] if kind == "roofline" else [])]
        self.legend_ = c.legend_above(ax, handles, columns)
        return self

    def _each(self) -> list[tuple[str, Any, dict[str, Any]]]:
        """Return (version, indices by context, line style) in order of first appearance."""
        order = list(dict.fromkeys(self.versions))
        names = np.array(self.versions)
        groups = []
        for number, version in enumerate(order):
            chosen = np.flatnonzero(names == version)
            style = {"color": c.CYCLE[number % len(c.CYCLE)], "marker": c.MARKERS[number % len(c.MARKERS)]}
            groups.append((version, chosen[np.argsort(self.contexts[chosen], kind="stable")], style))
        return groups

    def _plot_times(self, ax: Axes, kw: dict[str, Any]) -> dict[str, Any]:
        lines = {}
        for version, runs, style in self._each():
            options = {"ms": 5, "lw": 1.5, "label": version, **style, **kw}
            lines[version] = ax.plot(self.contexts[runs], self.times_us[runs], **options)[0]
            if self.low_us is not None and self.high_us is not None:
                ends = self.low_us[runs], self.high_us[runs]
                self.bands_.append(ax.fill_between(self.contexts[runs], *ends, color=style["color"], alpha=0.2, lw=0))
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.xaxis.set_major_formatter("{x:,.0f}")
        self._name_axes("context length (tokens)", "time (µs, median)", grid=True)
        return lines

    def _plot_roofline(self, ax: Axes, kw: dict[str, Any]) -> dict[str, Any]:
        flops, moved = np.asarray(self.flops), np.asarray(self.bytes_moved)
        most_flops, most_bytes = float(self.peak_flops_per_second or 0), float(self.peak_bytes_per_second or 0)
        intensity, rate = flops / moved, 1e-6 * flops / self.times_us
        ridge = most_flops / most_bytes
        ends = np.array([min(intensity.min(), ridge) / 2, ridge, max(intensity.max(), ridge) * 2])
        roof = 1e-12 * np.minimum(ends * most_bytes, most_flops)
        peaks = f"{most_bytes / 1e12:.2f} TB/s, {most_flops / 1e12:.0f} TFLOP/s"
        self.roof_ = ax.plot(ends, roof, color=c.DARK, lw=2, label=f"roof: {peaks}")[0]
        lines = {}
        for version, runs, style in self._each():
            options = {"ms": 6, "ls": ":", "lw": 0.8, "label": version, **style, **kw}
            lines[version] = ax.plot(intensity[runs], rate[runs], **options)[0]
        ax.set_xscale("log")
        ax.set_yscale("log")
        self._name_axes("operations per byte (FLOP/B)", "rate (TFLOP/s)", grid=True)
        return lines
