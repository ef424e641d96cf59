"""merge_states is attention over a union of disjoint key sets; convert_lse brings foreign statistics to ours."""

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import convert_lse, merge_states
from ddtree_cupy.errors import ShapeError
from ddtree_cupy.testing import assert_close, assert_identical, lse_floor, out_floor, unchanged
from tests.tree_attention.cases import DTYPES, attend_densely, seeds

LSE_DTYPES = [(dtype, np.dtype(np.float64 if dtype == np.float64 else np.float32)) for dtype in DTYPES]


def random_state(rng, shape, dtype, lse_dtype, empty=0.3):
    """Return (out, lse) in which some rows are empty and hold NaN, inf or garbage as `out`."""
    out = rng.standard_normal(shape).astype(dtype)
    lse = (5 * rng.standard_normal(shape[:-1])).astype(lse_dtype)
    holes = rng.random(shape[:-1]) < empty
    lse[holes] = -np.inf
    out[holes] = np.array([np.nan, np.inf, 7.0], dtype)[rng.integers(0, 3, holes.sum())][:, None]
    return out, lse


def merged_exactly(out_a, lse_a, out_b, lse_b, dtype=np.float64):
    lse_a, lse_b = lse_a.astype(dtype), lse_b.astype(dtype)
    highest = np.maximum(lse_a, lse_b)
    shift = np.where(highest == -np.inf, 0, highest)
    weight_a, weight_b = np.exp(lse_a - shift), np.exp(lse_b - shift)
    total = weight_a + weight_b
    safe = np.where(total == 0, 1, total)
    part_a = np.where((lse_a == -np.inf)[..., None], 0, out_a.astype(dtype)) * (weight_a / safe)[..., None]
    part_b = np.where((lse_b == -np.inf)[..., None], 0, out_b.astype(dtype)) * (weight_b / safe)[..., None]
    lse = np.where(total == 0, -np.inf, shift + np.log(safe)).astype(dtype)
    return (part_a + part_b).astype(dtype), lse


@given(
    seed=seeds,
    dtypes=st.sampled_from(LSE_DTYPES),
    lead=st.sampled_from([(1, 1), (3, 5), (2, 33), (1, 100), (0, 3), (3, 0), (4, 3, 2)]),
)
def test_merge_states_matches_oracle(backend, seed, dtypes, lead):
    dtype, lse_dtype = LSE_DTYPES[0] if backend.name != "numpy" and dtypes[0] == np.float64 else dtypes
    rng = np.random.default_rng(seed)
    shape = (*lead, 16)
    a, b = random_state(rng, shape, dtype, lse_dtype), random_state(rng, shape, dtype, lse_dtype)
    with unchanged(a=a[0], lse_a=a[1], b=b[0], lse_b=b[1]):
        out, lse = backend(merge_states, *a, *b)
        given_out = np.full_like(out, np.nan), np.full_like(lse, np.nan)
        returned = tuple(backend(merge_states, *a, *b, out=given_out))
    assert_identical(returned, (out, lse))
    if backend.name != "cupy":
        assert_identical(given_out, (out, lse))
    exact_out, exact_lse = merged_exactly(*a, *b)
    plain_out, plain_lse = merged_exactly(*a, *b, dtype=lse_dtype.type)
    values = np.concatenate([x[np.isfinite(x.astype(np.float64))].astype(np.float64) for x in (a[0], b[0])])
    assert_close(out, exact_out, plain_out.astype(dtype), floor=out_floor(dtype, exact_out, values), name="out")
    assert_close(lse, exact_lse, plain_lse, floor=lse_floor(exact_lse), name="lse")


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 0.0, 3.0])
@pytest.mark.parametrize("dtypes", LSE_DTYPES, ids=lambda pair: str(pair[0]))
def test_merge_states_is_identical_to_nothing_when_both_are_empty(garbage, dtypes):
    dtype, lse_dtype = dtypes
    out = np.full((2, 3, 1, 16), garbage, dtype)
    lse = np.full((2, 3, 1), -np.inf, lse_dtype)
    assert_identical(merge_states(out, lse, out, lse), (np.zeros_like(out), lse))


