"""BudgetDisplay: what a larger tree gains, and what it costs."""

from collections.abc import Callable
from typing import Any, Self

import numpy as np

from ddtree_cupy.containers import DraftTree
from ddtree_cupy.viz import _base as c
from ddtree_cupy.viz._arguments import Arguments, Array, Floats
from ddtree_cupy.viz._base import Axes, Display


class BudgetDisplay(Display):
    """Tokens that a verification pass adds to the text, over the budget; or the speedup, where passes have a cost.

    Parameters
    ----------
    budgets : int array, shape (n,)
        Nodes besides the root, ascending.
    expected : float array, shape (n,), optional
        Tokens per pass by the drafter's own probabilities: 1 + sum of exp(path score).
    realised : float array, shape (n,), optional
        Mean tokens per pass that the target accepted, bonus included.
    realised_low, realised_high : float array, shape (n,), optional
        Ends of an interval around `realised`, both or neither.
    cost : float array, shape (n,), or callable, optional
        Cost of one pass with that many nodes besides the root, drafting included. A callable, like the cost models
        of `explore`, may count in any unit: its values are divided by cost(0). An array counts in plain decoding
        passes, or in any unit once `baseline_cost` is given.
    baseline_cost : float, optional
        One plain decoding pass in the unit of `cost`; default cost(0) of a callable, 1 for an array.
    speedup_low, speedup_high : float array, shape (n,), optional
        Ends of an interval around the realised speedup, both or neither; default the interval of `realised` over the
        cost. NaN, here and in `realised_low` and `realised_high`, leaves a gap.

    Attributes
    ----------
    lines_ : dict of str to Line2D
        "expected" and "realised", if they are known.
    band_, best_, legend_
        Artists of the interval, of the best budget (speedup only) and of the legend.

    Examples
    --------
    >>> display = BudgetDisplay.from_arrays([1, 2, 4], expected=[1.6, 2.0, 2.3], cost=lambda n: 1 + n / 10)
    >>> display.best_budget()
    2
    >>> display.plot(kind="speedup").ax_.get_ylabel()
    'speedup over plain decoding'
    """

    def __init__(
        self,
        budgets: Array,
        *,
        expected: Array | None = None,
        realised: Array | None = None,
        realised_low: Array | None = None,
        realised_high: Array | None = None,
        cost: Array | Callable[[int], float] | None = None,
        baseline_cost: float | None = None,
        speedup_low: Array | None = None,
        speedup_high: Array | None = None,
    ) -> None:
        check = self._check()
        self.budgets = check.integers("budgets", budgets)
        if not self.budgets.size or (self.budgets < 0).any() or (np.diff(self.budgets) <= 0).any():
            raise check.error(f"`budgets` is {self.budgets.tolist()}, expected ascending values from 0 on")
        if expected is None and realised is None:
            raise check.error("`expected` and `realised` are None, expected at least one of them")
        for which, low, high in (("realised", realised_low, realised_high), ("speedup", speedup_low, speedup_high)):
            if (low is None) != (high is None) or (low is not None and realised is None):
                pair = f"`{which}_low` and `{which}_high`"
                raise check.error(f"{pair} go together, and with `realised`")
        unit, plain = "baseline_cost", 1.0 if baseline_cost is None else baseline_cost
        if callable(cost):
            unit, plain = ("cost(0)", cost(0)) if baseline_cost is None else (unit, plain)
            cost = [cost(int(n)) for n in self.budgets]
        self.expected = self._values(check, "expected", expected)
        self.realised = self._values(check, "realised", realised)
        self.realised_low = self._values(check, "realised_low", realised_low)
        self.realised_high = self._values(check, "realised_high", realised_high)
        self.cost = self._values(check, "cost", cost)
        self.speedup_low = self._values(check, "speedup_low", speedup_low)
        self.speedup_high = self._values(check, "speedup_high", speedup_high)
        if self.cost is not None:
            check.positive("cost", self.cost)
            self.cost = self.cost / check.real(unit, plain, above=0)

    def _values(self, check: Arguments, name: str, value: Array | None) -> Floats | None:
        if value is None:
            return None
        array = check.floats(name, value, 1)
        check.same_length("budgets", self.budgets, **{name: array})
        is_end = name.endswith(("_low", "_high"))  # NaN: no interval is known, as for a single prompt
        if np.isinf(array).any() or (np.isnan(array).any() and not is_end):
            raise check.error(f"`{name}` is {array.tolist()}, expected finite values")
        return array

    @classmethod
    def from_tree(
        cls,
        tree: DraftTree,
        *,
        cost: Array | Callable[[int], float] | None = None,
        baseline_cost: float | None = None,
        request: int | None = None,
    ) -> Self:
        """Take the path scores of one tree: expected tokens of its first n nodes, for every n from 0.

        Parameters
        ----------
        tree : DraftTree
            A best-first tree, whose prefixes are the trees of smaller budgets.
        cost : array or callable, optional
            As in the constructor; an array is indexed by n and may be longer than the tree.
        baseline_cost : float, optional
            As in the constructor.
        request : int, optional
            The index in a batch.
        """
        check = cls._check("from_tree")
        one = check.one_request("tree", tree, request, DraftTree)
        if one.path_scores is None:
            raise check.error("`tree.path_scores` is None, expected a tree built from draft logits")
        count = int(one.num_nodes)
        if cost is not None and not callable(cost):
            cost = check.floats("cost", cost, 1)[:count]
        expected = np.cumsum(np.exp(one.path_scores[:count]))
        return cls(np.arange(count), expected=expected, cost=cost, baseline_cost=baseline_cost)

    @classmethod
    def from_curve(cls, curve: Any) -> Self:
        """Take tokens per pass, speedups and their intervals from `explore.budget_curve`.

        Parameters
        ----------
        curve : BudgetCurve
            Its budgets may be in any order. With a cost, a pass of a budget costs what the mean round of that budget
            did; without path scores in every tree, nothing is drawn as expected.

        Examples
        --------
        >>> from ddtree_cupy.explore import LinearCost, Traces, budget_curve
        >>> curve = budget_curve(Traces.load(), (4, 16, 64), cost=LinearCost(fixed_us=40.0, per_node_us=1.0))
        >>> BudgetDisplay.from_curve(curve).best_budget() == curve.best_budget
        True
        """
        check = cls._check("from_curve")
        names = ("budgets", "tokens_per_pass", "speedup", "expected_tokens_per_pass")
        check.result("curve", curve, "the BudgetCurve of explore.budget_curve", *names)
        budgets = check.integers("curve.budgets", curve.budgets)
        order = np.argsort(budgets, kind="stable")
        tokens = check.floats("curve.tokens_per_pass", curve.tokens_per_pass, 2)[order]
        expected = check.floats("curve.expected_tokens_per_pass", curve.expected_tokens_per_pass, 1)[order]
        arrays = dict(zip(("realised", "realised_low", "realised_high"), tokens.T, strict=True))
        if len(curve.speedup):
            gains = check.floats("curve.speedup", curve.speedup, 2)[order]
            arrays |= {"cost": tokens[:, 0] / gains[:, 0], "speedup_low": gains[:, 1], "speedup_high": gains[:, 2]}
        return cls(budgets[order], expected=None if np.isnan(expected).any() else expected, **arrays)

    def speedup(self, which: str) -> Any:
        """Return float64 (n,): tokens per pass over the cost of a pass, for `which` = "expected" or "realised"."""
        self._check("speedup").choice("which", which, ("expected", "realised"))
        tokens = getattr(self, which)
        if self.cost is None or tokens is None:
            missing = "cost" if self.cost is None else which
            raise self._check("speedup").error(f"`{missing}` is None, expected to be given")
        return tokens / self.cost

    def best_budget(self) -> int:
        """Return the budget of the highest speedup, the smallest on ties; by `realised` when it is known."""
        which = "expected" if self.realised is None else "realised"
        return int(self.budgets[np.argmax(self.speedup(which))])

    def plot(self, ax: Axes = None, *, kind: str = "tokens", log: bool | None = None, **kw: Any) -> Self:
        """Draw the tokens per pass, or the speedup, over the budget.

        Parameters
        ----------
        kind : {"tokens", "speedup"}
            "speedup" needs `cost` and marks the best budget.
        log : bool, optional
            Whether the budget axis is in powers of 2; default: when the largest budget is above 32.
        **kw
            Options of both lines.
        """
        self._check("plot").choice("kind", kind, ("tokens", "speedup"))
        if kind == "speedup":
            self.best_budget()  # raises before anything is drawn
        ax = self._on_axes(ax, 5.2, 3.4)
        scale = self.cost if kind == "speedup" and self.cost is not None else np.ones(len(self.budgets))
        looks = {"expected": (c.SKY, "o", "--"), "realised": (c.BLUE, "s", "-")}
        names = {"expected": "expected by the drafter", "realised": "realised"}
        self.lines_ = {}
        for which, (color, marker, style) in looks.items():
            tokens = getattr(self, which)
            if tokens is not None:
                every = max(1, len(tokens) // 16)
                options = {"color": color, "marker": marker, "ls": style, "ms": 4, "markevery": every, **kw}
                self.lines_[which] = ax.plot(self.budgets, tokens / scale, label=names[which], **options)[0]
        self.band_ = None
        low, high = self.realised_low, self.realised_high
        if low is not None and high is not None:
            low, high = low / scale, high / scale
        if kind == "speedup" and self.speedup_low is not None:
            low, high = self.speedup_low, self.speedup_high
        if low is not None and high is not None:
            self.band_ = ax.fill_between(self.budgets, low, high, color=c.BLUE, alpha=0.2, lw=0, label="interval")
        if self.budgets[-1] > 32 if log is None else log:
            from_zero = self.budgets[0] == 0
            ax.set_xscale("symlog" if from_zero else "log", base=2, **({"linthresh": 1.0} if from_zero else {}))
            ax.xaxis.set_major_formatter("{x:.0f}")
        self.best_ = self._mark_best(ax) if kind == "speedup" else None
        height = "tokens per target pass" if kind == "tokens" else "speedup over plain decoding"
        self._name_axes("budget (nodes besides the root)", height, grid=True)
        self.legend_ = ax.legend(frameon=False, fontsize=8)
        return self

    def _mark_best(self, ax: Axes) -> Any:
        best = self.best_budget()
        which = "expected" if self.realised is None else "realised"
        value = float(self.speedup(which).max())
        ax.axhline(1.0, color=c.GREY, lw=0.8, ls=":")
        label = f"best: budget {best}, {value:.2f}x"
        return ax.plot([best], [value], ls="", marker="*", ms=13, color=c.VERMILLION, label=label, zorder=4)[0]
