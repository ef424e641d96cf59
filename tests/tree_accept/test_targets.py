"""The reference of greedy_targets and sample_targets: what it does with axes, strides and `out`, and exact draws."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ddtree_cupy import greedy_targets, sample_targets
from ddtree_cupy.testing import assert_identical
from ddtree_cupy.testing.strategies import seeds

LAST_UNIFORM = 1 - 2.0**-53


def test_greedy_targets_is_identical_without_the_batch_axis_and_with_an_int():
    logits = np.random.default_rng(0).standard_normal((1, 6, 9)).astype(np.float32)
    wanted = greedy_targets(logits, num_nodes=np.array([4], np.int32))
    assert_identical(greedy_targets(logits[0], num_nodes=np.array(4, np.int32)), wanted[0])
    assert_identical(greedy_targets(logits[0], num_nodes=4), wanted[0])
    assert_identical(greedy_targets(logits, num_nodes=4), wanted)
    assert_identical(greedy_targets(logits), greedy_targets(logits, num_nodes=6))


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5)])
def test_targets_matches_oracle_on_empty_batches(shape):
    logits = np.zeros(shape, np.float32)
    assert_identical(greedy_targets(logits), np.zeros(shape[:2], np.int32))
    assert_identical(sample_targets(logits, np.zeros(shape[:2]), temperature=1.0), np.zeros(shape[:2], np.int32))


def test_targets_is_identical_with_out():
    rng = np.random.default_rng(1)
    logits, uniforms = rng.standard_normal((2, 3, 7)), rng.random((2, 3))
    for call in (
        lambda **options: greedy_targets(logits, **options),
        lambda **options: sample_targets(logits, uniforms, temperature=0.7, **options),
    ):
        wanted, out = call(), np.full((2, 3), 99, np.int32)
        assert call(out=out) is out
        assert_identical(out, wanted)


def test_targets_is_identical_for_strided_logits():
    rng = np.random.default_rng(2)
    wide = rng.standard_normal((4, 3, 40)).astype(np.float32)
    view = wide[::2, :, 5:35:3]
    uniforms = rng.random((2, 3))
    assert_identical(greedy_targets(view), greedy_targets(view.copy()))
    results = [sample_targets(each, uniforms, temperature=1.0) for each in (view, view.copy())]
    assert_identical(*results)


@given(st.integers(1, 64), st.data())
@example(4, None)
def test_sample_targets_matches_oracle_exactly_on_edges(vocab, data):
    """Equal logits make every weight 1, so u = k / 2^m hits an edge exactly; the edge belongs to the next id."""
    token = 1 if data is None else data.draw(st.integers(0, vocab - 1))
    uniform = token / vocab
    assume(uniform * vocab == token)
    logits = np.full((1, vocab), 2.5, np.float32)
    assert sample_targets(logits, np.array([uniform]), temperature=0.7).tolist() == [token]
    below = np.nextafter(uniform, -1)
    if token and below * vocab < token:
        assert sample_targets(logits, np.array([below]), temperature=0.7).tolist() == [token - 1]


@pytest.mark.parametrize(
    ("row", "uniform", "token"),
    [
        ([0, 0, 0, 0], 0.0, 0),
        ([0, 0, 0, 0], 0.25, 1),
        ([0, 0, 0, 0], np.nextafter(0.25, 0), 0),
        ([0, 0, 0, 0], LAST_UNIFORM, 3),
        ([-np.inf, -np.inf, 0, 0], 0.0, 2),
        ([-np.inf, 0, -np.inf, 0, -np.inf], 0.5, 3),
        ([-np.inf, 0, -np.inf, 0, -np.inf], LAST_UNIFORM, 3),
        ([0, -np.inf], LAST_UNIFORM, 0),
        ([5.0], 0.0, 0),
        ([5.0], LAST_UNIFORM, 0),
        ([-1e4, 0, -1e4], 0.0, 1),
        ([-1e4, 0, -1e4], LAST_UNIFORM, 1),
    ],
)
def test_sample_targets_matches_oracle_at_edge_uniforms(row, uniform, token):
    """u = 0 skips ids of weight 0 at the front; u just below 1 finds the last id that still moves the sum."""
    assert sample_targets(np.array([row], np.float64), np.array([uniform]), temperature=1.0).tolist() == [token]


@pytest.mark.parametrize("vocab", [3, 1000, 163840])
@pytest.mark.parametrize("seed", range(4))
def test_sample_targets_matches_oracle_at_the_last_uniform(vocab, seed):
    """Both sums in id order: a pairwise total above the running one would leave u near 1 without an id."""
    row = 4 * np.random.default_rng([vocab, seed]).standard_normal(vocab)
    weights = np.exp(row - row.max())
    cumulative = np.cumsum(weights)
    wanted = int(np.argmax(cumulative > LAST_UNIFORM * cumulative[-1]))
    assert weights[wanted] > 0
    assert sample_targets(row[None], np.array([LAST_UNIFORM]), temperature=1.0).tolist() == [wanted]
    single = np.float32(1 - 2.0**-24)
    wanted = int(np.argmax(cumulative > np.float64(single) * cumulative[-1]))
    assert sample_targets(row[None], np.array([single]), temperature=1.0).tolist() == [wanted]


@pytest.mark.parametrize("tail_share", [0.1, 0.5, 0.9])
def test_sample_targets_matches_oracle_with_the_total_summed_in_id_order(tail_share):
    """A pairwise or compensated total differs from the running one by more than the tail's single weights."""
    row = np.array([0.0] + [-0.1] * 100_000 + [-23.0] * 60_000)
    weights = np.exp(row)
    total, tail = math.fsum(weights), 60_000 * math.exp(-23)
    cumulative = list(itertools.accumulate(weights.tolist()))
    uniform = 1 - tail_share * tail / total
    wanted = next(token for token, value in enumerate(cumulative) if value > uniform * cumulative[-1])
    paired = next(token for token, value in enumerate(cumulative) if value > uniform * total)
    assert wanted != paired
    assert sample_targets(row[None], np.array([uniform]), temperature=1.0).tolist() == [wanted]


@given(seeds())
def test_sample_targets_is_invariant_under_a_shift_of_the_logits(seed):
    """Only logit - max counts; integers keep the difference exact at any level."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(-8, 9, (4, 20)).astype(np.float64)
    uniforms = rng.random(4)
    wanted = sample_targets(logits, uniforms, temperature=0.9)
    for shift in (-1e6, 1e3, 2.0**40):
        assert_identical(sample_targets(logits + shift, uniforms, temperature=0.9), wanted)


@given(seeds())
def test_sample_targets_is_identical_per_request_under_a_temperature_array(seed):
    rng = np.random.default_rng(seed)
    logits, uniforms = rng.standard_normal((3, 4, 11)), rng.random((3, 4))
    temperatures = np.array([0.1, 1.0, 7.0])
    found = sample_targets(logits, uniforms, temperature=temperatures)
    for b, temperature in enumerate(temperatures.tolist()):
        assert_identical(found[b], sample_targets(logits[b], uniforms[b], temperature=temperature))
    alone = sample_targets(logits[0], uniforms[0], temperature=np.array(0.1))
    assert_identical(alone, found[0])
