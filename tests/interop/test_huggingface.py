"""Hugging Face 4D masks: round trips, T6 by hand, batches padded left and right, and every rejection."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import Visibility
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from ddtree_cupy.interop import from_huggingface, from_huggingface_mask, to_huggingface, to_huggingface_mask
from ddtree_cupy.testing import assert_identical
from ddtree_cupy.testing.strategies import draft_trees, visibilities
from tests.interop.cases import SEES, T6, TOKENS, assert_same_masks, batch_of, batched, ints, with_contexts
from tests.refusals import rejects

DTYPES = ["float32", "float16", "bfloat16", "float64", "bool"]
paddings = st.sampled_from(["left", "right"])


@given(
    with_contexts(visibilities(min_batch=0)),
    st.sampled_from(DTYPES),
    st.sampled_from(["min", "-inf"]),
    paddings,
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_huggingface_mask_round_trip(drawn, dtype, hidden, padding, more_past, more_keys):
    visibility, past = drawn
    past = past + 1  # a row that sees nothing cannot be represented; the context keeps every row from that
    start = int(past.max(initial=0)) + more_past
    width = start + visibility.visibility_bits.shape[-2] + more_keys
    options = {"context_padding": padding, "past_len": start}
    mask = to_huggingface_mask(visibility, past, dtype=dtype, hidden=hidden, key_len=width, **options)
    assert mask.dtype.name == dtype
    assert mask.shape[1::2] == (1, width)
    counts = batched(visibility).num_nodes
    assert_same_masks(from_huggingface_mask(mask, past, num_nodes=counts, **options), visibility)


@given(with_contexts(draft_trees(min_batch=0)), paddings)
def test_huggingface_round_trip(drawn, padding):
    tree, past = drawn
    arrays = to_huggingface(tree, past, pad_token_id=3, context_padding=padding)
    found = from_huggingface(arrays, past, num_nodes=batched(tree).num_nodes, context_padding=padding)
    assert_identical(found, batched(tree))


@given(with_contexts(draft_trees(min_batch=0)))
def test_no_row_of_the_mask_is_fully_hidden(drawn):
    """Padding too: NaN rows would spread."""
    tree, past = drawn
    mask = to_huggingface(tree, past, pad_token_id=0, hidden="-inf")["attention_mask"]
    assert (mask == 0).any(axis=-1).all()


def test_to_huggingface_of_t6():
    arrays = to_huggingface(T6, 3)
    lowest = np.finfo(np.float32).min
    expected = np.where(np.hstack([np.ones((6, 3), bool), SEES]), np.float32(0), lowest)
    np.testing.assert_array_equal(arrays["attention_mask"], expected[None, None])
    assert arrays["input_ids"].tolist() == [TOKENS]
    assert arrays["position_ids"].tolist() == [[3, 4, 5, 4, 5, 5]]
    assert all(arrays[name].dtype == np.int64 for name in ("input_ids", "position_ids"))


def test_t6_differs_from_the_causal_mask_at_node_3():
    """transformers 29525, 30311: a mask that was dropped looks causal."""
    mask = to_huggingface_mask(T6, 3, dtype="bool")[0, 0, :, 3:]
    assert (mask != np.tri(6, dtype=bool)).any(axis=-1).tolist() == [False, False, False, True, True, True]


def test_columns_of_a_batch_with_unequal_contexts():
    tree = batch_of(([7, 1], [-1, 0]), ([7], [-1]))
    left = to_huggingface_mask(tree, [1, 3], dtype="bool", key_len=6)[:, 0].astype(int)
    right = to_huggingface_mask(tree, [1, 3], dtype="bool", key_len=6, context_padding="right")[:, 0].astype(int)
    assert left.tolist() == [[[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0]], [[1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 0]]]
    assert right[0].tolist() == [[1, 0, 0, 1, 0, 0], [1, 0, 0, 1, 1, 0]]
    assert to_huggingface(tree, [1, 3], pad_token_id=0)["position_ids"].tolist() == [[1, 2], [3, 3]]


@pytest.mark.parametrize(
    ("dtype", "lowest"),
    [("float32", -3.4028234663852886e38), ("float16", -65504.0), ("bfloat16", -3.3895313892515355e38)],
)
def test_hidden_is_the_lowest_number_of_the_dtype(dtype, lowest):
    """9 keys in a buffer of 32: the last 23 columns are hidden in every row."""
    mask = to_huggingface_mask(T6, 3, dtype=dtype, key_len=32)
    assert mask.shape == (1, 1, 6, 32)
    assert (mask[..., 9:].astype(np.float64) == lowest).all()


def test_sums_of_two_masks_are_read_and_rows_of_padding_may_hold_anything():
    """Lowest plus lowest is -inf in float32."""
    mask = to_huggingface_mask(T6, 3)
    with np.errstate(over="ignore"):
        assert_same_masks(from_huggingface_mask(mask + mask, 3), T6)
    mask[0, 0, 3:] = np.nan
    found = from_huggingface_mask(mask, 3, num_nodes=[3])
    np.testing.assert_array_equal(found.to_dense()[0, :3, :3], SEES[:3, :3])


def test_to_huggingface_mask_rejects_a_row_that_sees_nothing():
    blind = Visibility.from_dense(SEES & ~np.eye(6, dtype=bool))
    with pytest.raises(UnsupportedError, match=r"row 0 of request 0 sees no key.*NaN .-inf. or uniform"):
        to_huggingface_mask(blind, 0)
    assert_same_masks(from_huggingface_mask(to_huggingface_mask(blind, 1), 1), blind)


def spoiled(place, value, **options):
    mask = to_huggingface_mask(T6, 3, **options)
    mask[(0, 0, *place)] = value
    return mask


@rejects(
    (UnsupportedError, r"`attention_mask`\[0, 0, 2, 4\] is -1e\+09, expected 0, -3.4", spoiled((2, 4), -1e9)),
    (UnsupportedError, "masks of 1 and 0 need dtype bool", spoiled((2, 4), 1.0)),
    (UnsupportedError, "nan", spoiled((2, 4), np.nan)),
    (UnsupportedError, "-65504, expected", to_huggingface_mask(T6, 3, dtype="float16").astype(np.float32)),
    (UnsupportedError, "row 4 of request 0 hides context key 1", spoiled((4, 1), -np.inf)),
    (UnsupportedError, "row 4 of request 0 hides every key", spoiled((4, slice(None)), -np.inf)),
    (UnsupportedError, "differs by head", np.repeat(spoiled((0, 0), 0), 2, axis=1)),
    (ShapeError, "expected", spoiled((0, 0), 0)[0]),
    (ShapeError, "`attention_mask` has 8 columns, expected at least 9: 3 of", spoiled((0, 0), 0)[..., :8]),
    (DTypeError, "dtype int64", np.zeros((1, 1, 6, 9), np.int64)),
    (DTypeError, "NumPy", spoiled((0, 0), 0).tolist()),
)
def test_from_huggingface_mask_rejects(mask):
    from_huggingface_mask(mask, 3)


@rejects(
    (
        UnsupportedError,
        r"row 2 of request 0 sees key 0, which is neither context .columns 1..3",
        spoiled((2, 0), 0, key_len=10, past_len=4),  # columns 1..3 context, 4..9 nodes
        {"past_len": 4},
    ),
    (UnsupportedError, r"row 1 of request 0 sees key 8.*nor a node .3..5.", spoiled((1, 8), 0), {"num_nodes": [3]}),
)
def test_from_huggingface_mask_rejects_keys_beside_context_and_nodes(mask, options):
    from_huggingface_mask(mask, 3, **options)


@rejects(
    (ArgumentError, "`dtype` is 'int8'", {"dtype": "int8"}),
    (ArgumentError, "`hidden`", {"hidden": "-1e9"}),
    (ArgumentError, "`context_padding`", {"context_padding": "both"}),
    (ArgumentError, "`past_len` is 2, expected an integer at least 3", {"past_len": 2}),
    (ArgumentError, "`key_len` is 8, expected an integer at least 9", {"key_len": 8}),
)
def test_to_huggingface_mask_rejects(options):
    to_huggingface_mask(T6, 3, **options)


NO_TREE = to_huggingface_mask(Visibility.from_dense(SEES | np.eye(6, k=2, dtype=bool)), 3)


@rejects(
    (ArgumentError, "node 3 of request 0 is 6, expected 4", {"position_ids": np.arange(3, 9)[None]}),
    (ShapeError, "expected", {"position_ids": ints([[3]], np.int64)}),
    (ArgumentError, "distinct tokens", {"input_ids": ints([[7, 10, 20, 10, 21, 20]])}),
    (UnsupportedError, "no tree", {"attention_mask": NO_TREE}),
)
def test_from_huggingface_rejects(changes):
    from_huggingface(to_huggingface(T6, 3) | changes, 3)


def test_huggingface_rejects_padding_without_a_token_and_missing_arrays():
    with pytest.raises(UnsupportedError, match="request 1 has 1 of 2 nodes"):
        to_huggingface(batch_of(([7, 1], [-1, 0]), ([7], [-1])), [1, 3])
    with pytest.raises(ArgumentError, match="lacks position_ids"):
        from_huggingface({"input_ids": 0, "attention_mask": 0}, 3)
