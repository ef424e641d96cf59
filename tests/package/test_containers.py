"""Containers: constructors, derived arrays, packing, `validate()`, and how they print."""

from dataclasses import FrozenInstanceError, fields, replace
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddtree_cupy import AcceptResult, Candidates, DraftTree, PagedKV, Visibility
from ddtree_cupy.errors import (
    ArgumentError,
    DTypeError,
    LayoutError,
    ShapeError,
)
from ddtree_cupy.testing import assert_identical, unchanged
from ddtree_cupy.testing.strategies import candidate_tables, draft_trees, paged_caches, seeds, visibilities
from tests.oracles import ancestors, dense_visibility, gather, packed_visibility
from tests.package.cases import (
    T6_PARENTS,
    T6_TOKENS,
    cache_case,
    candidates_case,
    int32,
    result_case,
    t6,
    table,
)
from tests.refusals import rejects

# ---- DraftTree.from_parents and what follows from the parents ----


def test_from_parents_matches_oracle_on_t6():
    tree = t6()
    assert tree.depths.tolist() == [0, 1, 2, 1, 2, 2]
    assert tree.first_child.tolist() == [1, 2, -1, 5, -1, -1]
    assert tree.next_sibling.tolist() == [-1, 3, 4, -1, -1, -1]
    assert tree.visibility_bits[:, 0].tolist() == [0b1, 0b11, 0b111, 0b1001, 0b10011, 0b101001]
    assert tree.path_scores is None
    assert tree.num_nodes.shape == ()
    assert int(tree.num_nodes) == 6
    assert int(tree.status) == 0


def test_from_parents_keeps_token_zero():
    """The size counts nodes, not non-zero tokens: T6 with token 10 replaced by 0 has 6 nodes."""
    tree = DraftTree.from_parents([9, 0, 20, 11, 21, 20], T6_PARENTS)
    assert int(tree.num_nodes) == 6
    assert tree.token_ids.tolist() == [9, 0, 20, 11, 21, 20]


@given(tree=draft_trees())
def test_from_parents_matches_oracle(tree):
    batched = tree if tree.is_batched else tree.with_batch()
    for b, count in enumerate(batched.num_nodes.tolist()):
        parents = batched.parents[b].tolist()
        depths = [len(ancestors(parents, i)) - 1 if i < count else -1 for i in range(len(parents))]
        assert batched.depths[b].tolist() == depths
        for i in range(len(parents)):
            children = [j for j in range(1, count) if parents[j] == i]
            assert batched.first_child[b, i] == (children[0] if children else -1)
            for left, right in pairwise([*children, -1]):
                assert batched.next_sibling[b, left] == right
        assert (batched.next_sibling[b, count:] == -1).all()
        assert (batched.next_sibling[b, :1] == -1).all()
        dense = dense_visibility(parents, count)
        assert_identical(batched.visibility_bits[b], packed_visibility(dense))
        assert_identical(batched.visibility[b], dense)


@given(tree=draft_trees())
def test_from_parents_is_identical_unbatched(tree):
    batched = tree if tree.is_batched else tree.with_batch()
    again = DraftTree.from_parents(batched.token_ids, batched.parents)
    assert_identical(again, batched)
    for b in range(len(batched.num_nodes)):
        one = DraftTree.from_parents(batched.token_ids[b], batched.parents[b])
        assert_identical(one.with_batch(), batched.map(lambda array, b=b: array[b : b + 1]))


def test_from_parents_takes_wide_integers_and_never_writes():
    tokens, parents = np.array(T6_TOKENS, np.int64), np.array(T6_PARENTS, np.int8)
    with unchanged(tokens=tokens, parents=parents):
        assert_identical(DraftTree.from_parents(tokens, parents), t6())


@pytest.mark.parametrize("shape", [(0, 3), (0, 0), (2, 0)])
def test_from_parents_takes_empty_batches(shape):
    tree = DraftTree.from_parents(np.zeros(shape, np.int32), np.zeros(shape, np.int32))
    assert tree.num_nodes.tolist() == [0] * shape[0]


class NotOnHost:
    """An array that refuses to be copied to the host without being asked, as CuPy's do."""

    def __array__(self, dtype=None, copy=None):
        raise TypeError("implicit conversion is not allowed")


