"""What the artists of trees, masks and page tables hold is the data: every number and place of small cases."""

import time

import numpy as np
import pytest

from ddtree_cupy import PagedKV, Visibility, accept, build_tree, viz
from tests.viz.cases import TARGETS, draw, looks, meanings, plain, texts, toy_tree, two_trees


def ends(arrows):
    """Leftmost and rightmost point of every arrow, in data: where it starts and its tip."""
    paths = [arrow.get_path() for arrow in arrows]
    paths = [path.vertices[path.codes != path.CLOSEPOLY] for path in paths]  # what closes a path has no place
    return np.array([[path[path[:, 0].argmin()], path[path[:, 0].argmax()]] for path in paths]).transpose(1, 0, 2)


# trees


def test_tree_display_holds_scores_positions_and_the_choice_of_the_target():
    tree = toy_tree()
    display = draw(viz.TreeDisplay.from_tree(tree, target_token_ids=[11, 0, 0, 20, 0, 0]).plot())
    assert plain(display.nodes_.get_array()) == pytest.approx(np.exp(tree.path_scores[:6]))
    assert display.colorbar_ is not None
    assert np.array_equal(plain(display.nodes_.get_offsets()), display.positions)
    assert display.positions[:, 0].tolist() == [0, 1, 2, 1, 2, 2]
    # edges end in nodes 1..5; the target takes 11 at the root, then 20 at node 3: nodes 3 and 5
    assert looks(display.edges_.get_colors()) == [0, 0, 1, 0, 1]
    for node, path in enumerate(display.edges_.get_paths(), start=1):
        assert path.vertices[0] == pytest.approx(display.positions[tree.parents[node]])
        assert path.vertices[-1] == pytest.approx(display.positions[node])


def test_tree_display_shows_the_fate_of_every_node():
    tree = toy_tree()
    display = draw(viz.TreeDisplay.from_tree(tree, result=accept(tree, TARGETS), target_token_ids=TARGETS).plot())
    assert texts(display.legend_.get_texts()) == ["accepted", "target disagrees", "bonus token", "not reached"]
    yes, no, missed = "accepted", "target disagrees", "not reached"
    assert meanings(display, display.nodes_.get_facecolors()) == [yes, yes, no, missed, no, missed]
    assert meanings(display, display.fate_colors()) == [yes, yes, no, missed, no, missed]
    assert looks(display.edges_.get_colors()) == [0, 1, 1, 1, 1, 2]  # on the path, elsewhere, to the bonus token
    assert display.edges_.get_paths()[-1].vertices[0] == pytest.approx(display.positions[1])
    assert plain(display.bonus_.get_offsets())[0] == pytest.approx(display.positions[6])
    assert texts(display.labels_) == display.labels == ["9", "10", "20", "11", "21", "20", "33"]
    assert np.array([text.xy for text in display.labels_]) == pytest.approx(display.positions)


def test_tree_display_has_no_disagreement_after_a_leaf():
    tree = toy_tree()
    result = accept(tree, np.array([10, 20, 5, 0, 0, 0], np.int32))
    display = viz.TreeDisplay.from_tree(tree, result=result).plot()
    assert texts(display.legend_.get_texts()) == ["accepted", "bonus token", "not reached"]


@pytest.mark.parametrize(("targets", "has_entry"), [([1, 9, 2, 9, 9], True), ([1, 9, 9, 9, 9], False), (None, False)])
def test_tree_legend_names_dark_edges(targets, has_entry):
    """Node 3 is the target's choice below node 2, which the accepted path 0, 1 never reached."""
    display = viz.TreeDisplay([0, 1, 3, 2, 4], [-1, 0, 0, 2, 1], accepted=[0, 1], target_token_ids=targets)
    entries = texts(display.plot(color="fate").legend_.get_texts())
    assert ("target's choice" in entries) == has_entry


def test_tree_display_thins_out_labels_and_keeps_the_accepted_path():
    logits = 2 * np.random.default_rng(0).standard_normal((8, 500)).astype(np.float32)
    tree = build_tree(logits, budget=300, root_token_ids=100_000)
    targets = np.full(301, 7, np.int32)
    targets[0] = tree.token_ids[1]
    display = draw(viz.TreeDisplay.from_tree(tree, result=accept(tree, targets)).plot())
    shown = texts(display.labels_)
    assert 20 < len(shown) < 200
    assert {"100000", str(tree.token_ids[1]), "7"} <= set(shown)
    boxes = [label.get_window_extent(display.figure_.canvas.get_renderer()) for label in display.labels_]
    assert sum(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i]) <= len(boxes) // 20


def test_tree_display_draws_parts_on_demand_and_takes_a_request_of_a_batch():
    import matplotlib.pyplot as plt

    display = viz.TreeDisplay.from_tree(toy_tree())
    _, ax = plt.subplots()
    display.frame(ax)
    assert len(display.plot_nodes(ax, [0, 1]).get_offsets()) == 2
    assert len(display.plot_edges(ax, [0, 1]).get_paths()) == 1
    assert texts(display.plot_labels(ax, [1])) == ["10"]
    tree = two_trees()
    assert viz.TreeDisplay.from_tree(tree, request=1).token_ids[0] == 2
    result = accept(tree, np.zeros((2, 5), np.int32))
    assert viz.TreeDisplay.from_tree(tree, request=1, result=result).bonus_token == 0


