"""A replay is the live decoding it stands for, round by round, and refuses what the traces cannot tell."""

import dataclasses
import itertools

import numpy as np
import pytest
from explore.live import Star, live_rounds, replayed_rounds
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_cupy import Candidates, DraftTree
from ddtree_cupy.decode.evaluate import prompt_at
from ddtree_cupy.decode.tiny import TinyDrafter, TinyTarget
from ddtree_cupy.errors import ArgumentError
from ddtree_cupy.explore import (
    BestFirst,
    CostAware,
    FixedTree,
    LinearCost,
    chain,
    named_policies,
    record,
    replay,
    score,
)
from tests.toys import NoisyDrafter, TableTarget


@pytest.fixture(scope="module")
def models():
    return TinyTarget.load(dtype=np.float64), TinyDrafter.load(dtype=np.float64)


@pytest.mark.parametrize("budget", ["chain", 4, 16, 64])
def test_replay_is_identical_to_live_decoding_of_the_bundled_models(traces, models, budget):
    is_chain = budget == "chain"
    policy = chain(15) if is_chain else BestFirst(budget)
    options = {"budget": 15, "max_children": 1} if is_chain else {"budget": budget}
    for index in (0, 11):
        file, _, offset = traces.prompt_names[index].partition(":")
        prompt = np.frombuffer(prompt_at(file, int(offset)), np.uint8)
        live = live_rounds(*models, traces, index, prompt, **options)
        assert len(live) > 2
        assert replayed_rounds(traces, index, policy) == live


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**16),
    budget=st.integers(0, 40),
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=9),
    noise=st.sampled_from([0.0, 1.0, 5.0]),
    temperature=st.sampled_from([0.0, 0.7]),
    max_children=st.sampled_from([None, 1, 2]),
    spine=st.integers(0, 4),
)
def test_replay_is_identical_to_live_decoding_of_toy_models(
    seed, budget, prompt, noise, temperature, max_children, spine
):
    target = TableTarget(seed=seed)
    drafter = NoisyDrafter(target, noise)
    sampling = {"temperature": temperature, "seed": seed}
    traces = record(target, drafter, [prompt], num_positions=8, max_budget=40, width=1, **sampling)
    live = live_rounds(
        target, drafter, traces, 0, prompt, budget=budget, max_children=max_children, spine=spine, **sampling
    )
    assert replayed_rounds(traces, 0, BestFirst(budget, max_children=max_children, spine=spine)) == live


@pytest.mark.parametrize("policy", [*named_policies().values(), Star()], ids=lambda policy: policy.name)
def test_score_matches_a_walk_by_hand(traces, policy):
    some = traces.select([3, 17])
    outcomes = score(some, policy)
    tree = policy.build(some.candidates, some.root_token_ids)
    for position in range(some.num_positions):
        tokens, parents = tree.token_ids[position].tolist(), tree.parents[position].tolist()
        count, node, walked = int(tree.num_nodes[position]), 0, 0
        for wanted in some.continuations[position].tolist():
            children = [i for i in range(1, count) if parents[i] == node and tokens[i] == wanted]
            if not children:
                break
            (node,) = children
            row = some.candidates.token_ids[position, walked].tolist()
            assert outcomes.hit_ranks[position, walked] == row.index(wanted)
            walked += 1
        assert outcomes.num_accepted[position] == walked
        assert (outcomes.hit_ranks[position, walked:] == -1).all()
        assert outcomes.num_nodes[position] == count
    expected = np.full(some.num_positions, np.nan) if tree.path_scores is None else np.exp(tree.path_scores).sum(-1)
    np.testing.assert_array_equal(outcomes.expected_tokens, expected)


def test_replay_totals_agree_with_its_rounds(traces):
    result = replay(traces, BestFirst(32))
    rounds = list(zip(result.draws.tolist(), result.positions.tolist(), result.num_accepted.tolist(), strict=True))
    for (draw, position, accepted), (next_draw, next_position, _) in itertools.pairwise(rounds):
        stop = traces.prompt(draw).stop
        if draw == next_draw:
            assert next_position == position + accepted + 1
        else:
            assert position + accepted + 1 >= stop == next_position
    assert result.num_tokens == sum(accepted + 1 for *_, accepted in rounds)
    assert result.tokens_per_pass == result.num_tokens / len(rounds)
    assert result.acceptance_histogram.sum() == len(rounds)
    assert result.acceptance_histogram @ np.arange(16) == result.num_accepted.sum()
    assert result.rank_histogram.sum() == result.num_accepted.sum()
    assert result.depth_rates[0] == np.mean(result.num_accepted >= 1)
    assert repr(result).startswith("Replay('best-first 32', rounds=")


def test_replay_with_resampling_draws_the_same_prompts_for_every_policy(traces):
    first = replay(traces, BestFirst(16), num_rounds=300, seed=5)
    second = replay(traces, chain(15), num_rounds=300, seed=5)
    assert first.num_rounds == second.num_rounds == 300
    starts = [[int(r.positions[r.draws == draw][0]) for draw in range(r.draws[-1])] for r in (first, second)]
    common = min(map(len, starts))
    assert starts[0][:common] == starts[1][:common]
    again = replay(traces, BestFirst(16), num_rounds=300, seed=5)
    assert np.array_equal(first.positions, again.positions)


