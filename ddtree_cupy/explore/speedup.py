"""Tokens per pass and speedup, with bootstrap intervals over prompts, and their curves over the budget."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import Checker
from ddtree_cupy.errors import ArgumentError, DTypeError
from ddtree_cupy.explore.costs import check_cost, cost_of
from ddtree_cupy.explore.policies import BestFirst, Policy
from ddtree_cupy.explore.replay import Replay
from ddtree_cupy.explore.sweeps import sweep
from ddtree_cupy.explore.traces import Traces

__all__ = ["BudgetCurve", "Interval", "budget_curve", "speedup", "tokens_per_pass"]

Array = npt.NDArray[np.floating[Any]]
Cost = Callable[[int], float]
_MOST_SAMPLES = 1_000_000  # of a bootstrap; all of them are held at once


class Interval(NamedTuple):
    """An estimate and its bootstrap interval.

    Attributes
    ----------
    value : float
    low, high : float
        NaN where fewer than two prompts have rounds, as one prompt says nothing about others.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return a text such as "6.66 (5.92 to 7.67)"."""
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def tokens_per_pass(result: Replay, *, samples: int = 1000, confidence: float = 0.95, seed: int = 0) -> Interval:
    """Return the mean number of tokens that a pass commits, and its percentile interval.

    Parameters
    ----------
    result : Replay
    samples : int
        Bootstrap samples, at most a million: prompts are drawn with replacement, with all their rounds, so
        `num_rounds` of `replay` does not narrow the interval.
    confidence : float
        Between 0 and 1.
    seed : int
    """
    check = Checker("tokens_per_pass")
    settings = _settings(check, samples, confidence, seed)
    check.kind("result", result, Replay)
    return _ratio(check, result, 1.0 + result.num_accepted, np.ones(result.num_rounds), *settings)


def speedup(
    result: Replay,
    cost: Cost,
    *,
    round_us: float = 0.0,
    samples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Return how many times faster the rounds commit tokens than autoregressive decoding, and its interval.

    speedup = tokens * cost(0) / sum over rounds of (cost(n) + round_us), n nodes besides the root.

    Parameters
    ----------
    result : Replay
    cost : callable
        A cost model, or any function of n, in the unit of `round_us`, whichever that is.
    round_us : float
        The cost of a round besides the target's pass: drafting, building the tree, committing. Finite, at least 0.
    samples, confidence, seed
        As in `tokens_per_pass`.

    Examples
    --------
    >>> from ddtree_cupy.explore import LinearCost, chain, replay
    >>> free = speedup(replay(Traces.load(), chain(15)), LinearCost(1.0, 0.0))
    >>> free.value == tokens_per_pass(replay(Traces.load(), chain(15))).value  # nodes cost nothing
    True
    """
    check = Checker("speedup")
    settings = _settings(check, samples, confidence, seed)
    round_us = _round_us(check, round_us)
    check_cost("speedup", cost)
    check.kind("result", result, Replay)
    sizes, inverse = np.unique(result.num_nodes, return_inverse=True)
    costs = np.array([cost_of("speedup", cost, size) for size in (0, *(sizes - 1).tolist())])
    return _ratio(check, result, (1.0 + result.num_accepted) * costs[0], costs[1:][inverse] + round_us, *settings)


def _round_us(check: Checker, round_us: float) -> float:
    found = check.real("round_us", round_us)
    if found < 0:
        raise ArgumentError(f"{check.function}: `round_us` is {round_us!r}, expected a finite number >= 0")
    return found


def _settings(check: Checker, samples: int, confidence: float, seed: int) -> tuple[int, float, int]:
    """Return the settings of a bootstrap after checking them."""
    samples = check.integer("samples", samples, low=1)
    check.integer("samples", samples, low=1, high=_MOST_SAMPLES)
    seed = check.integer("seed", seed, low=0)
    share = check.real("confidence", confidence, above=0.0)
    if share >= 1.0:
        raise ArgumentError(f"{check.function}: `confidence` is {confidence!r}, expected a number between 0 and 1")
    return samples, share, seed


def _ratio(
    check: Checker, result: Replay, gains: Array, spent: Array, samples: int, confidence: float, seed: int
) -> Interval:
    """Ratio of sums, with prompts drawn with replacement; prompts without rounds are ignored."""
    if result.num_rounds == 0:
        raise ArgumentError(f"{check.function}: `result` has no rounds, expected at least one")
    prompts, of_round = np.unique(result.prompts, return_inverse=True)
    gain, cost = (np.bincount(of_round, weights) for weights in (gains, spent))
    value = float(gain.sum() / cost.sum())
    if len(prompts) < 2:
        return Interval(value, np.nan, np.nan)
    drawn = np.random.default_rng(seed).integers(len(prompts), size=(samples, len(prompts)))
    low, high = np.quantile(gain[drawn].sum(1) / cost[drawn].sum(1), [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(value, float(low), float(high))


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
        cost : callable
        round_us, samples, seed
            As in `speedup`.
        """
        gains = tuple(speedup(r, cost, round_us=round_us, samples=samples, seed=seed) for r in self.replays)
        return BudgetCurve(self.budgets, self.tokens_per_pass, gains, self.expected_tokens_per_pass, self.replays)


def budget_curve(
    traces: Traces,
    budgets: Sequence[int],
    *,
    policy: Callable[[int], Policy] = BestFirst,
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
    policy : callable
        From a budget to a policy, such as `BestFirst`, `chain` or a lambda; called in this process.
    cost : callable, optional
        A cost model, or any function of the nodes besides the root.
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
    _settings(check, samples, 0.95, seed)  # before the replays, which take longer
    _round_us(check, round_us)
    if cost is not None:
        check_cost("budget_curve", cost)
        cost_of("budget_curve", cost, 0)
    if not callable(policy):
        raise DTypeError(
            f"budget_curve: `policy` is {type(policy).__name__}, expected a function from a budget to a policy, such "
            f"as BestFirst"
        )
    replays = tuple(sweep(traces, [policy(budget) for budget in budgets], executor=executor, progress=progress))
    curve = BudgetCurve(
        budgets=tuple(budgets),
        tokens_per_pass=tuple(tokens_per_pass(result, samples=samples, seed=seed) for result in replays),
        speedup=(),
        expected_tokens_per_pass=np.array([result.expected_tokens.mean() for result in replays]),
        replays=replays,
    )
    return curve if cost is None else curve.with_cost(cost, round_us=round_us, samples=samples, seed=seed)
