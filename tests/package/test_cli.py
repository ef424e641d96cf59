"""The `ddtree` command: main job, errors in one sentence, exit codes, nothing half written."""

import json

import numpy as np
import pytest

from ddtree_cupy import DraftTree, build_tree
from ddtree_cupy.cli import main
from ddtree_cupy.testing import assert_identical


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
    arguments = ["tree", str(logits_file), "--budget", "7", "--root", "3", "--save", str(saved), "--svg", str(drawn)]
    assert main(arguments) == 0
    assert "8 nodes" in capsys.readouterr().out
    wanted = build_tree(np.load(logits_file), budget=7, root_token_ids=3)
    assert_identical(DraftTree.load(saved), wanted)
    assert drawn.read_text().count("<circle") == 8


def test_tree_reads_npz_and_prints_json(tmp_path, capsys):
    np.savez(tmp_path / "a.npz", draft_logits=np.zeros((2, 3), np.float32), other=np.zeros(1))
    assert main(["tree", str(tmp_path / "a.npz"), "--budget", "4", "--max-depth", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parents"] == [-1, 0, 0, 0]


def refused(capsys, arguments, said="ddtree: "):
    """Run a command that prints one sentence on standard error, and nothing else."""
    assert main([str(argument) for argument in arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(said)
    assert captured.err.count("\n") == 1
    assert "Errno" not in captured.err


def cut(path, save, size, **arrays):
    save(path, **arrays)
    path.write_bytes(path.read_bytes()[:size])


ROWS = np.zeros((4, 100), np.float32)
UNREADABLE = {
    "missing.npy": lambda path: None,
    "text.npy": lambda path: path.write_text("no numbers here"),
    "empty.npy": lambda path: path.write_bytes(b""),
    "truncated.npy": lambda path: cut(path, np.save, -50, arr=ROWS),
    "pickle.npy": lambda path: np.save(path, np.array([{"a": 1}], object), allow_pickle=True),
    "one axis.npy": lambda path: np.save(path, np.zeros(5, np.float32)),
    "integers.npy": lambda path: np.save(path, np.zeros((2, 5), np.int64)),
    "nan.npy": lambda path: np.save(path, np.full((2, 5), np.nan, np.float32)),
    "two arrays.npz": lambda path: np.savez(path, a=np.zeros(1), b=np.zeros(1)),
    "truncated.npz": lambda path: cut(path, np.savez, 300, draft_logits=ROWS),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_tree_rejects_unreadable_files(name, tmp_path, capsys):
    UNREADABLE[name](tmp_path / name)
    before = sorted(tmp_path.iterdir())
    refused(capsys, ["tree", tmp_path / name, "--save", tmp_path / "out.npz", "--svg", tmp_path / "out.svg"])
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
        ["decode", "x", "--budget", 10**30],
        ["decode", "x", "--max-new-tokens", 10**22],
        ["decode", "x", "--seed", "-1"],
        ["decode", "x", "--temperature", "nan"],
    ],
)
def test_commands_reject_bad_arguments_in_one_sentence(arguments, logits_file, capsys):
    refused(capsys, [logits_file if argument == "LOGITS" else argument for argument in arguments])


@pytest.mark.parametrize("budget", [10**6, 2**31 - 2])
def test_tree_of_a_huge_budget_is_the_full_tree_or_one_sentence(budget, logits_file, tmp_path, capsys):
    np.save(tmp_path / "small.npy", np.zeros((2, 3), np.float32))
    assert main(["tree", str(tmp_path / "small.npy"), "--budget", str(budget), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 13
    said = f"ddtree: build_tree: `budget` is {budget}, expected at most "
    refused(capsys, ["tree", logits_file, "--budget", budget], said)


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
