"""`ddtree check`: the card of a kernel of one's own."""

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from ddtree_cupy._terminal import EXIT_FAILED, show
from ddtree_cupy.errors import ArgumentError


def add_command(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "check", help="find the faults of a kernel of your own: compilers, emulator, sanitizers, GPU"
    )
    parser.add_argument("source", type=Path, help="a .cu file")
    parser.add_argument(
        "--case", type=Path, help="Python file with `case(draw)`, which returns a Launch; default: beside the source"
    )
    parser.add_argument("--kernel", help="its name, where the source has several")
    parser.add_argument("--examples", type=int, default=100, help="launches on the emulator (100)")
    parser.add_argument("--no-sanitizers", action="store_true", help="leave out what takes seconds")
    parser.add_argument("-I", dest="folders", action="append", default=[], metavar="FOLDER", help="of included files")
    parser.add_argument("-D", dest="macros", action="append", default=[], metavar="NAME=VALUE", help="a macro")
    parser.set_defaults(run=_run)
    return parser


def _run(options: argparse.Namespace) -> int:
    from ddtree_cupy.testing import kernel_card

    if not options.source.is_file():
        raise ArgumentError(f"{options.source} does not exist, expected a .cu file")
    if options.examples < 1:
        raise ArgumentError(f"--examples is {options.examples}, expected at least 1")
    card = kernel_card.check_kernel(
        options.source,
        _case_of(options.case or options.source.with_suffix(".py")),
        kernel=options.kernel,
        options=[*(f"-I{folder}" for folder in options.folders), *(f"-D{macro}" for macro in options.macros)],
        examples=options.examples,
        sanitizers=() if options.no_sanitizers else kernel_card.SANITIZERS,
    )
    show(card)
    return 0 if card.ok else EXIT_FAILED


def _case_of(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise ArgumentError(
            f"{path} does not exist, expected a Python file with `case(draw)`; --case names another one"
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, "case", None)):
        raise ArgumentError(f"{path} has no function `case(draw)`, which returns a ddtree_cupy.testing.Launch")
    return module.case
