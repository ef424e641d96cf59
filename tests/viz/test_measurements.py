"""What the artists of measurements hold is the data: budgets, acceptance, errors, benchmarks."""

import numpy as np
import pytest

from ddtree_cupy import accept, viz
from ddtree_cupy.testing.tolerance import judge
from tests.viz.cases import draw, plain, texts, toy_tree

# budgets


def band(display):
    """Lower and upper edge of the interval, by budget."""
    vertices = display.band_.get_paths()[0].vertices
    at = [vertices[vertices[:, 0] == budget, 1] for budget in display.budgets]
    return np.array([[values.min() for values in at], [values.max() for values in at]])


def test_budget_display_holds_tokens_and_speedups():
    arrays = {"expected": [1.5, 2.0, 2.5], "realised": [1.4, 1.9, 2.1], "cost": [1.0, 1.25, 2.0]}
    low, high = [1.3, 1.7, 2.0], [1.6, 2.0, 2.3]
    display = viz.BudgetDisplay([1, 2, 4], **arrays, realised_low=low, realised_high=high)
    for kind, cost in (("tokens", np.ones(3)), ("speedup", display.cost)):
        display.plot(kind=kind)
        for which, line in display.lines_.items():
            assert line.get_xdata().tolist() == [1, 2, 4]
            assert line.get_ydata() == pytest.approx(getattr(display, which) / cost)
        assert band(display) == pytest.approx(np.array([low, high]) / cost)
    assert (display.best_.get_xdata()[0], display.best_.get_ydata()[0]) == (2, pytest.approx(1.9 / 1.25))
    options = {"realised_low": low, "realised_high": high, "speedup_low": [1.2, 0.5, 1], "speedup_high": [1.7, 1.5, 2]}
    display = viz.BudgetDisplay([1, 2, 4], **arrays, **options)
    assert band(display.plot(kind="tokens")) == pytest.approx(np.array([low, high]))
    assert band(display.plot(kind="speedup")) == pytest.approx(np.array([[1.2, 0.5, 1], [1.7, 1.5, 2]]))


def test_budget_display_sums_the_probabilities_of_the_prefixes():
    display = viz.BudgetDisplay.from_tree(toy_tree(), cost=[1, 1.0, 1.1, 1.2, 2, 2])
    assert display.expected == pytest.approx([1, 1.6, 1.9, 2.2, 2.44, 2.59], abs=1e-6)
    assert display.best_budget() == 3
    assert display.plot(kind="speedup").best_.get_xdata() == [3]
    assert set(display.lines_) == {"expected"}
    longer = viz.BudgetDisplay.from_tree(toy_tree(), cost=np.arange(1.0, 65.0))
    assert longer.cost.tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("unit", [1.0, 40.0])
def test_budget_display_is_invariant_under_the_unit_of_a_cost_model(unit):
    display = viz.BudgetDisplay([0, 2, 4], expected=[1, 2.0, 2.5], cost=lambda n: unit * (1 + 0.25 * n))
    assert display.cost == pytest.approx([1, 1.5, 2])
    assert display.speedup("expected") == pytest.approx([1, 2 / 1.5, 1.25])
    display = viz.BudgetDisplay([2, 4], expected=[2.0, 2.5], cost=[60 * unit, 80 * unit], baseline_cost=40 * unit)
    assert display.cost == pytest.approx([1.5, 2])
    tree = viz.BudgetDisplay.from_tree(toy_tree(), cost=lambda n: unit * (30.0 + n), baseline_cost=20 * unit)
    assert tree.cost == pytest.approx((30 + np.arange(6)) / 20)


@pytest.mark.parametrize("end", ["realised_low", "realised_high"])
def test_budget_display_leaves_a_gap_where_no_interval_is_known(end):
    """As for a single prompt."""
    arrays = {name: [1.5, 2.0] for name in ("realised", "realised_low", "realised_high")} | {end: [1.5, np.nan]}
    assert np.isnan(getattr(viz.BudgetDisplay([1, 2], **arrays).plot(), end)[1])


# acceptance


