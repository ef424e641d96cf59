"""Every display takes the result of the function that it is a picture of, and names another object."""

from dataclasses import replace

import numpy as np
import pytest

from ddtree_cupy import viz
from ddtree_cupy.decode import generate
from ddtree_cupy.errors import ArgumentError, DTypeError
from ddtree_cupy.explore import (
    LinearCost,
    Traces,
    budget_curve,
    continuations,
    replay,
    score,
    tokens_per_pass,
)
from ddtree_cupy.testing.tolerance import judge
from tests.refusals import rejects
from tests.toys import NoisyDrafter, TableTarget
from tests.viz.cases import draw

COST = LinearCost(fixed_us=40.0, per_node_us=1.0)


@pytest.fixture(scope="module")
def traces():
    return Traces.load().select(range(4))


@pytest.fixture(scope="module")
def generations():
    target = TableTarget()
    return [generate(target, NoisyDrafter(target), [root], budget=9, max_new_tokens=23) for root in (1, 2)]


# budget


@pytest.mark.parametrize("budgets", [(4, 16, 64), (64, 4, 16)])
def test_budget_display_has_the_numbers_of_a_curve(traces, budgets):
    curve = budget_curve(traces, budgets, cost=COST, round_us=7.0)
    display = viz.BudgetDisplay.from_curve(curve)
    order = np.argsort(budgets)
    assert display.budgets.tolist() == sorted(budgets)
    for name, position in (("realised", 0), ("realised_low", 1), ("realised_high", 2)):
        assert getattr(display, name).tolist() == [curve.tokens_per_pass[at][position] for at in order]
    assert display.expected.tolist() == curve.expected_tokens_per_pass[order].tolist()
    assert display.speedup("realised") == pytest.approx([curve.speedup[at].value for at in order], rel=1e-12)
    assert display.speedup_low.tolist() == [curve.speedup[at].low for at in order]
    assert display.best_budget() == curve.best_budget
    assert draw(display.plot(kind="speedup")).band_ is not None


def test_budget_display_takes_a_curve_without_cost_scores_or_intervals(traces):
    from ddtree_cupy.explore import FixedTree

    curve = budget_curve(traces.select([0]), (2, 3), policy=lambda budget: FixedTree.from_widths((budget,)))
    display = draw(viz.BudgetDisplay.from_curve(curve).plot())
    assert (display.expected, display.cost, display.speedup_low) == (None, None, None)
    assert np.isnan(display.realised_low).all()  # one prompt
    with pytest.raises(ArgumentError, match="`cost` is None"):
        display.plot(kind="speedup")


# acceptance


def test_acceptance_display_has_the_numbers_of_a_replay(traces):
    result = replay(traces, "best-first 16")
    display = viz.AcceptanceDisplay.from_replay(result)
    assert display.rank_of == "drafter"
    assert display.stop_rates() * result.num_rounds == pytest.approx(np.trim_zeros(result.acceptance_histogram, "b"))
    assert display.rank_rates() * result.num_rounds == pytest.approx(result.rank_histogram)
    assert display.num_accepted.mean() + 1 == pytest.approx(tokens_per_pass(result).value)
    everywhere = viz.AcceptanceDisplay.from_replay(score(traces, "best-first 16"))
    assert len(everywhere.num_accepted) == traces.num_positions


def test_acceptance_display_has_the_rounds_of_generations(generations):
    rounds = [r for generation in generations for r in generation.rounds]
    display = viz.AcceptanceDisplay.from_generation(*generations)
    assert display.num_accepted.tolist() == [r.num_drafted for r in rounds]
    assert display.rank_of == "sibling"
    for r, ranks in zip(rounds, display.hit_ranks, strict=True):
        node = 0
        for token, rank in zip(r.token_ids[: r.num_drafted], ranks, strict=False):
            node = np.flatnonzero(r.tree.parents == node)[rank]
            assert r.tree.token_ids[node] == token
    assert display.num_accepted.max() > 1


# continuations


def test_continuation_display_has_the_numbers_of_the_diagnostic(traces):
    found = continuations(traces)
    display = viz.ContinuationDisplay.from_continuations(found)
    for which, on_spine in (("spine", True), ("sibling", False)):
        assert display.counts(which) == found.counts(on_spine=on_spine)
        chosen = found.on_spine == on_spine
        for kind, shares in (("depth", display.shares(which)), ("rank", display.rank_shares(which))):
            assert np.array_equal(display.plot(kind=kind).lines_[which].get_ydata(), shares, equal_nan=True)
        for depth, share in enumerate(display.shares(which), start=1):
            here = found.ranks[chosen & (found.depths == depth)]
            assert np.isnan(share) if not len(here) else share == (here == 0).mean()
        for rank, share in enumerate(display.rank_shares(which)):
            ranks = found.ranks[chosen]
            assert share == ((ranks >= 0) & (ranks <= rank)).mean()
    texts = [text.get_text() for text in display.plot().legend_.get_texts()]
    assert texts[0].startswith("after the spine: {} of {}, ".format(*display.counts("spine")))


