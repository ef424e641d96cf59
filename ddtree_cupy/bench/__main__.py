"""`python -m ddtree_cupy.bench`: gate, time, print."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ddtree_cupy._terminal import escaped, run_command, show
from ddtree_cupy.bench.measurements import save, with_rates
from ddtree_cupy.bench.report import all_cases, as_text, make_report
from ddtree_cupy.errors import ArgumentError
from ddtree_cupy.kernels.device import current_device


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; exit code 1 when one disagrees with the reference (its time is not printed then).

    A case that a variant refuses, such as a context too long for its shared memory, is printed with the refusal; exit
    code 1 when nothing else is left.
    """
    return run_command("bench", lambda: _bench(_parser().parse_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ddtree_cupy.bench", description=__doc__)
    parser.add_argument("pattern", nargs="?", default="", help="only cases whose op, name or variant holds this")
    grids = parser.add_mutually_exclusive_group()
    for grid, over in (
        ("tree_sizes", "the nodes, for explore's costs"),
        ("curves", "nodes, heads, context, batch in turn"),
    ):
        text = f"tree_attention over {over}"
        grids.add_argument(_option(grid), dest="grid", action="store_const", const=grid, default="main", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="keep the report in FOLDER/<card>_<date>.json, too")
    return parser


def _option(grid: str) -> str:
    return f"--{grid.replace('_', '-')}"


def _bench(options: argparse.Namespace) -> int:
    current_device()
    if options.save and not options.save.is_dir():
        raise ArgumentError(f"--save {options.save}: expected a folder that exists")
    cases = all_cases(options.pattern, grid=options.grid)
    if not cases:
        raise ArgumentError(f"no case holds {options.pattern!r} in its op, name or variant")
    chosen = [] if options.grid == "main" else [_option(options.grid)]
    chosen += [options.pattern] if options.pattern else []
    report = make_report(cases, shlex.join(["python", "-m", "ddtree_cupy.bench", *chosen]))
    shown = with_rates(report)
    show(json.dumps(shown) if options.json else as_text(shown))
    timed = any("event_us" in row for row in report["rows"])
    failed = not timed or any("failed" in row for row in report["rows"])
    if options.save and failed:
        raise ArgumentError("nothing was saved, because a case disagrees with its reference or none was timed")
    if options.save:
        show(escaped(f"bench: saved {save(report, options.grid, options.save)}"), file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
