"""What the displays refuse, and who is named."""

import numpy as np
import pytest

from ddtree_cupy import DraftTree, PagedKV, viz
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError
from tests.refusals import rejects
from tests.viz.cases import toy_tree, two_trees

ONES = np.ones((2, 2), bool)
TIMED = {"op": "tree_attention", "name": "B 1 T 64", "variant": "v1"}
TIMED |= {"event_us": 1.0, "low_us": 0.9, "high_us": 1.1, "tflops": 2.0, "bytes": 64}
SINGLE = DraftTree.from_parents([9], [-1])


def allocate():
    return PagedKV.allocate(12, batch=2, page_size=4, head_dim_ckv=16, head_dim_kpe=16)


@rejects(
    (ArgumentError, "`token_ids` is empty", {"token_ids": []}),
    (DTypeError, "`token_ids` has dtype float64", {"token_ids": [1.5, 2, 3]}),
    (ShapeError, "`parents` has 2 entries, expected 3 like `token_ids`", {"parents": [-1, 0]}),
    (ArgumentError, r"`parents\[2\]` is 2, expected 0..1", {"parents": [-1, 0, 2]}),
    (ArgumentError, r"`parents\[0\]` is 0, expected -1", {"parents": [0, 0, 0]}),
    (ArgumentError, r"`parents\[1\]` is -1", {"parents": [-1, -1, 0]}),
    (ShapeError, "`path_scores` has 1 entries", {"path_scores": [0.0]}),
    (ArgumentError, r"`accepted` is \[0, 2\]", {"accepted": [0, 2]}),
    (ArgumentError, "without padding", {"accepted": [0, -1]}),
    (ArgumentError, r"`accepted` is \[\]", {"accepted": []}),
    (ArgumentError, "`bonus_token` is 5", {"bonus_token": 5}),
    (DTypeError, "`bonus_token` is 'a'", {"accepted": [0], "bonus_token": "a"}),
    (DTypeError, r"`bonus_token` is 1\.5", {"accepted": [0], "bonus_token": 1.5}),
    (DTypeError, "`bonus_token` is True", {"accepted": [0], "bonus_token": True}),
    (ShapeError, "`labels` has 1 entries", {"labels": ["a"]}),
)
def test_tree_display_rejects(options):
    viz.TreeDisplay(**{"token_ids": [9, 10, 20], "parents": [-1, 0, 1], **options})


@rejects(
    (ArgumentError, "expected `path_scores`", lambda: viz.TreeDisplay([9], [-1]).plot(color="score")),
    (ArgumentError, "`color` is 'red'", lambda: viz.TreeDisplay([9], [-1]).plot(color="red")),
    (ArgumentError, "has no nodes", lambda: viz.TreeDisplay.from_tree(DraftTree.from_parents([-1], [-1]))),
    (ArgumentError, r"`request` is None, expected 0\.\.1", lambda: viz.TreeDisplay.from_tree(two_trees())),
    (ArgumentError, "`request` is 0, expected None", lambda: viz.TreeDisplay.from_tree(toy_tree(), request=0)),
    (
        ShapeError,
        r"`target_token_ids` is \(1, 5\), expected 2 requests",
        lambda: viz.TreeDisplay.from_tree(two_trees(), request=1, target_token_ids=np.zeros((1, 5), np.int32)),
    ),
    (
        DTypeError,
        "`result` is int, expected AcceptResult",
        lambda: viz.TreeDisplay.from_tree(two_trees(), request=1, result=3),
    ),
)
def test_tree_display_rejects_what_it_cannot_draw(call):
    call()


@rejects(
    (DTypeError, "`visibility` has dtype float64, expected bool", np.ones((2, 2)), {}),
    (ShapeError, r"`visibility` is \(2, 3\)", np.ones((2, 3), bool), {}),
    (ShapeError, "not empty", np.ones((0, 0), bool), {}),
    (ArgumentError, "`context_len` is -1", ONES, {"context_len": -1}),
    (DTypeError, r"`context_len` is 1\.5", ONES, {"context_len": 1.5}),
    (ShapeError, "`labels` has 1 entries", ONES, {"labels": "a"}),
)
def test_visibility_display_rejects(matrix, options):
    viz.VisibilityDisplay(matrix, **options)


@rejects((ArgumentError, r"`row` is 2, expected an integer in 0\.\.1", 2), (DTypeError, r"`row` is 1\.0", 1.0))
def test_visibility_display_rejects_rows(row):
    viz.VisibilityDisplay(ONES).plot(row=row)