@rejects(
    (ArgumentError, "parents", [1, 2], [-1, 1]),
    (ArgumentError, "parents", [1, 2, 3], [-1, 2, 0]),
    (ArgumentError, "parents", [1, 2, 3], [0, 0, 0]),
    (ArgumentError, "parents", [1, 2, 3], [-1, -2, 0]),
    (ArgumentError, "parents", [1, 2, 3, 4], [-1, 0, -1, 0]),
    (ArgumentError, "token_ids", [1, 2, -1], [-1, 0, 0]),
    (ArgumentError, "token_ids", [1, -2, 3], [-1, 0, 0]),
    (ArgumentError, "repeats token 5", [1, 5, 5], [-1, 0, 0]),
    (ShapeError, "parents", [1, 2], [-1, 0, 0]),
    (ShapeError, "parents", [[[1]]], [[[-1]]]),
    (ShapeError, "parents", 3, -1),
    (DTypeError, "token_ids", [1.0, 2.0], [-1, 0]),
    (DTypeError, "parents", [1, 2], [-1.0, 0.0]),
    (DTypeError, "token_ids", [True, False], [-1, 0]),
    (ArgumentError, "token_ids", [1, 2**31], [-1, 0]),
    (ShapeError, "from_parents: `token_ids` is ragged, expected lists of equal", [[1], [2, 3]], [[-1], [-1, 0]]),
    (ShapeError, "from_parents: `parents` is ragged", [1, 2], [[-1], 0]),
    (ArgumentError, r"`token_ids`\[1\] is 1180591620717411303424, expected integers of int32", [1, 2**70], [-1, 0]),
    (DTypeError, "token_ids", ["a", "b"], [-1, 0]),
    (DTypeError, "from_parents: `token_ids` is a masked array", np.ma.masked_array([1, 2]), [-1, 0]),
    (DTypeError, "from_parents: `parents` is a masked array", [1, 2], np.ma.masked_array([-1, 0])),
    (DTypeError, "from_parents: `token_ids` is a numpy.matrix", np.ones((1, 1), int).view(np.matrix), [[-1]]),
    (DTypeError, "from_parents: `token_ids` is NotOnHost.*on the host", NotOnHost(), [-1, 0]),
)
def test_from_parents_rejects(token_ids, parents):
    DraftTree.from_parents(token_ids, parents)


def test_draft_tree_takes_scores_that_are_infinite_in_padding():
    tree = DraftTree.from_parents([1, 2, -1], [-1, 0, -1])
    replace(tree, path_scores=np.array([0.0, -1.0, -np.inf])).validate()


# ---- Visibility ----


def test_row_stride_follows_the_capacity():
    """Two requests of 40 nodes in a buffer for 64: row stride 2 words, request stride 128."""
    tokens = np.full((2, 64), -1, np.int32)
    parents = np.full((2, 64), -1, np.int32)
    tokens[:, :40], parents[:, :40] = np.arange(40), np.arange(-1, 39)
    bits = DraftTree.from_parents(tokens, parents).visibility_bits
    assert bits.shape == (2, 64, 2)
    assert bits.strides == (128 * 4, 2 * 4, 4)


@given(dense=st.integers(1, 70).flatmap(lambda n: seeds().map(lambda s: np.random.default_rng(s).random((n, n)) < 0.5)))
@example(dense=np.ones((32, 32), bool))
@example(dense=np.ones((33, 33), bool))
@example(dense=np.ones((65, 65), bool))
def test_from_dense_matches_oracle(dense):
    found = Visibility.from_dense(dense)
    assert_identical(found.visibility_bits, packed_visibility(dense))
    assert_identical(found.to_dense(), dense)


@given(found=visibilities())
def test_to_dense_never_reads_beyond_num_nodes(found):
    batched = found if found.is_batched else found.with_batch()
    dense = batched.to_dense()
    for b, count in enumerate(batched.num_nodes.tolist()):
        assert not dense[b, count:].any()
        assert not dense[b, :, count:].any()


