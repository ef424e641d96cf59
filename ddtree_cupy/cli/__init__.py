"""The `ddtree` command: decode a prompt, look at a tree, compare policies, see what works on this machine."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from ddtree_cupy import __version__, _doctor
from ddtree_cupy._terminal import EXIT_FAILED, run_command, show
from ddtree_cupy.cli import check, decode, tree
from ddtree_cupy.errors import ArgumentError
from ddtree_cupy.explore.__main__ import add_commands as add_explore_commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 wrong usage, 3 the three texts differ."""

    def run() -> int:
        options = _parser().parse_args(arguments)
        code: int = options.run(options)
        return code

    return run_command("ddtree", run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ddtree", description="Speculative decoding with draft trees.")
    parser.add_argument("--version", action="version", version=f"ddtree {__version__}")
    parser.set_defaults(run=_helper(parser))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    with_json = [decode.add_command(commands), tree.add_command(commands)]

    explore = commands.add_parser("explore", help="which tree should be drafted: replay policies over recorded rounds")
    explore.set_defaults(run=_helper(explore))
    add_explore_commands(explore)

    check.add_command(commands)

    doctor = commands.add_parser("doctor", help="show what is installed and which backends work")
    doctor.set_defaults(run=_run_doctor)

    kernels = commands.add_parser("kernels", help="compile every kernel for every architecture, without a GPU")
    kernels.add_argument("--arch", action="append", help="only this architecture, such as sm_90; may be repeated")
    kernels.set_defaults(run=_kernels)

    bench = commands.add_parser("bench", help="compare every kernel with its reference, then time it on this GPU")
    bench.add_argument("pattern", nargs="?", default="", help="only cases whose op, name or variant contains this text")
    grids = bench.add_mutually_exclusive_group()
    grids.add_argument("--tree-sizes", action="store_true", help="tree_attention over the nodes, for explore's costs")
    grids.add_argument("--curves", action="store_true", help="tree_attention over nodes, heads, context, batch in turn")
    bench.set_defaults(run=_bench)
    for command in (*with_json, doctor, kernels, bench):
        command.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


def _helper(parser: argparse.ArgumentParser) -> Any:
    """Return the command that prints the help of a parser."""

    def print_help(_: argparse.Namespace) -> int:
        parser.print_help()
        return 0

    return print_help


def _run_doctor(options: argparse.Namespace) -> int:
    report = _doctor.report()
    show(json.dumps(report) if options.json else _doctor.as_text(report))
    return 0


def _kernels(options: argparse.Namespace) -> int:
    from ddtree_cupy.compile_check import resources

    archs = tuple(options.arch or resources.ARCHS)
    unknown = set(archs) - set(resources.ARCHS)
    if unknown:
        raise ArgumentError(f"--arch {', '.join(sorted(unknown))}: expected some of {', '.join(resources.ARCHS)}")
    rows = resources.kernel_table(archs)
    show(json.dumps(resources.as_json(rows)) if options.json else resources.format_table(rows))
    broken = resources.problems(rows)
    show("\n".join(broken), end="\n" if broken else "", file=sys.stderr)
    return EXIT_FAILED if broken else 0


def _bench(options: argparse.Namespace) -> int:
    from ddtree_cupy.bench.__main__ import main as run_bench

    given = {"--json": options.json, "--tree-sizes": options.tree_sizes, "--curves": options.curves}
    flags = [flag for flag, is_given in given.items() if is_given]
    return run_bench([options.pattern, *flags])