def test_acceptance_display_holds_the_rates():
    ranks = [[-1, -1], [0, 1], [1, -1], [0, 2], [0, -1]]
    display = viz.AcceptanceDisplay([0, 2, 1, 2, 1], hit_ranks=ranks).plot()
    assert [bar.get_height() for bar in display.bars_] == pytest.approx([0.2, 0.4, 0.4])
    assert [bar.get_x() + bar.get_width() / 2 for bar in display.bars_] == pytest.approx([0, 1, 2])
    assert display.line_.get_xdata().tolist() == [0, 1, 2]
    assert display.line_.get_ydata() == pytest.approx([1.0, 0.8, 0.4])
    assert display.mean_.get_xdata() == pytest.approx([1.2, 1.2])
    display.plot(kind="rank")
    assert plain(display.image_.get_array()) == pytest.approx(np.array([[0.6, 0.2, 0.0], [0.0, 0.2, 0.2]]))
    cells = {text.get_position(): text.get_text() for text in display.texts_}
    assert cells == {(0, 0): "60", (1, 0): "20", (1, 1): "20", (2, 1): "20"}
    assert "rank among siblings" in display.ax_.get_xlabel()
    display = viz.AcceptanceDisplay.from_arrays([1, 0], hit_ranks=[[3], [-1]], rank_of="drafter")
    assert "in the drafter's row" in display.plot(kind="rank").ax_.get_xlabel()
    assert viz.AcceptanceDisplay([-1, 3]).num_accepted.tolist() == [3]  # an inactive round is left out


def test_acceptance_display_counts_sibling_ranks():
    tree = toy_tree()
    targets = [[11, 0, 0, 20, 0, 0], [10, 21, 0, 0, 0, 0], [5, 0, 0, 0, 0, 0]]
    results = [accept(tree, np.array(t, np.int32)) for t in targets]
    display = viz.AcceptanceDisplay.from_rounds([tree] * 3, results)
    assert display.num_accepted.tolist() == [2, 2, 0]
    assert display.hit_ranks.tolist() == [[1, 0], [0, 1], [-1, -1]]


# errors


def test_error_display_holds_every_entry():
    error = np.array([[0.1, 0.2, 3.0], [0.4, 0.5, 0.6]])
    allowed = np.array([[1.0, 0.5, 1.0], [0.5, 2.0, 0.8]])
    display = draw(viz.ErrorDisplay(error, allowed).plot())
    inside = np.column_stack([allowed.ravel(), error.ravel()])
    assert plain(display.failures_.get_offsets()) == pytest.approx(inside[[2]])
    assert plain(display.points_.get_offsets()) == pytest.approx(np.delete(inside, 2, axis=0))
    assert np.array_equal(display.diagonal_.get_xdata(), display.diagonal_.get_ydata())
    draw(display.plot(kind="map"))
    assert plain(display.image_.get_array()) == pytest.approx(np.minimum(error / allowed, 2))
    assert plain(display.marks_.get_offsets()).tolist() == [[2, 0]]  # x is the head, y the node


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
    lse = np.array([[-np.inf, 1.0]])
    assert viz.ErrorDisplay.from_arrays(lse, lse, lse, floor=[[0.0, 1e-6]]).num_failures == 0
    assert viz.ErrorDisplay.from_arrays(lse[:, ::-1], lse, lse, floor=1e-6).num_failures == 2


@pytest.mark.parametrize(("spread", "passes"), [(0.4, True), (0.9, False)])
def test_error_display_matches_reference_rule_in_its_root_mean_square(spread, passes):
    """Every entry within its bound: only the second half of the rule can tell."""
    reference = np.array([[1.0, 2.0, 3.0], [4.0, -np.inf, 6.0]])
    baseline = reference + np.where([[True, False, False]] * 2, 1e-3, 0.0)
    actual = reference + spread * 2e-3
    floor = np.full(reference.shape, 1e-4)
    display = viz.ErrorDisplay.from_arrays(actual, reference, baseline, floor=floor)
    verdict = judge(actual, reference, baseline, floor=floor)
    assert display.num_failures == 0
    assert (display.rms_error, display.rms_allowed) == pytest.approx((verdict.rms_error, verdict.rms_allowed))
    assert display.passes is verdict.passes is passes
    for kind in ("scatter", "map"):
        note = texts(draw(display.plot(kind=kind)).legend_.get_texts())[-1]
        assert note.startswith(f"RMS {verdict.rms_error:.2g}")
        assert note.endswith("passes" if passes else "fails")


