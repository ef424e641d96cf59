"""Trees and candidates known on paper, most of them from faults that other systems had, on every backend."""

from dataclasses import fields

import ml_dtypes
import numpy as np
import pytest

from ddtree_cupy import Candidates, DraftTree, best_first_tree, build_tree, top_candidates
from ddtree_cupy.errors import ArgumentError
from ddtree_cupy.testing import assert_identical
from tests.refusals import of
from tests.tree_build.cases import batch_of, rank_paths, request, t6_candidates, t6_logits, table

pytestmark = pytest.mark.usefixtures("best_first")
INF, NAN = np.inf, np.nan
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)


def build(backend, logits, budget, *, root=9, **options):
    logits = np.asarray(logits, getattr(logits, "dtype", np.float32))
    tree = backend(build_tree, logits, budget=budget, root_token_ids=root, check_finite=False, **options)
    return tree.validate()


def zeros(*shape):
    return np.zeros(shape, np.float32)


def chain(length):
    return list(range(-1, length))


LIKELY = np.log(np.array([[0.9, 0.05, 0.03, 0.02]] * 3, np.float32))
ONE_TOKEN_A_ROW = np.where(np.arange(40) == [[11], [22], [33]], 0, -INF).astype(np.float32)
BINARY = [-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
TREES = {  # logits, budget, options; parents and, for a root of 9, the tokens below it
    "equal scores in rank-path order, a prefix before its extensions": (
        zeros(2, 3),
        5,
        {},
        [-1, 0, 0, 0, 1, 1],
        [0, 1, 2, 0, 1],
    ),
    "float64 sums of float32 logits": ([[1, 2, -2], [-0.5, 0.5, -2]], 4, {}, [-1, 0, 1, 0, 1], [1, 1, 0, 0]),
    "no child of probability 1 without its parent": ([[0, 0, 0, 0], [40, 0, 0, 0]], 1, {}, [-1, 0], [0]),
    "a child of probability 1 after its parent": ([[1, 0, 0, 0], [40, 0, 0, 0]], 2, {}, [-1, 0, 1], [0, 0]),
    "no -inf": ([[0, -INF, -INF], [0, -INF, -INF]], 5, {}, [-1, 0, 1], [0, 0]),
    "14 nodes of 2 tokens in 3 rows": (zeros(3, 2), 20, {}, BINARY, [0, 1] * 7),
    "a vocabulary of two": ([[0, 1]], 8, {}, [-1, 0, 0], [1, 0]),
    "one row: a star": (zeros(1, 6), 4, {}, [-1, 0, 0, 0, 0], [0, 1, 2, 3]),
    "one row of one token": (zeros(1, 1), 4, {}, [-1, 0], [0]),
    "one token a row: a chain": (zeros(4, 1), 4, {}, chain(4), [0] * 4),
    "row i scores depth i + 1": (ONE_TOKEN_A_ROW, 3, {}, chain(3), [11, 22, 33]),
    "a likely chain, not a bush": (LIKELY, 3, {}, chain(3), [0] * 3),
    "token 0": ([[5, 4], [5, 4]], 4, {}, [-1, 0, 1, 0, 1], [0, 0, 1, 1]),
    "zeros of both signs and subnormals tie": ([[-0.0, 1e-40, 0.0, -1e-40]], 4, {}, [-1, 0, 0, 0, 0], [0, 1, 2, 3]),
    "an empty row ends the tree": ([[0, 1], [-INF, -INF], [0, 1]], 9, {}, [-1, 0, 0], [1, 0]),
    "the spine first": (zeros(15, 2), 15, {"spine": 15}, chain(15), [0] * 15),
    "the spine within the budget": (zeros(4, 2), 2, {"spine": 4}, chain(2), [0] * 2),
    "max_depth": (zeros(15, 2), 40, {"max_depth": 2}, BINARY[:7], [0, 1] * 3),
    "max_children 1": (zeros(4, 5), 4, {"max_children": 1}, chain(4), [0] * 4),
    "max_children 0": (zeros(2, 3), 20, {"max_children": 0}, [-1], []),
    "max_children by depth": (zeros(2, 3), 20, {"max_children": [2, 1]}, [-1, 0, 0, 1, 2], [0, 1, 0, 0]),
    "max_children, wider below": (zeros(2, 3), 20, {"max_children": [1, 2]}, [-1, 0, 1, 1], [0, 0, 1]),
    "max_children of fewer depths": (zeros(2, 3), 20, {"max_children": [3]}, [-1, 0, 0, 0], [0, 1, 2]),
    "max_children 0 at the root": (zeros(2, 3), 20, {"max_children": [0, 3]}, [-1], []),
    "max_children of more depths": (zeros(2, 3), 20, {"max_children": (2, 1, 7, 7)}, [-1, 0, 0, 1, 2], [0, 1, 0, 0]),
    "no rows": (zeros(0, 3), 3, {}, [-1], []),
    "budget 0": (zeros(2, 3), 0, {"capacity": 4}, [-1], []),
}


@pytest.mark.parametrize("name", TREES)
def test_build_tree_of_known_logits(backend, name):
    logits, budget, options, parents, tokens = TREES[name]
    tree = build(backend, logits, budget, **options)
    count = int(tree.num_nodes)
    assert tree.parents[:count].tolist() == parents
    assert tree.token_ids.tolist() == [9, *tokens, *[-1] * (options.get("capacity", budget) - len(tokens))]
    assert int(tree.status) == 0
    assert np.isfinite(tree.path_scores[:count]).all()
    assert not np.signbit(tree.path_scores[0])


MINUS_HALVES = ([[-0.5, -1], [-0.5, -1]], [0, 0])  # scores -0.5 | -1, -1 | -1.5, -1.5 | -2
ORDER_OF_HALVES = [(0,), (0, 0), (1,), (0, 1), (1, 0), (1, 1)]
ONE_A_STEP = ([[0]] * 4, [1] * 4)
PATHS = {  # logits and lse of candidates, budget, options; rank paths below the root
    "a prefix before its extension": (([[0, -1], [40, 0]], [0.5, 40]), 3, {}, [(0,), (0, 0), (1,)]),
    "ties by rank path, not by depth": (([[-0.5, -1], [-0.5, -2]], [0, 0]), 3, {}, [(0,), (0, 0), (1,)]),
    "best first after the spine": (
        ([[0, -0.5], [0, -9], [0, -9]], [0, 1, 1]),
        5,
        {"spine": 2},
        [(0,), (0, 0), (1,), (1, 0), (0, 0, 0)],
    ),
    "no candidates": ((np.zeros((2, 0)), [0, 0]), 3, {}, []),
    **{
        f"{options} binds the spine": (ONE_A_STEP, 9, {"spine": 9, **options}, [(0,) * n for n in range(1, length + 1)])
        for options, length in [
            *(({}, 4), ({"max_depth": 1}, 1), ({"max_children": [1, 1, 0]}, 2)),
            *(({"min_path_score": -2.5}, 2), ({"max_children": 0}, 0)),
        ]
    },
    **{
        f"scores of at least {score}": (MINUS_HALVES, 20, {"min_path_score": score}, ORDER_OF_HALVES[:count])
        for score, count in [(-1.0, 3), (np.nextafter(-1.0, 0), 1), (0.0, 0), (3.0, 0), (-9, 6)]
    },
}


@pytest.mark.parametrize("name", PATHS)
def test_best_first_tree_of_known_candidates(backend, name):
    (logits, lse), budget, options, paths = PATHS[name]
    candidates = table(logits, lse=lse)
    tree = backend(best_first_tree, candidates, budget=budget, root_token_ids=7, **options).validate()
    assert rank_paths(tree, candidates) == [(), *paths]
    assert tree.token_ids.shape == (budget + 1,)


@pytest.mark.parametrize("function", [best_first_tree, build_tree])
@pytest.mark.parametrize("root", [9, 0])
def test_tree_build_of_t6(backend, function, root):
    given = t6_candidates() if function is best_first_tree else t6_logits()
    tree = backend(function, given, budget=6, root_token_ids=root).validate()
    assert tree.token_ids[:6].tolist() == [root, 10, 20, 11, 21, 20]
    assert tree.depths[:6].tolist() == [0, 1, 2, 1, 2, 2]
    assert tree.parents[:6].tolist() == [-1, 0, 1, 0, 1, 3]
    sums = np.cumsum(np.exp(tree.path_scores[1:]))
    np.testing.assert_allclose(sums, [0.6, 0.9, 1.2, 1.44, 1.59, 1.71], rtol=1e-6)


def test_best_first_tree_adds_in_the_stated_order():
    """s(child) = s(parent) + (logit - lse): another association differs in the last bit here."""
    candidates = table([[-0.1, -3], [-0.4, -3]], lse=[0.1, 0.3], dtype=np.float64)
    expected = (0.0 + (-0.1 - 0.1)) + (-0.4 - 0.3)
    assert best_first_tree(candidates, budget=2, root_token_ids=7, spine=2).path_scores[2] == expected
    assert expected != ((-0.1 - 0.1) - 0.4) - 0.3
    assert expected != (-0.1 - 0.4) - (0.1 + 0.3)


def test_best_first_tree_never_gives_a_negative_zero_score(backend):
    candidates = table([[0.0], [-0.0]], lse=[0.0, -0.0])
    assert not np.signbit(backend(best_first_tree, candidates, budget=2, root_token_ids=7).path_scores).any()


def test_build_tree_sums_of_known_logits(backend):
    """The chain of LIKELY has 2.439, three nodes of depth 1 have 0.98; bfloat16 is widened before the sum."""
    np.testing.assert_allclose(np.exp(build(backend, LIKELY, 3).path_scores[1:]).sum(), 2.439, rtol=1e-5)
    row = np.array([[10, 9, 8]], ml_dtypes.bfloat16)
    assert abs(build(backend, row, 1).path_scores[1] + 0.407606) < 2e-6  # bfloat16 arithmetic gives -0.4375
    ties = build(backend, [[1, 0, 0, 0], [40, 0, 0, 0]], 2).path_scores
    assert ties[1] == ties[2]


def test_build_tree_takes_max_children_from_an_array():
    limits = {"budget": 20, "root_token_ids": 9, "max_children": np.array([2, 1])}
    assert_identical(build_tree(zeros(2, 3), **limits), build_tree(zeros(2, 3), **{**limits, "max_children": [2, 1]}))


def test_build_tree_is_four_deep_without_the_spine(backend):
    tree = build(backend, zeros(15, 2), 15)
    assert tree.depths.max() == 4
    assert tree.depths[tree.token_ids == 0].max() == 4


@dtypes
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_build_tree_stops_above_a_bad_row(backend, dtype, bad, row):
    logits = np.zeros((3, 2), dtype)
    logits[row, 1] = bad
    tree = build(backend, logits, 20)
    assert (int(tree.status), int(tree.depths.max())) == (1, row)
    assert int(tree.num_nodes) == 2 ** (row + 1) - 1
    assert not np.isnan(tree.path_scores).any()
    if backend.name == "numpy":
        with pytest.raises(ArgumentError, match=rf"`draft_logits`\[{row}, 1\]"):
            build_tree(logits, budget=20, root_token_ids=9)


@pytest.mark.parametrize(
    ("budget", "how"), [(0, {}), (1, {}), (5, {"max_depth": 1}), (5, {"max_children": 0}), (5, {"capacity": 0})]
)
def test_build_tree_reports_a_bad_row_below_the_cut(backend, budget, how):
    """The bit says what the drafter delivered, not what the tree reached."""
    logits = np.array([[0, 1, 2], [-INF, -INF, -INF], [0, NAN, 2]], np.float32)
    assert int(build(backend, logits, budget, **how).status) == 1
    assert int(build(backend, logits[:2], budget, **how).status) == 0


def test_best_first_tree_reports_bad_rows_per_request(backend):
    candidates = batch_of(t6_candidates(), 3)
    candidates.token_ids[1, 0], candidates.logits[1, 0], candidates.lse[1, 0] = -1, -INF, NAN
    tree = backend(best_first_tree, candidates, budget=5, root_token_ids=9).validate()
    assert (tree.status.tolist(), tree.num_nodes.tolist()) == ([0, 1, 0], [6, 1, 6])


def test_build_tree_keeps_requests_apart(backend):
    """Budgets and roots of their own, one above the capacity, and an inactive request."""
    logits = np.random.default_rng(0).standard_normal((4, 3, 50)).astype(np.float32)
    budgets, roots = of(5, 0, 9, 33), of(1, 2, -1, 0)
    together = build(backend, logits, budgets, root=roots, capacity=32)
    assert together.num_nodes.tolist() == [6, 1, 0, 33]
    assert together.visibility_bits.shape == (4, 33, 2)
    assert together.token_ids[:, 0].tolist() == [1, 2, -1, 0]
    for b in (0, 1, 3):
        alone = build(backend, logits[b], int(budgets[b]), root=int(roots[b]), capacity=32)
        assert_identical(alone, request(together, b))
    assert (together.path_scores[2] == -INF).all()
    assert not together.visibility_bits[2].any()


def test_a_smaller_batch_leaves_nothing_of_a_larger_one_behind(backend):
    large, small = (np.random.default_rng(b).standard_normal((b, 3, 20)).astype(np.float32) for b in (4, 1))
    build(backend, large, 12)
    first = build(backend, small, 5)
    build(backend, large, 12)
    assert_identical(build(backend, small, 5), first)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5), (0, 3, 5), (3, 1), (0, 0, 1)])
