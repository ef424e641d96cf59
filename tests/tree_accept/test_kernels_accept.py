"""accept: the definition walked twice, what its result must always be, and kernels that trust no number."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import AcceptResult, DraftTree, accept
from ddtree_cupy.errors import LayoutError
from ddtree_cupy.testing import assert_identical, unchanged
from ddtree_cupy.testing.strategies import seeds
from tests.oracles import walk_links, walk_parents
from tests.refusals import of
from tests.tree_accept.cases import ABSURD, children_of, trees_and_targets

schedules = st.integers(0, 9)


def walked(tree, targets, walk):
    """Return the AcceptResult that a walk from tests.refusals import of
    from tests.oracles gives, batched."""
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


@given(drawn=trees_and_targets(max_nodes=70), schedule=schedules)
def test_accept_matches_oracle(backend, drawn, schedule):
    """Along parents and along links; also in `out=`, and the inputs stay as they are."""
    tree, targets = drawn
    backend = replace(backend, seed=schedule)
    with unchanged(tree=tree, targets=targets):
        found = backend(accept, tree, targets).validate()
        out = found.map(lambda array: np.full_like(array, 99))
        assert_identical(backend(accept, tree, targets, out=out), found)
    assert backend.name == "cupy" or accept(tree, targets, out=out) is out
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
    found = accept(DraftTree.from_parents(tokens, list(range(-1, size - 1))), of(*targets[:size]))
    length = 0
    while length + 1 < size and targets[length] == tokens[length + 1]:
        length += 1
    assert int(found.num_accepted) == length
    assert int(found.bonus_token) == targets[length]
    assert found.accepted.tolist() == [*range(length + 1), *[-1] * (size - length - 1)]


@given(trees_and_targets(), st.permutations(range(40)), seeds())
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


@pytest.mark.parametrize("count", [1, 31, 32, 33, 63, 64, 65, 1025])
@pytest.mark.parametrize("shape", ["chain", "star"])
def test_accept_matches_reference_at_node_counts(kernels, count, shape):
    parents = [-1, *(range(count - 1) if shape == "chain" else [0] * (count - 1))]
    tree = DraftTree.from_parents(list(range(count)), parents)
    targets = np.array([*range(1, count), 7], np.int32) if shape == "chain" else np.full(count, count - 1, np.int32)
    assert_identical(kernels(accept, tree, targets), accept(tree, targets))


@given(case=trees_and_targets(batched=True), seed=seeds())
def test_accept_never_trusts_device_values(kernels, case, seed):
    """Links and counts that lead anywhere: the walk ends inside the arrays."""
    tree, targets = case
    random = np.random.default_rng(seed)

    def absurd(array):
        return np.where(random.random(array.shape) < 0.5, random.choice(ABSURD, array.shape), array).astype(np.int32)

    links = {name: absurd(getattr(tree, name)) for name in ("first_child", "next_sibling", "num_nodes")}
    found = kernels(accept, replace(tree, **links), targets)
    assert (found.num_accepted < tree.token_ids.shape[1]).all()
    assert (found.accepted < tree.token_ids.shape[1]).all()


def test_accept_kernels_reject(kernels):
    tree = DraftTree.from_parents([1, 2, 3], [-1, 0, 0])
    with pytest.raises(LayoutError, match="`target_token_ids`"):
        kernels(accept, tree, np.zeros(6, np.int32)[::2])
