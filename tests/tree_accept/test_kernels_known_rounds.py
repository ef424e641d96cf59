"""Faults other systems of this field had in accept, sampling and cache compaction, each with its right answer."""

import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from ddtree_cupy import (
    DraftTree,
    PagedKV,
    Visibility,
    accept,
    commit_kv,
    greedy_targets,
    sample_targets,
    tree_attention,
    write_kv,
)
from ddtree_cupy.errors import ArgumentError
from ddtree_cupy.testing import assert_identical
from tests.refusals import of
from tests.tree_accept.cases import line, result_of

T6 = DraftTree.from_parents([7, 10, 20, 11, 21, 20], [-1, 0, 1, 0, 1, 3])


def texts_of(tree, result):
    """Return per request the tokens that the round commits: accepted drafts, then the bonus."""
    texts = []
    for tokens, path, bonus in zip(tree.token_ids, result.accepted, result.bonus_token, strict=True):
        texts.append((*(int(tokens[node]) for node in path[path > 0]), int(bonus)))
    return texts


def batch_of(tree, times):
    """Return a batch of equal trees."""
    return tree.map(lambda array: np.stack([array] * times))


# ---- losslessness of sampling ----


@pytest.mark.parametrize("drafted", [[], [0], [1], [2], [0, 1], [1, 2], [0, 1, 2]])
def test_accept_matches_the_target_distribution_whatever_is_drafted(backend, drafted):
    """p = (.3, .5, .2) for the first token; accepting with min(1, p/q) a child 0 = argmax q gives (.5, .333, .167)."""
    size = 1 + len(drafted)
    uniforms = np.repeat(((np.arange(10) + 0.5) / 10)[:, None], size, axis=1)
    logits = np.tile(np.log(np.array([3, 5, 2], np.float32)), (10, size, 1))
    tree = batch_of(DraftTree.from_parents([2, *drafted], [-1, *[0] * len(drafted)]), 10)
    texts = texts_of(tree, backend(accept, tree, backend(sample_targets, logits, uniforms, temperature=1.0)))
    assert [[text[0] for text in texts].count(token) for token in range(3)] == [3, 5, 2]
    assert [len(text) for text in texts] == [2 if text[0] in drafted else 1 for text in texts]


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [([0, 0, 1, 1], [-1, 0, 0, 1]), ([0, 1, 0, 2], [-1, 0, 1, 2]), ([0, 0, 1, 2], [-1, 0, 0, 0])],
    ids=["branching", "chain", "star"],
)
def test_accept_matches_the_target_distribution_of_whole_texts(backend, tokens, parents):
    """All uniforms of all nodes enumerated: every committed text appears as often as its probability says."""
    levels, vocab, size = 4, 3, len(tokens)
    weights = np.array([[1, 2, 1], [2, 1, 1], [1, 1, 2], [3, 1, 0]], np.float64)  # one row a node, sums to `levels`
    with np.errstate(divide="ignore"):
        logits = np.log(weights).astype(np.float32)
    draws = np.array(list(itertools.product(range(levels), repeat=size)))
    tree = batch_of(DraftTree.from_parents(tokens, parents), len(draws))
    sampled = backend(sample_targets, np.stack([logits] * len(draws)), (draws + 0.5) / levels, temperature=1.0)
    texts = texts_of(tree, backend(accept, tree, sampled))

    probability = {}

    def continue_from(node, text, mass):
        for token in range(vocab):
            share = mass * Fraction(int(weights[node, token]), levels)
            child = [i for i in range(1, size) if parents[i] == node and tokens[i] == token]
            if child:
                continue_from(child[0], (*text, token), share)
            elif share:
                probability[(*text, token)] = share

    continue_from(0, (), Fraction(1))
    counts = {text: Fraction(texts.count(text), len(draws)) for text in set(texts)}
    assert counts == probability


