"""What the tree_build tests share: expected trees from the oracle, the toy tree, options, garbage containers."""

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ddtree_cupy import Candidates, DraftTree, best_first_tree
from ddtree_cupy.testing import GuardedArray
from ddtree_cupy.testing.strategies import candidate_tables
from tests.oracles import Prefix, best_first, dense_visibility, marginal_tables, packed_visibility, parents_of

ROOT = 7
T6_ROWS = ((0.6, 0.3, 0.1), (0.5, 0.4, 0.1))
T6_IDS = ((10, 11, 12), (20, 21, 22))


def request(container: Any, index: int) -> Any:
    """Return one request of a batched container, unbatched."""
    return container.map(lambda array: array[index, ...])


def batch_of(container: Any, count: int) -> Any:
    """Return a batch of `count` equal requests."""
    return container.map(lambda array: np.stack([array] * count))


def oracle_prefixes(candidates: Candidates, budget: int, **options: Any) -> list[Prefix]:
    """Return the nodes below the root of one unbatched request, by brute force."""
    table_of = marginal_tables(candidates.token_ids.tolist(), candidates.logits.tolist(), candidates.lse.tolist())
    return best_first(table_of, budget, **options)


def tree_of(prefixes: list[Prefix], *, root: int, capacity: int, status: int = 0) -> DraftTree:
    """Return the unbatched DraftTree with these nodes below the root; links by scanning."""
    count, size = len(prefixes) + 1, capacity + 1
    token_ids, parents, depths, first_child, next_sibling = np.full((5, size), -1, np.int32)
    path_scores = np.full(size, -np.inf)
    token_ids[:count] = [root, *(prefix.tokens[-1] for prefix in prefixes)]
    parents[:count] = parents_of(prefixes)
    depths[:count] = [0, *(len(prefix.ranks) for prefix in prefixes)]
    path_scores[:count] = [0.0, *(prefix.score for prefix in prefixes)]
    for node in range(count):
        children = [child for child in range(1, count) if parents[child] == node]
        first_child[node] = children[0] if children else -1
        for left, right in pairwise(children):
            next_sibling[left] = right
    return DraftTree(
        token_ids=token_ids,
        parents=parents,
        depths=depths,
        path_scores=path_scores,
        num_nodes=np.array(count, np.int32),
        status=np.array(status, np.int32),
        visibility_bits=packed_visibility(dense_visibility(parents, count)),
        first_child=first_child,
        next_sibling=next_sibling,
    )


def rank_paths(tree: DraftTree, candidates: Candidates) -> list[tuple[int, ...]]:
    """Return the rank path of every node of one unbatched request."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, int(tree.num_nodes)):
        ranks = candidates.token_ids[tree.depths[node] - 1].tolist()
        paths.append((*paths[tree.parents[node]], ranks.index(tree.token_ids[node])))
    return paths


def garbage_like(container: Any) -> tuple[Any, list[GuardedArray]]:
    """Return a container of the same shapes with canary bytes inside and around every array, and the guards."""
    guards = []

    def guarded(array: Any) -> Any:
        guards.append(GuardedArray(array.shape, array.dtype))
        return guards[-1].array

    return container.map(guarded), guards


def t6_candidates(dtype: Any = np.float32) -> Candidates:
    """Return the candidates of the toy tree T6."""
    return Candidates(np.array(T6_IDS, np.int32), np.log(np.array(T6_ROWS)).astype(dtype), np.zeros(2, dtype))


def t6_logits(dtype: Any = np.float32) -> Any:
    """Return the logits of the toy tree T6 over a vocabulary of 32, -inf elsewhere."""
    logits = np.full((2, 32), -np.inf, dtype)
    for row, (ids, probabilities) in enumerate(zip(T6_IDS, T6_ROWS, strict=True)):
        logits[row, list(ids)] = np.log(np.array(probabilities)).astype(dtype)
    return logits


def table(logits, *, ids=None, lse=None, dtype=np.float32):
    """Return unbatched Candidates; -inf logits become id -1, lse defaults to the true one."""
    logits = np.array(logits, dtype)
    if ids is None:
        ids = np.broadcast_to(np.arange(logits.shape[-1]), logits.shape)
    if lse is None:
        lse = np.log(np.exp(logits.astype(np.float64)).sum(axis=-1)).astype(dtype)
    return Candidates(np.where(logits > -np.inf, ids, -1).astype(np.int32), logits, np.array(lse, dtype)).validate()


def build(candidates, budget, **options):
    return best_first_tree(candidates, budget=budget, root_token_ids=ROOT, **options)


options = st.fixed_dictionaries(  # of best_first_tree and build_tree; grid scores are hit exactly
    {},
    optional={
        "max_depth": st.integers(0, 5),
        "max_children": st.integers(0, 6) | st.lists(st.integers(0, 6), max_size=5),
        "min_path_score": st.sampled_from([-0.5, -1.0, -1.5, -3.0, 0.0]) | st.floats(-8, 1),
        "spine": st.integers(0, 6),
    },
)


full_tables = candidate_tables(
    min_batch=1, min_draft_len=1, min_width=1, max_width=4, dtypes=("float32", "float64"), bad_rows=True
)
tables = full_tables | candidate_tables(max_width=4, dtypes=("float32", "float64"), bad_rows=True)
