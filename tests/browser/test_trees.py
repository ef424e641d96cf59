"""The HTML of trees in a real browser: slider, notes, batches, several pictures, colours, odd texts."""

import numpy as np
import pytest

from ddtree_cupy import DraftTree, build_tree
from ddtree_cupy.containers.interactive import tree_html
from ddtree_cupy.viz import TreeDisplay

pytestmark = pytest.mark.browser

INK = "e => getComputedStyle(e).fill"
ODD = [
    "r",
    "\n",
    "$x$",
    "<b>b</b>",
    "木木木",
    "🌳🌳",
    "e\u0301",
    "\x1b[31m",
    "\u202eabc",
    " a ",
    "",
    "&lt;",
    "\t",
    "مرحبا",
]


def tree(budget, batch=None, draft_len=6):
    shape = (draft_len, 300) if batch is None else (batch, draft_len, 300)
    logits = 3 * np.random.default_rng(0).standard_normal(shape, np.float32)
    return build_tree(logits, budget=budget, root_token_ids=7 if batch is None else np.full(batch, 7, np.int32))


def lit(view):
    """Return the nodes that the slider leaves in."""
    return view.locator("g[data-node]:not(.out)").evaluate_all("all => all.map(g => +g.dataset.node)")


def slide(view, budget):
    view.locator("input").fill(str(budget))


@pytest.mark.parametrize("nodes", [65, 256])
def test_slider_shows_the_nodes_of_a_budget(show, nodes):
    page = show(tree(nodes - 1)._repr_html_())
    assert len(lit(page)) == nodes
    for budget in (0, 5, nodes - 1, 17):
        slide(page, budget)
        assert sorted(lit(page)) == [*range(budget + 1)]
        assert page.locator("output").inner_text().startswith(f"{budget} of {nodes - 1}, ")


def test_pointing_at_a_node_tells_its_path_and_marks_it(show):
    found = tree(20)
    page = show(found._repr_html_())
    page.locator('g[data-node="20"] > circle').hover()
    note = page.locator("pre").inner_text()
    assert f"node 20, token {found.token_ids[20]}" in note
    assert f"enters at budget 20 with path score {found.path_scores[20]:.3f} nats" in note
    path, node = set(), 20
    while node > 0:
        path.add(node)
        node = int(found.parents[node])
    marked = page.locator("g[data-node]:hover").evaluate_all("all => all.map(g => +g.dataset.node)")
    assert set(marked) == path | {0}
    widths = page.locator("g[data-node] > path").evaluate_all("all => all.map(p => getComputedStyle(p).strokeWidth)")
    assert widths.count("3px") == len(path)


def test_pictures_on_one_page_do_not_disturb_each_other(show):
    page = show(tree(10)._repr_html_(), tree(12)._repr_html_())
    first, second = page.locator(".ddtree-view").all()
    slide(second, 3)
    second.locator('g[data-node="2"] > circle').hover()
    assert len(lit(first)) == 11
    assert len(lit(second)) == 4
    assert first.locator("pre").inner_text() == "point at a node"
    assert "node 2," in second.locator("pre").inner_text()


def test_requests_of_a_batch_open_at_a_click(show):
    page = show(tree(8, batch=3)._repr_html_())
    assert page.locator("svg").evaluate_all("all => all.map(e => e.checkVisibility())") == [True, False, False]
    page.get_by_text("request 2:").click()
    assert page.locator("svg").evaluate_all("all => all.map(e => e.checkVisibility())") == [True, False, True]
    slide(page.locator("details").nth(2), 4)
    assert [len(lit(view)) for view in page.locator("details").all()] == [9, 9, 5]


@pytest.mark.parametrize("dark", [False, True])
def test_texts_have_the_colour_of_the_page(show, dark):
    page = show(tree(8)._repr_html_(), dark=dark)
    wanted = page.evaluate("getComputedStyle(document.body).color")
    assert page.locator("svg text").first.evaluate(INK) == wanted


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_picture_alone_follows_the_settings_of_the_reader(page, tmp_path, scheme):
    file = tmp_path / "tree.svg"
    html = tree(8)._repr_html_()
    file.write_text(html[html.index("<svg") : html.index("</svg>") + 6], encoding="utf-8")
    page.emulate_media(color_scheme=scheme)
    page.goto(file.as_uri())
    ink = page.locator("text").first.evaluate(INK)
    assert ink == {"light": "rgb(0, 0, 0)", "dark": "rgb(255, 255, 255)"}[scheme]


def test_odd_texts_are_drawn_as_text_within_their_column(show):
    parents = [-1, *[0] * (len(ODD) - 1)]
    page = show(tree_html(range(len(ODD)), parents, labels=ODD))
    assert page.locator("b, script").count() == 0
    drawn = page.locator("svg text").all_text_contents()
    assert {"\\n", "$x$", "<b>b</b>", "木木木", "🌳🌳", "␣a␣", '""', "&lt;", "\\t"} <= set(drawn)
    # with a child behind it, the edge begins where the text has ended
    chained = show(tree_html(range(len(ODD)), range(-1, len(ODD) - 1), labels=ODD))
    ends = chained.locator("svg text").evaluate_all("all => all.map(t => t.getBBox().x + t.getBBox().width)")
    starts = chained.locator("svg path").evaluate_all("all => all.map(p => p.getPointAtLength(0).x)")
    assert all(end <= start for end, start in zip(ends[:-1], starts, strict=True))


def test_a_display_shows_the_fate_and_the_words_of_the_target(show):
    made = DraftTree.from_parents([7, 10, 20, 11], [-1, 0, 1, 0])
    display = TreeDisplay(
        made.token_ids,
        made.parents,
        accepted=[0, 1],
        bonus_token=9,
        target_token_ids=[10, 9, -1, -1],
        labels="t{}".format,
    )
    page = show(display._repr_html_())
    assert page.locator("g.accepted").evaluate_all("all => all.map(g => g.dataset.node)") == ["0", "1"]
    page.locator('g[data-node="1"] > text').hover()
    assert "next token of the target: t9" in page.locator("pre").inner_text()
    slide(page, 0)
    assert page.locator("output").inner_text() == "0 of 3, 0 accepted"
    assert page.locator(".bonus > circle").evaluate("e => getComputedStyle(e).opacity") == "0.35"
