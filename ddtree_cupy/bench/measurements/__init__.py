"""Measurements of the benchmark, kept as data in this folder.

A file ``<card>_<date>.json`` holds one report for each grid of cases that was measured on that card and day: "main",
"tree_sizes" (what explore's cost table is made of) and "curves". A report has the environment of its run, what the card
reached before, between and after the cases (its yardsticks), and one row for each case: times in microseconds, rounded
to nanoseconds, bytes and operations. Rates are derived from these when a report is read.
"""

import json
import re
from pathlib import Path
from typing import Any

from ddtree_cupy._files import read_json, written_whole
from ddtree_cupy.errors import ArgumentError, WeightsError

FOLDER = Path(__file__).parent
FORMAT = "ddtree-bench-1"
GRIDS = ("main", "tree_sizes", "curves")
GPU = "NVIDIA H200"  # the card of the README

Report = dict[str, Any]


def load(grid: str = "main", *, gpu: str = GPU, folder: str | Path = FOLDER) -> Report:
    """Return the newest report of a grid as ``python -m ddtree_cupy.bench --json`` prints it.

    Parameters
    ----------
    grid : {"main", "tree_sizes", "curves"}
    gpu : str
        Its name, as the environment of a report has it.
    folder : path
        Where ``--save`` has written; by default the measurements of the library.
    """
    if grid not in GRIDS:
        raise ArgumentError(f"measurements.load: `grid` is {grid!r}, expected one of {', '.join(GRIDS)}")
    kept = [_read(path) for path in sorted(Path(folder).glob("*_[0-9]*-[0-9]*-[0-9]*.json"))]
    found = [file[grid] for file in kept if grid in file and file[grid]["environment"]["gpu"] == gpu]
    if not found:
        raise ArgumentError(f"measurements.load: {folder} has no report of grid {grid!r} measured on {gpu!r}")
    return with_rates(max(found, key=lambda report: str(report["environment"]["date"])))


def load_log(name: str) -> dict[str, Any]:
    """Return what was noted while a kernel version was made: the forms that were tried, with their times.

    Parameters
    ----------
    name : {"v3"}
    """
    log: dict[str, Any] = read_json(FOLDER / f"{name}_log.json")
    return log


def save(report: Report, grid: str, folder: str | Path) -> Path:
    """Write a report into the file of its card and date, whose other grids stay; return the path.

    Parameters
    ----------
    report : dict
    grid : {"main", "tree_sizes", "curves"}
    folder : path
    """
    environment = report["environment"]
    card = re.sub(r"[^a-z0-9]+", "_", environment["gpu"].lower()).strip("_")
    path = Path(folder) / f"{card}_{environment['date']}.json"
    grids = {**(_read(path) if path.exists() else {}), grid: report}
    parts = [f'  "{name}": {_as_json(grids[name])}' for name in GRIDS if name in grids]
    with written_whole(path) as stream:
        stream.write((f'{{\n  "format": "{FORMAT}",\n' + ",\n".join(parts) + "\n}\n").encode())
    return path


def with_rates(report: Report) -> Report:
    """Return a report with the rates of each timed row, and with its floor: what bytes and operations take at least.

    Parameters
    ----------
    report : dict
        The floor is that of its `yardstick_before`.
    """
    return {**report, "rows": [_with_rates(row, report["yardstick_before"]) for row in report["rows"]]}


def _with_rates(row: dict[str, Any], ceilings: dict[str, float]) -> dict[str, Any]:
    if "event_us" not in row:
        return row
    event_us, flops = row["event_us"], row["flops"]
    floor = max(row["bytes"] / ceilings["copy_bytes_per_second"], flops / ceilings["matmul_flops_per_second"])
    return {
        **row,
        "gigabytes_per_second": 1e-3 * row["bytes"] / event_us,
        "tflops": 1e-6 * flops / event_us,
        "tflops_visible": 1e-6 * row["visible_flops"] / event_us,
        "percent_of_product": 1e8 * flops / event_us / ceilings["matmul_flops_per_second"],
        "floor_us": 1e6 * floor,
        "percent_of_floor": 1e8 * floor / event_us,
    }


def _read(path: Path) -> dict[str, Report]:
    data = read_json(path)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise WeightsError(f"{path}: not a measurement of format {FORMAT}")
    return data


def _as_json(report: Report) -> str:
    """Return a report with one line for each row."""
    head = [f'    "{key}": {json.dumps(value)}' for key, value in report.items() if key != "rows"]
    rows = [f"      {json.dumps({key: _rounded(key, value) for key, value in row.items()})}" for row in report["rows"]]
    return "{\n" + ",\n".join([*head, '    "rows": [\n' + ",\n".join(rows) + "\n    ]"]) + "\n  }"


def _rounded(key: str, value: Any) -> Any:
    return round(value, 3) if key.endswith("_us") and value is not None else value
