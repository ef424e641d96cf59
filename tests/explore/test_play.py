"""What `play` shows equals the replay, and says of every node why it is in the tree or not; without a browser."""

import re
import sys

import numpy as np
import pytest

from ddtree_cupy.errors import ArgumentError, DTypeError
from ddtree_cupy.explore import (
    BestFirst,
    CostAware,
    CostTable,
    EntropyBudget,
    FixedTree,
    LinearCost,
    Player,
    chain,
    play,
    replay,
    score,
)
from ddtree_cupy.explore.rounds import round_at


@pytest.fixture(scope="module")
def few(traces):
    return traces.select([0, 1])


@pytest.fixture(scope="module")
def player(few):
    return Player(few, labels=chr)


class FirstChild:
    """A policy that chooses by no score."""

    name = "first child"

    def build(self, candidates, root_token_ids):
        tree = BestFirst(3).build(candidates, root_token_ids)
        return type(tree).from_parents(tree.token_ids[:, :2], tree.parents[:, :2])


POLICIES = [
    BestFirst(12),
    BestFirst(12, spine=8),
    BestFirst(12, max_children=2),
    BestFirst(12, max_children=(1, 2, 1, 3, *[1] * 11)),
    BestFirst(12, max_depth=2),
    BestFirst(12, min_path_score=-2.0),
    BestFirst(0),
    chain(4),
    EntropyBudget(4, 20),
    CostAware(20, LinearCost(40.0, 1.0)),
    FixedTree.from_widths((2, 2)),
    FirstChild(),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_rounds_are_those_of_the_replay(few, policy):
    outcomes = score(few, policy)
    for position in range(0, few.num_positions, 7):
        found = round_at(few, policy, position)
        assert found.num_nodes == outcomes.num_nodes[position]
        assert len(found.accepted) - 1 == outcomes.num_accepted[position]
        assert found.bonus_token == few.continuations[position, len(found.accepted) - 1]
        if not np.isnan(outcomes.expected_tokens[position]):
            assert found.expected_tokens == pytest.approx(outcomes.expected_tokens[position], rel=1e-12)
        paths = [found._path(node) for node in range(len(found.parents))]
        tokens = [tuple(found.token_ids[part] for part in path) for path in paths]
        assert len(set(tokens)) == len(tokens)
        assert all(parent < node for node, parent in enumerate(found.parents))
        assert [len(path) for path in paths] == found.depths


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_every_node_says_whether_it_is_in(few, policy):
    found = round_at(few, policy, 9)
    told = [found.why(node) for node in range(len(found.parents))]
    assert [text.startswith("in: ") for text in told] == [node < found.num_nodes for node in range(len(told))]
    assert all(text.startswith("out: ") for text in told[found.num_nodes :])
    kinds = found.kinds()
    assert [node for node, kind in enumerate(kinds) if kind == "accepted"] == found.accepted
    assert set(kinds[found.num_nodes :]) <= {"out", "bonus"}


def test_out_of_a_best_first_tree_names_the_budget_at_which_a_node_enters(few):
    found = round_at(few, BestFirst(12), 9)
    for node in range(13, len(found.parents)):
        place = int(re.search(r"best-first takes it as node (\d+)", found.why(node))[1])
        assert found.why(node).startswith("out: path score ")
        larger = round_at(few, BestFirst(place), 9)
        path = [found.token_ids[part] for part in found._path(node)]
        assert [larger.token_ids[part] for part in larger._path(place)] == path
        assert larger.why(place).startswith(f"in: node {place} of {place}, ")


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (BestFirst(12, max_children=2), r"rank \d+ \(the best is 0\), and max_children takes ranks below 2"),
        (chain(4), "max_children takes ranks below 1"),
        (BestFirst(12, max_depth=2), r"depth \d exceeds max_depth 2"),
        (BestFirst(12, min_path_score=-1.0), r"path score -\d.\d+ is below min_path_score -1.000"),
        (FixedTree.from_widths((1,)), r"its ranks \(0, \d+\) are none of the choices"),
        (FirstChild(), "the policy did not take it"),
        (BestFirst(0), "and the budget is used up"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_out_names_the_limit(few, policy, words):
    found = round_at(few, policy, 9)
    told = [found.why(node) for node in range(found.num_nodes, len(found.parents))]
    assert any(re.search(words, text) for text in told)


def test_out_behind_a_node_names_that_node(few):
    found = round_at(few, BestFirst(20, max_children=1), 9)
    told = {node: found.why(node) for node in range(found.num_nodes, len(found.parents))}
    behind = {node: text for node, text in told.items() if "behind node" in text}
    assert behind
    for node, text in behind.items():
        assert int(re.search(r"behind node (\d+), which is out", text)[1]) in found._path(node)


def test_in_names_spine_and_choices(few):
    spine = round_at(few, BestFirst(12, spine=8), 9)
    assert [spine.why(node).startswith("in: first ranks down to depth 8") for node in range(1, 13)] == [True] * 8 + [
        False
    ] * 4
    assert round_at(few, FixedTree.from_widths((2, 2)), 9).why(2) == "in: its ranks (1,) are one of the choices"
    assert round_at(few, FirstChild(), 9).why(1) == "in: the policy took it"


def test_a_node_that_the_target_would_have_taken_says_so(few):
    seen = [round_at(few, BestFirst(4), position) for position in range(0, few.num_positions, 5)]
    missed = [found for found in seen if found.missed is not None]
    assert missed
    for found in missed:
        assert found.kinds()[found.missed] == "bonus"
        assert found.why(found.missed).endswith("so one node more would have been accepted")


def test_show_tells_place_commit_size_and_the_whole(few, player):
    view = player.show(9, "best-first", 12, "nodes cost nothing")
    place, commits, size, whole = view["lines"]
    found = player.round(9, "best-first", 12, "40 + n")
    text = "".join(map(chr, few.continuations[9, : len(found.accepted)]))
    assert place.startswith(f"position 10 of 32 of prompt {few.prompt_names[0]}: …")
    assert commits.startswith(f"this pass commits {len(found.accepted)} tokens: ")
    assert commits.replace('" and then "', "").replace("␣", " ").endswith(f'"{text}"')
    assert size.startswith("best-first 12: 12 nodes besides the root, ")
    per_pass = replay(few, BestFirst(12)).tokens_per_pass
    assert whole.startswith(f"all 2 prompts: {per_pass:.2f} (")
    assert f"nodes cost nothing: speedup {per_pass:.2f} (" in whole  # nothing else is paid
    assert view["next"] == 9 + len(found.accepted)
    assert view["svg"].count("data-node=") in (len(found.parents), len(found.parents) + 1)


def test_show_draws_texts_as_text(few):
    html = Player(few, labels=lambda token: f"<i>{token}</i>").show(0, "chain", 3)["svg"]
    assert "<i>" not in html
    assert "&lt;i&gt;" in html


def test_cost_aware_follows_the_cost_that_is_chosen(player):
    free, paid = (player.policy("cost-aware", 40, cost) for cost in ("nodes cost nothing", "40 + n"))
    assert free.cost == LinearCost(1.0, 0.0)
    assert paid.cost == LinearCost(40.0, 1.0)
    assert player.round(9, "cost-aware", 40, "nodes cost nothing").num_nodes == 41
    assert player.round(9, "cost-aware", 40, "40 + n").num_nodes < 41


def test_every_choice_of_the_widget_can_be_shown(player):
    options = player.options
    assert (options["num_positions"], options["max_budget"]) == (64, 96)
    for policy in options["policies"]:
        for budget in (0, 96):
            assert len(player.show(63, policy, budget)["lines"]) == 4
    for cost in options["costs"]:
        assert "speedup" in player.show(0, "best-first", 96, cost)["lines"][3]


def test_a_cost_that_ends_before_the_budget_is_explained(few):
    player = Player(few, costs={"short": lambda n: 1.0 if n < 8 else -1.0})
    assert "must be positive and finite" in player.show(0, "best-first", 12)["lines"][3]
    assert "speedup" in player.show(0, "best-first", 4)["lines"][3]


def test_own_policies_are_taken_as_functions_and_names(few):
    player = Player(few, policies={"mine": lambda budget: BestFirst(budget, max_depth=3), "line": "chain"})
    assert player.policy("mine", 5, "40 + n") == BestFirst(5, max_depth=3)
    assert player.policy("line", 5, "40 + n") == chain(5)
    with pytest.raises(DTypeError, match=r"`policies\['bad'\]\(3\)` is int, expected a policy"):
        Player(few, policies={"bad": lambda budget: budget}).show(0, "bad", 3)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"traces": 3}, DTypeError, "`traces` is int, expected Traces"),
        ({"traces": "none"}, ArgumentError, "`traces` has no positions"),
        ({"labels": ["a"]}, DTypeError, "`labels` is list, expected a function from a token id to its text"),
        ({"policies": ["best-first"]}, DTypeError, "`policies` is list, expected a dict from names to policies"),
        ({"policies": {}}, DTypeError, "`policies` is empty, expected a dict"),
        ({"policies": {"x": BestFirst(3)}}, DTypeError, r"`policies\['x'\]` is BestFirst, expected a function"),
        ({"policies": {"x": "best"}}, ArgumentError, r"`policies\['x'\]` is 'best', expected the name"),
        ({"costs": LinearCost(1.0, 1.0)}, DTypeError, "`costs` is LinearCost, expected a dict from names to costs"),
        ({"costs": {1: LinearCost(1.0, 1.0)}}, DTypeError, "`costs` is dict, expected a dict from names to costs"),
        ({"costs": {"x": 3.0}}, DTypeError, "`cost` is float, expected a cost model"),
        ({"costs": {"x": CostTable.load()}}, ArgumentError, r"MeasuredCost\(table, heads=8, context=8192\)"),
    ],
)
def test_play_rejects_what_it_cannot_use(few, arguments, error, words):
    arguments = {"traces": few, **arguments}
    if arguments["traces"] == "none":
        arguments["traces"] = few.select([])
    with pytest.raises(error, match=f"^play: .*{words}"):
        play(arguments.pop("traces"), **arguments)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"position": 64}, r"`position` is 64, expected an integer in 0\.\.63"),
        ({"policy": "none"}, "`policy` is 'none', expected one of 'best-first', "),
        ({"budget": 97}, r"`budget` is 97, expected an integer in 0\.\.96"),
        ({"cost": "none"}, "`cost` is 'none', expected one of '40 \\+ n', "),
    ],
)
def test_show_rejects_what_is_not_among_the_options(player, changed, words):
    with pytest.raises(ArgumentError, match=f"^play: {words}"):
        player.show(**{"position": 0, "policy": "chain", "budget": 3, "cost": "40 + n", **changed})


def test_play_without_anywidget_names_the_extra(few, monkeypatch):
    monkeypatch.setitem(sys.modules, "anywidget", None)
    with pytest.raises(ModuleNotFoundError, match=r"the extra `widgets`: pip install 'anywidget>=0\.9'"):
        play(few)


def test_widget_answers_to_its_traits(few):
    pytest.importorskip("anywidget", reason="needs anywidget, the extra `widgets`")
    widget = play(few, labels=chr)
    assert widget.options["max_budget"] == 96
    first = widget.view
    widget.position, widget.budget = 9, 12
    assert widget.view == Player(few, labels=chr).show(9, "best-first", 12)
    assert widget.view != first
    widget.budget = 1000
    assert widget.view["lines"] == ["play: `budget` is 1000, expected an integer in 0..96"]
    assert "export default { render }" in widget._esm
