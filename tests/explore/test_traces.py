"""Traces: what ships, what a recorder writes, and files that are not what they claim."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddtree_cupy import Candidates, _files
from ddtree_cupy.errors import ArgumentError, DDTreeError, WeightsError
from ddtree_cupy.explore import BestFirst, Traces, record, score
from ddtree_cupy.explore.__main__ import main
from ddtree_cupy.explore.traces import SHIPPED_TRACES
from tests.toys import NoisyDrafter, TableTarget


@pytest.fixture(scope="module")
def toy_traces():
    target = TableTarget(vocab_size=40)
    return record(target, NoisyDrafter(target), [[1], [2, 3]], num_positions=5, max_budget=8, width=9, progress=False)


def test_shipped_traces_are_small_and_say_where_they_come_from(traces):
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
    # another BLAS rounds differently, and may swap two ranks or keep one less
    assert np.abs(again.row_widths - shipped.row_widths[rows]).max() <= 1
    kept = np.arange(again.width) < np.minimum(again.row_widths, shipped.row_widths[rows])[..., None]
    first, second = again.candidates, shipped.candidates.map(lambda array: array[rows])
    assert (first.token_ids == second.token_ids)[kept].mean() > 0.999
    assert np.abs(first.logits[kept] - second.logits[kept]).max() < 1e-4
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


@pytest.mark.parametrize(
    ("temperature", "wanted"),
    [
        (0.0, "cbc5eaf6ee45128eecdc6270cabcc67be93ee71b18e57a44d9b2dc712b0383da"),
        (0.8, "d578aabbf0d49aec8afe9067a727adafa5a77e9a5277b7ae3987b507665a7eed"),
    ],
)
def test_recorded_tokens_and_ranks_are_those_of_a_stored_hash(temperature, wanted):
    """Draws, roots and ranks do not move; the tiny models' logits are compared above, as far as BLAS allows."""
    target = TableTarget(vocab_size=40, seed=1)
    prompts = [[1], [2, 3], (np.arange(150) % 5).tolist()]
    options = {"num_positions": 6, "max_budget": 20, "width": 3, "temperature": temperature, "seed": 7}
    traces = record(target, NoisyDrafter(target), prompts, progress=False, **options)
    digest = hashlib.sha256(traces.candidates.token_ids.tobytes())
    for name in ("row_widths", "root_token_ids", "continuations", "context_lens", "prompt_starts"):
        digest.update(getattr(traces, name).tobytes())
    assert digest.hexdigest() == wanted


