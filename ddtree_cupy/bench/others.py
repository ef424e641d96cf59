"""The arrays and the gates of the tree_build and tree_accept cases; discrete results must be equal."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ddtree_cupy import accept, best_first_tree, commit_kv, greedy_targets, sample_targets, top_candidates
from ddtree_cupy.bench.cases import (
    DRAFT_LEN,
    HEAD_DIM_CKV,
    HEAD_DIM_KPE,
    PAGE_SIZE,
    VOCAB_SIZE,
    Prepared,
    bfloat16_normal,
    to_device,
)
from ddtree_cupy.containers import DraftTree, PagedKV
from ddtree_cupy.testing import assert_identical
from ddtree_cupy.tree_accept import reference as accept_reference
from ddtree_cupy.tree_build import best_first_tree_workspace_bytes, top_candidates_workspace_bytes
from ddtree_cupy.tree_build import reference as build_reference


def prepare_top_candidates(batch: int, k: int) -> Prepared:
    """Rows of random logits with the ties that bfloat16 brings."""
    import cupy

    logits = bfloat16_normal(5, (batch, DRAFT_LEN, VOCAB_SIZE), 4.0)
    workspace = cupy.empty(top_candidates_workspace_bytes(logits, k), np.uint8)
    run, last = _kept(lambda out: top_candidates(logits, k, out=out, workspace=workspace))

    def gate() -> None:
        wanted = build_reference.top_candidates(cupy.asnumpy(logits), k)
        assert_identical(last().token_ids, wanted.token_ids, name="token_ids")
        assert_identical(last().logits, wanted.logits, name="logits")

    return Prepared(run, gate)


def prepare_best_first(batch: int, budget: int) -> Prepared:
    """Trees from random candidates."""
    import cupy

    host = build_reference.top_candidates(_sharp_logits(batch), budget)
    candidates = to_device(host)
    roots = np.zeros(batch, np.int32)
    workspace = cupy.empty(best_first_tree_workspace_bytes(candidates, capacity=budget), np.uint8)
    options: dict[str, Any] = {"budget": budget, "root_token_ids": 0, "workspace": workspace}
    run, last = _kept(lambda out: best_first_tree(candidates, out=out, **options))

    def gate() -> None:
        budgets = np.full(batch, budget, np.int32)
        wanted = build_reference.best_first_tree(host, budgets=budgets, root_token_ids=roots, capacity=budget)
        assert_identical(last(), wanted)

    return Prepared(run, gate)


def prepare_targets(op: str, batch: int, nodes: int) -> Prepared:
    """Target logits of one tree a request."""
    import cupy

    logits = bfloat16_normal(6, (batch, nodes, VOCAB_SIZE), 4.0)
    counts = np.full(batch, nodes, np.int32)
    if op == "greedy_targets":
        run, last = _kept(lambda out: greedy_targets(logits, out=out))

        def gate() -> None:
            assert_identical(last(), accept_reference.greedy_targets(cupy.asnumpy(logits), num_nodes=counts))

        return Prepared(run, gate)

    uniforms = np.random.default_rng(7).random((batch, nodes))
    on_device = cupy.asarray(uniforms)
    run, last = _kept(lambda out: sample_targets(logits, on_device, temperature=1.0, out=out))

    def gate_draws() -> None:
        host = cupy.asnumpy(logits)
        wanted = accept_reference.sample_targets(host, uniforms, temperature=np.ones(batch), num_nodes=counts)
        different = np.argwhere(cupy.asnumpy(last()) != wanted)
        for b, node in different:  # legal only where the draw lies at an edge of the cumulative sum
            weights = np.exp(host[b, node].astype(np.float64) - host[b, node].astype(np.float64).max())
            cumulative = np.cumsum(weights)
            assert np.abs(cumulative - uniforms[b, node] * cumulative[-1]).min() <= 1e-6 * cumulative[-1]

    return Prepared(run, gate_draws)


def prepare_commit(batch: int) -> Prepared:
    """Accept a path of nine nodes and move their rows, for one layer."""
    import cupy

    nodes, context = 65, 1_000
    one = DraftTree.from_parents(np.arange(nodes), [-1] + [max(0, i - 3) for i in range(1, nodes)])
    host_tree = one.map(lambda array: np.repeat(array[None], batch, axis=0))
    path = [0]
    while len(path) < 9:
        path.append(int(one.first_child[path[-1]]))
    targets = np.full((batch, nodes), -1, np.int32)
    targets[:, path[:-1]] = path[1:]
    max_pages = -(-(context + nodes) // PAGE_SIZE)
    pool = bfloat16_normal(8, (batch * max_pages, PAGE_SIZE, HEAD_DIM_CKV + HEAD_DIM_KPE))
    table = np.arange(batch * max_pages, dtype=np.int32).reshape(batch, max_pages)
    lens = np.full(batch, context, np.int32)
    kv = PagedKV(pool[..., :HEAD_DIM_CKV], pool[..., HEAD_DIM_CKV:], cupy.asarray(table), cupy.asarray(lens))
    tree, on_device = to_device(host_tree), cupy.asarray(targets)
    result = accept(tree, on_device)
    kv_lens = cupy.empty_like(kv.context_lens)
    before = pool.copy()

    def run() -> None:
        accept(tree, on_device, out=result)
        commit_kv(kv, result, out=kv_lens)

    def gate() -> None:
        pool[...] = before  # a second run moves rows that the first has moved
        run()
        wanted = accept_reference.accept(host_tree, targets)
        assert_identical(result, wanted)
        expected = cupy.asnumpy(before)
        host = PagedKV(expected[..., :HEAD_DIM_CKV], expected[..., HEAD_DIM_CKV:], table, lens)
        (moved,) = accept_reference.commit_kv([host], wanted)
        assert_identical(pool, expected)
        assert_identical(kv_lens, moved.context_lens)

    return Prepared(run, gate)


def _kept(call: Callable[[Any], Any]) -> tuple[Callable[[], None], Callable[[], Any]]:
    """Return `run`, which writes into the arrays of the first call, and a function that returns them."""
    result = call(None)

    def run() -> None:
        call(result)

    return run, lambda: result


def _sharp_logits(batch: int) -> Any:
    """Logits as a drafter's are: a few likely tokens a depth, flatter with depth."""
    rng = np.random.default_rng(9)
    scale = np.linspace(6.0, 2.0, DRAFT_LEN)[None, :, None]
    return (scale * rng.standard_normal((batch, DRAFT_LEN, 4_096))).astype(np.float32)
