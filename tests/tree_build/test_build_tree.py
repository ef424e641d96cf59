"""build_tree: from logits to the tree; equals its two stages, the optimum over all closed sets, and known answers."""

from dataclasses import fields, replace
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ddtree_cupy import DraftTree, best_first_tree, build_tree, top_candidates
from ddtree_cupy.errors import ArgumentError, DDTreeError, DTypeError, ShapeError
from ddtree_cupy.testing import assert_identical, unchanged
from ddtree_cupy.testing.strategies import draft_logits, seeds
from tests.oracles import best_closed_set_value, best_first, log_sum_exp, marginal_tables, ranked_row
from tests.tree_build.helpers import (
    T6_ROWS,
    CupyArray,
    TorchTensor,
    garbage_like,
    oracle_prefixes,
    rank_paths,
    request,
    t6_logits,
    tree_of,
)

ROOT = 9
INF, NAN = np.inf, np.nan
ALL_DTYPES = ("float32", "float16", "bfloat16", "float64")

small_logits = draft_logits(max_draft_len=3, max_vocab=5, dtypes=ALL_DTYPES, non_finite=True)


def build(logits, budget, **options):
    return build_tree(logits, budget=budget, root_token_ids=ROOT, **options)


def rows(*values, dtype=np.float32):
    return np.array(values, dtype)


@st.composite
def options(draw):
    chosen = {}
    if draw(st.booleans()):
        chosen["max_depth"] = draw(st.integers(0, 4))
    if draw(st.booleans()):
        chosen["max_children"] = draw(st.integers(0, 6) | st.lists(st.integers(0, 6), max_size=4))
    if draw(st.booleans()):
        chosen["min_path_score"] = draw(st.floats(-8, 0))
    if draw(st.booleans()):
        chosen["spine"] = draw(st.integers(0, 4))
    return chosen


# ---- against its stages and brute force ----


@given(logits=small_logits, budget=st.integers(0, 30), chosen=options())
def test_build_tree_is_identical_to_its_two_stages(logits, budget, chosen):
    tree = build(logits, budget, check_finite=False, **chosen).validate()
    whole = top_candidates(logits, logits.shape[-1], check_finite=False)
    assert_identical(tree, best_first_tree(whole, budget=budget, root_token_ids=ROOT, capacity=budget, **chosen))


@given(logits=small_logits, budget=st.integers(0, 30), chosen=options())
def test_build_tree_matches_oracle(logits, budget, chosen):
    """On the candidates' own lse, everything is bit-identical to sorting all prefixes of the whole vocabulary."""
    if logits.ndim == 2:
        logits = logits[None]
    tree = build(logits, budget, capacity=30, check_finite=False, **chosen)
    whole = top_candidates(logits, logits.shape[-1], check_finite=False)
    for b in range(len(logits)):
        one = request(whole, b)
        status = int(np.isnan(one.lse).any())
        expected = tree_of(oracle_prefixes(one, budget, **chosen), root=ROOT, capacity=30, status=status)
        assert_identical(request(tree, b), expected)


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


@given(logits=small_logits, budget=st.integers(0, 20), more=st.integers(1, 9))
def test_build_tree_is_identical_to_a_prefix_of_a_larger_budget(logits, budget, more):
    small, large = (build(logits, size, check_finite=False) for size in (budget, budget + more))
    for name in ("token_ids", "parents", "depths", "path_scores"):
        assert_identical(getattr(small, name), getattr(large, name)[..., : budget + 1], name=name)


@given(logits=small_logits, budget=st.integers(0, 40))
def test_build_tree_scores_never_rise_and_rows_sum_to_depths(logits, budget):
    tree = build(logits, budget, check_finite=False).validate()
    assert not np.isnan(tree.path_scores).any()
    assert (tree.path_scores[..., 1:] <= tree.path_scores[..., :-1]).all()
    assert (tree.visibility.sum(axis=-1) == tree.depths + 1).all()


