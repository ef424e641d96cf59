"""The kernels merge_states and write_kv, equal to their references: one body for the emulator and the GPU."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tree_attention.cases import BFLOAT16, build, recipes

from ddtree_cupy import PagedKV, merge_states, write_kv
from ddtree_cupy.testing import assert_close, assert_identical, lse_floor, out_floor
from ddtree_cupy.tree_attention import reference

DTYPES = [np.dtype(np.float32), np.dtype(np.float16), BFLOAT16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(seed=st.integers(0, 2**16), shape=st.sampled_from([(1, 1), (3, 5), (2, 33), (1, 100)]))
def test_merge_states_matches_reference(kernels, dtype, seed, shape):
    rng = np.random.default_rng(seed)
    outs = [rng.standard_normal((*shape, 16)).astype(dtype) for _ in range(2)]
    lses = [
        np.where(rng.random(shape) < 0.3, -np.inf, 10 * rng.standard_normal(shape)).astype(np.float32) for _ in "ab"
    ]
    for out, lse in zip(outs, lses, strict=True):
        out[lse == -np.inf] = np.nan
    out, lse = kernels(merge_states, outs[0], lses[0], outs[1], lses[1])
    exact_out, exact_lse = reference.merge_states(outs[0], lses[0], outs[1], lses[1], compute_dtype=np.float64)
    plain_out, plain_lse = reference.merge_states(outs[0], lses[0], outs[1], lses[1], compute_dtype=np.float32)
    values = np.nan_to_num(np.concatenate([o.astype(np.float64).ravel() for o in outs]))
    assert_close(out, exact_out, plain_out.astype(dtype), floor=out_floor(dtype, exact_out, values))
    assert_close(lse, exact_lse, plain_lse, floor=lse_floor(exact_lse))
    one_sided = (lses[1] == -np.inf) & (lses[0] > -np.inf)
    assert_identical(out[one_sided], outs[0][one_sided])
    assert_identical(lse[one_sided], lses[0][one_sided])


def test_merge_states_of_non_finite_sides_is_nan_as_in_the_reference(kernels):
    """Only -inf marks a side that saw nothing; where the other lse is NaN or +inf, no number would be right."""
    lse_a, lse_b = np.array([[np.nan, np.nan, np.inf, 0, 0], [1, -np.inf, 1, np.nan, -np.inf]], np.float32)
    out_a, out_b = np.random.default_rng(0).standard_normal((2, 5, 16)).astype(np.float32)
    out, lse = kernels(merge_states, out_a, lse_a, out_b, lse_b)
    assert np.isnan(out[:4]).all()
    assert np.isnan(lse[:4]).all()
    assert_identical((out[4], lse[4]), (out_a[4], lse_a[4]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(recipe=recipes(), by_array=st.booleans(), seed=st.integers(0, 2**16))
def test_write_kv_is_identical_to_reference(kernels, dtype, recipe, by_array, seed):
    case = build(recipe, dtype=dtype)
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((*case.q_nope.shape[:2], 48)).astype(dtype)
    counts = np.array(recipe["counts"], np.int32)
    num_rows = counts if by_array else int(counts.min())
    pool = case.kv.ckv.base

    def run(backend_put, runner):
        buffer = backend_put(pool.copy())
        kv = PagedKV(
            buffer[..., :32], buffer[..., 32:], backend_put(case.kv.page_table), backend_put(case.kv.context_lens)
        )
        new = backend_put(rows)
        runner(write_kv, kv, new[..., :32], new[..., 32:], num_rows=backend_put(num_rows) if by_array else num_rows)
        return buffer

    expected = run(lambda array: array, lambda function, *a, **o: function(*a, **o))
    found = kernels.get(run(kernels.put, kernels.run))
    assert_identical(found, expected)


def test_write_kv_is_identical_to_reference_with_unlike_strides(kernels):
    """Widths and strides of the two kinds of rows and of the two pools have nothing in common."""
    rng = np.random.default_rng(0)
    ckv, kpe = (rng.standard_normal((3, 5, width)).astype(np.float32)[:, :4] for width in (32, 16))
    kv = PagedKV.from_dense(np.zeros((3, 9, 32), np.float32), np.zeros((3, 9, 16), np.float32), context_lens=[0, 5, 2])
    num_rows = np.array([4, 3, 2], np.int32)
    device, device_ckv, device_kpe, device_num_rows = kernels.put(
        (replace(kv, ckv=kv.ckv.copy(), kpe=kv.kpe.copy()), ckv, kpe, num_rows)
    )
    write_kv(kv, ckv, kpe, num_rows=num_rows)
    kernels.run(write_kv, device, device_ckv, device_kpe, num_rows=device_num_rows)
    assert_identical(kernels.get(device), kv)


def test_write_kv_skips_positions_without_a_page(kernels):
    kv = PagedKV.allocate(6, page_size=2, head_dim_ckv=16, head_dim_kpe=16)
    table = np.array([0, -1, 2**30], np.int32)
    rows = np.ones((6, 16), np.float32)
    kv = kernels.put(replace(kv, page_table=table))
    kernels.run(write_kv, kv, *kernels.put((rows, rows)), num_rows=6)
    written = kernels.get(kv.ckv)
    assert written[0].min() == 1
    assert not written[1:].any()
