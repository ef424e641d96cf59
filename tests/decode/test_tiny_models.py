"""The bundled models against independent arithmetic, and their quality on held-out text."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import AcceptResult, DraftTree, commit_kv
from ddtree_cupy.decode.tiny import TinyDrafter, TinyTarget, heldout_names, heldout_text
from ddtree_cupy.decode.tiny.config import DrafterConfig, TargetConfig
from ddtree_cupy.decode.tiny.drafter import DRAFTER_WEIGHTS
from ddtree_cupy.decode.tiny.target import TARGET_WEIGHTS
from ddtree_cupy.decode.tiny.weights import load_weights
from ddtree_cupy.errors import ArgumentError, ShapeError

target_of = cache(lambda dtype: TinyTarget.load(dtype=dtype))
drafter_of = cache(lambda dtype: TinyDrafter.load(dtype=dtype))


def heldout_tokens(name, start, count):
    return np.frombuffer(heldout_text(name)[start : start + count], np.uint8).astype(np.int32)


def chain(tokens):
    return DraftTree.from_parents(tokens, np.arange(-1, len(tokens) - 1))


def commit_all(kv, count):
    whole = AcceptResult(np.arange(count, dtype=np.int32), np.array(count - 1, np.int32), np.array(-1, np.int32))
    return commit_kv(kv, whole)


def run_chunks(target, tokens, cuts):
    """Return logits and features of `tokens`, prefilled in the chunks between `cuts`."""
    kv = target.allocate(len(tokens), len(tokens))
    parts = []
    for chunk in np.split(tokens, cuts):
        parts.append(target.forward(chain(chunk), kv))
        kv = commit_all(kv, len(chunk))
    return tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))


# ---- the same models, written plainly: keys and values expanded, one loop a head ----


def norm(x, weight, eps=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def rope(x, positions):
    """Rotate rows x (n, width) as complex numbers x[:half] + i x[half:]."""
    half = x.shape[-1] // 2
    turns = np.exp(1j * positions[:, None] * 10_000.0 ** (-np.arange(half) / half))
    turned = (x[:, :half] + 1j * x[:, half:]) * turns
    return np.concatenate([turned.real, turned.imag], axis=-1)


def softmax(scores):
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def mlp(x, w, prefix):
    gate = x @ w[prefix + "mlp.gate.weight"].T
    return (gate / (1 + np.exp(-gate)) * (x @ w[prefix + "mlp.up.weight"].T)) @ w[prefix + "mlp.down.weight"].T


def plain_target(tokens):
    """Non-absorbed causal MLA; returns logits and features."""
    config, weights = load_weights(TARGET_WEIGHTS, "target", TargetConfig)
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    positions = np.arange(len(tokens))
    future = positions[None, :] > positions[:, None]
    x, features = w["embed.weight"][tokens], []
    for index in range(config.num_layers):
        at = f"layers.{index}."
        h = norm(x, w[at + "attention_norm.weight"])
        down = h @ w[at + "attention.kv_down.weight"].T
        latent = norm(down[:, :64], w[at + "attention.kv_norm.weight"])
        shared_key = rope(down[:, 64:], positions)
        q = np.split(h @ w[at + "attention.q.weight"].T, config.num_heads, axis=1)
        k = np.split(latent @ w[at + "attention.k_up.weight"].T, config.num_heads, axis=1)
        v = np.split(latent @ w[at + "attention.v_up.weight"].T, config.num_heads, axis=1)
        heads = []
        for head in range(config.num_heads):
            query = np.concatenate([q[head][:, :32], rope(q[head][:, 32:], positions)], axis=1)
            key = np.concatenate([k[head], shared_key], axis=1)
            scores = np.where(future, -np.inf, query @ key.T / np.sqrt(48))
            heads.append(softmax(scores) @ v[head])
        x = x + np.concatenate(heads, axis=1) @ w[at + "attention.out.weight"].T
        x = x + mlp(norm(x, w[at + "mlp_norm.weight"]), w, at)
        if index in config.feature_layers:
            features.append(x)
    return norm(x, w["norm.weight"]) @ w["head.weight"].T, np.concatenate(features, axis=1)


def plain_drafter(features, root):
    """Draft after all of `features`, with the whole context recomputed."""
    config, weights = load_weights(DRAFTER_WEIGHTS, "drafter", DrafterConfig)
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    first = max(0, len(features) - config.window)
    parts = [norm(part, 1.0) for part in np.split(features[first:], config.num_features, axis=1)]
    context = norm(np.concatenate(parts, axis=1) @ w["fuse.weight"].T, w["context_norm.weight"])
    x = np.concatenate([w["embed.weight"][[root]], w["slots"]])
    positions = np.arange(first, len(features) + len(x))
    for index in range(config.num_layers):
        at = f"layers.{index}."
        h = norm(x, w[at + "attention_norm.weight"])
        rows = np.concatenate([context, h])
        q = np.split(h @ w[at + "attention.q.weight"].T, config.num_heads, axis=1)
        k = np.split(rows @ w[at + "attention.k.weight"].T, config.num_kv_heads, axis=1)
        v = np.split(rows @ w[at + "attention.v.weight"].T, config.num_kv_heads, axis=1)
        heads = []
        for head in range(config.num_heads):
            shared = head * config.num_kv_heads // config.num_heads
            query = rope(norm(q[head], w[at + "attention.q_norm.weight"]), positions[-len(x) :])
            key = rope(norm(k[shared], w[at + "attention.k_norm.weight"]), positions)
            heads.append(softmax(query @ key.T / np.sqrt(config.head_dim)) @ v[shared])
        x = x + np.concatenate(heads, axis=1) @ w[at + "attention.out.weight"].T
        x = x + mlp(norm(x, w[at + "mlp_norm.weight"]), w, at)
    return norm(x[1:], w["norm.weight"]) @ w["head.weight"].T


# ---- the target ----


def test_caches_of_the_tiny_target_share_their_lengths():
    kv = TinyTarget.load().allocate(max_context=20, max_nodes=5)
    assert len(kv) > 1
    assert all(layer.context_lens is kv[0].context_lens for layer in kv)
    assert not any(np.shares_memory(layer.ckv, kv[0].ckv) for layer in kv[1:])


def test_target_matches_plain_mla():
    tokens = heldout_tokens("gzip", 500, 90)
    expected_logits, expected_features = plain_target(tokens)
    logits, features = run_chunks(target_of(np.float64), tokens, [])
    np.testing.assert_allclose(logits, expected_logits, rtol=0, atol=1e-10)
    np.testing.assert_allclose(features, expected_features, rtol=0, atol=1e-9)
    logits32, _ = run_chunks(target_of(np.float32), tokens, [])
    assert logits32.dtype == np.float32
    np.testing.assert_allclose(logits32, expected_logits, rtol=0, atol=2e-3)


@pytest.mark.parametrize("cuts", [list(range(1, 60)), [7, 16, 50]], ids=["token by token", "uneven chunks"])
def test_target_is_invariant_under_chunking(cuts):
    tokens = heldout_tokens("csv", 3000, 60)
    whole, pieces = (run_chunks(target_of(np.float64), tokens, places) for places in ([], cuts))
    np.testing.assert_allclose(pieces[0], whole[0], rtol=0, atol=1e-10)


def test_target_tree_matches_chains():
    """Every root path of a tree gets the logits of that path alone."""
    target, prompt = target_of(np.float64), heldout_tokens("textwrap", 2000, 40)
    parents = [-1, 0, 0, 1, 2, 2, 5, 3]
    tree = DraftTree.from_parents(np.frombuffer(b"self.abc", np.uint8).astype(np.int32), parents)
    kv = target.allocate(40, 8)
    target.forward(chain(prompt), kv)
    logits, features = target.forward(tree, commit_all(kv, 40))
    for leaf in (4, 6, 7):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        expected, expected_features = run_chunks(target, np.concatenate([prompt, tree.token_ids[path]]), [])
        np.testing.assert_allclose(logits[path], expected[40:], rtol=0, atol=1e-10)
        np.testing.assert_allclose(features[path], expected_features[40:], rtol=0, atol=1e-9)


def test_target_predicts_heldout_text():
    """Bits per byte of 192 bytes of each file, after 192 bytes of context."""
    bits = []
    for name in heldout_names():
        tokens = heldout_tokens(name, 4096, 384)
        logits, _ = run_chunks(target_of(np.float32), tokens, [])
        scores = logits[191:-1].astype(np.float64)
        chosen = np.take_along_axis(scores, tokens[192:, None], axis=1)[:, 0]
        bits.append((np.log(np.exp(scores).sum(axis=1)) - chosen) / np.log(2))
    assert np.mean(bits) <= 1.8


def test_target_rejects_wrong_arguments():
    target = target_of(np.float32)
    kv = target.allocate(8, 4)
    tree = chain(np.zeros(2, np.int32))
    with pytest.raises(ShapeError, match="`kv` has 5 caches, expected 6"):
        target.forward(tree, kv[:5])
    with pytest.raises(ShapeError, match="expected one length"):
        target.forward(tree, [commit_all(kv[0], 1), *kv[1:]])
    with pytest.raises(ShapeError, match=r"`tree\.token_ids` is \(1, 2\)"):
        target.forward(tree.with_batch(), kv)


# ---- the drafter ----


@cache
def some_features():
    _, features = run_chunks(target_of(np.float64), heldout_tokens("fractions", 1500, 300), [150])
    return features


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 300])
def test_drafter_matches_plain_attention(count):
    drafter, features = drafter_of(np.float64), some_features()[:count]
    draft = drafter.propose(drafter.observe(drafter.start(), features), 100)
    np.testing.assert_allclose(draft, plain_drafter(features, 100), rtol=0, atol=1e-10)


@given(cuts=st.lists(st.integers(0, 300), max_size=6).map(sorted))
def test_drafter_is_invariant_under_split_observation(cuts):
    drafter, features = drafter_of(np.float64), some_features()
    whole = drafter.observe(drafter.start(), features)
    split = drafter.start()
    for part in np.split(features, cuts):
        split = drafter.observe(split, part)
    assert split.num_observed == whole.num_observed == 300
    np.testing.assert_allclose(split.keys, whole.keys, rtol=0, atol=1e-12)
    np.testing.assert_allclose(split.values, whole.values, rtol=0, atol=1e-12)


def test_drafter_observe_never_writes_the_old_state():
    drafter, features = drafter_of(np.float32), some_features().astype(np.float32)
    old = drafter.observe(drafter.start(), features[:20])
    before = drafter.propose(old, 32)
    drafter.observe(old, features[20:])
    np.testing.assert_array_equal(drafter.propose(old, 32), before)


def test_drafter_finds_the_targets_next_tokens():
    """The first draft agrees with the target's own greedy choice most of the time."""
    target, drafter = target_of(np.float32), drafter_of(np.float32)
    tokens = heldout_tokens("socketserver", 4000, 240)
    logits, features = run_chunks(target, tokens, [])
    state, hits = drafter.observe(drafter.start(), features[:60]), 0
    for root in range(60, 240):
        hits += drafter.propose(state, int(tokens[root]))[0].argmax() == logits[root].argmax()
        state = drafter.observe(state, features[root : root + 1])
    assert hits > 0.55 * 180


def test_drafter_rejects_wrong_arguments():
    drafter = drafter_of(np.float32)
    with pytest.raises(ShapeError, match=r"`features` is \(2, 5\), expected \(num_positions, 768\)"):
        drafter.observe(drafter.start(), np.zeros((2, 5), np.float32))
    with pytest.raises(ArgumentError, match="`root_token_id` is 256"):
        drafter.propose(drafter.start(), 256)
