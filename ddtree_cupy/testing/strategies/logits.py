"""Draft logits, and the candidate tables made of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from ddtree_cupy.containers import Candidates
from ddtree_cupy.testing.strategies.sizes import (
    batch_axes,
    check_bounds,
    check_choice,
    check_dtypes,
    flags,
    seeds,
    sizes,
)

_TINY = 2.0**-14  # the smallest normal float16, so no dtype gets a subnormal


def _normals(random: np.random.Generator, shape: tuple[int, ...], scale: float) -> npt.NDArray[np.float64]:
    values = random.standard_normal(shape) * scale
    return np.where(np.abs(values) < _TINY, _TINY, values)


def _distinct_rows(random: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    """Return rows without ties in any dtype: shuffled multiples of 1/4 around zero, shifted per row."""
    vocab = shape[-1]
    ranks = random.permuted(np.broadcast_to(np.arange(vocab), shape), axis=-1)
    step = 0.25 if vocab <= 128 else 1.0
    return np.asarray(((ranks - vocab // 2) * step).astype(dtype))


def _tied_rows(random: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    """Return rows on a coarse grid, so that siblings, depths and whole paths tie; zeros of both signs."""
    levels = int(random.integers(1, 5))
    rows = (random.integers(0, levels, shape) * float(random.choice([0.25, 0.5, 1.0]))).astype(dtype)
    negative_zero = (rows == 0) & (random.random(shape) < 0.5)
    return np.where(negative_zero, np.asarray(-0.0, dtype), rows).astype(dtype)


@st.composite
def _draft_logits(draw: Any, bounds: dict[str, Any], dtypes: list[Any]) -> npt.NDArray[Any]:
    lead = batch_axes(draw, bounds)
    draft_len = draw(st.integers(bounds["min_draft_len"], bounds["max_draft_len"]))
    shape = (*lead, draft_len, draw(sizes(bounds["min_vocab"], bounds["max_vocab"])))
    dtype = draw(st.sampled_from(dtypes))
    kinds = [bounds["ties"]] if bounds["ties"] != "any" else ["distinct", "tied", "normal"]
    kind = draw(st.sampled_from(kinds))
    random = np.random.default_rng(draw(seeds()))
    if kind == "normal":
        logits = _normals(random, shape, draw(st.sampled_from([0.1, 1.0, 8.0]))).astype(dtype)
    else:
        logits = (_tied_rows if kind == "tied" else _distinct_rows)(random, shape, dtype)
    first = logits[(0,) * (logits.ndim - 1)] if logits.size else np.zeros(1)
    if (first >= 0).all() and abs(float(first.sum()) - 1) < 0.1:
        logits = logits + logits  # not like probabilities, of which `top_candidates` warns
    if bounds["minus_inf"]:
        share = draw(st.sampled_from([0.0, 0.0, 0.3, 1.0]))
        row = random.random((*shape[:-1], 1)) < 0.5
        logits[row & (random.random(shape) < share)] = -np.inf
    if bounds["non_finite"] and draw(st.booleans()):
        row = random.random((*shape[:-1], 1)) < 0.3
        where = row & (random.random(shape) < 0.5)
        logits[where] = np.where(random.random(shape) < 0.5, np.nan, np.inf).astype(dtype)[where]
    return _in_wider_rows(logits) if draw(flags(bounds["strided"])) else np.ascontiguousarray(logits)


def _in_wider_rows(logits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the same values as a slice of longer rows, the rest of which is NaN."""
    *lead, vocab = logits.shape
    rows = np.full((*lead, vocab + 3), np.nan, logits.dtype)[..., :vocab]
    rows[...] = logits
    return rows