@rejects(
    (ShapeError, "visibility", np.ones((10, 15), bool), None),
    (ShapeError, "visibility", np.ones((2, 3, 4), bool), None),
    (ShapeError, "visibility", np.ones(4, bool), None),
    (DTypeError, "visibility", np.ones((2, 2), np.uint8), None),
    (DTypeError, "visibility", np.ones((2, 2), np.float32), None),
    (ArgumentError, "num_nodes", np.ones((2, 2), bool), 3),
    (ArgumentError, "num_nodes", np.ones((2, 2), bool), -1),
    (ShapeError, "num_nodes", np.ones((2, 2), bool), [1, 2]),
    (ShapeError, "num_nodes", np.ones((2, 2, 2), bool), 1),
    (ShapeError, "visibility", [[True], [True, False]], None),
    (DTypeError, "visibility", np.ma.masked_array(np.ones((2, 2), bool)), None),
    (ShapeError, "num_nodes", np.ones((1, 2, 2), bool), [[1], 2]),
)
def test_from_dense_rejects(visibility, num_nodes):
    Visibility.from_dense(visibility, num_nodes)


# ---- PagedKV ----


@given(
    page_size=st.sampled_from([1, 3, 64]), tokens=st.integers(0, 9), extra=st.integers(0, 4), batch=st.integers(-1, 3)
)
def test_paged_kv_from_dense_matches_oracle(page_size, tokens, extra, batch):
    lead = () if batch < 0 else (batch,)
    random = np.random.default_rng(0)
    ckv = random.standard_normal((*lead, tokens, 4)).astype(np.float32)
    kpe = random.standard_normal((*lead, tokens, 2)).astype(np.float32)
    kv = PagedKV.from_dense(ckv, kpe, page_size=page_size, capacity=tokens + extra).validate()
    assert kv.is_batched == (batch >= 0)
    assert kv.context_lens.tolist() == np.full(lead, tokens).tolist()
    for b in range(max(batch, 0) if lead else 1):
        got_ckv, got_kpe = gather(kv, b, tokens)
        np.testing.assert_array_equal(got_ckv, ckv[b] if lead else ckv)
        np.testing.assert_array_equal(got_kpe, kpe[b] if lead else kpe)


def test_paged_kv_from_dense_never_shares_memory():
    ckv, kpe = np.ones((3, 4), np.float32), np.ones((3, 2), np.float32)
    kv = PagedKV.from_dense(ckv, kpe)
    kv.ckv[...] = 5
    assert (ckv == 1).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16])
def test_paged_kv_allocate_makes_one_buffer(dtype):
    kv = PagedKV.allocate(9, batch=2, page_size=4, head_dim_ckv=8, head_dim_kpe=2, dtype=dtype).validate()
    assert kv.ckv.shape == (6, 4, 8)
    assert kv.kpe.shape == (6, 4, 2)
    assert kv.ckv.base is kv.kpe.base
    assert kv.ckv.dtype == dtype
    assert kv.page_table.shape == (2, 3)
    assert kv.context_lens.tolist() == [0, 0]
    assert kv.max_context == 12
    assert kv.page_size == 4


