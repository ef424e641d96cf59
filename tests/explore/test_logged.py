"""Traces of logged logits: those that `record` makes of the same models, and what contradicts itself is refused."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy.decode import generate
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError
from ddtree_cupy.explore import BestFirst, Traces, record, replay
from tests.explore.live import live_rounds, replayed_rounds
from tests.toys import NoisyDrafter, TableTarget

PROMPTS = [[1], [2, 3, 0]]


def logged(target, drafter, prompts, num_positions):
    """Decode, and log the drafter's logits at every token from the last one of the prompt on."""
    tokens, logits, starts = [], [], [0]
    for prompt in prompts:
        new = generate(target, None, prompt, budget=0, max_new_tokens=num_positions + drafter.draft_len)
        text = [*prompt, *new.token_ids.tolist()]
        for end in range(len(prompt), len(text) + 1):
            tokens.append(text[end - 1])
            logits.append(drafter.propose(text[: end - 1], text[end - 1]))
        starts.append(len(tokens))
    return np.array(logits), np.array(tokens), starts


def assert_same(found, expected):
    for field in dataclasses.fields(Traces)[1:]:
        if field.name != "about":
            assert np.array_equal(getattr(found, field.name), getattr(expected, field.name)), field.name
    for field in dataclasses.fields(found.candidates):
        first, second = (getattr(t.candidates, field.name) for t in (found, expected))
        assert np.array_equal(first, second, equal_nan=True), field.name


@given(
    seed=st.integers(0, 2**16),
    noise=st.sampled_from([0.0, 1.0]),
    width=st.integers(1, 8),
    max_budget=st.integers(1, 20),
)
def test_logged_logits_give_the_traces_of_the_recorder(seed, noise, width, max_budget):
    target = TableTarget(vocab_size=9, seed=seed)
    drafter = NoisyDrafter(target, noise)
    options = {"width": width, "max_budget": max_budget}
    expected = record(target, drafter, PROMPTS, num_positions=5, progress=False, **options)
    found = Traces.from_logits(*logged(target, drafter, PROMPTS, 5), context_lens=[0, 2], **options)
    assert_same(found, expected)
    assert replayed_rounds(found, 1, BestFirst(max_budget)) == live_rounds(
        target, drafter, found, 1, PROMPTS[1], budget=max_budget
    )


def test_one_prompt_and_names_and_notes():
    target = TableTarget(seed=3)
    logits, text, _ = logged(target, NoisyDrafter(target), [[1, 2]], 70)  # more positions than are read at a time
    found = Traces.from_logits(logits, text.tolist(), names=["mine"], about={"target": "toy"})
    assert (found.num_positions, found.prompt_names, found.about["target"]) == (70, ("mine",), "toy")
    assert found.context_lens.tolist() == list(range(70))
    assert_same(Traces.from_logits(logits, text, [0, len(text)], names=["mine"]), found)
    assert replay(found, BestFirst(8)).tokens_per_pass > 1


@pytest.mark.parametrize("kind", ["list", "float32", "float16", "bfloat16", "memmap"])
def test_logits_are_taken_as_they_come(kind, tmp_path):
    target = TableTarget(seed=3)
    logits, text, starts = logged(target, NoisyDrafter(target), PROMPTS, 4)
    logits = logits.astype(ml_dtypes.bfloat16)  # what every form can hold
    expected = Traces.from_logits(logits.astype(np.float32), text, starts)
    if kind == "list":
        given = logits.astype(np.float64).tolist()
    elif kind == "memmap":
        np.save(tmp_path / "logits.npy", logits.astype(np.float32))
        given = np.load(tmp_path / "logits.npy", mmap_mode="r")
    else:
        given = logits.astype(kind)
    rounded = Traces.from_logits(np.asarray(given).astype(np.float32), text, starts)
    assert_same(Traces.from_logits(given, text, starts), rounded if kind == "float16" else expected)


def test_bad_rows_and_rows_that_are_not_read():
    target = TableTarget(seed=3)
    logits, text, _ = logged(target, NoisyDrafter(target), [[1]], 6)
    logits[2, 1, 0] = np.nan
    logits[6:] = np.nan  # L + 1 tokens do not follow
    found = Traces.from_logits(logits, text)
    assert np.isnan(found.candidates.lse).sum() == 1
    assert found.num_positions == 6


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        (
            {"draft_logits": np.zeros((12, 5))},
            ShapeError,
            r"`draft_logits` is \(12, 5\), expected \(num_tokens, draft_len",
        ),
        ({"draft_logits": np.zeros((12, 4, 0))}, ShapeError, r"`draft_logits` is \(12, 4, 0\), expected a vocabulary"),
        ({"draft_logits": np.zeros((12, 4, 5), int)}, DTypeError, "`draft_logits` has dtype int64, expected float32"),
        ({"draft_logits": [[1.0], [1.0, 2.0]]}, ShapeError, "`draft_logits` is ragged"),
        ({"draft_logits": np.ma.zeros((12, 4, 5))}, DTypeError, "`draft_logits` is a masked array"),
        ({"text": np.zeros(11, int)}, ShapeError, r"`text` is \(11,\), expected \(12,\): one token for each"),
        ({"text": np.full(12, 5)}, ArgumentError, r"`text` leaves 0\.\.4"),
        ({"text": np.zeros(12)}, ArgumentError, "`text` has shape .* dtype float64, expected .* integers"),
        ({"prompt_starts": [0, 11]}, ArgumentError, r"`prompt_starts` is \[ 0, 11\], expected .* rise from 0 to 12"),
        ({"prompt_starts": [1, 12]}, ArgumentError, "expected numbers that rise from 0 to 12, the number of tokens"),
        ({"prompt_starts": [0, 7, 12]}, ArgumentError, "by at least 6 each: a position, and L "),
        ({"prompt_starts": [12]}, ArgumentError, "`prompt_starts` is"),
        ({"prompt_starts": [0.0, 12.0]}, ArgumentError, r"`prompt_starts` has .* float64, expected \(n,\) integers"),
        ({"context_lens": [1, 2]}, ArgumentError, "`context_lens` is .*, expected 1 lengths of at least 0, one per"),
        ({"context_lens": [-1]}, ArgumentError, "`context_lens` is"),
        ({"context_lens": [2**31]}, ArgumentError, "`context_lens` is .* all positions fit into int32"),
        ({"names": ["a", "b"]}, ArgumentError, "`names` has 2 entries for 1 prompts"),
        ({"names": "a"}, DTypeError, "`names` is str, expected a sequence"),
        ({"about": []}, DTypeError, "`about` is list, expected dict"),
        ({"max_budget": 0}, ArgumentError, r"`max_budget` is 0, expected an integer in 1\.\.65534"),
        ({"max_budget": 10**6}, ArgumentError, "`max_budget` is 1000000"),
        ({"width": 0}, ArgumentError, "`width` is 0"),
    ],
)
def test_from_logits_rejects(changed, error, words):
    arguments = {"draft_logits": np.zeros((12, 4, 5)), "text": np.zeros(12, int), "prompt_starts": None}
    with pytest.raises(error, match=rf"^Traces\.from_logits: .*{words}"):
        Traces.from_logits(**{**arguments, **changed})
    assert Traces.from_logits(**arguments).num_positions == 7
