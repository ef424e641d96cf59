"""choose_budget: the number of nodes that maximises expected tokens over cost."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddtree_cupy import best_first_tree, choose_budget
from ddtree_cupy.testing import unchanged
from tests.tree_build.cases import t6_candidates

T6_SCORES = np.log([1.0, 0.6, 0.3, 0.3, 0.24, 0.15])
INF = np.inf

falling = st.lists(st.floats(-20, 0), max_size=12).map(lambda values: [0.0, *sorted(values, reverse=True)])


def ratios(scores, cost):
    """Return E(n) / cost(n) for n = 0 .. len(scores) - 1, with exactly rounded sums."""
    return [(1 + math.fsum(math.exp(s) for s in scores[1 : n + 1])) / cost[n] for n in range(len(scores))]


@given(scores=falling, data=st.data())
@example(scores=[0.0], data=None)
def test_choose_budget_matches_oracle(scores, data):
    sizes = st.lists(st.floats(0.1, 10), min_size=len(scores), max_size=len(scores) + 3)
    cost = [1.0] if data is None else data.draw(sizes)
    chosen = choose_budget(scores, cost)
    gains = ratios(scores, cost)
    assert isinstance(chosen, int)
    assert gains[chosen] >= max(gains) * (1 - 1e-12)
    assert all(gain < gains[chosen] * (1 + 1e-12) for gain in gains[:chosen])
    assert choose_budget(np.array(scores), np.array(cost)) == chosen
    assert choose_budget(scores, lambda n: cost[n]) == chosen


@pytest.mark.parametrize(
    ("cost", "budget"),
    [
        (lambda n: 1.0, 5),  # nodes are free
        (lambda n: 1.0 + n, 0),  # E: 1, 1.6, 1.9, 2.2, ... never doubles
        (lambda n: 10 + 2.5 * n, 1),  # 0.1, 0.128, 0.1267, ...
        (lambda n: 1.0 if n < 3 else 9.0, 2),
        (lambda n: [9, 9, 9, 1, 9, 9][n], 3),
    ],
)
def test_choose_budget_matches_oracle_on_t6(cost, budget):
    assert choose_budget(T6_SCORES, cost) == budget
    assert choose_budget(T6_SCORES, [cost(n) for n in range(6)]) == budget


@given(scores=falling, factor=st.integers(-20, 20))
def test_choose_budget_is_invariant_under_the_unit_of_cost(scores, factor):
    cost = [1 + 0.25 * n for n in range(len(scores))]
    assert choose_budget(scores, [value * 2.0**factor for value in cost]) == choose_budget(scores, cost)


@given(scores=falling, padding=st.integers(0, 5))
def test_choose_budget_is_invariant_under_padding(scores, padding):
    """Trailing -inf is padding, whatever it would cost."""
    cost = np.linspace(1, 2, len(scores))
    assert choose_budget([*scores, *[-INF] * padding], cost) == choose_budget(scores, cost)
    assert choose_budget([*scores, *[-INF] * padding], [*cost, *[1e-9] * padding]) == choose_budget(scores, cost)


def test_choose_budget_takes_the_smallest_on_ties():
    assert choose_budget([0.0, 0.0, 0.0, 0.0], [1, 2, 3, 4]) == 0  # 1, 1, 1, 1
    assert choose_budget([0.0, 0.0, 0.0, 0.0], [2, 2, 3, 4]) == 1  # 0.5, 1, 1, 1
    assert choose_budget([0.0, -1.0, -1000.0, -1000.0], [1, 1, 1, 1]) == 1  # exp(-1000) is 0


def test_choose_budget_of_a_root_alone_is_zero():
    assert choose_budget([0.0], [3.0]) == 0
    assert choose_budget([0.0, -INF, -INF], lambda n: 1.0) == 0


def test_choose_budget_takes_the_scores_of_a_tree():
    tree = best_first_tree(t6_candidates(), budget=5, root_token_ids=1, capacity=9)
    assert choose_budget(tree.path_scores, lambda n: 1.0) == 5


def test_choose_budget_asks_the_cost_only_for_valid_nodes():
    asked = []

    def cost(n):
        asked.append(n)
        return 1.0

    choose_budget([0.0, -1.0, -INF], cost)
    assert sorted(set(asked)) == [0, 1]


def test_choose_budget_never_writes_its_input():
    scores, cost = T6_SCORES.copy(), np.ones(6)
    scores.flags.writeable = cost.flags.writeable = False
    with unchanged(path_scores=scores, cost=cost):
        choose_budget(scores, cost)
