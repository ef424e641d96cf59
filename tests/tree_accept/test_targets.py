"""greedy_targets and sample_targets against their definitions, one row at a time."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ddtree_cupy import greedy_targets, sample_targets
from ddtree_cupy.errors import ArgumentError, DDTreeError, DTypeError, ShapeError
from ddtree_cupy.testing import assert_identical, unchanged
from ddtree_cupy.tree_accept import reference

DTYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.float64)]
LAST_UNIFORM = 1 - 2.0**-53
seeds = st.integers(0, 2**32 - 1)


def lowest_best_id(row):
    """Return the first id whose logit no other exceeds."""
    values = [float(value) for value in row]
    best = 0
    for token, value in enumerate(values):
        if value > values[best]:
            best = token
    return best


def id_by_definition(row, uniform, temperature):
    """Return (id, distance): the first id with cum > u * total and w > 0, and how far u * total is from an edge."""
    logits = [float(value) for value in row]
    highest = max(logits)
    weights = [math.exp((logit - highest) / temperature) for logit in logits]
    total = 0.0
    for weight in weights:
        total += weight
    threshold = float(uniform) * total
    chosen, cumulative, distance = None, 0.0, math.inf
    for token, weight in enumerate(weights):
        cumulative += weight
        distance = min(distance, abs(cumulative - threshold) / total)
        if chosen is None and cumulative > threshold and weight > 0:
            chosen = token
    return chosen, distance


def tied_logits(rng, shape, dtype):
    """Return logits on a coarse grid, with -inf entries, so that ties are the normal case."""
    logits = rng.integers(-3, 4, shape).astype(np.float64) / 2
    logits[rng.random(shape) < 0.2] = -np.inf
    logits[..., 0] = np.where(np.isinf(logits).all(axis=-1), 0.0, logits[..., 0])
    return logits.astype(dtype)


@given(
    seeds,
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
    st.sampled_from([1, 2, 31, 33, 100]),
    st.sampled_from(DTYPES),
    st.booleans(),
)
def test_greedy_targets_matches_oracle(seed, counts, vocab, dtype, with_infinity):
    rng = np.random.default_rng(seed)
    capacity = max(1, *counts) + int(rng.integers(0, 2))
    logits = tied_logits(rng, (len(counts), capacity, vocab), dtype)
    if with_infinity:
        logits[rng.random(logits.shape) < 0.1] = np.inf
    wanted = np.full((len(counts), capacity), -1, np.int32)
    for b, count in enumerate(counts):
        logits[b, count:] = np.nan
        wanted[b, :count] = [lowest_best_id(row) for row in logits[b, :count]]
    num_nodes = np.array(counts, np.int32)
    with unchanged(logits=logits, num_nodes=num_nodes):
        found = greedy_targets(logits, num_nodes=num_nodes)
    assert_identical(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("row", "token"),
    [
        ([0, 0, 0, 7, 7, 1], 3),
        ([0.0, -0.0, 0.0], 0),
        ([-0.0, 0.0], 0),
        ([-np.inf, -np.inf, -5], 2),
        ([np.inf, 3, np.inf], 0),
        ([-np.inf, 3, np.inf, np.inf], 2),
        ([-1], 0),
    ],
)
def test_greedy_targets_matches_oracle_on_ties(row, token, dtype):
    assert greedy_targets(np.array([row], dtype)).tolist() == [token]


@pytest.mark.parametrize("position", [1, 255, 256, 4095, 163838])
def test_greedy_targets_matches_oracle_on_ties_in_a_wide_row(position):
    """A block reduction that keeps the later operand returns 163839."""
    logits = np.zeros((1, 163840), np.float32)
    logits[0, [position, 163839]] = 2
    assert greedy_targets(logits).tolist() == [position]


@pytest.mark.parametrize("row", [[0, np.nan, 1], [np.nan] * 3, [-np.inf] * 3, [np.nan, np.inf, 0]])
def test_greedy_targets_rejects_rows_without_a_maximum(row):
    logits = np.zeros((2, 2, 3), np.float32)
    logits[1, 1] = row
    with pytest.raises(ArgumentError, match=r"^greedy_targets: `target_logits`"):
        greedy_targets(logits)
    assert greedy_targets(logits, num_nodes=np.array([2, 1], np.int32)).tolist() == [[0, 0], [0, -1]]


@pytest.mark.parametrize("row", [[0, np.nan, 1], [np.nan] * 3, [-np.inf] * 3])
def test_reference_greedy_targets_matches_the_kernel_rule_on_bad_rows(row):
    """What CUDA gives where NumPy's public call raises: -1."""
    logits = np.zeros((1, 2, 3), np.float32)
    logits[0, 1] = row
    assert reference.greedy_targets(logits, num_nodes=np.array([2], np.int32)).tolist() == [[0, -1]]


