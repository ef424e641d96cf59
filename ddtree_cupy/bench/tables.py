"""`python -m ddtree_cupy.bench.tables`: write the README's measured parts from the newest measurements.

A part lies between ``<!-- measured: name -->`` and ``<!-- end of measured -->``; nothing else is changed. With
``--notebook`` notebook 07 is run, too: it reads the same measurements and draws the README's curves.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ddtree_cupy._files import written_whole
from ddtree_cupy._terminal import run_command
from ddtree_cupy.bench.measurements import Report, load
from ddtree_cupy.bench.sizes import ATTENTION_SIZES, attention_name
from ddtree_cupy.bench.timing import MOST_GRAPH_US
from ddtree_cupy.errors import ArgumentError
from ddtree_cupy.explore import CostTable, MeasuredCost, Traces, budget_curve
from ddtree_cupy.tree_attention.versions import VERSIONS

README = Path(__file__).parents[2] / "README.md"
NOTEBOOK = README.parent / "notebooks" / "07_speed.ipynb"
BUDGETS = (0, 1, 2, 3, 4, 6, 7, 8, 12, 15, 16, 24, 31, 32, 48, 63, 64, 96, 127, 128, 192, 255, 256)
COST_SIZES = tuple((heads, context) for heads in (8, 64) for context in (8_192, 131_072))
_PART = re.compile(r"(?<=<!-- measured: )(\w+) -->\n.*?(?=<!-- end of measured -->)", re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the README of the checkout, and run its notebook on speed if that is asked for."""
    parser = argparse.ArgumentParser(prog="python -m ddtree_cupy.bench.tables", description=__doc__)
    parser.add_argument("--notebook", action="store_true", help="run notebook 07 and keep its outputs and pictures")
    options = parser.parse_args(arguments)
    return run_command("tables", lambda: _rewrite(options.notebook))


def _rewrite(with_notebook: bool) -> int:
    if not README.exists():
        raise ArgumentError(f"{README} does not exist; run this command from a checkout of the repository")
    text = rewritten(README.read_text())
    with written_whole(README) as stream:
        stream.write(text.encode())
    if with_notebook:
        _run_notebook()
    return 0


