"""build_tree: the optimum over all closed sets, and what shifts and new labels of the logits do to it."""

from itertools import pairwise

import numpy as np
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ddtree_cupy import build_tree, top_candidates
from ddtree_cupy.testing import assert_identical
from ddtree_cupy.testing.strategies import draft_logits, seeds
from tests.oracles import best_closed_set_value, best_first, log_sum_exp, marginal_tables, ranked_row
from tests.tree_build.cases import T6_ROWS, oracle_prefixes, tree_of

ROOT = 9
INF = np.inf


def build(logits, budget, **options):
    return build_tree(logits, budget=budget, root_token_ids=ROOT, **options)


@given(
    logits=draft_logits(batched=False, min_draft_len=1, max_draft_len=3, max_vocab=3, dtypes=("float64",)),
    budget=st.integers(0, 5),
)
@example(logits=np.log(np.array(T6_ROWS)), budget=5)
@example(logits=np.zeros((3, 3)), budget=5)
def test_build_tree_matches_oracle_optimum_over_closed_sets(logits, budget):
    """No prefix-closed set of this size has a larger sum of path probabilities (the surrogate of the paper)."""
    assume(np.isfinite(logits.max(axis=-1)).all())
    lse = np.array([log_sum_exp(row) for row in logits])
    best = best_closed_set_value(np.exp(logits - lse[:, None]).tolist(), budget)
    tree = build(logits, budget)
    valid = slice(1, int(tree.num_nodes))
    np.testing.assert_allclose(np.exp(tree.path_scores[valid]).sum(), best, rtol=1e-12, atol=1e-12)


@given(logits=draft_logits(batched=False, max_draft_len=3, max_vocab=5, ties="distinct"), budget=st.integers(0, 12))
def test_build_tree_matches_oracle_in_exact_arithmetic(logits, budget):
    """Where no two prefixes lie within the error of a float32 lse, the tree is that of exactly rounded scores."""
    ranked = [ranked_row(row, 5) for row in logits]
    lse = [log_sum_exp(row) for row in logits]
    ids = [[token for token, _ in row] + [-1] * (5 - len(row)) for row in ranked]
    values = [[value for _, value in row] + [-INF] * (5 - len(row)) for row in ranked]
    chosen = best_first(marginal_tables(ids, values, lse), budget + 1)
    _assume_separated(chosen, lse)
    tree = build(logits, budget)
    assert_identical(tree.token_ids, tree_of(chosen[:budget], root=ROOT, capacity=budget).token_ids)
    assert_identical(tree.parents, tree_of(chosen[:budget], root=ROOT, capacity=budget).parents)


def _assume_separated(prefixes, lse):
    """Give up on examples where scores of different depths lie within 1e-6 * max(1, |lse|)."""
    close = 1e-6 * max(1.0, *(abs(value) for value in lse if np.isfinite(value)), 0.0)
    for left, right in pairwise(prefixes):
        assume(len(left.ranks) == len(right.ranks) or abs(left.score - right.score) > close)


@given(
    logits=draft_logits(batched=False, min_draft_len=1, max_draft_len=3, max_vocab=5, dtypes=("float32",)),
    budget=st.integers(0, 12),
    level=st.integers(0, 2),
    shift=st.integers(-40, 40),
    seed=seeds(),
)
def test_build_tree_is_invariant_under_a_level_shift(logits, budget, level, shift, seed):
    """A constant added to one row is nothing to a softmax; sums of quarters are exact in float32."""
    logits = np.round(logits * 4) / np.float32(4)
    moved = logits.copy()
    moved[level : level + 1] += np.float32(shift / 4)
    whole = top_candidates(logits, 5)
    prefixes = oracle_prefixes(whole, 200)
    scale = max([1.0, *np.abs(whole.lse[np.isfinite(whole.lse)]), abs(shift / 4) + 20])
    _assume_separated(prefixes[: budget + 1], [scale])
    plain, other = build(logits, budget), build(moved, budget)
    for name in ("token_ids", "parents", "depths", "num_nodes", "visibility_bits", "first_child", "next_sibling"):
        assert_identical(getattr(other, name), getattr(plain, name), name=name)
    np.testing.assert_allclose(other.path_scores, plain.path_scores, rtol=1e-6, atol=1e-5)


@given(logits=draft_logits(ties="distinct", max_vocab=9, min_vocab=2), budget=st.integers(0, 20), seed=seeds())
def test_build_tree_is_invariant_under_relabelling(logits, budget, seed):
    """Without ties, permuting the vocabulary permutes the tokens; the shape of the tree stays."""
    order = np.random.default_rng(seed).permutation(logits.shape[-1]).astype(np.int32)
    lse = top_candidates(logits, 0).lse
    assume(np.array_equal(lse, top_candidates(logits[..., order], 0).lse))  # the sum in another order
    plain, moved = build(logits, budget), build(logits[..., order], budget)
    assert_identical(moved.parents, plain.parents)
    assert_identical(moved.path_scores, plain.path_scores)
    below_root = moved.parents >= 0
    assert (order[moved.token_ids[below_root]] == plain.token_ids[below_root]).all()
