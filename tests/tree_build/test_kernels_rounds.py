"""v2_best_first against the reference where rounds, bins, spines and ties meet, and where it pops instead."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddtree_cupy import Candidates, best_first_tree, top_candidates
from ddtree_cupy.testing import assert_identical
from ddtree_cupy.tree_build import kernel
from ddtree_cupy.tree_build.versions import v2_best_first

pytestmark = pytest.mark.usefixtures("best_first")


def rows(draft_len, vocab_size, seed, *, sharp=6.0, flat=2.0, dtype=np.float32):
    """Return logits of a drafter: a few likely tokens a depth, flatter with depth."""
    logits = np.random.default_rng(seed).standard_normal((draft_len, vocab_size))
    return (np.linspace(sharp, flat, draft_len)[:, None] * logits).astype(dtype)


def check(backend, candidates, **arguments):
    found = backend(best_first_tree, candidates, root_token_ids=7, **arguments)
    assert_identical(found, best_first_tree(candidates, root_token_ids=7, **arguments))
    return found


@pytest.mark.parametrize("sharpness", [(6, 2), (2, 8), (15, 10), (40, 30), (1, 1), (0, 0)], ids=str)
@pytest.mark.parametrize(("budget", "draft_len"), [(1, 1), (16, 3), (64, 15), (100, 64), (256, 15), (1024, 15)])
def test_best_first_tree_matches_reference_on_probabilities(kernels, budget, draft_len, sharpness):
    """bfloat16 logits: siblings tie, and with them whole subtrees."""
    sharp, flat = sharpness
    for seed in range(3 if budget < 200 else 1):
        logits = rows(draft_len, 1_500, seed, sharp=sharp, flat=flat, dtype=ml_dtypes.bfloat16)
        check(replace(kernels, seed=seed), top_candidates(logits, budget), budget=budget)


@given(
    seed=st.integers(0, 2**32 - 1),
    draft_len=st.integers(1, 64),
    width=st.integers(1, 40),
    budget=st.integers(0, 140),
    step=st.sampled_from([0.0, 0.25, 1.0]),
    options=st.fixed_dictionaries(
        {},
        optional={
            "spine": st.integers(0, 70),
            "max_depth": st.integers(0, 64),
            "max_children": st.integers(0, 9) | st.lists(st.integers(0, 9), max_size=20),
            "min_path_score": st.floats(-12, 0.5),
        },
    ),
    schedule=st.integers(0, 9),
)
@example(seed=1, draft_len=64, width=1, budget=64, step=0.0, options={"spine": 70}, schedule=0)
@example(seed=1, draft_len=20, width=2, budget=140, step=0.25, options={"spine": 9}, schedule=1)
@example(seed=1, draft_len=9, width=9, budget=50, step=1.0, options={"min_path_score": -1.0, "spine": 9}, schedule=2)
def test_best_first_tree_matches_reference_on_drawn_rows(
    kernels, seed, draft_len, width, budget, step, options, schedule
):
    """Log probabilities on a grid tie along whole paths; rows end early where tokens are missing."""
    random = np.random.default_rng(seed)
    logits = -np.sort(random.exponential(2.0, (draft_len, width)).astype(np.float32), axis=-1)
    if step:
        logits = np.ceil(logits / step) * np.float32(step)
    ids = np.broadcast_to(np.arange(width, dtype=np.int32), logits.shape).copy()
    ids[np.arange(width) >= random.integers(width // 2, width + 1, (draft_len, 1))] = -1
    lse = np.zeros(draft_len, np.float32)
    if random.random() < 0.2:
        lse[random.integers(draft_len)] = np.nan
    check(replace(kernels, seed=schedule), Candidates(ids, logits, lse), budget=budget, **options)


@pytest.mark.parametrize("kind", ["unsorted", "above the parent", "infinite", "missing in the middle", "nan"])
def test_best_first_tree_pops_where_scores_do_not_fall(kernels, kind):
    for seed in range(5):
        table = top_candidates(rows(6, 300, seed), 24)
        logits, lse, ids = table.logits.copy(), table.lse.copy(), table.token_ids.copy()
        if kind == "unsorted":
            logits = logits[:, ::-1].copy()
        elif kind == "above the parent":
            lse[1] = logits[1, 0] - np.float32(0.5)
        elif kind == "infinite":
            lse[2] = -np.inf
        elif kind == "missing in the middle":
            ids[1, 3] = -1
        else:
            logits[1, 2] = np.nan
        for spine in (0, 4):
            check(kernels, Candidates(ids, logits, lse), budget=60, spine=spine)


def test_best_first_tree_pops_when_the_pool_overflows(kernels, monkeypatch):
    for name in ("LEAST_SLOTS", "MOST_SLOTS"):
        monkeypatch.setattr(v2_best_first, name, 64)
    kernel.tree_plan.cache_clear()
    check(kernels, top_candidates(rows(15, 600, 3), 60), budget=60)
    check(kernels, top_candidates(rows(15, 600, 3), 60), budget=60, spine=15, max_children=2)
    kernel.tree_plan.cache_clear()


def test_best_first_tree_keeps_requests_apart(kernels):
    """Ragged budgets, an inactive request, a bad row: each request is what it is alone."""
    tables = [top_candidates(rows(12, 400, seed), 48) for seed in range(6)]
    tables[2].lse[5] = np.nan
    batch = Candidates(*(np.stack(parts) for parts in zip(*(vars(one).values() for one in tables), strict=True)))
    budgets, roots = np.array([48, 0, 40, 1, 17, 33], np.int32), np.array([1, 2, 3, -1, 0, 9], np.int32)
    found = kernels(best_first_tree, batch, budget=budgets, root_token_ids=roots, capacity=48)
    assert_identical(found, best_first_tree(batch, budget=budgets, root_token_ids=roots, capacity=48))
    assert found.status.tolist() == [0, 0, 1, 0, 0, 0]
