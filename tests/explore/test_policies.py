"""Policies: trees that keep their limits, budgets that follow doubt and cost."""

import itertools
import math
import pickle

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddtree_cupy import best_first_tree, choose_budget, top_candidates
from ddtree_cupy.explore import (
    BestFirst,
    CostAware,
    EntropyBudget,
    FixedTree,
    LinearCost,
    chain,
    named_policies,
)
from ddtree_cupy.explore.fixed_tree import MEDUSA_63


@pytest.fixture(scope="module")
def some(traces):
    return traces.select([2, 9])


def steep(budget):
    """Cost that grows fast."""
    return 1.0 + budget**2


def test_named_policies_are_many_small_and_picklable(some):
    policies = named_policies()
    assert len(policies) >= 12
    for name, policy in policies.items():
        assert policy.name == name
        tree = policy.build(some.candidates, some.root_token_ids).validate()
        assert 2 <= tree.num_nodes.min() <= tree.num_nodes.max() <= 65
        again = pickle.loads(pickle.dumps(policy)).build(some.candidates, some.root_token_ids)
        assert np.array_equal(again.token_ids, tree.token_ids)


def test_chain_takes_the_best_token_of_every_depth(some):
    tree = chain(6).build(some.candidates, some.root_token_ids)
    assert np.array_equal(tree.token_ids[:, 1:], some.candidates.token_ids[:, :6, 0])


def test_entropy_budget_follows_the_entropy():
    logits = np.zeros((3, 2, 50), np.float32)
    logits[0, :, 0] = 30.0  # certain
    logits[1, 0, 0] = 30.0  # one row certain, one uniform
    policy = EntropyBudget(4, 24, full=np.log(50), depths=2, ranks=50)
    candidates = top_candidates(logits, 50)
    assert policy.budgets(candidates).tolist() == [4, 14, 24]
    assert policy.build(candidates, np.zeros(3, np.int32)).num_nodes.tolist() == [5, 15, 25]


def test_entropy_budget_counts_missing_ranks_once():
    candidates = top_candidates(np.zeros((1, 1, 50), np.float32), 10)
    expected = -(10 / 50 * np.log(1 / 50) + 40 / 50 * np.log(40 / 50))
    policy = EntropyBudget(0, 1000, full=10.0, depths=1)
    assert policy.budgets(candidates).tolist() == [round(100 * expected)]


@pytest.mark.parametrize("kept", [8, 20, 50])
def test_entropy_budget_reads_the_same_ranks_however_many_there_are(kept):
    logits = np.random.default_rng(3).standard_normal((5, 4, 50)).astype(np.float32)
    found, whole = (EntropyBudget(2, 900, full=4.0, ranks=8).budgets(top_candidates(logits, k)) for k in (kept, 50))
    assert found.tolist() == whole.tolist()
    assert len(set(found.tolist())) > 1


def test_entropy_budget_takes_rows_without_candidates():
    logits = np.full((1, 2, 4), -np.inf, np.float32)
    policy = EntropyBudget(2, 9)
    assert policy.budgets(top_candidates(logits, 4)).tolist() == [2]
    assert policy.budgets(top_candidates(logits[:, :0], 4)).tolist() == [2]


def test_cost_aware_matches_choose_budget(some):
    cost = LinearCost(10.0, 1.0)
    tree = CostAware(32, cost).build(some.candidates, some.root_token_ids)
    for position in range(some.num_positions):
        one = some.candidates.map(lambda array, p=position: array[p])
        whole = best_first_tree(one, budget=32, root_token_ids=0)
        chosen = choose_budget(whole.path_scores, cost)
        assert tree.num_nodes[position] == chosen + 1
        assert np.array_equal(tree.token_ids[position, 1 : chosen + 1], whole.token_ids[1 : chosen + 1])
    assert len(set(tree.num_nodes.tolist())) > 3
    same = CostAware(32, lambda budget: 10.0 + (budget + 1)).build(some.candidates, some.root_token_ids)
    assert np.array_equal(same.token_ids, tree.token_ids)


def test_cost_aware_asks_a_cost_model_once_for_all_budgets(some):
    class Counted(LinearCost):
        calls = 0

        def array(self, max_budget):
            type(self).calls += 1
            return super().array(max_budget)

    CostAware(8, Counted(10.0, 1.0)).build(some.candidates, some.root_token_ids)
    assert Counted.calls == 1


def test_fixed_tree_is_the_published_medusa_tree():
    assert len(MEDUSA_63) == 63
    assert {(0, 0, 0, 1), (0, 7, 0), (9, 0), (1, 6), (2, 2), (0, 0, 9), (3, 1)} <= set(MEDUSA_63)
    assert not {(10,), (3, 2), (2, 0, 1), (0, 1, 3), (0, 8, 0), (0, 0, 1, 0)} & set(MEDUSA_63)


