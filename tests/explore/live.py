"""What live decoding and a replay say of the same rounds, in one form."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ddtree_cupy import Candidates, DraftTree
from ddtree_cupy.decode import generate
from ddtree_cupy.explore import Traces, score


def rounds_of(generation):
    """Return all that two ways to make the same rounds must agree about."""
    return [
        (r.context_len, r.num_accepted, r.num_drafted, r.token_ids, r.tree.token_ids.tolist(), r.tree.parents.tolist())
        for r in generation.rounds
    ]


def live_rounds(target, drafter, traces: Traces, index: int, prompt, **options):
    """Decode a prompt; keep the rounds that start at recorded positions."""
    positions = traces.prompt(index)
    length = len(positions) + traces.draft_len  # so long that no recorded round is limited by the end of the text
    first = int(traces.context_lens[positions.start])
    rounds = generate(target, drafter, prompt, max_new_tokens=length, **options).rounds
    kept = [r for r in rounds if r.context_len < first + len(positions)]
    return [(r.context_len, r.num_accepted, r.token_ids, int(r.tree.num_nodes)) for r in kept]


def replayed_rounds(traces: Traces, index: int, policy):
    """Return the same of a replay."""
    outcomes = score(traces, policy)
    rounds = []
    for start in outcomes.rounds(traces, index):
        accepted = int(outcomes.num_accepted[start])
        tokens = tuple(traces.continuations[start, : accepted + 1].tolist())
        rounds.append((int(traces.context_lens[start]), accepted, tokens, int(outcomes.num_nodes[start])))
    return rounds


@dataclass(frozen=True)
class Star:
    """A user's own policy: every recorded rank but the last as a child of the root."""

    name: str = "star"
    notes: dict[str, Any] = field(default_factory=dict)

    def build(self, candidates: Candidates, root_token_ids) -> DraftTree:
        children = candidates.token_ids[:, 0, :-1]
        token_ids = np.concatenate([root_token_ids[:, None], children], axis=1)
        parents = np.zeros_like(token_ids)
        parents[:, 0] = -1
        return DraftTree.from_parents(token_ids, parents)
