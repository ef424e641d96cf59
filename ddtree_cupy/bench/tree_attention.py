"""The cases of tree_attention, one for each size and kernel version; floats are judged by the library's rule."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ddtree_cupy import tree_attention, workspace_bytes
from ddtree_cupy.bench.case import Case, Prepared, bfloat16_normal, random_tree, repeated, to_device
from ddtree_cupy.bench.sizes import ATTENTION_SIZES, HEAD_DIM_CKV, HEAD_DIM_KPE, PAGE_SIZE, attention_name
from ddtree_cupy.containers import PagedKV
from ddtree_cupy.testing import assert_close, lse_floor, out_floor
from ddtree_cupy.tree_attention import reference
from ddtree_cupy.tree_attention.versions import VERSIONS

SM_SCALE = 192**-0.5


def cases(sizes: Iterable[tuple[int, int, int, int]] = ATTENTION_SIZES, *, any_length: bool = False) -> Iterator[Case]:
    """Yield every size for every version, the one that "auto" prefers last.

    With `any_length` only for versions that take any number of keys.
    """
    width = HEAD_DIM_CKV + HEAD_DIM_KPE
    for variant in reversed(VERSIONS):
        for batch, heads, nodes, context in sizes if VERSIONS[variant].TRAITS.any_length or not any_length else ():
            rows, depth_sum = batch * heads * nodes, int(random_tree(nodes).depths.sum()) + nodes
            yield Case(
                op="tree_attention",
                name=attention_name(batch, heads, nodes, context),
                variant=variant,
                prepare=partial(prepare_attention, batch, heads, nodes, context, variant),
                bytes_moved=2 * width * batch * (context + nodes) + 2 * rows * (width + HEAD_DIM_CKV) + 4 * rows,
                flops=2 * (width + HEAD_DIM_CKV) * rows * (context + nodes),
                visible_flops=2 * (width + HEAD_DIM_CKV) * batch * heads * (nodes * context + depth_sum),
            )


def prepare_attention(batch: int, heads: int, nodes: int, context: int, variant: str) -> Prepared:
    """Make one verification pass: shuffled pages of one 576-wide buffer, the same tree in every request."""
    import cupy

    max_pages = -(-(context + nodes) // PAGE_SIZE)
    num_pages = batch * max_pages
    pool = bfloat16_normal(1, (num_pages, PAGE_SIZE, HEAD_DIM_CKV + HEAD_DIM_KPE))
    order = np.random.default_rng(2).permutation(num_pages).astype(np.int32).reshape(batch, max_pages)
    kv = PagedKV(
        pool[..., :HEAD_DIM_CKV],
        pool[..., HEAD_DIM_CKV:],
        cupy.asarray(order),
        cupy.full(batch, context, np.int32),
        max_context=context,
    )
    one = random_tree(nodes)
    tree = to_device(repeated(one, batch))
    q_nope = bfloat16_normal(3, (batch, nodes, heads, HEAD_DIM_CKV))
    q_pe = bfloat16_normal(4, (batch, nodes, heads, HEAD_DIM_KPE))
    out = cupy.empty_like(q_nope), cupy.empty(q_nope.shape[:3], np.float32)
    options: dict[str, Any] = {"sm_scale": SM_SCALE, "variant": variant, "out": out}
    size = workspace_bytes(tree_attention, tree, q_nope, q_pe, kv, **options)
    options["workspace"] = cupy.empty(size, np.uint8)

    def run() -> None:
        tree_attention(tree, q_nope, q_pe, kv, checked=False, **options)

    def gate() -> None:
        """Judge the first and the last head of the last request by the float rule."""
        request, some = batch - 1, [0, heads - 1]
        pages = cupy.asnumpy(kv.page_table[request])
        rows = cupy.asnumpy(pool[kv.page_table[request]])
        table = np.arange(len(pages), dtype=np.int32)[None]
        host = replace(
            kv,
            ckv=rows[..., :HEAD_DIM_CKV],
            kpe=rows[..., HEAD_DIM_CKV:],
            page_table=table,
            context_lens=np.array([context], np.int32),
        )
        queries = [cupy.asnumpy(q[request : request + 1][:, :, some]) for q in (q_nope, q_pe)]
        arguments = (one.with_batch(), *queries, host)
        exact = reference.tree_attention(*arguments, sm_scale=SM_SCALE, compute_dtype=np.float64)
        plain = reference.tree_attention(*arguments, sm_scale=SM_SCALE, compute_dtype=np.float32)
        found = [cupy.asnumpy(array[request : request + 1][:, :, some]) for array in out]
        dtype = found[0].dtype
        floor = out_floor(dtype, exact[0], host.ckv)
        assert_close(found[0], exact[0], plain[0].astype(dtype), floor=floor, name="out")
        assert_close(found[1], exact[1], plain[1], floor=lse_floor(exact[1]), name="lse")

    return Prepared(run, gate)
