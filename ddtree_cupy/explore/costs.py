"""Cost models: microseconds of a verification pass over n nodes besides the root."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ddtree_cupy.errors import ArgumentError

__all__ = ["SHIPPED_COSTS", "CostModel", "CostTable", "LinearCost", "MeasuredCost", "SumCost", "UserCost"]

SHIPPED_COSTS = Path(__file__).parent / "data" / "tree_attention_costs.json"

FORMAT = "ddtree-costs-1"
COLUMNS = ("heads", "nodes", "context", "microseconds")
_ABOUT = ("variant", "gpu", "date", "command", "dtype", "batch", "timing")
LAUNCH_US = 5.0  # what remains of a call that computes nothing: the launch gap between two events


class CostModel:
    """Base of the cost models: call with n, nodes besides the root, to get microseconds; `+` adds two models."""

    def __call__(self, nodes: int) -> float:
        """Return the microseconds of a pass.

        Parameters
        ----------
        nodes : int
            Besides the root: 0 is plain autoregressive decoding.
        """
        raise NotImplementedError

    def array(self, most: int) -> npt.NDArray[np.float64]:
        """Return the costs of 0 .. most nodes.

        Parameters
        ----------
        most : int
        """
        return np.array([self(nodes) for nodes in range(most + 1)])

    def __add__(self, other: "CostModel") -> "SumCost":
        return SumCost((self, other))


@dataclass(frozen=True)
class SumCost(CostModel):
    """The sum of several models: say, attention, the other layers, the drafter.

    Attributes
    ----------
    parts : tuple of CostModel
    """

    parts: tuple[CostModel, ...]

    def __call__(self, nodes: int) -> float:
        """Return the microseconds of a pass; see `CostModel`."""
        return sum(part(nodes) for part in self.parts)


@dataclass(frozen=True)
class LinearCost(CostModel):
    """A fixed part and a part for every node, the root included.

    Attributes
    ----------
    fixed_us, per_node_us : float

    Examples
    --------
    >>> (LinearCost(40.0, 1.0) + LinearCost(2.0, 0.0))(7)
    50.0
    """

    fixed_us: float
    per_node_us: float

    def __call__(self, nodes: int) -> float:
        """Return the microseconds of a pass; see `CostModel`."""
        return self.fixed_us + self.per_node_us * (nodes + 1)


@dataclass(frozen=True)
class UserCost(CostModel):
    """Your own measurements, linear in between; nothing is guessed outside them.

    Attributes
    ----------
    nodes : tuple of int
        Besides the root, rising.
    microseconds : tuple of float

    Examples
    --------
    >>> UserCost((0, 64), (100.0, 164.0))(16)
    116.0
    """

    nodes: tuple[int, ...]
    microseconds: tuple[float, ...]

    def __post_init__(self) -> None:
        nodes, times = np.asarray(self.nodes), np.asarray(self.microseconds, np.float64)
        if nodes.ndim != 1 or nodes.shape != times.shape or nodes.size == 0 or (np.diff(nodes) <= 0).any():
            raise ArgumentError("UserCost: `nodes` must rise and have one of `microseconds` each")
        if not (np.isfinite(times).all() and (times > 0).all()):
            raise ArgumentError("UserCost: `microseconds` must be positive and finite")

    def __call__(self, nodes: int) -> float:
        """Return the microseconds of a pass; see `CostModel`."""
        if not self.nodes[0] <= nodes <= self.nodes[-1]:
            raise ArgumentError(f"UserCost: {nodes} nodes lie outside {self.nodes[0]}..{self.nodes[-1]}, as measured")
        return float(np.interp(nodes, self.nodes, self.microseconds))


@dataclass(frozen=True)
class CostTable:
    """Measured times of one kernel on one GPU.

    Attributes
    ----------
    rows : tuple of (heads, nodes, context, microseconds)
        Nodes count the root here, as in the benchmark.
    about : dict of str to str
        Kernel `variant`, `gpu`, `date`, the `command` that remakes it, and `dtype`, `batch`, `timing`.

    Examples
    --------
    >>> table = CostTable.load()
    >>> table.about["variant"], table.about["command"]
    ('v2_split_kv', 'python -m ddtree_cupy.bench tree_attention')
    """

    rows: tuple[tuple[int, int, int, float], ...]
    about: dict[str, str]

    def __post_init__(self) -> None:
        missing = [name for name in _ABOUT if not self.about.get(name)]
        if missing:
            raise ArgumentError(f"CostTable: `about` lacks {', '.join(missing)}")
        numbers = np.array(self.rows, np.float64)
        if numbers.ndim != 2 or numbers.shape[1] != len(COLUMNS) or not (numbers > 0).all():
            raise ArgumentError(f"CostTable: `rows` must hold positive {', '.join(COLUMNS)}, at least one row")
        if len({row[:3] for row in self.rows}) != len(self.rows):
            raise ArgumentError("CostTable: `rows` measures one (heads, nodes, context) twice")

    @classmethod
    def load(cls, path: str | Path = SHIPPED_COSTS) -> Self:
        """Read a table; by default the shipped one.

        Parameters
        ----------
        path : str or path
        """
        data = json.loads(Path(path).read_text())
        if not isinstance(data, dict) or data.get("format") != FORMAT or tuple(data.get("columns", ())) != COLUMNS:
            raise ArgumentError(f"{path}: not a cost table of format {FORMAT}")
        rows = tuple((int(h), int(n), int(t), float(us)) for h, n, t, us in data["rows"])
        return cls(rows, {name: str(data["about"].get(name, "")) for name in data["about"]})

    def save(self, path: str | Path) -> None:
        """Write the table as JSON, one row a line.

        Parameters
        ----------
        path : str or path
        """
        about = json.dumps(self.about, indent=2).replace("\n", "\n  ")
        rows = ",\n    ".join(json.dumps(row) for row in sorted(self.rows))
        columns = json.dumps(COLUMNS)
        head = f'"format": "{FORMAT}",\n  "about": {about},\n  "columns": {columns}'
        Path(path).write_text(f'{{\n  {head},\n  "rows": [\n    {rows}\n  ]\n}}\n')

    @classmethod
    def from_bench(cls, report: dict[str, Any], variant: str) -> Self:
        """Take the times of one variant at batch 1 from what ``python -m ddtree_cupy.bench --json`` printed.

        Parameters
        ----------
        report : dict
        variant : str
        """
        rows = []
        for row in report["rows"]:
            if row["op"] == "tree_attention" and row["variant"] == variant and "event_us" in row:
                fields = str(row["name"]).split()
                sizes = dict(zip(fields[::2], map(int, fields[1::2]), strict=True))
                if sizes["B"] == 1:
                    rows.append((sizes["H"], sizes["N"], sizes["T"], float(row["event_us"])))
        environment = report["environment"]
        about = {name: str(environment[name]) for name in ("gpu", "date", "command")}
        return cls(tuple(rows), {"variant": variant, **about, "dtype": "bfloat16", "batch": "1", "timing": "event"})


@dataclass(frozen=True)
class MeasuredCost(CostModel):
    """A table read at some number of heads and some context: linear between measured sizes.

    Attributes
    ----------
    table : CostTable
    heads, context : int
    layers : int
        The pass has this many attention layers.
    extrapolate : bool
        False refuses sizes outside the measured ones. True scales the nearest measured time, less a launch gap of
        5 us, in proportion: right for a kernel that is bound by arithmetic, too low for small trees on tensor cores.

    Examples
    --------
    >>> cost = MeasuredCost(CostTable.load(), heads=64, context=8192)
    >>> cost(63)
    4563.5
    """

    table: CostTable
    heads: int
    context: int
    layers: int = 1
    extrapolate: bool = False

    def __call__(self, nodes: int) -> float:
        """Return the microseconds of a pass; see `CostModel`."""
        found = self._at(list(self.table.rows), (self.heads, self.context, nodes + 1))
        if found is None:
            sizes = [sorted({row[column] for row in self.table.rows}) for column in (0, 1, 2)]
            raise ArgumentError(
                f"MeasuredCost: heads {self.heads}, nodes {nodes + 1} (with root), context {self.context} lie outside "
                f"the measured heads {sizes[0]}, nodes {sizes[1]}, contexts {sizes[2]}; measure more with "
                f"`{self.table.about['command']}`, or pass extrapolate=True"
            )
        return self.layers * found

    def _at(self, rows: Sequence[tuple[int, int, int, float]], point: tuple[int, ...]) -> float | None:
        """Interpolate over heads, then context, then nodes; None outside of what was measured."""
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
