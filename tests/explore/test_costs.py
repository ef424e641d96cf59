"""Cost models: exact where measured, linear between, silent nowhere."""

import json

import numpy as np
import pytest

from ddtree_cupy.bench import measurements
from ddtree_cupy.bench.sizes import attention_name
from ddtree_cupy.errors import ArgumentError, WeightsError
from ddtree_cupy.explore import (
    BestFirst,
    CostAware,
    CostTable,
    LinearCost,
    MeasuredCost,
    UserCost,
    budget_curve,
    chain,
    compare,
    compare_policies,
    replay,
    speedup,
)
from ddtree_cupy.explore.__main__ import main

ABOUT = dict.fromkeys(("variant", "gpu", "date", "command", "dtype", "batch", "timing"), "made up")
TABLE = CostTable(
    (
        (8, 1, 1000, 10.0),
        (8, 65, 1000, 74.0),
        (8, 1, 3000, 30.0),
        (8, 65, 3000, 222.0),
        (16, 65, 1000, 148.0),
    ),
    ABOUT,
)


def test_shipped_table_says_where_it_comes_from_and_is_read_exactly():
    table = CostTable.load()
    assert "H200" in table.about["gpu"]
    commands = table.about["command"].split(" && ")
    starts = [["python", "-m", "ddtree_cupy.bench"], ["ddtree", "explore", "costs"]]
    assert [command.split()[:3] for command in commands] == starts
    assert commands[0].endswith(" --json > report.json")
    variant = table.about["variant"]
    assert commands[1].split()[3:] == ["report.json", "--variant", variant, "--dtype", "bfloat16"]
    report = measurements.load("tree_sizes")
    timed = {row["name"]: row["event_us"] for row in report["rows"] if row["variant"] == variant}
    assert len(table.rows) == len(timed)
    for heads, nodes, context, microseconds in table.rows:
        assert MeasuredCost(table, heads, context)(nodes - 1) == microseconds
        assert microseconds == round(timed[attention_name(1, heads, nodes, context)], 1)


@pytest.mark.parametrize(
    ("heads", "context", "nodes", "expected"),
    [(8, 1000, 0, 10.0), (8, 1000, 32, 42.0), (8, 2000, 64, 148.0), (8, 2500, 32, 105.0), (12, 1000, 64, 111.0)],
)
def test_measured_cost_is_linear_between_measurements(heads, context, nodes, expected):
    assert MeasuredCost(TABLE, heads, context)(nodes) == pytest.approx(expected, rel=1e-12)
    assert MeasuredCost(TABLE, heads, context, layers=61)(nodes) == pytest.approx(61 * expected, rel=1e-12)


@pytest.mark.parametrize(("heads", "context", "nodes"), [(4, 1000, 8), (8, 999, 8), (8, 1000, 65), (16, 1000, 8)])
def test_measured_cost_rejects_what_was_not_measured(heads, context, nodes):
    with pytest.raises(ArgumentError, match="lie outside the measured heads"):
        MeasuredCost(TABLE, heads, context)(nodes)
    assert MeasuredCost(TABLE, heads, context, extrapolate=True)(nodes) > 0


def test_measured_cost_extrapolates_in_proportion_above_the_launch_gap():
    cost = MeasuredCost(TABLE, 8, 1000, extrapolate=True)
    assert cost(129) == pytest.approx(5.0 + 69.0 * 2)
    assert MeasuredCost(TABLE, 16, 1000, extrapolate=True)(12) == pytest.approx(5.0 + 143.0 * 13 / 65)


def test_linear_user_and_sum():
    user = UserCost((0, 8, 64), (10.0, 12.0, 40.0))
    assert user.array(8).tolist() == [10.0 + n / 4 for n in range(9)]
    assert (user + LinearCost(1.0, 0.5))(8) == 12.0 + 1.0 + 4.5
    assert user.budgets == (0, 8, 64)
    with pytest.raises(ArgumentError, match=r"UserCost: `budget` is 65, expected one in 0\.\.64"):
        user(65)
    for nodes, times in (((0, 0), (1.0, 2.0)), ((0,), (1.0, 2.0)), ((), ()), ((0,), (0.0,)), ((0,), (np.nan,))):
        with pytest.raises(ArgumentError, match="UserCost"):
            UserCost(nodes, times)


