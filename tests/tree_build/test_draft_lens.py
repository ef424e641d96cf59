"""Drafts of different lengths in one batch: each request is as if its logits were cut, on every backend."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import Candidates, build_tree, top_candidates
from ddtree_cupy.errors import ArgumentError
from ddtree_cupy.testing import assert_identical
from ddtree_cupy.testing.strategies import draft_logits, seeds
from tests.tree_build.cases import options, request

NAN, INF = np.nan, np.inf


def lens_of(seed, logits):
    """Return a length for each request, and the logits with NaN and +inf in the rows that must not be read."""
    rng = np.random.default_rng(seed)
    batch, most, _ = logits.shape
    lens = rng.integers(0, most + 1, batch, dtype=np.int32)
    hidden = logits.copy()
    hidden[np.arange(most) >= lens[:, None]] = rng.choice([NAN, INF])
    return lens, hidden


def longer(candidates, draft_len):
    """Return unbatched candidates with rows of no candidates behind them."""
    count = draft_len - len(candidates.lse)
    return Candidates(
        np.pad(candidates.token_ids, ((0, count), (0, 0)), constant_values=-1),
        np.pad(candidates.logits, ((0, count), (0, 0)), constant_values=-INF),
        np.pad(candidates.lse, (0, count), constant_values=-INF),
    )


rows = draft_logits(batched=True, dtypes=("float32", "bfloat16", "float64"), max_vocab=70)


@given(logits=rows, seed=seeds(), k=st.integers(0, 40))
def test_top_candidates_of_short_drafts_is_identical_to_those_of_cut_rows(backend, logits, seed, k):
    logits = backend.narrowed(logits)
    lens, hidden = lens_of(seed, logits)
    found = replace(backend, seed=seed % 10)(top_candidates, hidden, k, draft_lens=lens).validate()
    for b, length in enumerate(lens.tolist()):
        cut = backend(top_candidates, logits[b, :length], k)
        assert_identical(request(found, b), longer(cut, logits.shape[1]))
        one = backend(top_candidates, hidden[b], k, draft_lens=length)
        assert_identical(one, longer(cut, logits.shape[1]))


@given(logits=rows, seed=seeds(), budget=st.integers(0, 40), chosen=options)
def test_build_tree_of_short_drafts_is_identical_to_that_of_cut_rows(backend, logits, seed, budget, chosen):
    logits = backend.narrowed(logits)
    lens, hidden = lens_of(seed, logits)
    limits = {"budget": budget, "root_token_ids": 3, **chosen}
    found = backend(build_tree, hidden, draft_lens=lens, **limits)
    for b, length in enumerate(lens.tolist()):
        assert_identical(request(found, b), backend(build_tree, logits[b, :length], **limits))


def test_build_tree_of_one_length_for_all_is_identical_to_one_each(backend):
    logits = np.random.default_rng(0).standard_normal((3, 4, 9)).astype(np.float32)
    lens = np.array([2, 2, 2], np.int32)
    limits = {"budget": 9, "root_token_ids": 3}
    found = backend(build_tree, logits, draft_lens=2, **limits)
    assert_identical(found, backend(build_tree, logits, draft_lens=lens, **limits))
    assert_identical(found, backend(build_tree, logits[:, :2], **limits))


def test_a_bad_row_counts_only_where_it_is_read(backend):
    logits = np.zeros((2, 3, 4), np.float32)
    logits[:, 1, 0] = NAN
    tree = backend(
        build_tree, logits, budget=9, root_token_ids=3, draft_lens=np.array([1, 3], np.int32), check_finite=False
    )
    assert tree.status.tolist() == [0, 1]
    assert tree.num_nodes.tolist() == [5, 5]


@pytest.mark.parametrize("function", [top_candidates, build_tree])
def test_a_row_that_is_read_is_named(function):
    logits = np.zeros((2, 3, 4), np.float32)
    logits[:, 2, 1] = NAN
    limits = {"k": 2} if function is top_candidates else {"budget": 3, "root_token_ids": 1}
    with pytest.raises(ArgumentError, match=r"`draft_logits`\[1, 2, 1\] is nan"):
        function(logits, draft_lens=[2, 3], **limits)
    with pytest.raises(ArgumentError, match=r"`draft_logits`\[2, 1\] is nan"):
        function(logits[0], draft_lens=3, **limits)


def test_kernels_bound_absurd_lengths(kernels):
    """Lengths on a device are not read on the host: 0 below, all rows above."""
    logits = np.random.default_rng(0).standard_normal((4, 3, 5)).astype(np.float32)
    lens = np.array([-(2**31), -1, 4, 2**31 - 1], np.int32)
    found = kernels(top_candidates, logits, 2, draft_lens=lens)
    assert_identical(found, kernels(top_candidates, logits, 2, draft_lens=np.clip(lens, 0, 3)))


def test_an_empty_draft_gives_the_root(backend):
    logits = np.zeros((2, 3, 4), np.float32)
    assert backend(build_tree, logits, budget=9, root_token_ids=3, draft_lens=0).num_nodes.tolist() == [1, 1]
