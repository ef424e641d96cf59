"""What is measured: sizes, the arrays made from them, and the bytes and operations no version can avoid."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from ddtree_cupy.containers import DraftTree
from ddtree_cupy.tree_attention.versions import VERSIONS

Array = Any

HEAD_DIM_CKV, HEAD_DIM_KPE, PAGE_SIZE = 512, 64, 64
VOCAB_SIZE, DRAFT_LEN = 163_840, 15

# (requests, heads, nodes, context) of the verification passes that published kernels are compared on
ATTENTION_SIZES = (
    (1, 8, 64, 8_192),
    (1, 8, 65, 8_192),
    (1, 8, 64, 32_768),
    (1, 8, 64, 131_072),
    (1, 64, 64, 1_024),
    (1, 64, 64, 8_192),
    (1, 64, 64, 32_768),
    (1, 64, 64, 131_072),
    (1, 128, 64, 8_192),
    (1, 128, 64, 131_072),
    (8, 8, 64, 8_192),
    (32, 8, 64, 4_096),
    (8, 64, 64, 8_192),
)
# what a pass costs by its nodes, root included: the rows of explore's cost table. Powers of two fill v3_mma's row
# tiles, one more begins another.
TREE_SIZES = tuple(
    (1, heads, nodes, context)
    for heads in (8, 64)
    for context in (8_192, 131_072)
    for nodes in (1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257)
)
# what time does over one size while the others rest: edges of row tiles and key tiles, odd heads, long contexts
CURVE_SIZES = tuple(
    dict.fromkeys(
        (
            *((1, heads, n, 8_192) for heads in (8, 64) for n in (1, 4, 8, 9, 16, 32, 63, 64, 65, 127, 128, 129, 256)),
            *((1, heads, 64, 8_192) for heads in (1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 63, 64, 65, 96, 127, 128)),
            *((1, heads, 64, 2**power) for heads in (8, 64) for power in range(7, 19)),
            *((1, heads, 64, context) for heads in (8, 64) for context in (8_127, 8_128, 8_129, 8_193)),
            *((batch, 8, 64, 8_192) for batch in (1, 2, 3, 4, 8, 16, 32, 64)),
        )
    )
)
VARIANTS = tuple(reversed(VERSIONS))  # from the readable version to the one that "auto" prefers


@dataclass(frozen=True)
class Case:
    """One row of a table.

    Attributes
    ----------
    op, name, variant : str
    bytes_moved : int
        Each input read once, each output written once.
    flops : int
        Multiplications and additions over all pairs of query row and key, masked ones included (the convention of
        the published tables); 0 for memory-bound ops.
    visible_flops : int
        The same over visible pairs only.
    prepare : callable
        Makes the arrays on the GPU and returns a `Prepared`.
    """

    op: str
    name: str
    variant: str
    bytes_moved: int
    flops: int
    visible_flops: int
    prepare: Callable[[], "Prepared"]


@dataclass(frozen=True)
class Prepared:
    """A case with its arrays in place.

    Attributes
    ----------
    run : callable
        One call into preallocated results, as it can be captured in a graph.
    gate : callable
        Raises AssertionError unless the results of the last `run` agree with the reference.
    """

    run: Callable[[], None]
    gate: Callable[[], None]


def all_cases(pattern: str = "", *, tree_sizes: bool = False, curves: bool = False) -> list[Case]:
    """Return the cases whose "op name variant" holds `pattern`.

    With `tree_sizes` those of tree_attention by nodes, with `curves` by nodes, heads, context and batch in turn.
    """
    if tree_sizes or curves:
        any_length = tuple(name for name in VARIANTS if VERSIONS[name].TRAITS.any_length)
        cases = list(_attention_cases(any_length, CURVE_SIZES if curves else TREE_SIZES))
    else:
        cases = [*_build_cases(), *_attention_cases(VARIANTS, ATTENTION_SIZES), *_accept_cases()]
    return [case for case in cases if pattern in f"{case.op} {case.name} {case.variant}"]


def _attention_cases(variants: tuple[str, ...], sizes: tuple[tuple[int, int, int, int], ...]) -> Iterator[Case]:
    from ddtree_cupy.bench.attention import prepare_attention

    for variant in variants:
        for batch, heads, nodes, context in sizes:
            rows, width = batch * heads * nodes, HEAD_DIM_CKV + HEAD_DIM_KPE
            depth_sum = int(random_tree(nodes).depths.sum()) + nodes
            yield Case(
                op="tree_attention",
                name=f"B {batch} H {heads} N {nodes} T {context}",
                variant=variant,
                bytes_moved=2 * width * batch * (context + nodes) + 2 * rows * (width + HEAD_DIM_CKV) + 4 * rows,
                flops=2 * (width + HEAD_DIM_CKV) * rows * (context + nodes),
                visible_flops=2 * (width + HEAD_DIM_CKV) * batch * heads * (nodes * context + depth_sum),
                prepare=partial(prepare_attention, batch, heads, nodes, context, variant),
            )


def random_tree(nodes: int, seed: int = 0) -> DraftTree:
    """Return a tree whose nodes hang under random earlier ones, as a best-first tree's do: near the root more often."""
    rng = np.random.default_rng(seed)
    parents = [-1] + [int(i * rng.random() ** 1.5) for i in range(1, nodes)]
    return DraftTree.from_parents(np.arange(nodes), parents)


