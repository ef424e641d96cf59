"""Sweeps give the same bits anywhere; speedups are ratios of sums with intervals over prompts."""

import dataclasses
import importlib.util
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
from explore.live import Star

from ddtree_cupy.errors import ArgumentError
from ddtree_cupy.explore import (
    BestFirst,
    BudgetCurve,
    CostTable,
    EntropyBudget,
    Interval,
    LinearCost,
    MeasuredCost,
    budget_curve,
    chain,
    named_policies,
    replay,
    speedup,
    sweep,
    tokens_per_pass,
)


def bits(results):
    """Everything a sweep returned, as bytes."""
    return [[r.policy, *(getattr(r, field.name).tobytes() for field in dataclasses.fields(r)[1:])] for r in results]


def test_sweep_is_identical_on_threads_and_processes(traces):
    some, policies = traces.select(range(3)), list(named_policies().values())[:3]
    here = sweep(some, policies, num_rounds=500, seed=3)
    for pool in (ThreadPoolExecutor(2), ProcessPoolExecutor(2, mp_context=get_context("spawn"))):
        with pool as executor:
            assert bits(sweep(some, policies, num_rounds=500, seed=3, executor=executor)) == bits(here)


@pytest.mark.cluster
@pytest.mark.skipif(importlib.util.find_spec("distributed") is None, reason="needs the extra `cluster` (dask)")
@pytest.mark.filterwarnings("default")  # the warnings of a cluster going down are not ours
def test_sweep_is_identical_on_a_dask_cluster(traces):
    from distributed import Client, LocalCluster

    policies = list(named_policies().values())
    here = sweep(traces, policies, num_rounds=1000, seed=3)
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        executor = client.get_executor()
        assert bits(sweep(traces, policies, num_rounds=1000, seed=3, executor=executor)) == bits(here)
        budgets = (4, 16, 64)
        there = budget_curve(traces, budgets, executor=executor, cost=LinearCost(40.0, 1.0))
        assert there.speedup == budget_curve(traces, budgets, cost=LinearCost(40.0, 1.0)).speedup


def test_sweep_hands_on_an_error_of_a_task(traces):
    with ThreadPoolExecutor(1) as executor, pytest.raises(ArgumentError, match="uses rank 61 or more at depth 2"):
        sweep(traces, [chain(3), BestFirst(256, max_children=(1, 256)), Star()], executor=executor)


def test_bootstrap_interval_covers_the_spread_between_prompts(traces):
    result = replay(traces, BestFirst(16))
    means = [1 + result.num_accepted[result.draws == draw].mean() for draw in range(traces.num_prompts)]
    wide, narrow = (tokens_per_pass(result, confidence=c, seed=1) for c in (0.95, 0.5))
    assert min(means) < wide.low < narrow.low < wide.value < narrow.high < wide.high < max(means)
    assert tokens_per_pass(result, seed=1) == wide


def by_hand(result, cost, round_us, samples, confidence, seed):
    """Sum the rounds of each prompt, resample prompts, take the ratio of sums of each sample."""
    prompts = sorted(set(result.prompts.tolist()))
    gains, spent = [0.0] * len(prompts), [0.0] * len(prompts)
    for prompt, accepted, nodes in zip(
        result.prompts.tolist(), result.num_accepted.tolist(), result.num_nodes.tolist(), strict=True
    ):
        gains[prompts.index(prompt)] += (1.0 + accepted) * cost(0)
        spent[prompts.index(prompt)] += cost(nodes - 1) + round_us
    ratios = []
    for drawn in np.random.default_rng(seed).integers(len(prompts), size=(samples, len(prompts))):
        ratios.append(sum(gains[i] for i in drawn) / sum(spent[i] for i in drawn))
    low, high = np.quantile(ratios, [(1 - confidence) / 2, (1 + confidence) / 2])
    return sum(gains) / sum(spent), low, high


@pytest.mark.parametrize("num_rounds", [None, 200])
@pytest.mark.parametrize(("samples", "confidence", "seed"), [(101, 0.8, 0), (41, 0.5, 7), (1, 0.95, 3), (401, 0.95, 1)])
def test_intervals_match_a_bootstrap_by_hand(traces, num_rounds, samples, confidence, seed):
    result = replay(traces, EntropyBudget(2, 32), num_rounds=num_rounds, seed=1)
    cost = LinearCost(128.0, 2.0)  # whole numbers: sums are exact in any order
    settings = {"samples": samples, "confidence": confidence, "seed": seed}
    assert speedup(result, cost, round_us=16.0, **settings) == by_hand(result, cost, 16.0, **settings)
    assert tokens_per_pass(result, **settings) == by_hand(result, lambda nodes: 1.0, 0.0, **settings)
    assert tokens_per_pass(result, **settings).value == result.tokens_per_pass