@rejects(
    (ArgumentError, "has room for 4 positions, expected 5", [0], {"context_len": 5}),
    (ArgumentError, r"`page_table\[0\]` is -1, expected 0..-1", [-1], {}),
    (ArgumentError, r"`page_table\[0\]` is 3, expected 0..1", [3], {"num_pages": 2}),
    (ArgumentError, r"`page_table\[2\]` is 3 once more", [3, 1, 3], {"context_len": 9}),
    (ArgumentError, "`page_size` is 0", [0], {"page_size": 0}),
    *(
        (error, f"PageTableDisplay: `{name}` is {value}", [0, 1], {name: value})
        for name in ("page_size", "context_len", "num_nodes", "num_pages")
        for value, error in ((-1, ArgumentError), (1.0, DTypeError), (True, DTypeError))
    ),
)
def test_page_table_display_rejects(table, options):
    viz.PageTableDisplay(table, **{"page_size": 4, "context_len": 1, **options})


@rejects(
    (DTypeError, "from_kv: `kv` is str, expected PagedKV", "x", None),
    (DTypeError, r"`request` is 1\.0", allocate(), 1.0),
    (ArgumentError, "`request` is 2", allocate(), 2),
)
def test_page_table_display_rejects_caches(kv, request_):
    viz.PageTableDisplay.from_kv(kv, request=request_)


INTERVALS = ("realised_low", "realised_high")


@rejects(
    (ArgumentError, "`expected` and `realised` are None", {}),
    (ArgumentError, "expected ascending", {"budgets": [2, 1], "expected": [1, 2]}),
    (ArgumentError, r"`budgets` is \[\]", {"budgets": [], "expected": []}),
    (ShapeError, "`expected` has 1 entries, expected 2 like `budgets`", {"expected": [1]}),
    (ArgumentError, "`cost` is", {"expected": [1, 2], "cost": [0, 1]}),
    (ArgumentError, "`cost` is", {"expected": [1, 2], "cost": lambda n: float("inf")}),
    (ArgumentError, r"`cost\(0\)` is 0", {"expected": [1, 2], "cost": lambda n: n}),
    (ArgumentError, "`baseline_cost` is 0", {"expected": [1, 2], "cost": [60, 70], "baseline_cost": 0.0}),
    (ArgumentError, "`baseline_cost` is nan", {"expected": [1, 2], "cost": [60, 70], "baseline_cost": np.nan}),
    (ArgumentError, "`realised_low` and `realised_high` go together", {"realised": [1, 2], "realised_low": [1, 2]}),
    (ArgumentError, "`speedup_low` and `speedup_high` go together", {"realised": [1, 2], "speedup_low": [1, 2]}),
    *(
        (
            ArgumentError,
            f"`{name}` is .*expected finite values",
            {**{key: [1.5, 2.0] for key in ("expected", "realised", *INTERVALS, "cost")}, name: [1.5, value]},
        )
        for name in ("expected", "realised", *INTERVALS, "cost")
        for value in (np.nan, np.inf)
        if np.isinf(value) or name not in INTERVALS  # NaN leaves a gap in an interval
    ),
)
def test_budget_display_rejects(options):
    viz.BudgetDisplay(**{"budgets": [1, 2], **options})


@rejects(
    (ArgumentError, "`cost` is None", lambda: viz.BudgetDisplay([1], expected=[1.5]).plot(kind="speedup")),
    (ArgumentError, "path_scores` is None", lambda: viz.BudgetDisplay.from_tree(SINGLE)),
    (ShapeError, "`cost` has 2 entries, expected 6", lambda: viz.BudgetDisplay.from_tree(toy_tree(), cost=[1.0, 2.0])),
)
def test_budget_display_rejects_what_it_cannot_draw(call):
    call()


@rejects(
    (ArgumentError, "expected an active round", [-1], {}),
    (ArgumentError, "values from -1", [-2, 1], {}),
    (DTypeError, "`num_accepted` has dtype float64", [0.5], {}),
    (ShapeError, "`hit_ranks` has 2 entries", [1], {"hit_ranks": [[0], [0]]}),
    (ShapeError, r"`hit_ranks` is \(1,\), expected 2 axes", [1], {"hit_ranks": [0]}),
    (ArgumentError, "does not hold one rank", [1], {"hit_ranks": [[-1, 0]]}),
    (ArgumentError, "`hit_ranks` holds -2", [1, 0], {"hit_ranks": [[0], [-2]]}),
    (ArgumentError, "`rank_of` is 'cousin', expected one of 'sibling', 'drafter'", [1], {"rank_of": "cousin"}),
    (ArgumentError, "no round accepted", [0], {"hit_ranks": np.zeros((1, 0), int)}),
    (ArgumentError, "`hit_ranks` is None", [0], {}),
)
def test_acceptance_display_rejects(counts, options):
    viz.AcceptanceDisplay(counts, **options).plot(kind="rank")


