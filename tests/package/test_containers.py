"""Containers: constructors, derived arrays, packing, `validate()`, and how they print."""

from dataclasses import FrozenInstanceError, fields, replace
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddtree_cupy import AcceptResult, Candidates, DraftTree, PagedKV, Visibility
from ddtree_cupy.errors import ArgumentError, DTypeError, LayoutError, ShapeError
from ddtree_cupy.testing import assert_identical, unchanged
from ddtree_cupy.testing.strategies import candidate_tables, draft_trees, paged_caches, seeds, visibilities
from tests.oracles import ancestors, dense_visibility, gather, packed_visibility
from tests.refusals import rejects

# The toy tree T6.
T6_TOKENS = [9, 10, 20, 11, 21, 20]
T6_PARENTS = [-1, 0, 1, 0, 1, 3]
INT32_MAX = 2**31 - 1


def t6():
    return DraftTree.from_parents(T6_TOKENS, T6_PARENTS)


def int32(*values):
    return np.array(values, np.int32)


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


def test_positions_of_t6_follow_depth_not_index():
    """Positions are context_len + depth: [3, 4, 5, 4, 5, 5], not 3..8; siblings 1 and 3 share position 4."""
    assert (3 + t6().depths).tolist() == [3, 4, 5, 4, 5, 5]


def test_position_of_the_root_is_the_context_length():
    assert t6().depths[0] == 0


def test_position_differs_from_the_slot():
    """Node 5 sits in cache slot context_len + 5 = 8 and rotates by position context_len + 2 = 5."""
    assert 3 + 5 == 8
    assert 3 + int(t6().depths[5]) == 5


def test_depths_follow_the_parents_when_all_children_hang_under_the_last():
    tree = DraftTree.from_parents([0, 1, 2, 3, 4, 5], [-1, 0, 1, 2, 2, 2])
    assert tree.depths.tolist() == [0, 1, 2, 3, 3, 3]


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
        assert_identical(batched.visibility_bits[b], packed_visibility(dense_visibility(parents, count)))


@given(tree=draft_trees())
def test_visibility_row_sum_is_depth_plus_one(tree):
    assert (tree.visibility.sum(axis=-1) == tree.depths + 1).all()


@given(tree=draft_trees())
def test_from_parents_is_identical_unbatched(tree):
    batched = tree if tree.is_batched else tree.with_batch()
    again = DraftTree.from_parents(batched.token_ids, batched.parents)
    assert_identical(again, batched)
    for b in range(len(batched.num_nodes)):
        one = DraftTree.from_parents(batched.token_ids[b], batched.parents[b])
        assert_identical(one.with_batch(), batched.map(lambda array, b=b: array[b : b + 1]))


def test_from_parents_takes_lists_and_wide_integers():
    assert_identical(DraftTree.from_parents(np.array(T6_TOKENS, np.int64), np.array(T6_PARENTS, np.int8)), t6())


def test_from_parents_marks_inactive_requests():
    tree = DraftTree.from_parents([T6_TOKENS[:3], [-1, -1, -1]], [T6_PARENTS[:3], [-1, -1, -1]])
    assert tree.num_nodes.tolist() == [3, 0]
    assert tree.depths[1].tolist() == [-1, -1, -1]
    assert not tree.visibility_bits[1].any()


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
    (DTypeError, "token_ids", [1, 2**70], [-1, 0]),
    (DTypeError, "token_ids", ["a", "b"], [-1, 0]),
    (DTypeError, "from_parents: `token_ids` is a masked array", np.ma.masked_array([1, 2]), [-1, 0]),
    (DTypeError, "from_parents: `parents` is a masked array", [1, 2], np.ma.masked_array([-1, 0])),
    (DTypeError, "from_parents: `token_ids` is a numpy.matrix", np.ones((1, 1), int).view(np.matrix), [[-1]]),
    (DTypeError, "from_parents: `token_ids` is NotOnHost.*on the host", NotOnHost(), [-1, 0]),
)
def test_from_parents_rejects(token_ids, parents):
    DraftTree.from_parents(token_ids, parents)


def test_from_parents_never_writes():
    tokens, parents = int32(*T6_TOKENS), int32(*T6_PARENTS)
    with unchanged(tokens=tokens, parents=parents):
        DraftTree.from_parents(tokens, parents)