def test_accept_matches_the_last_child_when_children_cover_all_mass(backend):
    """p = (.5, .5), both drafted, coin just below 1: accept the second child; there is no residual to divide by 0."""
    logits = np.tile(np.array([0, 0, -np.inf], np.float32), (1, 3, 1))
    tree = DraftTree.from_parents([[2, 0, 1]], [[-1, 0, 0]])
    result = backend(accept, tree, backend(sample_targets, logits, np.full((1, 3), 1 - 2.0**-53), temperature=1.0))
    assert (result.accepted.tolist(), result.bonus_token.tolist()) == ([[0, 2, -1]], [1])


# ---- the walk ----


def test_draft_tree_rejects_duplicate_siblings_at_construction():
    with pytest.raises(ArgumentError, match=r"token_ids.*distinct"):
        DraftTree.from_parents([7, 10, 10], [-1, 0, 0])


LONG = DraftTree.from_parents(np.arange(1025) % 7, np.arange(-1, 1024))
WALKS = {  # tree, targets; accepted nodes and bonus
    "through the first child": (T6, [10, 20, 33, 0, 0, 0], [0, 1, 2], 33),
    "through a later sibling": (T6, [10, 21, 0, 0, 44, 0], [0, 1, 4], 44),
    "scattered": (T6, [11, 98, 97, 20, 96, 55], [0, 3, 5], 55),
    "the bonus is a cousin's token": (T6, [11, 0, 0, 21, 0, 55], [0, 3], 21),
    "a stranger at the root": (T6, [12, 20, 33, 20, 0, 0], [0], 12),
    "a grandchild's token at the root": (T6, [20, 0, 0, 0, 0, 0], [0], 20),
    "the root's own token": (T6, [7, 0, 0, 0, 0, 0], [0], 7),
    "-1 at the root": (T6, [-1, 20, 33, 20, 0, 0], [0], -1),
    "-1 inside": (T6, [10, -1, 33, 20, 0, 0], [0, 1], -1),
    "-1 at a leaf": (T6, [10, 20, -1, 20, 0, 0], [0, 1, 2], -1),
    "-1 and a child that carries it": (replace(T6, token_ids=of(7, -1, 20, 11, 21, 20)), [-1, 20, 0, 0, 0, 0], [0], -1),
    **{
        f"{target} and padding": (DraftTree.from_parents([7, 10, -1, -1], [-1, 0, -1, -1]), [target] * 4, [0], -1)
        for target in (-1, -2, -(2**31))
    },
    "the lowest of duplicate siblings": (
        replace(DraftTree.from_parents([7, 10, 11, 20], [-1, 0, 0, 1]), token_ids=of(7, 10, 10, 20)),
        [10, 20, 0, 55],
        [0, 1, 3],
        55,
    ),
    "the root alone": (DraftTree.from_parents([7], [-1]), [10], [0], 10),
    "a tree that was dropped": (
        replace(T6, num_nodes=np.array(1, np.int32), first_child=np.full(6, -1, np.int32)),
        [10, 20, 33, 20, 0, 0],
        [0],
        10,
    ),
    "1,025 nodes": (LONG, [*(np.arange(1, 1025) % 7), 99], list(range(1025)), 99),
    **{  # no id is an end token
        f"token {special}": (DraftTree.from_parents([special] * 3, [-1, 0, 1]), [special] * 3, [0, 1, 2], special)
        for special in (0, 1, 2, 163839)
    },
}


@pytest.mark.parametrize("name", WALKS)
def test_accept_matches_known_walks(backend, name):
    tree, targets, path, bonus = WALKS[name]
    found = backend(accept, tree, of(*targets))
    assert found.accepted.tolist() == path + [-1] * (len(targets) - len(path))
    assert (int(found.num_accepted), int(found.bonus_token)) == (len(path) - 1, bonus)
    assert (found.accepted.dtype, found.num_accepted.dtype, found.bonus_token.dtype) == (np.int32,) * 3
    assert (found.num_accepted.shape, found.bonus_token.shape) == ((), ())


