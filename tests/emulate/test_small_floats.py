"""fp16 and bf16: bit for bit NumPy and ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest

from ddtree_cupy import emulate

pytestmark = pytest.mark.emulate

CODE = r"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
extern "C" __global__ void encode(const float* f, const double* d, unsigned short* h, unsigned short* b,
                                  unsigned short* hd, unsigned short* bd, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  h[i] = __half_as_ushort(__float2half_rn(f[i]));
  b[i] = __bfloat16_as_ushort(__float2bfloat16_rn(f[i]));
  hd[i] = __half_as_ushort(__half(d[i]));
  bd[i] = __bfloat16_as_ushort(__nv_bfloat16(d[i]));
}
extern "C" __global__ void decode(const __half* h, const __nv_bfloat16* b, float* hf, float* bf, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  hf[i] = __half2float(h[i]);
  bf[i] = __bfloat162float(b[i]);
}
template <typename T>
__global__ void arithmetic(const T* x, const T* y, const T* z, T* out, bool* less, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  T a = x[i], b = y[i];
  out[i] = a + b;
  out[n + i] = a - b;
  out[2 * n + i] = a * b;
  out[3 * n + i] = a / b;
  out[4 * n + i] = __hfma(a, b, z[i]);
  out[5 * n + i] = __hmax(a, b);
  out[6 * n + i] = -a;
  less[i] = a < b;
}
extern "C" __global__ void pairs(const __half2* h, const __nv_bfloat162* b, float2* out) {
  out[0] = __half22float2(__hmul2(h[0], __floats2half2_rn(2.f, 3.f)));
  out[1] = __bfloat1622float2(__hfma2(b[0], b[0], b[0]));
  out[2] = make_float2(__low2float(h[0]), __high2float(b[0]));
  __half2 s = __halves2half2(__high2half(h[0]), __low2half(h[0]));
  out[3] = __half22float2(s);
}
"""
NAMES = ["arithmetic<__half>", "arithmetic<__nv_bfloat16>"]
ALL = np.arange(65536, dtype=np.uint16)


@pytest.fixture(scope="module")
def module():
    return emulate.Module(CODE, name_expressions=NAMES)


def same_bits(ours, theirs, dtype):
    """Equal bits, any NaN equal to any NaN."""
    a, b = ours.view(dtype), theirs.view(dtype)
    nan = np.isnan(a.astype(np.float32))
    return np.array_equal(nan, np.isnan(b.astype(np.float32))) and np.array_equal(
        a.view(np.uint16)[~nan], b.view(np.uint16)[~nan]
    )


def test_decode_matches_numpy_exhaustively(module):
    halves, floats = ALL.view(np.float16), ALL.view(ml_dtypes.bfloat16)
    hf, bf = np.zeros(65536, np.float32), np.zeros(65536, np.float32)
    module.get_function("decode")((256,), (256,), (halves, floats, hf, bf, np.int32(65536)))
    np.testing.assert_array_equal(hf, halves.astype(np.float32))
    np.testing.assert_array_equal(bf, floats.astype(np.float32))


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_encode_matches_numpy(module):
    n = 1 << 19
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, n, dtype=np.uint32)
    # Every fp16 and bf16 value, the middle between it and the next, and one bit to each side of that.
    for i, (half, step) in enumerate([(ALL.view(np.float16).astype(np.float32).view(np.uint32), 1 << 12),
                                      (ALL.astype(np.uint32) << 16, 1 << 15)]):  # fmt: skip
        for j, off in enumerate((0, step, step - 1)):
            bits[(3 * i + j) * 65536 : (3 * i + j + 1) * 65536] = half + np.uint32(off)
    f = bits.view(np.float32)
    d = f.astype(np.float64)
    # Near a float32: rounding twice would go wrong here.
    d[:: 2] *= 1 + rng.choice([-(2.0**-50), 2.0**-50], d[:: 2].size)  # fmt: skip
    out = [np.zeros(n, np.uint16) for _ in range(4)]
    module.get_function("encode")((n // 256,), (256,), (f, d, *out, np.int32(n)))
    with np.errstate(all="ignore"):
        assert same_bits(out[0], f.astype(np.float16).view(np.uint16), np.float16)
        assert same_bits(out[1], f.astype(ml_dtypes.bfloat16).view(np.uint16), ml_dtypes.bfloat16)
        assert same_bits(out[2], d.astype(np.float16).view(np.uint16), np.float16)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)], ids=str)
def test_arithmetic_matches_numpy(module, dtype):
    n = 1 << 15
    rng = np.random.default_rng(1)
    x, y, z = (rng.standard_normal(n).astype(np.float32).astype(dtype) for _ in range(3))
    out, less = np.zeros((7, n), dtype), np.zeros(n, bool)
    name = NAMES[0] if dtype == np.float16 else NAMES[1]
    module.get_function(name)((n // 128,), (128,), (x, y, z, out, less, np.int32(n)))
    a, b, c = (v.astype(np.float32) for v in (x, y, z))
    for row, expected in enumerate((a + b, a - b, a * b, a / b)):
        np.testing.assert_array_equal(out[row].view(np.uint16), expected.astype(dtype).view(np.uint16))
    # The product is exact in float64 and so, for these sizes, is the sum in extended precision.
    exact = (a.astype(np.longdouble) * b + c).astype(np.float64)
    wide = exact.astype(np.float32) if dtype == np.float16 else None
    if wide is not None:
        np.testing.assert_array_equal(out[4].view(np.uint16), exact.astype(dtype).view(np.uint16))
    else:
        assert np.abs(out[4].astype(np.float64) - exact).max() <= 2.0**-8 * np.abs(exact).max()
    np.testing.assert_array_equal(out[5], np.maximum(a, b).astype(dtype))
    np.testing.assert_array_equal(out[6], (-a).astype(dtype))
    np.testing.assert_array_equal(less, a < b)


def test_fma_rounds_once(module):
    # 1 + 2^-8 squared plus a tiny number: a second rounding would lose the direction.
    x = np.array([1.0078125, 1.5], ml_dtypes.bfloat16)
    z = np.array([2.0**-60, -(2.0**-60)], ml_dtypes.bfloat16)
    y = np.array([1.5, 1.00390625 * 2], np.float32).astype(ml_dtypes.bfloat16)
    out, less = np.zeros((7, 2), ml_dtypes.bfloat16), np.zeros(2, bool)
    module.get_function(NAMES[1])((1,), (2,), (x, y, z, out, less, np.int32(2)))
    from fractions import Fraction

    for i in range(2):
        exact = Fraction(float(x[i])) * Fraction(float(y[i])) + Fraction(float(z[i]))
        candidates = ALL.view(ml_dtypes.bfloat16)[0x3F00:0x4100].astype(np.float64)
        best = min(candidates, key=lambda c: abs(Fraction(c) - exact))
        assert float(out[4, i]) == best


def test_pairs_match_numpy(module):
    h = np.array([1.5, -2.25], np.float16)
    b = np.array([0.5, 3.0], ml_dtypes.bfloat16)
    out = np.zeros((4, 2), np.float32)
    module.get_function("pairs")((1,), (1,), (h, b, out))
    assert out.tolist() == [[3.0, -6.75], [0.75, 12.0], [1.5, 3.0], [-2.25, 1.5]]
