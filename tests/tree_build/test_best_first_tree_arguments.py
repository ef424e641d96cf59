"""best_first_tree: `out=`, inputs that are never modified, and what it refuses."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import DraftTree, best_first_tree
from ddtree_cupy.errors import ArgumentError, DDTreeError, DTypeError, ShapeError
from ddtree_cupy.testing import assert_identical, unchanged
from tests.tree_build.helpers import (
    ROOT,
    CupyArray,
    TorchTensor,
    build,
    garbage_like,
    options,
    t6_candidates,
    table,
    tables,
)

NAN = np.nan


# ---- out=, and what is never written ----


@given(candidates=tables, chosen=options(), budget=st.integers(0, 20))
def test_best_first_tree_never_writes_its_input(candidates, chosen, budget):
    batch = candidates.lse.shape[:1] if candidates.is_batched else ()
    budgets, roots = np.full(batch, budget, np.int32), np.full(batch, ROOT, np.int32)
    for array in (candidates.token_ids, candidates.logits, candidates.lse, budgets, roots):
        array.flags.writeable = False
    with unchanged(candidates=candidates, budget=budgets, root_token_ids=roots, chosen_lists=None):
        before = dict(chosen)
        tree = best_first_tree(candidates, budget=budgets, root_token_ids=roots, **chosen)
        assert chosen == before
    for field in fields(DraftTree):
        assert getattr(tree, field.name).flags.writeable
        assert not np.shares_memory(getattr(tree, field.name), roots)


@given(candidates=tables, chosen=options(), budget=st.integers(0, 34))
def test_best_first_tree_is_identical_in_out(candidates, chosen, budget):
    """Stale contents of `out` never survive and nothing around its arrays is written."""
    fresh = build(candidates, budget, **chosen)
    out, guards = garbage_like(fresh)
    assert build(candidates, budget, out=out, **chosen) is out
    assert_identical(out, fresh)
    assert sum(guard.num_touched() for guard in guards) == 0


def test_best_first_tree_is_identical_in_a_reused_out():
    """A large tree, then a small one, in the same buffers: the second equals a fresh build."""
    candidates = table([[0, -1, -2]] * 4)
    out = build(candidates, 40)
    build(table([[0, -1, -2]]), 3, capacity=40, out=out)
    assert_identical(out, build(table([[0, -1, -2]]), 3, capacity=40))


@pytest.mark.parametrize("name", [field.name for field in fields(DraftTree)])
@pytest.mark.parametrize("fault", ["shape", "dtype", "read-only"])
def test_best_first_tree_rejects_wrong_out(name, fault):
    out, _ = garbage_like(build(t6_candidates(), 5))
    array = getattr(out, name)
    if fault == "read-only":
        array.flags.writeable = False
    else:
        out = replace(out, **{name: array[..., None] if fault == "shape" else array.astype(np.int16)})
    others = {field.name: getattr(out, field.name) for field in fields(out) if field.name != name}
    with unchanged(**others), pytest.raises(DDTreeError, match=rf"best_first_tree: `out\.{name}`"):
        build(t6_candidates(), 5, out=out)


def test_best_first_tree_rejects_out_without_scores():
    out = replace(build(t6_candidates(), 5), path_scores=None)
    with pytest.raises(DDTreeError, match=r"out\.path_scores"):
        build(t6_candidates(), 5, out=out)


def test_best_first_tree_rejects_out_of_another_capacity():
    with pytest.raises(ShapeError, match=r"`out\.token_ids`"):
        build(t6_candidates(), 5, out=build(t6_candidates(), 6))


# ---- bad input ----


@pytest.mark.parametrize(
    ("how", "error", "named"),
    [
        ({"budget": -1}, ArgumentError, "budget"),
        ({"budget": 1.0}, DTypeError, "budget"),
        ({"budget": True}, DTypeError, "budget"),
        ({"budget": None}, DTypeError, "budget"),
        ({"budget": [1, 2]}, DTypeError, "budget"),
        ({"budget": NAN}, DTypeError, "budget"),
        ({"budget": np.array([1, -1], np.int32)}, ArgumentError, "budget"),
        ({"budget": np.array([1, 2])}, DTypeError, "budget"),
        ({"budget": np.array([1.0, 2.0])}, DTypeError, "budget"),
        ({"budget": np.array([1, 2, 3], np.int32)}, ShapeError, "budget"),
        ({"budget": np.array(3, np.int32)}, ShapeError, "budget"),
        ({"budget": np.ones((2, 1), np.int32)}, ShapeError, "budget"),
        ({"budget": TorchTensor()}, DTypeError, "budget"),
        ({"budget": CupyArray()}, DTypeError, "budget"),
        ({"root_token_ids": -2}, ArgumentError, "root_token_ids"),
        ({"root_token_ids": 2**31}, ArgumentError, "root_token_ids"),
        ({"root_token_ids": 1.0}, DTypeError, "root_token_ids"),
        ({"root_token_ids": None}, DTypeError, "root_token_ids"),
        ({"root_token_ids": [1, 2]}, DTypeError, "root_token_ids"),
        ({"root_token_ids": np.array([1, 2])}, DTypeError, "root_token_ids"),
        ({"root_token_ids": np.array([1, 2, 3], np.int32)}, ShapeError, "root_token_ids"),
        ({"root_token_ids": np.array([1, -2], np.int32)}, ArgumentError, "root_token_ids"),
        ({"root_token_ids": TorchTensor()}, DTypeError, "root_token_ids"),
        ({"root_token_ids": CupyArray()}, DTypeError, "root_token_ids"),
        ({"capacity": -1}, ArgumentError, "capacity"),
        ({"capacity": 2.0}, DTypeError, "capacity"),
        ({"capacity": np.array(2, np.int32)}, DTypeError, "capacity"),
        ({"max_depth": -1}, ArgumentError, "max_depth"),
        ({"max_depth": 1.5}, DTypeError, "max_depth"),
        ({"max_children": -1}, ArgumentError, "max_children"),
        ({"max_children": [1, -1]}, ArgumentError, "max_children"),
        ({"max_children": [1.0]}, DTypeError, "max_children"),
        ({"max_children": "3"}, DTypeError, "max_children"),
        ({"min_path_score": NAN}, ArgumentError, "min_path_score"),
        ({"min_path_score": "0"}, DTypeError, "min_path_score"),
        ({"spine": -1}, ArgumentError, "spine"),
        ({"spine": True}, DTypeError, "spine"),
        ({"out": 3}, DTypeError, "out"),
    ],
)
def test_best_first_tree_rejects_bad_arguments(how, error, named):
    candidates = t6_candidates().with_batch().map(lambda array: np.repeat(array, 2, axis=0))
    with pytest.raises(error, match=f"best_first_tree: `{named}`"):
        best_first_tree(candidates, **{"budget": 3, "root_token_ids": 1, **how})


@pytest.mark.parametrize("name", ["budget", "root_token_ids"])
def test_best_first_tree_rejects_a_batch_axis_on_unbatched_candidates(name):
    with pytest.raises(ShapeError, match=f"`{name}`"):
        best_first_tree(t6_candidates(), **{"budget": 3, "root_token_ids": 1, name: np.ones(1, np.int32)})


def test_best_first_tree_requires_budget_and_root():
    with pytest.raises(TypeError, match="root_token_ids"):
        best_first_tree(t6_candidates(), budget=3)
    with pytest.raises(TypeError, match="budget"):
        best_first_tree(t6_candidates(), root_token_ids=3)


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"token_ids": np.zeros((2, 3), np.int64)}, DTypeError, "token_ids"),
        ({"token_ids": np.zeros((2, 4), np.int32)}, ShapeError, "token_ids"),
        ({"token_ids": np.zeros((1, 2, 3), np.int32)}, ShapeError, "token_ids"),
        ({"token_ids": [[0, 1, 2]] * 2}, DTypeError, "token_ids"),
        ({"token_ids": TorchTensor()}, DTypeError, "token_ids"),
        ({"token_ids": CupyArray()}, DTypeError, "token_ids"),
        ({"logits": np.zeros((2, 3), np.float16)}, DTypeError, "logits"),
        ({"logits": np.zeros((3, 3), np.float32)}, ShapeError, "logits"),
        ({"logits": np.zeros(3, np.float32)}, ShapeError, "logits"),
        ({"lse": np.zeros(2, np.int32)}, DTypeError, "lse"),
        ({"lse": np.zeros((1, 1, 2), np.float32)}, ShapeError, "lse"),
    ],
)
def test_best_first_tree_rejects_bad_candidates(change, error, named):
    with pytest.raises(error, match=rf"best_first_tree: .*{named}"):
        build(replace(t6_candidates(), **change), 3)


@pytest.mark.parametrize("candidates", [None, (1, 2, 3), np.zeros((2, 3), np.float32), TorchTensor()])
def test_best_first_tree_rejects_other_types(candidates):
    with pytest.raises(DTypeError, match=r"best_first_tree: `candidates`"):
        build(candidates, 3)
