"""`ddtree explore`, which is `python -m ddtree_cupy.explore`, too: compare policies and budgets, report, record."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from ddtree_cupy._check import Checker
from ddtree_cupy._files import read_json
from ddtree_cupy._terminal import escaped, fitted, run_command, show, table
from ddtree_cupy.explore.comparison import compare_policies, policy_table
from ddtree_cupy.explore.cost_tables import CostTable, MeasuredCost
from ddtree_cupy.explore.costs import LinearCost, SumCost
from ddtree_cupy.explore.curves import budget_curve
from ddtree_cupy.explore.names import named_policies
from ddtree_cupy.explore.recorder import record
from ddtree_cupy.explore.report import report
from ddtree_cupy.explore.speedup import Interval
from ddtree_cupy.explore.traces import SHIPPED_TRACES, Traces

BUDGETS = (2, 4, 8, 16, 32, 64, 128)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, by default that of the command line, and return its exit code: 1 when it failed."""

    def run() -> int:
        parser = argparse.ArgumentParser(prog="python -m ddtree_cupy.explore", description=__doc__)
        add_commands(parser, required=True)
        options = parser.parse_args(arguments)
        code: int = options.run(options)
        return code

    return run_command("explore", run)


def add_commands(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Add the commands to a parser; `run` of what it parses runs one of them and returns its exit code.

    Parameters
    ----------
    parser : argparse.ArgumentParser
    required : bool
        Refuse a call that names no command.
    """
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=required)
    policies = commands.add_parser("policies", help="tokens per pass of every named policy")
    policies.add_argument("--against", help="the policy with the ratio 1 (default best-first 64)")
    policies.set_defaults(run=_policies)
    curve = commands.add_parser("curve", help="tokens per pass and speedup of a policy over the budget")
    listed = ",".join(map(str, BUDGETS))
    curve.add_argument("--budgets", type=_integers, default=BUDGETS, help=f"besides the root (default {listed})")
    curve.add_argument("--policy", default="best-first", help="without its budget (default best-first)")
    curve.set_defaults(run=_curve)
    page = commands.add_parser("report", help="one HTML page: budgets, policies, pictures, what was run")
    page.add_argument("--against", help="the policy with the ratio 1 (default best-first 64)")
    page.add_argument("--out", type=Path, default=Path("report.html"), help="file to write (default report.html)")
    page.set_defaults(run=_report)
    for command in (curve, page):
        costs_help = "cost table (default: the shipped one, of tree_attention on a GPU)"
        command.add_argument("--costs", type=Path, help=costs_help)
        command.add_argument("--heads", type=int, default=8, help="of the cost table (default 8)")
        command.add_argument("--context", type=int, default=8192, help="keys, of the cost table (default 8192)")
        command.add_argument("--layers", type=int, default=1, help="attention layers of a pass (default 1)")
        fixed_help = "microseconds that a pass takes besides (default 0)"
        command.add_argument("--fixed-us", type=float, default=0.0, help=fixed_help)
    for command in (policies, curve, page):
        command.add_argument("traces", type=Path, nargs="?", default=SHIPPED_TRACES, help="default: the shipped ones")
    for command in (policies, curve):
        command.add_argument("--workers", type=int, default=1, help="processes that replay (default 1)")
        command.add_argument("--json", action="store_true", help="print one JSON object instead")
    traces = commands.add_parser("record", help="record the bundled models on held-out text")
    traces.add_argument("--prompts", type=int, default=24)
    traces.add_argument("--positions", type=int, default=32, help="positions of each prompt (default 32)")
    traces.add_argument("--out", type=Path, default=Path("traces.npz"), help="file to write (default traces.npz)")
    traces.set_defaults(run=_record)
    costs = commands.add_parser("costs", help="make a cost table from the times of the benchmark")
    costs.add_argument("report", type=Path, help="output of `python -m ddtree_cupy.bench --tree-sizes VARIANT --json`")
    costs.add_argument("--variant", required=True)
    costs.add_argument("--dtype", required=True, help="of queries and cache; bfloat16 in the cases of the benchmark")
    costs.add_argument("--out", type=Path, default=Path("costs.json"), help="file to write (default costs.json)")
    costs.set_defaults(run=_costs)


def _integers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}, expected numbers such as 4,16,64") from None


def _record(options: argparse.Namespace) -> int:
    show(escaped(f"{options.out}: {record_tiny(options.prompts, options.positions, options.out)}"))
    return 0


def _costs(options: argparse.Namespace) -> int:
    found = CostTable.from_bench(read_json(options.report), options.variant, dtype=options.dtype)
    found.save(options.out)
    show(escaped(f"{options.out}: {found}"))
    return 0


def _policies(options: argparse.Namespace) -> int:
    traces = Traces.load(options.traces)
    with _executor(options.workers, len(named_policies()) + 1) as executor:
        rows = compare_policies(traces, against=options.against, executor=executor)
    if options.json:
        found = [
            {
                "policy": row.policy,
                **_interval("tokens_per_pass", row.tokens_per_pass),
                "nodes": row.nodes,
                "against": row.against,
                **_interval("ratio", row.ratio),
            }
            for row in rows
        ]
        show(json.dumps({"traces": str(options.traces), "rows": found}))
    else:
        show(fitted(f"{traces}"))
        show(policy_table(rows))
    return 0


def _costs_of(options: argparse.Namespace) -> tuple[MeasuredCost, SumCost]:
    """Return the cost of attention, and that of the whole pass."""
    measured = MeasuredCost(CostTable.load(options.costs), options.heads, options.context, options.layers)
    return measured, measured + LinearCost(options.fixed_us, 0.0)


def _report(options: argparse.Namespace) -> int:
    _, cost = _costs_of(options)
    made = report(Traces.load(options.traces), options.out, cost=cost, against=options.against)
    show(escaped(f"{options.out}: best budget {made.curve.best_budget}"))
    return 0


def _curve(options: argparse.Namespace) -> int:
    measured, cost = _costs_of(options)
    traces = Traces.load(options.traces)
    with _executor(options.workers, len(options.budgets)) as executor:
        curve = budget_curve(traces, options.budgets, policy=options.policy, cost=cost, executor=executor)
    numbers = list(zip(curve.budgets, curve.tokens_per_pass, curve.speedup, strict=True))
    if options.json:
        found = [
            {"budget": budget, **_interval("tokens_per_pass", tokens), **_interval("speedup", speedup)}
            for budget, tokens, speedup in numbers
        ]
        show(json.dumps({"traces": str(options.traces), "rows": found, "best_budget": curve.best_budget}))
        return 0
    show(fitted(f"{traces}"))
    show(table(("budget", "tokens per pass", "speedup"), numbers))
    part = f"{options.fixed_us:g} us and " if options.fixed_us else ""
    where = f"{options.layers} x {measured.table.about['variant']}, {measured.table.about['gpu']}"
    show(fitted(f"best budget {curve.best_budget}; brackets: 95 %"))
    show(fitted(f"cost of a pass: {part}{where}, {options.heads} heads, {options.context:,} keys"))
    return 0


def _executor(workers: int, tasks: int) -> Any:
    Checker("ddtree explore").integer("--workers", workers, low=1)
    workers = min(workers, tasks)
    return ProcessPoolExecutor(workers) if workers > 1 else nullcontext()


def _interval(name: str, found: Interval) -> dict[str, float | None]:
    """Return the three numbers of an interval for JSON, which has no NaN."""
    numbers = {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
    return {name: None if math.isnan(number) else number for name, number in numbers.items()}


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
            "command": f"ddtree explore record --prompts {num_prompts} --positions {num_positions}",
        },
    )
    if num_positions >= 32:  # shorter texts do not show a period
        texts = [bytes(traces.continuations[traces.prompt(q), 0].astype(np.uint8)) for q in range(num_prompts)]
        traces = traces.select([q for q, text in enumerate(texts) if not is_periodic(text)])
    traces.save(out)
    return traces


if __name__ == "__main__":
    sys.exit(main())
