"""Checks by value behind the containers' `validate()`; every array is a NumPy array here."""

from typing import Any

import numpy as np

from ddtree_cupy._check import FLOATS_AND_F64, Checker
from ddtree_cupy.containers import topology
from ddtree_cupy.errors import ArgumentError

Array = Any


def at_least(function: str, name: str, value: Any, low: int) -> None:
    """Raise unless `value` is an integer >= `low`."""
    Checker(function).integer(name, value, low=low)


def parent_order(function: str, parents: Array, num_nodes: Array) -> None:
    """Raise unless parents[b, 0] = -1, 0 <= parents[b, i] < i below `num_nodes[b]`, and -1 from there on."""
    index = np.arange(parents.shape[1])
    valid = index < num_nodes[:, None]
    inner = valid & (index > 0)
    bad = (inner & ((parents < 0) | (parents >= index))) | (~inner & (parents != -1))
    if bad.any():
        request, node = np.argwhere(bad)[0]
        wanted = f"0 <= parent < {node}" if inner[request, node] else "-1 (root or padding)"
        raise ArgumentError(
            f"{function}: `parents`[{node}] of request {request} is {parents[request, node]}, expected {wanted}"
        )


def _first_bad(function: str, name: str, bad: Array, array: Array, wanted: str) -> None:
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ArgumentError(f"{function}: `{name}`{list(where)} is {array[where]}, expected {wanted}")


def draft_tree(tree: Any) -> None:
    """Check a DraftTree."""
    function = "DraftTree"
    check = Checker(function)
    lead = ("batch",) if tree.token_ids.ndim == 2 else ()
    for name in ("token_ids", "parents", "depths", "first_child", "next_sibling"):
        check.array(name, getattr(tree, name), (*lead, "num_nodes"), ("int32",))
    for name in ("num_nodes", "status"):
        check.array(name, getattr(tree, name), lead, ("int32",))
    capacity = tree.token_ids.shape[-1]
    words = topology.words_per_row(capacity)
    check.array("visibility_bits", tree.visibility_bits, (*lead, "num_nodes", words), ("uint32",))
    if tree.path_scores is not None:
        check.array("path_scores", tree.path_scores, (*lead, "num_nodes"), ("float64",))

    if not lead:
        tree = tree.with_batch()
    counts = tree.num_nodes
    _first_bad(function, "num_nodes", (counts < 0) | (counts > capacity), counts, f"0..{capacity}")
    _first_bad(function, "status", (tree.status & ~1) != 0, tree.status, "bit 0 alone, or 0")
    parent_order(function, tree.parents, counts)
    valid = np.arange(capacity) < counts[:, None]
    _first_bad(function, "token_ids", valid != (tree.token_ids >= 0), tree.token_ids, ">= 0, and -1 for padding")
    _distinct_siblings(tree, counts)

    expected = topology.derive_topology(tree.parents, counts)
    for name, wanted in expected._asdict().items():
        array = getattr(tree, name)
        bad = array != wanted
        if bad.any():
            where = tuple(np.argwhere(bad)[0])
            _first_bad(function, name, bad, array, f"{wanted[where]}, which follows from `parents`")
    if tree.path_scores is not None:
        _path_scores(tree.path_scores, tree.parents, valid)


def _distinct_siblings(tree: Any, counts: Array) -> None:
    for request, count in enumerate(counts):
        seen: dict[tuple[int, int], int] = {}
        edges = zip(tree.parents[request, 1:count].tolist(), tree.token_ids[request, 1:count].tolist(), strict=True)
        for node, edge in enumerate(edges, start=1):
            if edge in seen:
                raise ArgumentError(
                    f"DraftTree: `token_ids`[{node}] of request {request} repeats token {edge[1]} of its sibling "
                    f"{seen[edge]}; the children of a node must have distinct tokens"
                )
            seen[edge] = node


def _path_scores(scores: Array, parents: Array, valid: Array) -> None:
    _first_bad("DraftTree", "path_scores", np.isnan(scores), scores, "a number")
    _first_bad("DraftTree", "path_scores", valid != (scores > -np.inf), scores, "finite, and -inf for padding")
    if valid.any():
        roots = scores[:, :1]
        _first_bad("DraftTree", "path_scores", valid[:, :1] & (roots != 0), roots, "0 at the root")
    of_parent = np.take_along_axis(scores, np.maximum(parents, 0), axis=1)
    rises = valid & (parents >= 0) & (scores > of_parent)
    _first_bad("DraftTree", "path_scores", rises, scores, "at most the score of its parent")


def visibility(container: Any) -> None:
    """Check a Visibility."""
    check = Checker("Visibility")
    lead = ("batch",) if container.visibility_bits.ndim == 3 else ()
    capacity = container.visibility_bits.shape[-2]
    axes = (*lead, capacity, topology.words_per_row(capacity))
    check.array("visibility_bits", container.visibility_bits, axes, ("uint32",))
    check.array("num_nodes", container.num_nodes, lead, ("int32",))
    counts = np.atleast_1d(container.num_nodes)
    _first_bad("Visibility", "num_nodes", (counts < 0) | (counts > capacity), counts, f"0..{capacity}")


