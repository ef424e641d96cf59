"""Every display draws from its constructor and class methods, keeps its artists, and shows texts as they are."""

import subprocess
import sys
from copy import copy
from io import BytesIO
from xml.etree import ElementTree

import numpy as np
import pytest

from ddtree_cupy import PagedKV, accept, viz
from ddtree_cupy.errors import ArgumentError
from tests.viz.cases import TARGETS, draw, texts, toy_tree

SVG_TEXT = "{http://www.w3.org/2000/svg}text"


def every_display():
    """Return name -> (object, options of one plot), by constructor and class method."""
    tree = toy_tree()
    kv = PagedKV.allocate(12, page_size=4, head_dim_ckv=16, head_dim_kpe=16)
    errors = np.abs(np.random.default_rng(1).standard_normal((6, 4, 3)))
    bench = {"flops": [1e9, 2e9], "bytes_moved": [1e6, 1e6]}
    bench |= {"peak_flops_per_second": 7e14, "peak_bytes_per_second": 4e12}
    budget = viz.BudgetDisplay([1, 2, 64], expected=[1.5, 2.0, 3.0], realised=[1.4, 1.9, 2.0], cost=[1.0, 1.1, 4.0])
    acceptance = viz.AcceptanceDisplay([0, 2, 1], hit_ranks=[[-1, -1], [0, 1], [2, -1]])
    continuation = viz.ContinuationDisplay([2, 3, 2, 2], [True, True, False, False], [0, 0, 3, -1])
    error = viz.ErrorDisplay(errors, 2.0)
    runs = viz.BenchDisplay(["v1", "v2"], [1024, 1024], [9.0, 5.0], **bench)
    return {
        "tree": (viz.TreeDisplay([9, 10], [-1, 0]), {}),
        "tree from_tree": (viz.TreeDisplay.from_tree(tree, result=accept(tree, TARGETS)), {}),
        "tree from_arrays": (viz.TreeDisplay.from_arrays([9, 10], [-1, 0], path_scores=[0, -1]), {}),
        "visibility": (viz.VisibilityDisplay(np.eye(3, dtype=bool)), {}),
        "visibility from_tree": (viz.VisibilityDisplay.from_tree(tree, context_len=10), {"row": 3}),
        "visibility from_arrays": (viz.VisibilityDisplay.from_arrays(np.ones((40, 40), bool)), {"words": False}),
        "pages": (viz.PageTableDisplay([1, 0], page_size=2, context_len=3), {}),
        "pages from_kv": (viz.PageTableDisplay.from_kv(kv, num_nodes=6), {"arrows": "page"}),
        "pages from_arrays": (viz.PageTableDisplay.from_arrays([0], page_size=2, context_len=0), {"arrows": "row"}),
        "budget": (budget, {}),
        "budget speedup": (viz.BudgetDisplay.from_tree(tree, cost=lambda n: 1 + 0.1 * n), {"kind": "speedup"}),
        "acceptance": (acceptance, {}),
        "acceptance rank": (acceptance, {"kind": "rank"}),
        "acceptance from_tree": (viz.AcceptanceDisplay.from_tree(tree, accept(tree, TARGETS)), {"kind": "rank"}),
        "continuation": (continuation, {}),
        "continuation rank": (continuation, {"kind": "rank"}),
        "error": (error, {}),
        "error map": (error, {"kind": "map"}),
        "error from_arrays": (viz.ErrorDisplay.from_arrays(errors, errors, errors, floor=1e-6), {}),
        "bench": (runs, {}),
        "bench roofline": (runs, {"kind": "roofline"}),
        "bench from_arrays": (viz.BenchDisplay.from_arrays(["v1"], [1024], [9.0]), {}),
    }


DISPLAYS = every_display()


@pytest.mark.parametrize("name", DISPLAYS)
def test_plot_draws_on_new_and_given_axes(name):
    import matplotlib.pyplot as plt

    display, options = copy(DISPLAYS[name][0]), DISPLAYS[name][1]
    assert not any(name.endswith("_") for name in vars(display))
    assert display.plot(**options) is display
    assert display.ax_.figure is display.figure_
    draw(display)
    figure, ax = plt.subplots()
    assert draw(display.plot(ax, **options)).ax_ is ax
    assert display.figure_ is figure
    figure.savefig(BytesIO(), format="svg")


def test_every_class_is_drawn_above():
    assert {type(display).__name__ for display, _ in DISPLAYS.values()} == set(viz.__all__)


@pytest.mark.parametrize("name", ["budget", "acceptance", "continuation", "error", "bench"])
def test_every_plot_rejects_an_unknown_kind(name):
    with pytest.raises(ArgumentError, match="`kind` is 'pie', expected one of"):
        DISPLAYS[name][0].plot(kind="pie")


def test_import_does_not_load_matplotlib():
    code = "import sys, ddtree_cupy.viz; print([name for name in sys.modules if name.startswith('matplotlib')])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


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
    import matplotlib.pyplot as plt

    display.plot()
    file = BytesIO()
    with plt.rc_context({"svg.fonttype": "none"}):  # texts stay texts
        display.figure_.savefig(file, format="svg")
    drawn = ["".join(node.itertext()) for node in ElementTree.fromstring(file.getvalue()).iter(SVG_TEXT)]
    assert set(ODD) <= set(drawn)


def test_plot_draws_the_name_of_a_row_as_it_is():
    display = draw(viz.VisibilityDisplay(np.eye(12, dtype=bool), labels=["$$"] * 12).plot(row=3))
    assert "bits of row 3 ($$)" in texts(display.ax_.texts)


def test_a_tree_that_is_not_drawn_shows_itself_as_html():
    tree = toy_tree()
    display = viz.TreeDisplay.from_tree(
        tree, result=accept(tree, TARGETS), target_token_ids=TARGETS, labels=lambda token: f" <{token}>\n"
    )
    html = display._repr_html_()
    assert html.count("data-node=") == 7  # with the bonus token
    assert "path:  &lt;" not in html  # a space at the end is seen
    assert "path: ␣&lt;" in html
    assert "next token of the target: ␣&lt;" in html
    assert 'class="bonus"' in html
    assert display.plot()._repr_html_() is None
    assert viz.TreeDisplay(range(257), range(-1, 256))._repr_html_() is None


def test_the_target_is_named_by_the_child_that_it_takes():
    display = viz.TreeDisplay([5, 6, 6], [-1, 0, 1], target_token_ids=[6, 6, -1], labels=["a", "b", "c"])
    assert display._target_words() == ["b", "c", None]
    assert display._repr_html_().count("next token of the target") == 2


def test_labels_show_controls_and_spaces():
    display = draw(viz.TreeDisplay([5, 6, 7], [-1, 0, 1], labels=["a", "\n", " the"]).plot())
    assert texts(display.labels_) == ["a", "\\n", "␣the"]
    assert viz.VisibilityDisplay(np.eye(2, dtype=bool), labels=["\n", " the"]).labels == ["\\n", "␣the"]
