"""The cases of tree_build; discrete results must be equal."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from ddtree_cupy import best_first_tree, top_candidates, workspace_bytes
from ddtree_cupy.bench.case import Case, Prepared, bfloat16_normal, kept, to_device
from ddtree_cupy.bench.sizes import BUILD_SIZES, DRAFT_LEN, VOCAB_SIZE
from ddtree_cupy.testing import assert_identical
from ddtree_cupy.tree_build import reference


def cases() -> Iterator[Case]:
    """Yield both kernels of each size."""
    for batch, budget in BUILD_SIZES:
        yield Case(
            op="top_candidates",
            name=f"B {batch} L {DRAFT_LEN} V {VOCAB_SIZE} k {budget}",
            variant="bfloat16",
            prepare=partial(prepare_top_candidates, batch, budget),
            bytes_moved=batch * DRAFT_LEN * (2 * VOCAB_SIZE + 8 * budget),
        )
        words = (budget + 32) // 32
        yield Case(
            op="best_first_tree",
            name=f"B {batch} L {DRAFT_LEN} budget {budget}",
            variant="float64 scores",
            prepare=partial(prepare_best_first, batch, budget),
            bytes_moved=batch * (8 * DRAFT_LEN * budget + (budget + 1) * (28 + 4 * words)),
        )


def prepare_top_candidates(batch: int, k: int) -> Prepared:
    """Rows of random logits with the ties that bfloat16 brings."""
    import cupy

    logits = bfloat16_normal(5, (batch, DRAFT_LEN, VOCAB_SIZE), 4.0)
    workspace = cupy.empty(workspace_bytes(top_candidates, logits, k), np.uint8)
    run, last = kept(lambda out: top_candidates(logits, k, out=out, workspace=workspace))

    def gate() -> None:
        wanted = reference.top_candidates(cupy.asnumpy(logits), k)
        assert_identical(last().token_ids, wanted.token_ids, name="token_ids")
        assert_identical(last().logits, wanted.logits, name="logits")

    return Prepared(run, gate)


def prepare_best_first(batch: int, budget: int) -> Prepared:
    """Trees from random candidates."""
    import cupy

    host = reference.top_candidates(_sharp_logits(batch), budget)
    candidates = to_device(host)
    roots = np.zeros(batch, np.int32)
    options: dict[str, Any] = {"budget": budget, "root_token_ids": 0}
    options["workspace"] = cupy.empty(workspace_bytes(best_first_tree, candidates, **options), np.uint8)
    run, last = kept(lambda out: best_first_tree(candidates, out=out, **options))

    def gate() -> None:
        budgets = np.full(batch, budget, np.int32)
        wanted = reference.best_first_tree(host, budgets=budgets, root_token_ids=roots, capacity=budget)
        assert_identical(last(), wanted)

    return Prepared(run, gate)


def _sharp_logits(batch: int) -> Any:
    """Logits as a drafter's are: a few likely tokens a depth, flatter with depth."""
    rng = np.random.default_rng(9)
    scale = np.linspace(6.0, 2.0, DRAFT_LEN)[None, :, None]
    return (scale * rng.standard_normal((batch, DRAFT_LEN, 4_096))).astype(np.float32)
