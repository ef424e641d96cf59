"""The `ddtree` command: main job, errors in one sentence, exit codes, nothing half written."""

import io
import json
import pickle
import re
import sys
import zipfile

import ml_dtypes
import numpy as np
import pytest

from ddtree_cupy import DraftTree, __version__, build_tree
from ddtree_cupy.cli import main
from ddtree_cupy.compile_check import resources
from ddtree_cupy.explore import CostTable, MeasuredCost
from ddtree_cupy.testing import assert_identical


@pytest.fixture
def logits_file(tmp_path):
    logits = 2 * np.random.default_rng(0).standard_normal((4, 20)).astype(np.float32)
    np.save(tmp_path / "logits.npy", logits)
    return tmp_path / "logits.npy"


@pytest.mark.parametrize(("arguments", "wanted"), [([], "decode"), (["explore"], "policies"), (["--help"], "tree")])
def test_a_command_alone_prints_its_help(arguments, wanted, capsys):
    if arguments == ["--help"]:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
    else:
        assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("usage: ddtree")
    assert re.search(rf"^ +{wanted} ", captured.out, re.MULTILINE)
    assert captured.err == ""


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"ddtree {__version__}\n"


def test_decode_compares_three_ways(capsys):
    assert main(["decode", "def add(a, b):\n", "--max-new-tokens", "24"]) == 0
    printed = capsys.readouterr().out
    assert "\nOn a CPU the time of a pass grows with its nodes, so a tree takes longer than a chain.\n" in printed
    assert re.search(
        r"\non a GPU: speedup over .* by the cost table \(tree_attention v3_mma, NVIDIA H200, 8 heads", printed
    )
    assert "the three texts are identical" in printed
    assert printed.index("autoregressive") < printed.index("chain, 15 drafts") < printed.index("tree, budget 64")
    assert "‹" in printed.split("\n\n", 1)[1], "no accepted draft is marked"