def test_greedy_targets_is_identical_without_the_batch_axis_and_with_an_int():
    logits = tied_logits(np.random.default_rng(0), (1, 6, 9), np.float32)
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
        assert_identical(call(out=out), wanted)
        assert_identical(out, wanted)
        with pytest.raises(DTypeError, match="`out`"):
            call(out=np.zeros((2, 3), np.int64))
        with pytest.raises(ShapeError, match="`out`"):
            call(out=np.zeros((2, 4), np.int32))


def test_targets_is_identical_for_strided_logits():
    rng = np.random.default_rng(2)
    wide = rng.standard_normal((4, 3, 40)).astype(np.float32)
    view = wide[::2, :, 5:35:3]
    uniforms = rng.random((2, 3))
    assert_identical(greedy_targets(view), greedy_targets(view.copy()))
    results = [sample_targets(each, uniforms, temperature=1.0) for each in (view, view.copy())]
    assert_identical(*results)


@given(
    seeds,
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
    st.sampled_from([1, 2, 31, 100]),
    st.sampled_from(DTYPES),
    st.sampled_from([np.float32, np.float64]),
    st.sampled_from([0.05, 0.5, 1.0, 3.0]),
)
def test_sample_targets_matches_oracle(seed, counts, vocab, dtype, uniform_dtype, temperature):
    rng = np.random.default_rng(seed)
    capacity = max(1, *counts) + int(rng.integers(0, 2))
    make = tied_logits if seed % 2 else (lambda rng, shape, dtype: (3 * rng.standard_normal(shape)).astype(dtype))
    logits = make(rng, (len(counts), capacity, vocab), dtype)
    uniforms = np.minimum(rng.random((len(counts), capacity)).astype(uniform_dtype), uniform_dtype(1 - 2.0**-24))
    wanted = np.full((len(counts), capacity), -1, np.int32)
    for b, count in enumerate(counts):
        logits[b, count:] = np.nan
        uniforms[b, count:] = np.nan
        for node in range(count):
            wanted[b, node], distance = id_by_definition(logits[b, node], uniforms[b, node], temperature)
            assume(distance > 1e-12)
    num_nodes = np.array(counts, np.int32)
    with unchanged(logits=logits, uniforms=uniforms, num_nodes=num_nodes):
        found = sample_targets(logits, uniforms, temperature=temperature, num_nodes=num_nodes)
    assert_identical(found, wanted)


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


