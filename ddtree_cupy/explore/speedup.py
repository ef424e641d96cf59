"""Tokens per pass, speedups and paired comparisons, each with a bootstrap interval over prompts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import Checker
from ddtree_cupy.errors import ArgumentError
from ddtree_cupy.explore.cost_tables import CostTable, checked_cost
from ddtree_cupy.explore.costs import cost_of
from ddtree_cupy.explore.replay import Replay

__all__ = [
    "Cost",
    "Interval",
    "bootstrap_settings",
    "checked_round_us",
    "compare",
    "ratio_over_prompts",
    "speedup",
    "tokens_per_pass",
]

Array = npt.NDArray[np.floating[Any]]
Cost = Callable[[int], float] | CostTable
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
    settings = bootstrap_settings(check, samples, confidence, seed)
    check.kind("result", result, Replay)
    return _interval(settings, _tokens_per_pass(check, "result", result))


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
    cost : callable or CostTable
        A cost model, or any function of n, in the unit of `round_us`, whichever that is; a table of one number of
        heads and one context.
    round_us : float
        The cost of a round besides the target's pass: drafting, building the tree, committing. Finite, at least 0.
    samples, confidence, seed
        As in `tokens_per_pass`.

    Examples
    --------
    >>> from ddtree_cupy.explore import LinearCost, Traces, replay
    >>> result = replay(Traces.load(), "chain 15")
    >>> speedup(result, LinearCost(1.0, 0.0)).value == tokens_per_pass(result).value  # nodes cost nothing
    True
    """
    check = Checker("speedup")
    settings = bootstrap_settings(check, samples, confidence, seed)
    round_us = checked_round_us(check, round_us)
    cost = checked_cost("speedup", cost)
    check.kind("result", result, Replay)
    return _interval(settings, _speedup(check, "result", result, cost, round_us))