@pytest.mark.parametrize(
    "how", [{"budget": 0}, {"budget": 4}, {"budget": 4, "capacity": 0}, {"budget": 0, "capacity": 4}]
)
def test_build_tree_takes_empty_axes(backend, shape, how):
    tree = build(backend, zeros(*shape), **how)
    assert tree.token_ids.shape == (*shape[:-2], how.get("capacity", how["budget"]) + 1)
    assert (tree.num_nodes >= 1).all()


@pytest.mark.parametrize("capacity", [0, 4])
def test_best_first_tree_of_no_requests(backend, capacity):
    candidates = batch_of(t6_candidates(), 1).map(lambda array: array[:0])
    none = np.zeros(0, np.int32)
    for budget, roots in ((4, 0), (none, none)):
        tree = backend(best_first_tree, candidates, budget=budget, root_token_ids=roots, capacity=capacity).validate()
        assert len(tree.num_nodes) == 0


def test_build_tree_of_budget_zero_has_the_same_arrays(backend):
    """No early return with another structure: every array is there, with N = 1."""
    none, some = build(backend, t6_logits(), 0), build(backend, t6_logits(), 5)
    for field in fields(DraftTree):
        empty, full = getattr(none, field.name), getattr(some, field.name)
        assert (empty.dtype, empty.ndim) == (full.dtype, full.ndim)
    assert none.visibility_bits.tolist() == [[1]]


