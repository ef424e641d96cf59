"""Parent lists with the root written in three ways, and trees recovered from their masks."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import DraftTree, Visibility
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from ddtree_cupy.interop import from_parent_lists, to_parent_lists, tree_from_visibility
from ddtree_cupy.testing import assert_identical, poison_padding
from ddtree_cupy.testing.strategies import draft_trees
from tests.interop.cases import PARENTS, SEES, T6, TOKENS, batch_of, ints
from tests.refusals import rejects


@given(draft_trees(), st.sampled_from(["minus_one", "self"]))
def test_parent_lists_round_trip(tree, root):
    lists = json.loads(json.dumps(to_parent_lists(tree, root=root)))
    assert_identical(from_parent_lists(*lists, root=root, capacity=tree.token_ids.shape[-1]), tree)


@given(draft_trees(inactive=False))
def test_parent_lists_without_root_round_trip(tree):
    roots = tree.token_ids[..., 0].tolist()
    lists = to_parent_lists(tree, root="omitted")
    found = from_parent_lists(*lists, root="omitted", root_token_ids=roots, capacity=tree.token_ids.shape[-1])
    assert_identical(found, tree)


def test_to_parent_lists_of_t6():
    assert to_parent_lists(T6) == (TOKENS, PARENTS)
    assert to_parent_lists(T6, root="self") == (TOKENS, [0, 0, 1, 0, 1, 3])
    assert to_parent_lists(T6, root="omitted") == (TOKENS[1:], [-1, 0, -1, 0, 2])


def test_parent_lists_of_a_ragged_batch_with_an_inactive_request():
    tree = batch_of((TOKENS, PARENTS), ([], []), ([0], [-1]))
    assert to_parent_lists(tree) == ([TOKENS, [], [0]], [PARENTS, [], [-1]])
    with pytest.raises(UnsupportedError, match="request 1 is inactive"):
        to_parent_lists(tree, root="omitted")


@rejects(
    (ArgumentError, "expected -1 with root='minus_one'; the other forms are 'self', 'omitted'", [7, 1], [0, 0], {}),
    (ArgumentError, "expected 0 with root='self'", [7, 1], [-1, 0], {"root": "self"}),
    (ArgumentError, "expected 0 <= parent < 1", [7, 1], [-1, 1], {}),
    (ArgumentError, "parent", [7, 1, 2], [-1, 2, 0], {}),
    (ArgumentError, "distinct tokens", [7, 1, 1], [-1, 0, 0], {}),
    (ShapeError, "2 token ids and 1 parents", [7, 1], [-1], {}),
    (ShapeError, "1 requests", [[7]], [[-1], [-1]], {}),
    (DTypeError, "is not a list", [[7], 1], [[-1], -1], {}),
    (DTypeError, "expected an integer", [7, 1.0], [-1, 0], {}),
    (ArgumentError, r"`token_ids\[0\]` is -1, expected an integer in 0\.\.", [7, -1], [-1, 0], {}),
    (ArgumentError, r"`token_ids\[0\]` is 2147483648, expected an integer in 0\.\.", [2**31], [-1], {}),
    (ArgumentError, "at least -1", [1], [-2], {"root": "omitted", "root_token_ids": 7}),
    (ArgumentError, "`root_token_ids` is needed with", [1], [-1], {"root": "omitted"}),
    (ArgumentError, "`root_token_ids` is needed with", [1], [-1], {"root_token_ids": 7}),
    (ArgumentError, "expected one of", [1], [-1], {"root": "none"}),
    (ArgumentError, "`capacity`", [7, 1], [-1, 0], {"capacity": 1}),
)
def test_from_parent_lists_rejects(tokens, parents, options):
    from_parent_lists(tokens, parents, **options)


@given(draft_trees(min_batch=0))
def test_tree_from_visibility_round_trip(tree):
    bare = poison_padding(Visibility(tree.visibility_bits, tree.num_nodes), seed=1)
    assert_identical(tree_from_visibility(bare, tree.token_ids), tree)
    assert_identical(tree_from_visibility(tree, tree.token_ids.astype(np.int64)), tree)


def test_tree_from_visibility_ignores_tokens_of_padding():
    tree = batch_of((TOKENS, PARENTS), ([], []))
    tokens = np.where(tree.token_ids < 0, 99, tree.token_ids)
    assert_identical(tree_from_visibility(tree, tokens), tree)


@rejects(
    (UnsupportedError, r"row 0 of request 0 sees \[\], expected itself only", 0, 0),
    (UnsupportedError, r"row 0 of request 0 sees \[0, 3\]", 0, 3),
    (UnsupportedError, r"row 5 of request 0 sees \[0, 3, 5\]", 3, 1),
    (UnsupportedError, r"row 2 of request 0 sees \[1, 2\]", 2, 0),
    (UnsupportedError, r"row 4 of request 0 sees \[0, 1\]", 4, 4),
)
def test_tree_from_visibility_rejects_masks_of_no_tree(row, column):
    dense = SEES.copy()
    dense[row, column] ^= True
    tree_from_visibility(Visibility.from_dense(dense), T6.token_ids)


@rejects(
    (ShapeError, "expected", ints(TOKENS[:5])),
    (DTypeError, "int32 or int64", ints(TOKENS, np.float32)),
    (DTypeError, "expected a NumPy or CuPy array", TOKENS),
    (ArgumentError, "distinct tokens", ints([7, 10, 20, 10, 21, 20])),
    (ArgumentError, "token", ints([7, 10, -1, 11, 21, 20])),
    (ArgumentError, "parents|-1 among", ints([-1, -1, -1, -1, -1, -1])),
)
def test_tree_from_visibility_rejects_tokens(tokens):
    tree_from_visibility(T6, tokens)


def test_tree_from_visibility_rejects_a_lone_missing_root():
    with pytest.raises(ArgumentError, match="holds -1 among its 1 valid nodes"):
        tree_from_visibility(DraftTree.from_parents([7], [-1]), ints([-1]))
