"""Names of policies: what a policy calls itself finds it again, wherever a policy is taken."""

import pytest

from ddtree_cupy.explore import (
    BestFirst,
    CostAware,
    EntropyBudget,
    FixedTree,
    LinearCost,
    budget_curve,
    chain,
    compare_policies,
    continuations,
    named_policies,
    named_policy,
    replay,
    score,
    sweep,
)
from tests.refusals import rejects

NAMED = [
    *named_policies().values(),
    chain(3),
    BestFirst(48),
    BestFirst(48, max_depth=9, max_children=3, spine=2),
    EntropyBudget(3, 9),
    FixedTree.from_widths((3, 1, 2)),
]


@pytest.mark.parametrize("policy", NAMED, ids=lambda policy: policy.name)
def test_named_policy_finds_what_the_name_says(policy):
    assert named_policy(policy.name) == policy


def test_a_name_is_taken_wherever_a_policy_is(two_prompts):
    name, policy = "best-first 12, max_children 2", BestFirst(12, max_children=2)
    wanted = replay(two_prompts, policy)
    found = [replay(two_prompts, name), *sweep(two_prompts, [name, name]), score(two_prompts, name)]
    assert {result.policy for result in found} == {policy.name}
    assert {result.num_accepted.tobytes() for result in found[:3]} == {wanted.num_accepted.tobytes()}
    row = compare_policies(two_prompts, [name], against=name)[0]
    assert (row.policy, row.against, row.ratio.value) == (name, name, 1.0)
    assert continuations(two_prompts, name).policy == name


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("best-first", BestFirst),
        ("chain", chain),
        ("best-first, max_children 2", lambda budget: BestFirst(budget, max_children=2)),
    ],
)
def test_budget_curve_takes_the_name_of_a_family(two_prompts, name, family):
    curve, wanted = (budget_curve(two_prompts, (2, 9), policy=policy) for policy in (name, family))
    assert [r.policy for r in curve.replays] == [r.policy for r in wanted.replays]
    assert curve.tokens_per_pass == wanted.tokens_per_pass


def test_the_message_names_a_policy_that_is_taken(two_prompts):
    with pytest.raises(ValueError, match="mean 'best-first 64, spine 8'") as caught:
        replay(two_prompts, "best-first 64; spine 8")
    for quoted in str(caught.value).split("'")[3::2]:  # after the name that was refused
        assert replay(two_prompts, quoted).policy == quoted


@rejects(
    *(
        (ValueError, "named_policy: `name` is .*expected the name of a policy", name)
        for name in ("", "chain", "chain x", "chain 1, spine 2", "best-first 4, depth 2", "best-first 9999999999")
    ),
    (ValueError, "EntropyBudget: `high` is 4, expected an integer at least 9", "entropy 9..4"),
    (ValueError, r"from_widths: `widths\[1\]` is 0", "fixed 2x0"),
)
def test_named_policy_rejects(name):
    named_policy(name)


def test_labels_of_costs_are_no_names():
    """What has no form of its own is found under `named_policies` alone."""
    with pytest.raises(ValueError, match="expected the name of a policy"):
        named_policy(CostAware(8, LinearCost(1.0, 1.0)).name)
