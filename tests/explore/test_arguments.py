"""Arguments of the wrong kind or far beyond reach: an error that names them, before anything is replayed."""

import numpy as np
import pytest

from ddtree_cupy.errors import ArgumentError, DDTreeError, DTypeError, ShapeError
from ddtree_cupy.explore import (
    BestFirst,
    CostAware,
    CostTable,
    EntropyBudget,
    FixedTree,
    LinearCost,
    MeasuredCost,
    UserCost,
    budget_curve,
    chain,
    named_policy,
    record,
    replay,
    score,
    speedup,
    sweep,
    tokens_per_pass,
)
from tests.toys import NoisyDrafter, TableTarget

COST = LinearCost(1.0, 1.0)


class Untouched:
    """A policy that must not be asked for a tree."""

    name = "untouched"

    def build(self, candidates, root_token_ids):
        raise AssertionError("a replay began")


class Treeless:
    """A policy that returns no tree."""

    name = "treeless"

    def build(self, candidates, root_token_ids):
        return candidates.token_ids


def untouched(budget):
    return Untouched()


def curve(traces, **changed):
    return budget_curve(traces, **{"budgets": [4], "policy": untouched, "progress": False, **changed})


def entropy(**changed):
    return EntropyBudget(**{"low": 4, "high": 8, **changed})


def passes(traces, **changed):
    return tokens_per_pass(replay(traces, chain(4)), **changed)