KEPT = {
    np.dtype(np.float32): [-0.0, 0.0, 1e-40, -1e-45, 1.0, -3e38],
    np.dtype(np.float16): [-0.0, 0.0, 6e-8, -6e-8, 1.0, -65504],
    np.dtype(ml_dtypes.bfloat16): [-0.0, 0.0, 1e-39, -1e-40, 1.0, -3e38],
}


@pytest.mark.parametrize("dtype", KEPT, ids=str)
@pytest.mark.parametrize("lse", [-0.0, 0.0, 1e-40, -1e-40, -3.5, 3e38, -3e38])
@pytest.mark.parametrize("gap", [np.inf, 90.0, 104.0], ids=["empty", "weight subnormal", "weight 0"])
@pytest.mark.parametrize("first", [True, False], ids=["a", "b"])
def test_merge_states_copies_the_bits_of_the_only_side_that_counts(backend, dtype, lse, gap, first):
    """Arithmetic turns lse -0.0 into 0.0 and flushes subnormals; NaN in the other side's `out` must not be met."""
    out = np.array([[KEPT[dtype]]], dtype)
    kept = out, np.full((1, 1), lse, np.float32)
    if kept[1] - gap == kept[1]:
        gap = np.inf
    other = np.full_like(out, np.nan), (kept[1] - np.float32(gap)).astype(np.float32)
    found = backend(merge_states, *kept, *other) if first else backend(merge_states, *other, *kept)
    assert_identical(tuple(array.view(np.uint8) for array in found), tuple(array.view(np.uint8) for array in kept))


@pytest.mark.parametrize("shape", [(2, 3, 0, 16), (0, 4, 16), (3, 0), (2, 0, 5, 0)])
def test_merge_states_of_no_heads_is_empty(backend, shape):
    out, lse = np.zeros(shape, np.float32), np.zeros(shape[:-1], np.float32)
    found = backend(merge_states, out, lse, out, lse)
    assert_identical(found[0], out)
    assert (found[1].shape, found[1].dtype) == (lse.shape, lse.dtype)


def test_merge_states_of_one_row_without_axes_gives_a_0d_lse(backend):
    out, lse = np.ones(4, np.float32), np.array(0, np.float32)
    found = backend(merge_states, out, lse, out, np.full_like(lse, -np.inf))
    assert_identical(found, (out, lse))
    assert isinstance(found[1], np.ndarray)


def test_merge_states_rejects_a_0d_state(backend):
    number = np.array(1, np.float32)
    with pytest.raises(ShapeError, match=r"merge_states: `out_a` is \(\), expected \(\.\.\., num_heads, "):
        backend(merge_states, number, number, number, number)


@given(seeds)
def test_merge_states_is_identical_in_either_order(seed):
    rng = np.random.default_rng(seed)
    float32 = np.dtype(np.float32)
    a, b = (random_state(rng, (4, 2, 16), float32, float32) for _ in range(2))
    assert_identical(merge_states(*a, *b), merge_states(*b, *a))