def draft_logits(
    *,
    batched: bool | None = None,
    min_batch: int = 0,
    max_batch: int = 3,
    min_draft_len: int = 0,
    max_draft_len: int = 4,
    min_vocab: int = 1,
    max_vocab: int = 130,
    dtypes: Sequence[str] = ("float32", "float16", "bfloat16"),
    ties: str = "any",
    minus_inf: bool = True,
    non_finite: bool = False,
    strided: bool | None = False,
) -> st.SearchStrategy[npt.NDArray[Any]]:
    """Draw draft logits of shape ([B,] L, V).

    Parameters
    ----------
    batched : bool, optional
        Whether there is an axis B; None draws both.
    min_batch, max_batch, min_draft_len, max_draft_len, min_vocab, max_vocab : int
        Bounds of B, L and V, inclusive; V next to 32, 64 and 128 is frequent.
    dtypes : sequence of str
        Some of float32, float16, bfloat16, float64.
    ties : {"any", "distinct", "tied"}
        "distinct": no two logits of a row are equal (V up to 256 in every dtype); "tied": a coarse grid of at most
        five values with zeros of both signs; "any": both, and normal deviates.
    minus_inf : bool
        Whether rows may hold -inf, also in all entries.
    non_finite : bool
        Whether rows may hold NaN and +inf.
    strided : bool, optional
        Whether the rows are slices of longer ones (last axis contiguous, as kernels require); None draws both. Other
        arrays are C-contiguous.
    """
    bounds = dict(locals())
    check_bounds("draft_logits", bounds, batch=0, draft_len=0, vocab=1)
    check_choice("draft_logits", "ties", ties, ("distinct", "tied", "any"))
    if ties == "distinct":
        check_bounds("draft_logits", {"min_vocab": min_vocab, "max_vocab": min(max_vocab, 256)}, vocab=1)
    return _draft_logits(bounds, check_dtypes("draft_logits", dtypes))


@st.composite
def _candidate_tables(draw: Any, bounds: dict[str, Any], dtypes: list[Any]) -> Candidates:
    lead = batch_axes(draw, bounds)
    draft_len = draw(st.integers(bounds["min_draft_len"], bounds["max_draft_len"]))
    width = draw(sizes(bounds["min_width"], bounds["max_width"]))
    dtype = draw(st.sampled_from(dtypes))
    tied = draw(st.booleans())
    random = np.random.default_rng(draw(seeds()))
    shape = (*lead, draft_len, width)
    vocab = max(2 * width, 1)
    values = random.integers(0, 3, shape) * 0.5 if tied else _normals(random, shape, 1.0)
    logits = values.astype(dtype)
    token_ids = np.argsort(random.random((*shape[:-1], vocab)), axis=-1)[..., :width].astype(np.int32)

    present = np.ones(shape, bool)
    if draw(st.booleans()):
        present = np.arange(width) < random.integers(0, width + 1, (*shape[:-1], 1))
    order = np.lexsort((token_ids, -logits))
    logits = np.take_along_axis(logits, order, axis=-1)
    token_ids = np.where(present, np.take_along_axis(token_ids, order, axis=-1), -1).astype(np.int32)
    logits = np.where(present, logits, np.asarray(-np.inf, dtype))

    top = np.max(logits, axis=-1, initial=-np.inf)
    rest = 0.5 * random.integers(0, 3, top.shape) if tied else random.random(top.shape)
    lse = (top + rest).astype(dtype)
    if bounds["bad_rows"] and draw(st.booleans()):
        bad = random.random(lse.shape) < 0.3
        lse[bad], token_ids[bad], logits[bad] = np.nan, -1, -np.inf
    return Candidates(token_ids, logits, lse).map(np.ascontiguousarray)


def candidate_tables(
    *,
    batched: bool | None = None,
    min_batch: int = 0,
    max_batch: int = 3,
    min_draft_len: int = 0,
    max_draft_len: int = 4,
    min_width: int = 0,
    max_width: int = 65,
    dtypes: Sequence[str] = ("float32",),
    bad_rows: bool = False,
) -> st.SearchStrategy[Candidates]:
    """Draw valid Candidates directly, half of them on a coarse grid where whole paths tie.

    The lse is any number that is not below the best logit of the row, so scores never rise along a path.

    Parameters
    ----------
    batched : bool, optional
        Whether there is an axis B; None draws both.
    min_batch, max_batch, min_draft_len, max_draft_len, min_width, max_width : int
        Bounds of B, L and K, inclusive; K next to 32 and 64 is frequent.
    dtypes : sequence of str
        Of logits and lse: float32, float64 or both.
    bad_rows : bool
        Whether a row may stand for one that held NaN or +inf (ids -1, logits -inf, lse NaN).
    """
    bounds = dict(locals())
    check_bounds("candidate_tables", bounds, batch=0, draft_len=0, width=0)
    for dtype in dtypes:
        check_choice("candidate_tables", "dtypes", dtype, ("float32", "float64"))
    return _candidate_tables(bounds, check_dtypes("candidate_tables", dtypes))
