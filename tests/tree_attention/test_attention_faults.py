"""Faults other systems of this field had in masked, paged attention, each as a small input with its right answer."""

from dataclasses import replace

import numpy as np
import pytest

from ddtree_cupy import DraftTree, PagedKV, Visibility, merge_states, tree_attention
from ddtree_cupy.testing import GuardedArray, assert_identical
from tests.oracles import paged_attention
from tests.tree_attention.cases import DTYPES, assert_state, build, make_case, matrix_case, pack, tree_case

pytestmark = pytest.mark.usefixtures("on_every_backend")

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
def test_tree_attention_matches_oracle_at_extreme_scores(level, num_keys):
    """A finite mask sentinel (-5e4 in public kernels) would swallow these rows; the answer is the mean."""
    out, lse = tree_attention(ROOT, *scored([level] * num_keys), sm_scale=1.0)
    np.testing.assert_allclose(out[0, 0, :num_keys], 1 / num_keys, rtol=1e-6)
    np.testing.assert_allclose(lse, np.float32(level) + np.log(np.float32(num_keys)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("level", [6e4, 1e38, 2e38])
def test_tree_attention_matches_oracle_at_scores_of_both_signs(level):
    """The difference itself overflows at 2e38: weight 0, and no warning."""
    out, lse = tree_attention(ROOT, *scored([-level, level, -level]), sm_scale=1.0)
    np.testing.assert_array_equal(out[0, 0, :3], [0, 1, 0])
    np.testing.assert_array_equal(lse, np.float32(level))


def test_tree_attention_matches_oracle_when_a_hidden_key_has_the_highest_score():
    """The maximum runs over visible keys only; else every visible weight would vanish."""
    q_nope, q_pe, kv = scored([0, 1, 6e4], context=1)
    tree = DraftTree.from_parents([1, 2], [-1, 0])
    queries = np.repeat(q_nope, 2, axis=0), np.repeat(q_pe, 2, axis=0)
    out, lse = tree_attention(tree, *queries, kv, sm_scale=1.0)
    np.testing.assert_allclose(out[0, 0, :3], [0.26894142, 0.73105858, 0], rtol=1e-6)
    np.testing.assert_allclose(out[1, 0, :3], [0, 0, 1], rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0], np.log1p(np.e), rtol=1e-6)


def test_tree_attention_matches_oracle_for_two_keys_with_scores_1_and_0():
    """0.7311; without log2(e) beside exp2 it would be 0.6667."""
    out, lse = tree_attention(ROOT, *scored([1, 0]), sm_scale=1.0)
    np.testing.assert_allclose(out[0, 0, :2], [0.73105858, 0.26894142], rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(1 + np.e), rtol=1e-6)


@pytest.mark.parametrize("scale", [192**-0.5, 576**-0.5, 0.135, 1.0, 0.5])
def test_tree_attention_matches_oracle_with_the_scale_applied_once(scale):
    out, _ = tree_attention(ROOT, *scored([0, 10]), sm_scale=scale)
    np.testing.assert_allclose(out[0, 0, 1], 1 / (1 + np.exp(-10 * scale)), rtol=1e-6)


@pytest.mark.parametrize("scale", [0.135, 1.0, 192**-0.5])
def test_tree_attention_is_invariant_under_splitting_at_any_scale(scale):
    """The exported lse carries the same scale as the softmax, so chunks merge to the whole."""
    case = tree_case(np.random.default_rng(0), [6], [19], sm_scale=scale)
    parts = [tree_attention(*case.arguments, sm_scale=scale, keys=keys) for keys in ("context", "tree")]
    assert_state(case, *merge_states(*parts[0], *parts[1]))


def test_tree_attention_matches_oracle_on_three_queries_and_one_key():
    """Causal in the old sense, 3 queries and 1 key: rows 0 and 1 see nothing."""
    visible = np.zeros((3, 3), bool)
    visible[2, 0] = True
    case = make_case(np.random.default_rng(1), [visible], [0])
    out, lse = tree_attention(*case.arguments, sm_scale=case.sm_scale)
    assert not out[0, :2].any()
    assert (lse[0, :2] == -np.inf).all()
    np.testing.assert_allclose(out[0, 2], np.float32([case.ckv_rows[0][0]] * 2), rtol=1e-6)


@pytest.mark.parametrize("first_visible", [63, 64, 1023, 1024, 1030])
def test_tree_attention_matches_oracle_when_the_first_tiles_are_hidden(first_visible):
    """An online update that starts with a fully masked tile must not form -inf - -inf."""
    size = 1040
    visible = np.zeros((size, size), bool)
    visible[0, first_visible] = visible[1, first_visible:] = visible[2, :3] = True
    case = make_case(np.random.default_rng(2), [visible], [0], heads=1, head_dims=(16, 16))
    assert_state(case, *tree_attention(*case.arguments, sm_scale=case.sm_scale))


def test_tree_attention_is_invariant_under_an_empty_context_chunk():
    case = tree_case(np.random.default_rng(3), [5], [0])
    whole = tree_attention(*case.arguments, sm_scale=case.sm_scale)
    empty = tree_attention(*case.arguments, sm_scale=case.sm_scale, keys="context")
    assert (empty[1] == -np.inf).all()
    tree = tree_attention(*case.arguments, sm_scale=case.sm_scale, keys="tree")
    assert_identical(merge_states(*empty, *tree), whole)


def test_tree_attention_is_identical_when_a_tree_is_padded_from_5_to_8():
    narrow = tree_case(np.random.default_rng(4), [5], [11])
    padded = tree_case(np.random.default_rng(4), [5], [11], capacity=8)
    out, lse = tree_attention(*padded.arguments, sm_scale=padded.sm_scale)
    wanted = tree_attention(*narrow.arguments, sm_scale=narrow.sm_scale)
    assert_identical((out[:, :5], lse[:, :5]), wanted)
    assert not out[:, 5:].any()
    assert (lse[:, 5:] == -np.inf).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tree_attention_never_reads_the_unused_slots_of_the_last_page(dtype):
    """Page 4, length 13, slots 13..15 NaN; and length 32 in a cache of 128 NaN slots."""
    for page_size, context in ((4, 12), (128, 31), (64, 31)):
        case = make_case(np.random.default_rng(5), [np.ones((1, 1), bool)], [context], page_size=page_size, dtype=dtype)
        assert np.isnan(case.kv.ckv[case.kv.page_table[0, context // page_size], -1]).all()
        assert_state(case, *tree_attention(*case.arguments, sm_scale=case.sm_scale))


@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan])
def test_tree_attention_never_reads_infinite_rows(poison):
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
    results = [tree_attention(*each.arguments, sm_scale=case.sm_scale) for each in (spoilt, case)]
    assert_identical(*results)


@pytest.mark.parametrize("next_entry", [2**30, -1, -(2**31), 2**31 - 1])
def test_tree_attention_never_reads_the_page_table_past_the_last_key(next_entry):
    case = tree_case(np.random.default_rng(7), [4], [12], page_size=4)  # 16 keys fill 4 pages exactly
    tight = replace(case.kv, page_table=case.kv.page_table[:, :4].copy())
    loose = case.kv.page_table.copy()
    loose[:, 4:] = next_entry
    results = [
        tree_attention(case.tree, case.q_nope, case.q_pe, kv, sm_scale=case.sm_scale)
        for kv in (tight, replace(case.kv, page_table=loose))
    ]
    assert_identical(*results)


def test_tree_attention_never_reads_tree_pages_for_the_context_part():
    """keys="context" with a table that ends where the context ends."""
    case = tree_case(np.random.default_rng(7), [4], [12], page_size=4)
    short = replace(case.kv, page_table=case.kv.page_table[:, :3].copy())
    results = [
        tree_attention(case.tree, case.q_nope, case.q_pe, kv, sm_scale=case.sm_scale, keys="context")
        for kv in (short, case.kv)
    ]
    assert_identical(*results)


def test_tree_attention_matches_oracle_in_a_padded_batch_over_nan_outputs():
    """Batch 8, five real requests, three padded; the output buffers start as NaN and every row is written."""
    counts = [3, 5, 1, 8, 2, 0, 0, 0]
    case = matrix_case(np.random.default_rng(8), counts, [5, 0, 70, 3, 16, 0, 9, 0], capacity=8)
    out = np.full(case.q_nope.shape, np.nan, np.float32)
    lse = np.full(case.q_nope.shape[:3], np.nan, np.float32)
    tree_attention(*case.arguments, sm_scale=case.sm_scale, out=(out, lse))
    assert_state(case, out, lse)


@pytest.mark.parametrize("heads", [1, 5, 7, 8, 12])
def test_tree_attention_never_writes_around_its_outputs(heads):
    """12 heads in blocks of 8 must not store lse past the last head."""
    case = tree_case(np.random.default_rng(9), [5, 2], [7, 1], heads=heads)
    guards = GuardedArray(case.q_nope.shape, np.float32), GuardedArray(case.q_nope.shape[:3], np.float32)
    tree_attention(*case.arguments, sm_scale=case.sm_scale, out=tuple(guard.array for guard in guards))
    assert [guard.num_touched() for guard in guards] == [0, 0]
    assert_state(case, *(guard.array for guard in guards))


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130])
def test_tree_attention_matches_oracle_on_short_causal_chains_with_zero_queries(length):
    """Row i is the mean of the first i + 1 values; an ignored causal flag shows most at short lengths."""
    values = np.arange(1, length + 1, dtype=np.float32)[:, None].repeat(WIDTH, 1)
    kv = PagedKV.from_dense(values, np.ones((length, ROPE), np.float32), page_size=16, context_lens=0)
    tree = DraftTree.from_parents(list(range(length)), list(range(-1, length - 1)))
    zeros = np.zeros((length, 1, WIDTH), np.float32)
    out, lse = tree_attention(tree, zeros, zeros, kv, sm_scale=1.0)
    node = np.arange(length)
    np.testing.assert_allclose(out[:, 0, 0], node / 2 + 1, rtol=1e-6)
    np.testing.assert_allclose(lse[:, 0], np.log(node + 1.0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("context", [1, 13, 63, 65, 100, 129])
def test_tree_attention_matches_oracle_on_zero_queries_past_a_tile_edge(context):
    """q = 0 and a length that is no multiple of the tile: the plain mean of the valid values, NaN behind them."""
    case = make_case(np.random.default_rng(10), [np.zeros((2, 2), bool)], [context], page_size=64)
    zeros = np.zeros_like(case.q_nope), np.zeros_like(case.q_pe)
    out, _ = tree_attention(case.tree, *zeros, case.kv, sm_scale=1.0)
    mean = case.ckv_rows[0][:context].mean(axis=0)
    np.testing.assert_allclose(out[0], np.broadcast_to(mean, (2, 2, 32)), rtol=1e-5, atol=1e-6)


def test_tree_attention_matches_oracle_when_node_1_sees_node_2():
    """A mask no causal kernel can imitate."""
    visible = np.eye(3, dtype=bool)
    visible[1, 2] = True
    case = make_case(np.random.default_rng(11), [visible], [4])
    out, lse = tree_attention(*case.arguments, sm_scale=case.sm_scale)
    assert_state(case, out, lse)
    causal = replace(case, tree=Visibility.from_dense(np.tri(3, dtype=bool)[None]))
    assert (tree_attention(*causal.arguments, sm_scale=case.sm_scale)[0][0, 1] != out[0, 1]).any()


@pytest.mark.parametrize("node", [60, 64])
def test_tree_attention_matches_oracle_on_a_late_child_of_the_root(node):
    """Tiles below the diagonal need the mask too: nodes 1 .. node - 1 are another branch."""
    parents = [-1, *range(node - 1), 0]
    visible = np.tri(node + 1, dtype=bool)
    visible[node] = False
    visible[node, [0, node]] = True
    case = make_case(np.random.default_rng(12), [visible], [0], parents=[parents], heads=1)
    assert_identical(case.tree.visibility_bits[0], pack(visible, node + 1, np.random.default_rng(1)))
    assert_state(case, *tree_attention(*case.arguments, sm_scale=case.sm_scale))
    fresh = DraftTree.from_parents([list(range(node + 1))], [parents])
    assert fresh.visibility[0, node].nonzero()[0].tolist() == [0, node]


@pytest.mark.parametrize("counts", [[5, 7], [3, 5], [6, 6], [33, 1], [1, 64, 2]])
def test_tree_attention_matches_oracle_on_unequal_trees_in_one_batch(counts):
    """Each request reads its own rows of bits, whatever its neighbours' sizes."""
    case = tree_case(np.random.default_rng(13), counts, [9, 11, 4][: len(counts)], heads=8)
    assert_state(case, *tree_attention(*case.arguments, sm_scale=case.sm_scale))


def test_tree_attention_matches_oracle_on_8_then_2_requests():
    rng = np.random.default_rng(14)
    for batch in (8, 2):
        case = matrix_case(rng, [4 + b for b in range(batch)], list(range(batch)))
        assert_state(case, *tree_attention(*case.arguments, sm_scale=case.sm_scale))


def test_tree_attention_matches_oracle_on_two_queries_over_five_keys():
    """Alignment is bottom-right: query i sees keys 0 .. 3 + i."""
    kv = PagedKV.from_dense(np.eye(5, WIDTH), np.zeros((5, ROPE)), page_size=4, context_lens=3)
    zeros = np.zeros((2, 1, WIDTH))
    out, _ = tree_attention(DraftTree.from_parents([1, 2], [-1, 0]), zeros, zeros, kv, sm_scale=1.0)
    np.testing.assert_allclose(out[:, 0, :5], [[0.25] * 4 + [0], [0.2] * 5], rtol=1e-12)


def test_tree_attention_matches_oracle_on_page_4_prefix_7_and_branches_of_5():
    """The last partial page of the prefix also holds the first tree keys."""
    parents = [-1, 0, 1, 2, 3, 4, 0, 6, 7, 8, 9]
    visible = DraftTree.from_parents(list(range(11)), parents).visibility
    case = make_case(np.random.default_rng(15), [visible], [7], page_size=4, parents=[parents])
    assert_state(case, *tree_attention(*case.arguments, sm_scale=case.sm_scale))


def test_tree_attention_matches_oracle_with_shared_prefix_pages():
    """Two requests whose full context pages are the same pages; their tree pages are their own."""
    rng = np.random.default_rng(16)
    pool = rng.standard_normal((6, 4, WIDTH + ROPE)).astype(np.float32)
    table = np.array([[4, 1, 0, 3], [4, 1, 5, 2]], np.int32)
    kv = PagedKV(pool[..., :WIDTH], pool[..., WIDTH:], table, np.array([8, 9], np.int32)).validate()
    tree = Visibility.from_dense(rng.random((2, 5, 5)) < 0.5)
    q_nope, q_pe = rng.standard_normal((2, 2, 5, 3, WIDTH)).astype(np.float32)
    out, lse = tree_attention(tree, q_nope, q_pe, kv, sm_scale=0.3)
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


def test_tree_attention_matches_oracle_at_slots_beyond_32_bits():
    """Slot number page * page_size + slot passes 2^32; overlapping strides keep the pool at 16 MiB."""
    num_pages, page_size = 2**22 + 8, 1024
    base = (np.arange(num_pages + WIDTH) % 251).astype(np.float32)
    ckv = np.lib.stride_tricks.as_strided(base, (num_pages, page_size, WIDTH), (4, 0, 4), writeable=False)
    kpe = np.broadcast_to(np.zeros(ROPE, np.float32), (num_pages, page_size, ROPE))
    kv = PagedKV(ckv, kpe, np.array([2**22 + 3, 7, 2**22 + 5], np.int32), np.array(2048, np.int32))
    zeros = np.zeros((1, 1, WIDTH), np.float32)
    out, lse = tree_attention(ROOT, zeros, zeros, kv, sm_scale=1.0)
    first, second, last = (base[page : page + WIDTH].astype(np.float64) for page in kv.page_table)
    wanted = (1024 * first + 1024 * second + last) / 2049
    np.testing.assert_allclose(out[0, 0], wanted, rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(2049.0), rtol=1e-6)


def test_tree_attention_is_identical_under_token_values():
    """No token id is special to attention: 0, 2 and large ids give the same bits."""
    case = tree_case(np.random.default_rng(17), [6], [5])
    for tokens in ([0, 2, 1, 3, 4, 5], [163839, 0, 2, 5, 7, 9]):
        tree = replace(case.tree, token_ids=np.array([tokens], np.int32))
        assert_identical(
            tree_attention(tree, case.q_nope, case.q_pe, case.kv, sm_scale=case.sm_scale),
            tree_attention(*case.arguments, sm_scale=case.sm_scale),
        )


def test_tree_attention_is_invariant_under_swapping_siblings():
    """Siblings share a depth but not a slot: swapping two leaf siblings, rows and keys, swaps their results."""
    rng = np.random.default_rng(18)
    rows = rng.standard_normal((3 + 4, WIDTH + ROPE))
    queries = rng.standard_normal((4, 2, WIDTH + ROPE))
    tree = DraftTree.from_parents([1, 2, 3, 4], [-1, 0, 0, 0])
    swap = [0, 3, 2, 1]
    results = []
    for order in (list(range(4)), swap):
        moved = np.r_[rows[:3], rows[3:][order]]
        kv = PagedKV.from_dense(moved[:, :WIDTH], moved[:, WIDTH:], page_size=2, context_lens=3)
        q = queries[order]
        results.append(tree_attention(tree, q[..., :WIDTH], q[..., WIDTH:], kv, sm_scale=0.2))
    np.testing.assert_allclose(results[1][0][swap], results[0][0], rtol=1e-12)
    np.testing.assert_allclose(results[1][1][swap], results[0][1], rtol=1e-12)
