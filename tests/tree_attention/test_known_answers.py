"""Faults other systems of this field had in masked, paged attention, each as a small input with its right answer."""

from dataclasses import replace

import numpy as np
import pytest

from ddtree_cupy import DraftTree, PagedKV, Visibility, merge_states, tree_attention
from ddtree_cupy.testing import assert_identical
from tests.oracles import paged_attention
from tests.tree_attention.cases import assert_state, build, make_case, matrix_case, tree_case

WIDTH, ROPE = 16, 16


def scored(scores, *, page_size=4, context=None, dtype=np.float32):
    """Return (q_nope, q_pe, kv): one query whose score with key j is scores[j] at sm_scale 1; value j is one-hot j."""
    total = len(scores)
    ckv, kpe = np.zeros((total, WIDTH), dtype), np.zeros((total, ROPE), dtype)
    ckv[np.arange(total), np.arange(total) % WIDTH] = 1
    kpe[:, 0] = scores
    kv = PagedKV.from_dense(ckv, kpe, page_size=page_size, context_lens=total - 1 if context is None else context)
    q_nope, q_pe = np.zeros((1, 1, WIDTH), dtype), np.zeros((1, 1, ROPE), dtype)
    q_pe[..., 0] = 1
    return q_nope, q_pe, kv


ROOT = DraftTree.from_parents([3], [-1])


