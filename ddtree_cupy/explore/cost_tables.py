"""Cost tables: measured times of one kernel, and the cost model that reads them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from ddtree_cupy._check import Checker
from ddtree_cupy._files import read_json, written_whole
from ddtree_cupy._terminal import escaped
from ddtree_cupy.bench import measurements
from ddtree_cupy.errors import ArgumentError, DTypeError, WeightsError
from ddtree_cupy.explore.costs import CostModel, cost_of
from ddtree_cupy.tree_attention.versions import VERSIONS

__all__ = ["CostTable", "MeasuredCost", "checked_cost"]

FORMAT = "ddtree-costs-1"
COLUMNS = ("heads", "nodes", "context", "microseconds")  # of the file; `nodes` counts the root
_ABOUT = ("variant", "gpu", "date", "command", "dtype", "batch", "timing")
LAUNCH_US = 5.0  # time of a call that computes nothing: the launch gap between two events


@dataclass(frozen=True)
class CostTable:
    """Measured times of one kernel on one GPU.

    Attributes
    ----------
    rows : tuple of (heads, num_nodes, context, microseconds)
        `num_nodes` counts the root, as in the benchmark.
    about : dict of str to str
        Kernel `variant`, `gpu`, `date`, the `command` that makes it again, and `dtype`, `batch`, `timing`.

    Notes
    -----
    The shipped table is the newest measurement of one layer's `tree_attention` on an H200, for 1 to 257 nodes, 8 and 64
    heads, 8,192 and 131,072 keys of context. The other parts of a pass, above all reading the weights, are not in it:
    add a `LinearCost` for them.

    Examples
    --------
    >>> table = CostTable.load()
    >>> table.about["gpu"], len(table.rows)
    ('NVIDIA H200', 64)
    """

    rows: tuple[tuple[int, int, int, float], ...]
    about: dict[str, str]

    def __post_init__(self) -> None:
        missing = [name for name in _ABOUT if not self.about.get(name)]
        if missing:
            raise ArgumentError(f"CostTable: `about` lacks {', '.join(missing)}")
        wrong = [name for name, value in self.about.items() if not isinstance(value, str)]
        if wrong:
            raise ArgumentError(f"CostTable: `about` has a {wrong[0]} that is not a string")
        check, wanted = Checker("CostTable"), "heads, num_nodes, context, microseconds"
        if not self.rows or any(not isinstance(row, tuple) or len(row) != len(COLUMNS) for row in self.rows):
            raise ArgumentError(f"CostTable: `rows` must hold tuples of {wanted}, at least one row")
        for at, (*sizes, microseconds) in enumerate(self.rows):
            for size in sizes:
                if check.integer(f"rows[{at}]", size, low=1) >= 2**31:
                    raise ArgumentError(f"CostTable: `rows[{at}]` is {size}, expected sizes below 2**31")
            check.real(f"rows[{at}]", microseconds, above=0.0)
        if len({row[:3] for row in self.rows}) != len(self.rows):
            raise ArgumentError("CostTable: `rows` measures one (heads, nodes, context) twice")

    def __repr__(self) -> str:
        about = ", ".join(escaped(self.about[name]) for name in ("variant", "gpu", "date"))
        return f"CostTable({about}, rows={len(self.rows)})"

    @classmethod
    def load(cls, path: str | Path | None = None) -> Self:
        """Read a table; by default the shipped one, of the kernel version that "auto" prefers.

        Parameters
        ----------
        path : str or path, optional

        Raises
        ------
        WeightsError
            The file is missing, not JSON, or holds something else.
        """
        if path is None:
            report = measurements.load("tree_sizes")
            timed = {row["variant"] for row in report["rows"] if "event_us" in row}
            return cls.from_bench(report, next(name for name in VERSIONS if name in timed), dtype="bfloat16")
        try:
            data = read_json(path)
        except OSError as error:
            raise WeightsError(f"{path}: no such cost table ({error.strerror})") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("columns") != list(COLUMNS):
            raise WeightsError(f"{path}: not a cost table of format {FORMAT}")
        rows, about = data.get("rows"), data.get("about")
        if not isinstance(rows, list) or not isinstance(about, dict):
            raise WeightsError(f"{path}: truncated or altered, lacks `rows` or `about`")
        try:
            kept = tuple(tuple(row) if isinstance(row, list) else row for row in rows)
            return cls(kept, about)
        except (ValueError, TypeError) as error:
            raise WeightsError(f"{path}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the table as JSON, one row per line.

        Parameters
        ----------
        path : str or path
        """
        about = json.dumps(self.about, indent=2).replace("\n", "\n  ")
        rows = ",\n    ".join(json.dumps(row) for row in sorted(self.rows))
        columns = json.dumps(COLUMNS)
        head = f'"format": "{FORMAT}",\n  "about": {about},\n  "columns": {columns}'
        with written_whole(path) as stream:
            stream.write(f'{{\n  {head},\n  "rows": [\n    {rows}\n  ]\n}}\n'.encode())

    @classmethod
    def from_bench(cls, report: dict[str, Any], variant: str, *, dtype: str) -> Self:
        """Take the times of one variant at batch 1 from the output of ``python -m ddtree_cupy.bench --json``.

        Parameters
        ----------
        report : dict
        variant : str
        dtype : str
            Of queries and cache, which is not in the report. The cases of the benchmark are bfloat16.

        Raises
        ------
        ArgumentError
            The report is not one of the benchmark, or has no such row.
        """
        rows = []
        try:
            for row in report["rows"]:
                if row["op"] == "tree_attention" and row["variant"] == variant and "event_us" in row:
                    fields = str(row["name"]).split()
                    sizes = dict(zip(fields[::2], map(int, fields[1::2]), strict=True))
                    if sizes["B"] == 1:
                        rows.append((sizes["H"], sizes["N"], sizes["T"], round(float(row["event_us"]), 1)))
            about = {name: str(report["environment"][name]) for name in ("gpu", "date", "command")}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ArgumentError(
                f"CostTable.from_bench: `report` is not what `python -m ddtree_cupy.bench --json` prints ({what})"
            ) from error
        if not rows:
            raise ArgumentError(f"CostTable.from_bench: `variant` is {variant!r}, expected one with rows at batch 1")
        remake = f"ddtree explore costs report.json --variant {variant} --dtype {dtype}"
        about["command"] += f" --json > report.json && {remake}"
        return cls(tuple(rows), {"variant": variant, **about, "dtype": dtype, "batch": "1", "timing": "event"})