def _changed(tree, name, index, value):
    array = getattr(tree, name).copy()
    array[index] = value
    return replace(tree, **{name: array})


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("token_ids", 3, 10),  # a sibling's token
        ("token_ids", 2, -1),
        ("parents", 2, 2),
        ("parents", 2, 0),
        ("parents", 0, 0),
        ("depths", 2, 1),
        ("depths", 0, 1),
        ("first_child", 0, 3),
        ("first_child", 5, 0),
        ("next_sibling", 1, 4),
        ("next_sibling", 0, 1),
        ("visibility_bits", (3, 0), 0b1111),
        ("visibility_bits", (0, 0), 0),
        ("num_nodes", (), 5),
        ("num_nodes", (), 7),
        ("num_nodes", (), -1),
    ],
)
def test_draft_tree_validate_rejects_one_wrong_entry(name, index, value):
    with pytest.raises(ArgumentError, match="DraftTree"):
        _changed(t6(), name, index, value).validate()


@pytest.mark.parametrize("scores", [[0, -1, -2, -1, -3, np.nan], [0, -1, -0.5, -1, -3, -3], [-1, -1, -2, -1, -3, -2]])
def test_draft_tree_validate_rejects_bad_scores(scores):
    with pytest.raises(ArgumentError, match="path_scores"):
        replace(t6(), path_scores=np.array(scores, np.float64)).validate()


def test_draft_tree_validate_rejects_finite_scores_in_padding():
    tree = DraftTree.from_parents([1, 2, -1], [-1, 0, -1])
    replace(tree, path_scores=np.array([0.0, -1.0, -np.inf])).validate()
    with pytest.raises(ArgumentError, match="path_scores"):
        replace(tree, path_scores=np.zeros(3)).validate()
    with pytest.raises(DTypeError, match="path_scores"):
        replace(tree, path_scores=np.zeros(3, np.float32)).validate()


@pytest.mark.parametrize("name", ["token_ids", "parents", "depths", "num_nodes", "status", "first_child"])
def test_draft_tree_validate_rejects_wide_integers(name):
    """An int64 array given to an `int*` kernel parameter would be read as half its data."""
    with pytest.raises(DTypeError, match=name):
        replace(t6(), **{name: getattr(t6(), name).astype(np.int64)}).validate()


@pytest.mark.parametrize("name", ["parents", "depths", "path_scores", "visibility_bits", "num_nodes"])
def test_draft_tree_validate_rejects_wrong_shapes(name):
    tree = replace(t6(), path_scores=np.zeros(6))
    with pytest.raises(ShapeError, match=name):
        replace(tree, **{name: np.repeat(np.atleast_1d(getattr(tree, name)), 2, axis=0)}).validate()


# ---- Visibility ----


@pytest.mark.parametrize(("size", "words"), [(1, 1), (31, 1), (32, 1), (33, 2), (64, 2), (65, 3)])
def test_from_dense_packs_into_whole_words(size, words):
    """33 nodes need two 32-bit words a row; the row stride follows the capacity, not the count."""
    found = Visibility.from_dense(np.eye(size, dtype=bool), np.int32(1))
    assert found.visibility_bits.shape == (size, words)


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


def test_visibility_of_a_later_node_is_its_own_path():
    """65 nodes, node 64 a child of the root: it sees the root and itself only."""
    tree = DraftTree.from_parents(range(65), [-1, *range(63), 0])
    assert np.flatnonzero(tree.visibility[64]).tolist() == [0, 64]


def test_visibility_of_t6_differs_from_causal():
    assert np.flatnonzero(t6().visibility[3]).tolist() == [0, 3]


def test_visibility_is_identical_in_a_smaller_batch():
    """A batch of four, then one request: the second result is the same as a fresh one."""
    four = DraftTree.from_parents([T6_TOKENS] * 4, [[-1, 0, 1, 2, 3, 4]] * 4)
    assert four.visibility.shape == (4, 6, 6)
    one = DraftTree.from_parents([T6_TOKENS], [T6_PARENTS])
    assert_identical(one.without_batch(), t6())