@given(seeds, st.integers(1, 5), st.integers(0, 20))
def test_merge_states_matches_oracle_over_many_parts(seed, num_parts, num_keys):
    """Attention over a key set equals the merge of attention over any partition of it, empty parts included."""
    rng = np.random.default_rng(seed)
    q_nope, q_pe = rng.standard_normal((3, 2, 16)), rng.standard_normal((3, 2, 4))
    ckv, kpe = rng.standard_normal((num_keys, 16)), rng.standard_normal((num_keys, 4))
    owner = rng.integers(0, num_parts, (3, num_keys))
    state = np.full(q_nope.shape, np.nan), np.full((3, 2), -np.inf)
    for part in range(num_parts):
        state = merge_states(*state, *attend_densely(q_nope, q_pe, ckv, kpe, owner == part, 0.3))
    wanted = attend_densely(q_nope, q_pe, ckv, kpe, np.ones((3, num_keys), bool), 0.3)
    np.testing.assert_allclose(state[0], wanted[0], rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(state[1], wanted[1], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("level", [-1e38, -6e4, -100.0, 0.0, 100.0, 6e4, 1e38])
def test_merge_states_matches_oracle_at_extreme_levels(level):
    """exp(lse) itself overflows or vanishes; only the difference counts."""
    one, three = np.full((1, 1, 16), 1, np.float32), np.full((1, 1, 16), 3, np.float32)
    lse = np.full((1, 1), level, np.float32)
    out, merged = merge_states(one, lse, three, lse)
    np.testing.assert_array_equal(out, 2)
    np.testing.assert_allclose(merged, np.float32(level) + np.float32(np.log(2)), rtol=1e-6)
    out, merged = merge_states(one, lse, three, -lse if level else lse - 200)
    np.testing.assert_array_equal(out, np.where(level >= 0, one, three))
    np.testing.assert_array_equal(merged, abs(np.float32(level)))


@pytest.mark.parametrize("into", ["aa", "bb", "ab", "ba"])
@pytest.mark.parametrize("seed", range(3))
def test_merge_states_is_identical_with_out_over_its_own_input(backend, into, seed):
    """Merging into a state in place is how a loop over splits uses it."""
    rng = np.random.default_rng(2)
    float32 = np.dtype(np.float32)
    a, b = (random_state(rng, (2, 40, 2, 100), float32, float32) for _ in range(2))
    wanted = backend(merge_states, *a, *b)
    states = {name: tuple(backend.put(array.copy()) for array in state) for name, state in (("a", a), ("b", b))}
    out = states[into[0]][0], states[into[1]][1]
    replace(backend, seed=seed).run(merge_states, *states["a"], *states["b"], out=out)
    assert_identical(backend.get(out), wanted)


@pytest.mark.parametrize(
    ("base", "empty", "foreign", "nats"),
    [
        (2.0, -np.inf, [0.0, 1.0, -3.0, -np.inf], [0.0, math.log(2), -3 * math.log(2), -np.inf]),
        (2.0, np.inf, [0.0, 1.0, np.inf], [0.0, math.log(2), -np.inf]),
        (math.e, -np.inf, [0.5, -np.inf], [0.5, -np.inf]),
        (math.e, np.inf, [0.5, np.inf, -40.0], [0.5, -np.inf, -40.0]),
        (math.e, -5e4, [0.5, -5e4, -1e30, -4.9e4], [0.5, -np.inf, -np.inf, -4.9e4]),
        (2.0, -5e4, [8.0, -5e4], [8 * math.log(2), -np.inf]),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_convert_lse_matches_oracle(base, empty, foreign, nats, dtype):
    lse = np.array(foreign, dtype)
    with unchanged(lse=lse):
        converted = convert_lse(lse, base=base, empty=empty)
    assert (converted.dtype, converted.shape) == (dtype, lse.shape)
    np.testing.assert_allclose(converted, nats, rtol=2 * np.finfo(dtype).eps)


def test_convert_lse_matches_oracle_for_two_keys_with_scores_1_and_0():
    """Weight 0.7311 on the first key; without log2(e) it would be 2/3."""
    base_2 = np.array([[1.0, 0.0]], np.float32) * np.float32(math.log2(math.e))
    lse = convert_lse(base_2, base=2.0, empty=-np.inf)
    out, _ = merge_states(np.ones((1, 1, 16), np.float32), lse[:, :1], np.zeros((1, 1, 16), np.float32), lse[:, 1:])
    np.testing.assert_allclose(out, 0.73105858, rtol=1e-6)
