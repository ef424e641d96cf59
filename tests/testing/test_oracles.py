"""The oracles judge the references, so they are checked against each other and against numbers known on paper."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import PagedKV, Visibility
from ddtree_cupy.testing.strategies import draft_trees, ragged_batches, seeds
from tests.oracles import (
    all_prefixes,
    best_closed_set_value,
    best_first,
    closed_sets,
    committed,
    dense_attention,
    gather,
    log_sum_exp,
    marginal_tables,
    paged_attention,
    ranked_row,
    walk_links,
    walk_parents,
)

T6 = ([[10, 11, 12], [20, 21, 22]], np.log([[0.6, 0.3, 0.1], [0.5, 0.4, 0.1]]).tolist(), [0.0, 0.0])


def test_all_prefixes_counts():
    rows = ([[0, 1]] * 3, [[0.0, 0.0]] * 3, [math.log(2)] * 3)
    assert len(list(all_prefixes(marginal_tables(*rows)))) == 14


def test_best_first_matches_the_paper_toy():
    chosen = best_first(marginal_tables(*T6), 5)
    assert [prefix.ranks for prefix in chosen] == [(0,), (0, 0), (1,), (0, 1), (1, 0)]
    assert math.isclose(math.fsum(math.exp(prefix.score) for prefix in chosen), 1.59)


def test_closed_sets_are_counted_by_catalan_numbers():
    """A set of n prefixes over two tokens is a binary tree of n + 1 nodes less its root: Catalan differences."""
    paths = {tuple(p) for depth in range(1, 5) for p in np.ndindex(*[2] * depth)}
    sizes = np.bincount([len(chosen) for chosen in closed_sets(paths, 4)])
    assert sizes.tolist() == [1, 2, 5, 14, 42]


@given(seed=seeds(), budget=st.integers(0, 5))
def test_best_first_reaches_the_best_closed_set(seed, budget):
    probabilities = np.random.default_rng(seed).dirichlet(np.ones(3), 3)
    ordered = -np.sort(-probabilities, axis=1)
    chosen = best_first(marginal_tables([[0, 1, 2]] * 3, np.log(ordered).tolist(), [0.0] * 3), budget)
    best = best_closed_set_value(probabilities.tolist(), budget)
    assert math.isclose(math.fsum(math.exp(prefix.score) for prefix in chosen), best, rel_tol=1e-12, abs_tol=1e-15)


def test_ranked_row_and_log_sum_exp():
    assert ranked_row([1, 2, 5, 4, 5], 3) == [(2, 5.0), (4, 5.0), (3, 4.0)]
    assert ranked_row([-0.0, 1e-40, -np.inf], 3) == [(0, 0.0), (1, 0.0)]
    assert math.isclose(log_sum_exp([10, 9, 8]), 10.407605964444)
    assert log_sum_exp([-np.inf]) == -math.inf
    assert math.isnan(log_sum_exp([0, np.inf]))


@given(tree=draft_trees(batched=False), seed=seeds())
def test_walk_links_matches_walk_parents(tree, seed):
    random = np.random.default_rng(seed)
    count = int(tree.num_nodes)
    targets = random.integers(-1, 4, len(tree.token_ids))
    for node in range(count):
        children = np.flatnonzero(tree.parents[:count] == node)
        if len(children) and random.random() < 0.8:
            targets[node] = tree.token_ids[random.choice(children)]
    by_parents = walk_parents(tree.parents, tree.token_ids, targets, count)
    assert walk_links(tree.first_child, tree.next_sibling, tree.token_ids, targets, count) == by_parents


def test_walks_on_t6():
    parents, tokens = [-1, 0, 1, 0, 1, 3], [9, 10, 20, 11, 21, 20]
    assert walk_parents(parents, tokens, [11, 0, 0, 20, 0, 7], 6) == ([0, 3, 5], 7)
    assert walk_parents(parents, tokens, [-1] * 6, 6) == ([0], -1)
    assert walk_parents(parents, tokens, [11] * 6, 0) == ([], -1)


def test_dense_attention_of_zero_queries_is_the_mean():
    values = np.eye(5)
    visible = np.array([[1, 0], [0, 0]], bool)
    out, lse = dense_attention(visible, 2, np.zeros((2, 1, 5)), np.zeros((2, 1, 1)), values, np.ones((5, 1)), 3, 0.1)
    np.testing.assert_allclose(out[0, 0], [0.25, 0.25, 0.25, 0.25, 0])
    np.testing.assert_allclose(out[1, 0], [1 / 3, 1 / 3, 1 / 3, 0, 0])
    np.testing.assert_allclose(lse[:, 0], np.log([4, 3]))
    empty, none = dense_attention(
        visible, 2, np.zeros((2, 1, 5)), np.zeros((2, 1, 1)), values, np.ones((5, 1)), 3, 0.1, "tree"
    )
    assert none[1, 0] == -np.inf
    assert not empty[1].any()
    np.testing.assert_allclose(empty[0, 0], values[3])


@pytest.mark.parametrize("keys", ["all", "context", "tree"])
@given(batch=ragged_batches(max_nodes=5, max_context=6, head_dims=((3, 2),), dtypes=("float32",)))
def test_paged_attention_never_reads_poison(keys, batch):
    shape = batch.tree.visibility_bits.shape[:-1]
    out, lse = paged_attention(batch.tree, np.ones((*shape, 2, 3)), np.ones((*shape, 2, 2)), batch.kv, 0.5, keys)
    assert np.isfinite(out).all()
    assert not np.isnan(lse).any()


def test_paged_attention_matches_one_softmax():
    random = np.random.default_rng(3)
    ckv, kpe, q_nope, q_pe = (random.standard_normal(shape) for shape in [(7, 4), (7, 2), (2, 1, 4), (2, 1, 2)])
    kv = PagedKV.from_dense(ckv, kpe, page_size=3, context_lens=5)
    out, lse = paged_attention(Visibility.from_dense(np.tri(2, dtype=bool)), q_nope, q_pe, kv, 0.3)
    scores = 0.3 * (q_nope[1, 0] @ ckv.T + q_pe[1, 0] @ kpe.T)
    np.testing.assert_allclose(lse[1, 0], np.log(np.exp(scores).sum()))
    np.testing.assert_allclose(out[1, 0], np.exp(scores) / np.exp(scores).sum() @ ckv)


def test_committed_rows_are_the_context_and_the_accepted_nodes():
    rows = np.arange(9.0)[:, None]
    kv = PagedKV.from_dense(rows, rows, page_size=2, context_lens=3)
    ckv, kpe = committed(kv, 0, [0, 3, 5])
    assert ckv[:, 0].tolist() == kpe[:, 0].tolist() == [0, 1, 2, 3, 6, 8]
    assert gather(kv, 0, 3)[0][:, 0].tolist() == [0, 1, 2]
