"""SGLang's verification results: against a walk over its links, T6 by hand, and every rejection."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import AcceptResult, accept
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from ddtree_cupy.interop import from_sglang, from_sglang_accept, to_sglang, to_sglang_accept
from ddtree_cupy.testing import assert_identical
from ddtree_cupy.testing.strategies import draft_trees, seeds
from tests.interop.cases import PARENTS, T6, TOKENS, batch_of, batched, ints
from tests.refusals import rejects
from tests.tree_accept.cases import random_targets

T6_RESULT = AcceptResult(ints([0, 3, 5, -1, -1, -1]), ints(2), ints(9))


@st.composite
def accepted_trees(draw):
    tree = draw(draft_trees(inactive=False, vocab=6, max_nodes=40))
    targets = np.abs(random_targets(np.random.default_rng(draw(seeds())), tree))
    return batched(tree), targets.reshape(batched(tree).token_ids.shape)


def walk(arrays, request, targets):
    """Follow SGLang's links from the root; return the flat rows and the target's token at each."""
    size = arrays["retrieve_index"].shape[1]
    node, rows, predicted = 0, [], []
    while True:
        rows.append(int(arrays["retrieve_index"][request, node]))
        predicted.append(int(targets[rows[-1]]))
        node = int(arrays["retrieve_next_token"][request, node])
        while node != -1 and arrays["draft_token"][request * size + node] != predicted[-1]:
            node = int(arrays["retrieve_next_sibling"][request, node])
        if node == -1:
            return rows, predicted


@given(accepted_trees(), st.booleans())
def test_sglang_accept_round_trip(drawn, counts_bonus):
    tree, targets = drawn
    result = accept(tree, targets)
    arrays = to_sglang_accept(result, tree, counts_bonus=counts_bonus)
    found = from_sglang_accept(**arrays, draft_token_num=tree.token_ids.shape[1], counts_bonus=counts_bonus, tree=tree)
    assert_identical(found, result)


@given(accepted_trees())
def test_to_sglang_accept_matches_a_walk_over_its_links(drawn):
    tree, targets = drawn
    links = to_sglang(tree, np.zeros(len(targets), int), mode=1, pad_token_id=5)
    found = to_sglang_accept(accept(tree, targets), tree)
    for request in range(len(targets)):
        rows, predicted = walk(links, request, targets.ravel())
        assert found["accept_index"][request, : len(rows)].tolist() == rows
        assert (found["accept_index"][request, len(rows) :] == -1).all()
        assert found["accept_token_num"][request] == len(rows) - 1
        assert found["predicts"][rows].tolist() == predicted


@given(accepted_trees(), seeds())
def test_from_sglang_is_invariant_under_the_order_of_siblings(drawn, seed):
    """SGLang's own vectors link siblings in orders of their own, say 4 and then 1."""
    tree, targets = drawn
    random = np.random.default_rng(seed)
    links = to_sglang(tree, np.zeros(len(targets), int), pad_token_id=5)
    for request, node in np.argwhere(links["retrieve_next_token"] >= 0):
        children = random.permutation(np.flatnonzero(tree.parents[request] == node))
        links["retrieve_next_token"][request, node] = children[0]
        links["retrieve_next_sibling"][request, children] = [*children[1:], -1]
    found, _ = from_sglang(links)
    assert_identical(found, tree)
    back = to_sglang_accept(accept(found, targets), found)
    for request in range(len(targets)):
        rows, predicted = walk(links, request, targets.ravel())
        assert back["accept_index"][request, : len(rows)].tolist() == rows
        assert back["predicts"][rows].tolist() == predicted


def test_from_sglang_takes_children_that_are_linked_4_then_1():
    tree = batch_of(([7, 10, 20, 21, 11], [-1, 0, 1, 1, 0]))
    links = to_sglang(tree, 3)
    links["retrieve_next_token"][0, 0] = 4
    links["retrieve_next_sibling"][0] = [-1, -1, 3, -1, 1]
    found, _ = from_sglang(links)
    assert_identical(found, tree)
    assert to_sglang(found, 3)["retrieve_next_token"].tolist() == [[1, 2, -1, -1, -1]]


