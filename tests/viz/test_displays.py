"""Every display draws from its constructor and class methods, keeps its artists, refuses bad data and stays alone."""

import ast
import subprocess
import sys
from copy import copy
from io import BytesIO
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from viz.cases import TARGETS, draw, large_tree, texts, toy_tree

from ddtree_cupy import DraftTree, PagedKV, Visibility, accept, build_tree, viz
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

FOLDER = Path(viz.__file__).parent
SVG_TEXT = "{http://www.w3.org/2000/svg}text"
MAY_IMPORT = {"containers", "_check", "errors", "viz"}


@pytest.fixture(autouse=True)
def settings_stay():
    """Drawing leaves matplotlib's settings alone; figures are closed."""
    before = dict(matplotlib.rcParams)
    yield
    plt.close("all")
    assert dict(matplotlib.rcParams) == before


def every_display():
    """Name, object and the options of one plot, by constructor and class method."""
    tree = toy_tree()
    kv = PagedKV.allocate(12, page_size=4, head_dim_ckv=16, head_dim_kpe=16)
    errors = np.abs(np.random.default_rng(1).standard_normal((6, 4, 3)))
    ranks = [[-1, -1], [0, 1], [2, -1]]
    bench = {"flops": [1e9, 2e9], "bytes_moved": [1e6, 1e6]}
    bench |= {"peak_flops_per_second": 7e14, "peak_bytes_per_second": 4e12}
    budget = viz.BudgetDisplay([1, 2, 64], expected=[1.5, 2.0, 3.0], realised=[1.4, 1.9, 2.0], cost=[1.0, 1.1, 4.0])
    speed = viz.BudgetDisplay.from_tree(tree, cost=lambda n: 1 + 0.1 * n)
    acceptance = viz.AcceptanceDisplay([0, 2, 1], hit_ranks=ranks)
    error = viz.ErrorDisplay(errors, 2.0)
    runs = viz.BenchDisplay(["v1", "v2"], [1024, 1024], [9.0, 5.0], **bench)
    return [
        ("tree", viz.TreeDisplay([9, 10], [-1, 0]), {}),
        ("tree from_tree", viz.TreeDisplay.from_tree(tree, result=accept(tree, TARGETS)), {}),
        ("tree from_arrays", viz.TreeDisplay.from_arrays([9, 10], [-1, 0], path_scores=[0, -1]), {}),
        ("visibility", viz.VisibilityDisplay(np.eye(3, dtype=bool)), {}),
        ("visibility from_tree", viz.VisibilityDisplay.from_tree(tree, context_len=10), {"row": 3}),
        ("visibility from_arrays", viz.VisibilityDisplay.from_arrays(np.ones((40, 40), bool)), {"words": False}),
        ("pages", viz.PageTableDisplay([1, 0], page_size=2, context_len=3), {}),
        ("pages from_kv", viz.PageTableDisplay.from_kv(kv, num_nodes=6), {"arrows": "page"}),
        ("pages from_arrays", viz.PageTableDisplay.from_arrays([0], page_size=2, context_len=0), {"arrows": "row"}),
        ("budget", budget, {}),
        ("budget speedup", speed, {"kind": "speedup"}),
        ("acceptance", acceptance, {}),
        ("acceptance rank", acceptance, {"kind": "rank"}),
        ("acceptance from_tree", viz.AcceptanceDisplay.from_tree(tree, accept(tree, TARGETS)), {"kind": "rank"}),
        ("error", error, {}),
        ("error map", error, {"kind": "map"}),
        ("error from_arrays", viz.ErrorDisplay.from_arrays(errors, errors, errors, floor=1e-6), {}),
        ("bench", runs, {}),
        ("bench roofline", runs, {"kind": "roofline"}),
        ("bench from_arrays", viz.BenchDisplay.from_arrays(["v1"], [1024], [9.0]), {}),
    ]


DISPLAYS = every_display()


