"""What the artists hold is the data: every number, place and colour of one small case a display."""

import numpy as np
import pytest
from viz.cases import TARGETS, draw, toy_tree

from ddtree_cupy import Visibility, accept, viz

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.colors import to_hex, to_rgba_array  # noqa: E402

SKY, ORANGE, GREEN, VERMILLION = "#56b4e9", "#e69f00", "#009e73", "#d55e00"
WHITE, PALE, DARK, LIGHT = "#ffffff", "#e6e6e6", "#444444", "#bbbbbb"


@pytest.fixture(autouse=True)
def figures_are_closed():
    yield
    plt.close("all")


def hexes(colors):
    return [to_hex(color) for color in to_rgba_array(colors)]


def plain(values):
    """A NumPy array without matplotlib's mask."""
    return np.ma.getdata(values)


def ends(arrows):
    """Leftmost and rightmost point of every arrow, in data: where it starts and its tip."""
    paths = [arrow.get_path() for arrow in arrows]
    paths = [path.vertices[path.codes != path.CLOSEPOLY] for path in paths]  # what closes a path has no place
    return np.array([[path[path[:, 0].argmin()], path[path[:, 0].argmax()]] for path in paths]).transpose(1, 0, 2)


# trees


def test_tree_display_artists_hold_scores_positions_and_path():
    tree = toy_tree()
    display = draw(viz.TreeDisplay.from_tree(tree, target_token_ids=[11, 0, 0, 20, 0, 0]).plot())
    assert plain(display.nodes_.get_array()) == pytest.approx(np.exp(tree.path_scores[:6]))
    assert np.array_equal(plain(display.nodes_.get_offsets()), display.positions)
    assert display.positions[:, 0].tolist() == [0, 1, 2, 1, 2, 2]
    # edges end in nodes 1..5; the target takes 11 at the root, then 20 at node 3: nodes 3 and 5
    assert hexes(display.edges_.get_colors()) == [LIGHT, LIGHT, DARK, LIGHT, DARK]
    assert display.edges_.get_linewidths() == [1.0, 1.0, 1.8, 1.0, 1.8]
    for node, path in enumerate(display.edges_.get_paths(), start=1):
        assert path.vertices[0] == pytest.approx(display.positions[tree.parents[node]])
        assert path.vertices[-1] == pytest.approx(display.positions[node])


def test_tree_display_artists_hold_the_fate():
    tree = toy_tree()
    display = draw(viz.TreeDisplay.from_tree(tree, result=accept(tree, TARGETS)).plot())
    assert hexes(display.nodes_.get_facecolors()) == [color.lower() for color in display.fate_colors()]
    assert hexes(display.edges_.get_colors()) == [GREEN, LIGHT, LIGHT, LIGHT, LIGHT, ORANGE]
    assert display.edges_.get_paths()[-1].vertices[0] == pytest.approx(display.positions[1])
    assert plain(display.bonus_.get_offsets())[0] == pytest.approx(display.positions[6])
    assert [text.get_text() for text in display.labels_] == display.labels
    assert np.array([text.xy for text in display.labels_]) == pytest.approx(display.positions)


# visibility


def test_visibility_display_artists_hold_the_matrix():
    matrix = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 1]], bool)
    display = draw(viz.VisibilityDisplay(matrix, context_len=10).plot(row=1))
    assert np.array_equal(display.image_.get_array(), matrix)
    assert display.image_.get_cmap().colors[0] == "#FFFFFF"
    assert [to_hex(bar.get_facecolor()) for bar in display.words_] == [VERMILLION, VERMILLION, WHITE]
    assert [bar.get_x() + bar.get_width() / 2 for bar in display.words_] == [0, 1, 2]
    assert display.word_texts_[0].get_text() == "0x00000003"
    assert display.row_.get_xy() == (-0.5, 0.5)
    assert display.context_.get_x() + display.context_.get_width() <= -0.5
    assert display.plot(row=2).word_texts_[0].get_text() == "0x00000006"


