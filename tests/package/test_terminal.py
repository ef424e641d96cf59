"""What commands print: nothing that a terminal would obey, nothing that a locale would refuse."""

import io
import os
import subprocess
import sys
import unicodedata
import warnings

import numpy as np
import pytest

from ddtree_cupy import DraftTree, _doctor, cli
from ddtree_cupy._terminal import columns, escaped, fitted, run_command, table
from ddtree_cupy.bench import __main__ as bench
from ddtree_cupy.cli import main
from ddtree_cupy.decode import Generation
from ddtree_cupy.explore import CostTable
from ddtree_cupy.explore.__main__ import main as explore

OBEYED = "\x1b[31m\x9b2J\x07\x08\u202eabc\u2066\u200f\u2028\x7f\udcff"  # CSI in 7 and 8 bit, bell, bidi, separators
HARMLESS = "größer — 你好　नमस्ते می‌خواهم 👩‍💻 a\u0301 \u00a0"


def is_safe(printed):
    return all(c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs", "Zl", "Zp") for c in printed) and not any(
        bidi in printed for bidi in "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c"
    )


def test_escaped_leaves_ordinary_text_and_shows_the_rest():
    assert escaped(HARMLESS) == HARMLESS
    assert is_safe(escaped(OBEYED))
    assert escaped(OBEYED) == r"\x1b[31m\x9b2J\x07\x08\u202eabc\u2066\u200f\u2028\x7f\udcff"
    assert escaped("a\nb\tc\r") == r"a\nb\tc\r"
    assert escaped("a\nb\tc\r", keep="\n\t") == "a\nb\tc\\r"
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    assert is_safe(escaped(every, keep="\n\t"))


def test_decode_prints_prompt_and_text_escaped(monkeypatch, capsys):
    monkeypatch.setattr(Generation, "seconds", 1.0)

    class Loud:
        token_ids = tuple("x\x1b]0;t\x07\u202e".encode())
        num_drafted = 2
        tree = DraftTree.from_parents([1, 2], [-1, 0])

    monkeypatch.setattr(cli.decode, "generate_rounds", lambda *_, **__: iter([Loud(), Loud()]))
    assert main(["decode", OBEYED]) == 0
    printed = capsys.readouterr().out
    assert is_safe(printed)
    assert escaped(OBEYED) in printed
    assert r"‹x\x1b›]0;t\x07\u202e" in printed


def test_messages_name_arrays_and_files_escaped(tmp_path, capsys):
    path = tmp_path / f"{OBEYED[:-1]}.npz"
    np.savez(path, **{OBEYED[:-1]: np.zeros(1), "b": np.zeros(1)})
    assert main(["tree", str(path)]) == 1
    printed = capsys.readouterr().err
    assert is_safe(printed)
    assert printed.count(escaped(OBEYED[:-1])) == 2
    assert main(["tree", str(tmp_path / OBEYED)]) == 1
    assert is_safe(capsys.readouterr().err)


