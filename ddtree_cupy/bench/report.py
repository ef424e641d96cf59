"""The report that is printed and saved: the times of the cases, and the machine."""

import datetime
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ddtree_cupy
from ddtree_cupy._terminal import escaped, fitted, table
from ddtree_cupy.bench import tree_accept, tree_attention, tree_build
from ddtree_cupy.bench.case import Case
from ddtree_cupy.bench.sizes import CURVE_SIZES, TREE_SIZES
from ddtree_cupy.bench.timing import copy_bytes_per_second, matmul_flops_per_second, measure
from ddtree_cupy.errors import DDTreeError, UnsupportedError
from ddtree_cupy.kernels.device import current_device, nvrtc_version


def all_cases(pattern: str = "", *, grid: str = "main") -> list[Case]:
    """Return the cases of a grid whose "op name variant" holds `pattern`.

    "main" has every op; "tree_sizes" has tree_attention by nodes, "curves" by nodes, heads, context and batch in turn.
    """
    if grid == "main":
        cases = [*tree_build.cases(), *tree_attention.cases(), *tree_accept.cases()]
    else:
        sizes = {"tree_sizes": TREE_SIZES, "curves": CURVE_SIZES}[grid]
        cases = list(tree_attention.cases(sizes, any_length=True))
    return [case for case in cases if pattern in f"{case.op} {case.name} {case.variant}"]


def make_report(cases: Sequence[Case], command: str) -> dict[str, Any]:
    """Gate and time every case, with the ceilings of the card before, between and after."""
    report: dict[str, Any] = {"environment": {**environment(), "command": command}, "yardstick_before": yardstick()}
    rows = []
    for number, case in enumerate(cases, 1):
        if number == len(cases) // 2 + 1 and number > 1:
            report["yardstick_between"] = yardstick()
        print(f"\r{number}/{len(cases)} {case.op} {case.name:<40}", end="", file=sys.stderr, flush=True)
        rows.append(run_case(case))
    print("\r" + " " * 70, file=sys.stderr)
    return {**report, "yardstick_after": yardstick(), "rows": rows}


def environment() -> dict[str, str]:
    """Return what a table must say about the machine on which it was made."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(current_device())
    driver = cupy.cuda.runtime.driverGetVersion()
    return {
        "gpu": properties["name"].decode(),
        "driver_cuda": f"{driver // 1000}.{driver % 1000 // 10}",
        "nvrtc": ".".join(map(str, nvrtc_version())),
        "cupy": cupy.__version__,
        "python": platform.python_version(),
        "ddtree_cupy": ddtree_cupy.__version__,
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }


def _commit() -> str:
    root = Path(__file__).parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def yardstick() -> dict[str, float]:
    """Return the two ceilings of this card in its present state."""
    return {"copy_bytes_per_second": copy_bytes_per_second(), "matmul_flops_per_second": matmul_flops_per_second()}


def run_case(case: Case) -> dict[str, Any]:
    """Gate and time one case; `measurements.with_rates` adds what follows from the times."""
    row: dict[str, Any] = {"op": case.op, "name": case.name, "variant": case.variant}
    try:
        prepared = case.prepare()
        prepared.run()
        prepared.gate()
    except UnsupportedError as error:
        return {**row, "refused": str(error)}
    except (AssertionError, DDTreeError) as error:
        return {**row, "failed": f"{type(error).__name__}: {error}"}
    work = {"bytes": case.bytes_moved, "flops": case.flops, "visible_flops": case.visible_flops}
    return {**row, **asdict(measure(prepared.run)), **work}


def as_text(report: dict[str, Any]) -> str:
    """Return the report as a table of the timed rows, and a line for each other row."""
    lines = [fitted(", ".join(f"{key} {escaped(value)}" for key, value in report["environment"].items()))]
    for name, ceilings in report.items():
        if not name.startswith("yardstick"):
            continue
        copied, multiplied = (ceilings[f"{what}_per_second"] / 1e12 for what in ("copy_bytes", "matmul_flops"))
        lines.append(fitted(f"{name}: copy {copied:.2f} TB/s, bf16 8192^3 product {multiplied:.0f} TFLOP/s"))
    heads = ("op", "case", "variant", "event us", "20 %", "80 %", "graph us", "host us", "MB", "GB/s", "TF/s", "TF vis")
    cells, untimed = [], []
    for row in report["rows"]:
        start = (row["op"], row["name"], row["variant"])
        if "event_us" not in row:
            untimed.append(fitted(f"{'  '.join(start)}  not timed: {row.get('failed') or row['refused']}"))
            continue
        times = [f"{row[name]:.1f}" for name in ("event_us", "low_us", "high_us")]
        rates = [f"{1e-6 * row['bytes']:.2f}", f"{row['gigabytes_per_second']:.0f}"]
        rates += [_or_dash(row[name]) for name in ("tflops", "tflops_visible", "percent_of_product")]
        bound = [f"{row[name]:.1f}" for name in ("floor_us", "percent_of_floor")]
        cells.append((*start, *times, _or_dash(row["graph_us"]), f"{row['host_us']:.1f}", *rates, *bound))
    lines.append(table((*heads, "% of product", "floor us", "% of floor"), cells, left=3))
    return "\n".join([*lines, *untimed])


def _or_dash(number: float | None) -> str:
    """Return a number, or a dash where none applies: the graph of a long call, products of a memory-bound op."""
    return f"{number:.1f}" if number else "-"