@pytest.mark.parametrize(
    ("visibility", "num_nodes", "error"),
    [
        (np.ones((10, 15), bool), None, ShapeError),
        (np.ones((2, 3, 4), bool), None, ShapeError),
        (np.ones(4, bool), None, ShapeError),
        (np.ones((2, 2), np.uint8), None, DTypeError),
        (np.ones((2, 2), np.float32), None, DTypeError),
        (np.ones((2, 2), bool), 3, ArgumentError),
        (np.ones((2, 2), bool), -1, ArgumentError),
        (np.ones((2, 2), bool), [1, 2], ShapeError),
        (np.ones((2, 2, 2), bool), 1, ShapeError),
        ([[True], [True, False]], None, ShapeError),
        (np.ma.masked_array(np.ones((2, 2), bool)), None, DTypeError),
        (np.ones((1, 2, 2), bool), [[1], 2], ShapeError),
    ],
)
def test_from_dense_rejects(visibility, num_nodes, error):
    with pytest.raises(error, match=r"visibility|num_nodes"):
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


def _cache(**changes):
    """Two requests of three 4-row pages, contexts 5 and 9, ten pages."""
    kv = PagedKV(
        ckv=np.ones((10, 4, 8), np.float32),
        kpe=np.ones((10, 4, 2), np.float32),
        page_table=np.array([[3, 5, 7], [2, 9, 0]], np.int32),
        context_lens=int32(5, 9),
    )
    return replace(kv, **changes)


@pytest.mark.parametrize(
    ("table", "legal"),
    [
        ([[3, 5, 7], [2, 9, 0]], True),
        ([[3, 5, -1], [2, 9, 0]], True),  # beyond the context nothing need be assigned
        ([[3, 5, 7], [3, 9, 0]], True),  # a full prefix page may be shared
        ([[3, 5, 7], [2, 5, 0]], False),  # page 5 is partly beyond request 0's context
        ([[3, 5, 7], [2, 9, 7]], False),
        ([[3, 5, 5], [2, 9, 0]], False),
        ([[3, 5, 10], [2, 9, 0]], False),
        ([[3, 5, -2], [2, 9, 0]], False),
        ([[3, -1, 7], [2, 9, 0]], False),
        ([[3, 5, 2**30], [2, 9, 0]], False),
    ],
)
def test_paged_kv_validate_judges_the_page_table(table, legal):
    kv = _cache(page_table=np.array(table, np.int32))
    if legal:
        assert kv.validate() is kv
    else:
        with pytest.raises(ArgumentError, match="page_table"):
            kv.validate()


@rejects(
    (ArgumentError, "context_lens", {"context_lens": int32(5, 13)}),
    (ArgumentError, "context_lens", {"context_lens": int32(-1, 9)}),
    (ArgumentError, "context_lens", {"max_context": 8}),
    (ShapeError, "context_lens", {"context_lens": int32(5)}),
    (DTypeError, "context_lens", {"context_lens": np.array([5, 9])}),
    (DTypeError, "page_table", {"page_table": np.zeros((2, 3), np.int64)}),
    (ShapeError, "context_lens", {"page_table": int32(1, 2)}),
    (DTypeError, "kpe", {"kpe": np.ones((10, 4, 2), np.float16)}),
    (ShapeError, "kpe", {"kpe": np.ones((10, 5, 2), np.float32)}),
    (ShapeError, "kpe", {"kpe": np.ones((9, 4, 2), np.float32)}),
    (DTypeError, "ckv", {"ckv": np.ones((10, 4, 8), np.int32)}),
    (LayoutError, "ckv", {"ckv": np.ones((10, 4, 16), np.float32)[..., ::2]}),
)
def test_paged_kv_validate_rejects(changes):
    _cache(**changes).validate()


def test_paged_kv_validate_takes_slices_of_one_buffer():
    pool = np.ones((10, 8, 24), np.float32)[:, ::2]
    _cache(ckv=pool[..., :16], kpe=pool[..., 16:]).validate()


@given(kv=paged_caches())
def test_paged_kv_with_batch_is_identical(kv):
    one = kv if not kv.is_batched else replace(kv, page_table=kv.page_table[0], context_lens=kv.context_lens[0, ...])
    again = one.with_batch().without_batch()
    assert_identical(again, one)
    assert np.shares_memory(again.ckv, one.ckv) or not one.ckv.size


# ---- Candidates and AcceptResult ----


def _candidates(**changes):
    return replace(
        Candidates(
            token_ids=np.array([[4, 2, -1], [0, 1, 2]], np.int32),
            logits=np.array([[2.0, 1.0, -np.inf], [1.0, 1.0, 0.5]], np.float32),
            lse=np.array([2.5, 2.0], np.float32),
        ),
        **changes,
    )


