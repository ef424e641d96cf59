"""The oracles judge the references, so they are checked against numbers known on paper.

Where two of them judge one function, its test compares them with each other: the walks of accept, the rows that
commit_kv leaves, best_first and the best closed set, and attention key by key and by a dense softmax.
"""

import math

import numpy as np
import pytest
from hypothesis import given

from ddtree_cupy.testing.strategies import ragged_batches
from tests.oracles import (
    all_prefixes,
    best_first,
    closed_sets,
    dense_attention,
    log_sum_exp,
    marginal_tables,
    paged_attention,
    ranked_row,
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


def test_ranked_row_and_log_sum_exp():
    assert ranked_row([1, 2, 5, 4, 5], 3) == [(2, 5.0), (4, 5.0), (3, 4.0)]
    assert ranked_row([-0.0, 1e-40, -np.inf], 3) == [(0, 0.0), (1, 0.0)]
    assert math.isclose(log_sum_exp([10, 9, 8]), 10.407605964444)
    assert log_sum_exp([-np.inf]) == -math.inf
    assert math.isnan(log_sum_exp([0, np.inf]))


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
