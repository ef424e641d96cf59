"""accept against two walks written from the definition, and what its result must always be."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import AcceptResult, DraftTree, accept
from ddtree_cupy.errors import DDTreeError, DTypeError, LayoutError, ShapeError
from ddtree_cupy.testing import assert_identical, unchanged
from tests.oracles import walk_links, walk_parents
from tests.tree_accept.cases import children_of, random_targets, seeds, trees_and_targets

T6 = DraftTree.from_parents([7, 10, 20, 11, 21, 20], [-1, 0, 1, 0, 1, 3])


def int32(*values):
    return np.array(values, np.int32)


def walked(tree, targets, walk):
    """Return the AcceptResult that a walk from tests.oracles gives, batched."""
    if not tree.is_batched:
        tree, targets = tree.with_batch(), targets[None]
    accepted = np.full(tree.token_ids.shape, -1, np.int32)
    num_accepted, bonus_token = (np.full(len(tree.num_nodes), -1, np.int32) for _ in range(2))
    for b, count in enumerate(tree.num_nodes.tolist()):
        if walk is walk_parents:
            path, bonus = walk(tree.parents[b], tree.token_ids[b], targets[b], count)
        else:
            path, bonus = walk(tree.first_child[b], tree.next_sibling[b], tree.token_ids[b], targets[b], count)
        accepted[b, : len(path)] = path
        num_accepted[b], bonus_token[b] = len(path) - 1, bonus
    return AcceptResult(accepted, num_accepted, bonus_token)


@given(trees_and_targets())
def test_accept_matches_oracle(drawn):
    tree, targets = drawn
    found = accept(tree, targets).validate()
    batched = found if tree.is_batched else found.with_batch()
    assert_identical(batched, walked(tree, targets, walk_parents))
    assert_identical(batched, walked(tree, targets, walk_links))


@given(trees_and_targets(batched=True))
def test_accept_matches_its_contract(drawn):
    """A root path; each accepted token is the target's choice at its parent; the bonus is no child of the last node."""
    tree, targets = drawn
    found = accept(tree, targets)
    for b, count in enumerate(tree.num_nodes.tolist()):
        last = int(found.num_accepted[b])
        path = found.accepted[b, : last + 1].tolist()
        assert (found.accepted[b, last + 1 :] == -1).all()
        if count == 0:
            assert (last, int(found.bonus_token[b])) == (-1, -1)
            continue
        assert path[0] == 0
        for parent, node in pairwise(path):
            assert tree.parents[b, node] == parent
            assert tree.token_ids[b, node] == targets[b, parent]
        bonus = int(found.bonus_token[b])
        assert bonus == targets[b, path[-1]]
        assert bonus not in [int(tree.token_ids[b, child]) for child in children_of(tree.parents[b], path[-1], count)]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.lists(st.integers(-1, 3), min_size=12, max_size=12))
def test_accept_matches_linear_verification_on_a_chain(tokens, targets):
    """A chain accepts the longest prefix of the draft that equals the target's own tokens."""
    size = len(tokens)
    found = accept(DraftTree.from_parents(tokens, list(range(-1, size - 1))), int32(*targets[:size]))
    length = 0
    while length + 1 < size and targets[length] == tokens[length + 1]:
        length += 1
    assert int(found.num_accepted) == length
    assert int(found.bonus_token) == targets[length]
    assert found.accepted.tolist() == [*range(length + 1), *[-1] * (size - length - 1)]


@given(trees_and_targets(batched=True))
def test_accept_is_identical_in_any_batch(drawn):
    tree, targets = drawn
    together = accept(tree, targets)
    for b in range(len(tree.num_nodes)):
        alone = accept(tree.map(lambda array, b=b: array[b, ...]), targets[b])
        assert_identical(alone, together.map(lambda array, b=b: array[b, ...]))


@given(trees_and_targets(), seeds)
def test_accept_never_reads_targets_from_num_nodes_on(drawn, seed):
    tree, targets = drawn
    padding = np.arange(tree.token_ids.shape[-1]) >= np.asarray(tree.num_nodes)[..., None]
    noise = np.random.default_rng(seed).integers(-(2**31), 2**31, targets.shape, np.int32)
    assert_identical(accept(tree, np.where(padding, noise, targets).astype(np.int32)), accept(tree, targets))


