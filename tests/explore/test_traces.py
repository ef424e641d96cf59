"""Traces: what ships, what a recorder writes, and files that are not what they claim."""

import dataclasses
import json

import numpy as np
import pytest
from toys import NoisyDrafter, TableTarget

from ddtree_cupy import Candidates
from ddtree_cupy.errors import ArgumentError, DDTreeError, WeightsError
from ddtree_cupy.explore import BestFirst, Traces, record, score
from ddtree_cupy.explore.__main__ import main
from ddtree_cupy.explore.traces import SHIPPED_TRACES


@pytest.fixture(scope="module")
def traces():
    return Traces.load()


@pytest.fixture
def toy_traces():
    target = TableTarget(vocab_size=40)
    return record(target, NoisyDrafter(target), [[1], [2, 3]], num_positions=5, max_budget=8, width=9, progress=False)


def test_shipped_traces_are_what_the_issue_asks_for(traces):
    assert SHIPPED_TRACES.stat().st_size <= 4 << 20
    assert traces.num_positions >= 600
    assert len({len(traces.prompt(q)) for q in range(traces.num_prompts)}) == 1  # whole prompts
    assert traces.max_budget == 256
    assert traces.candidates.logits.dtype == traces.candidates.lse.dtype == np.float32
    assert "float64" in traces.about["target"]
    assert "ddtree_cupy.explore record" in traces.about["command"]


def test_shipped_traces_are_those_of_the_bundled_models(traces, tmp_path):
    main(["record", "--prompts", "2", "--positions", "3", "--out", str(tmp_path / "again.npz")])
    again = Traces.load(tmp_path / "again.npz")
    # the first and the last held-out place are picked whatever the number of prompts
    assert again.prompt_names == (traces.prompt_names[0], traces.prompt_names[-1])
    shipped = traces.select([0, traces.num_prompts - 1])
    rows = np.array([0, 1, 2, 32, 33, 34])
    assert np.array_equal(again.continuations, shipped.continuations[rows])
    width = again.width
    same = again.candidates.token_ids == shipped.candidates.token_ids[rows][..., :width]
    assert same.mean() > 0.999  # another BLAS rounds differently, and may swap two ranks
    difference = again.candidates.logits - shipped.candidates.logits[rows][..., :width]
    assert np.abs(difference).max() < 1e-4
    assert np.abs(again.candidates.lse - shipped.candidates.lse[rows]).max() < 1e-4


def test_record_keeps_the_targets_own_text(toy_traces):
    target = TableTarget(vocab_size=40)
    for index, prompt in enumerate(([1], [2, 3])):
        text = list(prompt)
        for _ in range(9):
            text.append(int(np.argmax(target.logits_after(text))))
        new = text[len(prompt) :]
        positions = toy_traces.prompt(index)
        assert toy_traces.continuations[positions].tolist() == [new[p : p + 5] for p in range(5)]
        assert toy_traces.root_token_ids[positions].tolist() == text[len(prompt) - 1 :][:5]
        assert toy_traces.context_lens[positions].tolist() == [len(prompt) - 1 + p for p in range(5)]


def test_record_widens_until_no_tree_uses_the_last_rank():
    target = TableTarget(vocab_size=40, sharpness=0.01)  # nearly uniform: trees are wide
    drafter = NoisyDrafter(target, 0.0)
    narrow = record(target, drafter, [[1]], num_positions=4, max_budget=20, width=3)
    assert 20 < narrow.width <= 22
    assert narrow.about["width"].startswith("3 ranks widened to")
    wide = record(target, drafter, [[1]], num_positions=4, max_budget=20, width=40)
    assert "width" not in wide.about
    for budget in range(21):
        first, second = (score(traces, BestFirst(budget)) for traces in (narrow, wide))
        assert np.array_equal(first.num_accepted, second.num_accepted)
        assert np.array_equal(first.hit_ranks, second.hit_ranks)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompts": []}, "`prompts` is empty"),
        ({"prompts": [[]]}, r"`prompts\[0\]` has shape \(0,\)"),
        ({"prompts": [[40]]}, r"leaves 0\.\.39"),
        ({"num_positions": 0}, "num_positions"),
        ({"temperature": -1.0}, "`temperature` is -1"),
        ({"names": ["a", "b"]}, "`names` has 2 entries for 1 prompts"),
    ],
)
def test_record_rejects_bad_arguments(changed, message):
    target = TableTarget(vocab_size=40)
    arguments = {"prompts": [[1]], "num_positions": 2, **changed}
    with pytest.raises(DDTreeError, match=message):
        record(target, NoisyDrafter(target), arguments.pop("prompts"), **arguments)


