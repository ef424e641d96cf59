"""best_first_tree: known answers: the toy tree, ties, shrinking trees, bad rows, each option."""

from dataclasses import fields

import numpy as np
import pytest

from ddtree_cupy import DraftTree, best_first_tree
from ddtree_cupy.testing import assert_identical
from tests.tree_build.helpers import (
    ROOT,
    build,
    rank_paths,
    request,
    t6_candidates,
    table,
)

INF, NAN = np.inf, np.nan


def per_request(value, batch):
    return np.full(batch, value, np.int32)


# ---- the toy tree T6 ----


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_best_first_tree_matches_oracle_on_t6(dtype):
    tree = best_first_tree(t6_candidates(dtype), budget=5, root_token_ids=9).validate()
    assert tree.token_ids.tolist() == [9, 10, 20, 11, 21, 20]
    assert tree.depths.tolist() == [0, 1, 2, 1, 2, 2]
    assert tree.parents.tolist() == [-1, 0, 1, 0, 1, 3]
    assert rank_paths(tree, t6_candidates(dtype)) == [(), (0,), (0, 0), (1,), (0, 1), (1, 0)]


@pytest.mark.parametrize(("budget", "total"), list(enumerate([0.6, 0.9, 1.2, 1.44, 1.59, 1.71], start=1)))
def test_best_first_tree_matches_oracle_on_t6_sums(budget, total):
    tree = best_first_tree(t6_candidates(np.float64), budget=budget, root_token_ids=9)
    np.testing.assert_allclose(np.exp(tree.path_scores[1:]).sum(), total, rtol=1e-14)


def test_best_first_tree_counts_token_zero():
    """Token id 0 is legal: T6 with token 10 replaced by 0 has size 6, not 5."""
    candidates = t6_candidates()
    candidates.token_ids[0, 0] = 0
    tree = best_first_tree(candidates, budget=5, root_token_ids=0).validate()
    assert int(tree.num_nodes) == 6
    assert tree.token_ids.tolist() == [0, 0, 20, 11, 21, 20]


# ---- the order of equal and nearly equal scores ----


def test_best_first_tree_order_of_equal_scores():
    """All-zero logits [2, 3] and budget 5: (0)(1)(2)(0,0)(0,1)."""
    candidates = table([[0, 0, 0], [0, 0, 0]])
    tree = build(candidates, 5)
    assert rank_paths(tree, candidates) == [(), (0,), (1,), (2,), (0, 0), (0, 1)]
    assert tree.parents.tolist() == [-1, 0, 0, 0, 1, 1]


def test_best_first_tree_takes_a_prefix_before_its_extension():
    """A second row whose best log-probability is exactly 0 ties parent and child; the parent comes first."""
    candidates = table([[0, -1], [40, 0]], lse=[0.5, 40])
    assert rank_paths(build(candidates, 1), candidates) == [(), (0,)]
    assert rank_paths(build(candidates, 3), candidates) == [(), (0,), (0, 0), (1,)]


def test_best_first_tree_keeps_the_parent_of_a_tie():
    """Row 1 [40, 0, 0, 0] has log-probability 0.0 in float32; budget 1 over two depths is node (0), depth 1."""
    tree = build(table([[0, -1, -2, -3], [40, 0, 0, 0]], lse=[0.4402, 40.0]), 1)
    assert tree.depths.tolist() == [0, 1]
    assert tree.parents.tolist() == [-1, 0]


def test_best_first_tree_orders_ties_by_rank_path_not_by_depth():
    """(0,0) and (1) tie at -1: the smaller rank path (0,0) comes first although it is deeper."""
    candidates = table([[-0.5, -1.0], [-0.5, -2.0]], lse=[0, 0])
    assert rank_paths(build(candidates, 3), candidates) == [(), (0,), (0, 0), (1,)]


def test_best_first_tree_adds_in_float64():
    """Scores that float32 sums would tie or swap: (0)(0,0)(1)(0,1)."""
    candidates = table([[2, 1, -2], [0.5, -0.5, -2]], ids=[[1, 0, 2], [1, 0, 2]])
    assert rank_paths(build(candidates, 4), candidates) == [(), (0,), (0, 0), (1,), (0, 1)]


def test_best_first_tree_adds_in_the_stated_order():
    """s(child) = s(parent) + (logit - lse): another association differs in the last bit here."""
    candidates = table([[-0.1, -3], [-0.4, -3]], lse=[0.1, 0.3], dtype=np.float64)
    expected = (0.0 + (-0.1 - 0.1)) + (-0.4 - 0.3)
    assert build(candidates, 2, spine=2).path_scores[2] == expected
    assert expected != ((-0.1 - 0.1) - 0.4) - 0.3
    assert expected != (-0.1 - 0.4) - (0.1 + 0.3)


