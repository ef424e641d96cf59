"""The bundled models: text identical to autoregressive decoding, and enough tokens per pass to be worth it."""

import pytest

from ddtree_cupy.decode.evaluate import Run, heldout_prompts, is_periodic, lossless, run_all, tokens_per_pass

PROMPTS = heldout_prompts(3)


def test_decoding_is_identical_to_autoregressive_in_float64():
    rows = lossless(PROMPTS, (-1, 1, 15, 64), max_new_tokens=20, dtype="float64", workers=1)
    assert [(row["identical"], row["of"], row["first"]) for row in rows] == [(3, 3, [])] * 4


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tree_adds_more_tokens_a_pass_than_the_chain(temperature):
    """Bounds far below what `make curve` measures on 100 prompts: this one guards against a broken drafter."""
    of = {}
    for budget in (-1, 64):
        runs = [Run(*place, budget, 48, temperature, i, "float32") for i, place in enumerate(PROMPTS)]
        of[budget] = tokens_per_pass(run_all(runs, workers=1))["tokens_per_pass"]
    assert of[-1] > 2.5
    assert of[64] > 1.1 * of[-1]


def test_is_periodic_looks_at_the_end():
    assert is_periodic(b"start" + b"ab" * 40)
    assert is_periodic(bytes(range(64)) + bytes(range(16)) * 4)
    assert not is_periodic(bytes(range(17)) * 10)
    assert not is_periodic(b"ab" * 40 + b"end")


def test_heldout_prompts_are_distinct_places():
    places = heldout_prompts(100)
    assert len(set(places)) == 100
    assert len({name for name, _ in places}) == 10
