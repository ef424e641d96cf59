"""Displays of measurements: budgets, acceptance, errors, benchmarks."""

import numpy as np
import pytest
from viz.cases import draw, texts, toy_tree

from ddtree_cupy import DraftTree, accept, viz
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


@pytest.fixture(autouse=True)
def figures_are_closed():
    yield
    plt.close("all")


REPORT = {
    "yardstick_before": {"copy_bytes_per_second": 4.1e12, "matmul_flops_per_second": 7.2e14},
    "rows": [
        {
            "op": "tree_attention",
            "name": f"B 1 H 8 N 64 T {context}",
            "variant": variant,
            "event_us": scale * context,
            "low_us": 0.9 * scale * context,
            "high_us": 1.1 * scale * context,
            "tflops": 14.0,
            "bytes": 1152 * context,
        }
        for variant, scale in (("v1", 0.1), ("v2", 0.08))
        for context in (8192, 1024)
    ]
    + [
        {"op": "tree_attention", "name": "B 1 H 8 N 64 T 5", "variant": "v1", "failed": "AssertionError"},
        {"op": "tree_attention", "name": "B 1 H 8 N 64 T 99999", "variant": "v1", "refused": "too long"},
    ],
}


# budgets


def test_budget_display_sums_the_probabilities_of_the_prefixes():
    display = viz.BudgetDisplay.from_tree(toy_tree(), cost=[1, 1.0, 1.1, 1.2, 2, 2])
    assert display.expected == pytest.approx([1, 1.6, 1.9, 2.2, 2.44, 2.59], abs=1e-6)
    assert display.best_budget() == 3
    assert display.plot(kind="speedup").best_.get_xdata() == [3]
    assert set(display.lines_) == {"expected"}


def test_budget_display_draws_the_interval():
    display = viz.BudgetDisplay([1, 2], realised=[1.5, 2], realised_low=[1.4, 1.9], realised_high=[1.6, 2.1])
    assert display.plot().band_ is not None
    assert set(display.lines_) == {"realised"}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ArgumentError, "`expected` and `realised` are None"),
        ({"budgets": [2, 1], "expected": [1, 2]}, ArgumentError, "expected ascending"),
        ({"budgets": [], "expected": []}, ArgumentError, "`budgets` is"),
        ({"expected": [1]}, ShapeError, "`expected` has 1 entries, expected 2 like `budgets`"),
        ({"expected": [1, 2], "cost": [0, 1]}, ArgumentError, "`cost` is"),
        ({"expected": [1, 2], "cost": lambda n: float("inf")}, ArgumentError, "`cost` is"),
        ({"realised": [1, 2], "realised_low": [1, 2]}, ArgumentError, "go together"),
    ],
)
def test_budget_display_rejects(options, error, message):
    with pytest.raises(error, match=message):
        viz.BudgetDisplay(**{"budgets": [1, 2], **options})


def test_budget_display_rejects_a_speedup_without_cost():
    with pytest.raises(ArgumentError, match="`cost` is None"):
        viz.BudgetDisplay([1], expected=[1.5]).plot(kind="speedup")
    with pytest.raises(ArgumentError, match="path_scores` is None"):
        viz.BudgetDisplay.from_tree(DraftTree.from_parents([9], [-1]))


# acceptance


def test_acceptance_display_counts_sibling_ranks():
    tree = toy_tree()
    targets = [[11, 0, 0, 20, 0, 0], [10, 21, 0, 0, 0, 0], [5, 0, 0, 0, 0, 0]]
    results = [accept(tree, np.array(t, np.int32)) for t in targets]
    display = viz.AcceptanceDisplay.from_rounds([tree] * 3, results)
    assert display.num_accepted.tolist() == [2, 2, 0]
    assert display.hit_ranks.tolist() == [[1, 0], [0, 1], [-1, -1]]
    assert display.rank_rates() == pytest.approx(np.full((2, 2), 1 / 3))
    assert [bar.get_height() for bar in display.plot().bars_] == pytest.approx([1 / 3, 0, 2 / 3])
    assert texts(display.plot(kind="rank").texts_) == ["33"] * 4


def test_acceptance_display_leaves_inactive_rounds_out():
    assert viz.AcceptanceDisplay([-1, 3]).num_accepted.tolist() == [3]


@pytest.mark.parametrize(
    ("counts", "options", "error", "message"),
    [
        ([-1], {}, ArgumentError, "expected an active round"),
        ([-2, 1], {}, ArgumentError, "values from -1"),
        ([0.5], {}, DTypeError, "`num_accepted` has dtype float64"),
        ([1], {"hit_ranks": [[0], [0]]}, ShapeError, "`hit_ranks` has 2 entries"),
        ([1], {"hit_ranks": [0]}, ShapeError, r"`hit_ranks` is \(1,\), expected 2 axes"),
        ([1], {"hit_ranks": [[-1, 0]]}, ArgumentError, "does not hold one rank"),
    ],
)
def test_acceptance_display_rejects(counts, options, error, message):
    with pytest.raises(error, match=message):
        viz.AcceptanceDisplay(counts, **options)