def test_accept_of_no_requests(backend):
    tree = DraftTree.from_parents(np.zeros((0, 4), np.int32), np.zeros((0, 4), np.int32))
    found = backend(accept, tree, np.zeros((0, 4), np.int32))
    assert (found.accepted.shape, found.num_accepted.shape, found.bonus_token.shape) == ((0, 4), (0,), (0,))


def test_greedy_targets_matches_oracle_at_offsets_beyond_31_bits(backend):
    """V = 163840, D = 257, 52 requests: the last logit's offset passes 2^31; overlapping strides keep it small."""
    vocab, nodes, batch = 163840, 257, 52
    base = np.zeros(vocab + nodes * batch, np.float32)
    peak = 100_000
    base[peak] = 1
    logits = np.lib.stride_tricks.as_strided(base, (batch, nodes, vocab), (4 * nodes, 4, 4), writeable=False)
    counts = np.full(batch, 1, np.int32)
    counts[-1] = 9
    found = backend(greedy_targets, logits, num_nodes=counts)
    assert found[:, 0].tolist() == [peak - nodes * b for b in range(batch)]
    assert found[-1, :10].tolist() == [peak - nodes * 51 - node for node in range(9)] + [-1]
    assert (found[:-1, 1:] == -1).all()


def test_accept_matches_the_logits_it_is_given(backend):
    """A penalty on token 11 belongs into target_logits: with it the walk takes the other branch."""
    logits = np.zeros((6, 30), np.float32)
    logits[0, 11], logits[0, 10] = 5, 4
    assert backend(accept, T6, backend(greedy_targets, logits)).accepted.tolist()[:2] == [0, 3]
    logits[:, 11] -= 2
    assert backend(accept, T6, backend(greedy_targets, logits)).accepted.tolist()[:2] == [0, 1]


def test_accept_matches_masks_given_per_node(backend):
    """Grammar masks follow a node's own path: siblings 1 and 3 allow different tokens in rows 1 and 3."""
    logits = np.zeros((6, 30), np.float32)
    allowed = {0: [11], 1: [21], 2: [5], 3: [20], 4: [6], 5: [9]}
    for node, tokens in allowed.items():
        mask = np.ones(30, bool)
        mask[tokens] = False
        logits[node, mask] = -np.inf
    result = backend(accept, T6, backend(greedy_targets, logits))
    assert (result.accepted.tolist(), int(result.bonus_token)) == ([0, 3, 5, -1, -1, -1], 9)
    sampled = backend(sample_targets, logits, np.full(6, 0.999), temperature=1.0)
    assert_identical(sampled, backend(greedy_targets, logits))


def test_round_matches_oracle_on_unequal_trees_with_a_control(backend):
    """Unequal trees, shuffled non-zero slots, and a root-only request that cannot go wrong."""
    tree = DraftTree.from_parents(
        [[7, 10, 20, 11, 21, 20], [9, -1, -1, -1, -1, -1], [-1] * 6, [5, 6, 0, 8, -1, -1]],
        [[-1, 0, 1, 0, 1, 3], [-1] * 6, [-1] * 6, [-1, 0, 1, 0, -1, -1]],
    )
    targets = np.array([[11, 0, 0, 20, 0, 55], [44, 1, 1, 1, 1, 1], [7] * 6, [6, 0, 33, 9, 9, 9]], np.int32)
    result = backend(accept, tree, targets)
    assert result.accepted.tolist() == [[0, 3, 5, -1, -1, -1], [0, *[-1] * 5], [-1] * 6, [0, 1, 2, -1, -1, -1]]
    assert result.num_accepted.tolist() == [2, 0, -1, 2]
    assert result.bonus_token.tolist() == [55, 44, -1, 33]
    assert texts_of(tree, result) == [(11, 20, 55), (44,), (-1,), (6, 0, 33)]