@rejects(
    (ArgumentError, "token_ids", {"token_ids": np.array([[4, 2, 3], [0, 1, 2]], np.int32)}),
    (ArgumentError, "logits", {"token_ids": np.array([[4, 2, -1], [1, 0, 2]], np.int32)}),
    (ArgumentError, "token_ids", {"token_ids": np.array([[4, 2, -1], [0, -1, 2]], np.int32)}),
    (ArgumentError, "token_ids", {"token_ids": np.array([[4, 2, -2], [0, 1, 2]], np.int32)}),
    (ArgumentError, "logits", {"logits": np.array([[1, 2, -np.inf], [1, 1, 0.5]], np.float32)}),
    (ArgumentError, "logits", {"logits": np.array([[2, np.nan, -np.inf], [1, 1, 0.5]], np.float32)}),
    (ArgumentError, "logits", {"logits": np.array([[np.inf, 1, -np.inf], [1, 1, 0.5]], np.float32)}),
    (ArgumentError, "lse", {"lse": np.array([2.5, np.inf], np.float32)}),
    (DTypeError, "lse", {"lse": np.array([2.5, 2.0])}),
    (ShapeError, "lse", {"lse": np.array([2.5], np.float32)}),
    (DTypeError, "logits", {"logits": np.zeros((2, 3), np.float16)}),
    (DTypeError, "token_ids", {"token_ids": np.zeros((2, 3), np.int64)}),
    (ShapeError, "logits", {"token_ids": np.zeros((2, 4), np.int32)}),
)
def test_candidates_validate_rejects(changes):
    _candidates().validate()
    _candidates(**changes).validate()


def _result(accepted=((0, 1, 3, -1), (-1, -1, -1, -1)), num_accepted=(2, -1), bonus=(7, -1)):
    return AcceptResult(np.array(accepted, np.int32), int32(*num_accepted), int32(*bonus))


@rejects(
    (ArgumentError, "accepted", {"num_accepted": (1, -1)}),
    (ArgumentError, "accepted", {"num_accepted": (3, -1)}),
    (ArgumentError, "num_accepted", {"num_accepted": (4, -1)}),
    (ArgumentError, "num_accepted", {"num_accepted": (2, -2)}),
    (ArgumentError, "accepted", {"num_accepted": (2, 0)}),
    (ArgumentError, "accepted", {"accepted": ((1, 2, 3, -1), (-1,) * 4)}),
    (ArgumentError, "accepted", {"accepted": ((0, 3, 1, -1), (-1,) * 4)}),
    (ArgumentError, "accepted", {"accepted": ((0, 2, 3, 4), (-1,) * 4), "num_accepted": (3, -1)}),
)
def test_accept_result_validate_rejects(changes):
    _result().validate()
    _result(**changes).validate()


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
    assert repr(_candidates()) == "Candidates(draft_len=2, per_depth=3)"
    assert repr(Visibility.from_dense(np.ones((2, 5, 5), bool))) == "Visibility(batch=2, capacity=5)"
    assert repr(_cache()) == "PagedKV(batch=2, num_pages=10, page_size=4, head_dim_ckv=8, head_dim_kpe=2, float32)"
    assert repr(_result().without_batch()) == "AcceptResult(accepted=[0, 1, 3], num_accepted=2, bonus_token=7)"
    assert repr(_result()) == "AcceptResult(shape=(2, 4))"
    assert repr(DraftTree.from_parents([-1, -1], [-1, -1])) == "DraftTree(num_nodes=0, depth=0)"


def test_draft_tree_draws_svg_up_to_64_nodes():
    drawing = t6()._repr_html_()
    assert drawing.startswith("<svg")
    assert drawing.count("<circle") == 6
    assert drawing.count("<path") == 5
    assert "node 5, token 20, depth 2" in drawing
    scored = replace(t6(), path_scores=np.log([1, 0.6, 0.3, 0.3, 0.24, 0.15]))
    assert "path score -0.511 nats" in scored._repr_html_()

    def chain(count):
        return DraftTree.from_parents(range(count), range(-1, count - 1))

    assert chain(64)._repr_html_().count("<circle") == 64
    assert chain(65)._repr_html_() is None
    assert t6().with_batch()._repr_html_() is None
    assert DraftTree.from_parents([-1], [-1])._repr_html_() is None
