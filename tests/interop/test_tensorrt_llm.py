"""TensorRT-LLM's packed words: round trips, T6 by hand, strides of the buffer, and every rejection."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import Visibility
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from ddtree_cupy.interop import from_tensorrt_llm, from_tensorrt_llm_mask, to_tensorrt_llm, to_tensorrt_llm_mask
from ddtree_cupy.testing import assert_identical
from ddtree_cupy.testing.strategies import draft_trees, visibilities
from tests.interop.cases import DEPTHS, PARENTS, SEES, T6, TOKENS, WORDS, assert_same_masks, batch_of, batched, ints
from tests.refusals import rejects

OFFSETS, LENGTHS, MASK = (
    "spec_decoding_position_offsets",
    "spec_decoding_generation_lengths",
    "spec_decoding_packed_mask",
)


@given(visibilities(min_batch=0), st.integers(0, 70), st.integers(0, 2), st.booleans())
def test_tensorrt_llm_mask_round_trip(visibility, more_nodes, more_words, ragged):
    most = max(1, int(batched(visibility).num_nodes.max(initial=0)))
    rows = most + more_nodes
    words = (rows + 31) // 32 + more_words
    mask, lens = to_tensorrt_llm_mask(visibility, max_nodes=rows, words=words, ragged=ragged)
    assert mask.dtype == lens.dtype == np.int32
    assert mask.shape == ((lens.sum(), words) if ragged else (len(lens), rows, words))
    assert_same_masks(from_tensorrt_llm_mask(mask, lens), visibility)


@given(visibilities(min_batch=0), st.booleans())
def test_words_match_bits_one_by_one(visibility, ragged):
    mask, lens = to_tensorrt_llm_mask(visibility, ragged=ragged)
    dense, row = batched(visibility).to_dense(), 0
    for b, count in enumerate(lens.tolist()):
        for i in range(count):
            words = mask[row] if ragged else mask[b, i]
            bits = [bool(int(words[j // 32]) >> (j % 32) & 1) for j in range(dense.shape[1])]
            assert bits == dense[b, i].tolist()
            row += 1


@given(draft_trees(min_batch=0))
def test_tensorrt_llm_round_trip(tree):
    arrays = to_tensorrt_llm(tree, max_nodes=tree.token_ids.shape[-1] + 3)
    assert_identical(from_tensorrt_llm(arrays, batched(tree).token_ids), batched(tree))


def test_to_tensorrt_llm_of_t6():
    arrays = to_tensorrt_llm(T6, max_nodes=8)
    assert arrays[MASK].tolist() == [[[word] for word in [*WORDS, 0, 0]]]
    assert arrays[OFFSETS].tolist() == [[*DEPTHS, 0, 0]]
    assert arrays[LENGTHS].tolist() == [6]
    assert {array.dtype.name for array in arrays.values()} == {"int32"}


def test_offsets_of_padding_inside_the_tree_are_0():
    tree = batch_of((TOKENS, PARENTS), ([7, 1], [-1, 0]), ([], []))
    assert to_tensorrt_llm(tree)[OFFSETS].tolist() == [DEPTHS, [0, 1, 0, 0, 0, 0], [0] * 6]
    short = batch_of(([7, 1], [-1, 0]), ([7], [-1]))
    assert to_tensorrt_llm(short, max_nodes=4)[OFFSETS].tolist() == [[0, 1, 0, 0], [0, 0, 0, 0]]


def chain(count):
    return list(range(count)), list(range(-1, count - 1))


def test_rows_have_the_stride_of_the_buffer():
    """Two requests of 40 nodes in a buffer for 64: row stride 2 words, request stride 128; 33 nodes take 2 or 3."""
    mask, _ = to_tensorrt_llm_mask(batch_of(chain(40), chain(40)), max_nodes=64)
    assert [stride // 4 for stride in mask.strides] == [128, 2, 1]
    assert mask[1, 35].tolist() == [-1, 0b1111]
    for size, words in ((33, 2), (64, 2), (65, 3), (96, 3)):
        assert to_tensorrt_llm_mask(batch_of(chain(33)), max_nodes=size)[0].shape == (1, size, words)


def test_bit_31_makes_a_word_negative_and_unsigned_words_are_read_too():
    mask, lens = to_tensorrt_llm_mask(batch_of(chain(32)))
    assert mask[0, 30:].tolist() == [[2**31 - 1], [-1]]
    assert_same_masks(from_tensorrt_llm_mask(mask.view(np.uint32), lens), batch_of(chain(32)))


def test_ragged_rows_leave_padding_and_inactive_requests_out():
    tree = batch_of(chain(2), ([], []), (TOKENS, PARENTS))
    mask, lens = to_tensorrt_llm_mask(tree, ragged=True)
    assert lens.tolist() == [2, 0, 6]
    assert mask.ravel().tolist() == [1, 3, *WORDS]


def test_stale_rows_and_bits_beyond_the_length_are_ignored():
    mask, lens = to_tensorrt_llm_mask(T6, max_nodes=9)
    mask[0, 6:] = -1
    mask[0, :6] |= -1 << 6
    assert_same_masks(from_tensorrt_llm_mask(mask, lens), T6)


@rejects(
    (ArgumentError, "`max_nodes` is 5, expected an integer at least 6", lambda: to_tensorrt_llm_mask(T6, max_nodes=5)),
    (ArgumentError, "`words` is 1", lambda: to_tensorrt_llm_mask(T6, max_nodes=33, words=1)),
    (DTypeError, "int32 or uint32", lambda: from_tensorrt_llm_mask(np.zeros((1, 6, 1), np.int64), ints([6]))),
    (ArgumentError, "at most 6 nodes", lambda: from_tensorrt_llm_mask(np.zeros((1, 6, 1), np.int32), ints([7]))),
    (ArgumentError, "at least 0", lambda: from_tensorrt_llm_mask(np.zeros((1, 6, 1), np.int32), ints([-1]))),
    (ShapeError, "expected", lambda: from_tensorrt_llm_mask(np.zeros((2, 6, 1), np.int32), ints([6]))),
    (ShapeError, "at least 2 for 33 nodes", lambda: from_tensorrt_llm_mask(np.zeros((1, 40, 1), np.int32), ints([33]))),
    (ShapeError, r"5 rows, expected 6", lambda: from_tensorrt_llm_mask(np.zeros((5, 1), np.int32), ints([2, 4]))),
    (ArgumentError, "capacity", lambda: from_tensorrt_llm_mask(np.zeros((6, 1), np.int32), ints([6]), capacity=5)),
    (ShapeError, "expected", lambda: from_tensorrt_llm_mask(np.zeros(6, np.int32), ints([6]))),
    (DTypeError, "NumPy", lambda: from_tensorrt_llm_mask([[1]], ints([1]))),
)
def test_tensorrt_llm_masks_reject(call):
    call()


NO_TREE, _ = to_tensorrt_llm_mask(Visibility.from_dense(SEES | np.eye(6, k=2, dtype=bool)))
CHAIN_OFFSETS = np.arange(6, dtype=np.int32)[None]


@rejects(
    (ArgumentError, "node 3 of request 0 is 3, expected its depth 1", {OFFSETS: CHAIN_OFFSETS}, TOKENS),
    (ShapeError, "expected", {OFFSETS: ints([[0, 1]])}, TOKENS),
    (ShapeError, r"`token_ids` is \(1, 4\), expected at least 5 tokens", {LENGTHS: ints([5])}, TOKENS[:4]),
    (ArgumentError, "distinct tokens", {}, [7, 10, 20, 10, 21, 20]),
    (UnsupportedError, "no tree", {MASK: NO_TREE}, TOKENS),
    (ShapeError, "expected", {MASK: ints(WORDS).reshape(6, 1)}, TOKENS),
)
def test_from_tensorrt_llm_rejects(changes, tokens):
    from_tensorrt_llm(to_tensorrt_llm(T6) | changes, ints([tokens]))


def test_from_tensorrt_llm_rejects_missing_arrays():
    with pytest.raises(ArgumentError, match="lacks spec_decoding_packed_mask, spec_decoding_position_offsets"):
        from_tensorrt_llm({LENGTHS: 0}, ints([TOKENS]))
