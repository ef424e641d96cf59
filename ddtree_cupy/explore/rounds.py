"""One round at one position, looked at: the tree with the nodes it left out, and why each node is in or out."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ddtree_cupy.containers.interactive import fates
from ddtree_cupy.decode.policies import Policy
from ddtree_cupy.explore.fixed_tree import FixedTree
from ddtree_cupy.explore.policies import BestFirst, CostAware, EntropyBudget
from ddtree_cupy.explore.replay import verified_trees
from ddtree_cupy.explore.traces import Traces
from ddtree_cupy.tree_build import best_first_tree

__all__ = ["Round", "round_at"]

_MOST_LEFT_OUT = 160  # nodes of the best-first tree to which a policy's tree is compared


@dataclass(frozen=True, eq=False)
class Round:
    """The nodes of a policy's tree, and behind them those of a larger best-first tree that it left out.

    Attributes
    ----------
    policy : Policy
    token_ids, parents, depths, ranks : list of int, one per node
        `ranks` are those in the drafter's row; -1 for the root and for tokens that are not in it.
    path_scores : list of float
        Nats; -inf for tokens that are not in the drafter's row.
    num_nodes : int
        Nodes of the policy's tree, root included; all later ones are left out.
    accepted : list of int
        Node indices from the root to the last accepted one.
    continuation : list of int
        The target's own next tokens.
    has_scores : bool
        Whether the policy chose by path scores.
    places : dict of int to int
        The place of nodes in the best-first order; the root has 0.
    """

    policy: Policy
    token_ids: list[int]
    parents: list[int]
    depths: list[int]
    ranks: list[int]
    path_scores: list[float]
    num_nodes: int
    accepted: list[int]
    continuation: list[int]
    has_scores: bool
    places: dict[int, int] = field(default_factory=dict)

    @property
    def bonus_token(self) -> int:
        """The target's token behind the accepted path."""
        return self.continuation[len(self.accepted) - 1]

    @property
    def missed(self) -> int | None:
        """The node left out that the target would have taken next, if it is among the nodes."""
        behind = zip(self.parents, self.token_ids, strict=True)
        return next((n for n, found in enumerate(behind) if found == (self.accepted[-1], self.bonus_token)), None)

    @property
    def expected_tokens(self) -> float:
        """Expected tokens of the pass under the draft marginals."""
        return float(np.exp(self.path_scores[: self.num_nodes]).sum())

    def kinds(self) -> list[str]:
        """Return the fate of every node, "bonus" for the missed one, "out" for the others that were left out."""
        found = fates(self.parents, self.accepted)
        missed = self.missed
        return [
            kind if node < self.num_nodes else "bonus" if node == missed else "out" for node, kind in enumerate(found)
        ]

    def why(self, node: int) -> str:
        """Return why a node is in the tree or out of it, in one sentence.

        Parameters
        ----------
        node : int
        """
        told = self._why_in(node) if node < self.num_nodes else self._why_out(node)
        if node == self.missed:
            told += "; the target takes this token next, so one node more would have been accepted"
        return told

    def _why_in(self, node: int) -> str:
        policy = self.policy
        if node == 0:
            return "in: the root is the last committed token"
        if isinstance(policy, BestFirst) and self._is_on_spine(node):
            return f"in: first ranks down to depth {policy.spine} come first, as the spine"
        if isinstance(policy, FixedTree):
            return f"in: its ranks {self._rank_path(node)} are one of the choices"
        if self.has_scores:
            return f"in: node {node} of {self.num_nodes - 1}, with path score {self.path_scores[node]:.3f} nats"
        return "in: the policy took it"

    def _why_out(self, node: int) -> str:
        for part in self._path(node):
            limit = self._limit(part) if part >= self.num_nodes else ""
            if limit:
                return f"out: {limit}" if part == node else f"out: behind node {part}, which is out: {limit}"
        if isinstance(self.policy, FixedTree):
            return f"out: its ranks {self._rank_path(node)} are none of the choices"
        if not self.has_scores:
            return "out: the policy did not take it"
        told = f"out: path score {self.path_scores[node]:.3f} nats"
        chosen = [score for n, score in enumerate(self.path_scores[: self.num_nodes]) if n and not self._is_on_spine(n)]
        if chosen:
            told += (
                f" does not beat {min(chosen):.3f}, the lowest among the {self.num_nodes - 1} nodes besides the root"
            )
        else:
            told += ", and the budget is used up"
        is_plain = not isinstance(self.policy, BestFirst) or self.policy == BestFirst(self.policy.budget)
        if is_plain and isinstance(self.policy, BestFirst | CostAware | EntropyBudget):
            told += f"; best-first takes it as node {self.places[node]}"
        return told

    def _limit(self, node: int) -> str:
        """Return the limit of a best-first policy that keeps a node out, or an empty text."""
        policy, depth, rank = self.policy, self.depths[node], self.ranks[node]
        if not isinstance(policy, BestFirst):
            return ""
        if policy.max_depth is not None and depth > policy.max_depth:
            return f"depth {depth} exceeds max_depth {policy.max_depth}"
        width: Any = policy.max_children
        if isinstance(width, Sequence):
            width = width[depth - 1]
        if width is not None and rank >= width:
            return f"rank {rank} (the best is 0), and max_children takes ranks below {width}"
        if policy.min_path_score is not None and self.path_scores[node] < policy.min_path_score:
            return f"path score {self.path_scores[node]:.3f} is below min_path_score {policy.min_path_score:.3f}"
        return ""

    def _path(self, node: int) -> list[int]:
        path = []
        while node > 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def _rank_path(self, node: int) -> tuple[int, ...]:
        return tuple(self.ranks[part] for part in self._path(node))

    def _is_on_spine(self, node: int) -> bool:
        return self.depths[node] <= getattr(self.policy, "spine", 0) and not any(self._rank_path(node))