@dataclass(frozen=True)
class MeasuredCost(CostModel):
    """A table read at one number of heads and one context, linear between measured sizes.

    Attributes
    ----------
    table : CostTable
    heads, context : int
    layers : int
        Attention layers of a pass.
    extrapolate : bool
        False refuses sizes outside the measured ones. True scales the nearest measured time, without a launch gap of
        5 us, in proportion to the size. That is right for a kernel that is limited by arithmetic, and too low for
        small trees on tensor cores.

    Examples
    --------
    >>> cost = MeasuredCost(CostTable.load(), heads=64, context=8192)
    >>> 1 < cost(64) / cost(0) < 10  # 65 nodes cost more than one, and far less than 65 times as much
    True
    """

    table: CostTable
    heads: int
    context: int
    layers: int = 1
    extrapolate: bool = False

    def __post_init__(self) -> None:
        check = Checker("MeasuredCost")
        check.kind("table", self.table, CostTable)
        for name, low in (("heads", 1), ("context", 0), ("layers", 1)):
            check.integer(name, getattr(self, name), low=low)

    def __call__(self, budget: int) -> float:
        """Return the microseconds of a pass; see `CostModel`."""
        found = self._at(list(self.table.rows), (self.heads, self.context, budget + 1))
        if found is None:
            sizes = [sorted({row[column] for row in self.table.rows}) for column in (0, 1, 2)]
            raise ArgumentError(
                f"MeasuredCost: heads {self.heads}, nodes {budget + 1} (with root), context {self.context} lie outside "
                f"the measured heads {sizes[0]}, nodes {sizes[1]}, contexts {sizes[2]}; measure more with "
                f"`{self.table.about['command']}`, or pass extrapolate=True"
            )
        return self.layers * found

    def _at(self, rows: Sequence[tuple[int, int, int, float]], point: tuple[int, ...]) -> float | None:
        """Interpolate over heads, then context, then nodes; None outside the measured sizes."""
        column = {3: 0, 2: 2, 1: 1}[len(point)]
        known: dict[int, float] = {}
        for size in sorted({int(row[column]) for row in rows}):
            inside = [row for row in rows if row[column] == size]
            time = inside[0][3] if len(point) == 1 else self._at(inside, point[1:])
            if time is not None:
                known[size] = time
        if not known:
            return None
        sizes, times, wanted = list(known), list(known.values()), point[0]
        if sizes[0] <= wanted <= sizes[-1]:
            return float(np.interp(wanted, sizes, times))
        if not self.extrapolate:
            return None
        edge, time = (sizes[0], times[0]) if wanted < sizes[0] else (sizes[-1], times[-1])
        launch = min(LAUNCH_US, time)
        return launch + (time - launch) * wanted / edge


def checked_cost(function: str, cost: Any) -> Callable[[int], float]:
    """Return the cost that an argument gives, a function with a positive value at 0 nodes besides the root.

    Parameters
    ----------
    function : str
        The caller, for messages.
    cost : callable or CostTable
        A cost model, any function of the nodes besides the root, or a table of one number of heads and one context.
    """
    if isinstance(cost, CostTable):
        heads, contexts = sorted({row[0] for row in cost.rows}), sorted({row[2] for row in cost.rows})
        if len(heads) > 1 or len(contexts) > 1:
            raise ArgumentError(
                f"{function}: `cost` is a CostTable of heads {heads} and contexts {contexts}, expected one of each: "
                f"MeasuredCost(table, heads={heads[0]}, context={contexts[0]}), plus a LinearCost for the other layers"
            )
        cost = MeasuredCost(cost, heads[0], contexts[0])
    if not callable(cost) or isinstance(cost, type):
        what = f"the class {cost.__name__}" if isinstance(cost, type) else type(cost).__name__
        raise DTypeError(
            f"{function}: `cost` is {what}, expected a cost model or a function of the nodes besides the root, such as "
            f"LinearCost(40.0, 1.0)"
        )
    cost_of(function, cost, 0)
    return cost  # type: ignore[no-any-return]