@given(logits=draft_logits(batched=True, max_draft_len=3, max_vocab=5, non_finite=True), data=st.data())
def test_build_tree_is_identical_unbatched(logits, data):
    batch = len(logits)
    budgets = np.array([data.draw(st.integers(0, 20)) for _ in range(batch)], np.int32)
    roots = np.array([data.draw(st.integers(-1, 20)) for _ in range(batch)], np.int32)
    how = {"capacity": data.draw(st.integers(0, 20)), "check_finite": False, "spine": data.draw(st.integers(0, 3))}
    tree = build_tree(logits, budget=budgets, root_token_ids=roots, **how).validate()
    for b in range(batch):
        alone = build_tree(logits[b], budget=int(budgets[b]), root_token_ids=int(roots[b]), **how)
        assert_identical(alone, request(tree, b))


@given(logits=draft_logits(dtypes=("float16", "bfloat16"), max_vocab=9), budget=st.integers(0, 20))
def test_build_tree_is_identical_for_upcast_logits(logits, budget):
    assert_identical(build(logits, budget), build(logits.astype(np.float32), budget))


# ---- known answers ----


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_build_tree_matches_oracle_on_t6(dtype):
    tree = build_tree(t6_logits(dtype), budget=5, root_token_ids=9).validate()
    assert tree.token_ids.tolist() == [9, 10, 20, 11, 21, 20]
    assert tree.depths.tolist() == [0, 1, 2, 1, 2, 2]
    assert tree.parents.tolist() == [-1, 0, 1, 0, 1, 3]
    assert rank_paths(tree, top_candidates(t6_logits(dtype), 3)) == [(), (0,), (0, 0), (1,), (0, 1), (1, 0)]


@pytest.mark.parametrize(("budget", "total"), list(enumerate([0.6, 0.9, 1.2, 1.44, 1.59, 1.71], start=1)))
def test_build_tree_matches_oracle_on_t6_sums(budget, total):
    tree = build_tree(t6_logits(np.float64), budget=budget, root_token_ids=9)
    np.testing.assert_allclose(np.exp(tree.path_scores[1:]).sum(), total, rtol=1e-14)


def test_build_tree_positions_of_t6_follow_depth():
    """Context of 3: [3, 4, 5, 4, 5, 5], not 3..8; the root's position is the context length."""
    assert (3 + build(t6_logits(), 5).depths).tolist() == [3, 4, 5, 4, 5, 5]


def test_build_tree_orders_equal_scores_by_rank_path():
    """All-zero logits [2, 3], budget 5: (0)(1)(2)(0,0)(0,1)."""
    tree = build(rows([0, 0, 0], [0, 0, 0]), 5)
    assert tree.parents.tolist() == [-1, 0, 0, 0, 1, 1]
    assert tree.token_ids[1:].tolist() == [0, 1, 2, 0, 1]


def test_build_tree_adds_scores_in_float64():
    """[[1, 2, -2], [-.5, .5, -2]], budget 4: rank paths (0)(0,0)(1)(0,1)."""
    logits = rows([1, 2, -2], [-0.5, 0.5, -2])
    tree = build(logits, 4)
    assert rank_paths(tree, top_candidates(logits, 3)) == [(), (0,), (0, 0), (1,), (0, 1)]
    assert tree.token_ids[1:].tolist() == [1, 1, 0, 0]


def test_build_tree_upcasts_before_the_log_sum_exp():
    """bfloat16 [10, 9, 8]: log-probability -0.4076, not the -0.4375 of bfloat16 arithmetic."""
    tree = build(rows([10, 9, 8], dtype=ml_dtypes.bfloat16), 1)
    assert abs(tree.path_scores[1] + 0.407606) < 2e-6


def test_build_tree_keeps_the_parent_of_a_tie():
    """Row 1 [40, 0, 0, 0] has log-probability exactly 0 in float32; budget 1 keeps the parent, not the child."""
    logits = rows([1, 0, 0, 0], [40, 0, 0, 0])
    tree = build(logits, 1)
    assert tree.depths.tolist() == [0, 1]
    assert build(logits, 2).path_scores[2] == tree.path_scores[1]
    assert build(logits, 2).parents.tolist() == [-1, 0, 1]


def test_build_tree_takes_two_candidates_from_a_vocabulary_of_two():
    tree = build(rows([0, 1]), 8).validate()
    assert int(tree.num_nodes) == 3
    assert tree.token_ids.tolist() == [9, 1, 0, *[-1] * 6]