def test_acceptance_display_rejects_what_it_cannot_draw():
    with pytest.raises(ArgumentError, match="no round accepted"):
        viz.AcceptanceDisplay([0], hit_ranks=np.zeros((1, 0), int)).plot(kind="rank")
    with pytest.raises(ArgumentError, match="`hit_ranks` is None"):
        viz.AcceptanceDisplay([0]).plot(kind="rank")
    with pytest.raises(ShapeError, match="`results` has 0 entries, expected 1"):
        viz.AcceptanceDisplay.from_rounds([toy_tree()], [])


# errors


def test_error_display_finds_what_the_rule_rejects():
    reference = np.ones((5, 3, 2))
    actual = reference.copy()
    actual[1, 2, 0], actual[4, 0, 1] = 1.1, np.nan
    display = viz.ErrorDisplay.from_arrays(actual, reference, reference + 1e-3, floor=1e-3)
    assert display.allowed == pytest.approx(3e-3)
    assert np.argwhere(display.failures).tolist() == [[1, 2, 0], [4, 0, 1]]
    assert display.ratios()[4, 0] == np.inf
    assert len(draw(display.plot(kind="map")).marks_.get_offsets()) == 2
    assert len(draw(display.plot()).failures_.get_offsets()) == 2


def test_error_display_accepts_equal_infinities():
    lse = np.array([[-np.inf, 1.0]])
    assert viz.ErrorDisplay.from_arrays(lse, lse, lse, floor=[[0.0, 1e-6]]).num_failures == 0
    assert viz.ErrorDisplay.from_arrays(lse[:, ::-1], lse, lse, floor=1e-6).num_failures == 2


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e30])
def test_error_display_draws_any_scale(scale):
    display = viz.ErrorDisplay(np.array([[0.0, scale]]), np.array([[scale, 0.0]]))
    draw(display.plot())
    draw(display.plot(kind="map"))


@pytest.mark.parametrize(
    ("error", "allowed", "kind", "message"),
    [
        ([], 1.0, ShapeError, "at least one entry"),
        ([1.0, 2.0], [1.0, 2.0, 3.0], ShapeError, "expected to broadcast"),
        ([-1.0], 1.0, ArgumentError, "below 0"),
        ([1.0], np.inf, ArgumentError, "infinite"),
        (["a"], 1.0, DTypeError, "expected real numbers"),
    ],
)
def test_error_display_rejects(error, allowed, kind, message):
    with pytest.raises(kind, match=message):
        viz.ErrorDisplay(error, allowed)


def test_error_display_rejects_a_map_of_a_list():
    with pytest.raises(ShapeError, match="num_nodes, num_heads"):
        viz.ErrorDisplay([1.0], 1.0).plot(kind="map")
    with pytest.raises(ShapeError, match=r"`actual` is \(2,\), expected \(1,\)"):
        viz.ErrorDisplay.from_arrays([1.0, 2.0], [1.0], [1.0], floor=0.0)


# benchmarks


def test_bench_display_draws_no_two_versions_alike():
    versions = [f"v{number}" for number in range(20)]
    for kind in ("time", "roofline"):
        options = {"flops": 20 * [1e9], "bytes_moved": 20 * [1e6]} | dict.fromkeys(
            ("peak_flops_per_second", "peak_bytes_per_second"), 1e12
        )
        lines = viz.BenchDisplay(versions, 20 * [1024], 20 * [1.0], **options).plot(kind=kind).lines_
        looks = {(line.get_color(), line.get_marker()) for name, line in lines.items() if name in versions}
        assert len(looks) == 20


def test_bench_display_reads_a_report_and_sorts_by_context():
    display = draw(viz.BenchDisplay.from_report(REPORT).plot())
    assert list(display.lines_) == ["v1, B 1 H 8 N 64", "v2, B 1 H 8 N 64"]
    assert display.lines_["v1, B 1 H 8 N 64"].get_xdata().tolist() == [1024, 8192]
    assert len(display.bands_) == 2
    roof = draw(display.plot(kind="roofline"))
    assert roof.lines_["v1, B 1 H 8 N 64"].get_ydata() == pytest.approx([14.0, 14.0])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"versions": []}, ArgumentError, "`versions` is empty"),
        ({"contexts": [1, 2]}, ShapeError, "`contexts` has 2 entries, expected 1 like `versions`"),
        ({"times_us": [0.0]}, ArgumentError, "`times_us` is"),
        ({"low_us": [1.0]}, ArgumentError, "go together"),
        ({"peak_flops_per_second": 0.0}, ArgumentError, "`peak_flops_per_second` is 0.0"),
    ],
)
def test_bench_display_rejects(options, error, message):
    arrays = {"versions": ["v1"], "contexts": [1024], "times_us": [5.0], **options}
    with pytest.raises(error, match=message):
        viz.BenchDisplay(**arrays)


def test_bench_display_rejects_what_it_cannot_draw():
    with pytest.raises(ArgumentError, match="`flops` is None"):
        viz.BenchDisplay(["v1"], [1024], [5.0]).plot(kind="roofline")
    with pytest.raises(ArgumentError, match="no timed row of accept"):
        viz.BenchDisplay.from_report(REPORT, op="accept")