def test_best_first_tree_never_gives_a_negative_zero_score():
    tree = build(table([[0.0], [-0.0]], lse=[0.0, -0.0]), 2)
    assert not np.signbit(tree.path_scores).any()


# ---- shrinking trees and small sizes ----


def test_best_first_tree_shrinks_when_candidates_run_out():
    """V=2, L=3, budget 20: 14 nodes besides the root, 6 padded."""
    tree = build(table([[0, 0]] * 3), 20).validate()
    assert int(tree.num_nodes) == 15
    assert (tree.token_ids[15:] == -1).all()
    assert tree.token_ids.shape == (21,)


def test_best_first_tree_leaves_out_minus_inf():
    """[[0, -inf, -inf]] twice, budget 5: two nodes (0), (0,0), and no NaN."""
    tree = build(table([[0, -INF, -INF], [0, -INF, -INF]]), 5).validate()
    assert int(tree.num_nodes) == 3
    assert tree.parents.tolist() == [-1, 0, 1, -1, -1, -1]
    assert not np.isnan(tree.path_scores).any()


@pytest.mark.parametrize("width", [1, 4])
def test_best_first_tree_of_depth_one_is_a_star(width):
    tree = build(table([[0] * width]), 4)
    assert tree.parents.tolist() == [-1] + [0] * width + [-1] * (4 - width)


def test_best_first_tree_of_one_candidate_is_a_chain():
    tree = build(table([[0]] * 4), 4)
    assert tree.parents.tolist() == [-1, 0, 1, 2, 3]


def test_best_first_tree_prefers_the_chain_when_it_is_likely():
    """Three rows (.9, .05, .03, .02), budget 3: the chain, 2.439, not three nodes of depth 1, 0.98."""
    tree = build(table(np.log([[0.9, 0.05, 0.03, 0.02]] * 3), dtype=np.float64), 3)
    assert tree.parents.tolist() == [-1, 0, 1, 2]
    np.testing.assert_allclose(np.exp(tree.path_scores[1:]).sum(), 2.439, rtol=1e-12)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_best_first_tree_without_candidates_is_the_root(shape):
    candidates = table(np.zeros(shape), lse=np.zeros(shape[0]))
    tree = build(candidates, 3).validate()
    assert tree.token_ids.tolist() == [ROOT, -1, -1, -1]
    assert tree.path_scores.tolist() == [0, -INF, -INF, -INF]
    assert int(tree.status) == 0


def test_best_first_tree_of_budget_zero_has_the_same_arrays():
    """No early return with another structure: every array is there, with N = 1."""
    none, some = build(t6_candidates(), 0).validate(), build(t6_candidates(), 5)
    for field in fields(DraftTree):
        empty, full = getattr(none, field.name), getattr(some, field.name)
        assert empty.dtype == full.dtype
        assert empty.ndim == full.ndim
    assert none.token_ids.tolist() == [ROOT]
    assert none.visibility_bits.tolist() == [[1]]
    assert int(none.num_nodes) == 1


@pytest.mark.parametrize("capacity", [None, 0, 4])
def test_best_first_tree_of_no_requests(capacity):
    candidates = table(np.zeros((2, 3))).with_batch().map(lambda array: array[:0])
    tree = best_first_tree(candidates, budget=4, root_token_ids=0, capacity=capacity).validate()
    assert len(tree.num_nodes) == 0
    empty = per_request(0, 0)
    best_first_tree(candidates, budget=empty, root_token_ids=empty, capacity=capacity).validate()


def test_best_first_tree_takes_a_budget_for_each_request():
    candidates = table([[0, -1], [0, -1]]).with_batch().map(lambda array: np.repeat(array, 4, axis=0))
    budgets = np.array([0, 3, 1, 9], np.int32)
    tree = best_first_tree(candidates, budget=budgets, root_token_ids=ROOT, capacity=4).validate()
    assert tree.num_nodes.tolist() == [1, 4, 2, 5]
    assert tree.token_ids.shape == (4, 5)


def test_best_first_tree_leaves_inactive_requests_empty():
    """A root of -1 marks a padded request: no nodes, all padding."""
    candidates = t6_candidates().with_batch().map(lambda array: np.repeat(array, 2, axis=0))
    tree = best_first_tree(candidates, budget=5, root_token_ids=np.array([-1, 9], np.int32)).validate()
    assert tree.num_nodes.tolist() == [0, 6]
    assert (tree.token_ids[0] == -1).all()
    assert (tree.path_scores[0] == -INF).all()
    assert not tree.visibility_bits[0].any()
    assert_identical(request(tree, 1), best_first_tree(t6_candidates(), budget=5, root_token_ids=9))


# ---- bad rows ----


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_best_first_tree_stops_above_a_bad_row(bad):
    candidates = table([[0, -1]] * 3)
    candidates.token_ids[bad], candidates.logits[bad], candidates.lse[bad] = -1, -INF, NAN
    tree = build(candidates, 20).validate()
    assert int(tree.status) == 1
    assert tree.depths.max() == bad
    assert not np.isnan(tree.path_scores).any()