def round_at(traces: Traces, policy: Policy, position: int) -> Round:
    """Return the round that starts at a position.

    Parameters
    ----------
    traces : Traces
    policy : Policy
    position : int

    Raises
    ------
    ArgumentError
        As in `replay`.
    """
    rows = slice(position, position + 1)
    shown, tree, result = verified_trees(traces, policy, rows)
    count = int(tree.num_nodes[0])
    budget = min(2 * count + 22, _MOST_LEFT_OUT, traces.max_budget)
    wider = best_first_tree(shown, budget=budget, root_token_ids=traces.root_token_ids[rows])
    node_of: dict[tuple[int, ...], int] = {}  # path of tokens -> node
    parents: list[int] = []
    places: dict[int, int] = {}
    for found in (tree, wider):
        paths: list[tuple[int, ...]] = []
        arrays = (found.token_ids[0], found.parents[0])
        for node, (token, parent) in enumerate(
            zip(*(a[: int(found.num_nodes[0])].tolist() for a in arrays), strict=True)
        ):
            paths.append((*paths[parent], token) if node else ())
            if paths[-1] not in node_of:
                node_of[paths[-1]] = len(parents)
                parents.append(node_of[paths[parent]] if node else -1)
            if found is wider:
                places[node_of[paths[-1]]] = node
    ids, logits, lse = (array[0] for array in (shown.token_ids, shown.logits, shown.lse))
    ranks, scores = [-1], [0.0]
    for path, node in list(node_of.items())[1:]:
        hits = np.flatnonzero(ids[len(path) - 1] == path[-1])
        ranks.append(int(hits[0]) if hits.size else -1)
        own = np.float64(logits[len(path) - 1, hits[0]]) - np.float64(lse[len(path) - 1]) if hits.size else -np.inf
        scores.append(float(scores[parents[node]] + own))
    return Round(
        policy=policy,
        token_ids=[int(traces.root_token_ids[position]), *(path[-1] for path in list(node_of)[1:])],
        parents=parents,
        depths=[len(path) for path in node_of],
        ranks=ranks,
        path_scores=scores,
        num_nodes=count,
        accepted=result.accepted[0, : int(result.num_accepted[0]) + 1].tolist(),
        continuation=traces.continuations[position].tolist(),
        has_scores=tree.path_scores is not None,
        places=places,
    )