def test_build_tree_leaves_out_minus_inf():
    tree = build(rows([0, -INF, -INF], [0, -INF, -INF]), 5).validate()
    assert tree.parents.tolist() == [-1, 0, 1, -1, -1, -1]
    assert int(tree.status) == 0


def test_build_tree_shrinks_when_candidates_run_out():
    """V=2, L=3, budget 20: 14 nodes besides the root, 6 padded."""
    tree = build(np.zeros((3, 2), np.float32), 20).validate()
    assert int(tree.num_nodes) == 15
    assert tree.parents[15:].tolist() == [-1] * 6


def test_build_tree_counts_token_zero():
    """The likeliest token is 0 and the root is 0: all nodes count."""
    tree = build_tree(rows([5, 4], [5, 4]), budget=4, root_token_ids=0).validate()
    assert int(tree.num_nodes) == 5
    assert tree.token_ids.tolist() == [0, 0, 0, 1, 1]


def test_build_tree_row_i_scores_depth_i_plus_one():
    """The root comes from `root_token_ids`, never from the logits: no row is used off by one."""
    logits = np.full((3, 40), -INF, np.float32)
    logits[[0, 1, 2], [11, 22, 33]] = 0
    tree = build_tree(logits, budget=3, root_token_ids=5)
    assert tree.token_ids.tolist() == [5, 11, 22, 33]


def test_build_tree_of_budget_zero_has_the_same_arrays():
    none, some = build(t6_logits(), 0).validate(), build(t6_logits(), 5)
    for field in fields(DraftTree):
        assert getattr(none, field.name).dtype == getattr(some, field.name).dtype
        assert getattr(none, field.name).ndim == getattr(some, field.name).ndim
    assert none.token_ids.tolist() == [9]


def test_build_tree_prefers_the_chain_when_it_is_likely():
    tree = build(np.log(rows(*[[0.9, 0.05, 0.03, 0.02]] * 3, dtype=np.float64)), 3)
    assert tree.parents.tolist() == [-1, 0, 1, 2]
    np.testing.assert_allclose(np.exp(tree.path_scores[1:]).sum(), 2.439, rtol=1e-12)


def test_build_tree_of_one_row_is_a_star_and_of_one_token_a_chain():
    assert build(np.zeros((1, 6), np.float32), 4).parents.tolist() == [-1, 0, 0, 0, 0]
    assert build(np.zeros((4, 1), np.float32), 4).parents.tolist() == [-1, 0, 1, 2, 3]
    assert build(np.zeros((4, 6), np.float32), 4, max_children=1).parents.tolist() == [-1, 0, 1, 2, 3]


def test_build_tree_spine_makes_a_flat_tree_deep():
    """p_top = .5 in 15 rows, budget 15: the spine takes all 15 nodes; without it the chain is 4 deep."""
    logits = np.zeros((15, 2), np.float32)
    assert build(logits, 15, spine=15).parents.tolist() == list(range(-1, 15))
    flat = build(logits, 15)
    assert flat.depths.max() == 4
    assert flat.depths[flat.token_ids == 0].max() == 4


def test_build_tree_max_depth_bounds_what_a_round_emits():
    """max_depth=2 with L=15: no node deeper than 2, so at most 3 tokens with the bonus."""
    tree = build(np.random.default_rng(0).standard_normal((15, 50)).astype(np.float32), 64, max_depth=2)
    assert tree.depths.max() == 2


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_build_tree_rejects_or_cuts_at_a_bad_row(dtype, bad):
    """One logit of row 0 of [2, 4]: NumPy raises; unchecked, the tree is cut there and status bit 0 set."""
    logits = rows([0, bad, 1, 2], [0, 1, 2, 3], dtype=dtype)
    with pytest.raises(ArgumentError, match=r"`draft_logits`\[0, 1\]"):
        build(logits, 5)
    tree = build(logits, 5, check_finite=False).validate()
    assert int(tree.status) == 1
    assert int(tree.num_nodes) == 1
    assert not np.isnan(tree.path_scores).any()
    lower = build(logits[::-1], 9, check_finite=False).validate()
    assert int(lower.status) == 1
    assert lower.depths.max() == 1
    assert int(lower.num_nodes) == 5