class HoledDrafter(NoisyDrafter):
    """A drafter that rules out a third of the tokens at one depth."""

    def propose(self, state, root_token_id):
        logits = super().propose(state, root_token_id)
        logits[len(state) % len(logits), : logits.shape[1] // 3] = -np.inf
        return logits


@given(
    seed=st.integers(0, 2**16),
    sharpness=st.sampled_from([0.0, 0.01, 1.0, 4.0]),  # 0: every row a tie
    width=st.integers(1, 12),
    max_budget=st.integers(1, 24),
    vocab_size=st.sampled_from([5, 20, 40]),
    share=st.floats(0.0, 1.0),
    max_depth=st.sampled_from([None, 1, 2, 3]),
    max_children=st.sampled_from([None, 1, 2, 3, 5, 8, 13]),
    spine=st.integers(0, 4),
    min_path_score=st.sampled_from([None, -3.0]),
    is_holed=st.booleans(),
)
@example(0, 0.01, 3, 20, 40, 1.0, 1, None, 0, None, False)  # all nodes on one row
@example(0, 0.01, 8, 24, 40, 1.0, 2, 13, 0, None, False)  # few children leave more nodes to the second row
@example(0, 0.0, 12, 24, 40, 1.0, 2, 12, 0, None, False)
@example(0, 0.01, 3, 24, 40, 1.0, 2, 5, 0, None, True)
def test_recorded_ranks_suffice_for_best_first_trees(
    seed, sharpness, width, max_budget, vocab_size, share, max_depth, max_children, spine, min_path_score, is_holed
):
    target = TableTarget(vocab_size, seed=seed, sharpness=sharpness)
    drafter = (HoledDrafter if is_holed else NoisyDrafter)(target, sharpness / 2)
    options = {"num_positions": 3, "max_budget": max_budget, "progress": False}
    narrow = record(target, drafter, [[1]], width=width, **options)
    whole = record(target, drafter, [[1]], width=vocab_size, **options)
    assert (whole.row_widths == vocab_size).all()
    assert (narrow.row_widths >= min(width, vocab_size)).all()
    assert (narrow.row_widths <= min(max(width, max_budget + 1), vocab_size)).all()
    policy = BestFirst(
        round(share * max_budget),
        max_depth=max_depth,
        max_children=max_children,
        spine=spine,
        min_path_score=min_path_score,
    )
    first, second = (score(traces, policy) for traces in (narrow, whole))
    for name in ("num_accepted", "num_nodes", "hit_ranks", "expected_tokens"):
        assert np.array_equal(getattr(first, name), getattr(second, name))


def test_record_says_that_it_kept_more():
    target = TableTarget(vocab_size=40, sharpness=0.01)  # nearly uniform: trees are wide
    drafter = NoisyDrafter(target, 0.0)
    narrow = record(target, drafter, [[1]], num_positions=4, max_budget=20, width=3)
    assert narrow.width == 21
    assert narrow.about["width"] == "3 ranks widened to up to 21 for trees of 20 nodes"
    assert "width" not in record(target, drafter, [[1]], num_positions=4, max_budget=20, width=40).about


@pytest.mark.parametrize("max_depth", [1, 2, 3, 5, 9, None])
@pytest.mark.parametrize("max_children", [47, 48, 64, None])
def test_shipped_traces_suffice_for_capped_trees_of_256_nodes(traces, max_depth, max_children):
    some = traces.select([0, 7, 15, 23])
    policy = BestFirst(256, max_depth=max_depth, max_children=max_children)
    tree = policy.build(some.candidates, some.root_token_ids)
    reached = score(some, policy).num_nodes
    assert np.array_equal(reached, tree.num_nodes)
    assert reached.max() == (1 + min(256, max_children or 256) if max_depth == 1 else 257)


@pytest.mark.parametrize("which", ["even rows", "ragged rows", "no positions"])
def test_saved_traces_come_back_identical(toy_traces, tmp_path, which):
    traces = toy_traces.select([]) if which == "no positions" else toy_traces
    if which == "ragged rows":
        target = TableTarget(vocab_size=300, sharpness=1.0)
        traces = record(target, NoisyDrafter(target), [[1], [2, 3]], num_positions=5, max_budget=30, width=2)
        assert len(set(traces.row_widths.ravel().tolist())) > 3
    traces.save(tmp_path / "file")
    again = Traces.load(tmp_path / "file")
    for name in ("token_ids", "logits", "lse"):
        first, second = (getattr(t.candidates, name) for t in (traces, again))
        assert np.array_equal(first, second) or which == "no positions"
        assert first.dtype == second.dtype
        assert len(first) == len(second)
    for field in dataclasses.fields(Traces)[1:]:
        assert np.array_equal(getattr(traces, field.name), getattr(again, field.name))


def other_vocabulary(raw):
    header = json.loads(raw.tobytes()) | {"vocab_size": 3}
    return np.frombuffer(json.dumps(header).encode(), np.uint8)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("continuations", lambda array: array ^ 1, "checksum"),
        ("__header__", other_vocabulary, "checksum"),
        ("__header__", lambda raw: raw[:0], "truncated or altered"),
        ("lse", lambda array: np.array([{}], object), "truncated or altered"),
        ("extra", lambda array: np.zeros(1), "not a traces file of format"),
        # and under a right checksum
        ("row_widths", lambda array: np.where(array == array.max(), 2**31 - 1, array).astype(np.int32), ""),
        ("row_widths", lambda array: array - 1, ""),
        ("row_widths", lambda array: array.astype(np.int64), ""),
        ("row_widths", lambda array: array.astype(str), ""),
        ("row_widths", lambda array: array.ravel(), ""),
        ("token_ids", lambda array: array[:-1], ""),
        ("token_ids", lambda array: array[None], ""),
        ("token_ids", lambda array: array.astype(np.float32), ""),
        ("token_ids", lambda array: array.astype(np.int64) + 2**32, ""),
        ("token_ids", lambda array: array.astype(np.int64) - 2**32, ""),
        ("logits", lambda array: array.astype(np.float64), ""),
        ("logits", lambda array: array.astype(np.complex64), ""),
        ("logits", lambda array: array[:, None], ""),
    ],
)
def test_load_rejects_other_contents(toy_traces, tmp_path, monkeypatch, name, change, words):
    if not words:
        monkeypatch.setattr(_files, "checksum", lambda about, arrays: "right")
    toy_traces.save(tmp_path / "file")
    with np.load(tmp_path / "file") as file:
        arrays = dict(file)
    np.savez(tmp_path / "file.npz", **{**arrays, name: change(arrays.get(name))})
    with pytest.raises(WeightsError, match=words or name):
        Traces.load(tmp_path / "file.npz")


def test_load_rejects_other_files(toy_traces, tmp_path):
    path = tmp_path / "traces.npz"
    with pytest.raises(WeightsError, match="no such"):
        Traces.load(path)
    toy_traces.save(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(WeightsError, match="truncated"):
        Traces.load(path)
    np.savez(path, continuations=toy_traces.continuations)
    with pytest.raises(WeightsError, match="not a traces file of format"):
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
        ("candidates", lambda kept: kept.map(lambda array: array[0]), r"`candidates\.token_ids` is \(4, \d+\), exp"),
        ("candidates", lambda kept: None, "`candidates` is NoneType, expected Candidates"),
        ("candidates", lambda kept: kept.map(lambda array: array.tolist()), r"`candidates\.logits` has dtype float64"),
        ("candidates", lambda kept: Candidates(kept.token_ids, kept.logits[:3], kept.lse), r"`candidates\.logits` is"),
        ("row_widths", lambda array: array[:, :-1], r"`row_widths` is \(10, 3\), expected \(num_positions, 4\)"),
        ("row_widths", lambda array: array + 99, r"`row_widths` leaves 0\.\.9, the ranks of `candidates`"),
        ("row_widths", lambda array: array - 1, r"`candidates\.token_ids` has ids past `row_widths`, expected -1"),
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