def test_sglang_accept_of_t6():
    """sglang 15360: path [0, 3, 5], D = 6, S = 3: the row stride of accept_index is S, the tokens are 11 and 20."""
    tree = batch_of((TOKENS, PARENTS), (TOKENS, PARENTS))
    result = AcceptResult(ints([[0, 1, 2, -1, -1, -1], [0, 3, 5, -1, -1, -1]]), ints([2, 2]), ints([8, 9]))
    found = to_sglang_accept(result, tree, num_spec_step=3)
    assert found["accept_index"].tolist() == [[0, 1, 2], [6, 9, 11]]
    assert found["accept_token_num"].tolist() == [2, 2]
    assert found["predicts"].tolist() == [10, 20, 8, 0, 0, 0, 11, 0, 0, 20, 0, 9]
    assert all(array.dtype == np.int32 for array in found.values())
    assert to_sglang_accept(result, tree, counts_bonus=True)["accept_token_num"].tolist() == [3, 3]
    assert_identical(from_sglang_accept(**found, draft_token_num=6, tree=tree), result)


def test_from_sglang_accept_reads_accepted_rows_only():
    """The rest of predicts is stale; some versions have one entry more."""
    predicts = ints([11, -5, -5, 20, -5, 9, -5])
    for array in (predicts, predicts[:6]):
        found = from_sglang_accept(array, ints([[0, 3, 5, -1]]), ints([2]), draft_token_num=6, tree=T6)
        assert_identical(found, T6_RESULT.with_batch())


@rejects(
    (UnsupportedError, "request 0 is inactive", [-1, -1, -1], -1, -1, {}),
    (UnsupportedError, "has bonus token -1", [0, 3, 5], 2, -1, {}),
    (UnsupportedError, "accepts 3 nodes with its root, more than the 2", [0, 3, 5], 2, 9, {"num_spec_step": 2}),
    (ArgumentError, "accepts node 5 after 1, but its parent is 3", [0, 1, 5], 2, 9, {}),
    (ArgumentError, "the root, first", [1, 2, -1], 1, 9, {}),
)
def test_to_sglang_accept_rejects(path, num_accepted, bonus, options):
    result = AcceptResult(ints([*path, -1, -1, -1]), ints(num_accepted), ints(bonus))
    to_sglang_accept(result, T6, **options)


def test_to_sglang_accept_rejects_results_of_other_trees():
    with pytest.raises(ShapeError, match="like `tree`"):
        to_sglang_accept(T6_RESULT, batch_of(([7], [-1])))
    with pytest.raises(ArgumentError, match="node 5, which is padding"):
        to_sglang_accept(T6_RESULT, batch_of(([7, 1, 2], [-1, 0, 0]), (TOKENS, PARENTS)).map(lambda a: a[:1]))
    with pytest.raises(DTypeError, match="`result` is DraftTree"):
        to_sglang_accept(T6, T6)


@rejects(
    (ArgumentError, "`accept_index` holds 2 rows", {"accept_index": ints([[0, 3, -1]])}),
    (ArgumentError, r"`accept_token_num`\[0\] is 3.*counts_bonus=False", {"accept_token_num": ints([3])}),
    (ArgumentError, "holds 0 rows", {"accept_token_num": ints([-1]), "accept_index": ints([[-1, -1, -1]])}),
    (ArgumentError, "expected 0 .the root. and then ascending rows below 6", {"accept_index": ints([[6, 9, 11]])}),
    (ArgumentError, "ascending", {"accept_index": ints([[0, 5, 3]])}),
    (ArgumentError, "ascending", {"accept_index": ints([[0, 3, 3]])}),
    (ArgumentError, "`accept_index` holds 2 rows", {"accept_index": ints([[0, -1, 5]])}),
    (ArgumentError, "ascending", {"accept_index": ints([[0, -1, 5]]), "accept_token_num": ints([1])}),
    (ArgumentError, r"holds \[11, 20, -1\] along request 0", {"predicts": ints([11, 0, 0, 20, 0, -1])}),
    (UnsupportedError, "outside int32", {"predicts": ints([11, 0, 0, 20, 0, 2**31], np.int64)}),
    (ShapeError, "expected", {"predicts": ints([11, 0, 0, 20, 0])}),
    (ArgumentError, "does not hold the tokens of its path", {"predicts": ints([12, 0, 0, 20, 0, 9])}),
    (ArgumentError, "accepts node 5 after 1", {"accept_index": ints([[0, 1, 5]])}),
    (DTypeError, "int32 or int64", {"accept_index": ints([[0, 3, 5]], np.float32)}),
    (ShapeError, "expected", {"draft_token_num": 3}),
    (ShapeError, "`tree` is", {"tree": batch_of(([7], [-1]))}),
)
def test_from_sglang_accept_rejects(changes):
    arguments = to_sglang_accept(T6_RESULT, T6, num_spec_step=3) | {"draft_token_num": 6, "tree": T6} | changes
    from_sglang_accept(**arguments)