def test_tables_name_gpus_escaped(monkeypatch, tmp_path, capsys):
    name = f"NVIDIA {OBEYED}\nbackends"
    monkeypatch.setattr(bench, "current_device", lambda: 0)
    monkeypatch.setattr(bench, "all_cases", lambda *_, **__: [None])
    ceilings = {"copy_bytes_per_second": 1.0, "matmul_flops_per_second": 1.0}
    rows = [{"op": "o", "name": "n", "variant": "v", "refused": OBEYED}]
    report = {"environment": {"gpu": name}, "yardstick_before": ceilings, "rows": rows}
    monkeypatch.setattr(bench, "make_report", lambda *_: report)
    assert bench.main([]) == 1
    printed = capsys.readouterr().out
    assert is_safe(printed)
    assert f"gpu {escaped(name)}\n" in printed
    monkeypatch.setattr(_doctor, "_cupy", lambda: {"works": True, "reason": name})
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert is_safe(printed)
    assert f"cupy          works: {escaped(name)}\n" in printed
    about = dict.fromkeys(("variant", "date", "command", "dtype", "batch", "timing"), "x")
    CostTable(((8, 1, 1, 1.0),), {**about, "gpu": name}).save(tmp_path / "costs.json")
    table = (tmp_path / "costs.json").read_text()
    assert is_safe(table)
    monkeypatch.setattr(CostTable, "from_bench", lambda *_, **__: CostTable.load(tmp_path / "costs.json"))
    arguments = ["costs", str(tmp_path / "costs.json"), "--variant", "v", "--dtype", "d"]
    assert explore([*arguments, "--out", str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr().out
    assert is_safe(printed)
    assert printed.count("\n") == 1


LOCALES = {
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
    "cp1252": {"PYTHONIOENCODING": "cp1252"},
    "C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}
COMMANDS = [
    ("ddtree_cupy.cli", ["tree", "größer.npy"], 0),
    ("ddtree_cupy.cli", ["tree", "nichts—.npy"], 1),
    ("ddtree_cupy.cli", ["decode", "# größer —", "--max-new-tokens", "3"], 0),
    ("ddtree_cupy.cli", ["decode", "--file", "größer.py", "--max-new-tokens", "1"], 0),
    ("ddtree_cupy.cli", ["decode", "-", "--max-new-tokens", "1"], 0),
    ("ddtree_cupy.cli", ["tree", "größer.npy", "--labels", "größer.txt", "--svg", "größer.svg"], 0),
    ("ddtree_cupy.cli", ["explore", "policies", "größer—.npz"], 1),
    ("ddtree_cupy.cli", ["doctor"], 0),
    ("ddtree_cupy.cli", ["kernels", "--arch", "größer—"], 1),
    ("ddtree_cupy.cli", ["bench", "größer—"], 1),
    ("ddtree_cupy.bench.__main__", ["größer—"], 1),
    ("ddtree_cupy.explore.__main__", ["policies", "größer—.npz"], 1),
    ("ddtree_cupy.decode.evaluate", ["lossless", "--prompts", "-1"], 1),
]
RUN_ALL = f"""
import importlib, os
for module, arguments, wanted in {COMMANDS!r}:
    code = importlib.import_module(module).main([os.fsdecode(text.encode()) for text in arguments])  # as a shell would
    assert code == wanted, (module, arguments, code)
print("done")
"""


@pytest.mark.parametrize("locale", LOCALES)
def test_commands_print_replacements_where_the_locale_lacks_a_character(locale, tmp_path):
    np.save(tmp_path / "größer.npy", np.zeros((2, 5), np.float32))
    text = "# größer — 你好\n"
    (tmp_path / "größer.py").write_text(text, encoding="utf-8")
    (tmp_path / "größer.txt").write_text("größer\n你好\n", encoding="utf-8")
    (tmp_path / "run_all.py").write_text(RUN_ALL, encoding="utf-8")
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONUTF8", "LC_ALL")}
    variables |= {"PYTHONPATH": os.pathsep.join(sys.path), "CUPY_CACHE_DIR": "/größer—", **LOCALES[locale]}
    command = [sys.executable, "run_all.py"]
    stdin = text.encode()
    found = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, check=False, input=stdin)
    assert found.returncode == 0, found.stderr
    assert found.stdout.replace(b"\r", b"").endswith(b"done\n")
    assert b"\n|- 1 p=0.200\n" in found.stdout  # the tree's lines, in similar characters
    prompt = text.encode("ascii" if locale == "C" else locale, "ddtree.similar")
    assert found.stdout.count(prompt) == 2, found.stdout  # from the file and from standard input
    assert "größer" in (tmp_path / "größer.svg").read_text(encoding="utf-8")
    for line in found.stderr.splitlines():
        assert line.startswith((b"ddtree: ", b"bench: ", b"explore: ", b"evaluate: "))


def test_a_table_has_columns_where_they_fit_and_lines_where_they_do_not(monkeypatch):
    heads, rows = ("policy", "tokens per pass", "95 %"), [("chain 15", "4.83", "4.19 - 5.72"), ("a", 1, "-")]
    monkeypatch.setenv("COLUMNS", "38")
    wide = ["policy    tokens per pass         95 %", "chain 15             4.83  4.19 - 5.72"]
    assert table(heads, rows).splitlines() == [*wide, "a                       1            -"]
    monkeypatch.setenv("COLUMNS", "37")
    narrow = ["chain 15", "  tokens per pass  4.83", "  95 %             4.19 - 5.72"]
    assert table(heads, rows).splitlines() == [*narrow, "a", "  tokens per pass  1", "  95 %             -"]
    assert table(heads, []) == "policy  tokens per pass  95 %"
    assert table(("a",), [("b",)], left=0) == "a\nb"
    monkeypatch.setenv("COLUMNS", "12")
    assert fitted("one two three four", "    ") == "one two\n    three\n    four"


def test_the_width_is_that_of_the_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    assert columns() == 60
    for value in ("", "0", "-3", "many"):
        monkeypatch.setenv("COLUMNS", value)
        assert columns() == float("inf")  # a file, as pytest makes of standard output
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((44, 9)))
    assert columns() == 44


def test_warnings_are_one_sentence(capsys):
    def run():
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("two\nlines \x1b", UserWarning, stacklevel=1)
        return 0

    assert run_command("ddtree", run) == 0
    assert capsys.readouterr().err == "ddtree: warning: two lines \\x1b\n"


def test_output_that_cannot_be_written_is_one_sentence(tmp_path):
    np.save(tmp_path / "logits.npy", np.zeros((2, 5), np.float32))
    command = [sys.executable, "-m", "ddtree_cupy", "tree", str(tmp_path / "logits.npy")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if os.path.exists("/dev/full"):
        with open("/dev/full", "wb") as full:
            found = subprocess.run(command, env=variables, stdout=full, stderr=subprocess.PIPE, check=False)
        assert (found.returncode, found.stderr) == (1, b"ddtree: No space left on device\n")
    read_end, write_end = os.pipe()
    os.close(read_end)
    found = subprocess.run(command, env=variables, stdout=write_end, stderr=subprocess.PIPE, check=False)
    os.close(write_end)
    assert (found.returncode, found.stderr) == (1, b"")


@pytest.mark.parametrize("stdout", [io.StringIO(), None], ids=["notebook", "none"])
def test_errors_without_a_file_are_one_sentence_whatever_the_output(stdout, monkeypatch, capsys):
    def run():
        raise OSError("no more handles")

    monkeypatch.setattr(sys, "stdout", stdout)
    assert run_command("ddtree", run) == 1
    assert capsys.readouterr().err == "ddtree: no more handles\n"


def test_a_command_without_memory_says_so(capsys):
    def run():
        raise MemoryError("Unable to allocate 116. GiB")

    assert run_command("ddtree", run) == 1
    assert capsys.readouterr().err == "ddtree: not enough memory: Unable to allocate 116. GiB\n"