def _run_notebook() -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    place = {"metadata": {"path": NOTEBOOK.parent}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", record_timing=False, resources=place).execute()
    del notebook.metadata["language_info"]  # it names the Python of this machine
    with written_whole(NOTEBOOK) as stream:
        text = nbformat.writes(notebook)  # type: ignore[no-untyped-call]
        stream.write(f"{text}\n".encode())


def rewritten(readme: str) -> str:
    """Return the text with each measured part as the newest measurements have it."""
    parts = {"speed": speed, "budgets": budgets}
    return _PART.sub(lambda found: f"{found[1]} -->\n{parts[found[1]]()}", readme)


def speed() -> str:
    """Return the tables of the main cases, with how and where they were measured."""
    report, curves = load("main"), load("curves")
    about = report["environment"]
    how = f"""All times are of one {about["gpu"]} with a driver for CUDA {about["driver_cuda"]}, CuPy {about["cupy"]}
        and bfloat16, measured on {about["date"]} with `{about["command"]}`, which compares every case with its
        reference before it times it. "Event" is the median time of a single call between two CUDA events: the L2 cache
        is flushed before each call, and the launch gap is included. "Graph" is the time of one call out of ten in a
        captured CUDA graph. TFLOP/s count every pair of a query row and a key. To show how fast the card was, the run
        also multiplied two matrices of 8192 x 8192 before, between and after its cases, at {_products(report)} TFLOP/s,
        and copied memory at {report["yardstick_before"]["copy_bytes_per_second"] / 1e12:.2f} TB/s."""
    dash = f"""A dash stands for a size that a version refuses, and for a call of more than {MOST_GRAPH_US // 1000} ms,
        which is not captured in a graph. The letters of the other cases: B requests, N nodes, L depths, V logits in a
        row, k candidates of a depth."""
    about = curves["environment"]
    drawn = f"""The curves show the time of `tree_attention` while one of nodes, heads, context and requests changes;
        the others stay at 1 request, 8 or 64 heads, 64 nodes and 8,192 keys. The dashed line is the lowest time that
        bytes and operations allow. They were measured on an {about["gpu"]} on {about["date"]} with
        `{about["command"]}`, in a run of its own, in which the card multiplied at {_products(curves)} TFLOP/s."""
    return "\n".join(map(_paragraph, (how, _attention_table(report), dash, _others_table(report), drawn)))


def _attention_table(report: Report) -> str:
    """Return one row for each size; the version that "auto" prefers has more columns than the others."""
    measured = {(row["name"], row["variant"]): row for row in report["rows"] if row["op"] == "tree_attention"}
    first, *others = (name for name in VERSIONS if name in {variant for _, variant in measured})
    short = {name: name.split("_")[0] for name in VERSIONS}
    head = ["`tree_attention`: requests", "heads", "nodes", "context", f"{short[first]} event", f"{short[first]} graph"]
    rows = []
    for size in ATTENTION_SIZES:
        row, *rest = (measured[attention_name(*size), name] for name in (first, *others))
        times = (_time(row.get("event_us")), _time(row.get("graph_us")), _digits(row["tflops"]))
        rows.append([*(f"{extent:,}" for extent in size), *times, *(_time(other.get("event_us")) for other in rest)])
    return _table([*head, "TFLOP/s", *(f"{short[name]} event" for name in others)], rows)


def _others_table(report: Report) -> str:
    others = [row for row in report["rows"] if row["op"] != "tree_attention"]
    rows = [
        (op, row["name"], _time(row["event_us"]), _time(row["graph_us"]), _digits(row["gigabytes_per_second"]))
        for op in dict.fromkeys(row["op"] for row in others)
        for row in others
        if row["op"] == op
    ]
    return _table(("function", "case", "event", "graph", "GB/s"), rows)


def budgets() -> str:
    """Return which budget is best where the measured attention is the only cost."""
    table, replayed = CostTable.load(), budget_curve(Traces.load(), BUDGETS, progress=False)
    nodes = sorted({row[1] for row in table.rows})
    curves = {size: replayed.with_cost(MeasuredCost(table, *size)) for size in COST_SIZES}
    speedups = {size: dict(zip(BUDGETS, curve.speedup, strict=True)) for size, curve in curves.items()}
    best = {
        size: f"budget {curve.best_budget}, {speedups[size][curve.best_budget].value:.2f} times faster"
        for size, curve in curves.items()
    }
    heads, contexts = (sorted(set(column)) for column in zip(*COST_SIZES, strict=True))
    rows = [[f"{h} heads", *(best[h, context] for context in contexts)] for h in heads]
    what = f"""With the times of `tree_attention` {table.about["variant"].split("_")[0]} on an {table.about["gpu"]}
        of {table.about["date"]} (`CostTable.load()`: one layer, {nodes[0]} to {nodes[-1]} nodes) as the only cost, the
        best of {len(BUDGETS)} budgets from {BUDGETS[0]} to {BUDGETS[-1]} is:"""
    full, next_tile = (speedups[8, 131_072][budget].value for budget in (7, 8))
    tiles = f"""The kernel works on tiles of 64 query rows. At 8 heads and 131,072 keys a budget of 7 fills one (the
        root is a node, too) and is {full:.2f} times faster; 8 begins the next and is {next_tile:.2f} times faster."""
    return "\n".join(map(_paragraph, (what, _table(("", *(f"context {c:,}" for c in contexts)), rows), tiles)))


def _products(report: Report) -> str:
    speeds = [f"{value['matmul_flops_per_second'] / 1e12:.0f}" for key, value in report.items() if "yardstick" in key]
    return f"{', '.join(speeds[:-1])} and {speeds[-1]}"


def _time(us: float | None) -> str:
    """Return a time with its unit, "-" for none."""
    if us is None:
        return "-"
    return f"{_digits(us)} us" if us < 10_000 else f"{_digits(us / 1000)} ms"


def _digits(number: float) -> str:
    """Return a number with three digits or more."""
    return f"{number:.1f}" if number < 100 else f"{number:,.0f}"


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    head = list(head)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)).replace("|  |", "| |")


def _paragraph(text: str) -> str:
    """Return prose wrapped and a table as it is, and an empty line after it."""
    if text.startswith("|"):
        return text + "\n"
    return textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False, break_long_words=False) + "\n"


if __name__ == "__main__":
    sys.exit(main())