ROWS = {  # logits, k; ids and logits
    **{f"ties by id, k = {k}": ([1, 2, 5, 4, 5], k, [2, 4, 3, 1, 0][:k], [5, 5, 4, 2, 1][:k]) for k in range(1, 6)},
    "zeros of both signs tie": ([-0.0, 0.0, -0.0, -1.0, 0.0], 5, [0, 1, 2, 4, 3], [0, 0, 0, 0, -1]),
    "no -inf": ([0, -INF, 1, -INF], 4, [2, 0, -1, -1], [1, 0, -INF, -INF]),
    "only -inf": ([-INF, -INF], 2, [-1, -1], [-INF, -INF]),
    "at most the vocabulary": ([0, 1], 8, [1, 0], [1, 0]),
    "ids of the second half": ([0, 0, 0, 0, 0, 9, 0, 0], 1, [5], [9]),
    **{
        f"{name} marks the row": ([0, bad, 2, -INF], 2, [-1, -1], [-INF, -INF])
        for name, bad in {"NaN": NAN, "-NaN": -NAN, "+inf": INF}.items()
    },
}


@dtypes
@pytest.mark.parametrize("name", ROWS)
def test_top_candidates_of_known_rows(backend, dtype, name):
    row, k, ids, logits = ROWS[name]
    values = np.array([row], dtype).astype(np.float64)
    found = backend(top_candidates, np.array([row], dtype), k, check_finite=False)
    bad = np.isnan(values).any() or (values == INF).any()
    with np.errstate(divide="ignore"):
        lse = NAN if bad else np.log(np.exp(values).sum())
    assert (found.token_ids.tolist(), found.logits.tolist()) == ([ids], [logits])
    assert not np.signbit(found.logits[found.logits == 0]).any()
    np.testing.assert_allclose(found.lse, [lse], rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_top_candidates_counts_subnormals_as_zero(backend, dtype):
    """1e-40 is a float32 (and bfloat16) subnormal: CuPy compiles with flush-to-zero, so the reference flushes too."""
    top = backend(top_candidates, np.array([[-1e-40, 0.0, 1e-40, 2e-38, -2e-38, -0.0]], dtype), 6)
    assert top.token_ids.tolist() == [[3, 0, 1, 2, 5, 4]]
    assert_identical(top.logits[0, 1:5], np.zeros(4, np.float32))
    assert top.logits[0, 0] > 0 > top.logits[0, 5]


def test_top_candidates_keeps_float16_subnormals(backend):
    """They are normal numbers in float32, where all arithmetic happens."""
    top = backend(top_candidates, np.array([[0.0, 2.0**-24, -(2.0**-24)]], np.float16), 3)
    assert (top.token_ids.tolist(), top.logits.tolist()) == ([[1, 0, 2]], [[2.0**-24, 0.0, -(2.0**-24)]])


@pytest.mark.parametrize("shape", [(0, 5), (3, 5), (0, 4, 5), (2, 0, 5), (2, 4, 5), (2, 4, 1), (0, 8), (2, 3, 0)])
@pytest.mark.parametrize("k", [0, 1, 5, 6])
def test_top_candidates_takes_empty_axes(backend, shape, k):
    top = backend(top_candidates, zeros(*shape), k).validate()
    assert top.token_ids.shape == (*shape[:-1], min(k, shape[-1]))
    assert isinstance(top, Candidates)
    assert top.lse.shape == shape[:-1]
