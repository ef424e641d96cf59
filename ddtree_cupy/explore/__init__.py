"""Explore which tree should be drafted, and what it would gain.

Record the proposals of a drafter and the tokens of a target at every position of a text (`record`, or the shipped
`Traces.load()`), replay any tree policy over them (`replay`, `sweep`), and weigh the tokens against the cost of a
verification pass (`budget_curve`, `speedup`).
"""

from ddtree_cupy.explore.cost_tables import CostTable, MeasuredCost
from ddtree_cupy.explore.costs import CostModel, LinearCost, UserCost
from ddtree_cupy.explore.fixed_tree import FixedTree
from ddtree_cupy.explore.policies import (
    BestFirst,
    CostAware,
    EntropyBudget,
    Policy,
    chain,
    named_policies,
)
from ddtree_cupy.explore.recorder import record
from ddtree_cupy.explore.replay import Outcomes, Replay, replay, score
from ddtree_cupy.explore.speedup import BudgetCurve, Interval, budget_curve, speedup, tokens_per_pass
from ddtree_cupy.explore.sweeps import sweep
from ddtree_cupy.explore.traces import Traces

__all__ = [
    "BestFirst",
    "BudgetCurve",
    "CostAware",
    "CostModel",
    "CostTable",
    "EntropyBudget",
    "FixedTree",
    "Interval",
    "LinearCost",
    "MeasuredCost",
    "Outcomes",
    "Policy",
    "Replay",
    "Traces",
    "UserCost",
    "budget_curve",
    "chain",
    "named_policies",
    "record",
    "replay",
    "score",
    "speedup",
    "sweep",
    "tokens_per_pass",
]
