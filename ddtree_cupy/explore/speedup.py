"""Tokens per pass and speedup, with bootstrap intervals over prompts, and their curves over the budget."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ddtree_cupy.errors import ArgumentError
from ddtree_cupy.explore.policies import BestFirst, Policy
from ddtree_cupy.explore.replay import Replay
from ddtree_cupy.explore.sweeps import sweep
from ddtree_cupy.explore.traces import Traces

__all__ = ["BudgetCurve", "Interval", "budget_curve", "speedup", "tokens_per_pass"]

Cost = Callable[[int], float]


class Interval(NamedTuple):
    """An estimate and its bootstrap interval.

    Attributes
    ----------
    value, low, high : float
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return e.g. "6.66 (5.92 to 7.67)"."""
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def tokens_per_pass(result: Replay, *, samples: int = 1000, confidence: float = 0.95, seed: int = 0) -> Interval:
    """Return the mean tokens a pass commits, and its percentile interval.

    Parameters
    ----------
    result : Replay
        Of each prompt once: resampled rounds would count their prompts as independent.
    samples : int
        Bootstrap samples: prompts are drawn with replacement, so that rounds of one text stay together.
    confidence : float
    seed : int

    Returns
    -------
    Interval
    """
    passes = np.ones(result.num_rounds)
    return _ratio(result, 1.0 + result.num_accepted, passes, samples, confidence, seed)


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
        A cost model, or any function of n; any unit, that of `round_us`.
    round_us : float
        What a round costs beyond the target's pass: drafting, building the tree, committing.
    samples, confidence, seed
        As in `tokens_per_pass`.

    Returns
    -------
    Interval

    Examples
    --------
    >>> from ddtree_cupy.explore import LinearCost, chain, replay
    >>> free = speedup(replay(Traces.load(), chain(15)), LinearCost(1.0, 0.0))
    >>> free.value == tokens_per_pass(replay(Traces.load(), chain(15))).value  # nodes cost nothing
    True
    """
    sizes, inverse = np.unique(result.num_nodes, return_inverse=True)
    spent = np.array([cost(int(size) - 1) for size in sizes])[inverse] + round_us
    baseline = cost(0)
    if not (np.isfinite(spent).all() and (spent > 0).all() and baseline > 0):
        raise ArgumentError("speedup: `cost` must be positive and finite for every tree of the replay")
    return _ratio(result, (1.0 + result.num_accepted) * baseline, spent, samples, confidence, seed)


def _ratio(
    result: Replay,
    gains: npt.NDArray[np.floating[Any]],
    spent: npt.NDArray[np.floating[Any]],
    samples: int,
    confidence: float,
    seed: int,
) -> Interval:
    """Ratio of sums, with texts drawn with replacement."""
    texts = int(result.draws.max()) + 1
    gain, cost = (np.bincount(result.draws, weights, minlength=texts) for weights in (gains, spent))
    if samples < 1 or not 0.0 < confidence < 1.0:
        raise ArgumentError("bootstrap: expected `samples` of at least 1 and `confidence` between 0 and 1")
    drawn = np.random.default_rng(seed).integers(texts, size=(samples, texts))
    low, high = np.quantile(gain[drawn].sum(1) / cost[drawn].sum(1), [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(gain.sum() / cost.sum()), float(low), float(high))


@dataclass(frozen=True, eq=False)
class BudgetCurve:
    """One policy over its budget.

    Attributes
    ----------
    budgets : tuple of int
    tokens_per_pass, speedup : tuple of Interval
        One a budget; `speedup` is empty without a cost model.
    expected_tokens_per_pass : float64 array
        What the draft marginals promise, the mean over the same rounds; NaN for trees without path scores.
    replays : tuple of Replay
    """

    budgets: tuple[int, ...]
    tokens_per_pass: tuple[Interval, ...]
    speedup: tuple[Interval, ...]
    expected_tokens_per_pass: npt.NDArray[np.float64]
    replays: tuple[Replay, ...]

    @property
    def best_budget(self) -> int:
        """The budget of the highest speedup, the smallest on ties; without a cost model, of the most tokens."""
        values = [interval.value for interval in self.speedup or self.tokens_per_pass]
        return self.budgets[int(np.argmax(values))]

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
    policy : callable
        From a budget to a policy, called in this process: `BestFirst`, `chain`, a lambda.
    cost : callable, optional
        A cost model, or any function of the nodes besides the root.
    round_us, samples, seed
        As in `speedup`.
    executor, progress
        As in `sweep`.

    Returns
    -------
    BudgetCurve

    Examples
    --------
    >>> from ddtree_cupy.explore import LinearCost
    >>> curve = budget_curve(Traces.load(), (4, 16, 64), cost=LinearCost(fixed_us=40.0, per_node_us=1.0))
    >>> curve.best_budget, curve.with_cost(LinearCost(fixed_us=4000.0, per_node_us=1.0)).best_budget
    (16, 64)
    """
    replays = tuple(sweep(traces, [policy(budget) for budget in budgets], executor=executor, progress=progress))
    curve = BudgetCurve(
        budgets=tuple(int(budget) for budget in budgets),
        tokens_per_pass=tuple(tokens_per_pass(result, samples=samples, seed=seed) for result in replays),
        speedup=(),
        expected_tokens_per_pass=np.array([result.expected_tokens.mean() for result in replays]),
        replays=replays,
    )
    return curve if cost is None else curve.with_cost(cost, round_us=round_us, samples=samples, seed=seed)
