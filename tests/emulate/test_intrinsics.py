"""The device language: warp and block collectives, atomics, integer and float intrinsics, against NumPy."""

import numpy as np
import pytest

from ddtree_cupy import emulate

pytestmark = pytest.mark.emulate

WARP = r"""
#define FULL 0xffffffffu
extern "C" __global__ void warp(const int* x, int* out) {
  int t = threadIdx.x, lane = t & 31, v = x[t];
  int* o = out + t * 20;
  o[0] = __shfl_sync(FULL, v, 3);
  o[1] = __shfl_sync(FULL, v, lane + 1, 8);
  o[2] = __shfl_up_sync(FULL, v, 2);
  o[3] = __shfl_up_sync(FULL, v, 3, 16);
  o[4] = __shfl_down_sync(FULL, v, 5);
  o[5] = __shfl_down_sync(FULL, v, 1, 4);
  o[6] = __shfl_xor_sync(FULL, v, 7);
  o[7] = __shfl_xor_sync(FULL, v, 2, 4);
  o[8] = (int)__ballot_sync(FULL, v & 1);
  o[9] = __any_sync(FULL, v == 5);
  o[10] = __all_sync(FULL, v >= 0);
  o[11] = (int)__match_any_sync(FULL, v & 3);
  o[12] = __reduce_add_sync(FULL, v);
  o[13] = __reduce_min_sync(FULL, v);
  o[14] = __reduce_max_sync(FULL, v);
  o[15] = (int)__reduce_or_sync(FULL, (unsigned)v);
  o[16] = (int)__reduce_xor_sync(FULL, (unsigned)v);
  int w;
  if (lane < 16) w = __shfl_xor_sync(0xffffu, v, 1);
  else w = __shfl_down_sync(0xffff0000u, v, 1, 16);
  o[17] = w;
  double d = __shfl_xor_sync(FULL, (double)v, 1);
  o[18] = (int)d;
  int same;
  __match_all_sync(FULL, lane & 0, &same);
  o[19] = same;
  __syncwarp();
}
"""


def expected_warp(v):
    lanes = np.arange(32)
    bits = 1 << lanes.astype(np.int64)

    def take(source, ok=True):
        return v[np.where(ok, source, lanes)]

    full = np.ones(32, np.int64)
    columns = [
        v[3] * full,
        take((lanes & ~7) | ((lanes + 1) & 7)),
        take(lanes - 2, lanes >= 2),
        take(lanes - 3, (lanes & 15) >= 3),
        take(np.minimum(lanes + 5, 31), lanes + 5 < 32),
        take(np.minimum(lanes + 1, 31), (lanes & 3) < 3),
        take(lanes ^ 7),
        take(lanes ^ 2),
        (bits * (v & 1)).sum() * full,
        (v == 5).any() * full,
        (v >= 0).all() * full,
        ((v[:, None] & 3) == (v[None] & 3)) @ bits,
        v.sum() * full,
        v.min() * full,
        v.max() * full,
        np.bitwise_or.reduce(v) * full,
        np.bitwise_xor.reduce(v) * full,
        np.where(lanes < 16, v[lanes ^ 1], v[np.minimum(lanes + 1, 31)]),
        v[lanes ^ 1],
        full,
    ]
    return (np.stack(columns, 1).astype(np.int64) & 0xFFFFFFFF).astype(np.uint32).view(np.int32)


@pytest.mark.parametrize("seed", [0, 1, 2, 7])
def test_warp_collectives_match_numpy(seed):
    x = np.random.default_rng(seed).integers(-3, 50, 64).astype(np.int32)
    out = np.zeros((64, 20), np.int32)
    emulate.Module(WARP).get_function("warp")((1,), (64,), (x, out), seed=seed)
    np.testing.assert_array_equal(out, np.concatenate([expected_warp(x[:32]), expected_warp(x[32:])]))