@given(seeds)
def test_sample_targets_is_invariant_under_a_shift_of_the_logits(seed):
    """Only logit - max counts; integers keep the difference exact at any level."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(-8, 9, (4, 20)).astype(np.float64)
    uniforms = rng.random(4)
    wanted = sample_targets(logits, uniforms, temperature=0.9)
    for shift in (-1e6, 1e3, 2.0**40):
        assert_identical(sample_targets(logits + shift, uniforms, temperature=0.9), wanted)


@given(seeds)
def test_sample_targets_is_identical_per_request_under_a_temperature_array(seed):
    rng = np.random.default_rng(seed)
    logits, uniforms = rng.standard_normal((3, 4, 11)), rng.random((3, 4))
    temperatures = np.array([0.1, 1.0, 7.0])
    found = sample_targets(logits, uniforms, temperature=temperatures)
    for b, temperature in enumerate(temperatures.tolist()):
        assert_identical(found[b], sample_targets(logits[b], uniforms[b], temperature=temperature))
    alone = sample_targets(logits[0], uniforms[0], temperature=np.array(0.1))
    assert_identical(alone, found[0])


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-6])
def test_sample_targets_matches_greedy_at_tiny_temperatures(temperature):
    """(logit - max) / temperature overflows to -inf: weight 0, no warning."""
    rng = np.random.default_rng(3)
    logits = (1e10 * rng.standard_normal((50, 30))).astype(np.float64)
    found = sample_targets(logits, rng.random(50), temperature=temperature)
    assert_identical(found, greedy_targets(logits))


@pytest.mark.parametrize("temperature", [1e300, 1e6])
def test_sample_targets_matches_a_uniform_draw_at_huge_temperatures(temperature):
    logits = np.arange(8.0)[None]
    found = [sample_targets(logits, np.array([(k + 0.5) / 8]), temperature=temperature).item() for k in range(8)]
    assert found == list(range(8))


def test_sample_targets_matches_oracle_on_the_widest_logits():
    """float64 keeps the difference of the two largest float32 numbers finite."""
    top = np.finfo(np.float32).max
    assert sample_targets(np.array([[-top, top]]), np.array([0.0]), temperature=1.0).tolist() == [1]


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_sample_targets_is_identical_for_a_dtype_and_its_upcast(dtype):
    """No arithmetic may run in the input dtype."""
    rng = np.random.default_rng(4)
    logits, uniforms = (3 * rng.standard_normal((64, 500))).astype(dtype), rng.random(64)
    results = [sample_targets(each, uniforms, temperature=0.8) for each in (logits, logits.astype(np.float64))]
    assert_identical(*results)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_sample_targets_matches_the_distribution(temperature):
    """Chi-square over 1e5 draws from p = (.5, .3, .2); a "sampler" that returns argmax fails by far."""
    draws = 100_000
    weights = np.array([0.5, 0.3, 0.2]) ** (1 / temperature)
    expected = draws * weights / weights.sum()
    logits = np.broadcast_to(np.log(np.array([0.5, 0.3, 0.2])), (draws, 3))
    uniforms = np.random.default_rng(5).random(draws)
    counts = np.bincount(sample_targets(logits, uniforms, temperature=temperature), minlength=3)
    assert ((counts - expected) ** 2 / expected).sum() < 13.8  # 0.1 % point of chi-square with 2 degrees of freedom


def test_sample_targets_matches_the_distribution_by_enumeration():
    """Weights 5 : 3 : 2 and the ten uniforms (k + 1/2) / 10 give each id exactly that often."""
    logits = np.broadcast_to(np.log(np.array([5.0, 3.0, 2.0])), (10, 3))
    found = sample_targets(logits, (np.arange(10) + 0.5) / 10, temperature=1.0)
    assert found.tolist() == [0] * 5 + [1] * 3 + [2] * 2


BAD_ROWS = {
    "NaN": [0, np.nan, 1],
    "+inf": [0, np.inf, 1],
    "all -inf": [-np.inf] * 3,
    "NaN and -inf": [np.nan, -np.inf, -np.inf],
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_sample_targets_rejects_bad_rows(case):
    logits = np.zeros((2, 2, 3), np.float32)
    logits[1, 1] = BAD_ROWS[case]
    uniforms = np.full((2, 2), 0.5)
    with pytest.raises(ArgumentError, match=r"^sample_targets: `target_logits`"):
        sample_targets(logits, uniforms, temperature=1.0)
    found = sample_targets(logits, uniforms, temperature=1.0, num_nodes=np.array([2, 1], np.int32))
    assert found.tolist() == [[1, 1], [1, -1]]


@pytest.mark.parametrize("case", BAD_ROWS)
def test_reference_sample_targets_matches_the_kernel_rule_on_bad_rows(case):
    logits = np.array([[[0, 1, 0], BAD_ROWS[case]]], np.float32)
    found = reference.sample_targets(
        logits, np.zeros((1, 2)), temperature=np.ones(1), num_nodes=np.array([2], np.int32)
    )
    assert found.tolist() == [[0, -1]]


def targets_arguments():
    return {
        "target_logits": np.zeros((2, 3, 5), np.float32),
        "uniforms": np.full((2, 3), 0.5),
        "temperature": 1.0,
        "num_nodes": np.array([3, 2], np.int32),
    }


SHARED = {
    "flat logits": ({"target_logits": np.zeros(5, np.float32)}, ShapeError, "target_logits"),
    "integer logits": ({"target_logits": np.zeros((2, 3, 5), np.int32)}, DTypeError, "target_logits"),
    "a list": ({"target_logits": [[[0.0]]]}, DTypeError, "target_logits"),
    "num_nodes of another batch": ({"num_nodes": np.array([3], np.int32)}, ShapeError, "num_nodes"),
    "int64 num_nodes": ({"num_nodes": np.array([3, 2])}, DTypeError, "num_nodes"),
    "num_nodes above N": ({"num_nodes": np.array([3, 4], np.int32)}, DDTreeError, "num_nodes"),
    "negative num_nodes": ({"num_nodes": np.array([3, -1], np.int32)}, DDTreeError, "num_nodes"),
    "num_nodes int above N": ({"num_nodes": 4}, ArgumentError, "num_nodes"),
    "float num_nodes": ({"num_nodes": 2.0}, DTypeError, "num_nodes"),
}
SAMPLING = {
    "uniforms of other nodes": ({"uniforms": np.zeros((2, 4))}, ShapeError, "uniforms"),
    "uniforms without batch": ({"uniforms": np.zeros(3)}, ShapeError, "uniforms"),
    "float16 uniforms": ({"uniforms": np.zeros((2, 3), np.float16)}, DTypeError, "uniforms"),
    "integer uniforms": ({"uniforms": np.zeros((2, 3), np.int64)}, DTypeError, "uniforms"),
    "one number for all": ({"uniforms": 0.5}, DTypeError, "uniforms"),
    "u = 1": ({"uniforms": np.ones((2, 3))}, ArgumentError, "uniforms"),
    "u < 0": ({"uniforms": np.full((2, 3), -0.1)}, ArgumentError, "uniforms"),
    "u NaN": ({"uniforms": np.full((2, 3), np.nan)}, ArgumentError, "uniforms"),
    "temperature 0": ({"temperature": 0.0}, ArgumentError, "temperature"),
    "temperature negative": ({"temperature": -1.0}, ArgumentError, "temperature"),
    "temperature NaN": ({"temperature": np.nan}, ArgumentError, "temperature"),
    "temperature inf": ({"temperature": np.inf}, ArgumentError, "temperature"),
    "temperature None": ({"temperature": None}, DTypeError, "temperature"),
    "temperature string": ({"temperature": "1"}, DTypeError, "temperature"),
    "temperature array with 0": ({"temperature": np.array([1.0, 0.0])}, ArgumentError, "temperature"),
    "temperature array with NaN": ({"temperature": np.array([1.0, np.nan])}, ArgumentError, "temperature"),
    "temperature of another batch": ({"temperature": np.ones(3)}, ShapeError, "temperature"),
    "temperature per node": ({"temperature": np.ones((2, 3))}, ShapeError, "temperature"),
    "integer temperature array": ({"temperature": np.ones(2, np.int32)}, DTypeError, "temperature"),
}


@pytest.mark.parametrize("case", SHARED)
def test_greedy_targets_rejects(case):
    changes, error, name = SHARED[case]
    given = targets_arguments() | changes
    with pytest.raises(error, match=f"^greedy_targets: .*`{name}`"):
        greedy_targets(given["target_logits"], num_nodes=given["num_nodes"])


@pytest.mark.parametrize("case", SHARED | SAMPLING)
def test_sample_targets_rejects(case):
    changes, error, name = (SHARED | SAMPLING)[case]
    given = targets_arguments() | changes
    with pytest.raises(error, match=f"^sample_targets: .*`{name}`"):
        sample_targets(
            given["target_logits"],
            given["uniforms"],
            temperature=given["temperature"],
            num_nodes=given["num_nodes"],
        )


def test_sample_targets_rejects_a_missing_temperature():
    with pytest.raises(TypeError, match="temperature"):
        sample_targets(np.zeros((1, 2)), np.zeros(1))