def _build_cases() -> Iterator[Case]:
    from ddtree_cupy.bench.others import prepare_best_first, prepare_top_candidates

    for batch, budget in ((1, 16), (1, 64), (1, 256), (1, 1_024), (8, 64), (64, 64)):
        logits_bytes = 2 * batch * DRAFT_LEN * VOCAB_SIZE
        yield Case(
            op="top_candidates",
            name=f"B {batch} L {DRAFT_LEN} V {VOCAB_SIZE} k {budget}",
            variant="bfloat16",
            bytes_moved=logits_bytes + 8 * batch * DRAFT_LEN * budget,
            flops=0,
            visible_flops=0,
            prepare=partial(prepare_top_candidates, batch, budget),
        )
        words = (budget + 32) // 32
        yield Case(
            op="best_first_tree",
            name=f"B {batch} L {DRAFT_LEN} budget {budget}",
            variant="float64 scores",
            bytes_moved=batch * (8 * DRAFT_LEN * budget + (budget + 1) * (28 + 4 * words)),
            flops=0,
            visible_flops=0,
            prepare=partial(prepare_best_first, batch, budget),
        )


def _accept_cases() -> Iterator[Case]:
    from ddtree_cupy.bench.others import prepare_commit, prepare_targets

    for batch, nodes in ((1, 65), (8, 65)):
        read = 2 * batch * nodes * VOCAB_SIZE
        for op in ("greedy_targets", "sample_targets"):
            yield Case(
                op=op,
                name=f"B {batch} N {nodes} V {VOCAB_SIZE}",
                variant="bfloat16",
                bytes_moved=read,
                flops=0,
                visible_flops=0,
                prepare=partial(prepare_targets, op, batch, nodes),
            )
    for batch in (1, 64):
        width = 2 * (HEAD_DIM_CKV + HEAD_DIM_KPE)
        yield Case(
            op="accept and commit_kv",
            name=f"B {batch} N 65, chain of 9 accepted, one layer",
            variant="bfloat16",
            bytes_moved=batch * 9 * 2 * width,
            flops=0,
            visible_flops=0,
            prepare=partial(prepare_commit, batch),
        )


def bfloat16_normal(seed: int, shape: tuple[int, ...], scale: float = 1.0) -> Array:
    """Return a CuPy array of random normal bfloat16 values."""
    import cupy

    values = cupy.random.default_rng(seed).standard_normal(shape, dtype=cupy.float32)
    return (scale * values).astype(ml_dtypes.bfloat16)


def to_device(container: Any) -> Any:
    """Return a container with its arrays copied to the GPU."""
    import cupy

    return container.map(cupy.asarray)