def test_saved_traces_come_back_identical(toy_traces, tmp_path):
    toy_traces.save(tmp_path / "file")
    again = Traces.load(tmp_path / "file")
    for name in ("token_ids", "logits", "lse"):
        first, second = (getattr(t.candidates, name) for t in (toy_traces, again))
        assert np.array_equal(first, second)
        assert first.dtype == second.dtype
    for field in dataclasses.fields(Traces)[1:]:
        assert np.array_equal(getattr(toy_traces, field.name), getattr(again, field.name))


def test_load_rejects_other_files(toy_traces, tmp_path):
    path = tmp_path / "traces.npz"
    with pytest.raises(WeightsError, match="no such"):
        Traces.load(path)
    toy_traces.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    with pytest.raises(WeightsError, match="truncated"):
        Traces.load(path)
    with np.load(SHIPPED_TRACES) as file:
        arrays = dict(file)
    np.savez(path, **{name: value for name, value in arrays.items() if name != "__header__"})
    with pytest.raises(WeightsError, match="not a traces file of format"):
        Traces.load(path)
    arrays["continuations"] = arrays["continuations"].copy()
    arrays["continuations"][3, 0] ^= 1
    np.savez(path, **arrays)
    with pytest.raises(WeightsError, match="checksum"):
        Traces.load(path)
    np.savez(path, **{**arrays, "lse": np.array([{}], object)})
    with pytest.raises(WeightsError, match="truncated or altered"):
        Traces.load(path)
    header = json.loads(arrays["__header__"].tobytes())
    header["vocab_size"] = 3
    np.savez(path, **{**arrays, "__header__": np.frombuffer(json.dumps(header).encode(), np.uint8)})
    with pytest.raises(WeightsError, match="checksum"):
        Traces.load(path)


@pytest.mark.parametrize("field", ["root_token_ids", "continuations", "context_lens"])
def test_validate_rejects_a_position_that_does_not_follow(toy_traces, field):
    array = getattr(toy_traces, field).copy()
    array[7] = (array[7] + 1) % 40
    with pytest.raises(ArgumentError, match=r"position [78] does not continue position [67]"):
        dataclasses.replace(toy_traces, **{field: array}).validate()


@pytest.mark.parametrize("index", [-1, 2, 0.0, "0", True, None])
def test_prompt_and_select_reject_indices_that_are_none(toy_traces, index):
    with pytest.raises(DDTreeError, match=r"Traces.prompt: `index` is .*, expected an integer"):
        toy_traces.prompt(index)
    with pytest.raises(DDTreeError, match=r"Traces.select: `prompts\[1\]` is .*, expected an integer"):
        toy_traces.select([0, index])
    assert toy_traces.select(np.array([1, 0])).prompt_names == ("prompt 1", "prompt 0")


def test_validate_rejects_prompts_without_positions(toy_traces):
    starts, names = toy_traces.prompt_starts, ("empty", *toy_traces.prompt_names)
    for at in (0, 1, 2):
        empty = np.insert(starts, at, starts[at]).astype(np.int32)
        with pytest.raises(ArgumentError, match="each prompt must have a position"):
            dataclasses.replace(toy_traces, prompt_starts=empty, prompt_names=names).validate()
    assert toy_traces.select([]).validate().num_prompts == 0


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("candidates", lambda kept: kept._map(lambda array: array[0]), r"`candidates\.token_ids` is \(4, \d+\), exp"),
        ("candidates", lambda kept: None, "`candidates` is NoneType, expected Candidates"),
        ("candidates", lambda kept: kept._map(lambda array: array.tolist()), r"`candidates\.token_ids` is list"),
        ("candidates", lambda kept: Candidates(kept.token_ids, kept.logits[:3], kept.lse), r"`candidates\.logits` is"),
        ("root_token_ids", lambda array: array.tolist(), "`root_token_ids` is list, expected a NumPy"),
        ("root_token_ids", lambda array: array.astype(np.int64), "`root_token_ids` has dtype int64, expected int32"),
        ("continuations", lambda array: array[:, :-1], r"`continuations` is \(10, 4\), expected \(num_positions, 5\)"),
        ("context_lens", lambda array: array[:-1], r"`context_lens` is \(9,\), expected \(num_positions,\)"),
        ("prompt_starts", lambda array: array[:-1], r"`prompt_starts` is \(2,\), expected \(3,\)"),
        ("prompt_starts", lambda array: np.float32(1), "`prompt_starts` is float32, expected a NumPy array"),
        ("prompt_names", lambda names: list(names), "`prompt_names` is list, expected tuple"),
        ("vocab_size", lambda size: float(size), "`vocab_size` is 40.0, expected an integer"),
        ("max_budget", lambda budget: -1, "`max_budget` is -1, expected an integer at least 0"),
    ],
)
def test_validate_rejects_other_forms(toy_traces, field, change, message):
    wrong = dataclasses.replace(toy_traces, **{field: change(getattr(toy_traces, field))})
    with pytest.raises(DDTreeError, match=f"Traces: {message}"):
        wrong.validate()