def test_error_display_without_root_mean_squares_judges_entries_only():
    display = viz.ErrorDisplay(np.array([[0.1, 0.2]]), 1.0)
    assert display.passes
    assert display.plot(kind="map").legend_ is None
    assert not any("RMS" in text for text in texts(display.plot().legend_.get_texts()))


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e30])
def test_error_display_draws_any_scale(scale):
    display = viz.ErrorDisplay(np.array([[0.0, scale]]), np.array([[scale, 0.0]]))
    draw(display.plot())
    draw(display.plot(kind="map"))


# benchmarks


def test_bench_display_holds_times_and_roof():
    arrays = {"low_us": [650.0, 55.0, 80.0], "high_us": [750.0, 65.0, 95.0]}
    arrays |= {"flops": [8e9, 1e9, 1e9], "bytes_moved": [8e6, 2e6, 2e6]}
    arrays |= {"peak_flops_per_second": 7e14, "peak_bytes_per_second": 3.5e12}
    display = viz.BenchDisplay(["v1", "v2", "v1"], [8192, 1024, 1024], [700.0, 60.0, 90.0], **arrays).plot()
    assert display.lines_["v1"].get_xdata().tolist() == [1024, 8192]
    assert display.lines_["v1"].get_ydata().tolist() == [90, 700]
    assert display.lines_["v2"].get_ydata().tolist() == [60]
    vertices = display.bands_[0].get_paths()[0].vertices
    assert {tuple(v) for v in vertices} == {(1024, 80), (1024, 95), (8192, 650), (8192, 750)}
    display.plot(kind="roofline")
    assert display.lines_["v1"].get_xdata() == pytest.approx([500, 1000])
    assert display.lines_["v1"].get_ydata() == pytest.approx([1e9 / 90e-6 / 1e12, 8e9 / 700e-6 / 1e12])
    assert display.roof_.get_xdata() == pytest.approx([100, 200, 2000])
    assert display.roof_.get_ydata() == pytest.approx([350, 700, 700])  # TFLOP/s


@pytest.mark.parametrize("kind", ["time", "roofline"])
def test_bench_display_draws_no_two_versions_alike(kind):
    versions = [f"v{number}" for number in range(20)]
    options = {"flops": 20 * [1e9], "bytes_moved": 20 * [1e6]}
    options |= dict.fromkeys(("peak_flops_per_second", "peak_bytes_per_second"), 1e12)
    lines = viz.BenchDisplay(versions, 20 * [1024], 20 * [1.0], **options).plot(kind=kind).lines_
    assert len({(lines[name].get_color(), lines[name].get_marker()) for name in versions}) == 20


def test_bench_display_reads_a_report_and_sorts_by_context():
    row = {"op": "tree_attention", "tflops": 14.0}
    rows = [
        {**row, "name": f"B 1 H 8 N 64 T {context}", "variant": variant, "bytes": 1152 * context}
        | {key: factor * scale * context for key, factor in (("event_us", 1.0), ("low_us", 0.9), ("high_us", 1.1))}
        for variant, scale in (("v1", 0.1), ("v2", 0.08))
        for context in (8192, 1024)
    ]
    rows += [{**row, "name": "B 1 H 8 N 64 T 5", "variant": "v1", why: "so"} for why in ("failed", "refused")]
    peaks = {"copy_bytes_per_second": 4.1e12, "matmul_flops_per_second": 7.2e14}
    display = draw(viz.BenchDisplay.from_report({"yardstick_before": peaks, "rows": rows}).plot())
    assert list(display.lines_) == ["v1, B 1 H 8 N 64", "v2, B 1 H 8 N 64"]
    assert display.lines_["v1, B 1 H 8 N 64"].get_xdata().tolist() == [1024, 8192]
    assert len(display.bands_) == 2
    roof = draw(display.plot(kind="roofline"))
    assert roof.lines_["v1, B 1 H 8 N 64"].get_ydata() == pytest.approx([14.0, 14.0])
