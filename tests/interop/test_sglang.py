"""SGLang's verification inputs: round trips, T6 by hand, its public faults, and every rejection."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import Visibility
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from ddtree_cupy.interop import TreeMaskMode, from_sglang, from_sglang_mask, to_sglang, to_sglang_mask
from ddtree_cupy.testing import assert_identical
from ddtree_cupy.testing.strategies import draft_trees, visibilities
from tests.interop.cases import (
    PARENTS,
    SEES,
    T6,
    TOKENS,
    WORDS,
    assert_same_masks,
    batch_of,
    batched,
    ints,
    with_contexts,
)
from tests.refusals import rejects

MODES = list(TreeMaskMode)


@given(
    with_contexts(draft_trees(min_batch=0, inactive=False)),
    st.sampled_from(["retrieve", "retrive"]),
    st.sampled_from(MODES),
)
def test_sglang_round_trip(drawn, spelling, mode):
    tree, past = drawn
    if mode is TreeMaskMode.QLEN_ONLY_BITPACKING and tree.token_ids.shape[-1] > 32:
        mode = TreeMaskMode.QLEN_ONLY
    arrays = to_sglang(tree, past, mode=mode, pad_token_id=0, spelling=spelling)
    found, context_lens = from_sglang(arrays, mode=mode)
    assert_identical(found, batched(tree))
    assert context_lens.tolist() == past.tolist()
    assert all(array.dtype == np.int64 for name, array in arrays.items() if name != "tree_mask")


@given(with_contexts(visibilities(min_batch=0)))
def test_sglang_masks_round_trip(drawn):
    visibility, past = drawn
    size, counts = visibility.visibility_bits.shape[-2], batched(visibility).num_nodes
    for mode in MODES if size <= 32 else MODES[:2]:
        mask = to_sglang_mask(visibility, past, mode=mode)
        found = from_sglang_mask(mask, draft_token_num=size, context_lens=past, num_nodes=counts, mode=mode)
        assert_same_masks(found, visibility)


@given(with_contexts(visibilities(max_nodes=33)))
def test_full_mask_matches_cells_written_one_by_one(drawn):
    visibility, past = drawn
    dense, counts = batched(visibility).to_dense(), batched(visibility).num_nodes.tolist()
    cells = []
    for b, (context, count) in enumerate(zip(past.tolist(), counts, strict=True)):
        for row in range(dense.shape[1]):
            cells += [True] * context
            cells += [bool(dense[b, row, j]) or (row == j >= count) for j in range(dense.shape[1])]
    assert to_sglang_mask(visibility, past).tolist() == cells


def test_to_sglang_of_t6():
    arrays = to_sglang(T6, 3)
    assert arrays["draft_token"].tolist() == TOKENS
    assert arrays["positions"].tolist() == [3, 4, 5, 4, 5, 5]
    assert arrays["retrieve_index"].tolist() == [[0, 1, 2, 3, 4, 5]]
    assert arrays["retrieve_next_token"].tolist() == [[1, 2, -1, 5, -1, -1]]
    assert arrays["retrieve_next_sibling"].tolist() == [[-1, 3, 4, -1, -1, -1]]
    full = np.hstack([np.ones((6, 3), bool), SEES])
    np.testing.assert_array_equal(arrays["tree_mask"].reshape(6, 9), full)
    np.testing.assert_array_equal(to_sglang(T6, 3, mode=1)["tree_mask"].reshape(6, 6), SEES)
    packed = to_sglang(T6, 3, mode="QLEN_ONLY_BITPACKING")["tree_mask"]
    assert packed.dtype == np.uint8
    assert packed.tolist() == WORDS


def test_retrieve_index_counts_through_the_batch_and_links_start_anew():
    """retrieve_index is a flat row, the links are nodes of their own request."""
    arrays = to_sglang(batch_of((TOKENS, PARENTS), (TOKENS, PARENTS)), [3, 9])
    assert arrays["retrieve_index"].tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert arrays["retrieve_next_token"].tolist() == 2 * [[1, 2, -1, 5, -1, -1]]
    assert arrays["positions"].tolist() == [3, 4, 5, 4, 5, 5, 9, 10, 11, 10, 11, 11]


def test_token_id_0_is_a_node_and_padding_is_what_no_link_reaches():
    tree = batch_of((TOKENS, PARENTS), ([0, 0], [-1, 0]))
    arrays = to_sglang(tree, [3, 5], pad_token_id=0)
    assert arrays["draft_token"].tolist() == [*TOKENS, 0, 0, 0, 0, 0, 0]
    assert arrays["positions"].tolist() == [3, 4, 5, 4, 5, 5, 5, 6, 5, 5, 5, 5]
    assert from_sglang(arrays)[0].num_nodes.tolist() == [6, 2]


@pytest.mark.parametrize(
    ("size", "dtype"), [(1, "uint8"), (8, "uint8"), (9, "uint16"), (16, "uint16"), (17, "uint32"), (32, "uint32")]
)
def test_packed_words_widen_with_the_tree(size, dtype):
    chain = batch_of((list(range(size)), list(range(-1, size - 1))))
    mask = to_sglang_mask(chain, mode=2)
    assert mask.dtype == dtype
    assert mask.tolist() == [2 ** (i + 1) - 1 for i in range(size)]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("FULL_MASK", ["1100", "1110", "1001"]), ("QLEN_ONLY", ["100", "110", "001"]), (2, [1, 3, 4])],
)
def test_rows_of_padding_see_the_context_and_themselves(mode, expected):
    """Two nodes of three, one key of context."""
    mask = to_sglang_mask(batch_of(([7, 1], [-1, 0]), ([7, 1, 2], [-1, 0, 1])), [1, 1], mode=mode)
    first = mask[: len(mask) // 2].astype(int).tolist()
    assert first == [int(cell) for row in expected for cell in str(row)]


def test_masks_of_a_padded_batch_are_told_apart_by_size():
    """sglang 13740: three requests padded to four; the cells of one side must be those of the other."""
    visibility = Visibility.from_dense(np.broadcast_to(SEES, (4, 6, 6)).copy(), ints([6, 6, 6, 0]))
    mask = to_sglang_mask(visibility, [3, 5, 2, 0])
    assert mask.size == 6 * (9 + 11 + 8 + 6)
    with pytest.raises(ShapeError, match=r"has 204 cells, expected 168 for 3 requests of 6 rows in FULL_MASK"):
        from_sglang_mask(mask, draft_token_num=6, context_lens=[3, 5, 2])


def test_a_batch_in_a_reused_buffer_equals_a_fresh_one_once_cut():
    """sglang 37553: the tail of the buffer belongs to the earlier, larger batch."""
    buffer = np.ones(4 * 36, bool)
    buffer[:36] = SEES.ravel()
    with pytest.raises(ShapeError, match="cut a reused buffer"):
        from_sglang_mask(buffer, draft_token_num=6, context_lens=[3], mode=1)
    assert_same_masks(from_sglang_mask(buffer[:36], draft_token_num=6, mode=1), T6)


CHAIN = batch_of((list(range(33)), list(range(-1, 32))))  # two words a row here
WITH_LONE, WITH_NONE = batch_of((TOKENS, PARENTS), ([7], [-1])), batch_of((TOKENS, PARENTS), ([], []))
HIDDEN = to_sglang_mask(T6, 3) & (np.arange(54) != 9 * 4 + 1)
TOO_WIDE = "at most 32 bits per row, this tree has 33 nodes; use QLEN_ONLY"


@rejects(
    (UnsupportedError, TOO_WIDE, lambda: to_sglang_mask(CHAIN, mode=2)),
    (UnsupportedError, TOO_WIDE, lambda: to_sglang(CHAIN, 0, mode=2)),
    (UnsupportedError, TOO_WIDE, lambda: from_sglang_mask(np.zeros(33, np.uint32), draft_token_num=33, mode=2)),
    (
        UnsupportedError,
        "row 4 of request 0 hides context key 1.*windows",
        lambda: from_sglang_mask(HIDDEN, draft_token_num=6, context_lens=3),
    ),
    (UnsupportedError, "request 1 has 1 of 6 nodes.*pad_token_id", lambda: to_sglang(WITH_LONE, [1, 1])),
    (UnsupportedError, "request 1 is inactive", lambda: to_sglang(WITH_NONE, [1, 1], pad_token_id=0)),
    (ArgumentError, "expected one of 'retrieve', 'retrive'", lambda: to_sglang(T6, 3, spelling="retreive")),
    (ArgumentError, "FULL_MASK=0, QLEN_ONLY=1, QLEN_ONLY_BITPACKING=2", lambda: to_sglang(T6, 3, mode="FULL")),
    (ArgumentError, "`mode` is 3", lambda: to_sglang(T6, 3, mode=3)),
    (ShapeError, r"`context_lens` is \(2,\), expected \(1,\)", lambda: to_sglang(T6, [3, 4])),
    (ArgumentError, "lengths of at least 0", lambda: to_sglang(T6, -1)),
    (DTypeError, "expected integers", lambda: to_sglang(T6, 3.0)),
    (ArgumentError, "pad_token_id", lambda: to_sglang(T6, 3, pad_token_id=-1)),
    (DTypeError, "`tree` is str, expected DraftTree", lambda: to_sglang("tree", 3)),
    (ArgumentError, "needs `context_lens`", lambda: to_sglang_mask(T6)),
    (ArgumentError, "needs `context_lens`", lambda: from_sglang_mask(SEES.ravel(), draft_token_num=6)),
    (ShapeError, "expected", lambda: from_sglang_mask(SEES, draft_token_num=6, mode=1)),
    (DTypeError, "expected bool", lambda: from_sglang_mask(SEES.ravel().astype(np.uint8), draft_token_num=6, mode=1)),
    (DTypeError, "expected uint8", lambda: from_sglang_mask(ints(WORDS, np.uint32), draft_token_num=6, mode=2)),
    (ShapeError, "35 cells, expected 0", lambda: from_sglang_mask(SEES.ravel()[:-1], draft_token_num=6, mode=1)),
    (ArgumentError, "at most 6", lambda: from_sglang_mask(SEES.ravel(), draft_token_num=6, num_nodes=[7], mode=1)),
    (ArgumentError, "draft_token_num", lambda: from_sglang_mask(SEES.ravel(), draft_token_num=0, mode=1)),
)
def test_sglang_rejects(call):
    call()


def changed(**changes):
    """Return T6's arrays with entries replaced: name=(index, value), or name=None to drop it."""
    arrays = to_sglang(T6, 3)
    for name, change in changes.items():
        if change is None:
            del arrays[name]
        else:
            arrays[name] = arrays[name].copy()
            arrays[name][change[0]] = change[1]
    return arrays


