"""Units, verdicts and refusals of the displays: what a cost counts, what a rank is, and who is named."""

import time

import numpy as np
import pytest
from viz.cases import draw, texts, toy_tree

from ddtree_cupy import PagedKV, accept, build_tree, viz
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError
from ddtree_cupy.testing.tolerance import judge

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


@pytest.fixture(autouse=True)
def figures_are_closed():
    yield
    plt.close("all")


def two_trees():
    logits = np.random.default_rng(0).standard_normal((2, 3, 9)).astype(np.float32)
    return build_tree(logits, budget=4, root_token_ids=np.array([1, 2], np.int32))


# budgets


@pytest.mark.parametrize("unit", [1.0, 40.0])
def test_budget_display_is_invariant_under_the_unit_of_a_cost_model(unit):
    display = viz.BudgetDisplay([0, 2, 4], expected=[1, 2.0, 2.5], cost=lambda n: unit * (1 + 0.25 * n))
    assert display.cost == pytest.approx([1, 1.5, 2])
    assert display.speedup("expected") == pytest.approx([1, 2 / 1.5, 1.25])


def test_budget_display_takes_a_baseline_cost():
    display = viz.BudgetDisplay([2, 4], expected=[2.0, 2.5], cost=[60.0, 80.0], baseline_cost=40.0)
    assert display.cost == pytest.approx([1.5, 2])
    tree = viz.BudgetDisplay.from_tree(toy_tree(), cost=lambda n: 30.0 + n, baseline_cost=20.0)
    assert tree.cost == pytest.approx((30 + np.arange(6)) / 20)
    for wrong in (0.0, float("nan")):
        with pytest.raises(ArgumentError, match="`baseline_cost` is"):
            viz.BudgetDisplay([2], expected=[2.0], cost=[60.0], baseline_cost=wrong)
    with pytest.raises(ArgumentError, match=r"`cost\(0\)` is 0"):
        viz.BudgetDisplay([2], expected=[2.0], cost=lambda n: n)


def test_budget_display_from_tree_takes_a_longer_cost_array():
    display = viz.BudgetDisplay.from_tree(toy_tree(), cost=np.arange(1.0, 65.0))
    assert display.cost.tolist() == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ShapeError, match="`cost` has 2 entries, expected 6"):
        viz.BudgetDisplay.from_tree(toy_tree(), cost=[1.0, 2.0])


def test_budget_display_draws_a_given_interval_of_the_speedup():
    options = {"realised": [1.5, 2.0], "realised_low": [1.4, 1.9], "realised_high": [1.6, 2.1], "cost": [1.0, 2.0]}
    display = viz.BudgetDisplay([1, 2], **options, speedup_low=[1.25, 0.5], speedup_high=[1.75, 1.5])
    for kind, heights in (("tokens", {1.4, 1.6, 1.9, 2.1}), ("speedup", {0.5, 1.25, 1.5, 1.75})):
        assert set(display.plot(kind=kind).band_.get_paths()[0].vertices[:, 1]) == heights
    with pytest.raises(ArgumentError, match="`speedup_low` and `speedup_high` go together"):
        viz.BudgetDisplay([1, 2], **options, speedup_low=[1.25, 0.5])


