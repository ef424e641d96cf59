"""NumPy reference of tree_build: the definition of the result, read beside the paper (arXiv 2604.12989, section 4).

Arguments are taken as checked by `api.py`, where the public docstrings live. Every function here is batched:
the leading axis B is always present.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ddtree_cupy.containers import Candidates, DraftTree
from ddtree_cupy.containers.topology import derive_topology

Array = Any
Expand = Callable[[tuple[int, ...]], tuple[Array, Array, float]]

BAD_ROW = 1  # bit 0 of `status`


def top_candidates(
    draft_logits: Array, k: int, *, draft_lens: Array | None = None, compute_dtype: Any = None
) -> Candidates:
    """Take the k best tokens of every row, by descending logit, then ascending id; see `api.top_candidates`."""
    batch, draft_len, vocab_size = draft_logits.shape
    k = min(k, vocab_size)
    dtype = compute_dtype or (np.float64 if draft_logits.dtype == np.float64 else np.float32)
    token_ids = np.full((batch, draft_len, k), -1, np.int32)
    logits = np.full((batch, draft_len, k), -np.inf, dtype)
    lse = np.full((batch, draft_len), np.nan, dtype)
    lens = np.full(batch, draft_len) if draft_lens is None else draft_lens

    for row in np.ndindex(batch, draft_len):
        if row[1] >= lens[row[0]]:  # not read
            lse[row] = -np.inf
            continue
        values = _canonical(draft_logits[row]).astype(dtype, copy=False)
        if np.isnan(values).any() or (values == np.inf).any():
            continue
        lse[row] = _logsumexp(values)
        best = _best_ids(values, k)
        token_ids[row][: len(best)] = best
        logits[row][: len(best)] = values[best]
    return Candidates(token_ids, logits, lse)


def _canonical(row: Array) -> Array:
    """Upcast to float32 (float64 stays) and count -0.0 and float32 subnormals as +0.0."""
    if row.dtype == np.float64:
        return row + 0.0
    row = row.astype(np.float32)
    row[np.abs(row) < np.finfo(np.float32).smallest_normal] = 0.0
    return row


def _logsumexp(values: Array) -> Any:
    largest = values.max(initial=-np.inf)
    if largest == -np.inf:
        return largest
    with np.errstate(over="ignore"):  # 3e38 - -3e38 is infinite in float32, and exp(-inf) = 0 is right
        return largest + np.log(np.exp(values - largest).sum())


def _best_ids(values: Array, k: int) -> Array:
    """Return at most k ids above -inf, by descending value, then ascending id."""
    if k == 0:
        return np.zeros(0, np.int64)
    kth_largest = np.partition(values, values.size - k)[values.size - k]
    above = np.flatnonzero(values > kth_largest)
    level = np.flatnonzero(values == kth_largest)[: k - above.size]  # ascending ids: the lowest win the tie
    best = np.concatenate([above, level])
    best = best[values[best] > -np.inf]
    return best[np.lexsort((best, -values[best]))]


class _Node(NamedTuple):
    """An open or chosen node; tuples compare in the order of choice: score first, then rank path."""

    negative_score: float
    rank_path: tuple[int, ...]
    parent: int
    token_id: int
    token_path: tuple[int, ...]


def best_first_tree(
    candidates: Candidates | None,
    *,
    budgets: Array,
    root_token_ids: Array,
    capacity: int,
    max_depth: int | None = None,
    max_children: int | Sequence[int] | None = None,
    min_path_score: float | None = None,
    spine: int = 0,
    expand: Expand | None = None,
) -> DraftTree:
    """Pop the open node with the highest path score until the budget is spent; see `api.best_first_tree`.

    `expand(token_path)` returns (token_ids, logits, lse) of the children of the node that `token_path` leads to
    (the root's path is empty) and replaces the rows of `candidates`: the form a conditional drafter needs.
    """
    batch = len(root_token_ids)
    num_nodes = np.zeros(batch, np.int32)
    status = np.zeros(batch, np.int32)
    token_ids = np.full((batch, capacity + 1), -1, np.int32)
    parents = np.full((batch, capacity + 1), -1, np.int32)
    path_scores = np.full((batch, capacity + 1), -np.inf, np.float64)

    for b in range(batch):
        if root_token_ids[b] < 0:  # an inactive request
            continue
        rows = _Rows(candidates, b, expand, max_depth, max_children)
        nodes = _grow(rows, min(max(int(budgets[b]), 0), capacity), min_path_score, spine)
        num_nodes[b] = len(nodes)
        status[b] = BAD_ROW if rows.saw_bad_row else 0
        token_ids[b, 0] = root_token_ids[b]
        token_ids[b, 1 : len(nodes)] = [node.token_id for node in nodes[1:]]
        parents[b, : len(nodes)] = [node.parent for node in nodes]
        path_scores[b, : len(nodes)] = [0.0 - node.negative_score for node in nodes]

    topology = derive_topology(parents, num_nodes)
    return DraftTree(
        token_ids=token_ids,
        parents=parents,
        path_scores=path_scores,
        num_nodes=num_nodes,
        status=status,
        **topology._asdict(),
    )


def _grow(rows: "_Rows", budget: int, min_path_score: float | None, spine: int) -> list[_Node]:
    """Return the chosen nodes in order, the root first."""
    nodes = [_Node(-0.0, (), -1, -1, ())]

    def child(parent: int, rank: int) -> _Node | None:
        node = rows.child(nodes[parent], parent, rank)
        if node is None or (min_path_score is not None and 0.0 - node.negative_score < min_path_score):
            return None
        return node

    while len(nodes) <= min(spine, budget):
        link = child(len(nodes) - 1, 0)
        if link is None:
            break
        nodes.append(link)

    # only the best child of a node that is not in the tree yet is open, as scores fall with the rank
    opened = [child(node.parent, node.rank_path[-1] + 1) for node in nodes[1:]] + [child(len(nodes) - 1, 0)]
    heap = [node for node in opened if node is not None]
    heapq.heapify(heap)
    while heap and len(nodes) <= budget:
        best = heapq.heappop(heap)
        nodes.append(best)
        for node in (child(best.parent, best.rank_path[-1] + 1), child(len(nodes) - 1, 0)):
            if node is not None:
                heapq.heappush(heap, node)
    return nodes


class _Rows:
    """The candidates of one request, with the depth and width limits applied."""

    def __init__(
        self,
        candidates: Candidates | None,
        request: int,
        expand: Expand | None,
        max_depth: int | None,
        max_children: int | Sequence[int] | None,
    ) -> None:
        self.expand = expand
        self.max_depth = np.inf if max_depth is None else max_depth
        self.max_children = max_children
        self.saw_bad_row = False
        self.table: list[tuple[list[int], list[float], float]] = []
        if candidates is not None:
            self.saw_bad_row = bool(np.isnan(candidates.lse[request]).any())
            for depth in range(candidates.lse.shape[1]):
                ids, logits = candidates.token_ids[request, depth], candidates.logits[request, depth]
                self.table.append((ids.tolist(), logits.tolist(), float(candidates.lse[request, depth])))

    def child(self, parent: _Node, parent_index: int, rank: int) -> _Node | None:
        """Return child number `rank` of `parent`, or None if there is no such child."""
        depth = len(parent.rank_path)
        if depth >= self.max_depth or rank >= self._width(depth):
            return None
        row = self._row(parent.token_path, depth)
        if row is None or rank >= len(row[0]) or row[0][rank] < 0:
            return None
        token_ids, logits, lse = row
        # score(child) = score(parent) + (logit - lse), in float64 and in this order
        score = (0.0 - parent.negative_score) + (logits[rank] - lse)
        if not score > -np.inf:
            return None
        token_path = (*parent.token_path, token_ids[rank])
        return _Node(-score, (*parent.rank_path, rank), parent_index, token_ids[rank], token_path)

    def _width(self, depth: int) -> float:
        if self.max_children is None:
            return np.inf
        if isinstance(self.max_children, int):
            return self.max_children
        return self.max_children[depth] if depth < len(self.max_children) else 0

    def _row(self, token_path: tuple[int, ...], depth: int) -> tuple[list[int], list[float], float] | None:
        if self.expand is not None:
            token_ids, logits, lse = self.expand(token_path)
            row = (np.asarray(token_ids).tolist(), np.asarray(logits, np.float64).tolist(), float(lse))
        elif depth < len(self.table):
            row = self.table[depth]
        else:
            return None
        if np.isnan(row[2]):
            self.saw_bad_row = True
            return None
        return row


def choose_budget(path_scores: Array, cost: Array) -> int:
    """Return the n that maximises E(n) / cost(n), smallest on ties; see `api.choose_budget`."""
    expected_tokens = 1.0 + np.concatenate([[0.0], np.cumsum(np.exp(path_scores[1:]))])
    return int(np.argmax(expected_tokens / cost))
