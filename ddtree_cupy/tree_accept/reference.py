"""NumPy reference of tree_accept: the target's tokens, the longest verified path, and the cache after it.

Arguments are taken as checked by `api.py`, where the public docstrings live. Every function here is batched:
the leading axis B is always present.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ddtree_cupy.containers import AcceptResult, DraftTree, PagedKV
from ddtree_cupy.errors import ArgumentError

Array = Any


VALUES_AT_ONCE = 1 << 20  # rows of logits are widened in blocks of about this many values
SMALLEST_NORMAL = float(np.finfo(np.float32).smallest_normal)


def greedy_targets(target_logits: Array, *, num_nodes: Array) -> Array:
    """Argmax of every valid row, the lowest id on ties, -1 for rows without a maximum; see `api.greedy_targets`."""
    batch, capacity, vocab_size = target_logits.shape
    token_ids = np.full((batch, capacity), -1, np.int32)
    if vocab_size == 0:
        return token_ids
    block = max(1, VALUES_AT_ONCE // vocab_size)
    for b in range(batch):
        for start in range(0, num_nodes[b], block):
            part = slice(start, min(start + block, num_nodes[b]))
            rows = target_logits[b, part]
            rows = rows.astype(np.float32) if rows.dtype.itemsize == 2 else rows  # argmax of 16-bit floats is slow
            best = rows.argmax(axis=1)  # the first NaN wins
            largest = np.take_along_axis(rows, best[:, None], axis=1)[:, 0]
            token_ids[b, part] = np.where(largest > -np.inf, best, -1)  # false for NaN too
    return token_ids


def sample_targets(target_logits: Array, uniforms: Array, *, temperature: Array, num_nodes: Array) -> Array:
    """Invert the cumulative distribution of every valid row at its uniform; see `api.sample_targets`."""
    batch, capacity, _ = target_logits.shape
    token_ids = np.full((batch, capacity), -1, np.int32)
    for b in range(batch):
        for node in range(num_nodes[b]):
            logits = target_logits[b, node].astype(np.float64)
            if target_logits.dtype != np.float64:
                logits[np.abs(logits) < SMALLEST_NORMAL] = 0.0
            largest = logits.max(initial=-np.inf)
            if not np.isfinite(largest):  # NaN, +inf, or nothing above -inf
                continue
            with np.errstate(over="ignore"):  # a quotient of -inf is right: its weight is 0
                weights = np.exp((logits - largest) / temperature[b])
            cumulative = np.cumsum(weights)
            chosen = np.searchsorted(cumulative, uniforms[b, node] * cumulative[-1], side="right")
            # u * total may round up to total: the last id with any weight is then the one
            token_ids[b, node] = chosen if chosen < weights.size else np.flatnonzero(weights)[-1]
    return token_ids


def accept(tree: DraftTree, target_token_ids: Array) -> AcceptResult:
    """Walk from the root along the target's own tokens; see `api.accept`."""
    batch, capacity = tree.token_ids.shape
    accepted = np.full((batch, capacity), -1, np.int32)
    num_accepted = np.full(batch, -1, np.int32)
    bonus_token = np.full(batch, -1, np.int32)
    for b in range(batch):
        if tree.num_nodes[b] == 0:
            continue
        node, length = 0, 0
        while node >= 0:
            accepted[b, length] = node
            length += 1
            wanted = int(target_token_ids[b, node])
            child = int(tree.first_child[b, node]) if wanted >= 0 else -1
            while child >= 0 and tree.token_ids[b, child] != wanted:
                child = int(tree.next_sibling[b, child])
            node = child
        num_accepted[b] = length - 1
        bonus_token[b] = max(wanted, -1)
    return AcceptResult(accepted, num_accepted, bonus_token)


def commit_kv(caches: Sequence[PagedKV], result: AcceptResult) -> tuple[PagedKV, ...]:
    """Move the accepted rows right behind the context of every cache; see `api.commit_kv`."""
    advance = (result.num_accepted + 1).astype(np.int32)  # the root counts; 0 for an inactive request
    places = []  # all of them first, so that a bad page table does not leave half a move
    for kv in caches:
        if ((advance > 0) & (kv.context_lens + advance > kv.max_context)).any():
            raise ArgumentError(
                f"commit_kv: `kv` would hold {(kv.context_lens + advance).tolist()} positions, its `max_context` is "
                f"{kv.max_context}"
            )
        for b, count in enumerate(advance):
            source = kv.locate("commit_kv", kv.context_lens[b] + result.accepted[b, :count], b)
            target = kv.locate("commit_kv", kv.context_lens[b] + np.arange(count), b)
            places.append((kv, source, target))

    # all rows are read first, as layers may share memory through different views
    rows = [(pool, target, pool[source]) for kv, source, target in places for pool in (kv.ckv, kv.kpe)]
    for pool, target, values in rows:
        pool[target] = values
    return tuple(replace(kv, context_lens=kv.context_lens + advance) for kv in caches)
