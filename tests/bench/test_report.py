"""The report of the benchmark, its measurements replaced: what it measures when, and what it prints."""

import json

import pytest

from ddtree_cupy.bench import __main__ as bench
from ddtree_cupy.bench import measurements
from ddtree_cupy.bench import report as bench_report
from ddtree_cupy.bench.case import Case
from ddtree_cupy.bench.timing import Times
from ddtree_cupy.errors import MissingGPUError, UnsupportedError


@pytest.fixture
def calls(monkeypatch):
    """Names of what was measured, in order; every yardstick is slower than the one before."""
    calls = []

    def yardstick():
        calls.append("yardstick")
        return {"copy_bytes_per_second": 4e12, "matmul_flops_per_second": 8e14 / len(calls)}

    def measure(run):
        calls.append("case")
        return Times(event_us=100.0, low_us=99.0, high_us=101.0, graph_us=None, host_us=20.0)

    def all_cases(pattern, grid):
        prepared = Case("op", "name", "v", Stub, 4_000_000, 40_000_000_000, 20_000_000_000)
        failing = Case("op", "wrong", "v", lambda: Stub(fails=True), 1, 1, 1)
        return [prepared, failing, prepared, prepared]

    monkeypatch.setattr(bench_report, "yardstick", yardstick)
    monkeypatch.setattr(bench_report, "measure", measure)
    monkeypatch.setattr(bench_report, "environment", lambda: {"gpu": "Card 9", "date": "2026-12-01"})
    monkeypatch.setattr(bench, "current_device", lambda: 0)
    monkeypatch.setattr(bench, "all_cases", all_cases)
    return calls


class Stub:
    def __init__(self, fails=False):
        self.fails = fails

    def run(self):
        pass

    def gate(self):
        if self.fails:
            raise AssertionError("one element is off")


def test_yardstick_is_taken_before_between_and_after(calls, capsys):
    assert bench.main(["--json"]) == 1  # one case failed its gate
    assert calls == ["yardstick", "case", "yardstick", "case", "case", "yardstick"]  # a wrong case is not timed
    report = json.loads(capsys.readouterr().out)
    speeds = [report[f"yardstick_{when}"]["matmul_flops_per_second"] for when in ("before", "between", "after")]
    assert speeds == sorted(speeds, reverse=True)
    row = report["rows"][0]
    assert (row["tflops"], row["tflops_visible"], row["percent_of_product"]) == pytest.approx((400.0, 200.0, 50.0))
    assert (row["bytes"], row["floor_us"], row["percent_of_floor"]) == pytest.approx((4_000_000, 50.0, 50.0))
    wrong = {"op": "op", "name": "wrong", "variant": "v", "failed": "AssertionError: one element is off"}
    assert report["rows"][1] == wrong


def test_numbers_stand_under_their_names(calls, capsys):
    bench.main([])
    lines = capsys.readouterr().out.splitlines()
    head, right, _, _, wrong = lines[-5:]
    names = ["event us", "20 %", "80 %", "graph us", "host us", "MB", "GB/s", "TF/s", "TF vis"]
    names += ["% of product", "floor us", "% of floor"]
    numbers = ["100.0", "99.0", "101.0", "-", "20.0", "4.00", "40", "400.0", "200.0", "50.0", "50.0", "50.0"]
    end = 0
    for name, number in zip(names, numbers, strict=True):
        end = head.index(name, end) + len(name)
        assert right[:end].split()[-1] == number
        assert right[end : end + 1] in ("", " ")
    assert wrong.split() == ["op", "wrong", "v", "not", "timed:", "AssertionError:", "one", "element", "is", "off"]
    assert [sum(word in line for line in lines) for word in ("before", "between", "after")] == [1, 1, 1]


def test_no_line_is_wider_than_a_narrow_terminal(calls, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    bench.main([])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert lines.count("  % of product  50.0") == 3


def test_refused_case_is_printed_and_is_no_failure(calls, monkeypatch, capsys):
    why = "v1_three_phase holds 57,000 keys; use v2_split_kv"

    def refuse():
        raise UnsupportedError(why)

    refused = Case("op", "long", "v1_three_phase", refuse, 1)
    timed = Case("op", "name", "v", Stub, 1)
    monkeypatch.setattr(bench, "all_cases", lambda pattern, grid: [timed, refused])
    assert bench.main([]) == 0
    assert f"not timed: {why}" in capsys.readouterr().out
    monkeypatch.setattr(bench, "all_cases", lambda pattern, grid: [refused])
    assert bench.main(["--json"]) == 1  # nothing was timed
    assert json.loads(capsys.readouterr().out)["rows"] == [
        {"op": "op", "name": "long", "variant": "v1_three_phase", "refused": why}
    ]


@pytest.mark.parametrize(
    ("number", "order"), [(1, "yardstick case yardstick"), (2, "yardstick case yardstick case yardstick")]
)
def test_yardstick_between_needs_two_cases(calls, monkeypatch, capsys, number, order):
    one = Case("op", "name", "v", Stub, 1)
    monkeypatch.setattr(bench, "all_cases", lambda pattern, grid: number * [one])
    assert bench.main([]) == 0
    assert calls == order.split()
    assert capsys.readouterr().out.splitlines()[-1].split()[10:13] == ["-", "-", "-"]  # no products, no rates of them


def test_pattern_that_no_case_holds_is_named(calls, monkeypatch, capsys):
    monkeypatch.setattr(bench, "all_cases", lambda pattern, grid: [])
    assert bench.main(["v9"]) == 1
    assert capsys.readouterr().err == "bench: no case holds 'v9' in its op, name or variant\n"
    assert calls == []


def test_bench_without_a_gpu_says_so(monkeypatch, capsys):
    def none():
        raise MissingGPUError("no GPU found")

    monkeypatch.setattr(bench, "current_device", none)
    assert bench.main([]) == 1
    assert capsys.readouterr().err == "bench: no GPU found\n"


def test_saved_reports_of_one_day_share_a_file_and_come_back_as_printed(calls, monkeypatch, tmp_path, capsys):
    one = Case("op", "name", "v", Stub, 4_000_000, 40_000_000_000, 20_000_000_000)
    monkeypatch.setattr(bench, "all_cases", lambda pattern, grid: [one] if grid == "main" else [one, one])
    assert bench.main(["name", "--save", str(tmp_path), "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert bench.main(["--curves", "--save", str(tmp_path), "--json"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert [path.name for path in tmp_path.iterdir()] == ["card_9_2026-12-01.json"]
    assert first["environment"]["command"] == "python -m ddtree_cupy.bench name"
    assert second["environment"]["command"] == "python -m ddtree_cupy.bench --curves"
    assert measurements.load("main", gpu="Card 9", folder=tmp_path) == first
    assert measurements.load("curves", gpu="Card 9", folder=tmp_path) == second
    assert len(second["rows"]) == 2


def test_nothing_is_saved_when_a_case_fails_or_the_folder_is_missing(calls, tmp_path, capsys):
    assert bench.main(["--save", str(tmp_path)]) == 1
    assert "nothing was saved, because a case disagrees with its reference" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    calls.clear()
    assert bench.main(["--save", str(tmp_path / "none")]) == 1
    assert "expected a folder that exists" in capsys.readouterr().err
    assert calls == []