NO_ROWS = {name: np.zeros((1, 0), np.int64) for name in to_sglang(T6, 3) if name.startswith("retrieve")}
NO_ROWS |= {"draft_token": ints([], np.int64), "positions": ints([], np.int64)}


@rejects(
    (ArgumentError, "D is 0", NO_ROWS),
    (ArgumentError, "one of 'retrieve_index', 'retrive_index' in `arrays`, got none", changed(retrieve_index=None)),
    (ArgumentError, "got all of them", changed() | {"retrive_index": 0}),
    (ArgumentError, "'positions'", changed(positions=None)),
    (UnsupportedError, "links to child 6, expected 0 < child < 6", changed(retrieve_next_token=((0, 0), 6))),
    (UnsupportedError, "links to child -2", changed(retrieve_next_token=((0, 0), -2))),
    (UnsupportedError, "expected 3 < child < 6: a node comes after", changed(retrieve_next_token=((0, 3), 1))),
    (ArgumentError, "node 2 .* of nodes 1 and 1, or linked twice", changed(retrieve_next_sibling=((0, 4), 2))),
    (ArgumentError, "node 5 of request 0 is a child of nodes 1 and 3", changed(retrieve_next_sibling=((0, 4), 5))),
    (ArgumentError, "the root of request 0 has the sibling 1", changed(retrieve_next_sibling=((0, 0), 1))),
    (UnsupportedError, "no link leads to node 3.*not selected", changed(retrieve_next_sibling=((0, 1), -1))),
    (ArgumentError, "node 1 of request 0 has links, though none", changed(retrieve_next_token=((0, 0), -1))),
    (UnsupportedError, r"`retrieve_index`\[0, 2\] is 4, expected 2", changed(retrieve_index=((0, 2), 4))),
    (ArgumentError, "node 3 of request 0 is 6, expected 4: the root's 3 plus the depth", changed(positions=(3, 6))),
    (ArgumentError, "lengths of at least 0", changed(positions=(0, -1))),
    (ArgumentError, "distinct tokens", changed(draft_token=(3, 10))),
    (ArgumentError, "token below 0", changed(draft_token=(3, -1))),
    (UnsupportedError, "outside int32; token ids are int32 here", changed(draft_token=(3, 2**31))),
    (ArgumentError, "the mask of request 0 shows node 1 in row 3", changed(tree_mask=(9 * 3 + 3 + 1, True))),
    (ArgumentError, "the mask of request 0 hides node 0 in row 3", changed(tree_mask=(9 * 3 + 3 + 0, False))),
    (ShapeError, "expected", changed() | {"draft_token": ints(TOKENS[:5], np.int64)}),
    (DTypeError, "int32 or int64", changed() | {"draft_token": ints(TOKENS, np.float32)}),
    (ShapeError, "expected", changed() | {"retrieve_index": ints([], np.int64).reshape(1, 0)}),
)
def test_from_sglang_rejects(arrays):
    from_sglang(arrays)


def test_from_sglang_takes_the_names_of_eagle_verify_input():
    """The old spelling, custom_mask for tree_mask, and fields that are no arrays."""
    arrays = to_sglang(T6, 3, spelling="retrive")
    arrays["custom_mask"] = arrays.pop("tree_mask")
    found, context_lens = from_sglang(arrays | {"spec_steps": 2, "topk": 2})
    assert_identical(found, T6.with_batch())
    assert context_lens.tolist() == [3]
