"""The toy tree T6 in every form, written by hand, and what the round trips share."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from ddtree_cupy import Candidates, DraftTree, Visibility
from ddtree_cupy.testing.strategies import seeds

ROOT = 7
TOKENS, PARENTS, DEPTHS = [ROOT, 10, 20, 11, 21, 20], [-1, 0, 1, 0, 1, 3], [0, 1, 2, 1, 2, 2]
PATHS = [[0], [0, 0], [1], [0, 1], [1, 0]]
T6 = DraftTree.from_parents(TOKENS, PARENTS)
# who sees whom, row by row
SEES = np.array(
    [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 0, 0, 1, 0, 1],
    ],
    bool,
)
WORDS = [0b1, 0b11, 0b111, 0b1001, 0b10011, 0b101001]
CANDIDATES = Candidates(
    np.array([[10, 11, 12], [20, 21, 22]], np.int32),
    np.log(np.array([[0.6, 0.3, 0.1], [0.5, 0.4, 0.1]], np.float32)),
    np.zeros(2, np.float32) + np.float32(1e-3),
)


def ints(values: Any, dtype: Any = np.int32) -> Any:
    return np.array(values, dtype)


def batch_of(*trees: tuple[list[int], list[int]]) -> DraftTree:
    """Return a batch of (tokens, parents), padded to the longest."""
    size = max(len(tokens) for tokens, _ in trees)
    padded = [[column + [-1] * (size - len(column)) for column in tree] for tree in trees]
    return DraftTree.from_parents([tree[0] for tree in padded], [tree[1] for tree in padded])


def batched(container: Any) -> Any:
    return container if container.is_batched else container.with_batch()


def dense_of(container: Any) -> list[Any]:
    """Return the bool matrix of the valid nodes of every request."""
    found = batched(Visibility(container.visibility_bits, container.num_nodes))
    return [rows[:n, :n] for rows, n in zip(found.to_dense(), found.num_nodes.tolist(), strict=True)]


def assert_same_masks(found: Visibility, expected: Any) -> None:
    assert found.is_batched
    for left, right in zip(dense_of(found), dense_of(expected), strict=True):
        np.testing.assert_array_equal(left, right)


@st.composite
def with_contexts(draw: Any, containers: Any, max_context: int = 9) -> tuple[Any, Any]:
    """Draw a container and one context length per request."""
    container = draw(containers)
    random = np.random.default_rng(draw(seeds()))
    return container, random.integers(0, max_context + 1, batched(container).num_nodes.shape)


@st.composite
def with_candidates(draw: Any, trees: Any) -> tuple[DraftTree, Candidates]:
    """Draw an unbatched tree and candidates in which every token of a depth has a rank."""
    tree = draw(trees)
    random = np.random.default_rng(draw(seeds()))
    depth = int(tree.depths.max())
    rows = []
    for level in range(1, depth + 1):
        ids = np.unique(tree.token_ids[tree.depths == level])
        rows.append(random.permutation(ids).tolist())
    width = max((len(row) for row in rows), default=1)
    ids = np.full((depth, width), -1, np.int32)
    logits = np.full((depth, width), -np.inf, np.float32)
    for level, row in enumerate(rows):
        ids[level, : len(row)] = row
        logits[level, : len(row)] = -np.arange(len(row))
    return tree, Candidates(ids, logits, np.ones(depth, np.float32)).validate()