@given(trees_and_targets())
def test_accept_never_writes_its_inputs(drawn):
    tree, targets = drawn
    with unchanged(tree=tree, targets=targets):
        first = accept(tree, targets)
        second = accept(tree, targets)
    assert_identical(first, second)


@given(trees_and_targets())
def test_accept_is_identical_with_out(drawn):
    tree, targets = drawn
    wanted = accept(tree, targets)
    out = wanted.map(lambda array: np.full_like(array, 99))
    assert accept(tree, targets, out=out) is out
    assert_identical(out, wanted)


@given(trees_and_targets(), st.permutations(range(40)), seeds)
def test_accept_is_invariant_under_token_relabelling(drawn, labels, seed):
    """Tokens are names: any one-to-one renaming leaves the path and renames the bonus."""
    tree, _ = drawn
    labels = np.array(labels, np.int32)
    targets = np.random.default_rng(seed).integers(0, 6, tree.token_ids.shape).astype(np.int32)
    tokens = np.minimum(tree.token_ids, 39)
    plain = replace(tree, token_ids=tokens)
    renamed = replace(tree, token_ids=np.where(tokens >= 0, labels[np.maximum(tokens, 0)], -1).astype(np.int32))
    one, other = accept(plain, targets), accept(renamed, labels[targets])
    assert_identical((other.accepted, other.num_accepted), (one.accepted, one.num_accepted))
    active = np.asarray(one.bonus_token) >= 0
    np.testing.assert_array_equal(other.bonus_token, np.where(active, labels[np.maximum(one.bonus_token, 0)], -1))


