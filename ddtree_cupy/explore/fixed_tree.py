"""Fixed trees: the same ranks at every position, Medusa's form."""

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import Checker
from ddtree_cupy.containers import Candidates, DraftTree
from ddtree_cupy.containers.topology import MOST_NODES, fillable_nodes
from ddtree_cupy.errors import ArgumentError

__all__ = ["MEDUSA_63", "FixedTree"]

Array = Any

# The 63 choices that Medusa (github.com/FasterDecoding/Medusa, arXiv 2401.10774) calls mc_sim_7b_63: the children of
# each inner node are its first ranks, so the numbers of children define the tree.
_MEDUSA_CHILDREN: dict[tuple[int, ...], int] = {
    (): 10,
    (0,): 10,
    (1,): 7,
    (2,): 3,
    (3,): 2,
    **{(rank,): 1 for rank in range(4, 10)},
    (0, 0): 10,
    (0, 1): 3,
    (0, 2): 2,
    **{(0, rank): 1 for rank in range(3, 8)},
    (1, 0): 2,
    (2, 0): 1,
    (0, 0, 0): 2,
}
MEDUSA_63 = tuple((*parent, rank) for parent, count in _MEDUSA_CHILDREN.items() for rank in range(count))


@dataclass(frozen=True)
class FixedTree:
    """The same ranks at every position, whatever the drafter's probabilities: Medusa's form.

    Attributes
    ----------
    choices : tuple of tuples of int
        The path of ranks from the root to each node, as in Medusa; every prefix of a choice is a choice.
    label : str
        Replaces the name.

    Examples
    --------
    >>> FixedTree.from_widths((2, 1)).choices
    ((0,), (1,), (0, 0), (1, 0))
    """

    choices: tuple[tuple[int, ...], ...]
    label: str = ""

    def __post_init__(self) -> None:
        check = Checker("FixedTree")
        paths = [
            tuple(check.integer(f"choices[{at}]", rank) for rank in check.items(f"choices[{at}]", path))
            for at, path in enumerate(check.items("choices", self.choices))
        ]
        ordered = tuple(sorted(paths, key=lambda path: (len(path), path)))
        known = {(), *ordered}
        if len(known) != len(ordered) + 1 or any(path[:-1] not in known or min(path) < 0 for path in ordered):
            raise ArgumentError(
                "FixedTree: `choices` must be distinct paths of ranks >= 0 that include every prefix of each"
            )
        object.__setattr__(self, "choices", ordered)

    @property
    def name(self) -> str:
        """`label`, or the number of nodes and a digest of the choices."""
        digest = hashlib.sha256(repr(self.choices).encode()).hexdigest()
        return self.label or f"fixed {len(self.choices)} #{digest[:6]}"

    @classmethod
    def from_widths(cls, widths: Sequence[int], label: str = "") -> Self:
        """Return the full tree with widths[d] children for every node of depth d.

        Parameters
        ----------
        widths : sequence of int
            At least one, each at least 1.
        label : str
        """
        check = Checker("FixedTree.from_widths")
        given = check.items("widths", widths)
        widths = [check.integer(f"widths[{depth}]", width, low=1) for depth, width in enumerate(given)]
        if not widths:
            raise ArgumentError("FixedTree.from_widths: `widths` is empty, expected at least one width")
        if fillable_nodes(MOST_NODES, len(widths), max(widths), max_children=tuple(widths)) >= MOST_NODES:
            raise ArgumentError(
                f"FixedTree.from_widths: `widths` is {widths}, expected at most {MOST_NODES - 1} nodes besides the root"
            )
        level: list[tuple[int, ...]] = [()]
        choices: list[tuple[int, ...]] = []
        for width in widths:
            level = [(*path, rank) for path in level for rank in range(width)]
            choices += level
        return cls(tuple(choices), label or f"fixed {'x'.join(map(str, widths))}")

    @classmethod
    def fitted(cls, candidates: Candidates, budget: int, label: str = "") -> Self:
        """Return the best fixed tree for these positions, if the draft marginals were right.

        value(path) = mean over positions of the product over depths d of p[d, path[d]]; the tree holds the `budget`
        paths of the highest values, ties in the order of depth and ranks.

        Parameters
        ----------
        candidates : Candidates
            Batched, such as the `candidates` of traces.
        budget : int
            The tree has fewer paths if no position has more.
        label : str
            Replaces the name.

        Notes
        -----
        No path has a higher value than its prefix or than the sibling of the rank before, so best-first is exact.
        """
        check = Checker("FixedTree.fitted")
        budget = check.integer("budget", budget, low=0)
        check.kind("candidates", candidates, Candidates)
        check.array("candidates.logits", candidates.logits, ("num_positions", "draft_len", "width"))
        positions, draft_len, width = candidates.logits.shape
        if positions == 0:
            raise ArgumentError("FixedTree.fitted: `candidates` has no positions, expected at least one")
        usable = np.isfinite(candidates.lse)
        lse = np.where(usable, candidates.lse, 0.0)[..., None].astype(np.float64)
        weights = np.where(usable[..., None], np.exp(candidates.logits - lse), 0.0)

        paths: list[tuple[int, ...]] = []
        heap: list[tuple[float, int, tuple[int, ...], Array]] = []  # paths are unique, so arrays are never compared

        def push(path: tuple[int, ...], above: Array) -> None:  # above: the product of the parent at each position
            depth, rank = len(path) - 1, path[-1]
            if depth < draft_len and rank < width and (products := above * weights[:, depth, rank]).any():
                heapq.heappush(heap, (-float(products.mean()), depth, path, (above, products)))

        push((0,), np.ones(positions))
        while heap and len(paths) < budget:
            _, _, path, (above, products) = heapq.heappop(heap)
            paths.append(path)
            push((*path[:-1], path[-1] + 1), above)
            push((*path, 0), products)
        return cls(tuple(paths), label or f"fitted {budget}")

    def build(self, candidates: Candidates, root_token_ids: npt.NDArray[np.int32]) -> DraftTree:
        """Return one tree per request; nodes deeper than the draft or without a candidate are left out.

        Parameters
        ----------
        candidates, root_token_ids
            As in `Policy.build`.
        """
        batch, draft_len, width = candidates.token_ids.shape
        paths = [path for path in self.choices if len(path) <= draft_len]
        highest = max((path[-1] for path in paths), default=-1)
        if highest >= width:
            raise ArgumentError(f"{self.name}: rank {highest} is used, but `candidates` hold {width} per depth")
        index = {path: node for node, path in enumerate([(), *paths])}
        parents = np.array([-1, *(index[path[:-1]] for path in paths)], np.int32)
        token_ids = np.empty((batch, len(index)), np.int32)
        token_ids[:, 0] = root_token_ids
        for node, path in enumerate(paths, 1):
            token_ids[:, node] = candidates.token_ids[:, len(path) - 1, path[-1]]
        if (token_ids >= 0).all():
            return DraftTree.from_parents(token_ids, np.broadcast_to(parents, token_ids.shape).copy())
        return DraftTree.from_parents(*_without_missing(token_ids, parents))


def _without_missing(token_ids: npt.NDArray[np.int32], parents: npt.NDArray[np.int32]) -> tuple[Array, Array]:
    """Drop nodes without a token and all nodes below them; the others move up, and padding fills the end."""
    tokens, links = np.full_like(token_ids, -1), np.full_like(token_ids, -1)
    for row, found in enumerate(token_ids):
        place = {-1: -1}
        for node, parent in enumerate(parents.tolist()):
            if found[node] >= 0 and parent in place:
                place[node] = len(place) - 1
                tokens[row, place[node]], links[row, place[node]] = found[node], place[parent]
    return tokens, links