def test_saved_table_comes_back_identical(tmp_path):
    TABLE.save(tmp_path / "costs.json")
    again = CostTable.load(tmp_path / "costs.json")
    assert set(again.rows) == set(TABLE.rows)
    assert again.about == ABOUT
    shipped = CostTable.load()
    shipped.save(tmp_path / "shipped.json")
    again = CostTable.load(tmp_path / "shipped.json")
    assert (again.rows, again.about) == (tuple(sorted(shipped.rows)), shipped.about)


def test_costs_command_takes_the_rows_of_one_variant_at_batch_1(tmp_path):
    rows = [
        {"op": "tree_attention", "name": "B 1 H 8 N 64 T 8192", "variant": "v9", "event_us": 12.5},
        {"op": "tree_attention", "name": "B 8 H 8 N 64 T 8192", "variant": "v9", "event_us": 99.0},
        {"op": "tree_attention", "name": "B 1 H 8 N 64 T 8192", "variant": "v1", "event_us": 77.0},
        {"op": "tree_attention", "name": "B 1 H 64 N 64 T 8192", "variant": "v9", "failed": "wrong"},
        {"op": "accept and commit_kv", "name": "B 1 N 65, chain of 9 accepted, one layer", "variant": "v9"},
    ]
    report = {"environment": {"gpu": "G", "date": "D", "command": "C", "nvrtc": "13"}, "rows": rows}
    (tmp_path / "report.json").write_text(json.dumps(report))
    out = tmp_path / "costs.json"
    main(["costs", str(tmp_path / "report.json"), "--variant", "v9", "--dtype", "float16", "--out", str(out)])
    table = CostTable.load(out)
    assert table.rows == ((8, 64, 8192, 12.5),)
    assert [table.about[name] for name in ("variant", "gpu", "date", "dtype")] == ["v9", "G", "D", "float16"]
    remade = "C --json > report.json && ddtree explore costs report.json --variant v9 --dtype float16"
    assert table.about["command"] == remade


REPORT_OF_A_HUGE_INTEGER = {
    "rows": [{"op": "tree_attention", "name": "B 1 H 8 N 64 T 8192", "variant": "v9", "event_us": 10**400}],
    "environment": dict.fromkeys(("gpu", "date", "command"), "x"),
}


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({}, r"`report` is not what .* prints \(KeyError: 'rows'\)"),
        ({"rows": [], "environment": {"gpu": "G"}}, r"`report` is not what .* prints \(KeyError: 'date'\)"),
        ({"rows": [], "environment": dict.fromkeys(("gpu", "date", "command"), "x")}, "`variant` is 'v9'"),
        ([], "`report`"),
        (REPORT_OF_A_HUGE_INTEGER, r"`report` is not what .* prints \(OverflowError: "),
    ],
)
def test_from_bench_rejects_other_reports(report, message):
    with pytest.raises(ArgumentError, match=f"CostTable.from_bench: {message}"):
        CostTable.from_bench(report, "v9", dtype="bfloat16")


@pytest.mark.parametrize(
    ("rows", "about", "message"),
    [
        ((), ABOUT, "at least one row"),
        (((8, 1, 1, -1.0),), ABOUT, r"`rows\[0\]` is -1\.0, expected a finite number > 0"),
        (((8, 1, 1, np.inf),), ABOUT, r"`rows\[0\]` is inf, expected a finite number > 0"),
        (((8, 1, 1, np.nan),), ABOUT, r"`rows\[0\]` is nan"),
        (((8, 0, 1, 1.0),), ABOUT, r"`rows\[0\]` is 0, expected an integer at least 1"),
        (((8, 1, 1, 1.0), (8, 1, 1)), ABOUT, "must hold tuples of heads"),
        (((8, 1, 1, 1.0), (8, 1, 1, 2.0)), ABOUT, "twice"),
        (((8, 1, 1, 1.0),), {**ABOUT, "gpu": ""}, "lacks gpu"),
    ],
)
def test_cost_table_rejects_incomplete_tables(rows, about, message):
    with pytest.raises(ArgumentError, match=message):
        CostTable(rows, about)