BLOCK = r"""
extern "C" __global__ void block(int* counts, int* histogram, const int* x, float* sum, unsigned long long* big,
                                 int n) {
  __shared__ int bins[8];
  int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
  if (t < 8) bins[t] = 0;
  __syncthreads();
  int v = i < n ? x[i] : -1;
  if (v >= 0) atomicAdd(&bins[v & 7], 1);
  int count = __syncthreads_count(v >= 0), some = __syncthreads_or(v == 3), every = __syncthreads_and(v >= 0);
  if (t == 0) {
    counts[blockIdx.x * 3] = count;
    counts[blockIdx.x * 3 + 1] = some != 0;
    counts[blockIdx.x * 3 + 2] = every != 0;
  }
  if (t < 8) atomicAdd(&histogram[t], bins[t]);
  if (v >= 0) {
    atomicAdd(sum, 1.0f);
    atomicMax(big, (unsigned long long)v << 33);
  }
}
extern "C" __global__ void total(const float* x, float* parts, unsigned* ticket, float* out, int n) {
  __shared__ float s[64];
  __shared__ bool last;
  int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
  s[t] = i < n ? x[i] : 0.f;
  __syncthreads();
  for (int o = blockDim.x / 2; o; o >>= 1) {
    if (t < o) s[t] += s[t + o];
    __syncthreads();
  }
  if (t == 0) {
    parts[blockIdx.x] = s[0];
    __threadfence();
    last = atomicAdd(ticket, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (last && t == 0) {
    float a = 0;
    for (unsigned b = 0; b < gridDim.x; ++b) a += parts[b];
    *out = a;
  }
}
extern "C" __global__ void place(int* out) {
  unsigned b = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  unsigned t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  out[b * blockDim.x * blockDim.y * blockDim.z + t] = blockIdx.z * 100000 + blockIdx.y * 10000 + blockIdx.x * 1000 +
                                                     threadIdx.z * 100 + threadIdx.y * 10 + threadIdx.x;
}
"""


@pytest.mark.parametrize("seed", [0, 5, 8])
def test_block_collectives_and_atomics_match_numpy(seed):
    n = 1000
    x = np.random.default_rng(seed).integers(0, 64, n).astype(np.int32)
    counts, histogram = np.zeros((8, 3), np.int32), np.zeros(8, np.int32)
    total, big = np.zeros(1, np.float32), np.zeros(1, np.uint64)
    function = emulate.Module(BLOCK).get_function("block")
    function((8,), (128,), (counts, histogram, x, total, big, np.int32(n)), seed=seed)
    padded = np.pad(x, (0, 24), constant_values=-1).reshape(8, 128)
    expected = np.stack([(padded >= 0).sum(1), (padded == 3).any(1), (padded >= 0).all(1)], 1)
    np.testing.assert_array_equal(counts, expected)
    np.testing.assert_array_equal(histogram, np.bincount(x & 7, minlength=8))
    assert total[0] == n
    assert big[0] == int(x.max()) << 33


def test_last_block_sees_all_parts():
    x = np.random.default_rng(0).standard_normal(700).astype(np.float32)
    parts, ticket, out = np.zeros(11, np.float32), np.zeros(1, np.uint32), np.zeros(1, np.float32)
    emulate.Module(BLOCK).get_function("total")((11,), (64,), (x, parts, ticket, out, np.int32(700)), seed=1)
    assert abs(out[0] - x.sum()) < 1e-3


@pytest.mark.parametrize("seed", [0, 3])
def test_thread_and_block_indices_are_those_of_cuda(seed):
    grid, block = (2, 3, 2), (4, 2, 3)
    out = np.full(12 * 24, -1, np.int32)
    emulate.Module(BLOCK).get_function("place")(grid, block, (out,), seed=seed)
    bz, by, bx, tz, ty, tx = np.indices((2, 3, 2, 3, 2, 4))
    expected = bz * 100000 + by * 10000 + bx * 1000 + tz * 100 + ty * 10 + tx
    np.testing.assert_array_equal(out, expected.ravel())


