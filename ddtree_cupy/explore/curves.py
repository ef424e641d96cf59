"""Budget curves: one policy at several budgets, in tokens per pass and speedup."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import Checker
from ddtree_cupy.containers.topology import fillable_nodes
from ddtree_cupy.errors import ArgumentError
from ddtree_cupy.explore.cost_tables import checked_cost
from ddtree_cupy.explore.costs import cost_of
from ddtree_cupy.explore.names import family_of, policy_of
from ddtree_cupy.explore.policies import BestFirst, Policy
from ddtree_cupy.explore.replay import Replay
from ddtree_cupy.explore.speedup import (
    Cost,
    Interval,
    bootstrap_settings,
    checked_round_us,
    speedup,
    tokens_per_pass,
)
from ddtree_cupy.explore.sweeps import sweep
from ddtree_cupy.explore.traces import Traces

__all__ = ["BudgetCurve", "budget_curve"]


@dataclass(frozen=True, eq=False)
class BudgetCurve:
    """One policy at several budgets.

    Attributes
    ----------
    budgets : tuple of int
    tokens_per_pass, speedup : tuple of Interval
        One per budget; `speedup` is empty without a cost model.
    expected_tokens_per_pass : float64 array
        The expectation under the draft marginals, as a mean over the same rounds; NaN for trees without path scores.
    replays : tuple of Replay
    """

    budgets: tuple[int, ...]
    tokens_per_pass: tuple[Interval, ...]
    speedup: tuple[Interval, ...]
    expected_tokens_per_pass: npt.NDArray[np.float64]
    replays: tuple[Replay, ...]

    @property
    def best_budget(self) -> int:
        """The budget of the highest speedup, the smallest on ties; without a cost model, of the most tokens.

        NaN values are ignored; ArgumentError if there is no other value.
        """
        values = np.array([interval.value for interval in self.speedup or self.tokens_per_pass])
        if np.isnan(values).all():
            raise ArgumentError(f"BudgetCurve.best_budget: the values are {values.tolist()}, expected a number")
        known = np.where(np.isnan(values), -np.inf, values)
        return min(budget for budget, value in zip(self.budgets, known, strict=True) if value == known.max())

    def with_cost(self, cost: Cost, *, round_us: float = 0.0, samples: int = 1000, seed: int = 0) -> "BudgetCurve":
        """Return the same rounds under another cost model; nothing is replayed.

        Parameters
        ----------
        cost, round_us, samples, seed
            As in `speedup`.
        """
        gains = tuple(speedup(r, cost, round_us=round_us, samples=samples, seed=seed) for r in self.replays)
        return BudgetCurve(self.budgets, self.tokens_per_pass, gains, self.expected_tokens_per_pass, self.replays)


def budget_curve(
    traces: Traces,
    budgets: Sequence[int],
    *,
    policy: Callable[[int], Policy] | str = BestFirst,
    cost: Cost | None = None,
    round_us: float = 0.0,
    samples: int = 1000,
    seed: int = 0,
    executor: Executor | None = None,
    progress: bool = True,
) -> BudgetCurve:
    """Replay a policy at several budgets and weigh the tokens against their cost.

    Parameters
    ----------
    traces : Traces
    budgets : sequence of int
        At least one.
    policy : callable or str
        From a budget to a policy, such as `BestFirst`, `chain` or a lambda, called in this process; or the name of a
        policy without its budget: "best-first", "chain", "best-first, max_children 2".
    cost : callable or CostTable, optional
        As in `speedup`. It is asked for the cost of the budgets before anything is replayed.
    round_us, samples, seed
        As in `speedup`.
    executor, progress
        As in `sweep`.

    Examples
    --------
    >>> from ddtree_cupy.explore import LinearCost
    >>> curve = budget_curve(Traces.load(), (4, 16, 64), cost=LinearCost(fixed_us=40.0, per_node_us=1.0))
    >>> curve.best_budget, curve.with_cost(LinearCost(fixed_us=4000.0, per_node_us=1.0)).best_budget
    (16, 64)
    """
    check = Checker("budget_curve")
    check.kind("traces", traces, Traces)
    given = check.items("budgets", budgets)
    budgets = [check.integer(f"budgets[{at}]", budget, low=0) for at, budget in enumerate(given)]
    if not budgets:
        raise ArgumentError("budget_curve: `budgets` is empty, expected at least one budget")
    bootstrap_settings(check, samples, 0.95, seed)  # before the replays, which take longer
    checked_round_us(check, round_us)
    if cost is not None:
        cost = checked_cost("budget_curve", cost)
    family = family_of("budget_curve", "policy", policy)
    policies = [policy_of("budget_curve", f"policy({budget})", family(budget)) for budget in budgets]
    if cost is not None:
        for nodes in _certain_sizes(traces, policies):
            cost_of("budget_curve", cost, nodes)
    replays = tuple(sweep(traces, policies, executor=executor, progress=progress))
    curve = BudgetCurve(
        budgets=tuple(budgets),
        tokens_per_pass=tuple(tokens_per_pass(result, samples=samples, seed=seed) for result in replays),
        speedup=(),
        expected_tokens_per_pass=np.array([result.expected_tokens.mean() for result in replays]),
        replays=replays,
    )
    return curve if cost is None else curve.with_cost(cost, round_us=round_us, samples=samples, seed=seed)


def _certain_sizes(traces: Traces, policies: Sequence[Policy]) -> list[int]:
    """Return numbers of nodes that trees of these policies have, as far as that is known without building them."""
    width = int(traces.row_widths.min(initial=traces.width))
    known = [p for p in policies if type(p) is BestFirst and p.min_path_score is None]
    return [fillable_nodes(p.budget, traces.draft_len, width, p.max_depth, p.max_children) for p in known]