def candidates(container: Any) -> None:
    """Check Candidates."""
    check = Checker("Candidates")
    lead = ("batch",) if container.lse.ndim == 2 else ()
    check.array("token_ids", container.token_ids, (*lead, "draft_len", "candidates"), ("int32",))
    check.array("logits", container.logits, (*lead, "draft_len", "candidates"), ("float32", "float64"))
    check.array("lse", container.lse, (*lead, "draft_len"), (container.logits.dtype.name,))
    ids, logits = container.token_ids, container.logits
    _first_bad("Candidates", "logits", np.isnan(logits) | (logits == np.inf), logits, "a number below +inf")
    _first_bad("Candidates", "token_ids", (ids < 0) != (logits == -np.inf), ids, "-1 exactly where the logit is -inf")
    _first_bad("Candidates", "token_ids", ids < -1, ids, "-1 or a token id")
    _first_bad("Candidates", "lse", container.lse == np.inf, container.lse, "finite, -inf or NaN")
    bad_rows = np.isnan(container.lse)[..., None] & (ids >= 0)
    _first_bad("Candidates", "token_ids", bad_rows, ids, "-1 in a bad row, whose lse is NaN")
    ordered = np.sort(ids, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    _first_bad("Candidates", "token_ids", twice, ordered[..., 1:], "distinct ids in a row")
    if ids.shape[-1]:
        below = container.lse < logits[..., 0]
        _first_bad("Candidates", "lse", below, container.lse, "at least the largest logit of the row")
    if ids.shape[-1] > 1:
        later, order = logits[..., 1:], "logit descending, then token id ascending"
        tie = (logits[..., :-1] == later) & (ids[..., 1:] >= 0)
        unordered = (logits[..., :-1] < later) | (tie & (ids[..., :-1] >= ids[..., 1:]))
        _first_bad("Candidates", "logits", unordered, later, f"{order}; Candidates.from_topk sorts")


def paged_kv(kv: Any) -> None:
    """Check a PagedKV whose tables are on the host (the pool may be anywhere)."""
    function = "PagedKV"
    check = Checker(function)
    check.array("ckv", kv.ckv, ("num_pages", "page_size", "head_dim_ckv"), FLOATS_AND_F64, last_contiguous=True)
    check.array("kpe", kv.kpe, ("num_pages", "page_size", "head_dim_kpe"), FLOATS_AND_F64, last_contiguous=True)
    check.same_dtype(ckv=kv.ckv, kpe=kv.kpe)
    lead = ("batch",) if kv.page_table.ndim == 2 else ()
    check.array("page_table", kv.page_table, (*lead, "max_pages"), ("int32",))
    check.array("context_lens", kv.context_lens, lead, ("int32",))
    num_pages, page_size = kv.ckv.shape[:2]
    if page_size < 1:
        raise ArgumentError(f"{function}: the page size is {page_size}, expected at least 1")

    table = np.atleast_2d(kv.page_table)
    lens = np.atleast_1d(kv.context_lens)
    limit = min(kv.max_context, table.shape[1] * page_size)
    _first_bad(function, "context_lens", (lens < 0) | (lens > limit), lens, f"0..{limit} (table and max_context)")
    first_position = np.arange(table.shape[1]) * page_size
    needed = first_position < lens[:, None]
    _first_bad(function, "page_table", (table >= num_pages) | (table < -1), table, f"-1..{num_pages - 1}")
    _first_bad(function, "page_table", needed & (table < 0), table, "a page, since it covers context")
    _shared_writable_pages(table, first_position + page_size > lens[:, None])


def _shared_writable_pages(table: Array, writable: Array) -> None:
    uses = np.bincount(table[table >= 0].ravel()) if (table >= 0).any() else np.zeros(0, int)
    shared = writable & (table >= 0)
    shared[shared] = uses[table[shared]] > 1
    _first_bad(
        "PagedKV",
        "page_table",
        shared,
        table,
        "a page of its own, since it covers positions >= context_len that this request writes",
    )


def accept_result(result: Any) -> None:
    """Check an AcceptResult."""
    check = Checker("AcceptResult")
    lead = ("batch",) if result.accepted.ndim == 2 else ()
    check.array("accepted", result.accepted, (*lead, "num_nodes"), ("int32",))
    check.array("num_accepted", result.num_accepted, lead, ("int32",))
    check.array("bonus_token", result.bonus_token, lead, ("int32",))
    accepted = np.atleast_2d(result.accepted)
    inactive = (result.num_accepted < 0) & (result.bonus_token != -1)
    _first_bad("AcceptResult", "bonus_token", inactive, result.bonus_token, "-1 for an inactive request")
    capacity = accepted.shape[1]
    counts = np.atleast_1d(result.num_accepted)
    _first_bad("AcceptResult", "num_accepted", (counts < -1) | (counts >= max(capacity, 1)), counts, "-1..num_nodes-1")
    used = np.arange(capacity) <= counts[:, None]
    wrong = np.where(used, (accepted < 0) | (accepted >= capacity), accepted != -1)
    _first_bad("AcceptResult", "accepted", wrong, accepted, "node indices, then -1")
    if capacity:
        _first_bad("AcceptResult", "accepted", used[:, 0] & (accepted[:, 0] != 0), accepted[:, 0], "0, the root, first")
    falls = used[:, 1:] & (np.diff(accepted, axis=1) <= 0)
    _first_bad("AcceptResult", "accepted", falls, accepted[:, 1:], "ascending node indices down the path")
