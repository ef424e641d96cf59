"""The `ddtree` command: main job, errors in one sentence, exit codes, nothing half written."""

import json

import numpy as np
import pytest

from ddtree_cupy import DraftTree, build_tree
from ddtree_cupy.cli import main


@pytest.fixture
def logits_file(tmp_path):
    logits = 2 * np.random.default_rng(0).standard_normal((4, 20)).astype(np.float32)
    np.save(tmp_path / "logits.npy", logits)
    return tmp_path / "logits.npy"


def test_decode_compares_three_ways(capsys):
    assert main(["decode", "def add(a, b):\n", "--max-new-tokens", "24"]) == 0
    printed = capsys.readouterr().out
    assert "the three texts are identical" in printed
    assert printed.index("autoregressive") < printed.index("chain, 15 drafts") < printed.index("tree, budget 64")
    assert "‹" in printed.split("\n\n", 1)[1], "no accepted draft is marked"


def test_decode_prints_json(capsys):
    assert main(["decode", "x = ", "--max-new-tokens", "10", "--dtype", "float64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["identical"]
    assert found["ways"][0]["target_passes"] == 10


def test_decode_samples_the_same_text_three_ways(capsys):
    arguments = ["decode", "import ", "--max-new-tokens", "16", "--temperature", "0.8", "--seed", "3"]
    assert main([*arguments, "--dtype", "float64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["identical"]


def test_decode_shows_text_that_is_no_ascii(capsys):
    assert main(["decode", "# größer — ", "--max-new-tokens", "8"]) == 0
    assert "größer" in capsys.readouterr().out


def test_tree_matches_build_tree(logits_file, tmp_path, capsys):
    saved, drawn = tmp_path / "tree.npz", tmp_path / "tree.svg"
    assert (
        main(["tree", str(logits_file), "--budget", "7", "--root", "3", "--save", str(saved), "--svg", str(drawn)]) == 0
    )
    assert "8 nodes" in capsys.readouterr().out
    wanted = build_tree(np.load(logits_file), budget=7, root_token_ids=3)
    with np.load(saved) as file:
        tree = DraftTree(**{name: file[name] for name in file.files}).validate()
    assert tree.token_ids.tolist() == wanted.token_ids.tolist()
    assert tree.visibility_bits.tolist() == wanted.visibility_bits.tolist()
    assert drawn.read_text().count("<circle") == 8


def test_tree_reads_npz_and_prints_json(tmp_path, capsys):
    np.savez(tmp_path / "a.npz", draft_logits=np.zeros((2, 3), np.float32), other=np.zeros(1))
    assert main(["tree", str(tmp_path / "a.npz"), "--budget", "4", "--max-depth", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parents"] == [-1, 0, 0, 0]


def damaged(tmp_path, kind):
    path = tmp_path / "bad.npy"
    if kind == "missing":
        return path
    if kind == "text":
        path.write_text("no numbers here")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "truncated":
        np.save(path, np.zeros((4, 100), np.float32))
        path.write_bytes(path.read_bytes()[:-50])
    elif kind == "pickle":
        np.save(path, np.array([{"a": 1}], object), allow_pickle=True)
    elif kind == "one axis":
        np.save(path, np.zeros(5, np.float32))
    elif kind == "integers":
        np.save(path, np.zeros((2, 5), np.int64))
    elif kind == "nan":
        np.save(path, np.full((2, 5), np.nan, np.float32))
    elif kind == "two arrays":
        path = tmp_path / "bad.npz"
        np.savez(path, a=np.zeros(1), b=np.zeros(1))
    elif kind == "truncated zip":
        path = tmp_path / "bad.npz"
        np.savez(path, draft_logits=np.zeros((4, 100), np.float32))
        path.write_bytes(path.read_bytes()[:300])
    return path


KINDS = [
    "missing",
    "text",
    "empty",
    "truncated",
    "pickle",
    "one axis",
    "integers",
    "nan",
    "two arrays",
    "truncated zip",
]


@pytest.mark.parametrize("kind", KINDS)
def test_tree_rejects_unreadable_files(kind, tmp_path, capsys):
    path = damaged(tmp_path, kind)
    before = sorted(tmp_path.iterdir())
    assert main(["tree", str(path), "--save", str(tmp_path / "out.npz"), "--svg", str(tmp_path / "out.svg")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ddtree: ")
    assert captured.err.count("\n") == 1
    assert "Errno" not in captured.err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["tree", "LOGITS", "--budget", "-1"],
        ["tree", "LOGITS", "--root", "-7"],
        ["tree", "LOGITS", "--save", "no/such/folder/out.npz"],
        ["decode", "", "--max-new-tokens", "3"],
        ["decode", "x", "--budget", "-2"],
        ["decode", "x", "--temperature", "-1"],
        ["decode", "x", "--max-new-tokens", "-1"],
        ["decode", "x", "--budget", "1000000"],
        ["decode", "x", "--budget", str(10**30)],
        ["decode", "x", "--max-new-tokens", str(10**22)],
        ["decode", "x", "--seed", "-1"],
        ["decode", "x", "--temperature", "nan"],
    ],
)
def test_commands_reject_bad_arguments_in_one_sentence(arguments, logits_file, capsys):
    assert main([str(logits_file) if argument == "LOGITS" else argument for argument in arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ddtree: ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("budget", [10**6, 2**31 - 2])
def test_tree_of_a_huge_budget_is_the_full_tree_or_one_sentence(budget, logits_file, tmp_path, capsys):
    np.save(tmp_path / "small.npy", np.zeros((2, 3), np.float32))
    assert main(["tree", str(tmp_path / "small.npy"), "--budget", str(budget), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 13
    assert main(["tree", str(logits_file), "--budget", str(budget)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"ddtree: build_tree: `budget` is {budget}, expected at most ")
    assert captured.err.count("\n") == 1


def test_usage_errors_exit_with_two(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["tree"])
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_doctor_reports_backends(capsys):
    assert main(["doctor"]) == 0
    assert "numpy" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["backends"]["numpy"]["works"]
    for backend in report["backends"].values():
        assert backend["works"] or backend["reason"]
