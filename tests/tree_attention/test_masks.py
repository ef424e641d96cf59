"""Who sees whom: probes in which one wrong bit of the visibility changes the answer by a large, exact amount."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddtree_cupy import DraftTree, PagedKV, Visibility, tree_attention
from ddtree_cupy.testing import assert_identical
from tests.tree_attention.cases import (
    DTYPES,
    ancestors_of,
    assert_state,
    build,
    make_case,
    pack,
    random_parents,
    random_visible,
    recipes,
    seeds,
)


def weights_of(backend, tree, context, num_nodes, *, heads=1, dtype=np.float32, keys="all", page_size=7):
    """Return the attention weights [N, T + N] of head 0 for q = 0, read off one-hot values."""
    total = context + num_nodes
    width = 80 if total <= 80 else 112  # two sizes, since each is compiled
    ckv = np.eye(total, width, dtype=np.float64).astype(dtype)
    kpe = np.ones((total, 16), dtype)
    kv = PagedKV.from_dense(ckv, kpe, page_size=page_size, context_lens=context)
    q_nope = np.zeros((num_nodes, heads, width), dtype)
    q_pe = np.zeros((num_nodes, heads, 16), dtype)
    out, lse = backend(tree_attention, tree, q_nope, q_pe, kv, sm_scale=1.0, keys=keys)
    for head in range(1, heads):
        assert_identical(out[:, head], out[:, 0])
    return out[:, 0, :total].astype(np.float64), lse[:, 0]


def mean_weights(allowed):
    """Return 1 / count at every visible key, 0 elsewhere, and log(count)."""
    count = allowed.sum(axis=1)
    with np.errstate(divide="ignore"):
        return np.where(allowed, 1.0 / np.maximum(count, 1)[:, None], 0.0), np.log(count)


def assert_means(backend, tree, visible, context, **options):
    num_nodes = len(visible)
    weights, lse = weights_of(backend, tree, context, num_nodes, **options)
    allowed = np.concatenate([np.ones((num_nodes, context), bool), visible], axis=1)
    if options.get("keys") == "context":
        allowed[:, context:] = False
    if options.get("keys") == "tree":
        allowed[:, :context] = False
    wanted, wanted_lse = mean_weights(allowed)
    np.testing.assert_array_equal(weights != 0, allowed)
    tolerance = 2.0**-7 if options.get("dtype", np.float32).__name__ not in ("float32", "float64") else 1e-6
    np.testing.assert_allclose(weights, wanted, rtol=tolerance)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-6, atol=1e-6)


@given(
    seed=seeds,
    num_nodes=st.integers(1, 40),
    context=st.integers(0, 20),
    keys=st.sampled_from(["all", "context", "tree"]),
)
@example(seed=0, num_nodes=33, context=1, keys="all")
def test_tree_attention_matches_oracle_on_zero_queries_and_any_matrix(backend, seed, num_nodes, context, keys):
    """q = 0 makes every row the plain mean of the values it sees."""
    visible = random_visible(np.random.default_rng(seed), num_nodes)
    assert_means(backend, Visibility.from_dense(visible), visible, context, keys=keys)


@given(seed=seeds, num_nodes=st.integers(1, 40), context=st.integers(0, 20))
def test_tree_attention_matches_oracle_on_zero_queries_and_any_tree(backend, seed, num_nodes, context):
    parents = random_parents(np.random.default_rng(seed), num_nodes)
    tree = DraftTree.from_parents(list(range(num_nodes)), parents)
    assert_means(backend, tree, ancestors_of(parents), context)


@pytest.mark.parametrize("dtype", [dtype.type for dtype in DTYPES[:3]])
def test_tree_attention_matches_oracle_on_zero_queries_in_every_dtype(backend, dtype):
    visible = random_visible(np.random.default_rng(4), 20)
    assert_means(backend, Visibility.from_dense(visible), visible, 5, dtype=dtype)


@pytest.mark.parametrize("num_nodes", [31, 32, 33, 63, 64, 65, 97])
@pytest.mark.parametrize("context", [0, 3])
@pytest.mark.parametrize("shape", ["star", "chain", "comb", "last_parent", "two_branches", "identity", "none", "full"])
def test_tree_attention_matches_oracle_on_zero_queries_and_named_shapes(backend, shape, num_nodes, context):
    node = np.arange(num_nodes)
    parents = {
        "star": np.where(node == 0, -1, 0),
        "chain": node - 1,
        "comb": np.where(node % 2 == 1, node - 1, np.maximum(node - 2, 0)),
        "last_parent": np.where(node <= 5, node - 1, 5),
        "two_branches": np.where(node == num_nodes - 1, 0, node - 1),
    }
    matrices = {
        "identity": np.eye(num_nodes, dtype=bool),
        "none": np.zeros((num_nodes, num_nodes), bool),
        "full": np.ones((num_nodes, num_nodes), bool),
    }
    if shape in matrices:
        visible, tree = matrices[shape], Visibility.from_dense(matrices[shape])
    else:
        parents[shape][0] = -1
        visible = ancestors_of(parents[shape].tolist())
        tree = DraftTree.from_parents(node, parents[shape])
    assert_means(backend, tree, visible, context)


def test_tree_attention_matches_oracle_on_the_toy_tree(backend):
    """Row 3 of T6 (child of the root, between two branches): 1/(context + 2) on context, root and itself."""
    tree = DraftTree.from_parents([7, 10, 20, 11, 21, 20], [-1, 0, 1, 0, 1, 3])
    weights, lse = weights_of(backend, tree, 3, 6)
    np.testing.assert_allclose(weights[3], [0.2, 0.2, 0.2, 0.2, 0, 0, 0.2, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(weights[5], [1 / 6] * 4 + [0, 0, 1 / 6, 0, 1 / 6], rtol=1e-6)
    np.testing.assert_allclose(lse, np.log([4, 5, 6, 5, 6, 6]), rtol=1e-6)
    causal, _ = weights_of(backend, Visibility.from_dense(np.tri(6, dtype=bool)), 3, 6)
    assert (causal[3] != weights[3]).any()


@given(seed=seeds, num_nodes=st.integers(2, 33), data=st.data())
def test_tree_attention_is_identical_except_where_a_bit_flips(backend, seed, num_nodes, data):
    """Causal bits give the chain's result bit for bit; one flipped bit changes its row and no other."""
    rng = np.random.default_rng(seed)
    case = make_case(rng, [np.tri(num_nodes, dtype=bool)], [4], heads=1)
    chain = DraftTree.from_parents([list(range(num_nodes))], [list(range(-1, num_nodes - 1))])
    wanted = backend(tree_attention, *case.arguments, sm_scale=case.sm_scale)
    arguments = case.q_nope, case.q_pe, case.kv
    assert_identical(backend(tree_attention, chain, *arguments, sm_scale=case.sm_scale), wanted)
    row, column = data.draw(st.integers(0, num_nodes - 1)), data.draw(st.integers(0, num_nodes - 1))
    bits = case.tree.visibility_bits.copy()
    bits[0, row, column // 32] ^= np.uint32(1 << column % 32)
    flipped = backend(tree_attention, replace(case.tree, visibility_bits=bits), *arguments, sm_scale=case.sm_scale)
    for actual, old in zip(flipped, wanted, strict=True):
        assert (actual[0, row] != old[0, row]).any()
        assert_identical(np.delete(actual, row, axis=1), np.delete(old, row, axis=1))


@given(recipe=recipes())
def test_tree_attention_never_reads_rows_and_bits_from_num_nodes_on(backend, recipe):
    case = build(recipe)
    results = []
    for fill in (0, 2**32 - 1):
        bits = np.full_like(case.tree.visibility_bits, fill)
        for b, allowed in enumerate(case.allowed):
            count = len(allowed)
            mask = pack(np.ones((count, count), bool), bits.shape[1])
            inside = pack(allowed[:, allowed.shape[1] - count :], bits.shape[1])
            bits[b] = (bits[b] & ~mask) | inside
        tree = replace(case.tree, visibility_bits=bits)
        results.append(backend(tree_attention, tree, case.q_nope, case.q_pe, case.kv, sm_scale=case.sm_scale))
    assert_identical(results[0], results[1])
    for b, allowed in enumerate(case.allowed):
        out, lse = results[0][0][b, len(allowed) :], results[0][1][b, len(allowed) :]
        assert not out.any()
        assert (lse == -np.inf).all()


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("keys", ["all", "tree"])
def test_tree_attention_matches_oracle_on_rows_that_see_nothing(backend, dtype, keys):
    """Every second row is empty and there is no context: out +0, lse -inf, and its neighbours unharmed."""
    visible = np.tri(40, dtype=bool)
    visible[::2] = False
    case = make_case(np.random.default_rng(1), [visible], [0], dtype=dtype)
    out, lse = backend(tree_attention, *case.arguments, sm_scale=case.sm_scale, keys=keys)
    assert_state(case, out, lse, keys)
    assert not out[0, ::2].any()
    assert not np.signbit(out[0, ::2].astype(np.float64)).any()
    assert (lse[0, ::2] == -np.inf).all()


def test_tree_attention_matches_oracle_on_ragged_requests_that_shrink(backend):
    """Batches of 4 then 1 through the same call: nothing of the first stays in the second."""
    rng = np.random.default_rng(3)
    shapes = [random_visible(rng, count) for count in (5, 7, 33, 2)]
    many = make_case(rng, shapes, [9, 11, 0, 64])
    assert_state(many, *backend(tree_attention, *many.arguments, sm_scale=many.sm_scale))
    few = make_case(rng, [random_visible(rng, 6)], [3])
    assert_state(few, *backend(tree_attention, *few.arguments, sm_scale=few.sm_scale))


def test_tree_attention_matches_oracle_on_a_tree_of_33_in_a_buffer_for_64(backend):
    """The row stride is W of the buffer (2 words), the request stride 64 rows, whatever num_nodes says."""
    rng = np.random.default_rng(5)
    case = make_case(rng, [random_visible(rng, 33), random_visible(rng, 40)], [2, 5], capacity=64)
    assert case.tree.visibility_bits.shape == (2, 64, 2)
    assert_state(case, *backend(tree_attention, *case.arguments, sm_scale=case.sm_scale))
