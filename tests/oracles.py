"""Brute force on tiny cases, written from the definitions; shares no code with the library.

Letters: V vocabulary, L draft length, K candidates a depth, N nodes, H heads, C and R widths of ckv and kpe. A rank
path (r1, r2, ...) names a prefix by the rank of each token in its own row.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

RankPath = tuple[int, ...]
SMALLEST_NORMAL = 2.0**-126  # of float32


# ---- candidates ----


def flush(value: float) -> float:
    """Return +0.0 for either zero and for float32 subnormals."""
    return 0.0 if abs(value) < SMALLEST_NORMAL else value


def ranked_row(row: Any, k: int) -> list[tuple[int, float]]:
    """Return the k best (token id, logit) of one row by sorting all of it; -inf entries are no candidates."""
    entries = [(token, flush(float(value))) for token, value in enumerate(row)]
    entries = [entry for entry in entries if entry[1] != -math.inf]
    return sorted(entries, key=lambda entry: (-entry[1], entry[0]))[:k]


def log_sum_exp(row: Any) -> float:
    """Return log(sum(exp(row))) in float64 with an exactly rounded sum; NaN for a row with NaN or +inf."""
    values = [flush(float(value)) for value in row]
    if any(math.isnan(value) or value == math.inf for value in values):
        return math.nan
    top = max(values, default=-math.inf)
    if top == -math.inf:
        return -math.inf
    return top + math.log(math.fsum(math.exp(value - top) for value in values))


# ---- trees ----


class Prefix(NamedTuple):
    """One possible node: its rank path, its tokens and the log-probability of the path."""

    ranks: RankPath
    tokens: tuple[int, ...]
    score: float


Table = tuple[list[int], list[float], float]  # token ids, logits, lse of one row


def all_prefixes(table_of: Callable[[tuple[int, ...]], Table | None]) -> Iterator[Prefix]:
    """Yield every prefix below the root, parents first.

    Parameters
    ----------
    table_of : callable
        From the tokens of a path to the row that continues it, None where the tree ends; a token id -1 or a NaN
        lse offers nothing.
    """
    level = [Prefix((), (), 0.0)]
    while level:
        below = []
        for prefix in level:
            table = table_of(prefix.tokens)
            if table is None or math.isnan(table[2]):
                continue
            for rank, (token, logit) in enumerate(zip(table[0], table[1], strict=True)):
                if token >= 0:
                    score = prefix.score + (float(logit) - float(table[2]))
                    below.append(Prefix((*prefix.ranks, rank), (*prefix.tokens, token), score))
        yield from below
        level = below


def marginal_tables(token_ids: Any, logits: Any, lse: Any) -> Callable[[tuple[int, ...]], Table | None]:
    """Return `table_of` for rows that depend on the depth alone."""

    def table_of(tokens: tuple[int, ...]) -> Table | None:
        depth = len(tokens)
        return None if depth == len(lse) else (list(token_ids[depth]), list(logits[depth]), lse[depth])

    return table_of


def allowed(
    prefix: Prefix, max_depth: int | None, max_children: Any = None, min_path_score: float | None = None
) -> bool:
    """Return whether the options keep `prefix`; `max_children` is a limit or one a depth of the parent."""
    limits = [math.inf] * len(prefix.ranks)
    if max_children is not None:
        per_depth = isinstance(max_children, list | tuple | np.ndarray)
        limits = [
            (max_children[depth] if depth < len(max_children) else 0) if per_depth else max_children
            for depth in range(len(prefix.ranks))
        ]
    return (
        (max_depth is None or len(prefix.ranks) <= max_depth)
        and all(rank < limit for rank, limit in zip(prefix.ranks, limits, strict=True))
        and (min_path_score is None or prefix.score >= min_path_score)
    )


def best_first(
    table_of: Callable[[tuple[int, ...]], Table | None], budget: int, *, spine: int = 0, **options: Any
) -> list[Prefix]:
    """Return the nodes below the root in order, by sorting all prefixes by (score descending, rank path).

    `spine` puts the rank-0 chain to that depth first.
    """
    options = {"max_depth": None, **options}
    kept = [prefix for prefix in all_prefixes(table_of) if allowed(prefix, **options)]
    kept.sort(key=lambda prefix: (-prefix.score, prefix.ranks))
    on_spine = [prefix for prefix in kept if len(prefix.ranks) <= spine and not any(prefix.ranks)]
    on_spine.sort(key=lambda prefix: len(prefix.ranks))
    return (on_spine + [prefix for prefix in kept if prefix not in on_spine])[:budget]


def parents_of(prefixes: list[Prefix]) -> list[int]:
    """Return the parents array, root included, of prefixes in node order."""
    node_of = {(): 0} | {prefix.ranks: node for node, prefix in enumerate(prefixes, start=1)}
    return [-1, *(node_of[prefix.ranks[:-1]] for prefix in prefixes)]


def closed_sets(paths: set[RankPath], size: int) -> Iterator[frozenset[RankPath]]:
    """Yield every prefix-closed subset of `paths` with at most `size` members, each once."""
    seen = {frozenset()}
    level = [frozenset()]
    yield from level
    for _ in range(size):
        grown = set()
        for chosen in level:
            for path in paths - chosen:
                if path[:-1] == () or path[:-1] in chosen:
                    grown.add(chosen | {path})
        level = list(grown - seen)
        seen |= grown
        yield from level


def best_closed_set_value(probabilities: list[list[float]], budget: int) -> float:
    """Return the largest sum of path probabilities over all prefix-closed sets of at most `budget` prefixes."""
    probability_of: dict[RankPath, float] = {}
    for depth in range(1, len(probabilities) + 1):
        for path in itertools.product(*(range(len(row)) for row in probabilities[:depth])):
            probability_of[path] = math.prod(row[rank] for row, rank in zip(probabilities, path, strict=False))
    return max(
        math.fsum(probability_of[path] for path in chosen) for chosen in closed_sets(set(probability_of), budget)
    )


# ---- visibility ----


def ancestors(parents: Any, node: int) -> list[int]:
    """Return `node` and its ancestors, root first."""
    path = []
    while node >= 0:
        path.append(int(node))
        node = int(parents[node])
    return path[::-1]


def dense_visibility(parents: Any, num_nodes: int) -> Any:
    """Return bool (N, N) from walks up the tree; padding sees nothing."""
    visibility = np.zeros((len(parents), len(parents)), bool)
    for node in range(num_nodes):
        visibility[node, ancestors(parents, node)] = True
    return visibility


def packed_visibility(visibility: Any) -> Any:
    """Return uint32 (N, W), bit j % 32 of word j // 32 of row i for each True at (i, j)."""
    size = len(visibility)
    words = [[0] * ((size + 31) // 32) for _ in range(size)]
    for i, j in itertools.product(range(size), repeat=2):
        if visibility[i][j]:
            words[i][j // 32] |= 1 << (j % 32)
    return np.array(words, np.uint32).reshape(size, (size + 31) // 32)


# ---- attention ----


def logical_row(kv: Any, request: int, position: int) -> tuple[int, int]:
    """Return (page, slot) of a logical position of one request."""
    table = np.atleast_2d(kv.page_table)[request]
    page_size = kv.ckv.shape[1]
    return int(table[position // page_size]), position % page_size


def gather(kv: Any, request: int, count: int) -> tuple[Any, Any]:
    """Return float64 (count, C) and (count, R): the first `count` logical rows of one request."""
    rows = [logical_row(kv, request, position) for position in range(count)]
    ckv = np.array([kv.ckv[page, slot].astype(np.float64) for page, slot in rows]).reshape(count, kv.ckv.shape[2])
    kpe = np.array([kv.kpe[page, slot].astype(np.float64) for page, slot in rows]).reshape(count, kv.kpe.shape[2])
    return ckv, kpe


def dense_attention(
    visibility: Any,
    num_nodes: int,
    q_nope: Any,
    q_pe: Any,
    ckv: Any,
    kpe: Any,
    context: int,
    sm_scale: float,
    keys: str = "all",
) -> tuple[Any, Any]:
    """Return float64 out (N, H, C) and lse (N, H) of one request, one row and one key at a time.

    Parameters
    ----------
    visibility : bool array, shape (N, N)
    num_nodes : int
        Rows and columns from here on are ignored.
    q_nope, q_pe : array, shape (N, H, C) and (N, H, R)
    ckv, kpe : float64 array, shape (context + num_nodes, C) and (context + num_nodes, R)
        Logical rows: context, then the keys of the nodes.
    keys : {"all", "context", "tree"}
    """
    size, heads, width = q_nope.shape
    out = np.zeros((size, heads, width))
    lse = np.full((size, heads), -np.inf)
    for node in range(num_nodes):
        seen = [] if keys == "tree" else list(range(context))
        if keys != "context":
            seen += [context + j for j in range(num_nodes) if visibility[node][j]]
        if not seen:
            continue
        for head in range(heads):
            nope, rope = q_nope[node, head].astype(np.float64), q_pe[node, head].astype(np.float64)
            scores = [sm_scale * (float(nope @ ckv[j]) + float(rope @ kpe[j])) for j in seen]
            top = max(scores)
            total = math.fsum(math.exp(score - top) for score in scores)
            lse[node, head] = top + math.log(total)
            for j, score in zip(seen, scores, strict=True):
                out[node, head] += math.exp(score - top) / total * ckv[j]
    return out, lse


def paged_attention(tree: Any, q_nope: Any, q_pe: Any, kv: Any, sm_scale: float, keys: str = "all") -> tuple[Any, Any]:
    """Return float64 out and lse of a batch or of one request, from a paged cache and a visibility or tree.

    Padding rows give out 0 and lse -inf.
    """
    batched = np.ndim(tree.num_nodes) == 1
    counts, lens = np.atleast_1d(tree.num_nodes), np.atleast_1d(kv.context_lens)
    bits = tree.visibility_bits if batched else tree.visibility_bits[None]
    nope, rope = (q_nope, q_pe) if batched else (q_nope[None], q_pe[None])
    out = np.zeros(nope.shape)
    lse = np.full(nope.shape[:-1], -np.inf)
    for request, (count, context) in enumerate(zip(counts.tolist(), lens.tolist(), strict=True)):
        visible = [[bool(int(bits[request, i, j // 32]) >> (j % 32) & 1) for j in range(count)] for i in range(count)]
        ckv, kpe = gather(kv, request, context + (count if keys != "context" else 0))
        out[request], lse[request] = dense_attention(
            visible, count, nope[request], rope[request], ckv, kpe, context, sm_scale, keys
        )
    return (out, lse) if batched else (out[0], lse[0])


# ---- targets, accept and commit ----


def lowest_best_id(row: Any) -> int:
    """Return the first id whose logit no other exceeds, -1 for a row with NaN or of -inf alone."""
    values = [float(value) for value in row]
    if any(map(math.isnan, values)) or max(values) == -math.inf:
        return -1
    return values.index(max(values))


def walk_parents(parents: Any, token_ids: Any, targets: Any, num_nodes: int) -> tuple[list[int], int]:
    """Return the accepted nodes (root first) and the bonus token, by scanning the parents array at each step."""
    if num_nodes == 0:
        return [], -1
    path = [0]
    while True:
        token = int(targets[path[-1]])
        match = [i for i in range(1, num_nodes) if parents[i] == path[-1] and token_ids[i] == token and token >= 0]
        if not match:
            return path, token if token >= 0 else -1
        path.append(match[0])


def walk_links(
    first_child: Any, next_sibling: Any, token_ids: Any, targets: Any, num_nodes: int
) -> tuple[list[int], int]:
    """Return the same as `walk_parents`, along the child and sibling links."""
    path: list[int] = []
    node = 0 if num_nodes else -1
    token = -1
    while node >= 0:
        path.append(node)
        token = max(int(targets[node]), -1)
        node = int(first_child[node])
        while node >= 0 and (token < 0 or token_ids[node] != token):
            node = int(next_sibling[node])
    return path, token


def committed(kv: Any, request: int, accepted: list[int]) -> tuple[Any, Any]:
    """Return the logical rows of one request after the commit: the context, then the accepted nodes' rows."""
    context = int(np.atleast_1d(kv.context_lens)[request])
    positions = [*range(context), *(context + node for node in accepted)]
    rows = [logical_row(kv, request, position) for position in positions]
    ckv = np.array([kv.ckv[page, slot] for page, slot in rows], kv.ckv.dtype).reshape(len(rows), kv.ckv.shape[2])
    kpe = np.array([kv.kpe[page, slot] for page, slot in rows], kv.kpe.dtype).reshape(len(rows), kv.kpe.shape[2])
    return ckv, kpe
