"""`python -m ddtree_cupy.explore`: make traces and cost tables like the shipped ones, or compare named policies."""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from ddtree_cupy._files import read_json
from ddtree_cupy._terminal import escaped, run_command, show
from ddtree_cupy.explore.comparison import compare_policies, policy_table
from ddtree_cupy.explore.cost_tables import CostTable
from ddtree_cupy.explore.names import named_policies
from ddtree_cupy.explore.recorder import record
from ddtree_cupy.explore.traces import SHIPPED_TRACES, Traces


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, by default that of the command line, and return its exit code: 1 when it failed."""
    return run_command("explore", lambda: run(_parser().parse_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ddtree_cupy.explore", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    traces = commands.add_parser("record", help="record the bundled models on held-out text")
    traces.add_argument("--prompts", type=int, default=24)
    traces.add_argument("--positions", type=int, default=32, help="positions of each prompt (default 32)")
    traces.add_argument("--out", type=Path, default=Path("traces.npz"), help="file to write (default traces.npz)")
    costs = commands.add_parser("costs", help="make a cost table from the times of the benchmark")
    costs.add_argument("report", type=Path, help="output of `python -m ddtree_cupy.bench --tree-sizes VARIANT --json`")
    costs.add_argument("--variant", required=True)
    costs.add_argument("--dtype", required=True, help="of queries and cache; bfloat16 in the cases of the benchmark")
    costs.add_argument("--out", type=Path, default=Path("costs.json"), help="file to write (default costs.json)")
    compare = commands.add_parser("policies", help="tokens per pass of every named policy")
    compare.add_argument("traces", type=Path, nargs="?", default=SHIPPED_TRACES)
    compare.add_argument("--workers", type=int, default=1)
    return parser


def run(options: argparse.Namespace) -> int:
    """Run one command and print its result, or the file with it."""
    if options.command == "record":
        show(escaped(f"{options.out}: {record_tiny(options.prompts, options.positions, options.out)}"))
    elif options.command == "costs":
        table = CostTable.from_bench(read_json(options.report), options.variant, dtype=options.dtype)
        table.save(options.out)
        show(escaped(f"{options.out}: {table}"))
    else:
        show(compared(Traces.load(options.traces), options.workers))
    return 0


def record_tiny(num_prompts: int, num_positions: int, out: Path) -> Traces:
    """Record the bundled models, float64, greedy, on held-out prompts whose text does not become periodic."""
    from ddtree_cupy.decode.evaluate import PROMPT_BYTES, heldout_prompts, is_periodic, prompt_at
    from ddtree_cupy.decode.tiny import TinyDrafter, TinyTarget

    target, drafter = TinyTarget.load(dtype=np.float64), TinyDrafter.load(dtype=np.float64)
    places = heldout_prompts(num_prompts)
    traces = record(
        target,
        drafter,
        [np.frombuffer(prompt_at(*place), np.uint8) for place in places],
        num_positions=num_positions,
        width=48,
        names=[f"{file}:{offset}" for file, offset in places],
        about={
            "target": "ddtree_cupy.decode.tiny.TinyTarget, float64",
            "drafter": "ddtree_cupy.decode.tiny.TinyDrafter, float64",
            "text": f"the {PROMPT_BYTES} bytes of the held-out file before the offset",
            "command": f"python -m ddtree_cupy.explore record --prompts {num_prompts} --positions {num_positions}",
        },
    )
    if num_positions >= 32:  # shorter texts do not show a period
        texts = [bytes(traces.continuations[traces.prompt(q), 0].astype(np.uint8)) for q in range(num_prompts)]
        traces = traces.select([q for q, text in enumerate(texts) if not is_periodic(text)])
    traces.save(out)
    return traces


def compared(traces: Traces, workers: int) -> str:
    """Return the table of the named policies below a line that says what the traces are."""
    workers = min(workers, len(named_policies()))
    with ProcessPoolExecutor(workers) if workers > 1 else nullcontext() as executor:
        return f"{traces}\n{policy_table(compare_policies(traces, executor=executor))}"


if __name__ == "__main__":
    sys.exit(main())
