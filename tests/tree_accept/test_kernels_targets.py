"""greedy_targets and sample_targets against their definitions, one row at a time: one body for all backends."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import emulate, greedy_targets, sample_targets
from ddtree_cupy.errors import DTypeError, LayoutError
from ddtree_cupy.testing import GuardedArray, assert_identical, unchanged
from ddtree_cupy.testing.strategies import seeds
from tests.oracles import lowest_best_id

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float32), np.dtype(np.float16), BFLOAT16]
VOCABS = [1, 2, 7, 8, 9, 31, 32, 33, 255, 257, 700, 8200]

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
schedules = st.integers(0, 9)


@st.composite
def rows(draw, *, non_finite=False):
    """Draw logits (B, N, V) at an odd offset of a NaN buffer, and num_nodes; rows from num_nodes on are NaN."""
    dtype = draw(st.sampled_from(DTYPES))
    batch, nodes, vocab = draw(st.integers(0, 3)), draw(st.integers(0, 4)), draw(st.sampled_from(VOCABS))
    random = np.random.default_rng(draw(seeds()))
    start = draw(st.integers(0, 8))
    buffer = np.full((batch, nodes + 1, start + vocab + 3), np.nan, dtype)
    logits = buffer[:, :nodes, start : start + vocab]
    tied = draw(st.booleans())
    values = random.integers(0, 3, logits.shape) * 0.5 if tied else random.standard_normal(logits.shape)
    logits[...] = np.where((values == 0) & (random.random(logits.shape) < 0.5), -0.0, values)
    if draw(st.booleans()):
        logits[random.random(logits.shape) < 0.5] = -np.inf
    if non_finite:
        logits[random.random(logits.shape) < 0.5 / vocab] = draw(st.sampled_from([np.nan, -np.nan, np.inf]))
    num_nodes = random.integers(0, nodes + 1, batch).astype(np.int32)
    for b, count in enumerate(num_nodes):
        logits[b, count:] = np.nan
    return logits, num_nodes


@given(case=rows(non_finite=True), seed=schedules)
def test_greedy_targets_matches_oracle(backend, case, seed):
    logits, num_nodes = case
    wanted = np.full(logits.shape[:2], -1, np.int32)
    for b, count in enumerate(num_nodes):
        wanted[b, :count] = [lowest_best_id(row) for row in logits[b, :count]]
    with unchanged(logits=logits, num_nodes=num_nodes):
        found = replace(backend, seed=seed)(greedy_targets, logits, num_nodes=num_nodes, on_bad_row="mark")
    assert_identical(found, wanted)


TINY = {"float32": 1e-40, "float16": 6e-8, "bfloat16": 1e-39}
ROWS = [  # logits and the greedy target; t stands for a subnormal number
    ([0, -0.0, 3, 3, 3], 2),
    ([-0.0, 0, -1, 0, -0.0], 0),
    (["-t", 0, "t", "t", 0], 2),
    (["-t", "-t", -1, -2, -3], 0),
    ([0, 0, 0, 7, 7, 1], 3),
    ([-np.inf, -np.inf, -5], 2),
    ([np.inf, 3, np.inf], 0),
    ([-np.inf, 3, np.inf, np.inf], 2),
    ([-1], 0),
]


@dtypes
@pytest.mark.parametrize(("row", "token"), ROWS)
def test_greedy_targets_of_known_rows(backend, dtype, row, token):
    values = [{"t": TINY[dtype.name], "-t": -TINY[dtype.name]}.get(value, value) for value in row]
    assert backend(greedy_targets, np.array([values], dtype)).tolist() == [token]


@dtypes
@pytest.mark.parametrize("position", [1, 255, 256, 4095, 163838])
@pytest.mark.parametrize("best", [2, np.inf])
def test_greedy_targets_of_a_tie_in_a_wide_row(backend, dtype, position, best):
    """A block reduction that keeps the later operand returns 163839."""
    logits = np.zeros((1, 163840), dtype)
    logits[0, [position, 163839]] = best
    assert backend(greedy_targets, logits).tolist() == [position]


def assert_drawn(token, row, uniform, temperature, slack):
    """Check that u * total lies in the token's interval of the cumulative weights, give or take `slack` totals."""
    values = row.astype(np.float64)
    if np.isnan(values).any() or (values == np.inf).any() or (values == -np.inf).all():
        assert token == -1
        return
    cumulative = np.cumsum(np.exp((values - values.max()) / temperature))
    below = cumulative[token - 1] if token else 0.0
    threshold, slack = float(uniform) * cumulative[-1], slack * cumulative[-1]
    assert below - slack <= threshold <= cumulative[token] + slack
    assert token >= 0
    assert values[token] > -np.inf


