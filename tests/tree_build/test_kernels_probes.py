"""Faults other systems of this field had in building trees, each as a small input with its right answer, everywhere."""

import numpy as np
import pytest
from tree_attention.cases import BFLOAT16

from ddtree_cupy import Candidates, best_first_tree, build_tree, top_candidates
from ddtree_cupy.testing import assert_identical

T6_ROWS = np.log(np.array([[0.6, 0.3, 0.1], [0.5, 0.4, 0.1]], np.float32))


def build(backend, logits, budget, *, root=0, **options):
    logits = np.asarray(logits, np.float32) if not isinstance(logits, np.ndarray) else logits
    tree = backend(build_tree, logits, budget=budget, root_token_ids=root, check_finite=False, **options)
    return tree.validate()


def shape_of(tree):
    count = int(tree.num_nodes)
    return tree.parents[:count].tolist(), tree.token_ids[1:count].tolist()


def test_build_tree_of_t6(backend):
    ids = np.array([[10, 11, 12], [20, 21, 22]], np.int32)
    candidates = Candidates(ids, T6_ROWS, np.zeros(2, np.float32))
    tree = backend(best_first_tree, candidates, budget=5, root_token_ids=7).validate()
    assert tree.token_ids.tolist() == [7, 10, 20, 11, 21, 20]
    assert tree.depths.tolist() == [0, 1, 2, 1, 2, 2]
    assert tree.parents.tolist() == [-1, 0, 1, 0, 1, 3]
    np.testing.assert_allclose(np.exp(tree.path_scores[1:]).sum(), 1.59, rtol=1e-6)


@pytest.mark.parametrize(("k", "ids"), [(1, [2]), (2, [2, 4]), (3, [2, 4, 3]), (4, [2, 4, 3, 1]), (5, [2, 4, 3, 1, 0])])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=lambda dtype: np.dtype(dtype).name)
def test_top_candidates_breaks_ties_by_id_for_every_k(backend, k, ids, dtype):
    row = np.array([[1, 2, 5, 4, 5]], np.float32).astype(dtype)
    assert backend(top_candidates, row, k).token_ids[0].tolist() == ids


def test_a_nan_logit_cuts_the_tree_and_sets_the_status(backend):
    logits = np.zeros((2, 4), np.float32)
    logits[0, 1] = np.nan
    tree = build(backend, logits, 5)
    assert (int(tree.num_nodes), int(tree.status)) == (1, 1)
    below = np.zeros((3, 4), np.float32)
    below[2, 0] = np.inf
    tree = build(backend, below, 20)
    assert int(tree.depths.max()) == 2
    assert int(tree.status) == 1


def test_a_child_of_certain_probability_never_comes_without_its_parent(backend):
    assert shape_of(build(backend, [[0, 0, 0, 0], [40, 0, 0, 0]], 1)) == ([-1, 0], [0])


def test_all_equal_logits_come_in_rank_path_order(backend):
    """(0) (1) (2) (0,0) (0,1): equal scores go to the smaller path, and a prefix precedes its extensions."""
    assert shape_of(build(backend, np.zeros((2, 3), np.float32), 5)) == ([-1, 0, 0, 0, 1, 1], [0, 1, 2, 0, 1])


def test_scores_are_float64_differences_of_float32_numbers(backend):
    tree = build(backend, [[1, 2, -2], [-0.5, 0.5, -2]], 4)
    assert shape_of(tree) == ([-1, 0, 1, 0, 1], [1, 1, 0, 0])  # (0) (0,0) (1) (0,1)


def test_bfloat16_logits_are_widened_before_the_sum(backend):
    found = backend(top_candidates, np.array([[10, 9, 8]], np.float32).astype(BFLOAT16), 3)
    np.testing.assert_allclose(found.lse, [10.407606], rtol=1e-6)


def test_minus_infinity_is_no_candidate_and_makes_no_nan(backend):
    minus = -np.inf
    tree = build(backend, [[0, minus, minus], [0, minus, minus]], 5)
    assert shape_of(tree) == ([-1, 0, 1], [0, 0])
    assert np.isfinite(tree.path_scores[:3]).all()


def test_a_small_vocabulary_runs_out(backend):
    tree = build(backend, np.zeros((3, 2), np.float32), 20)
    assert int(tree.num_nodes) - 1 == 14
    assert tree.token_ids[15:].tolist() == [-1] * 6
    assert backend(top_candidates, np.zeros((1, 2), np.float32), 8).token_ids.tolist() == [[0, 1]]


def test_token_zero_is_a_token(backend):
    ids = np.array([[0, 11, 12], [20, 21, 22]], np.int32)
    tree = backend(best_first_tree, Candidates(ids, T6_ROWS, np.zeros(2, np.float32)), budget=5, root_token_ids=0)
    assert int(tree.num_nodes) == 6


def test_budget_zero_gives_the_root_in_the_same_arrays(backend):
    tree = build(backend, np.zeros((2, 3), np.float32), 0, capacity=4)
    assert tree.token_ids.tolist() == [0, -1, -1, -1, -1]
    assert tree.visibility_bits.ravel().tolist() == [1, 0, 0, 0, 0]


def test_the_spine_comes_first_when_asked(backend):
    logits = np.zeros((15, 2), np.float32)  # every token has probability 0.5
    chain = build(backend, logits, 15, spine=15)
    assert chain.parents.tolist() == list(range(-1, 15))
    assert build(backend, logits, 15).depths.max() == 4


def test_a_likely_chain_beats_a_bush(backend):
    rows = np.log(np.array([[0.9, 0.05, 0.03, 0.02]] * 3, np.float32))
    tree = build(backend, rows, 3)
    assert tree.parents.tolist() == [-1, 0, 1, 2]
    np.testing.assert_allclose(np.exp(tree.path_scores[1:]).sum(), 2.439, rtol=1e-5)


def test_stars_and_chains_are_trees(backend):
    assert build(backend, np.zeros((1, 4), np.float32), 4).parents.tolist() == [-1, 0, 0, 0, 0]
    chain = build(backend, np.zeros((4, 5), np.float32), 4, max_children=1)
    assert chain.parents.tolist() == [-1, 0, 1, 2, 3]


def test_max_depth_is_kept(backend):
    tree = build(backend, np.zeros((15, 2), np.float32), 40, max_depth=2)
    assert tree.depths.max() == 2
    assert int(tree.num_nodes) == 7


def test_requests_have_budgets_of_their_own(backend):
    logits = np.random.default_rng(0).standard_normal((4, 3, 50)).astype(np.float32)
    budgets, roots = np.array([5, 0, 9, 3], np.int32), np.array([1, 2, -1, 0], np.int32)
    together = backend(build_tree, logits, budget=budgets, root_token_ids=roots, capacity=9)
    assert together.num_nodes.tolist() == [6, 1, 0, 4]
    for b in (0, 1, 3):
        alone = build(backend, logits[b], int(budgets[b]), root=int(roots[b]), capacity=9)
        assert_identical(together.token_ids[b], alone.token_ids)
        assert_identical(together.path_scores[b], alone.path_scores)


def test_a_smaller_batch_leaves_nothing_of_a_larger_one_behind(backend):
    rng = np.random.default_rng(1)
    large, small = (rng.standard_normal((b, 3, 20)).astype(np.float32) for b in (4, 1))
    backend(build_tree, large, budget=12, root_token_ids=0)
    first = backend(build_tree, small, budget=5, root_token_ids=0)
    backend(build_tree, large, budget=12, root_token_ids=0)
    assert_identical(backend(build_tree, small, budget=5, root_token_ids=0), first)
