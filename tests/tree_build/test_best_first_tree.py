"""best_first_tree: bit-identical to sorting all prefixes, under every option, and its metamorphic properties."""

from dataclasses import replace

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from ddtree_cupy import Candidates
from ddtree_cupy.testing import assert_identical
from ddtree_cupy.testing.strategies import candidate_tables, seeds
from ddtree_cupy.tree_build import reference
from tests.oracles import best_first
from tests.tree_build.cases import (
    ROOT,
    build,
    options,
    request,
    table,
    tables,
    tree_of,
)

INF, NAN = np.inf, np.nan


@given(
    candidates=candidate_tables(batched=False, max_draft_len=3, max_width=3),
    chosen=options,
    budget=st.integers(0, 40),
    seed=seeds(),
)
def test_best_first_tree_reference_matches_oracle_with_expand(candidates, chosen, budget, seed):
    """A conditional drafter: every path has a table of its own, some of them bad or empty."""
    depth_limit = len(candidates.lse)

    def expand(path):
        random = np.random.default_rng([seed, *(token + 1 for token in path)])
        width = int(random.integers(0, 4)) if len(path) < depth_limit else 0
        logits = -np.sort(random.integers(0, 4, width) * 0.5)
        lse = NAN if random.random() < 0.05 else float(np.max(logits, initial=-1.0) + 0.5 * random.integers(0, 3))
        return np.arange(width) * 2 + int(random.integers(0, 2)), logits, lse

    def table_of(path):
        token_ids, logits, lse = expand(path)
        return token_ids.tolist(), logits.tolist(), lse

    tree = reference.best_first_tree(
        None,
        budgets=np.array([budget], np.int32),
        root_token_ids=np.array([ROOT], np.int32),
        capacity=40,
        expand=expand,
        **chosen,
    )
    tree.validate()
    expected = tree_of(best_first(table_of, budget, **chosen), root=ROOT, capacity=40)
    for name in ("token_ids", "parents", "depths", "path_scores", "num_nodes", "visibility_bits"):
        assert_identical(getattr(request(tree, 0), name), getattr(expected, name), name=name)


@given(candidates=tables, budget=st.integers(0, 20))
def test_best_first_tree_reference_is_identical_with_marginal_expand(candidates, budget):
    """`expand=` that looks up the row of its depth is the marginal tree."""
    candidates = request(candidates, 0) if candidates.is_batched and len(candidates.lse) else candidates
    if candidates.is_batched:
        return

    def expand(path):
        depth = len(path)
        if depth == len(candidates.lse):
            return np.zeros(0, np.int32), np.zeros(0, np.float32), -INF
        return candidates.token_ids[depth], candidates.logits[depth], candidates.lse[depth]

    def call(**how):
        return reference.best_first_tree(
            budgets=np.array([budget], np.int32), root_token_ids=np.array([ROOT], np.int32), capacity=20, **how
        )

    marginal = call(candidates=candidates.with_batch())
    assert_identical(replace(call(candidates=None, expand=expand), status=marginal.status), marginal)


@given(candidates=candidate_tables(batched=False, max_width=4), budget=st.integers(0, 40))
@example(candidates=table([[0, 0], [0, 0]]), budget=6)
def test_best_first_tree_matches_its_contract(candidates, budget):
    """Scores never rise, a row of the visibility sums to depth + 1, siblings have distinct tokens."""
    tree = build(candidates, budget)
    count = int(tree.num_nodes)
    assert tree.path_scores[0] == 0
    assert (np.diff(tree.path_scores[:count]) <= 0).all()
    assert (tree.visibility.sum(axis=-1) == tree.depths + 1).all()
    edges = list(zip(tree.parents[1:count].tolist(), tree.token_ids[1:count].tolist(), strict=True))
    assert len(edges) == len(set(edges))


@given(candidates=tables, chosen=options, budget=st.integers(0, 30), more=st.integers(0, 10))
def test_best_first_tree_is_identical_to_a_prefix_of_a_larger_budget(candidates, chosen, budget, more):
    small = build(candidates, budget, capacity=40, **chosen)
    large = build(candidates, budget + more, capacity=40, **chosen)
    assert (small.num_nodes == np.minimum(large.num_nodes, budget + 1)).all()
    kept = np.arange(41) < np.asarray(small.num_nodes)[..., None]
    for name in ("token_ids", "parents", "depths"):
        assert_identical(getattr(small, name), np.where(kept, getattr(large, name), np.int32(-1)), name=name)
    assert_identical(small.path_scores, np.where(kept, large.path_scores, -INF))
    assert_identical(small.visibility_bits, np.where(kept[..., None], large.visibility_bits, np.uint32(0)))


@given(candidates=candidate_tables(max_width=4), budget=st.integers(0, 20), level=st.integers(0, 3))
def test_best_first_tree_is_identical_under_an_exact_level_shift(candidates, budget, level):
    """Shifting the logits and the lse of one level by 0.5 leaves logit - lse, and so everything, unchanged."""
    logits = np.round(candidates.logits * 4) / 4
    lse = np.ceil(candidates.lse * 4 + 1) / 4
    plain = Candidates(candidates.token_ids, logits.astype(np.float32), lse.astype(np.float32))
    moved = plain.map(np.copy)
    moved.logits[..., level : level + 1, :] += np.float32(0.5)
    moved.lse[..., level : level + 1] += np.float32(0.5)
    assert_identical(build(moved, budget), build(plain, budget))
