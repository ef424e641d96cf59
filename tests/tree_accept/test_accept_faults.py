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
from ddtree_cupy.testing import assert_identical, unchanged
from tests.tree_accept.cases import result_of

pytestmark = pytest.mark.usefixtures("on_every_backend")

T6 = DraftTree.from_parents([7, 10, 20, 11, 21, 20], [-1, 0, 1, 0, 1, 3])


def int32(*values):
    return np.array(values, np.int32)


def texts_of(tree, result):
    """Return per request the tokens that the round commits: accepted drafts, then the bonus."""
    texts = []
    for tokens, path, bonus in zip(tree.token_ids, result.accepted, result.bonus_token, strict=True):
        texts.append((*(int(tokens[node]) for node in path[path > 0]), int(bonus)))
    return texts


def repeated(tree, times):
    """Return a batch of equal trees."""
    return tree.map(lambda array: np.repeat(array[None], times, axis=0))


# ---- losslessness of sampling ----


def test_accept_matches_the_target_distribution_on_the_total_variation_probe():
    """p = (.3, .5, .2), one drafted child argmax q = 0: accepting with min(1, p/q) gives (.5, .333, .167)."""
    uniforms = np.repeat(((np.arange(10) + 0.5) / 10)[:, None], 2, axis=1)
    logits = np.broadcast_to(np.log(np.array([3.0, 5.0, 2.0])), (10, 2, 3))
    tree = repeated(DraftTree.from_parents([2, 0], [-1, 0]), 10)
    result = accept(tree, sample_targets(logits, uniforms, temperature=1.0))
    first = [text[0] for text in texts_of(tree, result)]
    assert [first.count(token) for token in range(3)] == [3, 5, 2]
    assert [len(text) for text in texts_of(tree, result)] == [2 if token == 0 else 1 for token in first]


@pytest.mark.parametrize("drafted", [[], [0], [1], [2], [0, 1], [1, 2], [0, 1, 2]])
def test_accept_matches_the_target_distribution_whatever_is_drafted(drafted):
    """The first token has p exactly, for every set of drafted children."""
    uniforms = np.repeat(((np.arange(10) + 0.5) / 10)[:, None], 1 + len(drafted), axis=1)
    logits = np.broadcast_to(np.log(np.array([3.0, 5.0, 2.0])), (10, 1 + len(drafted), 3))
    tree = repeated(DraftTree.from_parents([2, *drafted], [-1, *[0] * len(drafted)]), 10)
    texts = texts_of(tree, accept(tree, sample_targets(logits, uniforms, temperature=1.0)))
    assert [[text[0] for text in texts].count(token) for token in range(3)] == [3, 5, 2]


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [([0, 0, 1, 1], [-1, 0, 0, 1]), ([0, 1, 0, 2], [-1, 0, 1, 2]), ([0, 0, 1, 2], [-1, 0, 0, 0])],
    ids=["branching", "chain", "star"],
)
def test_accept_matches_the_target_distribution_of_whole_texts(tokens, parents):
    """All uniforms of all nodes enumerated: every committed text appears as often as its probability says."""
    levels, vocab, size = 4, 3, len(tokens)
    weights = np.array([[1, 2, 1], [2, 1, 1], [1, 1, 2], [3, 1, 0]], np.float64)  # one row a node, sums to `levels`
    with np.errstate(divide="ignore"):
        logits = np.log(weights)
    draws = np.array(list(itertools.product(range(levels), repeat=size)))
    tree = repeated(DraftTree.from_parents(tokens, parents), len(draws))
    sampled = sample_targets(
        np.broadcast_to(logits, (len(draws), size, vocab)), (draws + 0.5) / levels, temperature=1.0
    )
    texts = texts_of(tree, accept(tree, sampled))

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


def test_accept_matches_the_last_child_when_children_cover_all_mass():
    """p = (.5, .5), both drafted, coin just below 1: accept the second child; there is no residual to divide by 0."""
    logits = np.log(np.array([[[0.5, 0.5, 1e-300]] * 3]))
    logits[..., 2] = -np.inf
    tree = DraftTree.from_parents([[2, 0, 1]], [[-1, 0, 0]])
    result = accept(tree, sample_targets(logits, np.full((1, 3), 1 - 2.0**-53), temperature=1.0))
    assert (result.accepted.tolist(), result.bonus_token.tolist()) == ([[0, 2, -1]], [1])


