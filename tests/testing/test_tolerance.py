"""The float rule's own arithmetic."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddtree_cupy.kernels import KernelSpec, get_kernel
from ddtree_cupy.kernels.device import device_of
from ddtree_cupy.testing import assert_identical, judge, lse_floor, out_floor, tensor_core_matmul
from ddtree_cupy.testing.strategies import seeds

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SMALL_FLOATS = [np.dtype(np.float16), BFLOAT16]


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


def test_judge_multiplies_the_root_mean_square_of_the_baseline():
    exact, baseline = np.zeros(4), np.array([1.0, -1.0, 1.0, -1.0])
    found = judge(1.5 * baseline, exact, baseline, floor=1.0, rms_factor=1.25)
    assert found.rms_allowed == 1.5
    assert found.passes
    assert not judge(1.6 * baseline, exact, baseline, floor=1.0, rms_factor=1.25).passes
    assert judge(1.6 * baseline, exact, baseline, floor=1.0).passes


def truncate(values, dtype):
    """Round float64 values to `dtype` toward zero."""
    near = values.astype(dtype)
    return np.where(np.abs(near.astype(np.float64)) > np.abs(values), np.nextafter(near, dtype.type(0)), near)


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=str)
@given(seed=seeds(), size=st.integers(1, 400), spread=st.floats(0, 3))
@example(seed=982, size=320, spread=3.0)  # beyond float16 without the clip
def test_judge_accepts_rounding_to_nearest(dtype, seed, size, spread):
    """However few the entries, and by a baseline that was lucky: exact in all of them."""
    rng = np.random.default_rng(seed)
    exact = (rng.standard_normal(size) * np.exp(spread * rng.standard_normal(size))).clip(-6e4, 6e4)
    found = judge(exact.astype(dtype), exact, exact, floor=out_floor(dtype, exact, exact))
    assert abs(found.bias) <= found.bias_allowed


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=str)
@given(seed=seeds(), size=st.integers(100, 400))
def test_judge_rejects_truncation(dtype, seed, size):
    """The other inequalities let it through."""
    exact = np.random.default_rng(seed).standard_normal(size)
    found = judge(truncate(exact, dtype), exact, exact.astype(dtype), floor=out_floor(dtype, exact, exact))
    assert found.max_error <= found.max_allowed
    assert found.rms_error <= found.rms_allowed
    assert found.bias < -found.bias_allowed
    assert not found.passes


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=str)
def test_judge_accepts_one_value_repeated(dtype):
    """Its roundings do not average out, but the baseline has them too."""
    exact = np.full(1000, 1 + 0.4 * float(ml_dtypes.finfo(dtype).eps))
    found = judge(exact.astype(dtype), exact, exact.astype(dtype), floor=out_floor(dtype, exact, exact))
    assert found.bias == pytest.approx(-0.4)
    assert found.passes


def test_judge_measures_no_bias_of_wide_floats():
    exact = np.ones(1000)
    assert judge(exact.astype(np.float32) - np.float32(1e-3), exact, exact, floor=1.0).bias == 0.0


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


# ---- sums that tensor cores cut off ----


@pytest.mark.parametrize(
    ("left", "right", "wanted"),
    [
        ([1, 2**-13], [1, 2**-12], 1 + 0),  # 2^-25 is kept beside 1, but not stored in 24 bits
        ([1, 2**-13, 2**-13], [1, 2**-12, 2**-12], 1),
        ([1, 2**-13] + 3 * [2**-13], [1, 2**-12] + 3 * [2**-12], 1 + 2**-23),  # four of them reach the 24th bit
        ([1, 2**-13] + 7 * [2**-13], [1, 2**-13] + 7 * [2**-13], 1),  # 2^-26 is dropped, however often
        ([-1, -(2**-13)], [1, 2**-13], -1),  # toward zero
        ([1, -(2**-13)], [1, 2**-13], 1),  # each number on its own, not their sum
        ([1, 1.5, 2**-13], [2**-24, 1.5, 2**-12], 2.25),  # 1.5 * 1.5 has the exponent 0, and keeps 26 bits and a carry
        ([0] * 16 + [1, 2**-13], [0] * 16 + [1, 2**-13], 1),  # zeros align nothing
        ([1] + [0] * 15 + [2**-13] * 8, [1] + [0] * 15 + [2**-13] * 8, 1),  # nor does a step of its own help
    ],
)
def test_tensor_core_matmul_cuts_off_what_the_24_bits_and_2_do_not_hold(left, right, wanted):
    for dtype in SMALL_FLOATS:
        found = tensor_core_matmul(np.array([left], dtype), np.array([right], dtype).T)
        assert found.dtype == np.float32
        assert found.tolist() == [[wanted]]


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=str)
@given(seed=seeds(), sizes=st.tuples(*[st.integers(0, 40)] * 3))
def test_tensor_core_matmul_matches_exact_products(dtype, seed, sizes):
    """A step loses at most 18 units of 2^-25 and one of 2^-23, relative to the largest number in it."""
    rng = np.random.default_rng(seed)
    n, k, m = sizes
    left, right = rng.standard_normal((n, k)).astype(dtype), rng.standard_normal((k, m)).astype(dtype)
    found = tensor_core_matmul(left, right)
    magnitudes = np.abs(left.astype(np.float64)) @ np.abs(right.astype(np.float64))
    steps = -(-k // 16)
    assert found.shape == (n, m)
    exact = left.astype(np.float64) @ right.astype(np.float64)
    assert (np.abs(found - exact) <= steps * (18 / 4 + 1) * 2.0**-23 * magnitudes).all()
    one = np.eye(n, 3, dtype=dtype)
    assert_identical(tensor_core_matmul(one, np.ones((3, 2), dtype)), (one @ np.ones((3, 2))).astype(np.float32))


PRODUCT = """#include "common/ptx.cuh"
// c[16, 8] = a[16, 16 * steps] b[8, 16 * steps]^T
template <class T>
__global__ void product(const T* a, const T* b, float* c, int steps) {
  const int r = threadIdx.x / 4, p = threadIdx.x % 4;
  const auto two = [&](const T* from, int row, int k) {
    return *reinterpret_cast<const unsigned*>(from + row * 16 * steps + k);
  };
  float sums[4] = {};
  for (int k = 2 * p; k < 16 * steps; k += 16) {
    const unsigned of_a[4] = {two(a, r, k), two(a, r + 8, k), two(a, r, k + 8), two(a, r + 8, k + 8)};
    multiply_add<T>(sums, of_a, two(b, r, k), two(b, r, k + 8));
  }
  for (int i = 0; i < 4; ++i) c[(r + 8 * (i / 2)) * 8 + 2 * p + i % 2] = sums[i];
}
"""


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=str)
@given(seed=seeds(), steps=st.integers(1, 40), spread=st.integers(0, 6))
def test_tensor_core_matmul_is_identical_to_the_instruction(kernels, dtype, seed, steps, spread):
    if kernels.name == "cupy" and device_of("cupy").arch != "sm_90":
        pytest.skip("the model is that of sm_90")
    rng = np.random.default_rng(seed)
    left, right = (
        (rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread + 1, shape)).astype(dtype)
        for shape in ((16, 16 * steps), (8, 16 * steps))
    )
    spelled = "__half" if dtype == np.float16 else "__nv_bfloat16"
    kernel = get_kernel(KernelSpec("product.cu", f"product<{spelled}>", code=PRODUCT), kernels.name)
    on_device = kernels.put((left, right, np.zeros((16, 8), np.float32)))
    args = dict(zip(("a", "b", "c"), on_device, strict=True))
    replace(kernels, cut_sums=True).run(kernel, (1,), (32,), steps=steps, **args)
    assert_identical(kernels.get(on_device[2]), tensor_core_matmul(left, right.T))
