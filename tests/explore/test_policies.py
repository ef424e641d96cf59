"""Policies: trees that keep their limits, budgets that follow doubt and cost."""

import pickle

import numpy as np
import pytest

from ddtree_cupy import Candidates, best_first_tree, choose_budget, top_candidates
from ddtree_cupy.errors import ArgumentError
from ddtree_cupy.explore import (
    BestFirst,
    CostAware,
    EntropyBudget,
    FixedTree,
    LinearCost,
    Traces,
    chain,
    named_policies,
    score,
)
from ddtree_cupy.explore.fixed_tree import MEDUSA_63


@pytest.fixture(scope="module")
def traces():
    return Traces.load().select([2, 9])


def test_named_policies_are_many_small_and_picklable(traces):
    policies = named_policies()
    assert len(policies) >= 12
    for name, policy in policies.items():
        assert policy.name == name
        tree = policy.build(traces.candidates, traces.root_token_ids).validate()
        assert 2 <= tree.num_nodes.min() <= tree.num_nodes.max() <= 65
        again = pickle.loads(pickle.dumps(policy)).build(traces.candidates, traces.root_token_ids)
        assert np.array_equal(again.token_ids, tree.token_ids)


def test_chain_takes_the_best_token_of_every_depth(traces):
    tree = chain(6).build(traces.candidates, traces.root_token_ids)
    assert np.array_equal(tree.token_ids[:, 1:], traces.candidates.token_ids[:, :6, 0])


def test_entropy_budget_follows_the_entropy():
    logits = np.zeros((3, 2, 50), np.float32)
    logits[0, :, 0] = 30.0  # certain
    logits[1, 0, 0] = 30.0  # one row certain, one uniform
    policy = EntropyBudget(4, 24, full=np.log(50), depths=2)
    candidates = top_candidates(logits, 50)
    assert policy.budgets(candidates).tolist() == [4, 14, 24]
    assert policy.build(candidates, np.zeros(3, np.int32)).num_nodes.tolist() == [5, 15, 25]


def test_entropy_budget_counts_missing_ranks_once():
    candidates = top_candidates(np.zeros((1, 1, 50), np.float32), 10)
    expected = -(10 / 50 * np.log(1 / 50) + 40 / 50 * np.log(40 / 50))
    policy = EntropyBudget(0, 1000, full=10.0, depths=1)
    assert policy.budgets(candidates).tolist() == [round(100 * expected)]


def test_entropy_budget_takes_rows_without_candidates():
    logits = np.full((1, 2, 4), -np.inf, np.float32)
    policy = EntropyBudget(2, 9)
    assert policy.budgets(top_candidates(logits, 4)).tolist() == [2]
    assert policy.budgets(top_candidates(logits[:, :0], 4)).tolist() == [2]


def test_cost_aware_matches_choose_budget(traces):
    cost = LinearCost(10.0, 1.0)
    tree = CostAware(32, cost).build(traces.candidates, traces.root_token_ids)
    for position in range(traces.num_positions):
        one = traces.candidates._map(lambda array, p=position: array[p])
        whole = best_first_tree(one, budget=32, root_token_ids=0)
        chosen = choose_budget(whole.path_scores, cost)
        assert tree.num_nodes[position] == chosen + 1
        assert np.array_equal(tree.token_ids[position, 1 : chosen + 1], whole.token_ids[1 : chosen + 1])
    assert len(set(tree.num_nodes.tolist())) > 3


def test_fixed_tree_is_the_published_medusa_tree():
    assert len(MEDUSA_63) == 63
    assert {(0, 0, 0, 1), (0, 7, 0), (9, 0), (1, 6), (2, 2), (0, 0, 9), (3, 1)} <= set(MEDUSA_63)
    assert not {(10,), (3, 2), (2, 0, 1), (0, 1, 3), (0, 8, 0), (0, 0, 1, 0)} & set(MEDUSA_63)


def test_fixed_tree_places_ranks(traces):
    policy = FixedTree(((1,), (0,), (1, 2), (1, 2, 0)))
    tree = policy.build(traces.candidates, traces.root_token_ids)
    assert tree.parents[0].tolist() == [-1, 0, 0, 2, 3]
    ids = traces.candidates.token_ids[:, [0, 0, 1, 2], [0, 1, 2, 0]]
    assert np.array_equal(tree.token_ids, np.concatenate([traces.root_token_ids[:, None], ids], axis=1))


def test_fixed_tree_leaves_out_what_has_no_candidate():
    logits = np.zeros((2, 2, 3), np.float32)
    logits[1, 0, 1:] = -np.inf
    tree = FixedTree.from_widths((2, 2, 1)).build(top_candidates(logits, 3), np.array([7, 8], np.int32))
    assert tree.token_ids.tolist() == [[7, 0, 1, 0, 1, 0, 1], [8, 0, 0, 1, -1, -1, -1]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 1, 2, 2], [-1, 0, 1, 1, -1, -1, -1]]


def test_fixed_tree_fitted_beats_other_fixed_trees_on_its_own_positions(traces):
    fitted = FixedTree.fitted(traces.candidates, 63)
    assert len(fitted.choices) == 63
    means = [score(traces, policy).num_accepted.mean() for policy in (fitted, FixedTree(MEDUSA_63))]
    assert means[0] > means[1]


def test_fixed_tree_fitted_matches_best_first_where_all_positions_are_alike():
    logits = np.log(np.array([[[0.6, 0.3, 0.1], [0.5, 0.4, 0.1]]] * 4, np.float32))
    fitted = FixedTree.fitted(top_candidates(logits, 3), 5)
    assert fitted.choices == ((0,), (1,), (0, 0), (0, 1), (1, 0))


@pytest.mark.parametrize("choices", [((0, 0),), ((0,), (0,)), ((-1,),), ((),)])
def test_fixed_tree_rejects_choices_without_their_prefixes(choices):
    with pytest.raises(ArgumentError, match="distinct paths of ranks"):
        FixedTree(choices)


def test_names_say_what_differs():
    assert BestFirst(8, max_depth=3, spine=2).name == "best-first 8, max_depth 3, spine 2"
    assert CostAware(16, LinearCost(1.0, 1.0)).name == "cost-aware 16"
    assert FixedTree(((0,),)).name == "fixed 1"
    assert isinstance(Traces.load().candidates, Candidates)
