"""`python -m ddtree_cupy.bench`: gate, time, print."""

import argparse
import datetime
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ddtree_cupy
from ddtree_cupy._terminal import escaped, run_command, show
from ddtree_cupy.bench.cases import Case, all_cases
from ddtree_cupy.bench.timing import copy_bytes_per_second, matmul_flops_per_second, measure
from ddtree_cupy.errors import ArgumentError, DDTreeError, UnsupportedError
from ddtree_cupy.kernels.device import current_device, nvrtc_version


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; exit code 1 when one disagrees with the reference (its time is not printed then).

    A case that a variant refuses (v1_three_phase holds no long context) is printed with the refusal; exit code 1 when
    nothing else is left.
    """
    return run_command("bench", lambda: _bench(_parser().parse_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ddtree_cupy.bench", description=__doc__)
    parser.add_argument("pattern", nargs="?", default="", help="only cases whose op, name or variant holds this")
    grids = parser.add_mutually_exclusive_group()
    grids.add_argument("--tree-sizes", action="store_true", help="tree_attention over the nodes, for explore's costs")
    grids.add_argument("--curves", action="store_true", help="tree_attention over nodes, heads, context, batch in turn")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _bench(options: argparse.Namespace) -> int:
    current_device()
    cases = all_cases(options.pattern, tree_sizes=options.tree_sizes, curves=options.curves)
    if not cases:
        raise ArgumentError(f"no case holds {options.pattern!r} in its op, name or variant")
    report: dict[str, Any] = {"environment": environment(), "rows": []}
    report["yardstick_before"] = yardstick()
    for number, case in enumerate(cases, 1):
        if number == len(cases) // 2 + 1 and number > 1:
            report["yardstick_between"] = yardstick()
        print(f"\r{number}/{len(cases)} {case.op} {case.name:<40}", end="", file=sys.stderr, flush=True)
        report["rows"].append(run_case(case, report["yardstick_before"]))
    print("\r" + " " * 70, file=sys.stderr)
    report["yardstick_after"] = yardstick()
    show(json.dumps(report) if options.json else as_text(report))
    timed = any("event_us" in row for row in report["rows"])
    return int(not timed or any("failed" in row for row in report["rows"]))


def environment() -> dict[str, str]:
    """What a table must say about the machine it was made on."""
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
        "command": f"python -m ddtree_cupy.bench {' '.join(sys.argv[1:])}".strip(),
    }


def _commit() -> str:
    root = Path(__file__).parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def yardstick() -> dict[str, float]:
    """The two ceilings of this card in its present state."""
    return {"copy_bytes_per_second": copy_bytes_per_second(), "matmul_flops_per_second": matmul_flops_per_second()}


def run_case(case: Case, ceilings: dict[str, float]) -> dict[str, Any]:
    """Gate and time one case."""
    row: dict[str, Any] = {"op": case.op, "name": case.name, "variant": case.variant}
    try:
        prepared = case.prepare()
        prepared.run()
        prepared.gate()
    except UnsupportedError as error:
        return {**row, "refused": str(error)}
    except (AssertionError, DDTreeError) as error:
        return {**row, "failed": f"{type(error).__name__}: {error}"}
    times = measure(prepared.run)
    floor = max(case.bytes_moved / ceilings["copy_bytes_per_second"], case.flops / ceilings["matmul_flops_per_second"])
    return {
        **row,
        **asdict(times),
        "bytes": case.bytes_moved,
        "gigabytes_per_second": 1e-3 * case.bytes_moved / times.event_us,
        "tflops": 1e-6 * case.flops / times.event_us,
        "tflops_visible": 1e-6 * case.visible_flops / times.event_us,
        "percent_of_product": 1e8 * case.flops / times.event_us / ceilings["matmul_flops_per_second"],
        "floor_us": 1e6 * floor,
        "percent_of_floor": 1e8 * floor / times.event_us,
    }


def as_text(report: dict[str, Any]) -> str:
    """One aligned table."""
    lines = [", ".join(f"{key} {escaped(value)}" for key, value in report["environment"].items())]
    for name, ceilings in report.items():
        if not name.startswith("yardstick"):
            continue
        lines.append(
            f"{name}: copy {ceilings['copy_bytes_per_second'] / 1e12:.2f} TB/s, "
            f"bf16 8192^3 product {ceilings['matmul_flops_per_second'] / 1e12:.0f} TFLOP/s"
        )
    lines.append(
        f"{'op':<21}{'case':<42}{'variant':<16}{'event us':>10}{'20 %':>9}{'80 %':>9}{'graph us':>10}{'host us':>9}"
        f"{'MB':>9}{'GB/s':>7}{'TF/s':>7}{'TF vis':>7}{'% of product':>13}{'floor us':>10}{'% of floor':>11}"
    )
    for row in report["rows"]:
        start = f"{row['op']:<21}{row['name']:<42}{row['variant']:<16}"
        if "event_us" not in row:
            lines.append(f"{start} not timed: {row.get('failed') or row['refused']}")
            continue
        lines.append(
            f"{start}{row['event_us']:>10.1f}{row['low_us']:>9.1f}{row['high_us']:>9.1f}"
            f"{_or_dash(row['graph_us']):>10}"
            f"{row['host_us']:>9.1f}{1e-6 * row['bytes']:>9.2f}{row['gigabytes_per_second']:>7.0f}"
            f"{_or_dash(row['tflops']):>7}{_or_dash(row['tflops_visible']):>7}{_or_dash(row['percent_of_product']):>13}"
            f"{row['floor_us']:>10.1f}{row['percent_of_floor']:>11.1f}"
        )
    return "\n".join(lines)


def _or_dash(number: float | None) -> str:
    """What does not apply is no number: a graph of long calls, the products of a memory-bound op."""
    return f"{number:.1f}" if number else "-"


if __name__ == "__main__":
    sys.exit(main())
