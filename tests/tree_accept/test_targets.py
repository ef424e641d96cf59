"""greedy_targets and sample_targets: axes, exact draws, the edges of float32, and rows without a target."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ddtree_cupy import DraftTree, accept, greedy_targets, sample_targets
from ddtree_cupy.errors import ArgumentError, UnsupportedError
from ddtree_cupy.testing import assert_identical
from ddtree_cupy.testing.strategies import seeds
from ddtree_cupy.tree_accept import reference
from tests.oracles import lowest_best_id

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


# ---- the edges of float32, and rows without a target ----

LARGEST = float(np.finfo(np.float32).max)
NORMAL = float(np.finfo(np.float32).smallest_normal)
SMALLEST = 2.0**-149


def draws(backend, row, temperature, dtype=np.float32, temperature_dtype=None):
    """Return the ids that 64 evenly spread uniforms draw."""
    uniforms = (np.arange(64) + 0.5) / 64
    rows = np.array([row] * 64).astype(dtype)
    if temperature_dtype is not None:
        temperature = np.array(temperature, temperature_dtype)
    return backend(sample_targets, rows, uniforms, temperature=temperature).tolist()


def by_definition(row, temperature):
    """Return the ids that the definition draws, float32 subnormals counting as 0, in exact arithmetic of Python."""
    logits = [0.0 if abs(x) < NORMAL else x for x in row]
    weights = [math.exp(max((x - max(logits)) / temperature, -700)) for x in logits]
    edges = np.cumsum(weights) / sum(weights)
    return [int(np.searchsorted(edges, (k + 0.5) / 64, side="right")) for k in range(64)]


SPREADS = {
    "probe": ([3e38, -3e38, -3e38], 1e300),
    "spread beyond float32, weights differ": ([LARGEST, -LARGEST, 0.0, LARGEST], 3e38),
    "the same at a temperature of 2^127": ([LARGEST, -LARGEST, 0.0], 2.0**127),
    "1 / temperature is subnormal": ([0.0, -3e38, 1e38, 3e38], 2e38),
    "1 / temperature vanishes in float32": ([1.0, 2.0, 3.0], 1e100),
    "temperature of 2^101": ([0.0, -(2.0**101), 2.0**100], 2.0**101),
    "temperature of 2^100": ([0.0, -(2.0**100), 2.0**99], 2.0**100),
    "temperature of 2^-100": ([0.0, -(2.0**-100), 2.0**-101], 2.0**-100),
    "temperature of 2^-101": ([0.0, -(2.0**-101), 2.0**-102], 2.0**-101),
    "1 / temperature beyond float32": ([0.0, -NORMAL, 3 * NORMAL], 2.0**-127),
    "the difference is subnormal": ([5 * NORMAL / 4, NORMAL, 7 * NORMAL / 4], NORMAL),
    "subnormal logits": ([0.0, 1e-39, -1e-39, 3e-39], 1e-39),
    "subnormal logits at temperature 1": ([0.0, 1e-39, -1e-39, SMALLEST], 1.0),
    "subnormal beside a normal": ([NORMAL, 1e-39, -NORMAL, 0.0], NORMAL),
    "subnormal largest": ([-NORMAL, -1e-39, 1e-39], NORMAL),
    "subnormal temperature": ([0.0, -NORMAL, -2 * NORMAL], 5e-39),
    "smallest float32 as temperature": ([0.0, -1.0, 0.0, 1e-40], SMALLEST),
    "subnormal float64 as temperature": ([2.0, 1.0, 2.0], 5e-324),
    "largest float64 as temperature": ([LARGEST, -LARGEST, 0.0], 1.7e308),
}


@pytest.mark.parametrize("case", SPREADS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_sample_targets_matches_definition_at_the_edges_of_float32(backend, case, dtype):
    row, temperature = SPREADS[case]
    row = np.array(row, np.float32).clip(-3.3e38, 3.3e38).astype(dtype).astype(np.float64).tolist()
    wanted = by_definition(row, temperature)
    assert draws(backend, row, temperature, dtype) == wanted
    assert draws(backend, row, temperature, dtype, np.float64) == wanted


@pytest.mark.parametrize("temperature", [1e-39, SMALLEST, 3e-38, 1e38])
def test_sample_targets_counts_float32_temperatures_exactly(backend, temperature):
    """A subnormal one is no 0, whatever a GPU flushes."""
    exact = float(np.float32(temperature))
    row = [0.0, float(np.float32(-max(exact, NORMAL))), float(np.float32(-2 * max(exact, NORMAL)))]
    assert draws(backend, row, temperature, temperature_dtype=np.float32) == by_definition(row, exact)


def sample_medians(logits, **options):
    """Draw with u = 0.5 in the array library of the logits."""
    uniforms = logits[..., 0].astype(np.float32)
    uniforms[...] = 0.5
    return sample_targets(logits, uniforms, temperature=1.0, **options)


FUNCTIONS = {"greedy_targets": greedy_targets, "sample_targets": sample_medians}
BAD = {"NaN": [0, np.nan, 1], "all -inf": [-np.inf] * 3, "NaN alone": [np.nan, -np.inf, -np.inf]}
INFINITE = {"+inf": [0, np.inf, 0]}  # bad for sampling alone
BAD_OF_EACH = [(name, case) for name in FUNCTIONS for case in (BAD if name == "greedy_targets" else BAD | INFINITE)]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("case", BAD | INFINITE)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
def test_targets_mark_bad_rows_on_every_backend(backend, function, case, dtype):
    logits = np.array([[0, 5, 0], (BAD | INFINITE)[case], [9, 0, 0]], np.float32).astype(dtype)
    found = backend(FUNCTIONS[function], logits, on_bad_row="mark").tolist()
    assert found == [1, 1 if (function, case) == ("greedy_targets", "+inf") else -1, 0]


@pytest.mark.parametrize(("function", "case"), BAD_OF_EACH)
@pytest.mark.parametrize("rule", ["auto", "raise"])
def test_targets_on_numpy_raise_for_bad_rows(function, case, rule):
    """The message names the place, and its advice works."""
    logits = np.zeros((2, 3, 3), np.float32)
    logits[1, 2] = (BAD | INFINITE)[case]
    with pytest.raises(ArgumentError, match=rf"^{function}: .* request 1 .* node 2; on_bad_row='mark' gives -1 there"):
        FUNCTIONS[function](logits, on_bad_row=rule)
    assert FUNCTIONS[function](logits, on_bad_row="mark")[1, 2] == -1
    assert FUNCTIONS[function](logits, num_nodes=np.array([3, 2], np.int32))[1, 2] == -1  # is not read


@pytest.mark.parametrize("function", FUNCTIONS)
def test_targets_kernels_refuse_to_raise_for_bad_rows(kernels, function):
    logits = np.array([BAD["NaN"]], np.float32)
    assert kernels(FUNCTIONS[function], logits).tolist() == [-1]
    with pytest.raises(UnsupportedError, match=rf"^{function}: `on_bad_row` is 'raise', .*expected 'mark'"):
        kernels(FUNCTIONS[function], logits, on_bad_row="raise")


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("rule", ["ignore", None, -1, True])
def test_targets_reject_another_rule(backend, function, rule):
    with pytest.raises(ArgumentError, match=rf"^{function}: `on_bad_row` is .*expected one of 'auto', 'raise', 'mark'"):
        backend(FUNCTIONS[function], np.zeros((1, 3), np.float32), on_bad_row=rule)


def test_a_marked_row_ends_the_walk_of_accept(backend):
    tree = DraftTree.from_parents([7, 1, 2], [-1, 0, 1])
    logits = np.array([[0, 5, 0], BAD["NaN"], [9, 0, 0]], np.float32)
    targets = backend(greedy_targets, logits, on_bad_row="mark")
    result = backend(accept, tree, targets)
    assert (result.accepted.tolist(), int(result.num_accepted), int(result.bonus_token)) == ([0, 1, -1], 1, -1)


@pytest.mark.parametrize("values", [1, 7, 20, 10**6])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=str)
def test_reference_greedy_targets_is_identical_in_blocks_of_rows(monkeypatch, values, dtype):
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 4, (2, 9, 7)).astype(dtype)
    logits[rng.random(logits.shape) < 0.05] = np.nan
    num_nodes = np.array([9, 4], np.int32)
    wanted = np.full((2, 9), -1, np.int32)
    for b, count in enumerate(num_nodes):
        wanted[b, :count] = [lowest_best_id(row) for row in logits[b, :count]]
    monkeypatch.setattr(reference, "VALUES_AT_ONCE", values)
    assert_identical(reference.greedy_targets(logits, num_nodes=num_nodes), wanted)