@pytest.mark.parametrize(("display", "options"), [d[1:] for d in DISPLAYS], ids=[d[0] for d in DISPLAYS])
def test_plot_draws_on_new_and_given_axes(display, options):
    display = copy(display)
    assert not any(name.endswith("_") for name in vars(display))
    assert display.plot(**options) is display
    assert display.ax_.figure is display.figure_
    draw(display)
    figure, ax = plt.subplots()
    assert draw(display.plot(ax, **options)).ax_ is ax
    assert display.figure_ is figure
    figure.savefig(BytesIO(), format="svg")


def test_every_class_is_drawn_above():
    assert {type(display).__name__ for _, display, _ in DISPLAYS} == set(viz.__all__)


def test_import_does_not_load_matplotlib():
    code = "import sys, ddtree_cupy.viz; print([name for name in sys.modules if name.startswith('matplotlib')])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_viz_imports_containers_only(path):
    source = path.read_text()
    assert len(source.splitlines()) < 300
    for node in ast.walk(ast.parse(source)):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module != "ddtree_cupy" else [f"ddtree_cupy.{a.name}" for a in node.names]
        for name in names:
            assert not name.startswith("ddtree_cupy.") or name.split(".")[1] in MAY_IMPORT, name
        assert not names or node.col_offset > 0 or not names[0].startswith("matplotlib"), names


ODD = ["$$", "$x$", "\\alpha", "_a", "<b>", "$\\frac{"]  # matplotlib reads some as mathematics, "_a" as no entry


@pytest.mark.parametrize(
    "display",
    [
        viz.TreeDisplay(range(6), [-1, 0, 0, 1, 1, 2], labels=ODD),
        viz.TreeDisplay(range(5), [-1, 0, 0, 1, 1], labels=ODD.__getitem__, accepted=[0], bonus_token=5),
        viz.VisibilityDisplay(np.eye(6, dtype=bool), labels=ODD),
        viz.BenchDisplay(ODD, [1024] * 6, [9.0] * 6),
    ],
    ids=["tree", "tree with bonus", "visibility", "bench"],
)
def test_plot_draws_texts_as_they_are(display):
    """Two dollar signs in a token's text raised while drawing, as in matplotlib 20266."""
    display.plot()
    file = BytesIO()
    with plt.rc_context({"svg.fonttype": "none"}):  # texts stay texts
        display.figure_.savefig(file, format="svg")
    drawn = ["".join(node.itertext()) for node in ElementTree.fromstring(file.getvalue()).iter(SVG_TEXT)]
    assert set(ODD) <= set(drawn)


def test_plot_draws_the_name_of_a_row_as_it_is():
    display = draw(viz.VisibilityDisplay(np.eye(12, dtype=bool), labels=["$$"] * 12).plot(row=3))
    assert "bits of row 3 ($$)" in texts(display.ax_.texts)


# trees


def test_tree_display_shows_the_fate_of_every_node():
    tree = toy_tree()
    display = draw(viz.TreeDisplay.from_tree(tree, result=accept(tree, TARGETS), target_token_ids=TARGETS).plot())
    green, vermillion, grey = "#009E73", "#D55E00", "#D0D0D0"
    assert display.fate_colors() == [green, green, vermillion, grey, vermillion, grey]
    assert texts(display.labels_) == ["9", "10", "20", "11", "21", "20", "33"]
    assert display.bonus_ is not None
    assert texts(display.legend_.get_texts()) == ["accepted", "target disagrees", "bonus token", "not reached"]
    assert len(display.edges_.get_paths()) == 6


def test_tree_display_has_no_disagreement_after_a_leaf():
    tree = toy_tree()
    result = accept(tree, np.array([10, 20, 5, 0, 0, 0], np.int32))
    display = viz.TreeDisplay.from_tree(tree, result=result).plot()
    assert texts(display.legend_.get_texts()) == ["accepted", "bonus token", "not reached"]