# ---- the walk ----


def test_accept_rejects_duplicate_siblings_at_construction():
    with pytest.raises(ArgumentError, match=r"token_ids.*distinct"):
        DraftTree.from_parents([7, 10, 10], [-1, 0, 0])


def test_accept_matches_the_lowest_index_when_duplicate_siblings_get_through():
    tree = DraftTree.from_parents([7, 10, 11, 20], [-1, 0, 0, 1])
    duplicated = replace(tree, token_ids=int32(7, 10, 10, 20))
    result = accept(duplicated, int32(10, 20, 0, 55))
    assert (result.accepted.tolist(), int(result.bonus_token)) == ([0, 1, 3, -1], 55)


def test_greedy_targets_matches_the_lower_id_on_equal_maxima():
    logits = np.array([[0, 1, 2, 9, 9, 3]], np.float32)
    assert greedy_targets(logits).tolist() == [3]


def test_greedy_targets_matches_oracle_at_offsets_beyond_31_bits():
    """V = 163840, D = 257, 52 requests: the last logit's offset passes 2^31; overlapping strides keep it small."""
    vocab, nodes, batch = 163840, 257, 52
    base = np.zeros(vocab + nodes * batch, np.float32)
    peak = 100_000
    base[peak] = 1
    logits = np.lib.stride_tricks.as_strided(base, (batch, nodes, vocab), (4 * nodes, 4, 4), writeable=False)
    counts = np.full(batch, 1, np.int32)
    counts[-1] = 9
    found = greedy_targets(logits, num_nodes=counts)
    assert found[:, 0].tolist() == [peak - nodes * b for b in range(batch)]
    assert found[-1, :10].tolist() == [peak - nodes * 51 - node for node in range(9)] + [-1]
    assert (found[:-1, 1:] == -1).all()


def test_accept_matches_scattered_paths_and_not_a_dense_prefix():
    """Accepted [0, 3, 5]: tokens 11 and 20, bonus from node 5."""
    result = accept(T6, int32(11, 98, 97, 20, 96, 55))
    assert result.accepted.tolist() == [0, 3, 5, -1, -1, -1]
    assert T6.token_ids[result.accepted[1:3]].tolist() == [11, 20]
    assert (int(result.num_accepted), int(result.bonus_token)) == (2, 55)


def test_accept_matches_the_bonus_of_the_root_alone():
    """A round whose tree was dropped verifies the root only, and still commits one token."""
    root = replace(T6, num_nodes=int32(1)[0, ...], first_child=np.full(6, -1, np.int32))
    result = accept(root, int32(10, 20, 33, 20, 0, 0))
    assert (result.accepted.tolist(), int(result.bonus_token)) == ([0, -1, -1, -1, -1, -1], 10)
    single = accept(DraftTree.from_parents([7], [-1]), int32(10))
    assert (single.accepted.tolist(), int(single.num_accepted), int(single.bonus_token)) == ([0], 0, 10)


def test_accept_matches_the_logits_it_is_given():
    """A penalty on token 11 belongs into target_logits: with it the walk takes the other branch."""
    logits = np.zeros((6, 30), np.float32)
    logits[0, 11], logits[0, 10] = 5, 4
    assert accept(T6, greedy_targets(logits)).accepted.tolist()[:2] == [0, 3]
    logits[:, 11] -= 2
    assert accept(T6, greedy_targets(logits)).accepted.tolist()[:2] == [0, 1]


