"""Trees as HTML: parsed, every node is there once, its text is text, no edge runs through a label."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import DraftTree
from ddtree_cupy.containers.drawing import node_positions, shown, tree_svg, width_of
from ddtree_cupy.containers.interactive import budget_notes, tree_html

SVG = "{http://www.w3.org/2000/svg}"
ODD = [
    "\n",
    "$$",
    "<script>alert(1)</script>",
    '" onload="x',
    "&lt;",
    "木木",
    "🌳",
    "\x1b[31m",
    "\u202e",
    " a ",
    "",
    "\ud800",
]
ODD += ["\ufffe", "\x00"]


class Page(HTMLParser):
    """The elements of a page, each closed in its order."""

    def __init__(self, html):
        super().__init__()
        self.found, self.open, self.texts = [], [], {}
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag != "input":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.setdefault(self.open[-1], []).append(data)

    def attributes(self, tag):
        return [found for name, found in self.found if name == tag]


def t6(**changed):
    return replace(DraftTree.from_parents([9, 10, 20, 11, 21, 20], [-1, 0, 1, 0, 1, 3]), **changed)


def chain(count):
    return DraftTree.from_parents(range(count), range(-1, count - 1))


def scored():
    return t6(path_scores=np.log([1, 0.6, 0.3, 0.3, 0.24, 0.15]))


def test_draft_tree_shows_every_node_once_with_what_is_known_about_it():
    page = Page(scored()._repr_html_())
    nodes = [int(group["data-node"]) for group in page.attributes("g")]
    assert sorted(nodes) == [*range(6)]
    assert len(page.attributes("circle")) == 6
    assert len(page.attributes("path")) == 5
    titles = dict(zip(nodes, page.texts["title"], strict=True))
    assert titles[0] == "path: 9\nnode 0, token 9, depth 0"
    lines = ["path: 9 11 20", "node 5, token 20, depth 2", "probability 0.15, after its parent 0.5"]
    assert titles[5].split("\n") == [*lines, "enters at budget 5 with path score -1.897 nats"]
    assert "nats" not in t6()._repr_html_()


def test_draft_tree_has_a_slider_over_every_budget():
    page = Page(scored()._repr_html_())
    (slider,) = page.attributes("input")
    assert slider.items() >= {"type": "range", "min": "0", "max": "5", "value": "5"}.items()
    notes = {int(group["data-node"]): group["data-note"] for group in page.attributes("g")}
    assert notes[0] == "0 of 5, 1.00 tokens per pass expected"
    assert notes[3] == "3 of 5, 2.20 tokens per pass expected"
    assert page.texts["output"] == [notes[5]]
    assert not Page(chain(1)._repr_html_()).attributes("input")


def test_budget_notes_count_what_is_accepted_within_the_budget():
    assert budget_notes(5, None, [0, 2, 3]) == [
        "0 of 4, 0 accepted",
        "1 of 4, 0 accepted",
        "2 of 4, 1 accepted",
        "3 of 4, 2 accepted",
        "4 of 4, 2 accepted",
    ]


@pytest.mark.parametrize("count", [1, 2, 65, 256])
def test_draft_tree_is_drawn_up_to_256_nodes(count):
    assert len(Page(chain(count)._repr_html_()).attributes("circle")) == count


def test_larger_and_inactive_trees_are_not_drawn():
    assert chain(257)._repr_html_() is None
    assert chain(257).with_batch()._repr_html_() is None
    assert DraftTree.from_parents([-1], [-1])._repr_html_() is None
    assert DraftTree.from_parents([[-1]], [[-1]])._repr_html_() is None
    assert DraftTree.from_parents(np.zeros((0, 3), int), np.zeros((0, 3), int))._repr_html_() is None


def test_a_tree_on_a_device_is_not_read():
    class Device:
        """Every use of a value would copy it."""

        shape, ndim = (3,), 1

        class device:
            id = 0

    Device.__module__ = "cupy"
    tree = DraftTree(*[Device()] * 9)
    assert tree._repr_html_() is None
    assert repr(tree) == "DraftTree(shape=(3,) on cuda:0)"


def test_a_batch_shows_its_requests():
    tree = DraftTree.from_parents([[5, 6, 7], [-1, -1, -1], [8, 9, -1]], [[-1, 0, 1], [-1, -1, -1], [-1, 0, -1]])
    page = Page(tree._repr_html_())
    assert page.texts["summary"] == ["request 0: 3 nodes, depth 2", "request 2: 2 nodes, depth 1"]
    assert "request 1: inactive" in page.texts["div"]
    assert page.attributes("details") == [{"open": None}, {}]
    assert page.texts["text"] == ["5", "6", "7", "8", "9"]
    assert len(page.attributes("input")) == 2


def test_a_large_batch_says_how_many_requests_it_leaves_out():
    page = Page(DraftTree.from_parents(np.full((19, 1), 4), np.full((19, 1), -1))._repr_html_())
    assert len(page.texts["summary"]) == 16
    assert page.texts["div"][-1] == "and 3 more requests"


def test_pictures_share_a_page_without_ids():
    html = scored()._repr_html_() + t6().with_batch()._repr_html_()
    assert not [found for _, found in Page(html).found if "id" in found or "name" in found]
    assert "getElementById" not in html


def test_pictures_take_the_colour_of_the_text_around_them():
    html = scored()._repr_html_()
    assert "fill:currentColor" in html
    assert "stroke:currentColor" in html
    assert "color-scheme:light dark" in html
    assert not re.search("#000|#fff|black|white;", html)


def test_dollars_are_not_read_as_mathematics():
    (outer, *_) = Page(tree_html([1], [-1], labels=["$x$"])).attributes("div")
    assert {"tex2jax_ignore", "mathjax_ignore"} <= set(outer["class"].split())


def test_texts_are_text():
    parents = [-1, *[0] * len(ODD)]
    html = tree_html(
        range(len(parents)), parents, labels=["r", *ODD], target_words=[*ODD, "<i>"], accepted=[0], bonus=(3, "<b>")
    )
    html.encode()
    assert "<script" not in html
    page = Page(html)
    assert {tag for tag, _ in page.found} == {
        "div",
        "label",
        "input",
        "output",
        "svg",
        "style",
        "g",
        "title",
        "path",
        "circle",
        "text",
        "pre",
    }
    drawn = [
        "\\n",
        "$$",
        "<script>alert(1)</script>"[:23] + "…",
        '" onload="x',
        "&lt;",
        "木木",
        "🌳",
        "\\x1b[31m",
        "\\u202e",
    ]
    drawn += ["␣a␣", '""', "\\ud800", "\\ufffe", "\\x00", "r", "<b>"]
    assert sorted(page.texts["text"]) == sorted(drawn)
    assert "next token of the target: <i>" in "".join(page.texts["title"])


@given(text=st.text())
def test_shown_can_stand_in_any_document(text):
    found = shown(text)
    assert found
    ElementTree.fromstring(tree_svg([-1], [text], [found]).encode())
    if text.isascii() and text.isprintable() and text == text.strip():
        assert found == (text or '""')


def test_width_counts_columns():
    assert [width_of(text) for text in ("a", "木", "ｱ", "Ａ", "🌳", "❤\ufe0f", "e\u0301", "")] == [
        1,
        2,
        1,
        2,
        2,
        2,
        1,
        0,
    ]


def edges_and_labels(svg):
    """Return the sampled points of every edge and the box of every label."""
    root = ElementTree.fromstring(svg)
    size = float(root.get("font-size"))
    points, boxes = [], []
    for path in root.iter(f"{SVG}path"):
        line, curve = path.get("d").removeprefix("M").split(" C")
        start, turn = line.split(" H")
        ends = [tuple(map(float, point.split(","))) for point in [start, *curve.split(" ")]]
        (x, y), *_ = ends
        points += [(x + (float(turn) - x) * t, y) for t in np.linspace(0, 1, 20)]
        control = np.array([(float(turn), y), *ends[1:]])
        for t in np.linspace(0, 1, 40):
            points.append(tuple(np.array([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3]) @ control))
    for text in root.iter(f"{SVG}text"):
        x, y = float(text.get("x")), float(text.get("y"))
        boxes.append((x, y - 0.7 * size, x + 0.6 * size * width_of(text.text), y + 0.1 * size))
    assert boxes
    return np.array(points).reshape(-1, 2), np.array(boxes)


@given(seed=st.integers(0, 2**16), count=st.integers(1, 80))
def test_no_edge_runs_through_a_label(seed, count):
    rng = np.random.default_rng(seed)
    parents = [-1, *(int(rng.integers(max(0, n - 9), n)) for n in range(1, count))]
    labels = rng.choice(["a", "木木木", " the", "x" * 30, "🌳"], count).tolist()
    points, boxes = edges_and_labels(tree_svg(parents, labels, labels))
    x, y = points[:, :1], points[:, 1:]
    lefts, tops, rights, bottoms = boxes.T
    assert not ((x > lefts) & (x < rights) & (y > tops) & (y < bottoms)).any()


def test_a_node_lies_in_the_group_of_its_parent():
    root = ElementTree.fromstring(tree_svg([-1, 0, 1, 0], list("abcd"), list("abcd")))
    inside = {
        group.get("data-node"): [g.get("data-node") for g in group.iter(f"{SVG}g")] for group in root.iter(f"{SVG}g")
    }
    assert inside == {"0": ["0", "1", "2", "3"], "1": ["1", "2"], "2": ["2"], "3": ["3"]}


def test_deep_trees_nest_no_deeper_than_parsers_allow():
    parents = [*range(-1, 400)]
    root = ElementTree.fromstring(tree_svg(parents, ["x"] * 401, ["x"] * 401))
    assert len(root.findall(f"{SVG}g")) == 401
    assert node_positions(parents)[-1] == (400.0, 0.0)


def test_a_long_path_keeps_its_end():
    page = Page(tree_html(range(200), range(-1, 199), labels=[f"{n}." for n in range(200)]))
    last = page.texts["title"][-1].split("\n")[0]
    assert last.startswith("path: …")
    assert last.endswith("198.199.")
    assert len(last) < 140
