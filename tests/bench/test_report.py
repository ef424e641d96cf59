"""The report of the benchmark, its measurements replaced: what it measures when, and what it prints."""

import json

import pytest

from ddtree_cupy.bench import __main__ as bench
from ddtree_cupy.bench.timing import Times


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

    def all_cases(pattern, **grids):
        prepared = bench.Case("op", "name", "v", 4_000_000, 40_000_000_000, 20_000_000_000, Stub)
        failing = bench.Case("op", "wrong", "v", 1, 1, 1, lambda: Stub(fails=True))
        return [prepared, failing, prepared, prepared]

    for name, stub in (("yardstick", yardstick), ("measure", measure), ("all_cases", all_cases)):
        monkeypatch.setattr(bench, name, stub)
    monkeypatch.setattr(bench, "current_device", lambda: 0)
    monkeypatch.setattr(bench, "environment", lambda: {"gpu": "none"})
    return calls


class Stub:
    def __init__(self, fails=False):
        self.fails = fails

    def run(self):
        pass

    def gate(self):
        assert not self.fails, "one element is off"


def test_yardstick_is_taken_before_between_and_after(calls, capsys):
    assert bench.main(["--json"]) == 1  # one case failed its gate
    assert calls == ["yardstick", "case", "yardstick", "case", "case", "yardstick"]
    report = json.loads(capsys.readouterr().out)
    speeds = [report[f"yardstick_{when}"]["matmul_flops_per_second"] for when in ("before", "between", "after")]
    assert speeds == sorted(speeds, reverse=True)
    row = report["rows"][0]
    assert (row["tflops"], row["tflops_visible"], row["percent_of_yardstick"]) == pytest.approx((400.0, 200.0, 50.0))
    assert (row["bytes"], row["floor_us"], row["percent_of_floor"]) == pytest.approx((4_000_000, 50.0, 50.0))
    assert report["rows"][1] == {"op": "op", "name": "wrong", "variant": "v", "failed": report["rows"][1]["failed"]}


def test_table_has_a_column_for_every_number_and_no_time_of_a_wrong_case(calls, capsys):
    bench.main([])
    lines = capsys.readouterr().out.splitlines()
    head = next(line for line in lines if line.startswith("op "))
    rows = [line for line in lines if line.startswith("op  ") and line != head]
    assert [row.split()[3:] for row in rows if "not timed" not in row] == 3 * [
        ["100.0", "99.0", "101.0", "-", "20.0", "4.00", "40", "400.0", "200.0", "50.0", "50.0", "50.0"]
    ]
    assert sum("not timed: AssertionError: one element is off" in row for row in rows) == 1
    assert [sum(word in line for line in lines) for word in ("before", "between", "after")] == [1, 1, 1]


def test_bench_without_a_gpu_says_so(monkeypatch, capsys):
    def none():
        raise bench.DDTreeError("no GPU found")

    monkeypatch.setattr(bench, "current_device", none)
    assert bench.main([]) == 1
    assert capsys.readouterr().err == "bench: no GPU found\n"