def test_accept_matches_masks_given_per_node():
    """Grammar masks follow a node's own path: siblings 1 and 3 allow different tokens in rows 1 and 3."""
    logits = np.zeros((6, 30), np.float32)
    allowed = {0: [11], 1: [21], 2: [5], 3: [20], 4: [6], 5: [9]}
    for node, tokens in allowed.items():
        mask = np.ones(30, bool)
        mask[tokens] = False
        logits[node, mask] = -np.inf
    result = accept(T6, greedy_targets(logits))
    assert (result.accepted.tolist(), int(result.bonus_token)) == ([0, 3, 5, -1, -1, -1], 9)
    sampled = sample_targets(logits, np.full(6, 0.999), temperature=1.0)
    assert_identical(sampled, greedy_targets(logits))


@pytest.mark.parametrize("special", [0, 1, 2, 163839])
def test_accept_matches_oracle_without_a_hidden_end_token(special):
    """Token ids 0 and 2 are like any other, on the path and as the bonus."""
    tree = DraftTree.from_parents([special, special, special], [-1, 0, 1])
    result = accept(tree, int32(special, special, special))
    assert (result.accepted.tolist(), int(result.bonus_token)) == ([0, 1, 2], special)


def test_targets_and_accept_never_write_their_inputs():
    """A second call on the same inputs gives the same result."""
    rng = np.random.default_rng(0)
    logits, uniforms = rng.standard_normal((6, 30)).astype(np.float32), rng.random(6)
    results = []
    with unchanged(logits=logits, uniforms=uniforms, tree=T6):
        for _ in range(2):
            targets = sample_targets(logits, uniforms, temperature=0.5)
            results.append((greedy_targets(logits), targets, accept(T6, targets)))
    assert_identical(*results)


def test_round_matches_oracle_on_unequal_trees_with_a_control():
    """Unequal trees, shuffled non-zero slots, and a root-only request that cannot go wrong."""
    tree = DraftTree.from_parents(
        [[7, 10, 20, 11, 21, 20], [9, -1, -1, -1, -1, -1], [-1] * 6, [5, 6, 0, 8, -1, -1]],
        [[-1, 0, 1, 0, 1, 3], [-1] * 6, [-1] * 6, [-1, 0, 1, 0, -1, -1]],
    )
    targets = np.array([[11, 0, 0, 20, 0, 55], [44, 1, 1, 1, 1, 1], [7] * 6, [6, 0, 33, 9, 9, 9]], np.int32)
    result = accept(tree, targets)
    assert result.accepted.tolist() == [[0, 3, 5, -1, -1, -1], [0, *[-1] * 5], [-1] * 6, [0, 1, 2, -1, -1, -1]]
    assert result.num_accepted.tolist() == [2, 0, -1, 2]
    assert result.bonus_token.tolist() == [55, 44, -1, 33]
    assert texts_of(tree, result) == [(11, 20, 55), (44,), (-1,), (6, 0, 33)]


