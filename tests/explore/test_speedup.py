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
    CostTable,
    LinearCost,
    MeasuredCost,
    Traces,
    budget_curve,
    chain,
    named_policies,
    replay,
    speedup,
    sweep,
    tokens_per_pass,
)
from ddtree_cupy.explore.__main__ import main


@pytest.fixture(scope="module")
def traces():
    return Traces.load()


def bits(results):
    """Everything a sweep returned, as bytes."""
    return [[r.policy, *(getattr(r, field.name).tobytes() for field in dataclasses.fields(r)[1:])] for r in results]


def test_sweep_is_identical_on_threads_and_processes(traces):
    policies = list(named_policies().values())[:6]
    here = sweep(traces, policies, num_rounds=500, seed=3)
    with ThreadPoolExecutor(2) as executor:
        assert bits(sweep(traces, policies, num_rounds=500, seed=3, executor=executor)) == bits(here)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as executor:
        assert bits(sweep(traces, policies, num_rounds=500, seed=3, executor=executor)) == bits(here)


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
    with ThreadPoolExecutor(1) as executor, pytest.raises(ArgumentError, match="uses rank 63"):
        sweep(traces, [chain(3), BestFirst(200, max_depth=1), Star()], executor=executor)


def test_speedup_is_the_ratio_of_sums(traces):
    result = replay(traces, BestFirst(16))
    cost = LinearCost(100.0, 2.0)
    found = speedup(result, cost, round_us=30.0)
    spent = sum(cost(int(nodes) - 1) + 30.0 for nodes in result.num_nodes)
    assert found.value == pytest.approx(result.num_tokens * cost(0) / spent, rel=1e-12)
    assert found.low < found.value < found.high
    assert tokens_per_pass(result).value == result.tokens_per_pass


def test_bootstrap_interval_covers_the_spread_between_prompts(traces):
    result = replay(traces, BestFirst(16))
    means = [1 + result.num_accepted[result.draws == draw].mean() for draw in range(traces.num_prompts)]
    wide, narrow = (tokens_per_pass(result, confidence=c, seed=1) for c in (0.95, 0.5))
    assert min(means) < wide.low < narrow.low < wide.value < narrow.high < wide.high < max(means)
    assert tokens_per_pass(result, seed=1) == wide
    one = replay(traces.select([4]), BestFirst(16))
    assert len(set(tokens_per_pass(one))) == 1  # a single prompt says nothing about others


def test_budget_curve_finds_what_each_cost_model_favours(traces):
    curve = budget_curve(traces, (4, 16, 64))
    values = [interval.value for interval in curve.tokens_per_pass]
    assert values == sorted(values)
    assert curve.best_budget == 64
    assert np.all(np.diff(curve.expected_tokens_per_pass) > 0)
    assert curve.with_cost(LinearCost(1.0, 10.0)).best_budget == 4
    table = CostTable.load()
    measured = curve.with_cost(MeasuredCost(table, 8, 8192, extrapolate=True) + LinearCost(1000.0, 0.0))
    assert all(low <= value <= high for value, low, high in measured.speedup)


def test_expected_tokens_match_the_tree(traces):
    some = traces.select([0])
    result = replay(some, BestFirst(12))
    tree = BestFirst(12).build(some.candidates, some.root_token_ids)
    assert np.array_equal(result.expected_tokens, np.exp(tree.path_scores[result.positions]).sum(-1))
    assert np.isnan(replay(some, Star()).expected_tokens).all()


@pytest.mark.parametrize("cost", [lambda nodes: 0.0, lambda nodes: np.nan, lambda nodes: np.inf])
def test_speedup_rejects_costs_that_are_none(traces, cost):
    with pytest.raises(ArgumentError, match="must be positive and finite"):
        speedup(replay(traces, chain(4)), cost)


def test_policies_command_prints_every_policy(capsys):
    assert main(["policies"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{name}" in printed for name in named_policies())
