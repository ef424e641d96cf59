"""`generate(policy=...)` runs what explore found: its rounds are those of the replay, and odd policies are refused."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import DraftTree, emulate
from ddtree_cupy.decode import generate
from ddtree_cupy.decode.evaluate import prompt_at
from ddtree_cupy.decode.tiny import TinyDrafter, TinyTarget
from ddtree_cupy.errors import ArgumentError, DTypeError
from ddtree_cupy.explore import (
    BestFirst,
    CostAware,
    EntropyBudget,
    FixedTree,
    LinearCost,
    chain,
    named_policies,
    named_policy,
    record,
)
from tests.explore.live import Star, live_rounds, replayed_rounds, rounds_of
from tests.toys import NoisyDrafter, TableTarget, TextDrafter, TextTarget

POLICIES = [
    *named_policies().values(),
    Star(),
    BestFirst(0),
    BestFirst(9, max_children=(3, 1), spine=2, min_path_score=-4.0),
    EntropyBudget(1, 12, full=1.0, depths=2, ranks=3),
    CostAware(20, LinearCost(3.0, 1.0)),
    FixedTree(((0,), (2,), (2, 1), (2, 1, 4), (2, 1, 4, 0))),
]


@pytest.mark.parametrize("models", [(TableTarget, NoisyDrafter), (TextTarget, TextDrafter)], ids=["cached", "stateful"])
@given(
    policy=st.sampled_from(POLICIES),
    seed=st.integers(0, 2**16),
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=9),
    noise=st.sampled_from([0.0, 1.0, 5.0]),
    temperature=st.sampled_from([0.0, 0.7]),
)
def test_live_rounds_of_a_policy_are_those_of_its_replay(models, policy, seed, prompt, noise, temperature):
    target = models[0](vocab_size=11, seed=seed)
    drafter = models[1](target, noise)
    sampling = {"temperature": temperature, "seed": seed}
    traces = record(target, drafter, [prompt], num_positions=8, max_budget=70, width=11, progress=False, **sampling)
    live = live_rounds(target, drafter, traces, 0, prompt, policy=policy, **sampling)
    assert replayed_rounds(traces, 0, policy) == live


@given(seed=st.integers(0, 2**16), budget=st.integers(0, 30), max_children=st.sampled_from([None, 1, 2]))
def test_a_policy_gives_the_rounds_of_the_same_options(seed, budget, max_children):
    target = TableTarget(seed=seed)
    drafter = NoisyDrafter(target)
    expected = generate(target, drafter, [1], budget=budget, max_children=max_children, max_new_tokens=12)
    found = generate(target, drafter, [1], policy=BestFirst(budget, max_children=max_children), max_new_tokens=12)
    assert rounds_of(found) == rounds_of(expected)  # also the last ones, which the end of the text limits


@pytest.mark.parametrize("policy", [EntropyBudget(8, 64), CostAware(48, LinearCost(10.0, 1.0)), chain(15)], ids=str)
def test_live_rounds_of_the_bundled_models_are_those_of_the_shipped_traces(traces, policy):
    models = TinyTarget.load(dtype=np.float64), TinyDrafter.load(dtype=np.float64)
    file, _, offset = traces.prompt_names[5].partition(":")
    prompt = np.frombuffer(prompt_at(file, int(offset)), np.uint8)
    live = live_rounds(*models, traces, 5, prompt, policy=policy)
    assert len(live) > 2
    assert replayed_rounds(traces, 5, policy) == live


@pytest.mark.emulate
def test_a_policy_runs_on_the_kernels():
    target = TextTarget(seed=5)
    target.logits_after = lambda text: TableTarget.logits_after(target, text).astype(np.float32)
    drafter = TextDrafter(target)
    drafter.propose = lambda: TextDrafter.propose(drafter).astype(np.float32)
    options = {"policy": BestFirst(6), "max_new_tokens": 8}
    expected = generate(target, drafter, [1], **options)
    with emulate.active():
        assert rounds_of(generate(target, drafter, [1], **options)) == rounds_of(expected)


class Seen:
    """Best-first trees, and what was shown."""

    name = "seen"

    def __init__(self):
        self.shapes = []

    def build(self, candidates, root_token_ids):
        self.shapes.append(candidates.token_ids.shape)
        return BestFirst(3).build(candidates, root_token_ids)


def test_policies_see_as_many_depths_and_ranks_as_a_tree_may_use():
    target = TableTarget(vocab_size=40)
    for budget, ranks in ((None, 40), (6, 6)):
        policy = Seen()
        rounds = generate(target, NoisyDrafter(target), [1], policy=policy, budget=budget, max_new_tokens=7).rounds
        left = 7 - np.cumsum([0, *(len(r.token_ids) for r in rounds)])[:-1]
        assert policy.shapes == [(1, min(4, n - 1), ranks) for n in left if n > 1]


class Changed:
    """A policy whose trees pass through a function."""

    name = "changed"

    def __init__(self, change):
        self.change = change

    def build(self, candidates, root_token_ids):
        return self.change(BestFirst(4).build(candidates, root_token_ids))


def with_token(tree, node, token):
    token_ids = tree.token_ids.copy()
    token_ids[:, node] = token
    return dataclasses.replace(tree, token_ids=token_ids)


def inactive(tree):
    return DraftTree.from_parents(np.full_like(tree.token_ids, -1), np.full_like(tree.parents, -1))


def path(length):
    return DraftTree.from_parents(np.zeros((1, length), np.int32), [range(-1, length - 1)])


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda tree: tree.token_ids, DTypeError, "returned ndarray, expected DraftTree"),
        (
            lambda tree: tree.without_batch(),
            ArgumentError,
            r"returned trees \(5,\) of depth .*, expected \(1, num_nodes\)",
        ),
        (lambda tree: path(7), ArgumentError, "of depth 6, expected .* no deeper than 4"),
        (inactive, ArgumentError, "returned an inactive tree at position 1, expected at least the root"),
        (lambda tree: with_token(tree, 0, 4), ArgumentError, "with token 4 at node 0, expected the root's, 2"),
        (lambda tree: with_token(tree, 4, 5), ArgumentError, r"with token 5, expected tokens in 0\.\.4"),
    ],
)
def test_trees_that_cannot_be_verified_are_rejected(change, error, words):
    target = TableTarget()
    with pytest.raises(error, match=rf"^generate: policy 'changed' returned.*{words.removeprefix('returned')}"):
        generate(target, NoisyDrafter(target), [1, 2], policy=Changed(change), max_new_tokens=9)
    assert target.passes == 1  # the prefill


def test_trees_with_equal_siblings_are_rejected():
    twins = Changed(lambda tree: with_token(DraftTree.from_parents([[2, 1, 3]], [[-1, 0, 0]]), 2, 1))
    target = TableTarget()
    with pytest.raises(ArgumentError, match=r"DraftTree: `token_ids`.* must have distinct tokens"):
        generate(target, NoisyDrafter(target), [1, 2], policy=twins, max_new_tokens=9)


def test_a_tree_beyond_the_budget_is_rejected_with_advice_that_works():
    target = TableTarget()
    arguments = {"policy": BestFirst(4), "max_new_tokens": 9}
    with pytest.raises(ArgumentError, match="of 4 nodes besides the root, expected at most 3; a larger `budget` allow"):
        generate(target, NoisyDrafter(target), [0], budget=3, **arguments)
    assert max(int(r.tree.num_nodes) for r in generate(target, NoisyDrafter(target), [0], **arguments).rounds) == 5


def test_a_name_is_rejected_with_advice_that_works():
    target = TableTarget()
    arguments = {"prompt_ids": [0], "max_new_tokens": 5}
    with pytest.raises(DTypeError, match=r"`policy` is str, .*; ddtree_cupy.explore.named_policy\(policy\) finds one"):
        generate(target, NoisyDrafter(target), policy="chain 8", **arguments)
    assert generate(target, NoisyDrafter(target), policy=named_policy("chain 8"), **arguments).rounds


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"policy": 3}, DTypeError, "`policy` is int, expected a policy: an object with `name` and `build`$"),
        ({"policy": BestFirst}, DTypeError, "`policy` is the class BestFirst, expected a policy"),
        ({"policy": BestFirst(4), "max_children": 2}, ArgumentError, "`max_children` and `policy` are given, expected"),
        ({"policy": BestFirst(4), "spine": 2}, ArgumentError, "`spine` and `policy` are given, expected one of them"),
        ({"policy": BestFirst(4), "budget": -1}, ArgumentError, "`budget` is -1"),
        ({"policy": BestFirst(4), "drafter": None}, ArgumentError, "`drafter` is None and `policy` 'best-first 4'"),
        ({}, ArgumentError, "neither `budget` nor `policy` is given, expected one of them"),
    ],
)
def test_generate_rejects_policies_that_do_not_fit(changed, error, words):
    target = TableTarget()
    with pytest.raises(error, match=rf"^generate: {words}"):
        generate(
            **{"target": target, "drafter": NoisyDrafter(target), "prompt_ids": [1], "max_new_tokens": 4, **changed}
        )
    assert target.passes == 0