def test_tree_display_thins_out_labels_and_keeps_the_accepted_path():
    tree = large_tree()
    targets = np.full(301, 7, np.int32)
    targets[0] = tree.token_ids[1]
    result = accept(tree, targets)
    display = viz.TreeDisplay.from_tree(tree, result=result).plot()
    shown = texts(display.labels_)
    assert 20 < len(shown) < 200
    assert {"100000", str(tree.token_ids[1]), "7"} <= set(shown)
    renderer = display.figure_.canvas.get_renderer()
    draw(display)
    boxes = [label.get_window_extent(renderer) for label in display.labels_]
    overlapping = sum(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert overlapping <= len(boxes) // 20


def test_tree_display_colours_by_score_and_takes_a_request_of_a_batch():
    logits = np.random.default_rng(0).standard_normal((2, 3, 9)).astype(np.float32)
    tree = build_tree(logits, budget=4, root_token_ids=np.array([1, 2], np.int32))
    display = viz.TreeDisplay.from_tree(tree, request=1).plot()
    assert display.token_ids[0] == 2
    assert display.colorbar_ is not None
    with pytest.raises(ArgumentError, match=r"`request` is None, expected 0\.\.1"):
        viz.TreeDisplay.from_tree(tree)
    with pytest.raises(ArgumentError, match="`request` is 0, expected None"):
        viz.TreeDisplay.from_tree(toy_tree(), request=0)


def test_tree_display_draws_parts_on_demand():
    display = viz.TreeDisplay.from_tree(toy_tree())
    _, ax = plt.subplots()
    display.frame(ax)
    assert len(display.plot_nodes(ax, [0, 1]).get_offsets()) == 2
    assert len(display.plot_edges(ax, [0, 1]).get_paths()) == 1
    assert texts(display.plot_labels(ax, [1])) == ["10"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"token_ids": []}, ArgumentError, "`token_ids` is empty"),
        ({"token_ids": [1.5, 2, 3]}, DTypeError, "`token_ids` has dtype float64"),
        ({"parents": [-1, 0]}, ShapeError, "`parents` has 2 entries, expected 3 like `token_ids`"),
        ({"parents": [-1, 0, 2]}, ArgumentError, r"`parents\[2\]` is 2, expected 0..1"),
        ({"parents": [0, 0, 0]}, ArgumentError, r"`parents\[0\]` is 0, expected -1"),
        ({"parents": [-1, -1, 0]}, ArgumentError, r"`parents\[1\]` is -1"),
        ({"path_scores": [0.0]}, ShapeError, "`path_scores` has 1 entries"),
        ({"accepted": [0, 2]}, ArgumentError, r"`accepted` is \[0, 2\]"),
        ({"accepted": [0, -1]}, ArgumentError, "without padding"),
        ({"accepted": []}, ArgumentError, "`accepted` is"),
        ({"bonus_token": 5}, ArgumentError, "`bonus_token` is 5"),
        ({"labels": ["a"]}, ShapeError, "`labels` has 1 entries"),
    ],
)
def test_tree_display_rejects(options, error, message):
    arrays = {"token_ids": [9, 10, 20], "parents": [-1, 0, 1], **options}
    with pytest.raises(error, match=message):
        viz.TreeDisplay(**arrays)


def test_tree_display_rejects_a_colour_without_data():
    with pytest.raises(ArgumentError, match="expected `path_scores`"):
        viz.TreeDisplay([9], [-1]).plot(color="score")
    with pytest.raises(ArgumentError, match="`color` is 'red'"):
        viz.TreeDisplay([9], [-1]).plot(color="red")
    with pytest.raises(ArgumentError, match="has no nodes"):
        viz.TreeDisplay.from_tree(DraftTree.from_parents([-1], [-1]))


# visibility


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 65, 257])
def test_visibility_display_packs_the_row(count):
    display = draw(viz.VisibilityDisplay(np.tri(count, dtype=bool), context_len=64).plot())
    assert display.word_texts_[0].get_text() == f"0x{(1 << min(count, 32)) - 1:08X}"
    assert len(display.words_) == count
    assert display.context_ is not None


