"""Paged caches with poisoned spare rows, and ragged batches of a tree with its cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from ddtree_cupy.containers import DraftTree, PagedKV, Visibility
from ddtree_cupy.testing.poison import poison_spare_rows
from ddtree_cupy.testing.strategies.sizes import batch_axes, check_bounds, check_choice, check_dtypes, flags, seeds
from ddtree_cupy.testing.strategies.trees import draft_trees, visibilities

_ABSURD = (-(2**31), -2, 2**30, 2**31 - 1)


def _lengths(page_size: int, low: int, high: int) -> st.SearchStrategy[int]:
    """Draw context lengths, often one next to a page edge."""
    edges = sorted({n + d for n in (0, page_size, 2 * page_size) for d in (-1, 0, 1)})
    edges = [n for n in edges if low <= n <= high]
    return st.integers(low, high) | st.sampled_from(edges) if edges else st.integers(low, high)


def _page_table(
    draw: Any, lens: list[int], rows: list[int], page_size: int, bounds: dict[str, Any], random: np.random.Generator
) -> tuple[npt.NDArray[np.int32], int]:
    """Return the table and the number of pages; used pages are shuffled among spare ones."""
    needed = [-(-(length + extra) // page_size) for length, extra in zip(lens, rows, strict=True)]
    width = max(needed, default=0) + draw(st.integers(0, 2))
    spare = draw(st.integers(0, bounds["max_spare_pages"]))
    num_pages = sum(needed) + spare
    order = random.permutation(num_pages).tolist()
    table = np.full((len(lens), width), -1, np.int64)
    for request, count in enumerate(needed):
        table[request, :count] = [order.pop() for _ in range(count)]
    unused = bounds["unused_pages"]
    for request, entry in np.argwhere(table < 0):
        if unused == "spare" and order and random.random() < 0.7:
            table[request, entry] = order.pop()
        elif unused == "absurd":
            table[request, entry] = random.choice([*_ABSURD, num_pages, 0])
    if len(lens) > 1 and draw(flags(bounds["shared_prefix"])):
        common = min(lens) // page_size  # only pages that lie wholly inside every context
        table[:, :common] = table[0, :common]
    return table.astype(np.int32), num_pages


def _pool(draw: Any, num_pages: int, page_size: int, bounds: dict[str, Any], dtype: Any, seed: int) -> tuple[Any, Any]:
    """Return ckv and kpe, as two arrays or as slices of one combined buffer with a gap."""
    width, rope = draw(st.sampled_from(bounds["head_dims"]))
    scale = draw(st.sampled_from([1.0, 0.125, 16.0]))
    values = np.random.default_rng(seed).standard_normal((num_pages, page_size, width + rope)) * scale
    values = np.where(np.abs(values) < 2.0**-14, 2.0**-14, values).astype(dtype)
    if not draw(flags(bounds["combined"])):
        return np.ascontiguousarray(values[..., :width]), np.ascontiguousarray(values[..., width:])
    gap = draw(st.sampled_from([0, 16]))
    pool = np.full((num_pages, page_size, width + gap + rope), np.nan, dtype)
    ckv, kpe = pool[..., :width], pool[..., width + gap :]
    ckv[...], kpe[...] = values[..., :width], values[..., width:]
    return ckv, kpe


@st.composite
def _paged_caches(draw: Any, bounds: dict[str, Any], dtypes: list[Any]) -> PagedKV:
    num_rows = bounds["num_rows"]
    if num_rows is None:
        axes = batch_axes(draw, bounds)
        rows = [draw(st.integers(0, bounds["max_rows"])) for _ in range(axes[0] if axes else 1)]
    else:
        axes = np.shape(num_rows)
        rows = [int(count) for count in np.atleast_1d(num_rows)]
    page_size = draw(st.sampled_from(bounds["page_sizes"]))
    lens = [draw(_lengths(page_size, bounds["min_context"], bounds["max_context"])) for _ in rows]
    seed = draw(seeds())
    table, num_pages = _page_table(draw, lens, rows, page_size, bounds, np.random.default_rng(seed))
    ckv, kpe = _pool(draw, num_pages, page_size, bounds, draw(st.sampled_from(dtypes)), seed)
    kv = PagedKV(ckv, kpe, table, np.array(lens, np.int32))
    if bounds["poison"]:
        poison_spare_rows(kv, rows)
    return kv if axes else kv.without_batch()


def paged_caches(
    *,
    num_rows: Any = None,
    batched: bool | None = None,
    min_batch: int = 1,
    max_batch: int = 3,
    max_rows: int = 9,
    min_context: int = 0,
    max_context: int = 130,
    page_sizes: Sequence[int] = (1, 3, 4, 16, 64),
    head_dims: Sequence[tuple[int, int]] = ((16, 16),),
    dtypes: Sequence[str] = ("float32", "float16", "bfloat16"),
    combined: bool | None = None,
    shared_prefix: bool | None = None,
    max_spare_pages: int = 3,
    unused_pages: str = "spare",
    poison: bool = True,
) -> st.SearchStrategy[PagedKV]:
    """Draw caches whose pages are shuffled and whose rows that nothing may read hold NaN.

    Parameters
    ----------
    num_rows : int or int array, shape ([B]), optional
        Rows of each request after its context (the keys of its tree). They decide B, and whether there is an axis B.
        If None, they are drawn up to `max_rows`.
    batched : bool, optional
        Whether the tables have axis B; None draws both. Only without `num_rows`.
    min_batch, max_batch, max_rows, min_context, max_context : int
        Bounds, inclusive; contexts next to page edges are frequent.
    page_sizes, head_dims, dtypes : sequence
        The values to choose from; `head_dims` are pairs (C, R).
    combined : bool, optional
        Whether `ckv` and `kpe` are slices of one buffer (perhaps with a gap of NaN); None draws both.
    shared_prefix : bool, optional
        Whether all requests share the pages that lie inside every context; None draws both.
    max_spare_pages : int
        Pages that belong to no request.
    unused_pages : {"spare", "none", "absurd"}
        The table entries past the last row: a spare (poisoned) page or -1; always -1; or ids outside every pool,
        which `validate()` rejects and a kernel must never follow.
    poison : bool
        Whether unreachable rows are NaN.
    """
    bounds = dict(locals())
    name = "paged_caches"
    check_bounds(name, bounds, batch=0, context=0, rows=0, spare_pages=0)
    check_choice(name, "unused_pages", unused_pages, ("spare", "none", "absurd"))
    if not page_sizes or min(page_sizes) < 1 or not head_dims or min(map(min, head_dims)) < 1:
        raise InvalidArgument(f"{name}: `page_sizes` and `head_dims` need entries, all at least 1")
    if num_rows is not None and (np.ndim(num_rows) > 1 or np.any(np.asarray(num_rows) < 0)):
        raise InvalidArgument(f"{name}: `num_rows` is {num_rows!r}, expected counts of shape () or (batch,)")
    return _paged_caches(bounds, check_dtypes(name, dtypes))


@dataclass(frozen=True, eq=False)
class RaggedBatch:
    """A tree (or bare visibility) and a cache that holds every request's context and tree keys."""

    tree: DraftTree | Visibility
    kv: PagedKV