@rejects(
    (ShapeError, "`results` has 0 entries, expected 1", []),
    (DTypeError, "`results` is str, expected AcceptResult", ["x"]),
)
def test_acceptance_display_rejects_rounds(results):
    viz.AcceptanceDisplay.from_rounds([toy_tree()], results)


@rejects(
    (ShapeError, "at least one entry", [], 1.0, {}),
    (ShapeError, "expected to broadcast", [1.0, 2.0], [1.0, 2.0, 3.0], {}),
    (ArgumentError, "below 0", [-1.0], 1.0, {}),
    (ArgumentError, "infinite", [1.0], np.inf, {}),
    (DTypeError, "expected real numbers", ["a"], 1.0, {}),
    (ArgumentError, "go together", [0.1], 1.0, {"rms_error": 0.1}),
    (DTypeError, "`rms_allowed` has dtype", [0.1], 1.0, {"rms_error": 0.1, "rms_allowed": "a"}),
    (ShapeError, "num_nodes, num_heads", [1.0], 1.0, {}),
)
def test_error_display_rejects(error, allowed, options):
    viz.ErrorDisplay(error, allowed, **options).plot(kind="map")


@rejects(
    (ArgumentError, "`baseline` is not finite everywhere", [1.0, 2.0], [1.0, np.nan], 0.0),
    (ArgumentError, "`baseline` is not finite everywhere", [1.0, 2.0], [np.inf, 2.0], 0.0),
    (ShapeError, r"`floor` is \(3,\)", [1.0, 2.0], [1.0, 2.0], [0.0] * 3),
    (ArgumentError, "`floor` holds values below 0", [1.0, 2.0], [1.0, 2.0], -1.0),
    (ShapeError, "`actual` is list, expected an array", [[1.0], [2.0, 3.0]], [1.0, 2.0], 0.0),
    (ShapeError, r"`actual` is \(1,\), expected \(2,\)", [1.0], [1.0, 2.0], 0.0),
)
def test_error_display_rejects_arrays(actual, baseline, floor):
    viz.ErrorDisplay.from_arrays(actual, [1.0, 2.0], baseline, floor=floor)


@rejects(
    (ArgumentError, "`versions` is empty", {"versions": []}),
    (ShapeError, "`contexts` has 2 entries, expected 1 like `versions`", {"contexts": [1, 2]}),
    (ArgumentError, "`times_us` is", {"times_us": [0.0]}),
    (ArgumentError, "go together", {"low_us": [1.0]}),
    (ArgumentError, "`peak_flops_per_second` is 0.0", {"peak_flops_per_second": 0.0}),
    (ArgumentError, "`flops` is None", {}),
)
def test_bench_display_rejects(options):
    arrays = {"versions": ["v1"], "contexts": [1024], "times_us": [5.0], **options}
    viz.BenchDisplay(**arrays).plot(kind="roofline")


@rejects(
    *(
        (
            ArgumentError,
            f"`report` has no '{key}' in row 'B 1 T 64'",
            {"rows": [TIMED, {name: value for name, value in TIMED.items() if name != key}]},
        )
        for key in ("variant", "event_us", "low_us", "high_us", "tflops", "bytes")
    ),
    (DTypeError, "`event_us` has dtype object", {"rows": [{**TIMED, "event_us": None}]}),
    (DTypeError, "`report` is list, expected Mapping", [TIMED]),
    (ArgumentError, "no timed row of tree_attention", {"rows": [{**TIMED, "op": "accept"}]}),
)
def test_bench_display_rejects_reports(report):
    viz.BenchDisplay.from_report(report)


# every display names what it was given


@pytest.mark.parametrize("display", [viz.TreeDisplay, viz.BudgetDisplay, viz.VisibilityDisplay])
def test_from_tree_rejects_other_objects_and_requests_that_are_no_integers(display):
    with pytest.raises(DTypeError, match=r"from_tree: `tree` is str, expected DraftTree"):
        display.from_tree("x")
    for request in (1.0, True, "0"):
        with pytest.raises(DTypeError, match=f"{display.__name__}.from_tree: `request` is .*expected an integer"):
            display.from_tree(two_trees(), request=request)


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