def test_fixed_tree_places_ranks(some):
    policy = FixedTree(((1,), (0,), (1, 2), (1, 2, 0)))
    tree = policy.build(some.candidates, some.root_token_ids)
    assert tree.parents[0].tolist() == [-1, 0, 0, 2, 3]
    ids = some.candidates.token_ids[:, [0, 0, 1, 2], [0, 1, 2, 0]]
    assert np.array_equal(tree.token_ids, np.concatenate([some.root_token_ids[:, None], ids], axis=1))


def test_fixed_tree_leaves_out_what_has_no_candidate():
    logits = np.zeros((2, 2, 3), np.float32)
    logits[1, 0, 1:] = -np.inf
    tree = FixedTree.from_widths((2, 2, 1)).build(top_candidates(logits, 3), np.array([7, 8], np.int32))
    assert tree.token_ids.tolist() == [[7, 0, 1, 0, 1, 0, 1], [8, 0, 0, 1, -1, -1, -1]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 1, 2, 2], [-1, 0, 1, 1, -1, -1, -1]]


def test_fixed_tree_fitted_matches_best_first_where_all_positions_are_alike():
    logits = np.log(np.array([[[0.6, 0.3, 0.1], [0.5, 0.4, 0.1]]] * 4, np.float32))
    fitted = FixedTree.fitted(top_candidates(logits, 3), 5)
    assert fitted.choices == ((0,), (1,), (0, 0), (0, 1), (1, 0))


def path_value(weights, path):
    """Mean over positions of the product along a path."""
    return np.mean([math.prod(row[depth, rank] for depth, rank in enumerate(path)) for row in weights])


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**16),
    positions=st.integers(1, 5),
    budget=st.integers(0, 5),
    spread=st.sampled_from([0.3, 3.0]),
)
@example(seed=0, positions=2, budget=2, spread=3.0)
@example(seed=157, positions=3, budget=2, spread=3.0)  # the product of the means favours another tree
def test_fixed_tree_fitted_matches_every_tree_tried(seed, positions, budget, spread):
    rng = np.random.default_rng(seed)
    scale = rng.choice([0.1, spread], size=(positions, 1, 1))  # some positions are sure, others are not
    candidates = top_candidates((rng.normal(size=(positions, 2, 3)) * scale).astype(np.float32), 2)
    weights = np.exp(candidates.logits.astype(np.float64) - candidates.lse[..., None])
    paths = [path for depth in (1, 2) for path in itertools.product(range(2), repeat=depth)]
    trees = [
        tree
        for tree in itertools.combinations(paths, budget)
        if all(path[:-1] in tree or len(path) == 1 for path in tree)
    ]
    best = max(sum(path_value(weights, path) for path in tree) for tree in trees)
    found = FixedTree.fitted(candidates, budget)
    assert len(found.choices) == budget
    assert sum(path_value(weights, path) for path in found.choices) == pytest.approx(best, rel=1e-12)


def test_fixed_tree_fitted_leaves_out_what_no_position_has():
    logits = np.zeros((2, 2, 3), np.float32)
    logits[:, 0, 1:] = -np.inf
    logits[:, 1] = -np.inf
    candidates = top_candidates(logits, 3)
    assert FixedTree.fitted(candidates, 9).choices == ((0,),)
    assert FixedTree.fitted(candidates, 9).name == "fitted 9"
    assert FixedTree.fitted(candidates, 9, "mine").name == "mine"


def test_names_say_what_differs():
    assert BestFirst(8, max_depth=3, spine=2).name == "best-first 8, max_depth 3, spine 2"
    assert CostAware(16, LinearCost(1.0, 1.0)).name == "cost-aware 16, LinearCost(fixed_us=1.0, per_node_us=1.0)"
    assert CostAware(16, steep).name.endswith("test_policies.steep")
    assert EntropyBudget(4, 8).name == "entropy 4..8"
    assert EntropyBudget(4, 8, full=1.0, depths=2, ranks=9).name == "entropy 4..8, full 1.0, depths 2, ranks 9"
    assert FixedTree(((0,),)).name.startswith("fixed 1 #")


def test_names_differ_where_policies_differ():
    policies = [
        *(BestFirst(8, **{limit: 0}) for limit in ("max_depth", "max_children", "min_path_score")),
        *(BestFirst(8, spine=spine) for spine in (0, 1)),
        *(EntropyBudget(4, 8, full=full, depths=depths) for full in (1.0, 2.0) for depths in (3, 4)),
        *(CostAware(8, LinearCost(1.0, slope)) for slope in (1.0, 2.0)),
        *(CostAware(8, cost) for cost in (steep, lambda budget: 1.0, lambda budget: 1.0 + budget)),
        *(FixedTree(choices) for choices in (((0,), (1,)), ((0,), (2,)), ((0,), (0, 0)))),
        *(FixedTree.from_widths(widths) for widths in ((2, 1), (1, 2))),
    ]
    assert len({policy.name for policy in policies}) == len(policies)