@st.composite
def _ragged_batches(draw: Any, trees: Any, cache_bounds: dict[str, Any]) -> RaggedBatch:
    tree = draw(trees)
    return RaggedBatch(tree, draw(paged_caches(num_rows=tree.num_nodes, **cache_bounds)))


def ragged_batches(
    *,
    kind: str = "any",
    batched: bool | None = None,
    min_batch: int = 1,
    max_batch: int = 3,
    min_nodes: int = 1,
    max_nodes: int = 129,
    inactive: bool = True,
    **cache_bounds: Any,
) -> st.SearchStrategy[RaggedBatch]:
    """Draw a tree of varying size per request together with its cache.

    Parameters
    ----------
    kind : {"any", "tree", "visibility"}
        Draft trees, arbitrary visibility matrices, or both.
    batched, min_batch, max_batch, min_nodes, max_nodes, inactive
        As in `draft_trees`.
    **cache_bounds
        Passed to `paged_caches`, e.g. `page_sizes`.
    """
    bounds = {name: value for name, value in locals().items() if name not in ("kind", "cache_bounds")}
    check_choice("ragged_batches", "kind", kind, ("any", "tree", "visibility"))
    clash = {"num_rows", "max_rows"} & set(cache_bounds)
    if clash:
        raise InvalidArgument(f"ragged_batches: `{clash.pop()}` follows from the trees")
    made = {"tree": draft_trees(**bounds), "visibility": visibilities(**bounds)}
    trees = st.one_of(*made.values()) if kind == "any" else made[kind]
    paged_caches(num_rows=0, **cache_bounds)  # reports a bad bound here, not while drawing
    return _ragged_batches(trees, cache_bounds)
