"""The codec of masks: one table of layouts, and the functions that read and write them.

A set bit, True and an additive 0 mean "may attend" in every form; bit 0 comes first in every byte and word.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ddtree_cupy.containers import Visibility
from ddtree_cupy.containers.topology import pack_visibility, unpack_visibility, words_per_row
from ddtree_cupy.errors import UnsupportedError
from ddtree_cupy.interop._host import Call

Bools = npt.NDArray[np.bool_]
Lengths = npt.NDArray[np.int64]


class Layout(NamedTuple):
    """How a flat mask holds the rows of one request, which follow each other without a gap."""

    context: bool  # columns of the context come before those of the nodes
    padding: bool  # the mask has rows from num_nodes on, which see the context and themselves
    unit: str  # "cell": a bool; "byte": eight cells of a request, rows not aligned; "word": the cells of one row


LAYOUTS = {
    "flashinfer": Layout(context=True, padding=False, unit="cell"),
    "flashinfer_packed": Layout(context=True, padding=False, unit="byte"),
    "FULL_MASK": Layout(context=True, padding=True, unit="cell"),
    "QLEN_ONLY": Layout(context=False, padding=True, unit="cell"),
    "QLEN_ONLY_BITPACKING": Layout(context=False, padding=True, unit="word"),
}
UNITS: dict[str, Any] = {"cell": np.bool_, "byte": np.uint8, "word": np.uint32}


def units(layout: Layout, rows: Lengths, past: Lengths) -> list[int]:
    """Return how many units each request takes, exact for any size: `rows` is also the number of its node columns."""
    cells = [n * (n + layout.context * before) for n, before in zip(rows.tolist(), past.tolist(), strict=True)]
    if layout.unit == "word":
        return list(rows.tolist())
    return [-(-count // 8) for count in cells] if layout.unit == "byte" else cells


def write_flat(layout: Layout, dense: Bools, counts: Lengths, past: Lengths) -> npt.NDArray[Any]:
    """Return the flat mask of bool (B, N, N), False outside the valid nodes."""
    rows = counts
    if layout.padding:
        dense, rows = padding_sees_itself(dense, counts), np.full_like(counts, dense.shape[-1])
    parts: list[npt.NDArray[Any]] = [np.zeros(0, UNITS[layout.unit])]
    for block, count, before in zip(dense, rows.tolist(), past.tolist(), strict=True):
        cells = block[:count, :count]
        if layout.context:
            cells = np.pad(cells, ((0, 0), (before, 0)), constant_values=True)
        if layout.unit == "word":
            parts.append(pack_visibility(cells[None]).ravel())
        else:
            parts.append(np.packbits(cells.ravel(), bitorder="little") if layout.unit == "byte" else cells.ravel())
    return np.concatenate(parts)


def read_flat(
    call: Call, layout: Layout, flat: npt.NDArray[Any], past: Lengths, counts: Lengths, size: int
) -> Visibility:
    """Return the Visibility of N = `size` nodes behind a flat mask, of whose rows the first `counts` are valid."""
    dense, start = np.zeros((len(counts), size, size), bool), 0
    rows = np.full_like(counts, size) if layout.padding else counts
    table = zip(rows.tolist(), past.tolist(), counts.tolist(), units(layout, rows, past), strict=True)
    for request, (stored, before, count, length) in enumerate(table):
        block, start = flat[start : start + length], start + length
        left = before * layout.context
        width = left + stored
        if layout.unit == "word":
            cells = unpack_visibility(block.astype(np.uint32)[None, :, None], np.array([stored]))[0]
        elif layout.unit == "byte":
            cells = np.unpackbits(block, count=stored * width, bitorder="little").astype(bool).reshape(stored, width)
        else:
            cells = block.reshape(stored, width)
        cells = cells[:count]
        dense[request, :count, :stored] = strip_context(call, request, cells[:, left:], cells[:, :left])
    return visibility_from(dense, counts)


def write_words(dense: Bools, rows: int, words: int) -> npt.NDArray[np.uint32]:
    """Return uint32 (B, rows, words), all rows and words of the buffer; those without a node are 0."""
    kept = min(dense.shape[-1], rows)
    packed = pack_visibility(dense[:, :kept, :kept])
    found = np.zeros((len(dense), rows, words), np.uint32)
    found[:, :kept, : packed.shape[-1]] = packed
    return found


def read_words(rows: npt.NDArray[Any], counts: Lengths, size: int) -> Visibility:
    """Return the Visibility of N = `size` nodes behind the words of all valid rows, shape (sum of counts, words)."""
    words = rows.shape[-1]
    square = np.zeros((len(counts), size, max(words, words_per_row(size))), np.uint32)
    square[np.arange(size) < counts[:, None], :words] = np.ascontiguousarray(rows).view(np.uint32)
    return visibility_from(unpack_visibility(square, counts), counts)


def mask_dtype(name: str) -> "np.dtype[Any]":
    """Return the dtype of an additive or bool mask."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


def _lowest(dtype: "np.dtype[Any]") -> float:
    """Return the lowest finite value, torch.finfo(dtype).min."""
    import ml_dtypes

    limits: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    return float(limits.min)


def write_additive(seen: Bools, dtype: str, hidden: str) -> npt.NDArray[Any]:
    """Return 0 where `seen`, elsewhere the lowest finite number ("min") or -inf; `seen` itself for "bool"."""
    if dtype == "bool":
        return seen
    kind = mask_dtype(dtype)
    return np.asarray(np.where(seen, kind.type(0), kind.type(-np.inf if hidden == "-inf" else _lowest(kind))))


def read_additive(call: Call, request: int, mask: npt.NDArray[Any]) -> Bools:
    """Return, as a new array, where the rows (N, key_len) of one request attend."""
    if mask.dtype == np.bool_:
        return np.array(mask)
    values = mask.astype(np.float64)
    seen = values == 0
    for row, column in np.argwhere(~seen & ~(values <= _lowest(mask.dtype))):
        raise call.error(
            f"`attention_mask`[{request}, 0, {row}, {column}] is {values[row, column]:g}, expected 0, "
            f"{_lowest(mask.dtype):g} (the lowest {mask.dtype.name}) or -inf: a bias is neither seen nor hidden, and "
            "masks of 1 and 0 need dtype bool",
            UnsupportedError,
        )
    return np.asarray(seen)


def padding_sees_itself(dense: npt.NDArray[np.bool_], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return a copy of (B, N, N) in which every row of padding sees its own node, so that no softmax is empty."""
    padding = np.arange(dense.shape[-1]) >= counts[:, None]
    return np.asarray(dense | (padding[:, :, None] & np.eye(dense.shape[-1], dtype=bool)))


def visibility_from(dense: npt.NDArray[np.bool_], counts: npt.NDArray[np.int64]) -> Visibility:
    """Return the Visibility of bool (B, N, N) and the node counts (B)."""
    return Visibility.from_dense(dense, counts.astype(np.int32))


def strip_context(
    call: Call, request: int, rows: npt.NDArray[np.bool_], context: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Return `rows`, the node part of a mask, after checking that `context`, the other part, hides nothing."""
    for row, column in np.argwhere(~context):
        raise call.error(
            f"row {row} of request {request} hides context key {column}, but a Visibility covers tree nodes only and "
            "sees the whole context (no windows, no holes)",
            UnsupportedError,
        )
    return rows