def test_continuation_display_draws_a_chain(traces):
    display = viz.ContinuationDisplay.from_continuations(continuations(traces, "chain 15"))
    assert display.counts("sibling") == (0, 0)
    for kind in ("depth", "rank"):
        assert list(draw(display.plot(kind=kind)).lines_) == ["spine"]
    assert np.isnan(display.rank_shares("sibling")).all()


ARRAYS = {"depths": [2, 3], "on_spine": [True, False], "ranks": [0, -1]}


@rejects(
    (DTypeError, r"ContinuationDisplay: `on_spine` is int64 \(2,\), expected bool", {"on_spine": [1, 0]}),
    (ValueError, "`on_spine` has 1 entries, expected 2 like `depths`", {"on_spine": [True]}),
    (ValueError, "`ranks` has 3 entries, expected 2 like `depths`", {"ranks": [0, 1, 2]}),
    (DTypeError, "`ranks` has dtype float64, expected integers", {"ranks": [0.5, 1]}),
    (ArgumentError, "`ranks` holds -2, expected at least one value, none below -1", {"ranks": [0, -2]}),
    (ArgumentError, "`depths` holds 0, expected at least one value, none below 1", {"depths": [0, 2]}),
    (ArgumentError, "`depths` is empty", {"depths": [], "on_spine": np.zeros(0, bool), "ranks": []}),
)
def test_continuation_display_rejects(changed):
    viz.ContinuationDisplay(**{**ARRAYS, **changed})


@pytest.mark.parametrize("method", ["counts", "shares", "rank_shares"])
def test_continuation_display_rejects_unknown_kinds_of_nodes(method):
    with pytest.raises(ArgumentError, match=rf"ContinuationDisplay\.{method}: `which` is 'cousin', expected one of"):
        getattr(viz.ContinuationDisplay(**ARRAYS), method)("cousin")


# errors


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("error", [0.0, 0.001, 0.01])
def test_error_display_has_the_verdict_of_a_judgement(dtype, error):
    reference = np.linspace(1.0, 1.1, 64)
    judgement = judge((reference + error).astype(dtype), reference, reference.astype(dtype), floor=2.0**-8)
    display = viz.ErrorDisplay.from_judgement(judgement)
    assert display.passes == judgement.passes
    assert (display.rms_error, display.bias) == (judgement.rms_error, judgement.bias)
    notes = [text.get_text() for text in draw(display.plot()).legend_.get_texts()]
    assert any(note.startswith("RMS ") for note in notes)
    assert any(note.startswith("|bias| ") for note in notes) == (dtype is np.float16)


def test_error_display_fails_by_bias_alone():
    fine = judge([1.0], [1.0], [1.0], floor=0.5)
    display = viz.ErrorDisplay.from_judgement(replace(fine, bias=-0.6, bias_allowed=0.5))
    assert not display.passes
    assert any(text.get_text().startswith("|bias| 0.6 > 0.5: fails") for text in display.plot().legend_.get_texts())


# what is another object


TAKING = [
    (viz.BudgetDisplay.from_curve, "curve", "the BudgetCurve of explore.budget_curve"),
    (viz.AcceptanceDisplay.from_replay, "replay", "the Replay of explore.replay"),
    (viz.AcceptanceDisplay.from_generation, r"generations\[0\]", "the Generation of decode.generate"),
    (viz.ContinuationDisplay.from_continuations, "continuations", "the Continuations of explore.continuations"),
    (viz.ErrorDisplay.from_judgement, "judgement", r"the Judgement of testing\.tolerance\.judge"),
]


@pytest.mark.parametrize(("take", "name", "expected"), TAKING, ids=[name for _, name, _ in TAKING])
def test_displays_reject_other_results(take, name, expected):
    for other, what in (
        (3.5, "float"),
        ([1, 2], "list"),
        ("x", "str"),
        (Traces, "the class Traces"),
        (None, "NoneType"),
    ):
        with pytest.raises(DTypeError, match=rf"`{name}` is {what}( \(no `\w+`\))?, expected {expected}"):
            take(other)


def test_acceptance_display_rejects_no_generations():
    with pytest.raises(ArgumentError, match="`num_accepted` is"):
        viz.AcceptanceDisplay.from_generation()
