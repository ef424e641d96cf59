"""What the float rule sees of attention that is nearly right, and that it takes what is right; on NumPy alone."""

import numpy as np
import pytest

from ddtree_cupy.testing import out_floor
from tests.tree_attention.cases import BFLOAT16, assert_state, attend_densely, expected, of_one_sign, tree_case

SMALL_FLOATS = [np.dtype(np.float16), BFLOAT16]


def attend_as_v1(case, keys_per_sum):
    """Return v1's float32 result for one request that sees all keys, summed so many at a time, one after another."""
    queries, keys = (
        np.concatenate(parts, axis=-1).astype(np.float32)
        for parts in ((case.q_nope[0], case.q_pe[0]), (case.ckv_rows[0], case.kpe_rows[0]))
    )
    scores = np.float32(case.sm_scale) * np.einsum("nhc,tc->nht", queries, keys)
    highest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - highest)
    total = weights.sum(axis=-1, keepdims=True)
    terms = weights[..., None] * keys[:, : case.q_nope.shape[-1]]
    starts = range(0, len(keys), keys_per_sum)
    sums = [np.cumsum(terms[:, :, start : start + keys_per_sum], axis=2)[:, :, -1] for start in starts]
    return (sum(sums) / total)[None], (highest + np.log(total))[None, ..., 0]


def long_case(seed, context):
    return of_one_sign(tree_case(np.random.default_rng(seed), [1], [context], heads=1, head_dims=(16, 16)))


@pytest.mark.parametrize("seed", range(4))
def test_assert_state_rejects_one_sum_over_all_keys(seed):
    case = long_case(seed, 20_000)
    assert_state(case, *attend_as_v1(case, 1_024), variant="v1_three_phase")
    with pytest.raises(AssertionError, match="out: max error"):
        assert_state(case, *attend_as_v1(case, 20_001), variant="v1_three_phase")


@pytest.mark.parametrize("context", [1_000, 40_000, 250_000])
def test_attend_densely_loses_no_more_in_long_contexts(context):
    case = long_case(0, context)
    exact, plain = expected(case)[0], expected(case, dtype=np.float32)[0]
    assert np.abs(plain - exact).max() <= out_floor(np.float32, exact, case.ckv_rows[0]) / 2


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=str)
@pytest.mark.parametrize("seed", range(15))
def test_assert_state_rejects_truncated_results(dtype, seed):
    rng = np.random.default_rng(seed)
    case = tree_case(rng, [int(rng.integers(1, 9))], [int(rng.integers(0, 300))], heads=2, dtype=dtype)
    exact, lse = expected(case, dtype=np.float32)
    kept = np.uint32(0xFFFF0000 if dtype == BFLOAT16 else 0xFFFFE000)
    truncated = (exact.view(np.uint32) & kept).view(np.float32).astype(dtype)
    for variant in ("v1_three_phase", "v3_mma"):
        assert_state(case, exact.astype(dtype), lse, variant=variant)
        with pytest.raises(AssertionError, match=r"out: max error .* <= .*, rms .* <= .*, bias -0"):
            assert_state(case, truncated, lse, variant=variant)


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=str)
@pytest.mark.parametrize("seed", range(15))
def test_assert_state_rejects_a_wrong_constant_in_what_tensor_cores_made(dtype, seed):
    """ln 2 as 0.6931475 is off by 4.6e-7 of itself, less than what lse may be off in its worst entry."""
    rng = np.random.default_rng(seed)
    case = tree_case(rng, [int(rng.integers(1, 40))], [int(rng.integers(0, 300))], heads=4, dtype=dtype)
    out, lse = expected(case, dtype=np.float32, variant="v3_mma")
    assert_state(case, out.astype(dtype), lse, variant="v3_mma")
    with pytest.raises(AssertionError, match=r"lse: max error .* <= .*, rms .* > "):
        assert_state(case, out.astype(dtype), lse * np.float32(0.6931475 / np.log(2)), variant="v3_mma")


def test_attend_densely_agrees_with_itself_whatever_takes_the_products():
    case = tree_case(np.random.default_rng(0), [5], [40_000], heads=1, head_dims=(64, 16), dtype=BFLOAT16)
    arguments = case.q_nope[0], case.q_pe[0], case.ckv_rows[0], case.kpe_rows[0], case.allowed[0], case.sm_scale
    states = attend_densely(*arguments, np.float32, variant="v3_mma"), attend_densely(*arguments)
    for found, wanted in zip(*states, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4)