@pytest.mark.parametrize("capacity", [0, 1, 64, 65])
def test_paged_kv_allocate_covers_the_capacity(capacity):
    kv = PagedKV.allocate(capacity, head_dim_ckv=4, head_dim_kpe=2).validate()
    assert kv.page_table.shape == (-(-capacity // 64),)
    assert PagedKV.allocate(capacity, batch=0, head_dim_ckv=4, head_dim_kpe=2).validate().is_batched


@rejects(
    (ArgumentError, "capacity", {"capacity": -1}),
    (DTypeError, "capacity", {"capacity": 1.5}),
    (ArgumentError, "page_size", {"capacity": 4, "page_size": 0}),
    (ArgumentError, "batch", {"capacity": 4, "batch": -1}),
    (ArgumentError, "head_dim_ckv", {"capacity": 4, "head_dim_ckv": -1}),
)
def test_paged_kv_allocate_rejects(arguments):
    PagedKV.allocate(**arguments)


@rejects(
    (ShapeError, "kpe", {"kpe": np.ones((4, 2), np.float32)}),
    (DTypeError, "kpe", {"kpe": np.ones((3, 2), np.float16)}),
    (ShapeError, "ckv", {"ckv": np.ones(3, np.float32), "kpe": np.ones(3, np.float32)}),
    (ArgumentError, "page_size", {"page_size": 0}),
    (ArgumentError, "capacity", {"capacity": 2}),
    (ArgumentError, "context_lens", {"context_lens": 4}),
    (ArgumentError, "context_lens", {"context_lens": -1}),
    (ArgumentError, "context_lens", {"context_lens": [1]}),
    (ShapeError, "context_lens", {"context_lens": [[1], 2]}),
)
def test_paged_kv_from_dense_rejects(changes):
    arguments = {"ckv": np.ones((3, 4), np.float32), "kpe": np.ones((3, 2), np.float32), **changes}
    PagedKV.from_dense(arguments.pop("ckv"), arguments.pop("kpe"), **arguments)


@pytest.mark.parametrize(
    "table",
    [
        [[3, 5, -1], [2, 9, 0]],  # beyond the context nothing need be assigned
        [[3, 5, 7], [3, 9, 0]],  # a full prefix page may be shared
    ],
)
def test_paged_kv_validate_takes_legal_tables(table):
    kv = cache_case(page_table=np.array(table, np.int32))
    assert kv.validate() is kv


POOL = np.zeros((6, 4, 3), np.float32)
PAGES = [[0, 1], [2, 3], [4, 5]]


@rejects(
    (ArgumentError, r"PagedKV: `context_lens`\[0\] is 20, expected 0..8 \(table", PAGES, [20, 10, 5]),
    (ArgumentError, r"PagedKV: `context_lens`\[2\] is 9, expected 0..8", np.array(PAGES), (8, 8, 9)),
    (ArgumentError, r"PagedKV: `context_lens`\[1\] is -1", PAGES, [0, -1, 0]),
    (ArgumentError, r"PagedKV: `page_table`\[2, 1\] is 6, expected -1..5", [[0, 1], [2, 3], [4, 6]], int32(0, 0, 0)),
    (ArgumentError, r"PagedKV: `page_table`\[0, 1\] is -1, expected a page", [[0, -1]], [5]),
    (ArgumentError, "a page of its own", [[0, 1], [1, 2]], int32(5, 1)),
    (ArgumentError, r"PagedKV: `context_lens`\[0\] is 9", [0, 1], 9),
    (ShapeError, r"PagedKV: `context_lens` is \(2,\), expected \(batch,\) with batch=3", PAGES, [1, 2]),
)
def test_paged_kv_made_from_plain_numbers_rejects(page_table, context_lens):
    PagedKV(POOL, POOL, page_table, context_lens)


def test_paged_kv_made_from_plain_numbers_takes_what_fits():
    kv = PagedKV(POOL, POOL, PAGES, [8, 0, 5])
    assert_identical(replace(kv, context_lens=[1, 2, 3]).context_lens, int32(1, 2, 3))
    with pytest.raises(ArgumentError, match=r"`context_lens`\[0\] is 20"):
        replace(kv, context_lens=[20, 10, 5])
    replace(kv, context_lens=int32(20, 10, 5))  # values of arrays are read by `validate()` alone


@rejects(
    (ArgumentError, "AcceptResult: `num_accepted`", lambda: AcceptResult([0, 1, 3], 3, 7)),
    (ArgumentError, "AcceptResult: `accepted`", lambda: AcceptResult([[0, 3, 1]], [2], [7])),
    (ShapeError, "AcceptResult: `bonus_token`", lambda: AcceptResult([[0, 1, 3]], [2], 7)),
    (ArgumentError, "Visibility: `num_nodes`", lambda: Visibility([[1], [3]], 3)),
    (
        ArgumentError,
        "Candidates: `logits`.*; Candidates.from_topk sorts",
        lambda: Candidates([[4, 2]], [[1.0, 2.0]], [3.0]),
    ),
    (ArgumentError, "DraftTree: `status`", lambda: DraftTree([9], [-1], [0], None, 1, 2, [[1]], [-1], [-1])),
)
def test_containers_made_from_plain_numbers_reject(make):
    make()


def test_paged_kv_validate_takes_slices_of_one_buffer():
    pool = np.ones((10, 8, 24), np.float32)[:, ::2]
    cache_case(ckv=pool[..., :16], kpe=pool[..., 16:]).validate()


@given(kv=paged_caches())
def test_paged_kv_with_batch_is_identical(kv):
    one = kv if not kv.is_batched else replace(kv, page_table=kv.page_table[0], context_lens=kv.context_lens[0, ...])
    again = one.with_batch().without_batch()
    assert_identical(again, one)
    assert np.shares_memory(again.ckv, one.ckv) or not one.ckv.size


# ---- Candidates and AcceptResult ----


# ---- what all containers share ----


@given(candidates=candidate_tables(min_batch=1), tree=draft_trees(), found=visibilities())
def test_with_batch_is_identical_after_without_batch(candidates, tree, found):
    for container in (candidates, tree, found):
        one = container if not container.is_batched else container.without_batch()
        for field in fields(one):
            array = getattr(one, field.name)
            assert array is None or isinstance(array, np.ndarray)
        assert_identical(one.with_batch().without_batch(), one)
        assert one.with_batch().is_batched
        one.validate()


def wrong(name, index, value):
    """Return T6 with one wrong entry."""
    array = getattr(t6(), name).copy()
    array[index] = value
    return replace(t6(), **{name: array})


def scored(scores, tree=None):
    return replace(tree or t6(), path_scores=np.asarray(scores))


def pages(*table):
    return cache_case(page_table=np.array(table, np.int32))


PADDED = DraftTree.from_parents([1, 2, -1], [-1, 0, -1])
ODD_ROWS = ([1, 2, -np.inf], [2, np.nan, -np.inf], [np.inf, 1, -np.inf])


@rejects(
    (ArgumentError, "DraftTree.*token", wrong("token_ids", 3, 10)),  # a sibling's
    (ArgumentError, "DraftTree.*token", wrong("token_ids", 2, -1)),
    *((ArgumentError, "DraftTree.*parents", wrong("parents", *entry)) for entry in ((2, 2), (2, 0), (0, 0))),
    *((ArgumentError, "DraftTree.*depths", wrong("depths", *entry)) for entry in ((2, 1), (0, 1))),
    *((ArgumentError, "DraftTree.*first_child", wrong("first_child", *entry)) for entry in ((0, 3), (5, 0))),
    *((ArgumentError, "DraftTree.*next_sibling", wrong("next_sibling", *entry)) for entry in ((1, 4), (0, 1))),
    (ArgumentError, "DraftTree.*visibility_bits", wrong("visibility_bits", (3, 0), 0b1111)),
    (ArgumentError, "DraftTree.*visibility_bits", wrong("visibility_bits", (0, 0), 0)),
    *((ArgumentError, "DraftTree", wrong("num_nodes", (), count)) for count in (5, 7, -1)),
    (ArgumentError, "path_scores", scored([0, -1, -2, -1, -3, np.nan])),
    (ArgumentError, "path_scores", scored([0, -1, -0.5, -1, -3, -3])),
    (ArgumentError, "path_scores", scored([-1.0, -1, -2, -1, -3, -2])),
    (ArgumentError, "path_scores", scored(np.zeros(3), PADDED)),
    (DTypeError, "path_scores", scored(np.zeros(3, np.float32), PADDED)),
    *(
        (ShapeError, name, replace(t6(), **{name: np.repeat(np.atleast_1d(getattr(scored(np.zeros(6)), name)), 2, 0)}))
        for name in ("parents", "depths", "path_scores", "visibility_bits", "num_nodes")
    ),
    (ArgumentError, "page_table", pages([3, 5, 7], [2, 5, 0])),  # page 5 is partly beyond request 0's context
    (ArgumentError, "page_table", pages([3, 5, 7], [2, 9, 7])),
    (ArgumentError, "page_table", pages([3, 5, 5], [2, 9, 0])),
    (ArgumentError, "page_table", pages([3, -1, 7], [2, 9, 0])),
    *((ArgumentError, "page_table", pages([3, 5, page], [2, 9, 0])) for page in (10, -2, 2**30)),
    (ArgumentError, "context_lens", cache_case(context_lens=int32(5, 13))),
    (ArgumentError, "context_lens", cache_case(context_lens=int32(-1, 9))),
    (ArgumentError, "context_lens", cache_case(max_context=8)),
    (ShapeError, "context_lens", cache_case(context_lens=int32(5))),
    (ShapeError, "context_lens", cache_case(page_table=int32(1, 2))),
    (DTypeError, "kpe", cache_case(kpe=np.ones((10, 4, 2), np.float16))),
    (ShapeError, "kpe", cache_case(kpe=np.ones((10, 5, 2), np.float32))),
    (ShapeError, "kpe", cache_case(kpe=np.ones((9, 4, 2), np.float32))),
    (DTypeError, "ckv", cache_case(ckv=np.ones((10, 4, 8), np.int32))),
    (LayoutError, "ckv", cache_case(ckv=np.ones((10, 4, 16), np.float32)[..., ::2])),
    (ArgumentError, "token_ids", table(token_ids=[[4, 2, 3], [0, 1, 2]])),
    (ArgumentError, "logits", table(token_ids=[[4, 2, -1], [1, 0, 2]])),  # a tie goes by the id
    (ArgumentError, "token_ids", table(token_ids=[[4, 2, -1], [0, -1, 2]])),
    (ArgumentError, "token_ids", table(token_ids=[[4, 2, -2], [0, 1, 2]])),
    *((ArgumentError, "logits", table(logits=[row, [1, 1, 0.5]])) for row in ODD_ROWS),
    (ArgumentError, "lse", table(lse=[2.5, np.inf])),
    (DTypeError, "lse", candidates_case(lse=np.array([2.5, 2.0]))),
    (ShapeError, "lse", table(lse=[2.5])),
    (DTypeError, "logits", candidates_case(logits=np.zeros((2, 3), np.float16))),
    (ShapeError, "logits", table(token_ids=np.zeros((2, 4)))),
    (ArgumentError, "accepted", result_case(num_accepted=(1, -1))),
    (ArgumentError, "accepted", result_case(num_accepted=(3, -1))),
    (ArgumentError, "num_accepted", result_case(num_accepted=(4, -1))),
    (ArgumentError, "num_accepted", result_case(num_accepted=(2, -2))),
    (ArgumentError, "accepted", result_case(num_accepted=(2, 0))),
    (ArgumentError, "accepted", result_case(((1, 2, 3, -1), (-1,) * 4))),
    (ArgumentError, "accepted", result_case(((0, 3, 1, -1), (-1,) * 4))),
    (ArgumentError, "accepted", result_case(((0, 2, 3, 4), (-1,) * 4), (3, -1))),
)
def test_validate_rejects(container):
    container.validate()


@pytest.mark.parametrize("container", [t6(), cache_case(), candidates_case(), table(), result_case()])
def test_validate_takes_what_the_rejected_ones_were_made_of(container):
    assert container.validate() is container


# ---- how containers print ----


def test_containers_are_frozen_and_compare_by_identity():
    tree = t6()
    with pytest.raises(FrozenInstanceError):
        tree.token_ids = tree.parents
    assert tree == tree
    assert tree != t6()
    assert len({tree, t6()}) == 2


def test_containers_print_their_sizes():
    assert repr(t6()) == "DraftTree(num_nodes=6, depth=2)"
    assert repr(t6().with_batch()) == "DraftTree(batch=1, capacity=6)"
    assert repr(candidates_case()) == "Candidates(draft_len=2, per_depth=3)"
    assert repr(Visibility.from_dense(np.ones((2, 5, 5), bool))) == "Visibility(batch=2, capacity=5)"
    assert repr(cache_case()) == "PagedKV(batch=2, num_pages=10, page_size=4, head_dim_ckv=8, head_dim_kpe=2, float32)"
    assert repr(result_case().without_batch()) == "AcceptResult(accepted=[0, 1, 3], num_accepted=2, bonus_token=7)"
    assert repr(result_case()) == "AcceptResult(shape=(2, 4))"
    assert repr(DraftTree.from_parents([-1, -1], [-1, -1])) == "DraftTree(num_nodes=0, depth=0)"
