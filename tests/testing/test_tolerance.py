"""The float rule's own arithmetic."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy.testing import judge, lse_floor, out_floor
from ddtree_cupy.testing.strategies import seeds


@pytest.mark.parametrize(("dtype", "mantissa"), [(np.float16, 10), (ml_dtypes.bfloat16, 7)])
@given(exponent=st.integers(-10, 10), fraction=st.floats(1, 2, exclude_max=True))
def test_out_floor_is_one_ulp_of_the_largest_result(dtype, mantissa, exponent, fraction):
    reference = np.array([0.0, -fraction * 2.0**exponent, 2.0**-12])
    assert out_floor(dtype, reference, np.array([1e6])) == 2.0 ** (exponent - mantissa)


def test_out_floor_is_the_subnormal_step_at_zero():
    assert out_floor(np.float16, np.zeros(2), np.ones(2)) == 2.0**-24
    assert out_floor(ml_dtypes.bfloat16, np.zeros(2), np.ones(2)) == 2.0**-133


def test_out_floor_scales_with_the_values_and_never_reads_nan():
    ckv = np.array([0.5, -4.0, np.nan, np.inf], np.float32)
    assert out_floor(np.float32, np.zeros(1), ckv) == 128 * 2.0**-24
    assert out_floor(np.float64, np.zeros(1), ckv) == 128 * 2.0**-53
    assert out_floor(np.float32, np.zeros(1), np.zeros(0)) == 0.0


def test_out_floor_rejects_integers():
    with pytest.raises(TypeError, match="`dtype` is int32"):
        out_floor(np.int32, np.zeros(1), np.zeros(1))


def test_lse_floor_is_relative_above_one():
    floor = lse_floor(np.array([0.0, 0.5, -1.0, 100.0, -np.inf, np.nan]))
    np.testing.assert_array_equal(floor, 8 * 2.0**-24 * np.array([1, 1, 1, 100, 0, 0]))


def test_judge_allows_twice_the_baseline_and_the_floor():
    exact = np.zeros(100)
    baseline = np.zeros(100)
    baseline[3] = 1.0
    at_bound = np.zeros(100)
    at_bound[7] = 2.0
    assert judge(at_bound, exact, baseline, floor=0.0).passes
    at_bound[7] = np.nextafter(2.0, 3.0)
    found = judge(at_bound, exact, baseline, floor=0.0)
    assert not found.passes
    assert found.worst == [(7,)]
    assert judge(at_bound, exact, baseline, floor=0.5).passes


def test_judge_measures_the_root_mean_square():
    exact = np.zeros(4)
    found = judge(np.array([1.0, -1.0, 1.0, -1.0]), exact, np.array([1.0, 0, 0, 0]), floor=0.0)
    assert found.rms_error == 1.0
    assert found.rms_allowed == 1.0
    assert found.passes
    assert not judge(np.array([1.0, -1.0, 1.0, -1.1]), exact, np.array([1.0, 0, 0, 0]), floor=0.0).passes


def test_judge_widens_the_root_mean_square_alone():
    exact, actual = np.zeros(4), np.array([1.0, 1.0, 1.0, 1.0])
    assert not judge(actual, exact, exact, floor=1.0).passes
    assert judge(actual, exact, exact, floor=1.0, widen_rms=4.0).passes
    assert not judge(actual, exact, exact, floor=0.99, widen_rms=5.0).passes
    baseline = np.array([0.25, -0.25, 0.25, -0.25])
    assert judge(actual, exact, baseline, floor=1.0, widen_rms=4.0).rms_allowed == 1.5  # the baseline's part stays


def test_judge_takes_one_floor_an_entry():
    exact = np.array([1.0, 1000.0])
    baseline = exact.copy()
    floor = np.array([1e-3, 1.0])
    assert judge(np.array([1.0, 1000.1]), exact, baseline, floor=floor).passes
    assert not judge(np.array([1.1, 1000.0]), exact, baseline, floor=floor).passes


def test_judge_skips_what_is_not_finite():
    exact = np.array([-np.inf, np.nan, 1.0])
    assert judge(exact, exact, exact, floor=0.0).passes
    assert judge(exact[:2], exact[:2], exact[:2], floor=0.0).worst == []


@given(seed=seeds(), size=st.integers(1, 1000))
def test_judge_is_invariant_under_tiling(seed, size):
    """No bound grows with the array: the same data four times over is judged the same."""
    random = np.random.default_rng(seed)
    exact = random.standard_normal(size)
    baseline = exact.astype(np.float32)
    actual = baseline + (random.standard_normal(size) * 1e-7).astype(np.float32)
    one = judge(actual, exact, baseline, floor=1e-8)
    four = judge(np.tile(actual, 4), np.tile(exact, 4), np.tile(baseline, 4), floor=1e-8)
    assert one.max_error == four.max_error
    assert one.max_allowed == four.max_allowed
    np.testing.assert_allclose([four.rms_error, four.rms_allowed], [one.rms_error, one.rms_allowed], rtol=1e-12)