def compare(
    a: Replay,
    b: Replay,
    *,
    cost: Cost | None = None,
    round_us: float = 0.0,
    samples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Return how many times as many tokens per pass one policy has as another, and its paired interval.

    value = tokens_per_pass(a) / tokens_per_pass(b), or with a cost speedup(a) / speedup(b)

    Every bootstrap sample draws the same prompts for both, so what makes a text easy or hard for all policies drops
    out. The interval is therefore narrower than those of the two values suggest; one that does not contain 1 says that
    the policies differ on such texts.

    Parameters
    ----------
    a, b : Replay
        Replays of the same traces, each prompt once (without `num_rounds`).
    cost, round_us
        As in `speedup`. Default: tokens are counted, whatever a pass costs.
    samples, confidence, seed
        As in `tokens_per_pass`.

    Raises
    ------
    ArgumentError
        The replays are not of the same prompts, each decoded once and to its end, as far as positions tell.

    Examples
    --------
    >>> from ddtree_cupy.explore import Traces, replay
    >>> traces = Traces.load()
    >>> print(compare(replay(traces, "best-first 64"), replay(traces, "chain 15")))
    1.38 (1.28 to 1.47)
    """
    check = Checker("compare")
    settings = bootstrap_settings(check, samples, confidence, seed)
    round_us = checked_round_us(check, round_us)
    cost = None if cost is None else checked_cost("compare", cost)
    for name, result in (("a", a), ("b", b)):
        check.kind(name, result, Replay)
        _check_decoded_once(name, result)
    sums = [
        _tokens_per_pass(check, name, result) if cost is None else _speedup(check, name, result, cost, round_us)
        for name, result in (("a", a), ("b", b))
    ]
    if not _covers_same_texts(a, b):
        raise ArgumentError(
            "compare: `b` is not a replay of the texts of `a`, expected whole replays of the same traces: "
            "replay(traces, policy) for both"
        )
    return _interval(settings, *sums)


def _check_decoded_once(name: str, result: Replay) -> None:
    if len(np.unique(result.draws)) != len(np.unique(result.prompts)):
        raise ArgumentError(
            f"compare: `{name}` has prompts that were drawn more than once, expected each once: a replay without "
            f"`num_rounds`"
        )


def _covers_same_texts(a: Replay, b: Replay) -> bool:
    """Return whether both have the same prompts from the same first position to the same end.

    A text ends inside the last round of either, so each last round begins before the other ends.
    """
    edges = []
    for result in (a, b):
        prompts, first = np.unique(result.prompts, return_index=True)
        last = result.num_rounds - 1 - np.unique(result.prompts[::-1], return_index=True)[1]
        starts = result.positions[last]
        edges.append((prompts, result.positions[first], starts, starts + 1 + result.num_accepted[last]))
    (prompts, first, starts, ends), (others, other_first, other_starts, other_ends) = edges
    same = np.array_equal(prompts, others) and np.array_equal(first, other_first)
    return same and bool((starts < other_ends).all() and (other_starts < ends).all())


def _tokens_per_pass(check: Checker, name: str, result: Replay) -> tuple[Array, Array]:
    return _by_prompt(check, name, result, 1.0 + result.num_accepted, np.ones(result.num_rounds))


def _speedup(
    check: Checker, name: str, result: Replay, cost: Callable[[int], float], round_us: float
) -> tuple[Array, Array]:
    sizes, inverse = np.unique(result.num_nodes, return_inverse=True)
    costs = np.array([cost_of(check.function, cost, size) for size in (0, *(sizes - 1).tolist())])
    return _by_prompt(check, name, result, (1.0 + result.num_accepted) * costs[0], costs[1:][inverse] + round_us)


def checked_round_us(check: Checker, round_us: float) -> float:
    """Return the cost of a round besides the target's pass after checking it.

    Parameters
    ----------
    check : Checker
    round_us : float
    """
    found = check.real("round_us", round_us)
    if found < 0:
        raise ArgumentError(f"{check.function}: `round_us` is {round_us!r}, expected a finite number >= 0")
    return found


def bootstrap_settings(check: Checker, samples: int, confidence: float, seed: int) -> tuple[int, float, int]:
    """Return the settings of a bootstrap after checking them.

    Parameters
    ----------
    check : Checker
    samples : int
    confidence : float
    seed : int
    """
    samples = check.integer("samples", samples, low=1)
    check.integer("samples", samples, low=1, high=_MOST_SAMPLES)
    seed = check.integer("seed", seed, low=0)
    share = check.real("confidence", confidence, above=0.0)
    if share >= 1.0:
        raise ArgumentError(f"{check.function}: `confidence` is {confidence!r}, expected a number between 0 and 1")
    return samples, share, seed


def ratio_over_prompts(
    check: Checker, prompts: npt.NDArray[np.int32], gains: Array, spent: Array, samples: int, seed: int
) -> Interval:
    """Return sum(gains) / sum(spent) with the 95 % interval over prompts; entry i belongs to prompts[i].

    Parameters
    ----------
    check : Checker
    prompts, gains, spent : array, shape (n,)
    samples : int
    seed : int
    """
    return _interval(bootstrap_settings(check, samples, 0.95, seed), _sums(prompts, gains, spent))


def _by_prompt(check: Checker, name: str, result: Replay, gains: Array, spent: Array) -> tuple[Array, Array]:
    """Sum what the rounds gain and spend over each prompt; prompts without rounds are left out."""
    if result.num_rounds == 0:
        raise ArgumentError(f"{check.function}: `{name}` has no rounds, expected at least one")
    return _sums(result.prompts, gains, spent)


def _sums(prompts: npt.NDArray[np.int32], gains: Array, spent: Array) -> tuple[Array, Array]:
    which = np.unique(prompts, return_inverse=True)[1]
    return np.bincount(which, gains).astype(np.float64), np.bincount(which, spent).astype(np.float64)


def _interval(settings: tuple[int, float, int], *sums: tuple[Array, Array]) -> Interval:
    """Ratio of sums over prompts, or that ratio over a second one; samples draw prompts with replacement."""
    samples, confidence, seed = settings
    value = float(_first_over_second([gain.sum() / cost.sum() for gain, cost in sums]))
    count = len(sums[0][0])
    if count < 2:
        return Interval(value, np.nan, np.nan)
    drawn = np.random.default_rng(seed).integers(count, size=(samples, count))
    ratios = _first_over_second([gain[drawn].sum(1) / cost[drawn].sum(1) for gain, cost in sums])
    low, high = np.quantile(ratios, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(value, float(low), float(high))


def _first_over_second(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values[0] / values[1]
