"""FlashInfer's custom masks: round trips, T6 by hand, byte offsets, and every rejection."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import Visibility
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from ddtree_cupy.interop import from_flashinfer_mask, to_flashinfer_mask, tree_from_visibility
from ddtree_cupy.testing import assert_identical
from ddtree_cupy.testing.strategies import draft_trees, visibilities
from tests.interop.cases import PARENTS, SEES, T6, TOKENS, assert_same_masks, batch_of, batched, ints, with_contexts
from tests.refusals import rejects


@given(with_contexts(visibilities(min_batch=0)), st.booleans())
def test_flashinfer_mask_round_trip(drawn, packed):
    visibility, past = drawn
    mask, mask_indptr, qo_indptr, kv_lens = to_flashinfer_mask(visibility, past, packed=packed)
    assert len(mask) == mask_indptr[-1]
    assert all(array.dtype == np.int32 for array in (mask_indptr, qo_indptr, kv_lens))
    found = from_flashinfer_mask(mask, qo_indptr, kv_lens, mask_indptr=mask_indptr)
    assert_same_masks(found, visibility)
    assert (kv_lens - found.num_nodes).tolist() == past.tolist()


@given(with_contexts(draft_trees(min_batch=0)))
def test_flashinfer_mask_makes_the_same_tree_again(drawn):
    tree, past = drawn
    size = tree.token_ids.shape[-1]
    mask, _, qo_indptr, kv_lens = to_flashinfer_mask(tree, past)
    found = from_flashinfer_mask(mask, qo_indptr, kv_lens, capacity=size)
    assert_identical(tree_from_visibility(found, batched(tree).token_ids), batched(tree))


@given(with_contexts(visibilities(min_batch=0)))
def test_packed_bits_match_cells_one_by_one(drawn):
    """Bit k of a request is cell k: byte offset + k // 8, position k % 8, rows not aligned."""
    visibility, past = drawn
    found = to_flashinfer_mask(visibility, past, packed=True)
    dense = batched(visibility).to_dense()
    for b, context in enumerate(past.tolist()):
        count = int(found.qo_indptr[b + 1] - found.qo_indptr[b])
        width = context + count
        for row in range(count):
            for key in range(width):
                k = row * width + key
                bit = found.custom_mask[found.mask_indptr[b] + k // 8] >> (k % 8) & 1
                assert bit == (key < context or dense[b, row, key - context])


def test_flashinfer_mask_of_t6():
    """Two requests with 9 and 11 keys: offsets [0, 7, 16] in bytes, [0, 54, 120] in cells."""
    tree = batch_of((TOKENS, PARENTS), (TOKENS, PARENTS))
    flat = to_flashinfer_mask(tree, [3, 5])
    assert flat.mask_indptr.tolist() == [0, 54, 120]
    assert flat.qo_indptr.tolist() == [0, 6, 12]
    assert flat.kv_lens.tolist() == [9, 11]
    np.testing.assert_array_equal(flat.custom_mask[:54].reshape(6, 9), np.hstack([np.ones((6, 3), bool), SEES]))
    packed = to_flashinfer_mask(tree, [3, 5], packed=True)
    assert packed.mask_indptr.tolist() == [0, 7, 16]
    assert packed.custom_mask.dtype == np.uint8
    # rows of 9 bits, bit 0 first: 111100000 111110000 111111000 111100100 111110010 111100101
    assert packed.custom_mask[:7].tolist() == [0x0F, 0x3E, 0xFC, 0x78, 0xF2, 0xE9, 0x29]


def test_requests_of_different_size_and_an_inactive_one():
    """A padded [B, N, N] mask is not what FlashInfer reads: each request has its own rows, an inactive one none."""
    chain = ([7, 1, 2], [-1, 0, 1])
    tree = batch_of((TOKENS, PARENTS), ([], []), chain)
    found = to_flashinfer_mask(tree, [3, 5, 0], packed=True)
    assert found.qo_indptr.tolist() == [0, 6, 6, 9]
    assert found.kv_lens.tolist() == [9, 5, 3]
    assert found.mask_indptr.tolist() == [0, 7, 7, 9]
    assert found.custom_mask[7:].tolist() == [0b11011001, 0b1]


def test_unused_bits_of_the_last_byte_are_ignored():
    mask, mask_indptr, qo_indptr, kv_lens = to_flashinfer_mask(T6, 3, packed=True)
    mask[-1] |= 0b11000000
    assert_same_masks(from_flashinfer_mask(mask, qo_indptr, kv_lens, mask_indptr=mask_indptr), T6)


def test_rows_that_see_nothing_and_an_empty_batch_are_kept():
    blind = Visibility.from_dense(np.zeros((2, 2), bool))
    mask, indptr, qo_indptr, kv_lens = to_flashinfer_mask(blind, 0)
    assert mask.tolist() == [False] * 4
    assert_same_masks(from_flashinfer_mask(mask, qo_indptr, kv_lens, mask_indptr=indptr), blind)
    nobody = Visibility.from_dense(np.zeros((0, 2, 2), bool))
    mask, indptr, qo_indptr, kv_lens = to_flashinfer_mask(nobody, ints([]))
    assert (mask.size, indptr.tolist(), qo_indptr.tolist(), kv_lens.tolist()) == (0, [0], [0], [])
    assert_same_masks(from_flashinfer_mask(mask, qo_indptr, kv_lens), nobody)


@rejects(
    (UnsupportedError, r"the mask has 6442450980 cells.*int32", 2**30, False),
    (UnsupportedError, r"bytes.*int32", 2**33, True),
    (UnsupportedError, "int32", 2**61, True),
)
def test_to_flashinfer_mask_rejects_offsets_beyond_int32(context_len, packed):
    """Before it allocates: 6 rows of 2**30 cells."""
    to_flashinfer_mask(T6, context_len, packed=packed)


FLAT = to_flashinfer_mask(T6, 3)
PACKED = to_flashinfer_mask(T6, 3, packed=True)
HIDDEN = FLAT.custom_mask & (np.arange(54) != 9 * 5 + 2)
WIDER = {"qo_indptr": ints([0, 10]), "kv_lens": ints([20]), "mask_indptr": None}  # flashinfer 3176, with 10 x 15 cells


@rejects(
    (ArgumentError, "needs `mask_indptr`, its offsets in bytes", PACKED, {"mask_indptr": None}),
    (ArgumentError, "count cells, a packed mask has them in bytes", PACKED, {"mask_indptr": ints([0, 54])}),
    (ArgumentError, r"is \[0, 8\], expected \[0, 7\]", PACKED, {"mask_indptr": ints([0, 8])}),
    (ShapeError, "6 bytes, expected 7", PACKED, {"custom_mask": PACKED.custom_mask[:6]}),
    (ArgumentError, r"expected \[0, 54\]", FLAT, {"mask_indptr": ints([0, 7])}),
    (ArgumentError, "rise from 0", FLAT, {"mask_indptr": ints([1, 54])}),
    (ArgumentError, "rise from 0", FLAT, {"qo_indptr": ints([0, -6])}),
    (ShapeError, "expected", FLAT, {"qo_indptr": ints([0, 3, 6])}),
    (ShapeError, "53 cells, expected 54", FLAT, {"custom_mask": FLAT.custom_mask[:-1], "mask_indptr": None}),
    (ShapeError, "expected", FLAT, {"custom_mask": FLAT.custom_mask.reshape(6, 9)}),
    (DTypeError, "bool or uint8", FLAT, {"custom_mask": FLAT.custom_mask.astype(np.int32)}),
    (DTypeError, "NumPy", FLAT, {"custom_mask": FLAT.custom_mask.tolist()}),
    (UnsupportedError, "6 rows but 5 keys", FLAT, {"kv_lens": ints([5])}),
    (ArgumentError, "at least 0", FLAT, {"kv_lens": ints([-1])}),
    (DTypeError, "int32 or int64", FLAT, {"kv_lens": ints([9.0], np.float64)}),
    (ArgumentError, "capacity", FLAT, {"capacity": 5}),
    (ShapeError, r"`custom_mask` is \(10, 15\)", FLAT, WIDER | {"custom_mask": np.ones((10, 15), bool)}),
    (ShapeError, "150 cells, expected 200", FLAT, WIDER | {"custom_mask": np.ones(150, bool)}),
    (UnsupportedError, "row 5 of request 0 hides context key 2", FLAT, {"custom_mask": HIDDEN}),
)
def test_from_flashinfer_mask_rejects(base, changes):
    from_flashinfer_mask(**base._asdict() | changes)
