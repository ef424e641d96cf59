"""Tree policies: from the candidates at a position to the tree that is verified."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import Checker
from ddtree_cupy.containers import Candidates, DraftTree
from ddtree_cupy.decode import Policy
from ddtree_cupy.explore.cost_tables import checked_cost
from ddtree_cupy.explore.costs import CostModel, name_of_cost
from ddtree_cupy.tree_build import best_first_tree, choose_budget

__all__ = ["BestFirst", "CostAware", "EntropyBudget", "Policy", "chain"]

_LIMITS = ("max_depth", "max_children", "min_path_score", "spine")


class _BestFirstBudgets:
    """Base of the policies whose trees are best-first; each has its own options of `best_first_tree`."""

    def _options(self, candidates: Candidates) -> dict[str, Any]:
        raise NotImplementedError

    def build(self, candidates: Candidates, root_token_ids: npt.NDArray[np.int32]) -> DraftTree:
        """Return one tree per request; see `Policy.build`."""
        return best_first_tree(candidates, root_token_ids=root_token_ids, **self._options(candidates))


@dataclass(frozen=True)
class BestFirst(_BestFirstBudgets):
    """The most probable prefixes under the draft marginals, with every limit that `best_first_tree` takes.

    Attributes
    ----------
    budget : int
        Nodes besides the root.
    max_depth, max_children, min_path_score, spine
        As in `best_first_tree`; per-depth `max_children` as a tuple.
    label : str
        Replaces the name.

    Examples
    --------
    >>> BestFirst(32, max_children=2).name
    'best-first 32, max_children 2'
    """

    budget: int
    max_depth: int | None = None
    max_children: int | tuple[int, ...] | None = None
    min_path_score: float | None = None
    spine: int = 0
    label: str = ""

    @property
    def name(self) -> str:
        """`label`, or budget and limits."""
        return self.label or ", ".join([f"best-first {self.budget}", *_given(self, _LIMITS)])

    def _options(self, candidates: Candidates) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("budget", *_LIMITS)}


def _given(policy: Any, names: tuple[str, ...]) -> list[str]:
    """Name and value of the fields that differ from their defaults."""
    defaults = {field.name: field.default for field in fields(policy)}
    return [f"{name} {getattr(policy, name)}" for name in names if getattr(policy, name) != defaults[name]]


def chain(length: int) -> BestFirst:
    """Return the policy of the flat chain: the most likely token of each of the first `length` depths.

    Parameters
    ----------
    length : int
        A longer chain than the draft length ends there.

    Examples
    --------
    >>> chain(15).name
    'chain 15'
    """
    return BestFirst(length, max_children=1, label=f"chain {length}")


@dataclass(frozen=True)
class EntropyBudget(_BestFirstBudgets):
    """Best-first, with a budget that rises with the uncertainty of the drafter at this position.

    The uncertainty is the mean entropy (nats) of the first `depths` draft rows, in which all tokens after the best
    `ranks` count together as one; the budget rises linearly from `low` at 0 to `high` at `full` nats and stays there.

    Attributes
    ----------
    low, high : int
        Nodes besides the root, 0 <= low <= high.
    full : float
        Finite, above 0.
    depths, ranks : int
        At least 1.

    Notes
    -----
    The entropy is a lower bound of that of the whole row. It is the same live and in a replay, as long as each row of
    the traces keeps `ranks` ranks or the whole vocabulary; ranks that were not recorded count with the rest.
    """

    low: int
    high: int
    full: float = 2.0
    depths: int = 4
    ranks: int = 32

    def __post_init__(self) -> None:
        check = Checker("EntropyBudget")
        low = check.integer("low", self.low, low=0)
        check.integer("high", self.high, low=low)
        check.real("full", self.full, above=0.0)
        check.integer("depths", self.depths, low=1)
        check.integer("ranks", self.ranks, low=1)

    @property
    def name(self) -> str:
        """Both ends of the budget, and the options that differ from their defaults."""
        return ", ".join([f"entropy {self.low}..{self.high}", *_given(self, ("full", "depths", "ranks"))])

    def budgets(self, candidates: Candidates) -> npt.NDArray[np.int32]:
        """Return the budget of each request.

        Parameters
        ----------
        candidates : Candidates
            Batched, (B, L, K).
        """
        logits = candidates.logits[:, : self.depths, : self.ranks].astype(np.float64)
        lse = candidates.lse[:, : self.depths, None].astype(np.float64)
        scores = np.full_like(logits, -np.inf)
        np.subtract(logits, lse, out=scores, where=logits > -np.inf)
        weights = np.exp(scores)
        rest = np.clip(1.0 - weights.sum(-1), 1e-300, None)
        entropy = -(weights * np.where(weights > 0, scores, 0.0)).sum(-1) - rest * np.log(rest)
        doubt = np.nan_to_num(entropy).mean(-1) if entropy.size else np.zeros(len(logits))
        budgets: npt.NDArray[np.int32] = np.rint(
            self.low + (self.high - self.low) * np.clip(doubt / self.full, 0.0, 1.0)
        ).astype(np.int32)
        return budgets

    def _options(self, candidates: Candidates) -> dict[str, Any]:
        return {"budget": self.budgets(candidates), "capacity": self.high}


@dataclass(frozen=True)
class CostAware(_BestFirstBudgets):
    """Best-first, cut where the expected tokens per cost are highest: `choose_budget` at every position.

    Attributes
    ----------
    max_budget : int
        Largest tree considered.
    cost : callable or CostTable
        From a budget to the cost of a pass over that many nodes besides the root: a cost model of `explore`, a table
        of one number of heads and one context, or any function that can be pickled.
    label : str
        Replaces the name.

    Notes
    -----
    Source: the surrogate of DDTree (arXiv 2604.12989) divided by the cost, as in cost-aware variants of it.
    """

    max_budget: int
    cost: Callable[[int], float]
    label: str = ""

    def __post_init__(self) -> None:
        Checker("CostAware").integer("max_budget", self.max_budget, low=0)
        object.__setattr__(self, "cost", checked_cost("CostAware", self.cost))

    @property
    def name(self) -> str:
        """`label`, or the largest budget and the cost."""
        return self.label or f"cost-aware {self.max_budget}, {name_of_cost(self.cost)}"

    def widest(self, candidates: Candidates, root_token_ids: npt.NDArray[np.int32]) -> DraftTree:
        """Return the trees whose path scores decide, and which `build` cuts.

        Parameters
        ----------
        candidates, root_token_ids
            As in `Policy.build`.
        """
        return BestFirst(self.max_budget).build(candidates, root_token_ids)

    def _options(self, candidates: Candidates) -> dict[str, Any]:
        costs = (
            self.cost.array(self.max_budget)
            if isinstance(self.cost, CostModel)
            else np.array([self.cost(budget) for budget in range(self.max_budget + 1)])
        )
        scores = self.widest(candidates, np.zeros(len(candidates.lse), np.int32)).path_scores
        assert scores is not None
        budgets = np.array([choose_budget(row, costs) for row in scores], np.int32)
        return {"budget": budgets, "capacity": self.max_budget}