def test_node_matches_the_last_token_of_its_ancestor_chain():
    """Node t inside the tree attends exactly as the last token of its ancestor chain does."""
    rng = np.random.default_rng(1)
    rows, queries = rng.standard_normal((3 + 6, 32)), rng.standard_normal((6, 2, 32))
    kv = PagedKV.from_dense(rows[:, :16], rows[:, 16:], page_size=4, context_lens=3)
    out, lse = tree_attention(T6, queries[..., :16], queries[..., 16:], kv, sm_scale=0.2)
    for node in range(6):
        path = np.flatnonzero(T6.visibility[node])
        chain_rows = np.r_[rows[:3], rows[3 + path]]
        chain_kv = PagedKV.from_dense(chain_rows[:, :16], chain_rows[:, 16:], page_size=4, context_lens=3)
        chain = DraftTree.from_parents(list(range(len(path))), list(range(-1, len(path) - 1)))
        chain_out, chain_lse = tree_attention(
            chain, queries[path, :, :16], queries[path, :, 16:], chain_kv, sm_scale=0.2
        )
        np.testing.assert_allclose(chain_out[-1], out[node], rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(chain_lse[-1], lse[node], rtol=1e-12, atol=1e-14)


# ---- cache compaction ----


def line(context, num_nodes, *, batch, page_size=4):
    rows = np.broadcast_to(np.arange(context + num_nodes, dtype=np.float32)[:, None], (batch, context + num_nodes, 16))
    return PagedKV.from_dense(rows, -rows, page_size=page_size, context_lens=[context] * batch)


def test_commit_kv_is_identical_when_a_shared_layer_is_given_twice():
    """A second move of [0, 2, 3, 5] would put row 5 where row 3 belongs."""
    result = result_of([[0, 2, 3, 5]], 6)
    once = commit_kv(line(3, 6, batch=1), result)
    shared = line(3, 6, batch=1)
    for each in commit_kv((shared, shared), result):
        assert_identical(each, once)


def test_write_kv_never_writes_committed_rows_in_the_next_round():
    """The next round's slots start behind the committed path: nothing committed is overwritten."""
    kv = line(3, 6, batch=1)
    kv = commit_kv(kv, result_of([[0, 2, 5]], 6))
    before = kv.ckv.copy()
    rows = np.full((1, 3, 16), 99, np.float32)
    write_kv(kv, rows, rows, num_rows=3)
    committed = kv.ckv.reshape(-1, 16)[:6, 0].tolist()
    assert committed == [0, 1, 2, 3, 5, 8]
    assert kv.ckv.reshape(-1, 16)[6:9, 0].tolist() == [99, 99, 99]
    assert_identical(kv.ckv.reshape(-1, 16)[9:], before.reshape(-1, 16)[9:])


def test_round_matches_oracle_on_a_padded_request():
    """num_nodes 0 through the whole round: out 0, lse -inf, accepted -1, nothing moved, no index -1 followed."""
    kv = line(3, 2, batch=2)
    kv.page_table[1] = -1
    tree = DraftTree.from_parents([[7, 8], [-1, -1]], [[-1, 0], [-1, -1]])
    q = np.ones((2, 2, 1, 16), np.float32)
    before = kv.ckv.copy()
    out, lse = tree_attention(tree, q, q, kv, sm_scale=0.1)
    assert not out[1].any()
    assert (lse[1] == -np.inf).all()
    targets = greedy_targets(np.zeros((2, 2, 4), np.float32), num_nodes=tree.num_nodes)
    assert targets.tolist() == [[0, 0], [-1, -1]]
    result = accept(tree, targets)
    assert (result.accepted.tolist(), result.num_accepted.tolist()) == ([[0, -1], [-1, -1]], [0, -1])
    after = commit_kv(kv, result)
    assert after.context_lens.tolist() == [4, 3]
    assert_identical(after.ckv, before)


def test_commit_kv_never_writes_pages_shared_as_prefix():
    """Two requests share their first page; committing one leaves it and the other's rows alone."""
    pool = np.arange(5 * 4, dtype=np.float32).reshape(5, 4, 1).repeat(32, axis=2)
    table = np.array([[2, 0, 4], [2, 3, 1]], np.int32)
    kv = PagedKV(pool[..., :16], pool[..., 16:], table, int32(4, 5)).validate()
    before = pool.copy()
    commit_kv(kv, result_of([[0, 3], [0]], 5))
    changed = np.argwhere((pool != before).any(axis=-1)).tolist()
    assert changed == [[0, 1]]  # request 0: position 5 received the row of position 7
    assert pool[0, 1, 0] == before[0, 3, 0]


def test_commit_kv_is_identical_to_unmoved_rows_for_attention():
    """Attention over the committed cache equals attention over the accepted rows laid out afresh."""
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((5 + 6, 32)).astype(np.float32)
    kv = PagedKV.from_dense(rows[:, :16], rows[:, 16:], page_size=4, context_lens=5, capacity=16)
    after = commit_kv(kv, result_of([[0, 3, 5]], 6).without_batch())
    fresh_rows = rows[[0, 1, 2, 3, 4, 5, 8, 10]]
    fresh = PagedKV.from_dense(fresh_rows[:, :16], fresh_rows[:, 16:], page_size=4, capacity=16)
    q = rng.standard_normal((1, 2, 32)).astype(np.float32)
    nothing = Visibility.from_dense(np.zeros((1, 1), bool))
    states = [tree_attention(nothing, q[..., :16], q[..., 16:], each, sm_scale=0.2) for each in (after, fresh)]
    assert_identical(*states)