# visibility


def test_visibility_display_holds_the_matrix():
    matrix = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 1]], bool)
    display = draw(viz.VisibilityDisplay(matrix, context_len=10).plot(row=1))
    assert np.array_equal(display.image_.get_array(), matrix)
    assert looks(bar.get_facecolor() for bar in display.words_) == [0, 0, 1]
    assert [bar.get_x() + bar.get_width() / 2 for bar in display.words_] == [0, 1, 2]
    assert display.word_texts_[0].get_text() == "0x00000003"
    assert display.row_.get_xy() == (-0.5, 0.5)
    assert display.context_.get_x() + display.context_.get_width() <= -0.5
    assert display.plot(row=2).word_texts_[0].get_text() == "0x00000006"


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 65, 257])
def test_visibility_display_packs_the_row(count):
    display = draw(viz.VisibilityDisplay(np.tri(count, dtype=bool), context_len=64).plot())
    assert display.word_texts_[0].get_text() == f"0x{(1 << min(count, 32)) - 1:08X}"
    assert len(display.words_) == count


def test_visibility_display_is_identical_from_packed_words():
    matrix = np.random.default_rng(3).random((40, 40)) < 0.3
    packed = Visibility.from_dense(matrix)
    display = viz.VisibilityDisplay.from_tree(packed).plot(row=33)
    assert np.array_equal(display.image_.get_array(), matrix)
    shown = [int(text.get_text(), 16) for text in display.word_texts_]
    assert shown == packed.visibility_bits[33, : len(shown)].tolist()
    padded = viz.VisibilityDisplay.from_tree(Visibility(np.full((3, 1), 0xFFFFFFFF, np.uint32), np.array(2, np.int32)))
    assert padded.visibility_bits.ravel().tolist() == [3, 3]


# pages


@pytest.mark.parametrize("arrows", ["row", "page"])
def test_page_table_display_holds_the_table(arrows):
    display = draw(
        viz.PageTableDisplay([2, 0], page_size=2, context_len=2, num_nodes=1, num_pages=3).plot(arrows=arrows)
    )
    kept, node, empty, foreign = "context", "tree nodes", "no key yet", "not of this request"
    assert meanings(display, display.logical_.get_facecolors()) == [kept, kept, node, empty]
    assert meanings(display, display.physical_.get_facecolors()) == [node, foreign, foreign, foreign, kept, kept]
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


def test_page_table_display_follows_the_table_and_takes_a_request():
    display = viz.PageTableDisplay([2, 0], page_size=4, context_len=5, num_nodes=2, num_pages=4)
    assert display.rows().tolist() == [8, 9, 10, 11, 0, 1, 2]
    assert len(display.plot().arrows_) == 7
    large = viz.PageTableDisplay(np.arange(12)[::-1], page_size=16, context_len=180, num_nodes=5)
    assert len(draw(large.plot()).arrows_) == 12
    kv = PagedKV.allocate(12, batch=2, page_size=4, head_dim_ckv=16, head_dim_kpe=16)
    assert viz.PageTableDisplay.from_kv(kv, num_nodes=2, request=1).rows().tolist() == [12, 13]
    unused_entry_repeats = viz.PageTableDisplay([3, 1, 3], page_size=4, context_len=8, num_pages=4)
    assert len(unused_entry_repeats.rows()) == 8


def test_page_table_display_draws_one_box_a_page_of_a_long_context():
    table = np.random.default_rng(0).permutation(2048)
    display = viz.PageTableDisplay(table, page_size=64, context_len=131_000, num_nodes=32)
    display.plot()  # fonts are loaded once
    start = time.process_time()
    draw(display.plot())
    assert time.process_time() - start < 3.0  # 0.4 s; a Rectangle a row took 16 s
    # one a page, and what the page with the tree's keys is split into
    assert len(display.physical_.get_paths()) == 2048 + 2
    (lines,) = display.arrows_
    pairs = np.array(lines.get_segments())
    assert pairs[:, 0, 1] == pytest.approx(64.35 * np.arange(2048)[: len(pairs)] + 32)
    assert pairs[:, 1, 1] == pytest.approx(64.35 * table[: len(pairs)] + 32)


def test_page_table_display_shows_runs_of_rows_like_rows():
    display = viz.PageTableDisplay([1, 0], page_size=512, context_len=600, num_nodes=24).plot()
    logical = [(path.vertices[0, 1], path.vertices[2, 1]) for path in display.logical_.get_paths()]
    assert logical == pytest.approx(np.array([(0, 512), (512.35, 600.35), (600.35, 624.35), (624.35, 1024.35)]))
    kept, node, empty, foreign = "context", "tree nodes", "no key yet", "not of this request"
    assert meanings(display, display.logical_.get_facecolors()) == [kept, kept, node, empty]
    assert meanings(display, display.physical_.get_facecolors()) == [kept, node, foreign, kept]
