"""Rounds logged by other systems: small files of their form, read and counted, and lines that contradict themselves."""

import json

import numpy as np
import pytest

from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError, WeightsError
from ddtree_cupy.explore import read_ddtreeplus, read_jetspec, read_vllm_metrics

JETSPEC = [
    {"sample": 4, "prompt": "p", "output": "o", "token_ids": [1, 2], "num_tokens": 9, "decode_time_s": 0.5}
    | {"accept_lengths": [3, 1, 5], "tree_sizes": [7, 7, 6], "rounds": 3},
    {"sample": 5, "num_tokens": 2, "accept_lengths": [2]},
    {"sample": 6, "num_tokens": 0, "accept_lengths": [], "rounds": 0},
]
DDTREEPLUS = [
    {"sample_index": 0, "method_key": "tree", "round_index": 0, "action_name": "flat", "features": [0.5]}
    | {"branch_widths": [3, 1], "accepted_length": 4, "latency_ms": 17.5},
    {"sample_index": 0, "method_key": "tree", "round_index": 1, "action_name": "sharp", "accepted_length": 1},
    {"sample_index": 1, "method_key": "tree", "round_index": 0, "action_name": "flat", "accepted_length": 2},
]
DETAILED = {"acceptance_histogram": [1, 2, 0, 1], "per_step_accepted": [1, 3, 0, 1], "per_step_drafted": [3, 3, 1, 2]}


def write(path, lines):
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_jetspec_trees_and_chains_are_read(tmp_path):
    found = read_jetspec(write(tmp_path / "tree.jsonl", [*JETSPEC, ""]))
    assert found.num_accepted.tolist() == [2, 0, 4, 1]
    assert found.prompts.tolist() == [4, 4, 4, 5]
    assert found.tree_sizes.tolist() == [7, 7, 6, -1]
    assert np.isnan(found.round_us).all()
    assert (found.num_rounds, found.num_tokens, found.tokens_per_pass) == (4, 11, 2.75)
    assert found.acceptance_histogram.tolist() == [1, 1, 1, 0, 1]
    assert repr(found) == "LoggedRounds('JetSpec tree', rounds=4, tokens_per_pass=2.750)"
    chain = read_jetspec(
        str(write(tmp_path / "chain.jsonl", [{"acceptance_lengths": [2, 2]}, {"acceptance_lengths": [1]}]))
    )
    assert (chain.source, chain.prompts.tolist(), chain.tokens_per_pass) == ("JetSpec chain", [0, 0, 1], 5 / 3)
    empty = read_jetspec(write(tmp_path / "empty.jsonl", []))
    assert (empty.num_rounds, empty.num_tokens) == (0, 0)
    assert np.isnan(empty.tokens_per_pass)


@pytest.mark.parametrize(
    ("line", "error", "words"),
    [
        ({"sample": 5}, ArgumentError, "`accept_lengths` of line 2 of .* is missing; the object has sample"),
        (
            {"accept_lengths": [1, 0]},
            ArgumentError,
            r"`accept_lengths\[1\]` of `line 2 of .*` is 0, expected an integer in",
        ),
        ({"accept_lengths": [1.5]}, DTypeError, r"`accept_lengths\[0\]` of `line 2 .*` is 1.5, expected an integer"),
        ({"accept_lengths": [2**40]}, ArgumentError, r"`accept_lengths\[0\]`"),
        ({"accept_lengths": 3}, DTypeError, "`accept_lengths` of line 2 .* is int, expected a list of integers"),
        ({"accept_lengths": [1], "rounds": 2}, ArgumentError, "`rounds` of line 2 .* is 2, expected 1, the entries of"),
        (
            {"accept_lengths": [1], "tree_sizes": [1, 2]},
            ShapeError,
            "`tree_sizes` of line 2 .* has 2 entries, expected 1",
        ),
        ({"accept_lengths": [1], "sample": "a"}, DTypeError, "`sample` of `line 2 .*` is 'a'"),
        ({"acceptance_lengths": [1]}, ArgumentError, "`acceptance_lengths` of line 2 .* is beside rounds of the other"),
        (
            {"acceptance_lengths": [1], "accept_lengths": [1]},
            ArgumentError,
            "`acceptance_lengths` .* expected trees or chains alone",
        ),
        ([1], DTypeError, "`line 2 of .*` is list, expected an object with named fields"),
        ("{", WeightsError, "line 2 of .* is not JSON"),
        ("[" * 100_000, WeightsError, "line 2 of .* is not JSON"),
    ],
)
def test_jetspec_rejects(tmp_path, line, error, words):
    with pytest.raises(error, match=f"^read_jetspec: {words}"):
        read_jetspec(write(tmp_path / "file.jsonl", [JETSPEC[0], line]))