def test_decode_prints_json(capsys):
    assert main(["decode", "x = ", "--max-new-tokens", "10", "--dtype", "float64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["identical"]
    assert found["ways"][0]["target_passes"] == 10


def test_decode_computes_the_speedup_from_the_cost_table(capsys):
    cost = MeasuredCost(CostTable.load(), heads=8, context=8192)
    assert main(["decode", "import os\n", "--max-new-tokens", "9", "--budget", "1", "--json"]) == 0
    plain, _, tree = json.loads(capsys.readouterr().out)["ways"]
    assert plain["gpu_speedup"] == pytest.approx(1.0)
    low, high = (9 * cost(0) / (tree["target_passes"] * cost(nodes)) for nodes in (1, 0))
    assert min(low, high) <= tree["gpu_speedup"] <= max(low, high)
    assert main(["decode", "import os\n", "--max-new-tokens", "4", "--budget", "300", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ways"][2]["gpu_speedup"] is None  # more nodes than were measured


TEXTS = {"ascii": b"import os\n", "utf-8": "# größer — 你好\n".encode(), "no utf-8": b"x = '\xff\xfe'\r\n\x00"}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("form", [["--file", "FILE"], ["--file", "-"], ["-"]], ids=" ".join)
def test_decode_continues_a_file_and_standard_input_byte_for_byte(name, form, tmp_path, monkeypatch, capsys):
    file, text = tmp_path / "größer.txt", TEXTS[name]
    file.write_bytes(text)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding="ascii"))
    arguments = ["decode", *(str(file) if part == "FILE" else part for part in form), "--max-new-tokens", "1"]
    assert main([*arguments, "--budget", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompt"].encode("utf-8", "surrogateescape") == text


def test_decode_rejects_texts_that_it_cannot_continue(tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").touch()
    (tmp_path / "long").write_bytes(bytes((1 << 20) + 1))
    refused(capsys, ["decode", "--file", tmp_path / "empty"], f"ddtree: {tmp_path / 'empty'} is empty, expected a text")
    refused(capsys, ["decode", "--file", tmp_path / "long"], f"ddtree: {tmp_path / 'long'} holds more than 1,048,576")
    refused(capsys, ["decode", "--file", tmp_path / "none"], f"ddtree: {tmp_path / 'none'}: No such file")
    refused(capsys, ["decode", "--file", tmp_path], f"ddtree: {tmp_path}: Is a directory")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    refused(capsys, ["decode", "-"], "ddtree: standard input is empty, expected a text of 1 to ")
    monkeypatch.setattr(sys, "stdin", None)
    refused(capsys, ["decode", "-"], "ddtree: there is no standard input, expected the text to continue")
    with pytest.raises(SystemExit) as caught:
        main(["decode", "x", "--file", "y"])
    assert caught.value.code == 2
    assert "not allowed with argument" in capsys.readouterr().err


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


LABELS = ["a", "the\n", "größer", "$x$", "\x1b[31m", "'", "你好", "", "\u202e", "x" * 99]
LABEL_FILES = {
    "list.json": json.dumps(LABELS),
    "vocab.json": json.dumps({text: token for token, text in enumerate(LABELS)}),
    "tokenizer.json": json.dumps({"model": {"vocab": {text: token for token, text in enumerate(LABELS)}}}, indent=1),
}


@pytest.mark.parametrize("name", LABEL_FILES)
def test_tree_shows_the_texts_of_tokens(name, logits_file, tmp_path, capsys):
    (tmp_path / name).write_text(LABEL_FILES[name], encoding="utf-8")
    arguments = ["tree", str(logits_file), "--budget", "40", "--labels", str(tmp_path / name), "--root", "9"]
    assert main([*arguments, "--svg", str(tmp_path / "tree.svg")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("9 'xxxxxxxxxxxxxxxxxxx...' p=1.000\n")
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for token, text in zip(found["token_ids"], found["labels"], strict=True):
        assert text == (LABELS[token] if token < len(LABELS) else None)
        shown = f"─ {token} {LABELS[token]!r} p=" if token < len(LABELS) else f"─ {token} p="
        assert shown in printed or token == 9
    assert "\x1b" not in (tmp_path / "tree.svg").read_text(encoding="utf-8")


def test_tree_reads_a_line_for_each_token(logits_file, tmp_path, capsys):
    lines = [f"t {token}—" for token in range(20)]
    (tmp_path / "vocab.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert main(["tree", str(logits_file), "--labels", str(tmp_path / "vocab.txt"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["labels"] == [lines[token] for token in found["token_ids"]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("3", "expected a list of texts, one for each token id, or an object {text: id}"),
        ('["a", 1]', "expected a list of texts"),
        ('{"a": "b"}', "expected a list of texts"),
        ('{"a": true}', "expected a list of texts"),
        ('{"model": {}}', "expected a list of texts"),
        ("[", "not JSON"),
        ("[" * 10**5, "nested too deeply"),
        (None, "No such file"),
    ],
)
def test_tree_rejects_other_labels(text, said, logits_file, tmp_path, capsys):
    path = tmp_path / "labels.json"
    if text is not None:
        path.write_text(text)
    before = sorted(tmp_path.iterdir())
    arguments = ["tree", logits_file, "--labels", path, "--save", tmp_path / "tree.npz", "--svg", tmp_path / "tree.svg"]
    refused(capsys, arguments, re.compile(rf"ddtree: {re.escape(str(path))}: .*{re.escape(said)}"))
    assert sorted(tmp_path.iterdir()) == before


def probabilities(logits):
    wide = np.exp(logits.astype(np.float64))
    return wide / wide.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_tree_takes_probabilities(dtype, logits_file, tmp_path, capsys):
    probs = probabilities(np.load(logits_file)).astype(getattr(ml_dtypes, dtype, dtype))
    probs[0, probs[0].argmin()] = 0  # no candidate
    np.save(tmp_path / "probs.npy", probs)
    with np.errstate(divide="ignore"):
        wide = np.log(probs.astype(np.float64 if dtype == "float64" else np.float32))
    np.save(tmp_path / "log.npy", wide)
    assert main(["tree", str(tmp_path / "probs.npy"), "--probs", "--budget", "30", "--json"]) == 0
    found = capsys.readouterr()
    assert found.err == ""
    assert main(["tree", str(tmp_path / "log.npy"), "--budget", "30", "--json"]) == 0
    assert found.out == capsys.readouterr().out


def test_tree_says_in_a_line_that_a_file_looks_like_probabilities(logits_file, capsys):
    np.save(logits_file, probabilities(np.load(logits_file)))
    assert main(["tree", str(logits_file)]) == 0
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"ddtree: {logits_file}: build_tree: the first row of `draft_logits` is non-negative")
    assert said[0].endswith(", and --probs does so here")
    assert main(["tree", str(logits_file), "--probs"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda probs: np.log(probs), "row 0 sums to .* smallest number is -.*; --probs expects probabilities"),
        (lambda probs: 2 * probs, "row 0 sums to 2, "),
        (lambda probs: probs + (np.arange(4) == 2)[:, None], "row 2 sums to 21, "),
        (lambda probs: np.full_like(probs, np.nan), "row 0 sums to nan, "),
        (lambda probs: (8 * probs).astype(int), "holds int64 numbers, expected probabilities for --probs"),
        (lambda probs: probs.astype(complex), "holds complex128 numbers, expected probabilities for --probs"),
    ],
)
def test_tree_rejects_what_are_no_probabilities(change, said, logits_file, tmp_path, capsys):
    np.save(tmp_path / "probs.npy", change(probabilities(np.load(logits_file))))
    refused(capsys, ["tree", tmp_path / "probs.npy", "--probs"], re.compile(f"ddtree: .*probs.npy:? {said}"))


def torch_archive(path):
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("logits/data.pkl", "logits/byteorder", "logits/data/0", "logits/version"):
            archive.writestr(name, b"3\n")


TORCH_FILES = {
    "logits.pt": torch_archive,
    "old.bin": lambda path: path.write_bytes(pickle.dumps({"a": 1}, protocol=2)),
    "logits.safetensors": lambda path: path.write_bytes((2).to_bytes(8, "little") + b"{}"),
}


@pytest.mark.parametrize("name", TORCH_FILES)
def test_tree_says_how_to_save_what_torch_has_saved(name, tmp_path, capsys):
    path = tmp_path / name
    TORCH_FILES[name](path)
    load = "safetensors.torch.load_file" if name.endswith(".safetensors") else "torch.load"
    pick = "[name]" if name.endswith(".safetensors") else ""
    advice = f"numpy.save('logits.npy', {load}({str(path)!r}){pick}.detach().float().cpu().numpy())"
    refused(capsys, ["tree", path], f"ddtree: {path} is a file of PyTorch, expected .npy or .npz; in Python, {advice}")


def test_what_tree_says_about_files_of_torch_works(tmp_path, monkeypatch, capsys):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    monkeypatch.chdir(tmp_path)
    torch.save(torch.randn(3, 9, dtype=torch.bfloat16, requires_grad=True), "logits.pt")
    assert main(["tree", "logits.pt"]) == 1
    advice = re.search(r"numpy\.save.*(?= makes one)", capsys.readouterr().err)[0]
    exec(advice, {"numpy": np, "torch": torch})
    assert main(["tree", "logits.npy"]) == 0


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_tree_explains_the_bits_of_bfloat16(suffix, logits_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    logits = np.load(logits_file).astype(ml_dtypes.bfloat16)
    array, file = logits.view(np.uint16), f"bits.{suffix}"
    np.save(file, array) if suffix == "npy" else np.savez(file, array)
    assert main(["tree", file]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"ddtree: {file}: holds uint16 numbers, expected logits; if they are the bits of bfloat16")
    advice = re.search(r"numpy\.save\(.*\)(?= says so)", error)[0]
    exec(advice, {"numpy": np, "ml_dtypes": ml_dtypes, "array": array, "file": "advised.npy"})
    assert main(["tree", "advised.npy", "--json"]) == 0
    found = capsys.readouterr().out
    np.save("wide.npy", logits.astype(np.float32))
    assert main(["tree", "wide.npy", "--json"]) == 0
    assert capsys.readouterr().out == found


def test_explore_runs_its_commands_and_prints_json(capsys):
    assert main(["explore", "policies", "--against", "chain 15", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 14
    assert (rows[1]["policy"], rows[1]["ratio"], rows[4]["policy"]) == ("chain 15", 1.0, "best-first 64")
    for name in ("tokens_per_pass", "ratio"):
        assert rows[4][f"{name}_low"] < rows[4][name] < rows[4][f"{name}_high"]
    assert main(["explore", "curve", "--budgets", "4,16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    small, large = found["rows"]
    cost = MeasuredCost(CostTable.load(), heads=8, context=8192)
    assert large["speedup"] == pytest.approx(large["tokens_per_pass"] * cost(0) / cost(16))
    assert (small["budget"], found["best_budget"]) == (4, 16)
    cost = ["--fixed-us", "1e6", "--layers", "61", "--heads", "64"]
    assert main(["explore", "curve", "--policy", "best-first, max_children 2", "--budgets", "16,64", *cost]) == 0
    printed = capsys.readouterr().out
    assert "\nbest budget 64; " in printed
    assert printed.endswith("\ncost of a pass: 1e+06 us and 61 x v3_mma, NVIDIA H200, 64 heads, 8,192 keys\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["policies", "none.npz"], "none.npz: no such traces file"),
        (["policies", "--against", "best"], "`against` is 'best', expected the name of a policy"),
        (["curve", "--policy", "best"], "`policy` is 'best', expected the name of a policy"),
        (["policies", "--workers", "0"], "`--workers` is 0, expected an integer at least 1"),
        (["curve", "--budgets", "-1"], "`budgets[0]` is -1"),
        (["curve", "--heads", "7"], "heads 7"),
        (["curve", "--costs", "none.json"], "none.json: no such cost table"),
        (["curve", "--fixed-us", "nan"], "`fixed_us` is nan"),
    ],
)
def test_explore_rejects_bad_arguments_in_one_sentence(arguments, said, capsys):
    refused(capsys, ["explore", *arguments], re.compile(f"ddtree: .*{re.escape(said)}"))


def test_explore_rejects_other_budgets(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["explore", "curve", "--budgets", "4,x"])
    assert caught.value.code == 2
    assert "argument --budgets: '4,x', expected numbers such as 4,16,64" in capsys.readouterr().err


def test_no_line_is_wider_than_60_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    commands = (
        ["decode", "x = 1\n", "--max-new-tokens", "4"],
        ["doctor"],
        ["explore", "policies"],
        ["explore", "curve", "--budgets", "4,16"],
    )
    for arguments in commands:
        assert main(arguments) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 60, arguments
    kernel = resources.Resources("a/kernel.cu", f"f<{'x' * 70}>", "sm_90", 1, 2, 3, 4, 5, 6, 7.0)
    assert max(map(len, resources.format_table([kernel]).splitlines())) <= 60


def refused(capsys, arguments, said="ddtree: "):
    """Run a command that prints one sentence on standard error, and nothing else."""
    assert main([str(argument) for argument in arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.match(said if isinstance(said, re.Pattern) else re.escape(said), captured.err), captured.err
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
