"""The decoding loop: lossless whatever the tree, exact in distribution, and strict about its arguments."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ddtree_cupy.decode import generate
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError
from tests.toys import NoisyDrafter, TableTarget


def plain_text(target, prompt, count):
    """Autoregressive decoding by the definition, without any of the library."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(np.argmax(target.logits_after(text))))
    return text[len(prompt) :]


@given(
    seed=st.integers(0, 2**16),
    budget=st.integers(0, 40),
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=9),
    count=st.integers(0, 12),
    noise=st.sampled_from([0.0, 1.0, 5.0]),
    max_children=st.sampled_from([None, 1, 2]),
    spine=st.integers(0, 4),
)
def test_generate_matches_oracle_at_temperature_zero(seed, budget, prompt, count, noise, max_children, spine):
    target = TableTarget(seed=seed)
    drafter = NoisyDrafter(target, noise)
    result = generate(
        target, drafter, prompt, budget=budget, max_new_tokens=count, max_children=max_children, spine=spine
    )
    assert result.token_ids.tolist() == plain_text(target, prompt, count)
    assert result.target_passes <= count


@given(seed=st.integers(0, 2**16), budget=st.integers(1, 30), count=st.integers(1, 10))
def test_generate_is_invariant_under_budget_at_temperature_above_zero(seed, budget, count):
    target = TableTarget(seed=seed)
    settings = {"max_new_tokens": count, "temperature": 0.9, "seed": seed}
    plain = generate(target, None, [1, 2], budget=0, **settings)
    tree = generate(target, NoisyDrafter(target), [1, 2], budget=budget, **settings)
    assert tree.token_ids.tolist() == plain.token_ids.tolist()


def test_generate_matches_target_distribution():
    """Three tokens over a vocabulary of three: 27 texts, each as frequent as the target says (chi-square)."""
    target = TableTarget(vocab_size=3, seed=3, sharpness=0.5)
    drafter = NoisyDrafter(target, noise=1.0)
    draws = 1000
    counts = np.zeros(27)
    for seed in range(draws):
        result = generate(target, drafter, [0], budget=6, max_new_tokens=3, temperature=1.3, seed=seed)
        counts[int(np.dot(result.token_ids, [9, 3, 1]))] += 1
    expected = np.ones(27)
    for index, text in enumerate(itertools.product(range(3), repeat=3)):
        for at, token in enumerate(text):
            weights = np.exp(target.logits_after([0, *text[:at]]) / 1.3)
            expected[index] *= weights[token] / weights.sum()
    assert draws * expected.min() > 5
    assert stats.chisquare(counts, draws * expected).pvalue > 1e-3


def test_generate_stops_at_first_stop_token_and_keeps_it():
    """Whatever the budget, and whatever collection names the token."""
    target = TableTarget(seed=1)
    full = generate(target, NoisyDrafter(target, 0.0), [0], budget=8, max_new_tokens=30).token_ids.tolist()
    stop = full[7]
    cut = full[: full.index(stop) + 1]
    collections = ([stop], (stop,), {stop}, np.array([stop]), bytes([stop]), range(stop, stop + 1))
    for budget, stops in [*((budget, [stop]) for budget in (0, 1, 30)), *((8, stops) for stops in collections)]:
        drafter = NoisyDrafter(target, 0.0)
        result = generate(target, drafter, [0], budget=budget, max_new_tokens=30, stop_token_ids=stops)
        assert result.token_ids.tolist() == cut


def test_generate_counts_passes_and_drafts():
    target = TableTarget(seed=2)
    drafter = NoisyDrafter(target, 0.0)  # knows the greedy text, so every draft is accepted
    result = generate(target, drafter, [0], budget=4, max_children=1, max_new_tokens=20)
    assert [r.num_accepted for r in result.rounds] == [4, 4, 4, 4]
    assert [len(r.token_ids) for r in result.rounds] == [5, 5, 5, 5]
    assert [r.context_len for r in result.rounds] == [0, 5, 10, 15]
    assert result.tokens_per_pass == 5.0
    assert target.passes == 4


def test_generate_prefills_long_prompts_in_pieces():
    target = TableTarget(seed=5)
    prompt = (np.arange(300) % 5).tolist()
    result = generate(target, NoisyDrafter(target), prompt, budget=10, max_new_tokens=4)
    assert result.token_ids.tolist() == plain_text(target, prompt, 4)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"prompt_ids": []}, ArgumentError, "prompt_ids"),
        ({"prompt_ids": [[1, 2]]}, ArgumentError, "prompt_ids"),
        ({"prompt_ids": [0.5]}, ArgumentError, "prompt_ids"),
        ({"prompt_ids": [5]}, ArgumentError, "prompt_ids"),
        ({"prompt_ids": [-1]}, ArgumentError, "prompt_ids"),
        ({"budget": -1}, ArgumentError, "budget"),
        ({"budget": 1.5}, DTypeError, "budget"),
        ({"max_new_tokens": -1}, ArgumentError, "max_new_tokens"),
        ({"temperature": -0.1}, ArgumentError, "temperature"),
        ({"temperature": np.nan}, ArgumentError, "temperature"),
        ({"drafter": None}, ArgumentError, "drafter"),
        ({"prompt_ids": [[1], [2, 3]]}, ShapeError, "`prompt_ids` is ragged"),
        ({"prompt_ids": "abc"}, ArgumentError, "prompt_ids"),
        ({"prompt_ids": np.ma.masked_array([1, 2])}, DTypeError, "`prompt_ids` is a masked array"),
        ({"budget": "8"}, DTypeError, "budget"),
        ({"max_new_tokens": 4.0}, DTypeError, "max_new_tokens"),
        ({"temperature": "hot"}, DTypeError, "temperature"),
        ({"seed": -1}, ArgumentError, "seed"),
        ({"seed": None}, DTypeError, "seed"),
        ({"stop_token_ids": [[1]]}, DTypeError, r"`stop_token_ids` is \[1\], expected an integer"),
        ({"stop_token_ids": np.array([[1]])}, DTypeError, "stop_token_ids"),
        ({"stop_token_ids": np.array(1)}, DTypeError, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, DTypeError, "`stop_token_ids` is 'a', expected an integer"),
        ({"stop_token_ids": "a"}, DTypeError, "`stop_token_ids` is 'a', expected a collection"),
        ({"stop_token_ids": [1.0]}, DTypeError, "`stop_token_ids` is 1.0, expected an integer"),
        ({"stop_token_ids": [True]}, DTypeError, "stop_token_ids"),
        ({"stop_token_ids": 1}, DTypeError, "stop_token_ids"),
        ({"stop_token_ids": None}, DTypeError, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, ArgumentError, r"`stop_token_ids` is -1, expected an integer in 0\.\.4"),
        ({"stop_token_ids": [5]}, ArgumentError, "stop_token_ids"),
        ({"max_children": "a"}, DTypeError, "max_children"),
        ({"spine": -1}, ArgumentError, "spine"),
    ],
)
def test_generate_rejects(changed, error, words):
    target = TableTarget()
    arguments = {"target": target, "drafter": NoisyDrafter(target), "prompt_ids": [1], "budget": 3, "max_new_tokens": 4}
    with pytest.raises(error, match=words):
        generate(**{**arguments, **changed})
    assert target.passes == 0
