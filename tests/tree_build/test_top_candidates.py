"""top_candidates: order, ties, signed zeros, bad rows, shapes, log-sum-exp."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from ddtree_cupy import Candidates, top_candidates
from ddtree_cupy.testing import assert_close, assert_identical, lse_floor
from ddtree_cupy.testing.strategies import draft_logits, seeds
from ddtree_cupy.tree_build import reference
from tests.oracles import log_sum_exp, ranked_row

ALL_DTYPES = ("float32", "float16", "bfloat16", "float64")
INF, NAN = np.inf, np.nan


def is_bad(row):
    return bool(np.isnan(row.astype(np.float64)).any() or (row == np.inf).any())


def expected_ids_and_logits(logits, k):
    """Return ids and logits ([B,] L, K) by sorting every row in Python."""
    width = min(k, logits.shape[-1])
    dtype = np.float64 if logits.dtype == np.float64 else np.float32
    token_ids = np.full((*logits.shape[:-1], width), -1, np.int32)
    values = np.full((*logits.shape[:-1], width), -np.inf, dtype)
    for place in np.ndindex(logits.shape[:-1]):
        if not is_bad(logits[place]):
            for rank, (token, value) in enumerate(ranked_row(logits[place], k)):
                token_ids[place][rank], values[place][rank] = token, value
    return token_ids, values


def lse_in_float32(logits):
    """Return the baseline of the float rule: the textbook formula in float32, NaN for bad rows."""
    found = np.empty(logits.shape[:-1], np.float32)
    for place in np.ndindex(found.shape):
        row = logits[place].astype(np.float32)
        top = row.max()
        finite = np.float32(0) if top == -np.inf else top
        with np.errstate(divide="ignore"):
            found[place] = np.nan if is_bad(row) else finite + np.log(np.exp(row - finite).sum(dtype=np.float32))
    return found


def exact_lse(logits):
    found = [log_sum_exp(logits[place]) for place in np.ndindex(logits.shape[:-1])]
    return np.array(found, np.float64).reshape(logits.shape[:-1])


@given(logits=draft_logits(dtypes=ALL_DTYPES, non_finite=True), k=st.integers(0, 45))
def test_top_candidates_matches_oracle(logits, k):
    top = top_candidates(logits, k, check_finite=False).validate()
    token_ids, values = expected_ids_and_logits(logits, k)
    assert_identical(top.token_ids, token_ids)
    assert_identical(top.logits, values)
    if logits.dtype == np.float64:
        assert top.lse.dtype == np.float64
        np.testing.assert_allclose(top.lse, exact_lse(logits), rtol=1e-13, atol=1e-13)
    else:
        exact = exact_lse(logits)
        assert_close(top.lse, exact, lse_in_float32(logits), floor=lse_floor(exact), name="lse")


@given(logits=draft_logits(batched=True, non_finite=True), k=st.integers(0, 9))
def test_top_candidates_reference_matches_oracle_in_float64(logits, k):
    top = reference.top_candidates(logits, k, compute_dtype=np.float64)
    token_ids, values = expected_ids_and_logits(logits, k)
    assert top.lse.dtype == np.float64
    assert top.logits.dtype == np.float64
    assert_identical(top.token_ids, token_ids)
    assert_identical(top.logits, values.astype(np.float64))
    np.testing.assert_allclose(top.lse, exact_lse(logits), rtol=1e-13, atol=1e-13)


@given(seed=seeds(), scale=st.sampled_from([1.0, 30.0]), vocab=st.sampled_from([1000, 20_000]))
def test_top_candidates_matches_oracle_on_wide_rows(seed, scale, vocab):
    logits = (np.random.default_rng(seed).standard_normal((1, vocab)) * scale).astype(np.float16)
    top = top_candidates(logits, 17)
    assert_identical(top.token_ids, expected_ids_and_logits(logits, 17)[0])
    exact = exact_lse(logits)
    assert_close(top.lse, exact, lse_in_float32(logits), floor=lse_floor(exact), name="lse")


@given(logits=draft_logits(ties="tied"), k=st.integers(0, 40))
def test_top_candidates_is_invariant_under_k(logits, k):
    """The k best are the first k of the k + 1 best, and lse does not depend on k."""
    fewer, more = top_candidates(logits, k), top_candidates(logits, k + 1)
    width = fewer.token_ids.shape[-1]
    assert_identical(fewer, Candidates(more.token_ids[..., :width], more.logits[..., :width], more.lse))


@given(logits=draft_logits(batched=False, min_vocab=2, min_draft_len=1), k=st.integers(1, 9), cut=st.integers(1, 39))
@example(logits=np.array([[0, 0, 0, 0, 0, 9, 0, 0]], np.float32), k=1, cut=4)
def test_top_candidates_is_invariant_under_sharding(logits, k, cut):
    """Two shards of the vocabulary, merged by (logit, global id), give the unsharded ids: not shard-local ones."""
    cut = min(cut, logits.shape[-1] - 1)
    left, right = top_candidates(logits[:, :cut], k), top_candidates(logits[:, cut:], k)
    whole = top_candidates(logits, k)
    for depth in range(len(logits)):
        merged = list(zip(left.token_ids[depth].tolist(), left.logits[depth].tolist(), strict=True))
        merged += [
            (token + cut if token >= 0 else -1, value)
            for token, value in zip(right.token_ids[depth].tolist(), right.logits[depth].tolist(), strict=True)
        ]
        best = sorted((entry for entry in merged if entry[0] >= 0), key=lambda entry: (-entry[1], entry[0]))
        width = whole.token_ids.shape[-1]
        ids = [token for token, _ in best][:width]
        assert whole.token_ids[depth].tolist() == ids + [-1] * (width - len(ids))


@given(logits=draft_logits(batched=True), k=st.integers(0, 9))
def test_top_candidates_is_identical_for_strided_logits(logits, k):
    plain = top_candidates(logits, k)
    spread = np.zeros((*logits.shape[:-1], 2 * logits.shape[-1]), logits.dtype)[..., ::2]
    spread[...] = logits
    assert_identical(top_candidates(spread, k), plain)
    assert_identical(top_candidates(np.asfortranarray(logits), k), plain)
    assert_identical(top_candidates(logits[..., ::-1].copy()[..., ::-1], k), plain)
