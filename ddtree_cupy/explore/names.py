"""Names of policies: the ready-made ones, the policy that a name stands for, and policies given as arguments."""

import difflib
import math
import re
from collections.abc import Callable
from typing import Any

from ddtree_cupy._check import Checker
from ddtree_cupy.decode.policies import check_policy
from ddtree_cupy.errors import ArgumentError, DTypeError
from ddtree_cupy.explore.costs import LinearCost
from ddtree_cupy.explore.fixed_tree import MEDUSA_63, FixedTree
from ddtree_cupy.explore.policies import BestFirst, CostAware, EntropyBudget, Policy, chain

__all__ = ["family_of", "named_policies", "named_policy", "policy_of"]

_NUMBER = r"(\d{1,9})"
_LIMIT = re.compile(rf"(max_depth|max_children|spine) {_NUMBER}")
_FORMS = "'chain 15', 'best-first 64', 'best-first 64, max_children 2', 'entropy 8..64', 'fixed 4x2x1'"


def named_policies() -> dict[str, Policy]:
    """Return ready-made policies of at most 64 nodes besides the root, by name.

    Examples
    --------
    >>> len(named_policies())
    14
    """
    policies: list[Policy] = [
        chain(8),
        chain(15),
        BestFirst(16),
        BestFirst(32),
        BestFirst(64),
        BestFirst(64, spine=8),
        BestFirst(64, max_children=2),
        BestFirst(64, max_depth=8),
        BestFirst(64, min_path_score=math.log(0.01), label="best-first 64, p >= 0.01"),
        EntropyBudget(8, 64),
        CostAware(64, LinearCost(fixed_us=40.0, per_node_us=1.0), label="cost-aware 64, 40 + n"),
        FixedTree(MEDUSA_63, "Medusa 63"),
        FixedTree.from_widths((4, 2, 2, 1)),
        FixedTree.from_widths((1,) * 4 + (2,) * 3, "fixed 4-chain, then binary"),
    ]
    return {policy.name: policy for policy in policies}


def named_policy(name: str) -> Policy:
    """Return the policy of a name; every function of `explore` that takes a policy takes its name, too.

    Parameters
    ----------
    name : str
        A key of `named_policies`, or the name that these give themselves: ``chain 15``; ``best-first 64``, followed by
        any of ``, max_depth 8``, ``, max_children 2`` and ``, spine 4``; ``entropy 8..64``; ``fixed 4x2x1``.

    Examples
    --------
    >>> named_policy("best-first 48, max_children 2")
    BestFirst(budget=48, max_depth=None, max_children=2, min_path_score=None, spine=0, label='')
    """
    Checker("named_policy").kind("name", name, str)
    return policy_of("named_policy", "name", name)


def policy_of(function: str, argument: str, policy: Any) -> Policy:
    """Return the policy that an argument is or names.

    Parameters
    ----------
    function, argument : str
        The caller and the name of its argument, for messages.
    policy : Policy or str
    """
    if isinstance(policy, str):
        found = named_policies().get(policy) or _parsed(policy)
        if found is None:
            close = difflib.get_close_matches(policy, named_policies(), n=1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            raise ArgumentError(
                f"{function}: `{argument}` is {policy!r}, expected the name of a policy: a key of named_policies(), or "
                f"a form like {_FORMS}{meant}"
            )
        return found
    check_policy(function, argument, policy, ", or a name such as 'best-first 64'")
    return policy  # type: ignore[no-any-return]


def family_of(function: str, argument: str, policy: Any) -> Callable[[int], Policy]:
    """Return the function from a budget to a policy that an argument is or names.

    Parameters
    ----------
    function, argument : str
        The caller and the name of its argument, for messages.
    policy : callable or str
        A name is that of a policy without its budget: ``chain``, ``best-first``, ``best-first, max_children 2``.
    """
    if isinstance(policy, str):
        kind, *limits = policy.split(", ")

        def of_budget(budget: int) -> Policy:
            return policy_of(function, argument, ", ".join([f"{kind} {budget}", *limits]))

        if kind not in ("chain", "best-first") or _parsed(", ".join([f"{kind} 1", *limits])) is None:
            raise ArgumentError(
                f"{function}: `{argument}` is {policy!r}, expected the name of a policy without its budget, such as "
                f"'best-first', 'chain' or 'best-first, max_children 2'"
            )
        return of_budget
    if not callable(policy):
        raise DTypeError(
            f"{function}: `{argument}` is {type(policy).__name__}, expected a function from a budget to a policy, such "
            f"as BestFirst, or a name such as 'best-first'"
        )
    return policy  # type: ignore[no-any-return]


def _parsed(name: str) -> Policy | None:
    """Return the policy whose own name this is, or None."""
    head, *rest = name.split(", ")
    limits = [_LIMIT.fullmatch(limit) for limit in rest]
    if match := re.fullmatch(rf"best-first {_NUMBER}", head):
        given = {limit[1]: int(limit[2]) for limit in limits if limit}
        return BestFirst(int(match[1]), **given) if len(given) == len(rest) else None  # type: ignore[arg-type]
    if rest:
        return None
    if match := re.fullmatch(rf"chain {_NUMBER}", head):
        return chain(int(match[1]))
    if match := re.fullmatch(rf"entropy {_NUMBER}\.\.{_NUMBER}", head):
        return EntropyBudget(int(match[1]), int(match[2]))
    if match := re.fullmatch(rf"fixed ({_NUMBER}(x{_NUMBER})*)", head):
        return FixedTree.from_widths([int(width) for width in match[1].split("x")])
    return None