@pytest.mark.parametrize("num_rounds", [None, 300])
def test_replay_keeps_the_prompt_of_every_round(traces, num_rounds):
    result = replay(traces, BestFirst(16), num_rounds=num_rounds, seed=5)
    assert result.prompts.dtype == np.int32
    for prompt, position in zip(result.prompts.tolist(), result.positions.tolist(), strict=True):
        assert position in traces.prompt(prompt)
    if num_rounds is None:
        assert np.array_equal(result.prompts, result.draws)
    else:
        assert len(set(result.prompts.tolist())) < len(set(result.draws.tolist()))


def test_replay_of_drafts_of_no_depth(traces):
    kept = traces.candidates
    flat = dataclasses.replace(
        traces.select([0, 1]),
        candidates=Candidates(kept.token_ids[:64, :0], kept.logits[:64, :0], kept.lse[:64, :0]),
        row_widths=traces.row_widths[:64, :0],
        continuations=traces.continuations[:64, :1],
    ).validate()
    result = replay(flat, BestFirst(4))
    assert result.tokens_per_pass == 1.0
    assert result.rank_histogram.shape == (0, 1)
    assert result.depth_rates.shape == (0,)
    assert result.acceptance_histogram.tolist() == [64]


def test_depth_rates_are_nan_where_no_round_arrives(traces):
    result = replay(traces, BestFirst(16, max_depth=2))
    accepted = result.num_accepted
    assert result.depth_rates[:2].tolist() == [np.mean(accepted >= 1), np.sum(accepted >= 2) / np.sum(accepted >= 1)]
    assert result.depth_rates[2] == 0.0  # rounds arrive, but no node is there
    assert np.isnan(result.depth_rates[3:]).all()


def test_score_rejects_trees_that_use_the_last_recorded_rank(traces):
    score(traces.select(range(3)), BestFirst(256))  # the recorder promised it
    with pytest.raises(ArgumentError, match=r"uses rank 61 or more at depth 2 of position 0, where 62 ranks were"):
        score(traces, BestFirst(256, max_children=(1, 256)))
    # the tree that decided is refused, although what was cut from it is not
    with pytest.raises(ArgumentError, match=r"policy 'cost-aware 1500.* uses rank .* ranks were recorded"):
        score(traces.select([0]), CostAware(1500, LinearCost(1.0, 1.0)))
    # ranks past the last one, and not the last one itself: a fixed tree takes what it was told
    with pytest.raises(ArgumentError, match=r"uses rank 47 or more at depth 15 of position 0, where 48 ranks were"):
        score(traces, FixedTree((*((0,) * depth for depth in range(1, 15)), (*(0,) * 14, 70))))
    with pytest.raises(ArgumentError, match="rank 256 is used, but `candidates` hold 256"):
        score(traces, FixedTree(tuple((rank,) for rank in range(257))))


def test_score_rejects_trees_of_the_wrong_form(traces):
    class Unbatched:
        name = "unbatched"

        def build(self, candidates, root_token_ids):
            return BestFirst(4).build(candidates, root_token_ids).without_batch()

    class Inactive:
        name = "inactive"

        def build(self, candidates, root_token_ids):
            tree = BestFirst(4).build(candidates, root_token_ids)
            token_ids, parents = tree.token_ids.copy(), tree.parents.copy()
            if len(root_token_ids) < 128:  # the last call, position 128 * n + 5
                token_ids[5] = parents[5] = -1
            return DraftTree.from_parents(token_ids, parents)

    with pytest.raises(ArgumentError, match="policy 'inactive' returned an inactive tree at position 133"):
        replay(traces.select(range(5)), Inactive())
    with pytest.raises(ArgumentError, match="policy 'unbatched' returned trees"):
        score(traces, Unbatched())


def test_score_rejects_accepted_tokens_that_the_drafters_row_lacks(traces):
    some = traces.select(range(5))
    wanted = some.continuations[:, 0]

    class Oracle:
        name = "oracle"
        at = 0

        def build(self, candidates, root_token_ids):
            rows = slice(self.at, self.at + len(root_token_ids))
            self.at = rows.stop
            tokens = np.stack([root_token_ids, wanted[rows]], axis=1)
            return DraftTree.from_parents(tokens, np.tile(np.array([-1, 0], np.int32), (len(tokens), 1)))

    assert (score(some, Oracle()).num_accepted == 1).all()
    kept = some.candidates
    token_ids = kept.token_ids.copy()
    row = token_ids[131, 0]  # of the second call
    row[row == wanted[131]] = -1
    without = dataclasses.replace(some, candidates=Candidates(token_ids, kept.logits, kept.lse))
    with pytest.raises(ArgumentError, match="policy 'oracle' has an accepted token at position 131 that is not among"):
        score(without, Oracle())
