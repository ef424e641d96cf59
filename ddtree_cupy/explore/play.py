"""Play with recorded traces: scrub positions, choose policy, budget and cost, and see what the pass would commit."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ddtree_cupy._check import Checker
from ddtree_cupy.containers.drawing import shown, tree_svg
from ddtree_cupy.containers.interactive import node_titles
from ddtree_cupy.decode.policies import Policy
from ddtree_cupy.errors import ArgumentError, DDTreeError, DTypeError
from ddtree_cupy.explore.cost_tables import CostTable, MeasuredCost, checked_cost
from ddtree_cupy.explore.costs import LinearCost
from ddtree_cupy.explore.names import family_of, policy_of
from ddtree_cupy.explore.policies import CostAware, EntropyBudget
from ddtree_cupy.explore.replay import Replay, replay
from ddtree_cupy.explore.rounds import Round, round_at
from ddtree_cupy.explore.speedup import speedup, tokens_per_pass
from ddtree_cupy.explore.traces import Traces

__all__ = ["Player", "play"]

_SCRIPT = Path(__file__).with_name("play.js")
_MOST_NODES = 96  # largest budget: the tree and the nodes left out stay readable
_CONTEXT = 60  # tokens of text before a position

Family = Callable[..., Policy]
Cost = Callable[[int], float]

_POLICIES: dict[str, Family | str] = {
    "best-first": "best-first",
    "best-first, spine 8": "best-first, spine 8",
    "best-first, max_children 2": "best-first, max_children 2",
    "chain": "chain",
    "entropy": lambda budget: EntropyBudget(min(8, budget), budget),
    "cost-aware": CostAware,
}


class Player:
    """What `play` shows, without a browser.

    Parameters
    ----------
    traces, labels, policies, costs
        As in `play`.

    Attributes
    ----------
    policies, costs : dict
        By name.
    max_budget : int
        The largest budget that `show` takes.

    Examples
    --------
    >>> player = Player(Traces.load(), labels=chr)
    >>> view = player.show(position=4, policy="best-first", budget=12)
    >>> print(view["lines"][1])
    this pass commits 3 tokens: "␣#" and then "␣"
    """

    def __init__(
        self,
        traces: Traces,
        *,
        labels: Callable[[int], str] | None = None,
        policies: Mapping[str, Family | str] | None = None,
        costs: Mapping[str, Cost | CostTable] | None = None,
    ) -> None:
        check = Checker("play")
        check.kind("traces", traces, Traces)
        if traces.num_positions == 0:
            raise ArgumentError("play: `traces` has no positions")
        if labels is not None and not callable(labels):
            raise DTypeError(
                f"play: `labels` is {type(labels).__name__}, expected a function from a token id to its text"
            )
        self.traces, self.labels = traces, labels
        self.max_budget = min(_MOST_NODES, traces.max_budget)
        given_costs = _default_costs() if costs is None else _entries("costs", costs)
        self.costs = {name: checked_cost("play", cost) for name, cost in given_costs.items()}
        given = _POLICIES if policies is None else _entries("policies", policies)
        self.policies: dict[str, Any] = {
            name: family_of("play", f"policies[{name!r}]", family) for name, family in given.items()
        }
        self._replay = lru_cache(64)(lambda *choices: replay(traces, self.policy(*choices)))

    @property
    def options(self) -> dict[str, Any]:
        """What can be chosen, as plain values."""
        names = {"policies": list(self.policies), "costs": list(self.costs)}
        return {**names, "num_positions": self.traces.num_positions, "max_budget": self.max_budget}

    def policy(self, policy: str, budget: int, cost: str) -> Policy:
        """Return the policy of these choices.

        Parameters
        ----------
        policy, cost : str
            Keys of `policies` and `costs`.
        budget : int
            Nodes besides the root, 0 .. `max_budget`.
        """
        check = Checker("play")
        check.choice("policy", policy, tuple(self.policies))
        check.choice("cost", cost, tuple(self.costs))
        budget = check.integer("budget", budget, low=0, high=self.max_budget)
        family = self.policies[policy]
        if family is CostAware:
            return CostAware(budget, self.costs[cost], label=f"cost-aware {budget}, {cost}")
        return policy_of("play", f"policies[{policy!r}]({budget})", family(budget))

    def round(self, position: int, policy: str, budget: int, cost: str) -> Round:
        """Return the round at a position; see `policy`.

        Parameters
        ----------
        position : int
            0 .. P - 1.
        policy, budget, cost
            As in `policy`.
        """
        position = Checker("play").integer("position", position, low=0, high=self.traces.num_positions - 1)
        return round_at(self.traces, self.policy(policy, budget, cost), position)

    def show(self, position: int, policy: str, budget: int, cost: str | None = None) -> dict[str, Any]:
        """Return what is seen for some choices: `svg`, `lines`, and `next`, the position of the next round.

        Parameters
        ----------
        position, policy, budget, cost
            As in `round`; the first cost by default.
        """
        cost = next(iter(self.costs)) if cost is None else cost
        found = self.round(position, policy, budget, cost)
        return {
            "svg": self._picture(found),
            "lines": [
                self._place(position),
                self._commits(found),
                self._size(found),
                self._whole(policy, budget, cost),
            ],
            "next": min(position + len(found.accepted), self.traces.num_positions - 1),
        }

    def _text(self, tokens: list[int]) -> str:
        if self.labels is None:
            return " ".join(map(str, tokens))
        return shown("".join(map(self.labels, tokens)))

    def _picture(self, found: Round) -> str:
        ids, parents, kinds = found.token_ids, [*found.parents], found.kinds()
        say = str if self.labels is None else self.labels
        labels, scores = [say(token) for token in ids], [*found.path_scores]
        words: list[str | None] = [None] * len(ids)
        for depth, node in enumerate(found.accepted):
            words[node] = say(found.continuation[depth])
        titles = node_titles(
            ids,
            parents,
            labels=labels if self.labels else None,
            path_scores=scores,
            target_words=words,
            entries=[found.why(node) for node in range(len(ids))],
        )
        if found.missed is None:
            parents.append(found.accepted[-1])
            labels.append(say(found.bonus_token))
            titles.append("the target's own token behind the accepted path; the drafter ranks it too low to be shown")
            kinds.append("bonus")
            scores.append(0.0)
        return tree_svg(parents, labels, titles, path_scores=scores, kinds=kinds)

    def _place(self, position: int) -> str:
        prompt = int((self.traces.prompt_starts[1:] <= position).sum())
        inside = self.traces.prompt(prompt)
        before = self.traces.root_token_ids[max(inside.start, position - _CONTEXT) : position + 1]
        number = f"{position - inside.start + 1} of {len(inside)}"
        return f"position {number} of prompt {shown(self.traces.prompt_names[prompt])}: …{self._text(before.tolist())}"

    def _commits(self, found: Round) -> str:
        drafts = [found.token_ids[node] for node in found.accepted[1:]]
        text = f'"{self._text(drafts)}" and then ' if drafts else ""
        return f'this pass commits {len(found.accepted)} tokens: {text}"{self._text([found.bonus_token])}"'

    def _size(self, found: Round) -> str:
        return (
            f"{found.policy.name}: {found.num_nodes - 1} nodes besides the root, {found.expected_tokens:.2f} tokens "
            f"expected under the draft marginals"
        )

    def _whole(self, policy: str, budget: int, cost: str) -> str:
        result: Replay = self._replay(policy, budget, cost)
        prompts = self.traces.num_prompts
        try:
            gain = f"speedup {speedup(result, self.costs[cost])} over no tree"
        except DDTreeError as error:  # a measured cost ends somewhere
            gain = str(error)
        return f"all {prompts} prompts: {tokens_per_pass(result)} tokens per pass; {cost}: {gain}"


def _entries(name: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping) or not given or any(not isinstance(key, str) for key in given):
        what = "empty" if isinstance(given, Mapping) and not given else type(given).__name__
        raise DTypeError(f"play: `{name}` is {what}, expected a dict from names to {name}")
    return dict(given)


def _default_costs() -> dict[str, Cost | CostTable]:
    measured = MeasuredCost(CostTable.load(), heads=8, context=8192)
    return {
        "40 + n": LinearCost(40.0, 1.0),
        "nodes cost nothing": LinearCost(1.0, 0.0),
        "attention measured on an H200, 8 heads, 8,192 keys": measured,
    }


def play(
    traces: Traces,
    *,
    labels: Callable[[int], str] | None = None,
    policies: Mapping[str, Family | str] | None = None,
    costs: Mapping[str, Cost | CostTable] | None = None,
) -> Any:
    """Return a widget to play with traces: scrub positions, choose policy, budget and cost.

    It shows the tree of the position, the path that the target accepts, the nodes that the policy left out, and the
    tokens per pass and the speedup over all prompts. A click on a node says why it is in the tree or not. It works in
    Jupyter, VS Code and marimo, and needs the extra `widgets`.

    Parameters
    ----------
    traces : Traces
    labels : callable, optional
        From a token id to its text, such as the `decode` of a tokenizer; `chr` for the shipped traces, whose tokens are
        bytes. Default: the ids.
    policies : dict, optional
        From a name to a function from a budget to a policy, or to the name of a policy without its budget, as in
        `budget_curve`; the class `CostAware` gets the cost chosen, too. Default: best-first with and without limits,
        chain, entropy, and cost-aware.
    costs : dict, optional
        From a name to a cost model. Default: two linear ones and the shipped measurement of one attention layer.

    Returns
    -------
    anywidget.AnyWidget
        Its traits `position`, `policy`, `budget` and `cost` can be set from Python, too.

    Raises
    ------
    DTypeError, ArgumentError
        An argument is not what is described here, or there are no positions.
    ModuleNotFoundError
        anywidget is not installed.

    Examples
    --------
    >>> play(Traces.load(), labels=chr)  # doctest: +SKIP
    """
    player = Player(traces, labels=labels, policies=policies, costs=costs)
    try:
        import anywidget
        import traitlets
    except ModuleNotFoundError as error:
        if error.name not in ("anywidget", "traitlets"):
            raise
        message = "explore.play needs anywidget, the extra `widgets`: pip install 'anywidget>=0.9'"
        raise ModuleNotFoundError(message, name="anywidget") from error

    choices = {
        "position": traitlets.Int(0),
        "policy": traitlets.Unicode(next(iter(player.policies))),
        "budget": traitlets.Int(min(32, player.max_budget)),
        "cost": traitlets.Unicode(next(iter(player.costs))),
    }
    shared: dict[str, Any] = {**choices, "options": traitlets.Dict(player.options), "view": traitlets.Dict()}
    traits = {name: trait.tag(sync=True) for name, trait in shared.items()}
    widget = type("Play", (anywidget.AnyWidget,), {"_esm": _SCRIPT.read_text(encoding="utf-8"), **traits})()

    def update(_: Any = None) -> None:
        try:
            widget.view = player.show(**{name: getattr(widget, name) for name in choices})
        except DDTreeError as error:
            widget.view = {"svg": "", "lines": [str(error)], "next": widget.position}

    widget.observe(update, names=[*choices])
    update()
    return widget