# ---- cache compaction ----


def test_write_kv_never_writes_committed_rows_in_the_next_round(backend):
    """The next round's slots start behind the committed path: nothing committed is overwritten."""
    kv = line(3, 6, batch=1)
    kv = backend(commit_kv, kv, result_of([[0, 2, 5]], 6))
    before = kv.ckv.copy()
    rows = np.full((1, 3, 16), 99, np.float32)
    _, (kv, *_) = backend.change(write_kv, kv, rows, rows, num_rows=3)
    committed = kv.ckv.reshape(-1, 16)[:6, 0].tolist()
    assert committed == [0, 1, 2, 3, 5, 8]
    assert kv.ckv.reshape(-1, 16)[6:9, 0].tolist() == [99, 99, 99]
    assert_identical(kv.ckv.reshape(-1, 16)[9:], before.reshape(-1, 16)[9:])


def test_round_matches_oracle_on_a_padded_request(backend):
    """num_nodes 0 through the whole round: out 0, lse -inf, accepted -1, nothing moved, no index -1 followed."""
    kv = line(3, 2, batch=2)
    kv.page_table[1] = -1
    tree = DraftTree.from_parents([[7, 8], [-1, -1]], [[-1, 0], [-1, -1]])
    q = np.ones((2, 2, 1, 16), np.float32)
    before = kv.ckv.copy()
    out, lse = backend(tree_attention, tree, q, q, kv, sm_scale=0.1)
    assert not out[1].any()
    assert (lse[1] == -np.inf).all()
    targets = backend(greedy_targets, np.zeros((2, 2, 4), np.float32), num_nodes=tree.num_nodes)
    assert targets.tolist() == [[0, 0], [-1, -1]]
    result = backend(accept, tree, targets)
    assert (result.accepted.tolist(), result.num_accepted.tolist()) == ([[0, -1], [-1, -1]], [0, -1])
    after = backend(commit_kv, kv, result)
    assert after.context_lens.tolist() == [4, 3]
    assert_identical(after.ckv, before)


def test_commit_kv_never_writes_pages_shared_as_prefix(backend):
    """Two requests share their first page; committing one leaves it and the other's rows alone."""
    pool = np.arange(5 * 4, dtype=np.float32).reshape(5, 4, 1).repeat(32, axis=2)
    table = np.array([[2, 0, 4], [2, 3, 1]], np.int32)
    kv = PagedKV(pool[..., :16], pool[..., 16:], table, of(4, 5)).validate()
    before = pool[..., :16].copy()
    after = backend(commit_kv, kv, result_of([[0, 3], [0]], 5)).ckv
    changed = np.argwhere((after != before).any(axis=-1)).tolist()
    assert changed == [[0, 1]]  # request 0: position 5 received the row of position 7
    assert after[0, 1, 0] == before[0, 3, 0]


def test_commit_kv_is_identical_to_unmoved_rows_for_attention(backend):
    """Attention over the committed cache equals attention over the accepted rows laid out afresh."""
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((5 + 6, 32)).astype(np.float32)
    kv = PagedKV.from_dense(rows[:, :16], rows[:, 16:], page_size=4, context_lens=5, capacity=16)
    after = backend(commit_kv, kv, result_of([[0, 3, 5]], 6).without_batch())
    fresh_rows = rows[[0, 1, 2, 3, 4, 5, 8, 10]]
    fresh = PagedKV.from_dense(fresh_rows[:, :16], fresh_rows[:, 16:], page_size=4, capacity=16)
    q = rng.standard_normal((1, 2, 32)).astype(np.float32)
    nothing = Visibility.from_dense(np.zeros((1, 1), bool))
    states = [backend(tree_attention, nothing, q[..., :16], q[..., 16:], each, sm_scale=0.2) for each in (after, fresh)]
    assert_identical(*states)