SCALAR = r"""
#include <math_constants.h>
extern "C" __global__ void scalars(const unsigned* u, const float* f, const double* d, long long* i, float* g,
                                   double* h) {
  i[0] = __popc(u[0]); i[1] = __clz((int)u[0]); i[2] = __ffs((int)u[0]); i[3] = __brev(u[0]); i[4] = __clz(0);
  i[5] = __funnelshift_l(u[0], u[1], 5); i[6] = __funnelshift_r(u[0], u[1], 5); i[7] = __byte_perm(u[0], u[1], 0x2461);
  i[8] = __umulhi(u[0], u[1]); i[9] = __float2int_rn(2.5f); i[10] = __float2int_rz(-2.7f); i[11] = __float2int_ru(2.1f);
  i[12] = __float2int_rn(3e9f); i[13] = __float_as_int(1.0f); i[14] = __double_as_longlong(1.0);
  i[15] = __popcll(0xff00ff00ff00ff00ull); i[16] = min(3, 5) + max(-2, 4); i[17] = __double2int_rz(-7.9);
  g[0] = __fadd_rn(f[0], f[1]); g[1] = __fmul_rn(f[0], f[1]); g[2] = fmaf(f[0], f[1], f[2]);
  g[3] = __double2float_rn(d[0]); g[4] = exp2f(f[0]); g[5] = expf(f[0]); g[6] = logf(f[1]); g[7] = log1pf(f[1]);
  g[8] = rsqrtf(f[1]); g[9] = fmaxf(CUDART_NAN_F, f[0]); g[10] = fminf(f[0], -CUDART_INF_F);
  g[11] = __uint_as_float(u[0]);
  g[12] = fmaxf(-0.0f, 0.0f); g[13] = fminf(0.0f, -0.0f);
  h[0] = __dadd_rn(d[0], d[1]); h[1] = __dsub_rn(d[0], d[1]); h[2] = __dmul_rn(d[0], d[1]); h[3] = exp(d[1]);
  h[4] = (double)f[0] - (double)f[1]; h[5] = __fma_rn(d[0], d[1], d[0]);
  h[6] = __longlong_as_double(0x3ff0000000000000ll);
  h[7] = __hiloint2double(0x40000000, 0);
}
"""


def test_scalar_intrinsics_match_numpy():
    u = np.array([0x80F01234, 0x9ABCDEF1], np.uint32)
    f = np.array([-1.7, 2.3, 0.1], np.float32)
    d = np.array([1 / 3, -0.7])
    i, g, h = np.zeros(18, np.int64), np.zeros(14, np.float32), np.zeros(8)
    emulate.Module(SCALAR).get_function("scalars")((1,), (1,), (u, f, d, i, g, h))
    a, b = (int(v) for v in u)
    both = b << 32 | a
    byte = [both >> (8 * k) & 255 for k in range(8)]
    expected = [
        a.bit_count(),
        0,
        3,
        int(f"{a:032b}"[::-1], 2),
        32,
        (both << 5 >> 32) & 0xFFFFFFFF,
        both >> 5 & 0xFFFFFFFF,
    ]
    expected += [byte[1] | byte[6] << 8 | byte[4] << 16 | byte[2] << 24, a * b >> 32, 2, -2, 3, 2**31 - 1, 0x3F800000]
    expected += [0x3FF0000000000000, 32, 7, -7]
    assert i.tolist() == expected
    f64 = f.astype(np.float64)
    floats = [f[0] + f[1], f[0] * f[1], np.float32(f64[0] * f64[1] + f64[2]), np.float32(d[0]), np.exp2(f64[0])]
    floats += [
        np.exp(f64[0]),
        np.log(f64[1]),
        np.log1p(f64[1]),
        1 / np.sqrt(f64[1]),
        f[0],
        -np.inf,
        u.view(np.float32)[0],
    ]
    np.testing.assert_allclose(g[:12], np.array(floats, np.float32), rtol=2e-7)
    assert not np.signbit(g[12])
    assert np.signbit(g[13])
    doubles = [d[0] + d[1], d[0] - d[1], d[0] * d[1], np.exp(d[1]), f64[0] - f64[1], None, 1.0, 2.0]
    doubles[5] = h[5]
    assert h.tolist() == doubles
    assert abs(h[5] - (d[0] * d[1] + d[0])) < 1e-16


SUBNORMAL = r"""
extern "C" __global__ void tiny(const float* x, float* y, double* z) {
  y[0] = x[0] * 0.5f;
  y[1] = x[1] + 0.0f;
  z[0] = 1e-310 * y[2];
}
"""


@pytest.mark.parametrize("flush", [True, False])
def test_subnormals_are_flushed_only_while_a_kernel_runs(flush):
    smallest = np.finfo(np.float32).smallest_normal
    x = np.array([smallest, smallest / 4], np.float32)
    y, z = np.array([1, 1, 1], np.float32), np.ones(1)
    emulate.Module(SUBNORMAL, flush_subnormals=flush).get_function("tiny")((1,), (1,), (x, y, z))
    expected = [0, 0] if flush else [smallest / 2, smallest / 4]
    assert y[:2].tolist() == expected
    assert z[0] == (0 if flush else 1e-310)
    assert x[0] * np.float32(0.5) != 0
