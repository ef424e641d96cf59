"""Ragged, paged and poisoned inputs of tree attention, the dense answer, and the float rule between them.

A case is built twice over: once as dense rows and a boolean matrix a request, from which the answer follows by a
plain masked softmax, and once as pages, packed bits and padding, where everything that no query may see is poison.
"""

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from ddtree_cupy import DraftTree, PagedKV, Visibility
from ddtree_cupy.testing import assert_close, lse_floor, out_floor, tensor_core_matmul
from ddtree_cupy.tree_attention.versions import VERSIONS

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]
UNREADABLE_PAGE = 2**30


@dataclass(frozen=True)
class Case:
    """The arguments of one call, and per request the dense rows and who sees which row."""

    tree: Any
    q_nope: Any
    q_pe: Any
    kv: PagedKV
    sm_scale: float
    ckv_rows: list[Any]
    kpe_rows: list[Any]
    allowed: list[Any]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The positional arguments of `tree_attention`."""
        return self.tree, self.q_nope, self.q_pe, self.kv

    def contexts(self) -> list[int]:
        """Return the context length of every request."""
        return self.kv.context_lens.tolist()

    def with_values(self, **changes: Any) -> "Case":
        """Return a copy with other fields."""
        return replace(self, **changes)


def sizes_for(variant, *, page_size=16, **others):
    """Return dtype, head sizes and page size of a small case that a version takes; `others` where any will do."""
    traits = VERSIONS[variant].TRAITS
    sizes = others if traits.head_sizes is None else {"dtype": BFLOAT16, "head_dims": min(traits.head_sizes)}
    pages = traits.page_sizes
    fits = pages is None or page_size in pages
    return {**sizes, "page_size": page_size if fits else pages[page_size % len(pages)]}


def random_parents(rng, count):
    """Return parents of a random tree: parents[0] = -1 and 0 <= parents[i] < i."""
    return [-1] + [int(rng.integers(0, i)) for i in range(1, count)]


def ancestors_of(parents):
    """Return bool [n, n]: True at the node itself and at every node met on the way to the root."""
    visible = np.zeros((len(parents), len(parents)), bool)
    for node in range(len(parents)):
        step = node
        while step >= 0:
            visible[node, step] = True
            step = parents[step]
    return visible


def pack(visible, capacity, garbage=None):
    """Pack bool [n, n] into uint32 [capacity, W]; with a generator, rows and bits outside it hold garbage."""
    count, words = len(visible), -(-capacity // 32)
    bits = np.zeros((capacity, 32 * words), np.uint64)
    if garbage is not None:
        bits[:] = garbage.integers(0, 2, bits.shape)
        bits[:count, count:] = 1
    bits[:count, :count] = visible
    return (bits.reshape(capacity, words, 32) << np.arange(32, dtype=np.uint64)).sum(-1).astype(np.uint32)


def make_case(
    rng,
    visible,
    contexts,
    *,
    capacity=None,
    page_size=16,
    heads=2,
    head_dims=(32, 16),
    dtype=np.float32,
    poison=np.nan,
    sm_scale=192**-0.5,
    parents=None,
    scale=1.0,
):
    """Build a batched case from one boolean matrix and one context length a request.

    With `parents` (a list a request) the first argument is a DraftTree, else a bare Visibility. `poison=0` gives
    the clean twin of a poisoned case made from an equal generator.
    """
    counts = [len(matrix) for matrix in visible]
    capacity = max(counts) if capacity is None else capacity
    batch, (width, rope) = len(counts), head_dims
    clean = not np.isnan(poison)

    totals = [context + count if count else 0 for context, count in zip(contexts, counts, strict=True)]
    pages = [-(-total // page_size) for total in totals]
    pool_pages = sum(pages) + 3
    shuffled = rng.permutation(pool_pages).tolist()
    pool = np.full((pool_pages, page_size, width + rope), poison, dtype)
    table = np.full((batch, max([0, *pages]) + 1), 0 if clean else UNREADABLE_PAGE, np.int32)
    q_nope = np.full((batch, capacity, heads, width), poison, dtype)
    q_pe = np.full((batch, capacity, heads, rope), poison, dtype)
    bits = np.zeros((batch, capacity, -(-capacity // 32)), np.uint32)
    garbage_source = np.random.default_rng(1)

    ckv_rows, kpe_rows, allowed = [], [], []
    for b, (context, count, total) in enumerate(zip(contexts, counts, totals, strict=True)):
        rows = (scale * rng.standard_normal((context + count, width + rope))).astype(dtype)
        queries = rng.standard_normal((count, heads, width + rope)).astype(dtype)
        q_nope[b, :count], q_pe[b, :count] = queries[..., :width], queries[..., width:]
        for number in range(pages[b]):
            table[b, number] = shuffled.pop()
        for position in range(total):
            pool[table[b, position // page_size], position % page_size] = rows[position]
        bits[b] = pack(visible[b], capacity, None if clean else garbage_source)
        ckv_rows.append(rows[:, :width].astype(np.float64))
        kpe_rows.append(rows[:, width:].astype(np.float64))
        allowed.append(np.concatenate([np.ones((count, context), bool), np.asarray(visible[b], bool)], axis=1))

    num_nodes = np.array(counts, np.int32)
    if parents is None:
        tree = Visibility(bits, num_nodes)
    else:
        padded = np.full((batch, capacity), -1, np.int32)
        for b, row in enumerate(parents):
            padded[b, : counts[b]] = row
        token_ids = np.where(np.arange(capacity) < num_nodes[:, None], np.arange(capacity), -1)
        tree = replace(DraftTree.from_parents(token_ids, padded), visibility_bits=bits)
    kv = PagedKV(pool[..., :width], pool[..., width:], table, np.array(contexts, np.int32))
    return Case(tree, q_nope, q_pe, kv, sm_scale, ckv_rows, kpe_rows, allowed)


def random_visible(rng, count, density=0.4):
    """Return any boolean matrix; some rows see nothing."""
    visible = rng.random((count, count)) < density
    visible[rng.random(count) < 0.15] = False
    return visible


def tree_case(rng, counts, contexts, **options):
    """Return a case of random trees."""
    parents = [random_parents(rng, count) if count else [] for count in counts]
    visible = [ancestors_of(row) for row in parents]
    return make_case(rng, visible, contexts, parents=parents, **options)


def matrix_case(rng, counts, contexts, **options):
    """Return a case of random boolean matrices."""
    return make_case(rng, [random_visible(rng, count) for count in counts], contexts, **options)


def of_one_sign(case):
    """Return a case of one request whose values are about 16, so that their sums grow with the context."""
    ckv = (case.kv.ckv + 16).astype(case.kv.ckv.dtype)
    pages, slots = case.kv.locate("of_one_sign", np.arange(len(case.ckv_rows[0])), 0)
    return case.with_values(kv=replace(case.kv, ckv=ckv), ckv_rows=[ckv[pages, slots].astype(np.float64)])


def scores_of_v3(queries, keys):
    """Return float32 [n, h, t] as score warps sum it: tensor cores take the two halves of the dimensions apart.

    A half is the lower or the upper 32 of every 64 dimensions (v3_layout.cuh).
    """
    rows = queries.reshape(-1, queries.shape[-1])
    lower = np.arange(queries.shape[-1]) % 64 < 32
    halves = [tensor_core_matmul(rows[:, half], keys[:, half].T) for half in (lower, ~lower)]
    return (halves[0] + halves[1]).reshape(*queries.shape[:-1], len(keys))


def scores_of_v4(queries, keys):
    """Return float32 [n, h, t] as the score warpgroup sums it, in one chain: rope between the halves of the others."""
    rows, order = queries.reshape(-1, queries.shape[-1]), np.r_[0:256, 512:576, 256:512]
    return tensor_core_matmul(rows[:, order], keys[:, order].T).reshape(*queries.shape[:-1], len(keys))


SCORES = {"v3_mma": scores_of_v3, "v4_wgmma": scores_of_v4}  # of the versions on tensor cores


def weighted_sums(weights, values):
    """Return float32 [n, h, c] as tensor cores sum it: weights are rounded, an accumulator takes 1,024 steps."""
    rows = weights.astype(values.dtype).reshape(-1, len(values))
    folds = [slice(start, start + 16_384) for start in range(0, len(values), 16_384)]
    sums = sum(tensor_core_matmul(rows[:, fold], values[fold]) for fold in folds)
    return sums.reshape(*weights.shape[:-1], values.shape[1])


def attend_densely(q_nope, q_pe, ckv, kpe, allowed, sm_scale, dtype=np.float64, *, variant=None):
    """Return (out [n, H, C], lse [n, H]) of a plain masked softmax over dense rows.

    No sum has more than 1,024 keys, so that its error does not grow with the context; with a `variant`
    products are those of its tensor cores.
    """
    queries = np.concatenate([q_nope, q_pe], axis=-1)
    keys = np.concatenate([ckv, kpe], axis=-1).astype(queries.dtype)
    if variant is not None:
        products = SCORES[variant](queries, keys)
    else:
        products = np.einsum("nhc,tc->nht", queries.astype(dtype), keys.astype(dtype))
    scores = np.where(allowed[:, None, :], dtype(sm_scale) * products, dtype(-np.inf))
    values = keys[:, : ckv.shape[1]]
    out = np.zeros(q_nope.shape, dtype)
    lse = np.full(q_nope.shape[:2], -np.inf, dtype)
    seen = allowed.any(axis=1)
    if seen.any():
        scores = scores[seen]
        highest = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - highest)
        tiles = [slice(start, start + 1024) for start in range(0, len(keys), 1024)]
        total = sum(weights[..., tile].sum(axis=-1, keepdims=True) for tile in tiles)
        if variant is not None:
            out[seen] = weighted_sums(weights, values) / total
        else:
            shares, values = weights / total, values.astype(dtype)
            out[seen] = sum(np.einsum("nht,tc->nhc", shares[..., tile], values[tile]) for tile in tiles)
        lse[seen] = (highest + np.log(total))[..., 0]
    return out, lse


def expected(case, keys="all", dtype=np.float64, *, variant=None):
    """Return the batched answer of a case from its dense rows; padding rows are (0, -inf)."""
    out = np.zeros(case.q_nope.shape, dtype)
    lse = np.full(case.q_nope.shape[:-1], -np.inf, dtype)
    for b, allowed in enumerate(case.allowed):
        count, context = len(allowed), case.contexts()[b]
        part = {"all": slice(None), "context": slice(0, context), "tree": slice(context, None)}[keys]
        out[b, :count], lse[b, :count] = attend_densely(
            case.q_nope[b, :count],
            case.q_pe[b, :count],
            case.ckv_rows[b][part],
            case.kpe_rows[b][part],
            allowed[:, part],
            case.sm_scale,
            dtype,
            variant=variant,
        )
    return out, lse


def assert_state(case, out, lse, keys="all", *, variant=None):
    """Judge a result by the float rule against the dense float64 answer, padding rows included.

    The baseline of a `variant` on tensor cores cuts sums off as those do; other versions have a narrower RMS bound.
    """
    dtype = case.q_nope.dtype
    exact_out, exact_lse = expected(case, keys)
    plain = np.float64 if dtype == np.float64 else np.float32
    traits = None if variant is None else VERSIONS[variant].TRAITS
    plain_out, plain_lse = expected(case, keys, plain, variant=variant if variant in SCORES else None)
    values = np.concatenate([rows.ravel() for rows in case.ckv_rows])
    rule = {"rms_factor": 2.0 if traits is None or traits.tensor_cores else 1.25}
    assert_close(out, exact_out, plain_out.astype(dtype), floor=out_floor(dtype, exact_out, values), name="out", **rule)
    floor = lse_floor(exact_lse)
    if plain is np.float64:
        floor = floor * 2.0**-28  # 8 * 2^-52
    assert_close(lse, exact_lse, plain_lse, floor=floor, name="lse", **rule)


seeds = st.integers(0, 2**32 - 1)
node_counts = st.one_of(st.integers(1, 9), st.sampled_from([31, 32, 33]))
context_lengths = st.one_of(st.integers(0, 9), st.sampled_from([63, 64, 65, 127, 128, 129]))
page_sizes = st.sampled_from([1, 7, 16, 64])


@st.composite
def recipes(draw, max_batch=3, inactive=True):
    """Draw the structure of a case; `build(recipe, **options)` makes equal arrays for equal recipes."""
    batch = draw(st.integers(1, max_batch))
    counts = st.one_of(st.just(0), node_counts) if inactive else node_counts
    nodes = draw(st.lists(counts, min_size=batch, max_size=batch))
    return {
        "seed": draw(seeds),
        "counts": nodes,
        "contexts": draw(st.lists(context_lengths, min_size=batch, max_size=batch)),
        "capacity": max([1, *nodes]) + draw(st.integers(0, 2)),
        "page_size": draw(page_sizes),
        "heads": draw(st.sampled_from([1, 2, 3, 8])),
        "is_tree": draw(st.booleans()),
    }


def build(recipe, **options):
    """Make the case of a recipe."""
    fixed = {name: recipe[name] for name in ("capacity", "page_size", "heads")} | options
    make = tree_case if recipe["is_tree"] else matrix_case
    return make(np.random.default_rng(recipe["seed"]), recipe["counts"], recipe["contexts"], **fixed)