def test_intervals_are_no_narrower_for_resampled_rounds(traces):
    cost = LinearCost(100.0, 2.0)
    once, often = (replay(traces, BestFirst(16), num_rounds=rounds) for rounds in (None, 10_000))
    assert often.num_rounds > 60 * once.num_rounds
    for first, second in (
        (tokens_per_pass(once), tokens_per_pass(often)),
        (speedup(once, cost), speedup(often, cost)),
    ):
        assert 0.85 < (second.high - second.low) / (first.high - first.low) < 1.15


def test_interval_of_fewer_than_two_prompts_is_nan(traces):
    one = replay(traces.select([4]), BestFirst(16))
    for result in (one, replay(traces.select([4]), BestFirst(16), num_rounds=200)):
        for interval in (tokens_per_pass(result), speedup(result, LinearCost(1.0, 1.0))):
            assert interval.value > 0
            assert np.isnan([interval.low, interval.high]).all()
    two = replay(traces.select([4, 5]), BestFirst(16))
    assert np.isfinite(tokens_per_pass(two)).all()


def test_intervals_ignore_prompts_without_rounds(traces):
    result = replay(traces, BestFirst(16))
    kept = {name: getattr(result, name)[result.prompts % 2 == 1] for name in ("draws", "prompts", "positions")}
    kept |= {name: getattr(result, name)[result.prompts % 2 == 1] for name in ("num_accepted", "num_nodes")}
    gaps = dataclasses.replace(result, **kept)
    odd = replay(traces.select(range(1, traces.num_prompts, 2)), BestFirst(16))
    assert tokens_per_pass(gaps) == tokens_per_pass(odd)
    none = dataclasses.replace(result, **{name: array[:0] for name, array in kept.items()})
    with pytest.raises(ArgumentError, match="tokens_per_pass: `result` has no rounds"):
        tokens_per_pass(none)
    with pytest.raises(ArgumentError, match="speedup: `result` has no rounds"):
        speedup(none, LinearCost(1.0, 1.0))


def test_budget_curve_finds_what_each_cost_model_favours(traces):
    curve = budget_curve(traces, (4, 16, 64))
    values = [interval.value for interval in curve.tokens_per_pass]
    assert values == sorted(values)
    assert curve.best_budget == 64
    assert np.all(np.diff(curve.expected_tokens_per_pass) > 0)
    assert curve.with_cost(LinearCost(1.0, 10.0)).best_budget == 4
    table = CostTable.load()
    measured = curve.with_cost(MeasuredCost(table, 8, 8192) + LinearCost(1000.0, 0.0))
    assert all(low <= value <= high for value, low, high in measured.speedup)


def test_budget_curve_matches_its_replays_one_by_one(traces):
    budgets, cost = (2, 16), LinearCost(100.0, 3.0)
    curve = budget_curve(traces, budgets, cost=cost, round_us=40.0, samples=50, seed=9)
    again = budget_curve(traces, budgets).with_cost(cost, round_us=40.0, samples=50, seed=9)
    for at, budget in enumerate(budgets):
        result = replay(traces, BestFirst(budget))
        assert curve.tokens_per_pass[at] == tokens_per_pass(result, samples=50, seed=9)
        assert curve.speedup[at] == again.speedup[at] == speedup(result, cost, round_us=40.0, samples=50, seed=9)
        tree = BestFirst(budget).build(traces.candidates, traces.root_token_ids)
        expected = np.exp(tree.path_scores).sum(-1)[result.positions].mean()
        assert curve.expected_tokens_per_pass[at] == pytest.approx(expected, rel=1e-12)
    assert curve.speedup[1].value != speedup(curve.replays[1], cost).value  # the round's own cost counts


def test_best_budget_takes_the_smallest_of_the_best_and_never_nan():
    def curve(*values):
        intervals = tuple(Interval(value, value, value) for value in values)
        return BudgetCurve((16, 8, 4)[: len(values)], intervals, (), np.zeros(len(values)), ())

    assert curve(2.0, np.nan, 1.0).best_budget == 16
    assert curve(np.nan, 1.0, 2.0).best_budget == 4
    assert curve(2.0, 2.0, 1.0).best_budget == 8
    for empty in (curve(), curve(np.nan)):
        with pytest.raises(ArgumentError, match=r"BudgetCurve\.best_budget: the values are \["):
            _ = empty.best_budget