def test_best_first_tree_reports_a_bad_row_below_the_cut():
    """Row 0 is empty, so nothing reaches row 2; it is bad all the same."""
    candidates = table([[-INF, -INF], [0, -1], [0, -1]], lse=[-INF, 0.5, 0.5])
    assert int(build(candidates, 5).status) == 0
    candidates.token_ids[2], candidates.logits[2], candidates.lse[2] = -1, -INF, NAN
    for budget, how in [(5, {}), (0, {}), (1, {"max_depth": 1}), (5, {"max_children": 0})]:
        tree = build(candidates, budget, **how).validate()
        assert int(tree.status) == 1
        assert int(tree.num_nodes) == 1


def test_best_first_tree_of_an_empty_row_has_no_status_bit():
    tree = build(table([[0, -1], [-INF, -INF], [0, -1]], lse=[0.5, -INF, 0.5]), 9).validate()
    assert int(tree.status) == 0
    assert tree.depths.max() == 1


def test_best_first_tree_reports_bad_rows_per_request():
    candidates = t6_candidates().with_batch().map(lambda array: np.repeat(array, 3, axis=0))
    candidates.token_ids[1, 0], candidates.logits[1, 0], candidates.lse[1, 0] = -1, -INF, NAN
    tree = best_first_tree(candidates, budget=5, root_token_ids=9).validate()
    assert tree.status.tolist() == [0, 1, 0]
    assert tree.num_nodes.tolist() == [6, 1, 6]


# ---- options ----


def test_best_first_tree_spine_comes_first():
    """Rows of two equal halves, L=15, budget 15: with the spine all 15 nodes are on it, without it is 4 deep."""
    candidates = table(np.zeros((15, 2)))
    with_spine, without = build(candidates, 15, spine=15), build(candidates, 15)
    assert with_spine.parents.tolist() == list(range(-1, 15))
    on_rank_zero = [path for path in rank_paths(without, candidates) if not any(path)]
    assert max(map(len, on_rank_zero)) == 4


def test_best_first_tree_spine_continues_best_first():
    candidates = table([[0, -0.5], [0, -9], [0, -9]], lse=[0, 1, 1])
    tree = build(candidates, 5, spine=2)
    assert rank_paths(tree, candidates) == [(), (0,), (0, 0), (1,), (1, 0), (0, 0, 0)]


@pytest.mark.parametrize(
    ("how", "length"),
    [
        ({"spine": 9}, 4),
        ({"spine": 2, "max_depth": 1}, 1),
        ({"spine": 9, "max_children": [1, 1, 0]}, 2),
        ({"spine": 9, "min_path_score": -2.5}, 2),
        ({"spine": 9, "max_children": 0}, 0),
    ],
)
def test_best_first_tree_options_bind_the_spine(how, length):
    tree = build(table([[0]] * 4, lse=[1] * 4), 9, **how).validate()
    assert tree.parents.tolist() == [*range(-1, length), *[-1] * (9 - length)]


def test_best_first_tree_spine_stops_at_the_budget():
    candidates = table([[0, -9]] * 4)
    assert build(candidates, 2, spine=4).parents.tolist() == [-1, 0, 1]


def test_best_first_tree_max_depth_is_never_exceeded():
    tree = build(table([[0, -4]] * 15), 40, max_depth=2).validate()
    assert tree.depths.max() == 2
    assert int(tree.num_nodes) == 7


@pytest.mark.parametrize(("score", "nodes"), [(-1.0, 4), (np.nextafter(-1.0, 0), 2), (0.0, 1), (3.0, 1), (-9, 7)])
def test_best_first_tree_min_path_score_keeps_equal_scores(score, nodes):
    """Scores are -0.5 | -1, -1 | -1.5, -1.5 | -2; a score equal to the limit stays, and so does the root."""
    tree = build(table([[-0.5, -1], [-0.5, -1]], lse=[0, 0]), 20, min_path_score=score)
    assert int(tree.num_nodes) == nodes


@pytest.mark.parametrize(
    ("limit", "parents"),
    [
        (1, [-1, 0, 1]),
        ([2, 1], [-1, 0, 0, 1, 2]),
        ([1, 2], [-1, 0, 1, 1]),
        ([3], [-1, 0, 0, 0]),
        ([0, 3], [-1]),
        ((2, 1, 7, 7), [-1, 0, 0, 1, 2]),
        (np.array([2, 1]), [-1, 0, 0, 1, 2]),
        (0, [-1]),
    ],
)
def test_best_first_tree_max_children_binds_each_depth(limit, parents):
    tree = build(table([[0, 0, 0], [0, 0, 0]]), 20, max_children=limit).validate()
    assert tree.parents[: int(tree.num_nodes)].tolist() == parents
