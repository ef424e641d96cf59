"""top_candidates against sorting every row in Python, and its kernels against the reference where rows are long."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddtree_cupy import Candidates, emulate, top_candidates, workspace_bytes
from ddtree_cupy.errors import ArgumentError, DTypeError, LayoutError
from ddtree_cupy.testing import GuardedArray, assert_close, assert_identical, lse_floor
from ddtree_cupy.testing.strategies import draft_logits, seeds
from ddtree_cupy.tree_build import reference
from tests.oracles import log_sum_exp, ranked_row

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float32), np.dtype(np.float16), BFLOAT16]

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
schedules = st.integers(0, 9)


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


@given(
    logits=draft_logits(dtypes=("float32", "float16", "bfloat16", "float64"), non_finite=True, strided=None),
    k=st.integers(0, 90),
    seed=schedules,
)
@example(logits=np.array([[-0.0, 0.0, -1.0, -0.0]]), k=3, seed=0)
def test_top_candidates_matches_oracle(backend, logits, k, seed):
    logits = backend.narrowed(logits)
    top = replace(backend, seed=seed)(top_candidates, logits, k, check_finite=False).validate()
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
def test_top_candidates_matches_oracle_on_wide_rows(backend, seed, scale, vocab):
    logits = (np.random.default_rng(seed).standard_normal((1, vocab)) * scale).astype(np.float16)
    top = backend(top_candidates, logits, 17)
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


def check(backend, logits, k, **options):
    """Compare with the reference, ids and logits bit by bit, lse by the float rule; return the kernel's result."""
    found = backend(top_candidates, logits, k, check_finite=False, **options)
    batched = logits if logits.ndim == 3 else logits[None]
    with np.errstate(over="ignore"):
        wanted = reference.top_candidates(batched, k)
        exact = reference.top_candidates(batched, k, compute_dtype=np.float64)
    if logits.ndim == 2:
        wanted, exact = wanted.without_batch(), exact.without_batch()
    assert_identical((found.token_ids, found.logits), (wanted.token_ids, wanted.logits))
    assert_close(found.lse, exact.lse, wanted.lse, floor=lse_floor(exact.lse), name="lse")
    if found.logits.shape[-1]:
        assert not (found.lse < found.logits[..., 0]).any()
    return found


@dtypes
@pytest.mark.parametrize("vocab", [2047, 2048, 2049, 4100, 8192, 8193, 20_000])
def test_top_candidates_matches_reference_over_several_slices(kernels, dtype, vocab):
    random = np.random.default_rng(vocab)
    logits = random.standard_normal((2, vocab)).astype(dtype)
    logits[1] = random.integers(0, 5, vocab) * 0.5  # ties across the edges of slices
    for k in (1, 64, 1024):
        check(replace(kernels, seed=k), logits, k)


@dtypes
def test_top_candidates_matches_reference_for_a_whole_vocabulary(kernels, dtype):
    """K = V: more keys than shared memory sorts."""
    logits = np.random.default_rng(1).standard_normal((1, 9000)).astype(dtype)
    check(kernels, logits, 9000)


@dtypes
@pytest.mark.parametrize("vocab", [1, 31, 33, 300, 9000])
def test_top_candidates_matches_reference_on_equal_logits(kernels, dtype, vocab):
    found = check(kernels, np.zeros((1, vocab), dtype), 40)
    assert found.token_ids[0].tolist() == list(range(min(vocab, 40)))


@dtypes
def test_top_candidates_matches_reference_on_zeros_of_both_signs_and_subnormals(kernels, dtype):
    logits = np.zeros((2, 60), dtype)
    logits[0, ::2] = -0.0
    tiny = np.float32(1e-40) if dtype != np.float16 else np.float16(6e-8)  # a float16 subnormal is a normal float32
    logits[1, ::3], logits[1, 1::3] = tiny, -tiny
    check(kernels, logits, 50)


@dtypes
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 2048, 8999])
def test_top_candidates_matches_reference_on_a_bad_row(kernels, dtype, bad, place):
    logits = np.zeros((3, 9000), dtype)
    logits[1, place] = bad
    logits[2] = -np.inf
    found = check(kernels, logits, 3)
    assert np.isnan(found.lse).tolist() == [False, True, False]
    assert found.lse[2] == -np.inf


@pytest.mark.parametrize("values", [[88.0, 89.0], [1e30, 1e30], [-1e30, -1e30, -2e30], [3e38, -3e38]])
def test_top_candidates_never_overflows(backend, values):
    check(backend, np.array([values], np.float32), 2)


@dtypes
def test_top_candidates_is_invariant_under_the_batch(kernels, dtype):
    logits = np.random.default_rng(2).standard_normal((3, 4, 5000)).astype(dtype)
    together = kernels(top_candidates, logits, 9)
    for b in range(3):
        alone = kernels(top_candidates, logits[b], 9)
        assert_identical(alone, together.map(lambda array, b=b: array[b]))


@dtypes
def test_top_candidates_is_invariant_under_strides(kernels, dtype):
    """Rows of a larger buffer, every other one, backwards, at an odd start; what lies between is NaN."""
    buffer = np.full((4, 9, 77), np.nan, dtype)
    view = buffer[::-2, 1::2, 5:70]
    view[...] = np.random.default_rng(3).standard_normal(view.shape)
    assert_identical(kernels(top_candidates, view, 7), kernels(top_candidates, view.copy(), 7))


@pytest.mark.emulate
@given(logits=draft_logits(batched=True, min_batch=1, min_draft_len=1), k=st.integers(1, 50), seed=schedules)
def test_emulated_top_candidates_never_writes_outside_its_results(logits, k, seed):
    logits = np.ascontiguousarray(logits)
    batch, draft_len, vocab = logits.shape
    row = (batch, draft_len, min(k, vocab))
    guards = [GuardedArray(row, np.int32), GuardedArray(row, np.float32), GuardedArray(row[:2], np.float32)]
    with emulate.active(seed=seed):
        workspace = GuardedArray((workspace_bytes(top_candidates, logits, k),), np.uint8)
        given_out = Candidates(*(guard.array for guard in guards))
        out = top_candidates(logits, k, out=given_out, workspace=workspace.array, checked=False)
        assert out is given_out
        assert_identical(out, top_candidates(logits, k))
    assert [guard.num_touched() for guard in (*guards, workspace)] == [0, 0, 0, 0]


def test_top_candidates_kernels_reject(kernels):
    logits = np.zeros((2, 3, 8), np.float32)
    with pytest.raises(DTypeError, match=r"`draft_logits`.*float64.*astype"):
        kernels(top_candidates, logits.astype(np.float64), 2)
    with pytest.raises(LayoutError, match="`draft_logits`"):
        kernels(top_candidates, logits[..., ::2], 2)
    with pytest.raises(ArgumentError, match=r"`workspace` has 8 bytes"):
        kernels(top_candidates, logits, 2, workspace=np.zeros(8, np.uint8))
    out = Candidates(np.zeros((2, 3, 3), np.int32), np.zeros((2, 3, 2), np.float32), np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match=r"`out\.token_ids`"):
        kernels(top_candidates, logits, 2, out=out)
