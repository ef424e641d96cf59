"""Continuations: what a walk over every round finds below the accepted nodes."""

import numpy as np
import pytest

from ddtree_cupy.errors import ArgumentError, DTypeError
from ddtree_cupy.explore import BestFirst, Continuations, continuations, replay


def by_hand(traces, policy):
    """Walk every round token by token: (depth, is on the spine, rank, is in the tree) below each accepted node."""
    result, found = replay(traces, policy), []
    for position, accepted in zip(result.positions, result.num_accepted, strict=True):
        on_spine = True
        for depth in range(1, traces.draft_len + 1):
            row = traces.candidates.token_ids[position, depth - 1, : traces.row_widths[position, depth - 1]].tolist()
            token = int(traces.continuations[position, depth - 1])
            rank = row.index(token) if token in row else -1
            if depth > 1:
                found.append((depth, on_spine, rank, depth <= accepted))
            if depth > accepted:
                break
            on_spine &= rank == 0
    return found


@pytest.mark.parametrize("policy", ["best-first 64", "best-first 256", "chain 15", "Medusa 63", "best-first 0"])
def test_continuations_match_a_walk_by_hand(traces, policy):
    found = continuations(traces, policy)
    listed = zip(*(getattr(found, name).tolist() for name in ("depths", "on_spine", "ranks", "in_tree")), strict=True)
    assert list(listed) == by_hand(traces, policy)


def test_the_shipped_traces_go_on_well_on_the_spine_and_poorly_after_siblings(traces):
    """The tree of 256 nodes lacks 1 and 11 of the favourites that are right."""
    found = continuations(traces)
    assert found.policy == BestFirst(traces.max_budget).name == "best-first 256"
    assert found.counts(on_spine=True, in_tree=True) == (438, 532)
    assert found.counts(on_spine=False, in_tree=True) == (51, 191)
    assert found.counts(on_spine=True) == (439, 532)
    assert found.counts(on_spine=False) == (62, 191)


def test_share_is_the_ratio_with_an_interval_over_prompts(traces):
    found = continuations(traces)
    for on_spine in (True, False):
        for in_tree in (True, False):
            hits, count = found.counts(on_spine=on_spine, in_tree=in_tree)
            share = found.share(on_spine=on_spine, in_tree=in_tree, samples=300, seed=1)
            assert share.low < share.value == hits / count < share.high
    apart = found.share(on_spine=True), found.share(on_spine=False)
    assert apart[1].high < apart[0].low


def test_favourite_probabilities_are_those_of_the_drafter(traces):
    found = continuations(traces, "best-first 16")
    result = replay(traces, "best-first 16")
    first = int(np.flatnonzero(result.num_accepted >= 1)[0])
    position = int(result.positions[first])
    logit, lse = traces.candidates.logits[position, 1, 0], traces.candidates.lse[position, 1]
    assert found.favourite_probabilities[0] == pytest.approx(np.exp(float(logit) - float(lse)))
    assert (found.favourite_probabilities > 0).all()
    assert (found.favourite_probabilities <= 1 + 1e-6).all()


def test_the_table_has_the_counts(traces):
    text = str(continuations(traces))
    assert "438 of 532  82%" in text
    assert "51 of 191  27%" in text
    assert "0 of 0" in str(continuations(traces, "chain 3"))
    assert isinstance(continuations(traces, "best-first 0"), Continuations)


def test_continuations_reject(traces):
    with pytest.raises(DTypeError, match="continuations: `traces` is str, expected Traces"):
        continuations("x")
    with pytest.raises(ArgumentError, match="`policy` is 'x', expected the name of a policy"):
        continuations(traces, "x")
    with pytest.raises(ArgumentError, match=r"share: `on_spine` is False, but chain 3 has no continuation off the sp"):
        continuations(traces, "chain 3").share(on_spine=False)
    with pytest.raises(ArgumentError, match=r"Continuations\.share: `samples` is 0"):
        continuations(traces, "chain 3").share(on_spine=True, samples=0)
