"""top_candidates: order, ties, signed zeros, bad rows, shapes, log-sum-exp."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ddtree_cupy import Candidates, top_candidates
from ddtree_cupy.errors import ArgumentError, DDTreeError, DTypeError, ShapeError
from ddtree_cupy.testing import assert_close, assert_identical, lse_floor, unchanged
from ddtree_cupy.testing.strategies import draft_logits, seeds
from ddtree_cupy.tree_build import reference
from tests.oracles import log_sum_exp, ranked_row
from tests.tree_build.helpers import CupyArray, TorchTensor, garbage_like, request

ALL_DTYPES = ("float32", "float16", "bfloat16", "float64")
INF, NAN = np.inf, np.nan


def row_of(values, dtype=np.float32):
    return np.array([values], dtype)


def ids_of(values, k, dtype=np.float32, **options):
    return top_candidates(row_of(values, dtype), k, **options).token_ids[0].tolist()


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


# ---- against brute force ----


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


# ---- order and ties ----


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("k", "ids"), [(1, [2]), (2, [2, 4]), (3, [2, 4, 3]), (4, [2, 4, 3, 1]), (5, [2, 4, 3, 1, 0])])
def test_top_candidates_is_identical_for_every_k_on_ties(dtype, k, ids):
    assert ids_of([1, 2, 5, 4, 5], k, dtype) == ids


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


def test_top_candidates_keeps_global_ids_in_the_second_shard():
    assert ids_of([0, 0, 0, 0, 0, 9, 0, 0], 1) == [5]


@given(logits=draft_logits(ties="distinct"), seed=seeds())
def test_top_candidates_is_invariant_under_relabelling(logits, seed):
    """Without ties, permuting the vocabulary permutes the ids and nothing else."""
    order = np.random.default_rng(seed).permutation(logits.shape[-1]).astype(np.int32)
    plain, moved = top_candidates(logits, 9), top_candidates(logits[..., order], 9)
    assert_identical(moved.logits, plain.logits)
    assert_identical(np.where(moved.token_ids < 0, np.int32(-1), order[moved.token_ids]), plain.token_ids)


# ---- signed zeros, subnormals, infinities ----


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16])
def test_top_candidates_counts_both_zeros_as_one(dtype):
    top = top_candidates(row_of([-0.0, 0.0, -0.0, -1.0, 0.0], dtype), 5)
    assert top.token_ids.tolist() == [[0, 1, 2, 4, 3]]
    assert not np.signbit(top.logits[0, :4]).any()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_top_candidates_counts_subnormals_as_zero(dtype):
    """1e-40 is a float32 (and bfloat16) subnormal: CuPy compiles with flush-to-zero, so the reference flushes too."""
    top = top_candidates(row_of([-1e-40, 0.0, 1e-40, 2e-38, -2e-38, -0.0], dtype), 6)
    assert top.token_ids.tolist() == [[3, 0, 1, 2, 5, 4]]
    assert_identical(top.logits[0, 1:5], np.zeros(4, np.float32))
    assert top.logits[0, 0] > 0 > top.logits[0, 5]


def test_top_candidates_keeps_float16_subnormals():
    """They are normal numbers in float32, where all arithmetic happens."""
    top = top_candidates(row_of([0.0, 2.0**-24, -(2.0**-24)], np.float16), 3)
    assert top.token_ids.tolist() == [[1, 0, 2]]
    assert top.logits.tolist() == [[2.0**-24, 0.0, -(2.0**-24)]]


def test_top_candidates_leaves_out_minus_inf():
    top = top_candidates(row_of([0, -INF, 1, -INF]), 4)
    assert top.token_ids.tolist() == [[2, 0, -1, -1]]
    assert top.logits.tolist() == [[1, 0, -INF, -INF]]
    assert math.isclose(top.lse[0], math.log(1 + math.e), rel_tol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("check_finite", [True, False])
def test_top_candidates_of_an_empty_row_have_lse_minus_inf(dtype, check_finite):
    top = top_candidates(row_of([-INF, -INF], dtype), 2, check_finite=check_finite)
    assert top.token_ids.tolist() == [[-1, -1]]
    assert top.logits.tolist() == [[-INF, -INF]]
    assert top.lse.tolist() == [-INF]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("bad", [NAN, -NAN, INF])
def test_top_candidates_rejects_a_bad_row(dtype, bad):
    logits = np.array([[0, 1, 2, 3], [0, bad, 2, -INF]], dtype)
    with pytest.raises(ArgumentError, match=r"top_candidates: `draft_logits`\[1, 1\]"):
        top_candidates(logits, 2)
    top = top_candidates(logits, 2, check_finite=False)
    assert top.token_ids.tolist() == [[3, 2], [-1, -1]]
    assert top.logits.tolist() == [[3, 2], [-INF, -INF]]
    assert np.isnan(top.lse).tolist() == [False, True]


@pytest.mark.parametrize("values", [[88.0, 89.0], [1e30, 1e30], [-1e30, -1e30, -2e30], [3e38, -3e38]])
def test_top_candidates_never_overflows(values):
    top = top_candidates(row_of(values), 2)
    assert np.isfinite(top.lse).all()
    assert top.lse[0] >= top.logits[0, 0]


def test_top_candidates_upcasts_before_the_log_sum_exp():
    """bfloat16 logits [10, 9, 8]: 10.4076, not the 10.4375 that bfloat16 arithmetic gives."""
    top = top_candidates(row_of([10, 9, 8], ml_dtypes.bfloat16), 3)
    assert top.lse.dtype == np.float32
    assert top.logits.dtype == np.float32
    assert abs(top.lse[0] - 10.407606) < 2e-6
    assert abs((top.logits[0, 0] - top.lse[0]) + 0.407606) < 2e-6


@given(logits=draft_logits(dtypes=("float16", "bfloat16")), k=st.integers(0, 9))
def test_top_candidates_is_identical_for_upcast_logits(logits, k):
    assert_identical(top_candidates(logits, k), top_candidates(logits.astype(np.float32), k))


# ---- shapes ----


def test_top_candidates_gives_at_most_the_vocabulary():
    top = top_candidates(row_of([0, 1]), 8)
    assert top.token_ids.tolist() == [[1, 0]]


@pytest.mark.parametrize("shape", [(0, 5), (3, 5), (0, 4, 5), (2, 0, 5), (2, 4, 5), (2, 4, 1)])
@pytest.mark.parametrize("k", [0, 1, 5, 6])
def test_top_candidates_takes_empty_axes(shape, k):
    top = top_candidates(np.zeros(shape, np.float32), k).validate()
    assert top.token_ids.shape == (*shape[:-1], min(k, shape[-1]))
    assert top.logits.shape == top.token_ids.shape
    assert top.lse.shape == shape[:-1]


@given(logits=draft_logits(batched=True, non_finite=True), k=st.integers(0, 9))
def test_top_candidates_is_identical_unbatched(logits, k):
    batched = top_candidates(logits, k, check_finite=False)
    for index, rows in enumerate(logits):
        assert_identical(top_candidates(rows, k, check_finite=False), request(batched, index))


@given(logits=draft_logits(batched=True), k=st.integers(0, 9))
def test_top_candidates_is_identical_for_strided_logits(logits, k):
    plain = top_candidates(logits, k)
    spread = np.zeros((*logits.shape[:-1], 2 * logits.shape[-1]), logits.dtype)[..., ::2]
    spread[...] = logits
    assert_identical(top_candidates(spread, k), plain)
    assert_identical(top_candidates(np.asfortranarray(logits), k), plain)
    assert_identical(top_candidates(logits[..., ::-1].copy()[..., ::-1], k), plain)


# ---- out=, and what is never written ----


@given(logits=draft_logits(dtypes=ALL_DTYPES), k=st.integers(0, 9))
def test_top_candidates_never_writes_its_input(logits, k):
    logits.flags.writeable = False
    with unchanged(draft_logits=logits):
        top_candidates(logits, k)


@given(logits=draft_logits(dtypes=ALL_DTYPES), k=st.integers(0, 9))
def test_top_candidates_is_identical_in_out(logits, k):
    fresh = top_candidates(logits, k)
    out, guards = garbage_like(fresh)
    assert top_candidates(logits, k, out=out) is out
    assert_identical(out, fresh)
    assert [guard.num_touched() for guard in guards] == [0, 0, 0]


@pytest.mark.parametrize("name", ["token_ids", "logits", "lse"])
@pytest.mark.parametrize("fault", ["shape", "dtype", "read-only", "list"])
def test_top_candidates_rejects_wrong_out(name, fault):
    logits = np.arange(8, dtype=np.float32).reshape(2, 4)
    out, _ = garbage_like(top_candidates(logits, 3))
    array = getattr(out, name)
    if fault == "read-only":
        array.flags.writeable = False
    else:
        made = {"shape": array[..., None], "dtype": array.astype(np.int16), "list": array.tolist()}
        out = Candidates(**{field: made[fault] if field == name else getattr(out, field) for field in vars(out)})
    others = {field: getattr(out, field) for field in vars(out) if field != name}
    with unchanged(**others), pytest.raises(DDTreeError, match=rf"top_candidates: `?out\.{name}|`out\.{name}`"):
        top_candidates(logits, 3, out=out)


def test_top_candidates_rejects_out_of_another_type():
    with pytest.raises(DTypeError, match="`out` is tuple"):
        top_candidates(row_of([1, 2]), 1, out=(1, 2, 3))


# ---- bad input ----


@pytest.mark.parametrize(
    ("logits", "error"),
    [
        (np.zeros(4, np.float32), ShapeError),
        (np.zeros((1, 1, 1, 4), np.float32), ShapeError),
        (np.float32(1), ShapeError),
        (np.zeros((2, 4), np.int32), DTypeError),
        (np.zeros((2, 4), bool), DTypeError),
        (np.zeros((2, 4), np.complex64), DTypeError),
        (np.zeros((2, 4), object), DTypeError),
        ([[1.0, 2.0]], DTypeError),
        (None, DDTreeError),
        (3.0, DTypeError),
    ],
)
def test_top_candidates_rejects_wrong_logits(logits, error):
    with pytest.raises(error, match="top_candidates: `draft_logits`"):
        top_candidates(logits, 2)


def test_top_candidates_rejects_a_torch_tensor():
    with pytest.raises(DTypeError, match=r"`draft_logits` is a torch tensor.*from_dlpack"):
        top_candidates(TorchTensor(), 2)


@pytest.mark.parametrize(
    ("k", "error"), [(-1, ArgumentError), (1.0, DTypeError), (True, DTypeError), ("3", DTypeError), (None, DTypeError)]
)
def test_top_candidates_rejects_wrong_k(k, error):
    with pytest.raises(error, match="top_candidates: `k`"):
        top_candidates(row_of([1, 2]), k)


def test_top_candidates_takes_a_numpy_integer():
    assert ids_of([1, 2], np.int64(1)) == [1]


def test_top_candidates_rejects_mixed_libraries():
    """A CuPy array never reaches the NumPy reference silently."""
    with pytest.raises((DDTreeError, ImportError, AttributeError)):
        top_candidates(CupyArray(), 2)


@given(logits=draft_logits(min_draft_len=1, min_vocab=2, minus_inf=False, ties="distinct"), k=st.integers(1, 5))
def test_top_candidates_is_invariant_under_a_shift(logits, k):
    """Logits are defined up to a constant: shifting by 2 moves lse by 2 and keeps the ids."""
    assume(logits.size)
    logits = logits.astype(np.float32)
    plain, moved = top_candidates(logits, k), top_candidates(logits + np.float32(2), k)
    assert_identical(moved.token_ids, plain.token_ids)
    np.testing.assert_allclose(moved.lse, plain.lse + 2, rtol=1e-6, atol=1e-6)
