"""Hugging Face models as target and drafter: lossless, on a stand-in with the same calls and on transformers itself."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from ddtree_cupy.decode import from_callable, generate
from ddtree_cupy.errors import ArgumentError, DTypeError, UnsupportedError
from ddtree_cupy.explore import BestFirst, record
from ddtree_cupy.interop import HuggingFaceDrafter, HuggingFaceTarget
from tests.explore.live import live_rounds, replayed_rounds

VOCAB, WIDTH = 23, 8


class Tensor(np.ndarray):
    """An array with the few methods of a tensor that the adapters call."""

    def to(self, where):
        return self if where == "cpu" else self.astype(where).view(Tensor)

    def float(self):
        return self.astype(np.float32).view(Tensor)

    def cpu(self):
        return self

    def numpy(self):
        return np.asarray(self)


class Cache:
    """Keys and values, one row per token."""

    def __init__(self):
        self.keys = self.values = np.zeros((0, WIDTH))

    def crop(self, length):
        self.keys, self.values = self.keys[:length], self.values[:length]


class StandIn:
    """One layer of attention with the call of a causal model: ids, a 4D additive mask, positions and a cache."""

    device, dtype, training = "cpu", "float64", False

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.config = SimpleNamespace(vocab_size=VOCAB, _attn_implementation="eager")
        self.embed, self.place, self.head = (
            rng.standard_normal(s) for s in ((VOCAB, WIDTH), (400, WIDTH), (WIDTH, VOCAB))
        )
        self.q, self.k, self.v = rng.standard_normal((3, WIDTH, WIDTH)) / 2

    def __call__(self, *, input_ids, attention_mask, position_ids, past_key_values, use_cache):
        assert use_cache
        cache = Cache() if past_key_values is None else past_key_values
        x = self.embed[input_ids[0]] + self.place[position_ids[0]]
        cache.keys = np.concatenate([cache.keys, x @ self.k])
        cache.values = np.concatenate([cache.values, x @ self.v])
        assert attention_mask.shape == (1, 1, len(x), len(cache.keys))
        scores = x @ self.q @ cache.keys.T + np.asarray(attention_mask)[0, 0]
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        x = x + weights @ cache.values / weights.sum(-1, keepdims=True)
        logits = np.asarray(x @ self.head)[None].view(Tensor)
        return SimpleNamespace(logits=logits, past_key_values=cache)


@pytest.fixture
def stand_ins(monkeypatch):
    """Return two stand-ins, beside a module that answers for torch."""

    class inference_mode:
        def __enter__(self):
            return None

        def __exit__(self, *error):
            return None

    torch = SimpleNamespace(from_numpy=lambda array: array.view(Tensor), inference_mode=inference_mode)
    monkeypatch.setitem(sys.modules, "torch", torch)
    return StandIn(0), StandIn(1)


def real_models(attention, kind):
    """Return two tiny models of transformers with random weights."""
    torch = pytest.importorskip("torch", reason="needs the extra `hf`: torch is not installed")
    transformers = pytest.importorskip("transformers", reason="needs the extra `hf`: transformers is not installed")
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        sizes = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1}
        if kind == "llama":
            sizes |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
            config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, initializer_range=0.5)
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        else:
            config = transformers.GPT2Config(**sizes, n_embd=32, n_layer=2, n_head=4, initializer_range=0.5)
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        models.append(model.double().eval())
    return models


def assert_lossless(models, plain):
    """Compare trees with plain decoding, which sees the whole text at every step and uses no cache."""
    prompt = (np.arange(140) * 7 % VOCAB).tolist()  # more than one prefill pass
    for start in (prompt[:1], prompt[:5], prompt):
        text = list(start)
        for _ in range(14):
            text.append(int(np.argmax(plain(text))))
        for drafter_model in models:  # the target's own model drafts without a mistake
            target, drafter = HuggingFaceTarget(models[0]), HuggingFaceDrafter(drafter_model, 4)
            for options in ({"budget": 0}, {"budget": 4, "max_children": 1}, {"budget": 30}):
                found = generate(target, drafter, start, max_new_tokens=14, **options)
                assert found.token_ids.tolist() == text[len(start) :]
                assert "max_children" not in options or drafter_model is not models[0] or found.target_passes == 3


def test_stand_ins_decode_without_loss(stand_ins):
    def plain(text):
        mask = np.where(np.tri(len(text), dtype=bool), 0.0, -np.inf)[None, None]
        ids = np.array([text])
        found = stand_ins[0](
            input_ids=ids,
            attention_mask=mask,
            position_ids=np.arange(len(text))[None],
            past_key_values=None,
            use_cache=True,
        )
        return found.logits[0, -1]

    assert_lossless(stand_ins, plain)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_models_of_transformers_decode_without_loss(attention, kind):
    models = real_models(attention, kind)
    import torch

    def plain(text):
        with torch.inference_mode():
            return models[0](input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].numpy()

    assert_lossless(models, plain)


def test_stand_ins_are_recorded_and_replayed(stand_ins):
    target, drafter = HuggingFaceTarget(stand_ins[0]), HuggingFaceDrafter(stand_ins[0], 4)
    traces = record(target, drafter, [[3, 1]], num_positions=9, max_budget=12, progress=False)
    assert replayed_rounds(traces, 0, BestFirst(12)) == live_rounds(target, drafter, traces, 0, [3, 1], budget=12)


def test_a_drafter_proposes_the_same_again(stand_ins):
    drafter = HuggingFaceDrafter(stand_ins[0], 3)
    drafter.start(np.array([4, 2, 9], np.int32))
    first = drafter.propose()
    assert np.array_equal(drafter.propose(), first)
    drafter.commit(np.array([5, 6], np.int32))
    after = drafter.propose()
    drafter.start(np.array([4, 2, 9, 5, 6], np.int32))
    np.testing.assert_allclose(drafter.propose(), after, rtol=1e-5)
    assert HuggingFaceDrafter(stand_ins[0], 0).vocab_size == VOCAB


def test_a_target_goes_with_a_drafter_of_another_kind(stand_ins):
    drafter = from_callable(lambda tokens: np.eye(VOCAB)[tokens[-1]], vocab_size=VOCAB, draft_len=3)
    found = generate(HuggingFaceTarget(stand_ins[0]), drafter, [1], budget=6, max_new_tokens=8)
    plain = generate(HuggingFaceTarget(stand_ins[0]), None, [1], budget=0, max_new_tokens=8)
    assert found.token_ids.tolist() == plain.token_ids.tolist()


def test_models_that_do_not_fit_are_rejected_with_advice_that_works(stand_ins):
    model = stand_ins[0]
    for odd in (None, "gpt2", SimpleNamespace(config=model.config), lambda **inputs: None):
        with pytest.raises(DTypeError, match=r"^HuggingFaceTarget: `model` is \w+, expected a causal model"):
            HuggingFaceTarget(odd)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(
        UnsupportedError, match=r"HuggingFaceDrafter: `model` attends by 'flash.*attn_implementation='sdpa"
    ):
        HuggingFaceDrafter(model, 3)
    model.config._attn_implementation = "sdpa"
    model.training = True
    with pytest.raises(ArgumentError, match=r"`model` is in training mode.*model\.eval\(\)"):
        HuggingFaceTarget(model)
    model.training = False
    for length, error in ((-1, ArgumentError), (1.5, DTypeError)):
        with pytest.raises(error, match=r"^HuggingFaceDrafter: `draft_len` is"):
            HuggingFaceDrafter(model, length)
    assert HuggingFaceDrafter(model, 3).draft_len == 3


def test_a_cache_that_cannot_be_cut_is_rejected(stand_ins, monkeypatch):
    monkeypatch.delattr(Cache, "crop")
    with pytest.raises(
        UnsupportedError, match="HuggingFaceTarget: the cache of `model` is Cache, expected one with `crop`"
    ):
        generate(HuggingFaceTarget(stand_ins[0]), None, [1, 2], budget=0, max_new_tokens=3)