def gain(traces, cost=COST, **changed):
    return speedup(replay(traces, chain(4)), cost, **changed)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda t: curve(t, cost=CostTable.load()),
            ArgumentError,
            r"heads \[8, 64\] and contexts .*MeasuredCost\(table,",
        ),
        (lambda t: curve(t, cost=CostTable), DTypeError, "`cost` is the class CostTable, expected a cost model"),
        (lambda t: curve(t, cost=3.0), DTypeError, "`cost` is float, expected a cost model or a function"),
        (lambda t: curve(t, cost=lambda n: "much"), DTypeError, r"`cost\(0\)` is 'much', expected a real number"),
        (lambda t: curve(t, cost=lambda n: n), ArgumentError, r"must be positive and finite .*cost\(0\) is 0"),
        (lambda t: curve(t, policy=BestFirst(3)), DTypeError, "`policy` is BestFirst, expected a function"),
        (lambda t: curve(t, policy=lambda n: n), DTypeError, r"`policy\(4\)` is int, expected a policy"),
        (
            lambda t: curve(t, policy="best-first 64"),
            ArgumentError,
            "is 'best-first 64', expected .* without its budget",
        ),
        (
            lambda t: curve(t, policy="Medusa"),
            ArgumentError,
            "`policy` is 'Medusa', expected the name of a policy with",
        ),
        (lambda t: curve(t, budgets=4), DTypeError, "`budgets` is int, expected a sequence"),
        (lambda t: curve(t, budgets="4"), DTypeError, "`budgets` is str, expected a sequence"),
        (lambda t: curve(t, budgets=[[4]]), DTypeError, r"`budgets\[0\]` is \[4\], expected an integer"),
        (lambda t: curve(t, budgets=()), ArgumentError, "budget_curve: `budgets` is empty, expected at least one"),
        (
            lambda t: curve(t, budgets=(4, -1)),
            ArgumentError,
            r"budget_curve: `budgets\[1\]` is -1, expected .* least 0",
        ),
        (lambda t: curve(t, budgets=(4.5,)), DTypeError, r"budget_curve: `budgets\[0\]` is 4\.5, expected an integer"),
        (lambda t: curve(t, samples=0), ArgumentError, "budget_curve: `samples` is 0"),
        (lambda t: curve(t, seed=-1), ArgumentError, "budget_curve: `seed` is -1"),
        (lambda t: curve(t, round_us=-1.0), ArgumentError, "budget_curve: `round_us` is -1"),
        (lambda t: curve(t, samples=10**12), ArgumentError, r"`samples` is 1000000000000, expected .* in 1\.\.1000000"),
        (lambda t: curve(t, executor=3), DTypeError, "`executor` is int, expected one with `submit`"),
        (lambda t: curve("traces"), DTypeError, "`traces` is str, expected Traces"),
        (lambda t: sweep(t, Untouched()), DTypeError, "`policies` is Untouched, expected a sequence"),
        (lambda t: sweep(t, [Untouched(), BestFirst]), DTypeError, r"`policies\[1\]` is the class BestFirst, expected"),
        (lambda t: sweep(None, [Untouched()]), DTypeError, "`traces` is NoneType, expected Traces"),
        (
            lambda t: replay(t, 3),
            DTypeError,
            "`policy` is int, expected a policy: .* or a name such as 'best-first 64'",
        ),
        (lambda t: replay(t, "chain"), ArgumentError, r"`policy` is 'chain', expected .* mean 'chain (8|15)'"),
        (lambda t: score(t, "best-first 8, spine 1, spine 2"), ArgumentError, "expected the name of a policy"),
        (
            lambda t: sweep(t, ["chain 4", "star"]),
            ArgumentError,
            r"sweep: `policies\[1\]` is 'star', expected the name",
        ),
        (lambda t: named_policy(4), DTypeError, "named_policy: `name` is int, expected str"),
        (lambda t: replay("t", Untouched()), DTypeError, "`traces` is str, expected Traces"),
        (lambda t: score(t, Treeless()), DTypeError, "'treeless' returned ndarray, expected DraftTree"),
        (lambda t: tokens_per_pass(t), DTypeError, "`result` is Traces, expected Replay"),
        (lambda t: speedup(t, LinearCost(1.0, 0.0)), DTypeError, "`result` is Traces, expected Replay"),
        (lambda t: t.select(1), DTypeError, "`prompts` is int, expected a sequence"),
        (lambda t: CostAware(4, CostTable.load()), ArgumentError, "CostAware: `cost` is a CostTable of heads"),
        (lambda t: CostAware(4, 3.0), DTypeError, "CostAware: `cost` is float, expected a cost model or a function"),
        (lambda t: CostAware("4", LinearCost(1.0, 0.0)), DTypeError, "CostAware: `max_budget` is '4'"),
        (lambda t: LinearCost("40", 1.0), DTypeError, "LinearCost: `fixed_us` is '40', expected a real number"),
        (lambda t: LinearCost(40.0, np.nan), ArgumentError, "LinearCost: `per_node_us` is nan"),
        (lambda t: MeasuredCost("table", 8, 8192), DTypeError, "MeasuredCost: `table` is str, expected CostTable"),
        (lambda t: MeasuredCost(CostTable.load(), "8", 8192), DTypeError, "MeasuredCost: `heads` is '8'"),
        (lambda t: UserCost((0, "a"), (1.0, 2.0)), DTypeError, r"UserCost: `budgets\[1\]` is 'a', expected an integer"),
        (lambda t: UserCost((0, 1), ([1.0], 2.0)), DTypeError, r"UserCost: `microseconds\[0\]` is \[1.0\], expected"),
        (lambda t: UserCost(0, 1.0), DTypeError, "UserCost: `budgets` is int, expected a sequence"),
        (lambda t: FixedTree(3), DTypeError, "FixedTree: `choices` is int, expected a sequence"),
        (lambda t: FixedTree([0, 1]), DTypeError, r"FixedTree: `choices\[0\]` is int, expected a sequence"),
        (lambda t: FixedTree.from_widths(3), DTypeError, "from_widths: `widths` is int, expected a sequence"),
        (lambda t: FixedTree.from_widths([10**6] * 9), ArgumentError, "from_widths: .* at most 65534 nodes"),
        (lambda t: FixedTree.fitted(t, 4), DTypeError, "fitted: `candidates` is Traces, expected Candidates"),
        (lambda t: passes(t, samples=0), ArgumentError, "tokens_per_pass: `samples` is 0, expected .* at least 1"),
        (lambda t: passes(t, samples=10.0), DTypeError, "tokens_per_pass: `samples` is 10.0, expected an integer"),
        (lambda t: passes(t, seed=-1), ArgumentError, "tokens_per_pass: `seed` is -1, expected an integer at least 0"),
        (lambda t: passes(t, seed=None), DTypeError, "tokens_per_pass: `seed` is None, expected an integer"),
        (lambda t: passes(t, confidence=0.0), ArgumentError, "`confidence` is 0.0, expected a finite number > 0"),
        (lambda t: passes(t, confidence=1.0), ArgumentError, "`confidence` is 1.0, expected a number between 0 and 1"),
        (lambda t: passes(t, confidence=np.nan), ArgumentError, "tokens_per_pass: `confidence` is nan"),
        (lambda t: gain(t, samples=0), ArgumentError, "speedup: `samples` is 0, expected an integer at least 1"),
        (lambda t: gain(t, confidence=1.0), ArgumentError, "speedup: `confidence` is 1.0, expected a number between"),
        (lambda t: gain(t, seed=None), DTypeError, "speedup: `seed` is None, expected an integer"),
        (lambda t: gain(t, round_us=-1.0), ArgumentError, "speedup: `round_us` is -1.0, expected a finite number >= 0"),
        (lambda t: gain(t, round_us=np.nan), ArgumentError, "speedup: `round_us` is nan, expected a"),
        (lambda t: gain(t, round_us=np.inf), ArgumentError, "speedup: `round_us` is inf, expected a"),
        (lambda t: gain(t, round_us="1"), DTypeError, "speedup: `round_us` is '1', expected a"),
        (lambda t: gain(t, lambda nodes: 0.0), ArgumentError, "must be positive and finite"),
        (lambda t: gain(t, lambda nodes: np.nan), ArgumentError, "must be positive and finite"),
        (lambda t: gain(t, lambda nodes: np.inf), ArgumentError, "must be positive and finite"),
        (lambda t: replay(t, chain(3), seed=-1), ArgumentError, "replay: `seed` is -1, expected an integer"),
        (lambda t: replay(t, chain(3), seed=1.0), DTypeError, "replay: `seed` is 1.0, expected an integer"),
        (lambda t: replay(t, chain(3), num_rounds=0), ArgumentError, "replay: `num_rounds` is 0, expected an integer"),
        (lambda t: replay(t, chain(3), num_rounds=2.5), DTypeError, "replay: `num_rounds` is 2.5, expected an integer"),
        (
            lambda t: replay(t, chain(3), num_rounds=10**12),
            ArgumentError,
            r"`num_rounds` is 10{12}, .* in 1\.\.10000000",
        ),
        (lambda t: replay(t, BestFirst(10**9)), ArgumentError, "`budget` is 1000000000, expected at most 65534"),
        (lambda t: replay(t.select([]), chain(3)), ArgumentError, "no positions"),
        (lambda t: entropy(low=-1), ArgumentError, "EntropyBudget: `low` is -1, expected an integer at least 0"),
        (lambda t: entropy(low=1.5), DTypeError, r"EntropyBudget: `low` is 1\.5, expected an integer"),
        (lambda t: entropy(high=3), ArgumentError, "EntropyBudget: `high` is 3, expected an integer at least 4"),
        (lambda t: entropy(high=8.0), DTypeError, "`high` is 8"),
        (lambda t: entropy(full=0.0), ArgumentError, "EntropyBudget: `full` is 0.0, expected a finite number > 0"),
        (lambda t: entropy(full=np.nan), ArgumentError, "`full` is nan"),
        (lambda t: entropy(full=np.inf), ArgumentError, "`full` is inf"),
        (lambda t: entropy(depths=0), ArgumentError, "EntropyBudget: `depths` is 0, expected an integer at least 1"),
        (lambda t: FixedTree(((0, 0),)), ArgumentError, "distinct paths of ranks"),
        (lambda t: FixedTree(((0,), (0,))), ArgumentError, "distinct paths of ranks"),
        (lambda t: FixedTree(((-1,),)), ArgumentError, "distinct paths of ranks"),
        (lambda t: FixedTree(((),)), ArgumentError, "distinct paths of ranks"),
        (lambda t: FixedTree(((0,), (0.7,))), DTypeError, r"FixedTree: `choices\[1\]` is 0\.7, expected an integer"),
        (lambda t: FixedTree.from_widths((2, 2.5)), DTypeError, r"`widths\[1\]` is 2\.5, expected an integer"),
        (lambda t: FixedTree.from_widths((0, 2)), ArgumentError, r"`widths\[0\]` is 0, expected .* at least 1"),
        (lambda t: FixedTree.from_widths(()), ArgumentError, "from_widths: `widths` is empty"),
        (lambda t: FixedTree.fitted(t.candidates, -1), ArgumentError, "fitted: `budget` is -1, expected .* least 0"),
        (lambda t: FixedTree.fitted(t.select([]).candidates, 3), ArgumentError, "`candidates` has no positions"),
        (lambda t: FixedTree.fitted(t.candidates.map(lambda a: a[0]), 3), ShapeError, r"\.logits` is \(15, 256\), exp"),
    ],
)
def test_explore_rejects_before_a_replay(two_prompts, call, error, words):
    with pytest.raises(error, match=words):
        call(two_prompts)