@pytest.mark.parametrize(
    ("budget", "how"), [(0, {}), (1, {}), (5, {"max_depth": 1}), (5, {"max_children": 0}), (5, {"capacity": 0})]
)
def test_build_tree_reports_a_bad_row_below_the_cut(budget, how):
    """The bit says what the drafter delivered, not what the tree reached."""
    logits = rows([0, 1, 2], [0, 1, 2], [0, NAN, 2])
    tree = build(logits, budget, check_finite=False, **how).validate()
    assert int(tree.status) == 1
    assert int(build(logits[:2], budget, check_finite=False, **how).status) == 0


def test_build_tree_of_an_empty_row_has_no_status_bit():
    logits = rows([0, 1], [-INF, -INF], [0, 1])
    for check_finite in (True, False):
        tree = build(logits, 9, check_finite=check_finite).validate()
        assert int(tree.status) == 0
        assert int(tree.num_nodes) == 3


def test_build_tree_counts_signed_zeros_and_subnormals_as_ties():
    tree = build(rows([-0.0, 1e-40, 0.0, -1e-40]), 4)
    assert tree.token_ids.tolist() == [9, 0, 1, 2, 3]
    assert len(set(tree.path_scores[1:].tolist())) == 1


def test_build_tree_takes_unequal_budgets_and_roots():
    logits = np.random.default_rng(1).standard_normal((4, 3, 30)).astype(np.float32)
    budgets, roots = np.array([0, 7, 3, 33], np.int32), np.array([4, 0, -1, 29], np.int32)
    tree = build_tree(logits, budget=budgets, root_token_ids=roots, capacity=32).validate()
    assert tree.num_nodes.tolist() == [1, 8, 0, 33]
    assert tree.visibility_bits.shape == (4, 33, 2)
    assert tree.token_ids[:, 0].tolist() == [4, 0, -1, 29]


# ---- shapes ----


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (0, 3, 5), (3, 1), (0, 0, 1)])
@pytest.mark.parametrize(
    "how", [{"budget": 0}, {"budget": 4}, {"budget": 4, "capacity": 0}, {"budget": 0, "capacity": 4}]
)
def test_build_tree_takes_empty_axes(shape, how):
    tree = build_tree(np.zeros(shape, np.float32), root_token_ids=3, **how).validate()
    assert tree.token_ids.shape == (*shape[:-2], how.get("capacity", how["budget"]) + 1)
    assert (tree.num_nodes >= 1).all()


@given(logits=small_logits, budget=st.integers(0, 20))
def test_build_tree_is_identical_for_strided_logits(logits, budget):
    spread = np.zeros((*logits.shape[:-1], 3 * logits.shape[-1]), logits.dtype)[..., ::3]
    spread[...] = logits
    plain = build(logits, budget, check_finite=False)
    assert_identical(build(spread, budget, check_finite=False), plain)
    assert_identical(build(np.asfortranarray(logits), budget, check_finite=False), plain)


# ---- out=, and what is never written ----


@given(logits=small_logits, budget=st.integers(0, 20), chosen=options())
def test_build_tree_never_writes_its_input(logits, budget, chosen):
    logits.flags.writeable = False
    with unchanged(draft_logits=logits):
        first = build(logits, budget, check_finite=False, **chosen)
        assert_identical(build(logits, budget, check_finite=False, **chosen), first)


@given(logits=small_logits, budget=st.integers(0, 34))
def test_build_tree_is_identical_in_out(logits, budget):
    fresh = build(logits, budget, check_finite=False)
    out, guards = garbage_like(fresh)
    assert build(logits, budget, check_finite=False, out=out) is out
    assert_identical(out, fresh)
    assert sum(guard.num_touched() for guard in guards) == 0