def test_visibility_display_takes_bare_visibility_and_ignores_padding():
    bits = np.array([[0xFFFFFFFF], [0xFFFFFFFF], [0xFFFFFFFF]], np.uint32)
    display = viz.VisibilityDisplay.from_tree(Visibility(bits, np.array(2, np.int32)))
    assert display.visibility.shape == (2, 2)
    assert display.visibility_bits.ravel().tolist() == [3, 3]


@pytest.mark.parametrize(
    ("matrix", "options", "error", "message"),
    [
        (np.ones((2, 2)), {}, DTypeError, "`visibility` has dtype float64, expected bool"),
        (np.ones((2, 3), bool), {}, ShapeError, r"`visibility` is \(2, 3\)"),
        (np.ones((0, 0), bool), {}, ShapeError, "not empty"),
        (np.ones((2, 2), bool), {"context_len": -1}, ArgumentError, "`context_len` is -1"),
        (np.ones((2, 2), bool), {"labels": "a"}, ShapeError, "`labels` has 1 entries"),
    ],
)
def test_visibility_display_rejects(matrix, options, error, message):
    with pytest.raises(error, match=message):
        viz.VisibilityDisplay(matrix, **options)
    with pytest.raises(ArgumentError, match=r"`row` is 2, expected an integer in 0\.\.1"):
        viz.VisibilityDisplay(np.ones((2, 2), bool)).plot(row=2)


# pages


def test_page_table_display_follows_the_table():
    display = viz.PageTableDisplay([2, 0], page_size=4, context_len=5, num_nodes=2, num_pages=4)
    assert display.rows().tolist() == [8, 9, 10, 11, 0, 1, 2]
    assert len(draw(display.plot()).arrows_) == 7
    assert len(display.plot(arrows="page").arrows_) == 2
    assert len(display.physical_.get_paths()) == 16
    large = viz.PageTableDisplay(np.arange(12)[::-1], page_size=16, context_len=180, num_nodes=5)
    assert len(draw(large.plot()).arrows_) == 12


def test_page_table_display_takes_a_request():
    kv = PagedKV.allocate(12, batch=2, page_size=4, head_dim_ckv=16, head_dim_kpe=16)
    assert viz.PageTableDisplay.from_kv(kv, num_nodes=2, request=1).rows().tolist() == [12, 13]
    with pytest.raises(ArgumentError, match="`request` is 2"):
        viz.PageTableDisplay.from_kv(kv, request=2)


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        ([0], {"context_len": 5}, "has room for 4 positions, expected 5"),
        ([-1], {"context_len": 1}, r"`page_table\[0\]` is -1, expected 0..-1"),
        ([3], {"context_len": 1, "num_pages": 2}, r"`page_table\[0\]` is 3, expected 0..1"),
        ([0], {"context_len": 1, "page_size": 0}, "`page_size` is 0"),
        ([0], {"context_len": -1}, "`context_len` is -1"),
    ],
)
def test_page_table_display_rejects(table, options, message):
    with pytest.raises(ArgumentError, match=message):
        viz.PageTableDisplay(table, **{"page_size": 4, **options})


@pytest.mark.parametrize("name", ["Budget", "Acceptance", "Error", "Bench"])
def test_every_plot_rejects_an_unknown_kind(name):
    display = next(d for _, d, _ in DISPLAYS if type(d).__name__ == f"{name}Display")
    with pytest.raises(ArgumentError, match="`kind` is 'pie', expected one of"):
        display.plot(kind="pie")


@pytest.mark.parametrize(("targets", "has_entry"), [([1, 9, 2, 9, 9], True), ([1, 9, 9, 9, 9], False), (None, False)])
def test_tree_legend_names_dark_edges(targets, has_entry):
    """Node 3 is the target's choice below node 2, which the accepted path 0, 1 never reached."""
    display = viz.TreeDisplay([0, 1, 3, 2, 4], [-1, 0, 0, 2, 1], accepted=[0, 1], target_token_ids=targets)
    entries = texts(display.plot(color="fate").legend_.get_texts())
    assert ("target's choice" in entries) == has_entry