def test_a_chain_takes_any_length(two_prompts):
    assert replay(two_prompts, chain(10**9)).tokens_per_pass == replay(two_prompts, chain(15)).tokens_per_pass


def test_a_sum_of_costs_takes_costs_only():
    with pytest.raises(TypeError, match="unsupported operand"):
        LinearCost(1.0, 0.0) + 3.0


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"prompts": 5}, DTypeError, "`prompts` is int, expected a sequence"),
        ({"prompts": "text"}, DTypeError, "`prompts` is str, expected a sequence"),
        ({"prompts": []}, ArgumentError, "`prompts` is empty"),
        ({"prompts": [[]]}, ArgumentError, r"`prompts\[0\]` has shape \(0,\)"),
        ({"prompts": [[5]]}, ArgumentError, r"`prompts\[0\]` leaves 0\.\.4"),
        ({"prompts": [1, 2]}, ArgumentError, r"`prompts\[0\]` has shape \(\)"),
        ({"prompts": [[[1], [2, 3]]]}, ShapeError, r"`prompts\[0\]` is ragged"),
        ({"prompts": [[1], np.ma.masked_array([1])]}, DTypeError, r"`prompts\[1\]` is a masked array"),
        ({"prompts": [np.ones((1, 1), int).view(np.matrix)]}, DTypeError, r"`prompts\[0\]` is a numpy\.matrix"),
        ({"names": "a"}, DTypeError, "`names` is str, expected a sequence"),
        ({"names": [3]}, DTypeError, r"`names\[0\]` is int, expected str"),
        ({"names": ["a", "b"]}, ArgumentError, "`names` has 2 entries for 1 prompts"),
        ({"about": "toy"}, DTypeError, "`about` is str, expected dict"),
        ({"seed": -1}, ArgumentError, "`seed` is -1"),
        ({"seed": 1.5}, DTypeError, "`seed` is 1.5"),
        ({"temperature": "hot"}, DTypeError, "`temperature` is 'hot'"),
        ({"temperature": -1.0}, ArgumentError, "`temperature` is -1"),
        ({"width": None}, DTypeError, "`width` is None"),
        ({"num_positions": 0}, ArgumentError, "`num_positions` is 0"),
    ],
)
def test_record_rejects_before_any_pass(changed, error, words):
    target = TableTarget()
    arguments = {"prompts": [[1]], "num_positions": 3, "max_budget": 4, "progress": False, **changed}
    with pytest.raises(error, match=f"^record: {words}") as caught:
        record(target, NoisyDrafter(target), arguments.pop("prompts"), **arguments)
    assert isinstance(caught.value, DDTreeError)
    assert target.passes == 0