@given(
    case=rows(non_finite=True),
    temperature=st.sampled_from([0.05, 0.7, 1.0, 3.0]),
    per_request=st.booleans(),
    float_type=st.sampled_from([np.float64, np.float32]),
    seed=schedules,
)
def test_sample_targets_matches_oracle(backend, case, temperature, per_request, float_type, seed):
    logits, num_nodes = case
    random = np.random.default_rng(seed)
    uniforms = random.random(logits.shape[:2]).astype(float_type)
    uniforms = np.where(random.random(uniforms.shape) < 0.2, 0, np.minimum(uniforms, 1 - 2.0**-24)).astype(float_type)
    given_temperature = np.full(len(logits), temperature, float_type) if per_request else temperature
    exact = float(float_type(temperature)) if per_request else temperature
    for b, count in enumerate(num_nodes):
        uniforms[b, count:] = np.nan
    with unchanged(logits=logits, uniforms=uniforms, num_nodes=num_nodes):
        options = {"temperature": given_temperature, "num_nodes": num_nodes, "on_bad_row": "mark"}
        found = replace(backend, seed=seed)(sample_targets, logits, uniforms, **options)
    slack = 1e-12 if backend.name == "numpy" else 1e-6
    for b, count in enumerate(num_nodes):
        assert (found[b, count:] == -1).all()
        for node in range(count):
            assert_drawn(int(found[b, node]), logits[b, node], uniforms[b, node], exact, slack)


@dtypes
def test_sample_targets_matches_oracle_at_the_ends(backend, dtype):
    """u = 0 gives the first id with weight, the largest u below 1 the last; zero weight is never drawn."""
    logits = np.full((2, 3000), -np.inf, dtype)
    logits[:, [7, 8, 2500]] = 0.0
    uniforms = np.array([0.0, np.nextafter(1.0, 0.0)])
    assert backend(sample_targets, logits, uniforms, temperature=1.0).tolist() == [7, 2500]
    assert backend(sample_targets, logits, np.zeros(2, np.float32), temperature=1e-300).tolist() == [7, 7]


def test_sample_targets_matches_the_distribution(backend):
    """Evenly spread uniforms give each id exactly as often as its probability says."""
    logits = np.tile(np.log(np.array([0.5, 0.3, 0.2], np.float32)), (1000, 1))
    found = backend(sample_targets, logits, (np.arange(1000) + 0.5) / 1000, temperature=1.0)
    assert np.bincount(found).tolist() == [500, 300, 200]


@pytest.mark.parametrize("function", [greedy_targets, sample_targets])
def test_targets_never_trust_device_values(kernels, function):
    """Counts outside 0..N, draws outside [0, 1) and temperatures that are none end, inside the arrays."""
    logits = np.random.default_rng(0).standard_normal((4, 2, 100)).astype(np.float32)
    counts = np.array([-5, 2**31 - 1, 2, 1], np.int32)
    arrays, more = [logits], {}
    if function is sample_targets:
        arrays.append(np.array([[0.5, 0.5], [np.nan, -1.0], [2.0, np.inf], [0.5, 0.5]]))
        more["temperature"] = np.array([1.0, 0.0, np.nan, -1.0])
    found = kernels(function, *arrays, num_nodes=counts, **more)
    assert (found < 100).all()
    assert found[0].tolist() == [-1, -1]
    assert found[3, 1] == -1


@pytest.mark.emulate
@given(case=rows(), seed=schedules)
def test_emulated_targets_never_write_outside_their_result(case, seed):
    logits, num_nodes = case
    guards = [GuardedArray(logits.shape[:2], np.int32) for _ in range(2)]
    uniforms = np.full(logits.shape[:2], 0.5)
    with emulate.active(seed=seed):
        greedy_targets(logits, num_nodes=num_nodes, out=guards[0].array)
        sample_targets(logits, uniforms, temperature=1.0, num_nodes=num_nodes, out=guards[1].array, checked=False)
        assert_identical(guards[0].array, greedy_targets(logits, num_nodes=num_nodes))
        again = sample_targets(logits, uniforms, temperature=1.0, num_nodes=num_nodes)
    assert_identical(guards[1].array, again)
    assert [guard.num_touched() for guard in guards] == [0, 0]


def test_targets_kernels_reject(kernels):
    logits = np.zeros((2, 3, 8), np.float32)
    with pytest.raises(DTypeError, match=r"`target_logits`.*float64.*astype"):
        kernels(greedy_targets, logits.astype(np.float64))
    with pytest.raises(LayoutError, match="`target_logits`"):
        kernels(greedy_targets, logits[..., ::2])
    with pytest.raises(LayoutError, match="`uniforms`"):
        kernels(sample_targets, logits, np.zeros((2, 6))[:, ::2], temperature=1.0)