@pytest.mark.parametrize("name", ["expected", "realised", "realised_low", "realised_high", "cost"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_budget_display_rejects_what_is_not_finite(name, value):
    arrays = {which: [1.5, 2.0] for which in ("expected", "realised", "realised_low", "realised_high", "cost")}
    arrays[name] = [1.5, value]
    if np.isnan(value) and name.endswith(("low", "high")):  # no interval is known, as for a single prompt
        assert np.isnan(getattr(viz.BudgetDisplay([1, 2], **arrays).plot(), name)[1])
        return
    with pytest.raises(ArgumentError, match=f"`{name}` is .*expected finite values"):
        viz.BudgetDisplay([1, 2], **arrays)


# errors


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
    with pytest.raises(ArgumentError, match="go together"):
        viz.ErrorDisplay([0.1], 1.0, rms_error=0.1)
    with pytest.raises(DTypeError, match="`rms_allowed` has dtype"):
        viz.ErrorDisplay([0.1], 1.0, rms_error=0.1, rms_allowed="a")


@pytest.mark.parametrize(
    ("arrays", "floor", "error", "message"),
    [
        (([1.0, 2.0], [1.0, 2.0], [1.0, np.nan]), 0.0, ArgumentError, "`baseline` is not finite everywhere"),
        (([1.0, 2.0], [1.0, 2.0], [np.inf, 2.0]), 0.0, ArgumentError, "`baseline` is not finite everywhere"),
        (([1.0, 2.0], [1.0, 2.0], [1.0, 2.0]), [0.0] * 3, ShapeError, r"`floor` is \(3,\)"),
        (([1.0, 2.0], [1.0, 2.0], [1.0, 2.0]), -1.0, ArgumentError, "`floor` holds values below 0"),
        (([[1.0], [2.0, 3.0]], [1.0, 2.0], [1.0, 2.0]), 0.0, ShapeError, "`actual` is list, expected an array"),
    ],
)
def test_error_display_rejects_arrays(arrays, floor, error, message):
    with pytest.raises(error, match=message):
        viz.ErrorDisplay.from_arrays(*arrays, floor=floor)


# acceptance


@pytest.mark.parametrize(
    ("rank_of", "label"), [("sibling", "rank among siblings"), ("drafter", "in the drafter's row")]
)
def test_acceptance_display_names_what_its_ranks_count(rank_of, label):
    display = viz.AcceptanceDisplay.from_arrays([1, 0], hit_ranks=[[3], [-1]], rank_of=rank_of)
    assert label in display.plot(kind="rank").ax_.get_xlabel()


def test_acceptance_display_rejects_ranks_that_are_none():
    with pytest.raises(ArgumentError, match="`hit_ranks` holds -2"):
        viz.AcceptanceDisplay([1, 0], hit_ranks=[[0], [-2]])
    with pytest.raises(ArgumentError, match="`rank_of` is 'cousin', expected one of 'sibling', 'drafter'"):
        viz.AcceptanceDisplay([1], hit_ranks=[[0]], rank_of="cousin")
    with pytest.raises(DTypeError, match="`results` is str, expected AcceptResult"):
        viz.AcceptanceDisplay.from_rounds([toy_tree()], ["x"])


# pages


def test_page_table_display_rejects_a_page_twice_among_used_entries():
    options = {"page_size": 4, "context_len": 8, "num_pages": 4}
    with pytest.raises(ArgumentError, match=r"`page_table\[2\]` is 3 once more"):
        viz.PageTableDisplay([3, 1, 3], **{**options, "context_len": 9})
    assert len(viz.PageTableDisplay([3, 1, 3], **options).rows()) == 8  # the third entry is not in use


def test_page_table_display_draws_one_box_a_page_of_a_long_context():
    table = np.random.default_rng(0).permutation(2048)
    display = viz.PageTableDisplay(table, page_size=64, context_len=131_000, num_nodes=32)
    display.plot()  # fonts are loaded once
    start = time.process_time()
    draw(display.plot())
    assert time.process_time() - start < 3.0  # 0.4 s; a Rectangle a row took 16 s
    assert (
        len(display.physical_.get_paths()) == 2048 + 2
    )  # one a page, and what the page with the tree's keys is split into
    (lines,) = display.arrows_
    pairs = np.array(lines.get_segments())
    assert pairs[:, 0, 1] == pytest.approx(64.35 * np.arange(2048)[: len(pairs)] + 32)
    assert pairs[:, 1, 1] == pytest.approx(64.35 * table[: len(pairs)] + 32)


def test_page_table_display_colours_runs_of_rows_like_rows():
    display = viz.PageTableDisplay([1, 0], page_size=512, context_len=600, num_nodes=24).plot()
    logical = [(path.vertices[0, 1], path.vertices[2, 1]) for path in display.logical_.get_paths()]
    assert logical == pytest.approx(np.array([(0, 512), (512.35, 600.35), (600.35, 624.35), (624.35, 1024.35)]))
    sky, orange, pale, white = (matplotlib.colors.to_rgba(c) for c in ("#56B4E9", "#E69F00", "#E6E6E6", "#FFFFFF"))
    assert display.logical_.get_facecolors() == pytest.approx(np.array([sky, sky, orange, pale]))
    assert display.physical_.get_facecolors() == pytest.approx(np.array([sky, orange, white, sky]))


# who is named


@pytest.mark.parametrize("request_", [1.0, True, "0"])
@pytest.mark.parametrize("display", [viz.TreeDisplay, viz.BudgetDisplay, viz.VisibilityDisplay])
def test_from_tree_rejects_a_request_that_is_no_integer(display, request_):
    with pytest.raises(DTypeError, match=f"{display.__name__}.from_tree: `request` is .*expected an integer"):
        display.from_tree(two_trees(), request=request_)


@pytest.mark.parametrize("display", [viz.TreeDisplay, viz.BudgetDisplay, viz.VisibilityDisplay])
def test_from_tree_rejects_another_object(display):
    with pytest.raises(DTypeError, match=r"from_tree: `tree` is str, expected DraftTree"):
        display.from_tree("x")


def test_from_kv_rejects_another_object_and_request():
    with pytest.raises(DTypeError, match="from_kv: `kv` is str, expected PagedKV"):
        viz.PageTableDisplay.from_kv("x")
    kv = PagedKV.allocate(12, batch=2, page_size=4, head_dim_ckv=16, head_dim_kpe=16)
    with pytest.raises(DTypeError, match=r"`request` is 1\.0"):
        viz.PageTableDisplay.from_kv(kv, request=1.0)


def test_tree_display_rejects_arguments_of_another_batch_or_type():
    tree = two_trees()
    with pytest.raises(ShapeError, match=r"`target_token_ids` is \(1, 5\), expected 2 requests"):
        viz.TreeDisplay.from_tree(tree, request=1, target_token_ids=np.zeros((1, 5), np.int32))
    with pytest.raises(DTypeError, match="`result` is int, expected AcceptResult"):
        viz.TreeDisplay.from_tree(tree, request=1, result=3)
    result = accept(tree, np.zeros((2, 5), np.int32))
    assert viz.TreeDisplay.from_tree(tree, request=1, result=result).bonus_token == 0
    for wrong in ("a", 1.5, True):
        with pytest.raises(DTypeError, match="`bonus_token` is"):
            viz.TreeDisplay([9], [-1], accepted=[0], bonus_token=wrong)


@pytest.mark.parametrize("name", ["page_size", "context_len", "num_nodes", "num_pages"])
@pytest.mark.parametrize(("value", "error"), [(-1, ArgumentError), (1.0, DTypeError), (True, DTypeError)])
def test_page_table_display_rejects_sizes(name, value, error):
    with pytest.raises(error, match=f"PageTableDisplay: `{name}` is {value}"):
        viz.PageTableDisplay([0, 1], **{"page_size": 4, "context_len": 1, name: value})


def test_visibility_display_rejects_scalars_that_are_no_integer():
    with pytest.raises(DTypeError, match=r"`row` is 1\.0"):
        viz.VisibilityDisplay(np.ones((2, 2), bool)).plot(row=1.0)
    with pytest.raises(DTypeError, match=r"`context_len` is 1\.5"):
        viz.VisibilityDisplay(np.ones((2, 2), bool), context_len=1.5)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda ragged: viz.TreeDisplay(ragged, [-1]), "token_ids"),
        (lambda ragged: viz.VisibilityDisplay(ragged), "visibility"),
        (lambda ragged: viz.PageTableDisplay(ragged, page_size=1, context_len=1), "page_table"),
        (lambda ragged: viz.BudgetDisplay([1, 2], expected=ragged), "expected"),
        (lambda ragged: viz.AcceptanceDisplay([1, 2], hit_ranks=ragged), "hit_ranks"),
        (lambda ragged: viz.ErrorDisplay(ragged, 1.0), "error"),
        (lambda ragged: viz.BenchDisplay(["v1"], ragged, [1.0]), "contexts"),
    ],
)
def test_displays_reject_ragged_lists_and_masked_arrays(call, name):
    with pytest.raises(ShapeError, match=f"`{name}` is list, expected an array or even lists"):
        call([[0], [0, 1]])
    with pytest.raises(DTypeError, match=f"`{name}` is a masked array"):
        call(np.ma.masked_array([[1]]))


def test_bench_display_rejects_reports_without_a_measurement():
    row = {"op": "tree_attention", "name": "B 1 T 64", "variant": "v1"}
    row |= {"event_us": 1.0, "low_us": 0.9, "high_us": 1.1, "tflops": 2.0, "bytes": 64}
    for key in ("variant", "event_us", "low_us", "high_us", "tflops", "bytes"):
        part = {name: value for name, value in row.items() if name != key}
        with pytest.raises(ArgumentError, match=f"`report` has no '{key}' in row 'B 1 T 64'"):
            viz.BenchDisplay.from_report({"rows": [row, part]})
    with pytest.raises(DTypeError, match="`event_us` has dtype object"):
        viz.BenchDisplay.from_report({"rows": [{**row, "event_us": None}]})
    with pytest.raises(DTypeError, match="`report` is list, expected Mapping"):
        viz.BenchDisplay.from_report([row])
