"""What the library shows of its speed is what the newest measurements say."""

import json
import re
from pathlib import Path

import pytest

from ddtree_cupy.bench import measurements, tables
from ddtree_cupy.bench.report import all_cases
from ddtree_cupy.errors import ArgumentError, WeightsError

ROOT = Path(__file__).parents[2]
PART = re.compile(r"^<!-- measured: (\w+) -->\n(.*?)^<!-- end of measured -->\n", re.DOTALL | re.MULTILINE)


def small_report(date, gpu="Card 9", us=10.0):
    ceilings = {"copy_bytes_per_second": 4e12, "matmul_flops_per_second": 8e14}
    work = {"event_us": us, "graph_us": None, "bytes": 4_000_000, "flops": 0, "visible_flops": 0}
    row = {"op": "accept", "name": "B 1", "variant": "v", **work}
    return {"environment": {"gpu": gpu, "date": date}, "yardstick_before": ceilings, "rows": [row]}


@pytest.mark.parametrize("name", ["speed", pytest.param("budgets", marks=pytest.mark.slow)])  # 23 replays
def test_readme_has_what_the_command_writes(name):
    parts = dict(PART.findall((ROOT / "README.md").read_text()))
    assert set(parts) == {"speed", "budgets"}
    assert parts[name] == getattr(tables, name)()


def test_command_rewrites_the_readme_and_nothing_beside_its_parts(tmp_path, monkeypatch, capsys):
    path = tmp_path / "README.md"
    monkeypatch.setattr(tables, "README", path)
    assert tables.main([]) == 1
    assert "run this command from a checkout" in capsys.readouterr().err
    path.write_text("before\n<!-- measured: speed -->\nold\n<!-- end of measured -->\nafter, old\n")
    assert tables.main([]) == 0
    head, part, tail = re.split(r"<!-- .* -->\n", path.read_text())
    assert (head, tail) == ("before\n", "after, old\n")
    assert part == tables.speed()


@pytest.mark.parametrize("grid", measurements.GRIDS)
def test_shipped_measurement_is_of_the_cases_of_today(grid):
    report = measurements.load(grid)
    cases = {(case.op, case.name, case.variant): case for case in all_cases(grid=grid)}
    for row in report["rows"]:
        case = cases[row["op"], row["name"], row["variant"]]
        if "refused" not in row:
            work = (row["bytes"], row["flops"], row["visible_flops"])
            assert work == (case.bytes_moved, case.flops, case.visible_flops)
            assert row["low_us"] <= row["event_us"] <= row["high_us"]
    assert {"gpu", "date", "command", "commit", "nvrtc", "cupy", "driver_cuda"} <= set(report["environment"])


def test_a_version_that_nobody_has_measured_is_left_out(monkeypatch):
    before = tables.speed()
    monkeypatch.setattr(tables, "VERSIONS", {"v9_idea": None, **tables.VERSIONS})
    assert tables.speed() == before


def test_the_newest_report_of_the_card_is_loaded(tmp_path):
    for date, gpu, us in (("2026-12-02", "Card 9", 2.0), ("2026-12-01", "Card 9", 1.0), ("2026-12-03", "Card 8", 3.0)):
        measurements.save(small_report(date, gpu, us), "main", tmp_path)
    row = measurements.load(gpu="Card 9", folder=tmp_path)["rows"][0]
    assert (row["event_us"], row["floor_us"], row["percent_of_floor"]) == pytest.approx((2.0, 1.0, 50.0))
    for grid, gpu, message in (
        ("main", "Card 7", "has no report of grid 'main' measured on 'Card 7'"),
        ("curves", "Card 9", "has no report of grid 'curves'"),
        ("nodes", "Card 9", "`grid` is 'nodes', expected one of main, tree_sizes, curves"),
    ):
        with pytest.raises(ArgumentError, match=message):
            measurements.load(grid, gpu=gpu, folder=tmp_path)


def test_another_file_under_the_name_of_a_measurement_is_refused(tmp_path):
    path = tmp_path / "card_9_2026-12-01.json"
    path.write_text("[1]")
    for use in (measurements.load, lambda folder: measurements.save(small_report("2026-12-01"), "main", folder)):
        with pytest.raises(WeightsError, match="not a measurement of format ddtree-bench-1"):
            use(folder=tmp_path)
        assert path.read_text() == "[1]"


def test_notebook_on_speed_reads_measurements_as_data():
    cells = json.loads((ROOT / "notebooks" / "07_speed.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert "measurements.load(" in code
    for prose in ("README.md", "read_text", "open(", "source_root", "import re\n", "json"):
        assert prose not in code, prose
