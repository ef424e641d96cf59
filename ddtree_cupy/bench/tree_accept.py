"""The cases of tree_accept; discrete results must be equal."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from ddtree_cupy import accept, commit_kv, greedy_targets, sample_targets
from ddtree_cupy.bench.case import Case, Prepared, bfloat16_normal, kept, repeated, to_device
from ddtree_cupy.bench.sizes import (
    COMMIT_SIZES,
    HEAD_DIM_CKV,
    HEAD_DIM_KPE,
    LAYERS,
    PAGE_SIZE,
    TARGET_SIZES,
    VOCAB_SIZE,
)
from ddtree_cupy.containers import AcceptResult, DraftTree, PagedKV
from ddtree_cupy.testing import assert_identical
from ddtree_cupy.tree_accept import reference


def cases() -> Iterator[Case]:
    """Yield both ways to choose targets, then what follows them."""
    for batch, nodes in TARGET_SIZES:
        for op in ("greedy_targets", "sample_targets"):
            yield Case(
                op=op,
                name=f"B {batch} N {nodes} V {VOCAB_SIZE}",
                variant="bfloat16",
                prepare=partial(prepare_targets, op, batch, nodes),
                bytes_moved=2 * batch * nodes * VOCAB_SIZE,
            )
    for batch in COMMIT_SIZES:
        yield Case(
            op="accept and commit_kv",
            name=f"B {batch} N 65, chain of 9 accepted, one layer",
            variant="bfloat16",
            prepare=partial(prepare_commit, batch),
            bytes_moved=batch * 9 * 2 * 2 * (HEAD_DIM_CKV + HEAD_DIM_KPE),
        )
    for batch in COMMIT_SIZES:
        yield Case(
            op="commit_kv",
            name=f"B {batch} N 65, path of 16 nodes, {LAYERS} layers",
            variant="bfloat16",
            prepare=partial(prepare_layers, batch),
            bytes_moved=batch * LAYERS * 16 * 2 * 2 * (HEAD_DIM_CKV + HEAD_DIM_KPE),
        )


def prepare_targets(op: str, batch: int, nodes: int) -> Prepared:
    """Make target logits of one tree per request."""
    import cupy

    logits = bfloat16_normal(6, (batch, nodes, VOCAB_SIZE), 4.0)
    counts = np.full(batch, nodes, np.int32)
    if op == "greedy_targets":
        run, last = kept(lambda out: greedy_targets(logits, out=out))

        def gate() -> None:
            assert_identical(last(), reference.greedy_targets(cupy.asnumpy(logits), num_nodes=counts))

        return Prepared(run, gate)

    uniforms = np.random.default_rng(7).random((batch, nodes))
    on_device = cupy.asarray(uniforms)
    run, last = kept(lambda out: sample_targets(logits, on_device, temperature=1.0, out=out))

    def gate_draws() -> None:
        host = cupy.asnumpy(logits)
        wanted = reference.sample_targets(host, uniforms, temperature=np.ones(batch), num_nodes=counts)
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
    host_tree = repeated(one, batch)
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
        wanted = reference.accept(host_tree, targets)
        assert_identical(result, wanted)
        expected = cupy.asnumpy(before)
        host = PagedKV(expected[..., :HEAD_DIM_CKV], expected[..., HEAD_DIM_CKV:], table, lens)
        (moved,) = reference.commit_kv([host], wanted)
        assert_identical(pool, expected)
        assert_identical(kv_lens, moved.context_lens)

    return Prepared(run, gate)


def prepare_layers(batch: int, layers: int = LAYERS) -> Prepared:
    """Move the rows of every fourth node in all layers of a model, whose caches share tables and lengths."""
    import cupy

    nodes, context = 65, 100
    path = np.array([0, *range(4, nodes, 4)][:16])
    accepted = np.pad(path, (0, nodes - path.size), constant_values=-1).astype(np.int32)
    host_result = AcceptResult(
        np.repeat(accepted[None], batch, axis=0), np.full(batch, path.size - 1, np.int32), np.zeros(batch, np.int32)
    )
    max_pages = -(-(context + nodes) // PAGE_SIZE)
    pools = bfloat16_normal(9, (layers, batch * max_pages, PAGE_SIZE, HEAD_DIM_CKV + HEAD_DIM_KPE))
    table = np.arange(batch * max_pages, dtype=np.int32).reshape(batch, max_pages)
    lens = np.full(batch, context, np.int32)

    def caches(pools: Any, table: Any, lens: Any) -> list[PagedKV]:
        return [PagedKV(pool[..., :HEAD_DIM_CKV], pool[..., HEAD_DIM_CKV:], table, lens) for pool in pools]

    kv = caches(pools, cupy.asarray(table), cupy.asarray(lens))
    result = to_device(host_result)
    kv_lens = cupy.empty_like(kv[0].context_lens)
    before = pools.copy()

    def run() -> None:
        commit_kv(kv, result, out=kv_lens)

    def gate() -> None:
        pools[...] = before  # a second run moves rows that the first has moved
        run()
        expected = cupy.asnumpy(before)
        moved = reference.commit_kv(caches(expected, table, lens), host_result)
        assert_identical(pools, expected)
        assert_identical(kv_lens, moved[0].context_lens)

    return Prepared(run, gate)
