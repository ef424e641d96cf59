"""Paired comparisons: the same prompts for both policies in every sample."""

import dataclasses

import numpy as np
import pytest

from ddtree_cupy.errors import ArgumentError, DTypeError
from ddtree_cupy.explore import (
    LinearCost,
    compare,
    compare_policies,
    named_policies,
    policy_table,
    replay,
    speedup,
    tokens_per_pass,
)
from ddtree_cupy.explore.__main__ import main
from tests.refusals import rejects


@pytest.fixture(scope="module")
def pair(traces):
    return replay(traces, "best-first 16"), replay(traces, "chain 8")


def by_hand(results, cost, round_us, samples, confidence, seed):
    """Sum the rounds of each prompt, draw prompts for both at once, divide the ratios of sums."""
    sums = []
    for result in results:
        gains, spent = np.zeros(24), np.zeros(24)
        np.add.at(gains, result.prompts, (1.0 + result.num_accepted) * cost(0))
        np.add.at(spent, result.prompts, [cost(nodes - 1) + round_us for nodes in result.num_nodes.tolist()])
        sums.append((gains, spent))

    def ratio(drawn):
        (gain_a, cost_a), (gain_b, cost_b) = sums
        return (gain_a[drawn].sum() / cost_a[drawn].sum()) / (gain_b[drawn].sum() / cost_b[drawn].sum())

    ratios = [ratio(drawn) for drawn in np.random.default_rng(seed).integers(24, size=(samples, 24))]
    low, high = np.quantile(ratios, [(1 - confidence) / 2, (1 + confidence) / 2])
    return ratio(np.arange(24)), low, high


@pytest.mark.parametrize(("samples", "confidence", "seed"), [(101, 0.8, 0), (1, 0.95, 3), (401, 0.95, 1)])
def test_compare_matches_a_paired_bootstrap_by_hand(pair, samples, confidence, seed):
    settings = {"samples": samples, "confidence": confidence, "seed": seed}
    cost = LinearCost(128.0, 2.0)  # whole numbers: sums are exact in any order
    assert compare(*pair, cost=cost, round_us=16.0, **settings) == by_hand(pair, cost, 16.0, **settings)
    assert compare(*pair, **settings) == by_hand(pair, lambda nodes: 1.0, 0.0, **settings)


def test_compare_is_the_ratio_and_narrower_than_unpaired(pair):
    a, b = pair
    found = compare(a, b)
    assert found.value == tokens_per_pass(a).value / tokens_per_pass(b).value
    cost = LinearCost(40.0, 1.0)
    assert compare(a, b, cost=cost).value == speedup(a, cost).value / speedup(b, cost).value
    apart = [tokens_per_pass(result) for result in pair]
    unpaired = np.log(apart[0].high / apart[0].low), np.log(apart[1].high / apart[1].low)
    assert np.log(found.high / found.low) < 0.75 * np.hypot(*unpaired)
    assert compare(a, a) == (1.0, 1.0, 1.0)
    back = compare(b, a)
    assert (back.value, back.low, back.high) == pytest.approx((1 / found.value, 1 / found.high, 1 / found.low))


def test_compare_of_one_prompt_knows_no_interval(traces):
    one = traces.select([4])
    found = compare(replay(one, "chain 3"), replay(one, "chain 8"))
    assert found.value < 1
    assert np.isnan([found.low, found.high]).all()


def first_rounds(result, count):
    fields = [field.name for field in dataclasses.fields(result)[1:]]
    return dataclasses.replace(result, **{name: getattr(result, name)[:count] for name in fields})


@rejects(
    (DTypeError, "compare: `a` is str, expected Replay", lambda t, a: compare("a", a)),
    (DTypeError, "compare: `b` is Traces, expected Replay", lambda t, a: compare(a, t)),
    (ArgumentError, "compare: `samples` is 0", lambda t, a: compare(a, a, samples=0)),
    (ArgumentError, "compare: `round_us` is -1", lambda t, a: compare(a, a, round_us=-1.0)),
    (ArgumentError, "compare: `confidence` is 1", lambda t, a: compare(a, a, confidence=1.0)),
    (DTypeError, "compare: `cost` is float", lambda t, a: compare(a, a, cost=1.0)),
    (ArgumentError, "compare: `b` has no rounds", lambda t, a: compare(a, first_rounds(a, 0))),
    (
        ArgumentError,
        "`b` has prompts that were drawn more than once",
        lambda t, a: compare(a, replay(t, "chain 8", num_rounds=999)),
    ),
    (ArgumentError, "not a replay of the texts", lambda t, a: compare(a, replay(t.select(range(9)), "chain 8"))),
    (ArgumentError, "not a replay of the texts", lambda t, a: compare(a, first_rounds(a, a.num_rounds - 1))),
    (DTypeError, "compare_policies: `traces` is str", lambda t, a: compare_policies("x")),
    (DTypeError, "compare_policies: `policies` is str", lambda t, a: compare_policies(t, "chain 8")),
    (ArgumentError, r"compare_policies: `policies\[1\]` is 'x'", lambda t, a: compare_policies(t, ["chain 8", "x"])),
    (ArgumentError, "compare_policies: `against` is 'x'", lambda t, a: compare_policies(t, against="x")),
    (ArgumentError, "compare_policies: `samples` is 0", lambda t, a: compare_policies(t, samples=0)),
    (DTypeError, r"policy_table: `rows\[0\]` is Replay", lambda t, a: policy_table([a])),
    (ArgumentError, r"policy_table: `len\(rows\)` is 0", lambda t, a: policy_table([])),
)
def test_comparisons_reject(call, traces, pair):
    call(traces, pair[0])


def test_the_advice_of_compare_works(traces, pair):
    with pytest.raises(ArgumentError, match=r"a replay without `num_rounds`"):
        compare(replay(traces, "chain 8", num_rounds=999), pair[0])
    assert compare(replay(traces, "chain 8"), pair[0]).value < 1


def test_compare_policies_has_the_numbers_of_the_functions(traces):
    cost = LinearCost(40.0, 1.0)
    names = ["chain 8", "best-first 16"]
    rows = compare_policies(traces, names, against="chain 15", cost=cost, round_us=3.0, samples=50, seed=2)
    base, settings = replay(traces, "chain 15"), {"samples": 50, "seed": 2}
    assert [row.policy for row in rows] == names
    for row in rows:
        result = replay(traces, row.policy)
        assert row.tokens_per_pass == tokens_per_pass(result, **settings)
        assert row.speedup == speedup(result, cost, round_us=3.0, **settings)
        assert row.ratio == compare(result, base, cost=cost, round_us=3.0, **settings)
        assert row.nodes == result.num_nodes.mean() - 1
        assert row.against == "chain 15"
    assert compare_policies(traces, ["chain 8"])[0].speedup is None


def test_policies_command_prints_the_paired_column(two_prompts, tmp_path, capsys):
    two_prompts.save(tmp_path / "traces.npz")
    assert main(["policies", str(tmp_path / "traces.npz")]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == repr(two_prompts)
    for row in compare_policies(two_prompts):
        value, low, high = row.ratio
        line = next(line for line in printed.splitlines() if line.startswith(f"{row.policy}  "))
        assert line.endswith(f"{value:.2f} {low:.2f}-{high:.2f}")
    assert all(f"\n{name}" in printed for name in named_policies())
    assert "ratio: to the tokens per pass of best-first 64, paired over prompts" in printed
    assert max(map(len, printed.splitlines())) <= 82