@pytest.mark.parametrize("level", [-2e38, -1e38, -6e4, -5e4, 0, 5e4, 6e4, 1e38, 2e38])
@pytest.mark.parametrize("num_keys", [1, 2, 5])
def test_tree_attention_matches_oracle_at_extreme_scores(backend, level, num_keys):
    """A finite mask sentinel (-5e4 in public kernels) would swallow these rows; the answer is the mean."""
    out, lse = backend(tree_attention, ROOT, *scored([level] * num_keys), sm_scale=1.0)
    np.testing.assert_allclose(out[0, 0, :num_keys], 1 / num_keys, rtol=1e-6)
    np.testing.assert_allclose(lse, np.float32(level) + np.log(np.float32(num_keys)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("level", [6e4, 1e38, 2e38])
def test_tree_attention_matches_oracle_at_scores_of_both_signs(backend, level):
    """The difference itself overflows at 2e38: weight 0, and no warning."""
    out, lse = backend(tree_attention, ROOT, *scored([-level, level, -level]), sm_scale=1.0)
    np.testing.assert_array_equal(out[0, 0, :3], [0, 1, 0])
    np.testing.assert_array_equal(lse, np.float32(level))


def test_tree_attention_matches_oracle_when_a_hidden_key_has_the_highest_score(backend):
    """The maximum runs over visible keys only; else every visible weight would vanish."""
    q_nope, q_pe, kv = scored([0, 1, 6e4], context=1)
    tree = DraftTree.from_parents([1, 2], [-1, 0])
    queries = np.repeat(q_nope, 2, axis=0), np.repeat(q_pe, 2, axis=0)
    out, lse = backend(tree_attention, tree, *queries, kv, sm_scale=1.0)
    np.testing.assert_allclose(out[0, 0, :3], [0.26894142, 0.73105858, 0], rtol=1e-6)
    np.testing.assert_allclose(out[1, 0, :3], [0, 0, 1], rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0], np.log1p(np.e), rtol=1e-6)


@pytest.mark.parametrize("scale", [192**-0.5, 576**-0.5, 0.135, 1.0, 0.5, 0.1])
def test_tree_attention_matches_oracle_with_the_scale_applied_once(backend, scale):
    """Scores of 1 and 0 at a scale of 0.1: 0.7311; without log2(e) beside exp2 it would be 0.6667."""
    out, lse = backend(tree_attention, ROOT, *scored([0, 10]), sm_scale=scale)
    np.testing.assert_allclose(out[0, 0, 1], 1 / (1 + np.exp(-10 * scale)), rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(1 + np.exp(10 * scale)), rtol=1e-6)


@pytest.mark.parametrize("scale", [0.135, 1.0, 192**-0.5])
def test_tree_attention_is_invariant_under_splitting_at_any_scale(backend, scale):
    """The exported lse carries the same scale as the softmax, so chunks merge to the whole."""
    case = tree_case(np.random.default_rng(0), [6], [19], sm_scale=scale)
    parts = [backend(tree_attention, *case.arguments, sm_scale=scale, keys=keys) for keys in ("context", "tree")]
    assert_state(case, *backend(merge_states, *parts[0], *parts[1]))


@pytest.mark.parametrize("first_visible", [63, 64, 1023, 1024, 1030])
def test_tree_attention_matches_oracle_when_the_first_tiles_are_hidden(backend, first_visible):
    """An online update that starts with a fully masked tile must not form -inf - -inf."""
    size = 1040
    visible = np.zeros((size, size), bool)
    visible[0, first_visible] = visible[1, first_visible:] = visible[2, :3] = True
    case = make_case(np.random.default_rng(2), [visible], [0], heads=1, head_dims=(16, 16))
    assert_state(case, *backend(tree_attention, *case.arguments, sm_scale=case.sm_scale))


def test_tree_attention_is_invariant_under_an_empty_context_chunk(backend):
    case = tree_case(np.random.default_rng(3), [5], [0])
    whole = backend(tree_attention, *case.arguments, sm_scale=case.sm_scale)
    empty = backend(tree_attention, *case.arguments, sm_scale=case.sm_scale, keys="context")
    assert (empty[1] == -np.inf).all()
    tree = backend(tree_attention, *case.arguments, sm_scale=case.sm_scale, keys="tree")
    assert_identical(backend(merge_states, *empty, *tree), whole)


@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan])
def test_tree_attention_never_reads_infinite_rows(backend, poison):
    """Unlike NaN, inf turns a masked product into a floating-point warning as well."""
    recipe = {"seed": 6, "counts": [7, 0, 33], "contexts": [5, 3, 64], "capacity": 40, "page_size": 7, "heads": 2}
    recipe["is_tree"] = False
    spoilt, case = build(recipe), build(recipe)
    spare = np.isnan(spoilt.kv.ckv)
    spoilt.kv.ckv[spare] = poison
    spoilt.kv.kpe[np.isnan(spoilt.kv.kpe)] = poison
    for b, allowed in enumerate(spoilt.allowed):
        for position in np.flatnonzero(~allowed.any(axis=0)) if len(allowed) else ():
            page = spoilt.kv.page_table[b, position // 7]
            spoilt.kv.ckv[page, position % 7] = spoilt.kv.kpe[page, position % 7] = poison
    results = [backend(tree_attention, *each.arguments, sm_scale=case.sm_scale) for each in (spoilt, case)]
    assert_identical(*results)


@pytest.mark.parametrize("keys", ["all", "context"])
@pytest.mark.parametrize("next_entry", [None, 2**30, -1, -(2**31), 2**31 - 1])
def test_tree_attention_never_reads_the_page_table_past_the_last_key(backend, keys, next_entry):
    """A table that ends with the last key, where the context ends with keys="context", or goes on with garbage."""
    case = tree_case(np.random.default_rng(7), [4], [12], page_size=4)  # 16 keys fill 4 pages exactly
    used = 4 if keys == "all" else 3
    table = case.kv.page_table.copy()
    table[:, used:] = 0 if next_entry is None else next_entry
    table = table[:, :used].copy() if next_entry is None else table
    results = [
        backend(tree_attention, case.tree, case.q_nope, case.q_pe, kv, sm_scale=case.sm_scale, keys=keys)
        for kv in (replace(case.kv, page_table=table), case.kv)
    ]
    assert_identical(*results)


@pytest.mark.parametrize("context", [1, 13, 63, 65, 100, 129])
def test_tree_attention_matches_oracle_on_zero_queries_past_a_tile_edge(backend, context):
    """q = 0 and a length that is no multiple of the tile: the plain mean of the valid values, NaN behind them."""
    case = make_case(np.random.default_rng(10), [np.zeros((2, 2), bool)], [context], page_size=64)
    zeros = np.zeros_like(case.q_nope), np.zeros_like(case.q_pe)
    out, _ = backend(tree_attention, case.tree, *zeros, case.kv, sm_scale=1.0)
    mean = case.ckv_rows[0][:context].mean(axis=0)
    np.testing.assert_allclose(out[0], np.broadcast_to(mean, (2, 2, 32)), rtol=1e-5, atol=1e-6)


def test_tree_attention_matches_oracle_on_two_queries_over_five_keys(backend):
    """Alignment is bottom-right: query i sees keys 0 .. 3 + i."""
    kv = PagedKV.from_dense(
        np.eye(5, WIDTH, dtype=np.float32), np.zeros((5, ROPE), np.float32), page_size=4, context_lens=3
    )
    zeros = np.zeros((2, 1, WIDTH), np.float32)
    out, _ = backend(tree_attention, DraftTree.from_parents([1, 2], [-1, 0]), zeros, zeros, kv, sm_scale=1.0)
    np.testing.assert_allclose(out[:, 0, :5], [[0.25] * 4 + [0], [0.2] * 5], rtol=1e-6)


def test_tree_attention_matches_oracle_with_shared_prefix_pages(backend):
    """Two requests whose full context pages are the same pages; their tree pages are their own."""
    rng = np.random.default_rng(16)
    pool = rng.standard_normal((6, 4, WIDTH + ROPE)).astype(np.float32)
    table = np.array([[4, 1, 0, 3], [4, 1, 5, 2]], np.int32)
    kv = PagedKV(pool[..., :WIDTH], pool[..., WIDTH:], table, np.array([8, 9], np.int32)).validate()
    tree = Visibility.from_dense(rng.random((2, 5, 5)) < 0.5)
    q_nope, q_pe = rng.standard_normal((2, 2, 5, 3, WIDTH)).astype(np.float32)
    out, lse = backend(tree_attention, tree, q_nope, q_pe, kv, sm_scale=0.3)
    wanted_out, wanted_lse = paged_attention(tree, q_nope, q_pe, kv, 0.3)
    np.testing.assert_allclose(out, wanted_out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("keys", ["all", "context", "tree"])
@pytest.mark.parametrize("seed", range(5))
def test_tree_attention_matches_oracle_one_key_at_a_time(seed, keys):
    """The slow oracle walks pages and bits of the arrays the call gets; it also judges this folder's own oracle."""
    rng = np.random.default_rng(seed)
    make = tree_case if seed % 2 else matrix_case
    case = make(rng, [4, 0, 9], [5, 2, 0], page_size=3, dtype=np.float64, capacity=10)
    kv = replace(case.kv, context_lens=np.where(case.tree.num_nodes == 0, 0, case.kv.context_lens).astype(np.int32))
    exact_out, exact_lse = paged_attention(case.tree, case.q_nope, case.q_pe, kv, case.sm_scale, keys)
    out, lse = tree_attention(*case.arguments, sm_scale=case.sm_scale, keys=keys)
    np.testing.assert_allclose(out, exact_out, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-11, atol=1e-13)
    assert_state(case, exact_out, exact_lse, keys)


def test_tree_attention_matches_oracle_at_slots_beyond_32_bits(backend):
    """Slot number page * page_size + slot passes 2^32; overlapping strides keep the pool at 16 MiB."""
    if backend.name == "cupy":
        pytest.skip("sparse on the host only; test_kernels_address_pools_beyond_2_31_elements is its GPU twin")
    num_pages, page_size = 2**22 + 8, 1024
    base = (np.arange(num_pages + WIDTH) % 251).astype(np.float32)
    ckv = np.lib.stride_tricks.as_strided(base, (num_pages, page_size, WIDTH), (4, 0, 4), writeable=False)
    kpe = np.broadcast_to(np.zeros(ROPE, np.float32), (num_pages, page_size, ROPE))
    kv = PagedKV(ckv, kpe, np.array([2**22 + 3, 7, 2**22 + 5], np.int32), np.array(2048, np.int32))
    zeros = np.zeros((1, 1, WIDTH), np.float32)
    out, lse = backend(tree_attention, ROOT, zeros, zeros, kv, sm_scale=1.0)
    first, second, last = (base[page : page + WIDTH].astype(np.float64) for page in kv.page_table)
    wanted = (1024 * first + 1024 * second + last) / 2049
    np.testing.assert_allclose(out[0, 0], wanted, rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(2049.0), rtol=1e-6)


def test_tree_attention_is_invariant_under_swapping_siblings(backend):
    """Siblings share a depth but not a slot: swapping two leaf siblings, rows and keys, swaps their results."""
    rng = np.random.default_rng(18)
    rows = rng.standard_normal((3 + 4, WIDTH + ROPE)).astype(np.float32)
    queries = rng.standard_normal((4, 2, WIDTH + ROPE)).astype(np.float32)
    tree = DraftTree.from_parents([1, 2, 3, 4], [-1, 0, 0, 0])
    swap = [0, 3, 2, 1]
    results = []
    for order in (list(range(4)), swap):
        moved = np.r_[rows[:3], rows[3:][order]]
        kv = PagedKV.from_dense(moved[:, :WIDTH], moved[:, WIDTH:], page_size=2, context_lens=3)
        q = queries[order]
        results.append(backend(tree_attention, tree, q[..., :WIDTH], q[..., WIDTH:], kv, sm_scale=0.2))
    np.testing.assert_allclose(results[1][0][swap], results[0][0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(results[1][1][swap], results[0][1], rtol=1e-6)
