"""tree_attention against a dense softmax in float64, and the relations its results must keep."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import DraftTree, PagedKV, Visibility, merge_states, tree_attention
from ddtree_cupy.testing import assert_identical, unchanged
from ddtree_cupy.tree_attention import reference
from tests.tree_attention.cases import (
    BFLOAT16,
    DTYPES,
    assert_state,
    build,
    expected,
    make_case,
    matrix_case,
    recipes,
    tree_case,
)


def attend(case, **options):
    return tree_attention(*case.arguments, sm_scale=case.sm_scale, **options)


def one_request(case, b):
    """Return the case of request b alone, still batched."""
    keep = slice(b, b + 1)
    kv = replace(case.kv, page_table=case.kv.page_table[keep], context_lens=case.kv.context_lens[keep])
    tree = case.tree.map(lambda array: array[keep])
    return replace(
        case,
        tree=tree,
        q_nope=case.q_nope[keep],
        q_pe=case.q_pe[keep],
        kv=kv,
        ckv_rows=case.ckv_rows[keep],
        kpe_rows=case.kpe_rows[keep],
        allowed=case.allowed[keep],
    )


@given(recipes(), st.sampled_from(DTYPES), st.sampled_from(["all", "context", "tree"]))
def test_tree_attention_matches_oracle(recipe, dtype, keys):
    case = build(recipe, dtype=dtype)
    with unchanged(tree=case.tree, q_nope=case.q_nope, q_pe=case.q_pe, kv=case.kv):
        out, lse = attend(case, keys=keys)
    assert_state(case, out, lse, keys)


@given(recipes())
def test_reference_matches_oracle_in_float64(recipe):
    case = build(recipe, dtype=np.float32)
    out, lse = reference.tree_attention(*case.arguments, sm_scale=case.sm_scale, compute_dtype=np.float64)
    exact_out, exact_lse = expected(case)
    assert (out.dtype, lse.dtype) == (np.float64, np.float64)
    np.testing.assert_allclose(out, exact_out, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("num_nodes", [1, 31, 32, 33, 63, 64, 65, 1025])
@pytest.mark.parametrize("context", [0, 1, 63, 64, 65, 127, 128, 129])
def test_tree_attention_matches_oracle_at_word_and_tile_edges(num_nodes, context):
    rng = np.random.default_rng([num_nodes, context])
    case = tree_case(rng, [num_nodes], [context], page_size=16, heads=1)
    assert_state(case, *attend(case))


@pytest.mark.parametrize("heads", [0, 17, 128])
def test_tree_attention_matches_oracle_at_any_head_count(heads):
    case = tree_case(np.random.default_rng(heads), [5, 3], [9, 20], heads=heads)
    assert_state(case, *attend(case))


@pytest.mark.parametrize("head_dims", [(512, 64), (16, 16), (48, 80), (1, 1), (5, 3), (16, 0), (512, 0)])
def test_tree_attention_matches_oracle_at_any_head_size(head_dims):
    case = tree_case(np.random.default_rng(7), [6], [40], head_dims=head_dims, dtype=np.float64)
    assert_state(case, *attend(case))


@pytest.mark.parametrize("page_size", [1, 2, 7, 16, 64, 480])
@pytest.mark.parametrize("context", [0, 6, 7, 8, 15, 16, 100])
def test_tree_attention_matches_oracle_at_any_page_size(page_size, context):
    case = tree_case(np.random.default_rng(3), [9], [context], page_size=page_size)
    assert_state(case, *attend(case))
    rows = (array[0][None].astype(np.float32) for array in (case.ckv_rows, case.kpe_rows))
    in_order = PagedKV.from_dense(*rows, page_size=page_size, context_lens=[context])
    assert_identical(attend(replace(case, kv=in_order)), attend(case))


@given(recipes(), st.data())
def test_tree_attention_is_identical_under_page_relabelling(recipe, data):
    case = build(recipe)
    num_pages = len(case.kv.ckv)
    new_label = np.array(data.draw(st.permutations(range(num_pages))), np.int32)
    ckv, kpe = np.empty_like(case.kv.ckv), np.empty_like(case.kv.kpe)
    ckv[new_label], kpe[new_label] = case.kv.ckv, case.kv.kpe
    inside = case.kv.page_table < num_pages
    table = np.where(inside, new_label[np.where(inside, case.kv.page_table, 0)], case.kv.page_table)
    relabelled = replace(case.kv, ckv=ckv, kpe=kpe, page_table=table)
    assert_identical(attend(replace(case, kv=relabelled)), attend(case))


@given(recipes())
def test_tree_attention_never_reads_unreachable_memory(recipe):
    poisoned, clean = build(recipe), build(recipe, poison=0.0)
    for keys in ("all", "context", "tree"):
        assert_identical(attend(poisoned, keys=keys), attend(clean, keys=keys))


@given(recipes())
def test_tree_attention_never_reads_the_other_part(recipe):
    """keys="tree" with NaN in every context row, and keys="context" with NaN in every tree row."""
    for keys in ("context", "tree"):
        case, spoilt = build(recipe), build(recipe)
        for b, allowed in enumerate(spoilt.allowed):
            context = spoilt.contexts()[b]
            other = range(context) if keys == "tree" else range(context, context + len(allowed))
            for position in other if len(allowed) else ():
                page = spoilt.kv.page_table[b, position // spoilt.kv.page_size]
                spoilt.kv.ckv[page, position % spoilt.kv.page_size] = np.nan
                spoilt.kv.kpe[page, position % spoilt.kv.page_size] = np.nan
        assert_identical(attend(spoilt, keys=keys), attend(case, keys=keys))


@given(recipes(), st.sampled_from(DTYPES))
def test_tree_attention_is_invariant_under_splitting_context_from_tree(recipe, dtype):
    case = build(recipe, dtype=dtype)
    context, tail = attend(case, keys="context"), attend(case, keys="tree")
    merged = merge_states(*context, *tail)
    if dtype.itemsize >= 4:
        assert_state(case, *merged)
    else:
        # both partial results were rounded to the input dtype, so the merged one may be two ulp away
        exact_out, _ = expected(case)
        ulp = np.float64(np.spacing(np.abs(exact_out).max(initial=1).astype(dtype)))
        np.testing.assert_allclose(merged[0].astype(np.float64), exact_out, rtol=0, atol=2 * ulp)
    order = merge_states(*tail, *context)
    np.testing.assert_allclose(order[0].astype(np.float64), merged[0].astype(np.float64), rtol=1e-2, atol=1e-6)


@given(recipes())
def test_tree_attention_is_identical_in_any_batch(recipe):
    case = build(recipe)
    together = attend(case)
    for b in range(len(case.allowed)):
        alone = attend(one_request(case, b))
        assert_identical(alone, tuple(array[b : b + 1] for array in together))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tree_attention_is_identical_without_the_batch_axis(dtype):
    case = tree_case(np.random.default_rng(5), [7], [20], dtype=dtype)
    alone = tree_attention(
        case.tree.without_batch(), case.q_nope[0], case.q_pe[0], case.kv.without_batch(), sm_scale=case.sm_scale
    )
    assert_identical(alone, tuple(array[0] for array in attend(case)))


@given(recipes())
def test_tree_attention_is_identical_for_a_draft_tree_and_its_visibility(recipe):
    case = build(recipe | {"is_tree": True})
    bare = Visibility(case.tree.visibility_bits, case.tree.num_nodes)
    assert isinstance(case.tree, DraftTree)
    assert_identical(attend(replace(case, tree=bare)), attend(case))


@given(recipes())
def test_tree_attention_is_identical_at_any_strides(recipe):
    """ckv and kpe from one interleaved buffer (as built), contiguous, every other page, page-minor order."""
    case = build(recipe)
    wanted = attend(case)
    ckv, kpe = case.kv.ckv, case.kv.kpe
    layouts = [
        (np.ascontiguousarray(ckv), np.ascontiguousarray(kpe)),
        (np.repeat(ckv, 2, axis=0)[::2], np.repeat(kpe, 3, axis=0)[1::3]),
        (ckv.swapaxes(0, 1).copy().swapaxes(0, 1), kpe.swapaxes(0, 1).copy().swapaxes(0, 1)),
        (ckv[::-1].copy()[::-1], kpe[:, ::-1].copy()[:, ::-1]),
    ]
    for one, other in layouts:
        assert_identical(attend(replace(case, kv=replace(case.kv, ckv=one, kpe=other))), wanted)


def test_tree_attention_is_identical_for_strided_queries_and_bits():
    case = matrix_case(np.random.default_rng(6), [5, 40], [3, 12], heads=4)
    both = np.concatenate([case.q_nope, case.q_pe], axis=-1)
    width = case.q_nope.shape[-1]
    wide = np.full((2, 40, 5), 2**32 - 1, np.uint32)
    wide[..., :2] = case.tree.visibility_bits
    tree = Visibility(wide[..., :2], case.tree.num_nodes)
    strided = replace(case, q_nope=both[..., :width], q_pe=both[..., width:], tree=tree)
    assert_identical(attend(strided), attend(case))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tree_attention_is_identical_with_out(dtype):
    case = tree_case(np.random.default_rng(8), [4, 0, 6], [10, 3, 0], dtype=dtype, capacity=7)
    wanted = attend(case)
    out = tuple(np.full_like(array, np.nan) for array in wanted)
    returned = attend(case, out=out)
    assert_identical(out, wanted)
    assert_identical(tuple(returned), wanted)
    assert all(np.shares_memory(one, other) for one, other in zip(returned, out, strict=True))


@pytest.mark.parametrize("batch", [0, 1, 4])
def test_tree_attention_matches_oracle_when_all_requests_are_inactive(batch):
    nothing = [np.zeros((0, 0), bool)] * max(batch, 1)
    case = make_case(np.random.default_rng(0), nothing, [5] * len(nothing), capacity=3)
    if batch == 0:
        case = replace(
            case,
            tree=case.tree.map(lambda array: array[:0]),
            q_nope=case.q_nope[:0],
            q_pe=case.q_pe[:0],
            kv=replace(case.kv, page_table=case.kv.page_table[:0], context_lens=case.kv.context_lens[:0]),
        )
    out, lse = attend(case)
    assert (out.shape, lse.shape) == (case.q_nope.shape, case.q_nope.shape[:-1])
    assert not out.any()
    assert (lse == -np.inf).all()


def test_tree_attention_matches_oracle_with_max_context_and_wide_table():
    case = tree_case(np.random.default_rng(13), [4], [10], page_size=4)
    table = np.pad(case.kv.page_table, ((0, 0), (0, 50)), constant_values=-1)
    kv = replace(case.kv, page_table=table, max_context=10)
    assert_identical(attend(replace(case, kv=kv)), attend(case))


@pytest.mark.parametrize("scale", [np.float32(0.1), np.float64(0.1), 0.1, 1])
def test_tree_attention_matches_oracle_at_any_scale_type(scale):
    case = tree_case(np.random.default_rng(14), [4], [10], sm_scale=scale)
    assert_state(case, *attend(case))


@pytest.mark.parametrize("scores", [1, 64, 1000])
def test_reference_is_invariant_under_its_block_size(scores, monkeypatch):
    """Query rows are taken in blocks to bound memory; the cut must not show."""
    case = tree_case(np.random.default_rng(15), [33, 5, 1], [20, 0, 64], heads=3)
    wanted = attend(case)
    monkeypatch.setattr(reference, "SCORES_AT_ONCE", scores)
    found = attend(case)
    assert_state(case, *found)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def identical_context(length, value, first=None, dtype=np.float32):
    """Return a cache of `length` equal rows; row 0 may hold another key score than the rest."""
    page = np.full((1, 64, 16), value, dtype)
    kpe = np.zeros((2, 64, 16), dtype)
    ckv = np.concatenate([page, page])
    if first is not None:
        kpe[0, 0, 0] = first
    table = np.ones(length // 64 + 1, np.int32)
    table[0] = 0
    return PagedKV(ckv, kpe, table, np.array(length, np.int32))


def test_tree_attention_matches_oracle_on_long_sums_of_equal_values():
    """No running float32 sum over 1,024 terms: a plain one over 65,536 equal values is off by 5e-4 here."""
    length, value, first = 65536, 0.1, 0.25
    kv = identical_context(length, value, first)
    q_nope, q_pe = np.zeros((1, 1, 16), np.float32), np.zeros((1, 1, 16), np.float32)
    q_pe[0, 0, 0] = 1.0
    nothing = Visibility.from_dense(np.zeros((1, 1), bool))
    out, lse = tree_attention(nothing, q_nope, q_pe, kv, sm_scale=1.0)
    weight = np.float32(np.exp(np.float32(-first)))
    exact_lse = np.log(np.exp(first) + (length - 1))
    running = np.cumsum(np.r_[np.float32(1), np.full(length - 1, weight)], dtype=np.float32)[-1]
    assert abs(np.log(np.float64(running)) + first - exact_lse) > 1e-4  # what a running sum would give
    np.testing.assert_allclose(np.float64(lse), exact_lse, rtol=0, atol=1024 * 2.0**-25)
    np.testing.assert_allclose(np.float64(out), np.float64(np.float32(value)), rtol=1024 * 2.0**-24)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=str)
def test_tree_attention_matches_oracle_on_long_sums_in_half_precision(dtype):
    """Accumulating in the input dtype would stop at 2,048 (float16) or 256 (bfloat16) equal terms."""
    kv = identical_context(8192, 1.0, dtype=dtype)
    zeros = np.zeros((1, 1, 16), dtype)
    out, lse = tree_attention(Visibility.from_dense(np.ones((1, 1), bool)), zeros, zeros, kv, sm_scale=1.0)
    np.testing.assert_array_equal(out.astype(np.float64), 1.0)
    np.testing.assert_allclose(lse, np.log(8193.0), rtol=1e-6)


def test_tree_attention_matches_oracle_on_262144_context_tokens():
    kv = identical_context(262144, 0.5)
    zeros = np.zeros((1, 1, 16), np.float32)
    out, lse = tree_attention(Visibility.from_dense(np.zeros((1, 1), bool)), zeros, zeros, kv, sm_scale=1.0)
    np.testing.assert_allclose(out, 0.5, rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(262144.0), rtol=1e-6)