def test_build_tree_never_writes_out_on_bad_input():
    out, _ = garbage_like(build(t6_logits(), 5))
    with unchanged(out=out):
        for how in ({"budget": -1}, {"root_token_ids": -2}, {"spine": -1}, {"max_depth": -1}, {"max_children": [-1]}):
            with pytest.raises(DDTreeError):
                build_tree(t6_logits(), **{"budget": 5, "root_token_ids": 9, "out": out, **how})
        with pytest.raises(DDTreeError):
            build(rows([0, NAN]), 5, out=out)
        wrong = replace(out, next_sibling=out.next_sibling[:3])
        with pytest.raises(ShapeError, match=r"`out\.next_sibling`"):
            build(t6_logits(), 5, out=wrong)


# ---- bad input ----


@pytest.mark.parametrize(
    ("how", "error", "named"),
    [
        ({"budget": -1}, ArgumentError, "budget"),
        ({"budget": 2.0}, DTypeError, "budget"),
        ({"budget": "4"}, DTypeError, "budget"),
        ({"budget": [1, 2]}, DTypeError, "budget"),
        ({"budget": np.array([1, -1], np.int32)}, ArgumentError, "budget"),
        ({"budget": np.array([1, 2])}, DTypeError, "budget"),
        ({"budget": np.array([1], np.int32)}, ShapeError, "budget"),
        ({"budget": CupyArray()}, DTypeError, "budget"),
        ({"root_token_ids": -2}, ArgumentError, "root_token_ids"),
        ({"root_token_ids": 0.5}, DTypeError, "root_token_ids"),
        ({"root_token_ids": np.array([1], np.int32)}, ShapeError, "root_token_ids"),
        ({"root_token_ids": np.array([1, 2])}, DTypeError, "root_token_ids"),
        ({"root_token_ids": TorchTensor()}, DTypeError, "root_token_ids"),
        ({"capacity": -1}, ArgumentError, "capacity"),
        ({"capacity": None, "budget": None}, DTypeError, "budget"),
        ({"max_depth": -1}, ArgumentError, "max_depth"),
        ({"max_depth": "deep"}, DTypeError, "max_depth"),
        ({"max_children": -1}, ArgumentError, "max_children"),
        ({"max_children": [2, 0.5]}, DTypeError, "max_children"),
        ({"min_path_score": NAN}, ArgumentError, "min_path_score"),
        ({"spine": -1}, ArgumentError, "spine"),
        ({"spine": 1.0}, DTypeError, "spine"),
        ({"out": 3}, DTypeError, "out"),
    ],
)
def test_build_tree_rejects_bad_arguments(how, error, named):
    """The message names the function that was called, and the argument."""
    with pytest.raises(error, match=f"^build_tree: `{named}`"):
        build_tree(np.zeros((2, 3, 4), np.float32), **{"budget": 3, "root_token_ids": 1, **how})


@pytest.mark.parametrize(
    ("logits", "error"),
    [
        (np.zeros(4, np.float32), ShapeError),
        (np.zeros((1, 1, 1, 4), np.float32), ShapeError),
        (np.zeros((2, 4), np.int64), DTypeError),
        (np.zeros((2, 4), ">u2"), DTypeError),
        ([[0.0, 1.0]], DTypeError),
        (TorchTensor(), DTypeError),
        ("logits", DTypeError),
    ],
)
def test_build_tree_rejects_wrong_logits(logits, error):
    with pytest.raises(error, match=r"^build_tree: `draft_logits`"):
        build(logits, 3)


def test_build_tree_rejects_non_finite_logits_by_name():
    with pytest.raises(ArgumentError, match=r"^build_tree: `draft_logits`\[1, 0, 2\] is nan"):
        build(rows([[0, 1, 2]], [[0, 1, NAN]]), 3)


@pytest.mark.parametrize("given", [{"root_token_ids": [1, 2]}, {"root_token_ids": 0, "budget": (3, 4)}])
def test_build_tree_says_that_lists_must_be_int32_arrays(given):
    logits = np.zeros((2, 3, 8), np.float32)
    name = next(name for name, value in given.items() if not isinstance(value, int))
    kind = type(given[name]).__name__
    with pytest.raises(DTypeError, match=rf"`{name}` is {kind}, expected an integer or an int32 array of shape \(2,\)"):
        build_tree(logits, **{"budget": 3, **given})
