"""The kernels of top_candidates against the reference: one body for the emulator and the GPU."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import Candidates, emulate, top_candidates
from ddtree_cupy.errors import ArgumentError, DTypeError, LayoutError
from ddtree_cupy.testing import GuardedArray, assert_close, assert_identical, lse_floor
from ddtree_cupy.testing.strategies import draft_logits
from ddtree_cupy.tree_build import reference
from ddtree_cupy.tree_build.api import top_candidates_workspace_bytes

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float32), np.dtype(np.float16), BFLOAT16]

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
schedules = st.integers(0, 9)


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


@given(logits=draft_logits(non_finite=True, max_vocab=80), k=st.integers(0, 90), seed=schedules)
def test_top_candidates_matches_reference(kernels, logits, k, seed):
    check(replace(kernels, seed=seed), np.ascontiguousarray(logits), k)


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
def test_top_candidates_never_overflows(kernels, values):
    check(kernels, np.array([values], np.float32), 2)


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
        workspace = GuardedArray((top_candidates_workspace_bytes(logits, k),), np.uint8)
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
