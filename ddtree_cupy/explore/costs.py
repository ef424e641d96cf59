"""Cost models: microseconds of a verification pass over a budget of nodes besides the root."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import Checker
from ddtree_cupy.errors import ArgumentError

__all__ = ["CostModel", "LinearCost", "SumCost", "UserCost", "cost_of", "name_of_cost"]


def cost_of(function: str, cost: Callable[[int], float], budget: int) -> float:
    """Return the cost of a pass, a positive finite number.

    Parameters
    ----------
    function : str
        The caller, for messages.
    cost : callable
    budget : int
        Nodes besides the root.
    """
    value = cost(budget)
    try:
        return Checker(function).real(f"cost({budget})", value, above=0.0)
    except ArgumentError:
        message = f"{function}: `cost` must be positive and finite for every tree, but cost({budget}) is {value!r}"
        raise ArgumentError(message) from None


def name_of_cost(cost: Callable[[int], float]) -> str:
    """Return where a function of the caller is defined, or the repr of anything else.

    Parameters
    ----------
    cost : callable
    """
    place = f"{getattr(cost, '__module__', '')}.{getattr(cost, '__qualname__', '<')}"
    return repr(cost) if "<" in place else place


class CostModel:
    """Base of the cost models: call with a budget to get microseconds; `+` adds two models."""

    def __call__(self, budget: int) -> float:
        """Return the microseconds of a pass.

        Parameters
        ----------
        budget : int
            Nodes besides the root: 0 is plain autoregressive decoding.
        """
        raise NotImplementedError

    def array(self, max_budget: int) -> npt.NDArray[np.float64]:
        """Return the costs of the budgets 0 .. max_budget.

        Parameters
        ----------
        max_budget : int
        """
        return np.array([self(budget) for budget in range(max_budget + 1)])

    def __add__(self, other: "CostModel") -> "SumCost":
        return SumCost((self, other)) if isinstance(other, CostModel) else NotImplemented


@dataclass(frozen=True)
class SumCost(CostModel):
    """The sum of several models, such as attention, the other layers and the drafter.

    Attributes
    ----------
    parts : tuple of CostModel
    """

    parts: tuple[CostModel, ...]

    def __call__(self, budget: int) -> float:
        """Return the microseconds of a pass; see `CostModel`."""
        return sum(part(budget) for part in self.parts)


@dataclass(frozen=True)
class LinearCost(CostModel):
    """A fixed part and a part for every node, the root included.

    Attributes
    ----------
    fixed_us, per_node_us : float

    Examples
    --------
    >>> (LinearCost(40.0, 1.0) + LinearCost(2.0, 0.0))(7)
    50.0
    """

    fixed_us: float
    per_node_us: float

    def __post_init__(self) -> None:
        for name in ("fixed_us", "per_node_us"):
            Checker("LinearCost").real(name, getattr(self, name))

    def __call__(self, budget: int) -> float:
        """Return the microseconds of a pass; see `CostModel`."""
        return self.fixed_us + self.per_node_us * (budget + 1)


@dataclass(frozen=True)
class UserCost(CostModel):
    """Your own measurements, linear between them; budgets outside them are refused.

    Attributes
    ----------
    budgets : tuple of int
        Nodes besides the root, ascending.
    microseconds : tuple of float
        The cost of each budget.

    Examples
    --------
    >>> UserCost((0, 64), (100.0, 164.0))(16)
    116.0
    """

    budgets: tuple[int, ...]
    microseconds: tuple[float, ...]

    def __post_init__(self) -> None:
        check = Checker("UserCost")
        budgets = [check.integer(f"budgets[{at}]", b) for at, b in enumerate(check.items("budgets", self.budgets))]
        given = check.items("microseconds", self.microseconds)
        times = np.array([check.real(f"microseconds[{at}]", time) for at, time in enumerate(given)])
        if len(budgets) != len(times) or not budgets or (np.diff(budgets) <= 0).any():
            raise ArgumentError("UserCost: `budgets` must rise and have one of `microseconds` each")
        if not (times > 0).all():
            raise ArgumentError("UserCost: `microseconds` must be positive and finite")

    def __call__(self, budget: int) -> float:
        """Return the microseconds of a pass; see `CostModel`."""
        low, high = self.budgets[0], self.budgets[-1]
        if not low <= budget <= high:
            raise ArgumentError(f"UserCost: `budget` is {budget}, expected one in {low}..{high}, the measured range")
        return float(np.interp(budget, self.budgets, self.microseconds))
