"""A compare helper that passes on a wrong result is worse than none: each must fail on one flipped element."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy.testing import assert_close, assert_identical
from ddtree_cupy.testing.compare import to_host
from ddtree_cupy.testing.strategies import draft_trees, paged_caches, seeds

ALL_DTYPES = [np.int32, np.uint32, np.bool_, np.float64, np.float32, np.float16, ml_dtypes.bfloat16]


def _array(dtype, shape=(3, 4)):
    values = np.arange(np.prod(shape)).reshape(shape) % 5
    return values.astype(dtype)


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_assert_identical_accepts_equal_arrays(dtype):
    assert_identical(_array(dtype), _array(dtype).copy())
    assert_identical(_array(dtype, ()), _array(dtype, ()).copy())
    assert_identical(_array(dtype, (0, 3)), _array(dtype, (0, 3)))


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@given(place=st.integers(0, 11))
def test_assert_identical_rejects_one_flipped_element(dtype, place):
    changed = _array(dtype)
    changed.flat[place] = changed.flat[place] == 0
    where = rf"parents: 1 of 12 entries differ; \[{place // 4}, {place % 4}\] is"
    with pytest.raises(AssertionError, match=where):
        assert_identical(changed, _array(dtype), name="parents")


FLOATS = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
ONES = np.ones((3, 4))
DIFFERENT = [
    (np.array(2), np.array(3), r"1 of 1 entries differ; \[\] is 2, expected 3"),
    (np.float32([-0.0]), np.float32([0.0]), "1 of 1"),
    (_array(np.int64), _array(np.int32), "dtype int64, expected int32"),
    (_array(np.uint32), _array(np.int32), "dtype uint32, expected int32"),
    *((np.ones(shape), ONES, "shape") for shape in [(4, 3), (12,), (1, 3, 4), (3, 1)]),
    *((np.array([np.nan, 1], dtype), np.array([1, np.nan], dtype), "2 of 2 entries differ") for dtype in FLOATS),
    (None, ONES, "expected an array"),
    (ONES, None, "expected None"),
    ([ONES], (ONES,), "another type or length"),
    ((ONES,), (ONES, ONES), "another type or length"),
    (1, 2, "1, expected 2"),
    (True, 1, "True, expected 1"),
]


@pytest.mark.parametrize(("actual", "expected", "words"), DIFFERENT)
def test_assert_identical_rejects(actual, expected, words):
    assert_identical(actual, actual)
    with pytest.raises(AssertionError, match=words):
        assert_identical(actual, expected)


def test_assert_identical_accepts_any_nan_for_another():
    assert_identical(np.float32([np.nan]), -np.float32([np.nan]))


@pytest.mark.parametrize("dtype", FLOATS)
def test_assert_identical_rejects_one_ulp(dtype):
    bits = np.ones(3, dtype).view(f"u{np.dtype(dtype).itemsize}")
    with pytest.raises(AssertionError, match="1 of 3 entries differ"):
        assert_identical((bits + np.array([0, 0, 1], bits.dtype)).view(dtype), np.ones(3, dtype))


@given(tree=draft_trees(path_scores=True, inactive=False), data=st.data())
def test_assert_identical_rejects_one_flipped_container_entry(tree, data):
    assert_identical(tree, tree.map(np.copy))
    field = data.draw(st.sampled_from(sorted(tree.__dataclass_fields__)))
    changed = getattr(tree, field).copy()
    changed.flat[0] = 7 if changed.flat[0] != 7 else 8
    with pytest.raises(AssertionError, match=rf"DraftTree\.{field}: 1 of"):
        assert_identical(replace(tree, **{field: changed}), tree)
    with pytest.raises(AssertionError, match="path_scores"):
        assert_identical(replace(tree, path_scores=None), tree)


@given(kv=paged_caches())
def test_assert_identical_rejects_another_container(kv):
    assert_identical((kv, kv), (kv.map(np.copy), kv))
    with pytest.raises(AssertionError, match="max_context"):
        assert_identical(replace(kv, max_context=kv.max_context + 1), kv)
    with pytest.raises(AssertionError, match="tuple, expected PagedKV"):
        assert_identical((kv,), kv)


# ---- assert_close ----


def _case(seed=0, dtype=np.float32, size=200):
    exact = np.random.default_rng(seed).standard_normal(size)
    return exact, exact.astype(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_assert_close_accepts_the_baseline(dtype):
    exact, baseline = _case(dtype=dtype)
    assert_close(baseline, exact, baseline, floor=0.0)
    assert_close(baseline[:0], exact[:0], baseline[:0], floor=0.0)


@given(seed=seeds(), place=st.integers(0, 199))
def test_assert_close_rejects_one_flipped_element(seed, place):
    exact, baseline = _case(seed)
    wrong = baseline.copy()
    wrong[place] += 1e-3
    with pytest.raises(AssertionError, match=rf"out: max error .* > .* worst \[{place}\] is"):
        assert_close(wrong, exact, baseline, floor=2.0**-24, name="out")


def test_assert_close_rejects_a_small_error_everywhere():
    exact, baseline = _case()
    floor = 1e-3
    with pytest.raises(AssertionError, match=r"max error .* <= .*, rms .* >"):
        assert_close(baseline + np.float32(0.5 * floor), exact, baseline, floor=floor)
    assert_close(baseline + np.float32(0.24 * floor), exact, baseline, floor=floor)


def test_assert_close_rejects_results_that_are_not_rounded_to_nearest():
    exact, baseline = _case(dtype=ml_dtypes.bfloat16)
    truncated = (exact.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32).astype(ml_dtypes.bfloat16)
    with pytest.raises(AssertionError, match=r"max error .* <= .*, rms .* <= .*, bias -0\.\d+ of at most 0\.\d+ ulp"):
        assert_close(truncated, exact, baseline, floor=2.0**-6)


EXACT, BASELINE = _case()
RULES = [  # actual, reference, baseline, options; error
    (EXACT, EXACT, BASELINE, {}, AssertionError, "dtype float64, expected float32"),
    (BASELINE[None], EXACT, BASELINE, {}, AssertionError, "shape"),
    (BASELINE, BASELINE, BASELINE, {}, TypeError, "`reference` has dtype float32"),
    (BASELINE, EXACT, BASELINE[:3], {}, ValueError, "`baseline` is"),
    (BASELINE, EXACT, BASELINE, {"widen": 2.0}, ValueError, "`widen` needs a `reason`"),
    (BASELINE, EXACT, BASELINE, {"rms_factor": 2.5}, ValueError, "`rms_factor` needs a `reason`"),
    (
        BASELINE + 10,
        EXACT,
        BASELINE,
        {"widen": 2.0, "reason": "probabilities are rounded"},
        AssertionError,
        "bounds times 2, rms factor 2: probabilities are rounded",
    ),
]


@pytest.mark.parametrize(("actual", "reference", "baseline", "options", "error", "words"), RULES)
def test_assert_close_rejects(actual, reference, baseline, options, error, words):
    with pytest.raises(error, match=words):
        assert_close(actual, reference, baseline, floor=1.0, **options)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_assert_close_rejects_misplaced_specials(special):
    exact = np.array([0.0, special, 1.0])
    baseline = exact.astype(np.float32)
    assert_close(baseline.copy(), exact, baseline, floor=0.0)
    moved = baseline[[1, 0, 2]]
    finite = np.zeros(3, np.float32)
    other = np.where(np.arange(3) == 1, np.float32(-np.inf if special != -np.inf else np.nan), baseline)
    for wrong in (moved, finite, other):
        with pytest.raises(AssertionError, match="inf or NaN elsewhere"):
            assert_close(wrong, exact, baseline, floor=1e9)
    with pytest.raises(AssertionError, match="the baseline has"):
        assert_close(baseline, exact, finite, floor=1e9)


def test_to_host_copies_from_a_device():
    class OnDevice:
        def get(self):
            return np.arange(3)

    assert_identical(to_host(OnDevice()), np.arange(3))