def test_cost_table_rejects_other_files(tmp_path):
    path = tmp_path / "costs.json"
    with pytest.raises(WeightsError, match="no such cost table"):
        CostTable.load(path)
    TABLE.save(path)
    whole = json.loads(path.read_text())
    damaged = {
        "not JSON": path.read_text()[:-9],
        "not a cost table": "[1]",
        "not a cost table of format": json.dumps({**whole, "columns": 3}),
        "lacks `rows` or `about`": json.dumps({key: value for key, value in whole.items() if key != "rows"}),
        r"lacks `rows` or `about`\Z": json.dumps({**whole, "about": None}),
        "`about` lacks gpu": json.dumps({**whole, "about": {**ABOUT, "gpu": ""}}),
        "must hold tuples": json.dumps({**whole, "rows": [[8, 1, 1000, 1.0], [8, 1]]}),
        "must hold tuples of": json.dumps({**whole, "rows": [8]}),
        r"`rows\[0\]` is 8\.5, expected an integer": json.dumps({**whole, "rows": [[8.5, 1, 1000, 1.0]]}),
        r"`rows\[0\]` is inf": json.dumps({**whole, "rows": [[8, 1, 1000, np.inf]]}),
        r"`rows\[0\]` is '1', expected a real": json.dumps({**whole, "rows": [[8, 1, 1000, "1"]]}),
    }
    for message, text in damaged.items():
        path.write_text(text)
        with pytest.raises(WeightsError, match=message) as caught:
            CostTable.load(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("context", [8192, 131_072])
def test_shipped_table_serves_every_budget_without_extrapolation(heads, context):
    cost = MeasuredCost(CostTable.load(), heads, context)
    times = cost.array(256)
    assert times.shape == (257,)
    assert (times > 0).all()
    assert times[256] > 3 * times[0]  # 257 nodes are far past the ridge everywhere
    with pytest.raises(ArgumentError, match="nodes 258"):
        cost(257)


# a table where a cost is taken


@pytest.fixture
def taking(two_prompts):
    """Every function that takes a cost, as name -> what it makes of one."""
    first, second = (replay(two_prompts, name) for name in ("chain 3", "best-first 8"))
    curve = budget_curve(two_prompts, (3, 8))
    return {
        "budget_curve": lambda cost: budget_curve(two_prompts, (3, 8), cost=cost).speedup,
        "speedup": lambda cost: (curve.with_cost(cost).speedup, speedup(first, cost)),
        "compare": lambda cost: compare(first, second, cost=cost),
        "compare_policies": lambda cost: [
            (row.speedup, row.ratio) for row in compare_policies(two_prompts, ["chain 3"], cost=cost)
        ],
        "CostAware": lambda cost: replay(two_prompts, CostAware(16, cost)).num_nodes.tolist(),
    }


def test_a_table_of_one_size_is_a_cost(taking):
    rows = tuple((8, nodes, 1000, 10.0 + nodes) for nodes in (1, 65))
    table = CostTable(rows, ABOUT)
    for call in taking.values():
        assert call(table) == call(MeasuredCost(table, heads=8, context=1000))


def test_a_table_of_many_sizes_says_how_to_choose_one(taking):
    table = CostTable.load()
    for name, call in taking.items():
        with pytest.raises(ArgumentError, match=rf"^{name}: `cost` is a CostTable of heads \[8, 64\] and") as caught:
            call(table)
        advice = str(caught.value).split("expected one of each: ")[1].split(", plus")[0]
        assert call(eval(advice, {"MeasuredCost": MeasuredCost, "table": table}))


@pytest.mark.parametrize("policy", ["best-first", "best-first, max_children 2", BestFirst])
def test_budget_curve_asks_for_costs_before_it_replays(two_prompts, monkeypatch, policy):
    def began(*arguments, **options):
        raise AssertionError("a replay began")

    monkeypatch.setattr("ddtree_cupy.explore.curves.sweep", began)
    with pytest.raises(ArgumentError, match=r"UserCost: `budget` is 32, expected one in 0\.\.16"):
        budget_curve(two_prompts, (4, 32), policy=policy, cost=UserCost((0, 16), (100.0, 116.0)))


def test_budget_curve_asks_for_no_cost_that_no_tree_has(two_prompts):
    cost = UserCost((0, 16), (100.0, 116.0))
    assert budget_curve(two_prompts, (64,), policy=chain, cost=cost).speedup[0].value > 0  # chains end at 15