def test_visibility_display_is_identical_from_packed_words():
    matrix = np.random.default_rng(3).random((40, 40)) < 0.3
    packed = Visibility.from_dense(matrix)
    display = viz.VisibilityDisplay.from_tree(packed).plot(row=33)
    assert np.array_equal(display.image_.get_array(), matrix)
    shown = [int(text.get_text(), 16) for text in display.word_texts_]
    assert shown == packed.visibility_bits[33, : len(shown)].tolist()


# pages


@pytest.mark.parametrize("arrows", ["row", "page"])
def test_page_table_display_artists_hold_the_table(arrows):
    display = draw(
        viz.PageTableDisplay([2, 0], page_size=2, context_len=2, num_nodes=1, num_pages=3).plot(arrows=arrows)
    )
    assert hexes(display.logical_.get_facecolors()) == [SKY, SKY, ORANGE, PALE]
    assert hexes(display.physical_.get_facecolors()) == [ORANGE, WHITE, WHITE, WHITE, SKY, SKY]
    for cells, left in ((display.logical_, 0.0), (display.physical_, 3.0)):
        corners = [path.vertices.min(axis=0).tolist() for path in cells.get_paths()]
        assert corners == [[left, n + 0.35 * (n // 2)] for n in range(len(corners))]
    numbers = {text.get_position(): text.get_text() for text in display.ax_.texts if text.get_text().isdigit()}
    places = {(0.5, 0.5): "0", (0.5, 1.5): "1", (0.5, 2.85): "2", (3.5, 5.2): "0", (3.5, 6.2): "1", (3.5, 0.5): "2"}
    assert numbers == places
    start, tip = ends(display.arrows_)
    middles = {"row": ([0.5, 1.5, 2.85], [5.2, 6.2, 0.5]), "page": ([1.0, 3.35], [5.7, 1.0])}[arrows]
    assert start == pytest.approx(np.array([(1.04, height) for height in middles[0]]), abs=0.05)
    assert tip == pytest.approx(np.array([(2.96, height) for height in middles[1]]), abs=0.05)


# budgets


def test_budget_display_artists_hold_tokens_and_speedups():
    display = viz.BudgetDisplay(
        [1, 2, 4],
        expected=[1.5, 2.0, 2.5],
        realised=[1.4, 1.9, 2.1],
        realised_low=[1.3, 1.7, 2.0],
        realised_high=[1.6, 2.0, 2.3],
        cost=[1.0, 1.25, 2.0],
    )
    for kind, cost in (("tokens", np.ones(3)), ("speedup", display.cost)):
        display.plot(kind=kind)
        for which, line in display.lines_.items():
            assert line.get_xdata().tolist() == [1, 2, 4]
            assert line.get_ydata() == pytest.approx(getattr(display, which) / cost)
        assert band(display) == pytest.approx(np.array([display.realised_low, display.realised_high]) / cost)
    assert (display.best_.get_xdata()[0], display.best_.get_ydata()[0]) == (2, pytest.approx(1.9 / 1.25))


def band(display):
    """Lower and upper edge of the interval, by budget."""
    vertices = display.band_.get_paths()[0].vertices
    at = [vertices[vertices[:, 0] == budget, 1] for budget in display.budgets]
    return np.array([[values.min() for values in at], [values.max() for values in at]])


# acceptance


def test_acceptance_display_artists_hold_the_rates():
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


# errors


def test_error_display_artists_hold_every_entry():
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


# benchmarks


def test_bench_display_artists_hold_times_and_roof():
    display = viz.BenchDisplay(
        ["v1", "v2", "v1"],
        [8192, 1024, 1024],
        [700.0, 60.0, 90.0],
        low_us=[650.0, 55.0, 80.0],
        high_us=[750.0, 65.0, 95.0],
        flops=[8e9, 1e9, 1e9],
        bytes_moved=[8e6, 2e6, 2e6],
        peak_flops_per_second=7e14,
        peak_bytes_per_second=3.5e12,
    ).plot()
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
