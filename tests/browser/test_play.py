"""The controls of `explore.play` in a real browser, with the model of the widget in Python behind them."""

import pytest

from ddtree_cupy.explore import Player, Traces
from ddtree_cupy.explore.play import _SCRIPT

pytestmark = pytest.mark.browser

# what anywidget gives to a script: values by name, and calls when they change
MODEL = """
async ([script, values]) => {
  const listeners = {}, tell = name => (listeners["change:" + name] || []).forEach(call => call());
  const model = {
    get: name => values[name],
    set: (name, value) => { values[name] = value; tell(name) },
    on: (event, call) => (listeners[event] ??= []).push(call),
    save_changes: async () => { values.view = await window.shown(values); tell("view") },
  };
  const url = URL.createObjectURL(new Blob([script], {type: "text/javascript"}));
  const module = await import(url);
  module.default.render({model, el: document.querySelector("main")});
  window.values = values;
}
"""


@pytest.fixture(scope="module")
def player():
    return Player(Traces.load().select([0, 1]), labels=chr)


@pytest.fixture
def opened(page, show, player):
    """The page of the widget, and what Python was asked for."""
    asked, names = [], ("position", "policy", "budget", "cost")

    def shown(values):
        asked.append({name: values[name] for name in names})
        return player.show(**asked[-1])

    page.expose_function("shown", shown)
    show()
    choices = {"position": 3, "policy": "best-first", "budget": 12, "cost": "40 + n"}
    values = {**choices, "options": player.options, "view": player.show(**choices)}
    page.evaluate(MODEL, [_SCRIPT.read_text(encoding="utf-8"), values])
    return page, asked


def text(page):
    return page.locator(".ddtree-lines").inner_text()


def settled(page, player, **choices):
    """Wait until the page shows these choices."""
    lines = player.show(**{"position": 3, "policy": "best-first", "budget": 12, **choices})["lines"]
    page.wait_for_function(
        "wanted => document.querySelector('.ddtree-lines').textContent === wanted", arg="\n".join(lines)
    )


def test_widget_shows_the_first_position(opened, player):
    page, asked = opened
    settled(page, player)
    assert asked == []
    assert page.locator("g[data-node]:not(.out):not(.bonus)").count() == 13
    assert page.get_by_label("budget").input_value() == "12"


def test_controls_ask_for_what_they_say(opened, player):
    page, asked = opened
    page.get_by_label("position").fill("9")
    settled(page, player, position=9)
    page.get_by_label("policy").select_option("chain")
    settled(page, player, position=9, policy="chain")
    page.get_by_label("budget").fill("5")
    page.get_by_label("budget").dispatch_event("change")
    settled(page, player, position=9, policy="chain", budget=5)
    page.get_by_label("cost").select_option("nodes cost nothing")
    settled(page, player, position=9, policy="chain", budget=5, cost="nodes cost nothing")
    assert asked[-1] == {"position": 9, "policy": "chain", "budget": 5, "cost": "nodes cost nothing"}


def test_next_round_starts_behind_the_committed_tokens(opened, player):
    page, asked = opened
    following = player.show(3, "best-first", 12)["next"]
    page.get_by_role("button", name="next round").click()
    settled(page, player, position=following)
    assert page.get_by_label("position").input_value() == str(following)
    assert asked[-1]["position"] == following


def test_a_click_says_why_a_node_is_in_or_out(opened, player):
    page, _ = opened
    found = player.round(3, "best-first", 12, "40 + n")
    for node in (2, found.num_nodes + 1):
        page.locator(f'g[data-node="{node}"] > circle').click()
        assert found.why(node) in page.locator(".ddtree-reason").inner_text()
        assert page.locator("g.chosen").evaluate_all("all => all.map(g => +g.dataset.node)") == [node]
    page.locator('g[data-node="1"] > circle').hover()
    assert found.why(1) in page.locator(".ddtree-reason").inner_text()
    page.get_by_role("button", name="next round").hover()  # away from the picture: back to the node that was clicked
    assert found.why(node) in page.locator(".ddtree-reason").inner_text()
    page.get_by_role("button", name="next round").click()
    page.wait_for_function("!document.querySelector('g.chosen')")
    assert page.locator(".ddtree-reason").inner_text().startswith("click a node")
