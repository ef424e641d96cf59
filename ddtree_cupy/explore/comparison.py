"""Compare many policies with one, prompt by prompt: rows for a table, and the table as text."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from ddtree_cupy._check import Checker
from ddtree_cupy._terminal import fitted, table
from ddtree_cupy.explore.cost_tables import checked_cost
from ddtree_cupy.explore.fixed_tree import FixedTree
from ddtree_cupy.explore.names import named_policies, policy_of
from ddtree_cupy.explore.policies import BestFirst, Policy
from ddtree_cupy.explore.replay import Replay
from ddtree_cupy.explore.speedup import (
    Cost,
    Interval,
    bootstrap_settings,
    checked_round_us,
    compare,
    speedup,
    tokens_per_pass,
)
from ddtree_cupy.explore.sweeps import sweep
from ddtree_cupy.explore.traces import Traces

__all__ = ["PolicyRow", "compare_policies", "policy_table"]


@dataclass(frozen=True, eq=False)
class PolicyRow:
    """One policy beside the one with which all are compared.

    Attributes
    ----------
    policy, against : str
        Names of both.
    tokens_per_pass : Interval
    nodes : float
        Mean number of nodes besides the root.
    speedup : Interval or None
        None without a cost.
    ratio : Interval
        `compare` of both: of speedups if there is a cost, else of tokens per pass.
    replay : Replay
    """

    policy: str
    against: str
    tokens_per_pass: Interval
    nodes: float
    speedup: Interval | None
    ratio: Interval
    replay: Replay


def compare_policies(
    traces: Traces,
    policies: Iterable[Policy | str] | None = None,
    *,
    against: Policy | str | None = None,
    cost: Cost | None = None,
    round_us: float = 0.0,
    samples: int = 1000,
    seed: int = 0,
    executor: Executor | None = None,
    progress: bool = True,
) -> tuple[PolicyRow, ...]:
    """Replay policies and compare each with one of them, paired over prompts.

    Parameters
    ----------
    traces : Traces
    policies : iterable of Policy or str, optional
        Default: those of `named_policies` for which the traces hold enough ranks.
    against : Policy or str, optional
        The policy that has the ratio 1. It gets no row of its own unless it is one of `policies`. Default: best-first
        with a budget of 64, or of the largest for which the traces are exact.
    cost, round_us, samples, seed
        As in `speedup`.
    executor, progress
        As in `sweep`.

    Examples
    --------
    >>> rows = compare_policies(Traces.load(), ["chain 15", "best-first 16"], against="chain 15")
    >>> [f"{row.policy}: {row.ratio}" for row in rows]
    ['chain 15: 1.00 (1.00 to 1.00)', 'best-first 16: 1.21 (1.13 to 1.29)']
    """
    check = Checker("compare_policies")
    check.kind("traces", traces, Traces)
    settings = {"samples": samples, "seed": seed}
    bootstrap_settings(check, samples, 0.95, seed)  # before the replays, which take longer
    checked_round_us(check, round_us)
    cost = None if cost is None else checked_cost("compare_policies", cost)
    chosen = fitting_policies(traces) if policies is None else check.items("policies", policies)
    todo = [policy_of("compare_policies", f"policies[{at}]", policy) for at, policy in enumerate(chosen)]
    largest = BestFirst(min(64, traces.max_budget))
    other = largest if against is None else policy_of("compare_policies", "against", against)
    *results, base = sweep(traces, [*todo, other], executor=executor, progress=progress)
    weighed = {"cost": cost, "round_us": round_us, **settings}
    return tuple(
        PolicyRow(
            result.policy,
            base.policy,
            tokens_per_pass(result, **settings),
            float(result.num_nodes.mean()) - 1,
            None if cost is None else speedup(result, **weighed),  # type: ignore[arg-type]
            compare(result, base, **weighed),  # type: ignore[arg-type]
            result,
        )
        for result in results
    )


def fitting_policies(traces: Traces) -> list[Policy]:
    """Return those of the named policies for which the traces hold enough ranks.

    Parameters
    ----------
    traces : Traces
    """
    return [policy for policy in named_policies().values() if _fits(policy, traces)]


def _fits(policy: Policy, traces: Traces) -> bool:
    if isinstance(policy, FixedTree):
        highest = max(path[-1] for path in policy.choices)
        is_cut = traces.row_widths < traces.vocab_size  # the last rank of such a row is refused
        return bool((traces.row_widths - is_cut > highest).all())
    sizes = (getattr(policy, name, 0) for name in ("budget", "max_budget", "high"))
    return max(sizes) <= max(15, traces.max_budget)  # chains of 8 and 15 use the first rank alone


def policy_table(rows: Sequence[PolicyRow]) -> str:
    """Return one line per policy: tokens per pass, nodes besides the root, ratio to the policy compared with.

    Parameters
    ----------
    rows : sequence of PolicyRow
        From `compare_policies`; at least one.

    Examples
    --------
    >>> print(policy_table(compare_policies(Traces.load(), ["chain 15"], against="best-first 16")))
    policy    tokens per pass  nodes           ratio
    chain 15   4.83 4.19-5.72   15.0  0.83 0.77-0.89
    ratio: to the tokens per pass of best-first 16, paired over prompts; ranges: 95 %
    """
    check = Checker("policy_table")
    rows = check.items("rows", rows, PolicyRow)
    check.integer("len(rows)", len(rows), low=1)
    cells = [(row.policy, _short(row.tokens_per_pass), f"{row.nodes:.1f}", _short(row.ratio)) for row in rows]
    aligned = table(("policy", "tokens per pass", "nodes", "ratio"), cells)
    return "\n".join([aligned, fitted(f"ratio: {ratio_means(rows[0])}, paired over prompts; ranges: 95 %")])


def ratio_means(row: PolicyRow) -> str:
    """Return to what the ratios of a comparison are.

    Parameters
    ----------
    row : PolicyRow
    """
    return f"to the {'tokens per pass' if row.speedup is None else 'speedup'} of {row.against}"


def _short(interval: Interval) -> str:
    return f"{interval.value:.2f} {interval.low:.2f}-{interval.high:.2f}"
