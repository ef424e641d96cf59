"""Explore which tree should be drafted, and what it would gain.

Record the proposals of a drafter and the tokens of a target at every position of a text (`record`, or the shipped
`Traces.load()`), replay any tree policy over them (`replay`, `sweep`), weigh the tokens against the cost of a
verification pass (`budget_curve`, `speedup`), and see how far two policies differ on the same texts (`compare`).
`report` writes all of it onto one page.
"""

from ddtree_cupy.explore.comparison import PolicyRow, compare_policies, policy_table
from ddtree_cupy.explore.continuations import Continuations, continuations
from ddtree_cupy.explore.cost_tables import CostTable, MeasuredCost
from ddtree_cupy.explore.costs import CostModel, LinearCost, UserCost
from ddtree_cupy.explore.curves import BudgetCurve, budget_curve
from ddtree_cupy.explore.fixed_tree import FixedTree
from ddtree_cupy.explore.logged_rounds import LoggedRounds, read_ddtreeplus, read_jetspec, read_vllm_metrics
from ddtree_cupy.explore.names import named_policies, named_policy
from ddtree_cupy.explore.play import Player, play
from ddtree_cupy.explore.policies import BestFirst, CostAware, EntropyBudget, Policy, chain
from ddtree_cupy.explore.recorder import record
from ddtree_cupy.explore.replay import Outcomes, Replay, replay, score
from ddtree_cupy.explore.report import Report, report
from ddtree_cupy.explore.speedup import Interval, compare, speedup, tokens_per_pass
from ddtree_cupy.explore.sweeps import sweep
from ddtree_cupy.explore.traces import Traces

__all__ = [
    "BestFirst",
    "BudgetCurve",
    "Continuations",
    "CostAware",
    "CostModel",
    "CostTable",
    "EntropyBudget",
    "FixedTree",
    "Interval",
    "LinearCost",
    "LoggedRounds",
    "MeasuredCost",
    "Outcomes",
    "Player",
    "Policy",
    "PolicyRow",
    "Replay",
    "Report",
    "Traces",
    "UserCost",
    "budget_curve",
    "chain",
    "compare",
    "compare_policies",
    "continuations",
    "named_policies",
    "named_policy",
    "play",
    "policy_table",
    "read_ddtreeplus",
    "read_jetspec",
    "read_vllm_metrics",
    "record",
    "replay",
    "report",
    "score",
    "speedup",
    "sweep",
    "tokens_per_pass",
]