@pytest.mark.parametrize("seed", range(200))
def test_accept_matches_oracle_on_a_random_tree(seed):
    """Linked-list walk against parent walk on 200 trees of up to 65 nodes."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 66))
    parents = [-1] + [int(rng.integers(0, i)) for i in range(1, size)]
    tokens = [0] * size
    for node in range(size):
        kids = children_of(parents, node, size)
        for child, token in zip(kids, rng.permutation(len(kids) + 2), strict=False):
            tokens[child] = int(token)
    tree = DraftTree.from_parents(tokens, parents)
    targets = random_targets(rng, tree)
    found = accept(tree, targets).with_batch()
    assert_identical(found, walked(tree, targets, walk_parents))
    assert_identical(found, walked(tree, targets, walk_links))


@pytest.mark.parametrize(
    ("targets", "path", "bonus"),
    [
        ([10, 20, 33, 0, 0, 0], [0, 1, 2], 33),
        ([10, 21, 0, 0, 44, 0], [0, 1, 4], 44),
        ([11, 0, 0, 20, 0, 55], [0, 3, 5], 55),
        ([11, 0, 0, 21, 0, 55], [0, 3], 21),
        ([12, 20, 33, 20, 0, 0], [0], 12),
        ([-1, 20, 33, 20, 0, 0], [0], -1),
        ([10, -1, 33, 20, 0, 0], [0, 1], -1),
        ([10, 20, -1, 20, 0, 0], [0, 1, 2], -1),
        ([20, 0, 0, 0, 0, 0], [0], 20),
        ([7, 0, 0, 0, 0, 0], [0], 7),
    ],
)
def test_accept_matches_oracle_on_the_toy_tree(targets, path, bonus):
    found = accept(T6, int32(*targets))
    assert found.accepted.tolist() == path + [-1] * (6 - len(path))
    assert (int(found.num_accepted), int(found.bonus_token)) == (len(path) - 1, bonus)
    assert (found.accepted.dtype, found.num_accepted.dtype, found.bonus_token.dtype) == (np.int32,) * 3
    assert (found.num_accepted.shape, found.bonus_token.shape) == ((), ())


@pytest.mark.parametrize("target", [-1, -2, -(2**31)])
def test_accept_matches_oracle_when_a_target_is_negative(target):
    """-1 never matches, not even the -1 of padding tokens, and ends the walk with bonus -1."""
    tree = DraftTree.from_parents([[7, 10, -1, -1]], [[-1, 0, -1, -1]])
    found = accept(tree, np.full((1, 4), target, np.int32))
    assert found.accepted.tolist() == [[0, -1, -1, -1]]
    assert (found.num_accepted.tolist(), found.bonus_token.tolist()) == ([0], [-1])


def test_accept_matches_oracle_when_a_negative_token_gets_into_the_tree():
    """Even a child that carries -1, which validation rejects, is not matched by a target of -1."""
    broken = replace(T6, token_ids=int32(7, -1, 20, 11, 21, 20))
    found = accept(broken, int32(-1, 20, 0, 0, 0, 0))
    assert (found.accepted.tolist(), int(found.bonus_token)) == ([0, -1, -1, -1, -1, -1], -1)


def test_accept_matches_oracle_on_inactive_requests():
    tree = DraftTree.from_parents([[-1, -1, -1], [7, 8, -1]], [[-1, -1, -1], [-1, 0, -1]])
    found = accept(tree, np.array([[8, 8, 8], [8, 9, 9]], np.int32))
    assert found.accepted.tolist() == [[-1, -1, -1], [0, 1, -1]]
    assert (found.num_accepted.tolist(), found.bonus_token.tolist()) == ([-1, 1], [-1, 9])


def test_accept_matches_oracle_on_an_empty_batch():
    tree = DraftTree.from_parents(np.zeros((0, 4), np.int32), np.zeros((0, 4), np.int32))
    found = accept(tree, np.zeros((0, 4), np.int32))
    assert (found.accepted.shape, found.num_accepted.shape, found.bonus_token.shape) == ((0, 4), (0,), (0,))


def test_accept_matches_oracle_on_1025_nodes():
    chain = DraftTree.from_parents(np.arange(1025) % 7, np.arange(-1, 1024))
    targets = np.append(np.arange(1, 1025) % 7, 99).astype(np.int32)
    found = accept(chain, targets)
    assert found.accepted.tolist() == list(range(1025))
    assert (int(found.num_accepted), int(found.bonus_token)) == (1024, 99)


BATCH = DraftTree.from_parents([[7, 10, 11], [7, 12, -1]], [[-1, 0, 0], [-1, 0, -1]])
REJECTED = {
    "other nodes": (BATCH, np.zeros((2, 4), np.int32), ShapeError, "target_token_ids"),
    "other batch": (BATCH, np.zeros((3, 3), np.int32), ShapeError, "target_token_ids"),
    "no batch": (BATCH, np.zeros(3, np.int32), ShapeError, "target_token_ids"),
    "a batch for one tree": (T6, np.zeros((1, 6), np.int32), ShapeError, "target_token_ids"),
    "int64": (BATCH, np.zeros((2, 3), np.int64), DTypeError, "target_token_ids"),
    "uint32": (BATCH, np.zeros((2, 3), np.uint32), DTypeError, "target_token_ids"),
    "float": (BATCH, np.zeros((2, 3), np.float32), DTypeError, "target_token_ids"),
    "a list": (BATCH, [[0, 0, 0], [0, 0, 0]], DTypeError, "target_token_ids"),
    "parents for a tree": (BATCH.parents, np.zeros((2, 3), np.int32), DTypeError, "tree"),
    "int64 first_child": (
        replace(BATCH, first_child=BATCH.first_child.astype(np.int64)),
        np.zeros((2, 3), np.int32),
        DTypeError,
        "tree.first_child",
    ),
    "short next_sibling": (
        replace(BATCH, next_sibling=BATCH.next_sibling[:, :2]),
        np.zeros((2, 3), np.int32),
        ShapeError,
        "tree.next_sibling",
    ),
    "num_nodes of another batch": (
        replace(BATCH, num_nodes=int32(3)),
        np.zeros((2, 3), np.int32),
        ShapeError,
        "tree.num_nodes",
    ),
}


@pytest.mark.parametrize("case", REJECTED)
def test_accept_rejects(case):
    tree, targets, error, name = REJECTED[case]
    with pytest.raises(error, match=f"^accept: .*`{name}`"):
        accept(tree, targets)


def test_accept_rejects_a_wrong_out_before_writing():
    targets = np.zeros((2, 3), np.int32)
    good = accept(BATCH, targets).map(lambda array: np.full_like(array, 99))
    read_only = good.bonus_token.copy()
    read_only.flags.writeable = False
    for field, array, error in (
        ("accepted", np.zeros((2, 4), np.int32), ShapeError),
        ("num_accepted", np.zeros(2, np.int64), DTypeError),
        ("bonus_token", read_only, LayoutError),
    ):
        with unchanged(good=good), pytest.raises(error, match=rf"^accept: .*`out\.{field}`"):
            accept(BATCH, targets, out=replace(good, **{field: array}))
    with pytest.raises(DDTreeError, match=r"^accept: .*`out`"):
        accept(BATCH, targets, out=good.accepted)