def test_ddtreeplus_is_read_by_method_and_action(tmp_path):
    found = read_ddtreeplus(write(tmp_path / "file.jsonl", DDTREEPLUS))
    assert list(found) == [("tree", "flat"), ("tree", "sharp")]
    flat = found["tree", "flat"]
    assert (flat.source, flat.num_accepted.tolist(), flat.prompts.tolist()) == ("tree, flat", [3, 1], [0, 1])
    assert flat.round_us[0] == 17_500.0
    assert np.isnan(flat.round_us[1])
    assert found["tree", "sharp"].tokens_per_pass == 1.0


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"method_key": None}, ArgumentError, "`method_key` of line 1 of .* is missing"),
        ({"action_name": 3}, DTypeError, "`action_name` of line 1 .* is int, expected a text"),
        ({"sample_index": -1}, ArgumentError, "`sample_index` of `line 1 .*` is -1"),
        ({"round_index": "0"}, DTypeError, "`round_index` of `line 1 .*` is '0'"),
        ({"accepted_length": 0}, ArgumentError, r"`accepted_length` of `line 1 .*` is 0, expected an integer in 1\.\."),
        ({"latency_ms": "fast"}, DTypeError, "`latency_ms` of `line 1 .*` is 'fast', expected a real number"),
        ({"latency_ms": float("nan")}, ArgumentError, "`latency_ms` of `line 1 .*` is nan"),
        ({"round_index": 1}, ArgumentError, "`round_index` of line 2 .* is 1, and that round of sample 0 of tree came"),
    ],
)
def test_ddtreeplus_rejects(tmp_path, changed, error, words):
    with pytest.raises(error, match=f"^read_ddtreeplus: {words}"):
        read_ddtreeplus(write(tmp_path / "file.jsonl", [DDTREEPLUS[0] | changed, *DDTREEPLUS[1:]]))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: m,
        lambda m: {"speculative_decoding": m},
        lambda m: {"choices": [], "metrics": {"speculative_decoding": m}},
    ],
)
def test_vllm_metrics_are_read_from_responses_and_their_parts(wrap):
    summary = {"acceptance_histogram": [39, 1, 0, 3], "num_spec_steps": 43}
    found = read_vllm_metrics([wrap(DETAILED), wrap(summary)])
    assert found.num_accepted[:4].tolist() == [1, 3, 0, 1]
    assert found.tree_sizes[:5].tolist() == [3, 3, 1, 2, -1]
    assert found.prompts.tolist() == [0] * 4 + [1] * 43
    assert found.num_accepted[4:].tolist() == [0] * 39 + [1] + [3] * 3
    assert read_vllm_metrics(wrap(summary)).tokens_per_pass == 1.2325581395348837  # as its documentation says
    assert read_vllm_metrics([]).num_rounds == read_vllm_metrics(wrap({"acceptance_histogram": [0, 0]})).num_rounds == 0


@pytest.mark.parametrize(
    ("requests", "error", "words"),
    [
        (3, DTypeError, "`requests` is int, expected a sequence"),
        ("metrics", DTypeError, "`requests` is str, expected a sequence"),
        ([DETAILED, 3], DTypeError, r"`requests\[1\]` is int, expected an object with named fields"),
        ({}, ArgumentError, r"`acceptance_histogram` of requests\[0\] is missing; the object has nothing"),
        (
            {"metrics": None},
            ArgumentError,
            r"`requests\[0\]\.metrics` is null: .*--per-request-spec-decode-metrics detailed",
        ),
        (
            {"metrics": {"speculative_decoding": None}},
            ArgumentError,
            r"`requests\[0\]\.metrics\.speculative_decoding` is null",
        ),
        (
            DETAILED | {"acceptance_histogram": {"0": 1}},
            DTypeError,
            "`acceptance_histogram` of .* is dict, expected a list",
        ),
        (DETAILED | {"acceptance_histogram": [-1]}, ArgumentError, r"`acceptance_histogram\[0\]` of .* is -1"),
        (
            DETAILED | {"per_step_accepted": [1, 3, 0]},
            ShapeError,
            "`per_step_accepted` of .* has 3 entries, expected 4",
        ),
        (
            DETAILED | {"per_step_accepted": [1, 3, 0, 0]},
            ArgumentError,
            "`per_step_accepted` of .* contradicts `accept",
        ),
        (DETAILED | {"per_step_drafted": [3, 3, 1]}, ShapeError, "`per_step_drafted` of .* has 3 entries, expected 4"),
        (
            DETAILED | {"per_step_drafted": [3, 2, 1, 2]},
            ArgumentError,
            r"`per_step_accepted\[1\]` of .* is 3, .* most 2",
        ),
    ],
)
def test_vllm_metrics_reject(requests, error, words):
    with pytest.raises(error, match=f"^read_vllm_metrics: {words}"):
        read_vllm_metrics(requests)
