"""The command line of explore, and its progress bars."""

import json
import sys
from types import ModuleType

import pytest

from ddtree_cupy._progress import with_progress
from ddtree_cupy.explore import CostTable, Traces
from ddtree_cupy.explore.__main__ import main
from ddtree_cupy.explore.traces import SHIPPED_TRACES

REPORT = {
    "environment": {"gpu": "G", "date": "D", "command": "C"},
    "rows": [{"op": "tree_attention", "name": "B 1 H 8 N 64 T 8192", "variant": "v9", "event_us": 12.5}],
}


def test_commands_write_into_the_current_folder_and_leave_the_shipped_data_alone(tmp_path, monkeypatch, capsys):
    shipped = CostTable.load(), SHIPPED_TRACES.read_bytes()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.json").write_text(json.dumps(REPORT))
    assert main(["costs", "report.json", "--variant", "v9", "--dtype", "float16"]) == 0
    assert main(["record", "--prompts", "1", "--positions", "2"]) == 0
    assert CostTable.load(tmp_path / "costs.json").rows == ((8, 64, 8192, 12.5),)
    assert len(Traces.load(tmp_path / "traces.npz").root_token_ids) == 2
    printed = capsys.readouterr().out
    assert "costs.json: CostTable(v9" in printed
    assert "traces.npz: Traces(prompts=1" in printed
    assert (CostTable.load(), SHIPPED_TRACES.read_bytes()) == shipped


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["costs", "none.json", "--variant", "v9", "--dtype", "float16"], "none.json"),
        (["costs", "broken.json", "--variant", "v9", "--dtype", "float16"], "Expecting value"),
        (["costs", "report.json", "--variant", "v8", "--dtype", "float16"], "`variant` is 'v8'"),
        (["policies", "report.json"], "report.json"),
        (["policies", "missing\x1b[31m.npz"], r"missing\x1b[31m.npz: no such traces file"),
        (["record", "--prompts", "1", "--positions", str(10**22)], "`num_positions` ask for"),
        (["record", "--prompts", "-1"], "`count` is -1, expected an integer in 0.."),
    ],
)
def test_commands_say_what_is_wrong_in_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)  # of a notebook's test; it would show progress bars
    (tmp_path / "report.json").write_text(json.dumps(REPORT))
    (tmp_path / "broken.json").write_text("")
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("explore: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("in_notebook", "show", "wanted"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_progress_bar_is_shown_in_a_notebook(monkeypatch, capsys, in_notebook, show, wanted):
    """Under pytest standard error is no terminal: without a notebook there is no bar."""
    if in_notebook:
        monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    else:
        monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert list(with_progress(range(3), 3, "sweep", "policy", show)) == [0, 1, 2]
    assert ("3/3" in capsys.readouterr().err) == wanted
