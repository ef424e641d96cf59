"""Saved rounds of the official DDTree code: T6 by hand, round trips, and rounds that contradict themselves."""

import copy
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import DraftTree, accept
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from ddtree_cupy.interop import from_ddtree_rounds, to_ddtree_rounds
from ddtree_cupy.testing import assert_identical
from ddtree_cupy.testing.strategies import draft_trees
from tests.interop.cases import DEPTHS, PARENTS, ROOT, T6, TOKENS

SAVED = {
    "accepted_indices": [0, 1, 4],
    "tree": {"node_token_ids": TOKENS[1:], "node_depths": DEPTHS[1:], "parents": PARENTS},
}


def test_t6_is_read_and_written_by_hand():
    [(tree, result)] = from_ddtree_rounds([SAVED], root_token_ids=[ROOT])
    assert_identical(tree, T6)
    assert result.accepted.tolist() == [0, 1, 4, -1, -1, -1]
    assert (int(result.num_accepted), int(result.bonus_token)) == (2, -1)
    assert json.loads(json.dumps(to_ddtree_rounds([(tree, result)]))) == [SAVED]
    assert from_ddtree_rounds([SAVED])[0][0].token_ids.tolist() == [0, *TOKENS[1:]]
    assert from_ddtree_rounds([]) == to_ddtree_rounds([]) == []


@given(draft_trees(max_batch=1), st.data())
def test_rounds_survive_a_round_trip(tree, data):
    tree = tree.without_batch() if tree.is_batched else tree
    count = int(tree.num_nodes)
    if count == 0:
        return
    targets = np.array([data.draw(st.sampled_from([0, *tree.token_ids[1:count].tolist()])) for _ in tree.token_ids])
    result = accept(tree, targets.astype(np.int32))
    [(again, path)] = from_ddtree_rounds(to_ddtree_rounds([(tree, result)]), root_token_ids=[int(tree.token_ids[0])])
    for name in ("token_ids", "parents", "depths"):
        assert np.array_equal(getattr(again, name), getattr(tree, name)[:count])
    assert path.accepted.tolist() == result.accepted[:count].tolist()
    assert path.num_accepted == result.num_accepted


def test_a_tree_of_the_root_alone_is_a_round():
    saved = {"accepted_indices": [0], "tree": {"node_token_ids": [], "node_depths": [], "parents": [-1]}}
    [(tree, result)] = from_ddtree_rounds([saved])
    assert (int(tree.num_nodes), int(result.num_accepted)) == (1, 0)
    assert to_ddtree_rounds([(tree, result)]) == [saved]


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("accepted_indices", [], ArgumentError, r"`rounds\[0\]\['accepted_indices'\]` is \[\], expected 0, the root"),
        ("accepted_indices", [1, 4], ArgumentError, "expected 0, the root at place 0"),
        ("accepted_indices", [0, 4], ArgumentError, "expected a child of node 0 at place 1"),
        ("accepted_indices", [0, 1, 4, 1], ArgumentError, "expected a child of node 4 at place 3"),
        ("accepted_indices", [0, 6], ArgumentError, "expected a child of node 0 at place 1"),
        ("accepted_indices", [0, -1], ArgumentError, "expected a child of node 0 at place 1"),
        ("accepted_indices", [0.0], DTypeError, "has dtype float64, expected integers"),
        ("accepted_indices", [[0]], ShapeError, r"is \(1, 1\), expected \(n,\)"),
        ("tree", None, DTypeError, r"`rounds\[0\]\['tree'\]` is NoneType, expected a mapping"),
        ("node_token_ids", TOKENS, ShapeError, "has 6 tokens, 5 depths and 6 parents, expected n, n and n "),
        ("node_depths", DEPTHS, ShapeError, "has 5 tokens, 6 depths and 6 parents"),
        ("parents", PARENTS[1:], ShapeError, "has 5 tokens, 5 depths and 5 parents"),
        ("parents", [0, *PARENTS[1:]], ArgumentError, r"\['parents'\]\[0\]` is 0, expected -1, for the root"),
        ("parents", [-1, 0, 2, 0, 1, 3], ArgumentError, r"\['parents'\]\[2\]` is 2, expected 0\.\.1"),
        ("parents", [-1, 0, -1, 0, 1, 3], ArgumentError, r"\['parents'\]\[2\]` is -1, expected 0\.\.1"),
        ("node_depths", [1, 2, 1, 2, 1], ArgumentError, r"\['node_depths'\]\[4\]` is 1, expected 2 from `parents`"),
        ("node_token_ids", [10, 20, 10, 21, 20], ArgumentError, "siblings must have distinct tokens"),
        ("node_token_ids", [10, -1, 11, 21, 20], ArgumentError, "holds -1, expected token ids of at least 0"),
        ("node_token_ids", [10, 2**31, 11, 21, 20], UnsupportedError, "outside int32"),
        ("node_token_ids", "abc", DTypeError, "expected integers"),
    ],
)
def test_from_ddtree_rounds_rejects(name, value, error, words):
    saved = copy.deepcopy(SAVED)
    (saved if name in saved else saved["tree"])[name] = value
    with pytest.raises(error, match=f"^from_ddtree_rounds: .*{words}"):
        from_ddtree_rounds([saved])
    (saved if name in saved else saved["tree"]).pop(name)
    with pytest.raises((ArgumentError, DTypeError), match=rf"lacks `{name}`|`rounds\[0\]\['tree'\]` is NoneType"):
        from_ddtree_rounds([saved])


@pytest.mark.parametrize(
    ("rounds", "roots", "error", "words"),
    [
        (SAVED, None, DTypeError, "`rounds` is dict, expected a sequence"),
        ([3], None, DTypeError, r"`rounds\[0\]` is int, expected Mapping"),
        ([SAVED], [1, 2], ShapeError, "`root_token_ids` has 2 entries, expected 1, one per round"),
        ([SAVED], [-1], ArgumentError, r"`root_token_ids\[0\]` is -1"),
        ([SAVED], ["a"], DTypeError, r"`root_token_ids\[0\]` is 'a'"),
    ],
)
def test_from_ddtree_rounds_rejects_other_arguments(rounds, roots, error, words):
    with pytest.raises(error, match=f"^from_ddtree_rounds: {words}"):
        from_ddtree_rounds(rounds, root_token_ids=roots)


def test_to_ddtree_rounds_rejects():
    result = accept(T6, T6.token_ids)
    inactive = DraftTree.from_parents([-1], [-1])
    for rounds, error, words in (
        (3, DTypeError, "`rounds` is int, expected a sequence"),
        ([T6], DTypeError, r"`rounds\[0\]` is DraftTree, expected tuple or list"),
        ([(T6,)], ShapeError, r"`rounds\[0\]` has 1 entries, expected a tree and a result"),
        ([(T6, T6)], DTypeError, r"`rounds\[0\]\[1\]` is DraftTree, expected AcceptResult"),
        (
            [(T6.with_batch(), result.with_batch())],
            ShapeError,
            r"`rounds\[0\]` is a tree \(1, 6\) and a result \(1, 6\), expected both",
        ),
        ([(inactive, result)], ShapeError, r"`rounds\[0\]` is a tree \(1,\) and a result \(6,\)"),
        ([(inactive, accept(inactive, inactive.token_ids))], UnsupportedError, r"`rounds\[0\]` is inactive"),
    ):
        with pytest.raises(error, match=f"^to_ddtree_rounds: {words}"):
            to_ddtree_rounds(rounds)
