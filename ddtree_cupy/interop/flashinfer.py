"""FlashInfer's custom masks: flat booleans, and the same bits packed little-endian, over [context + nodes]."""

from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ddtree_cupy.containers import DraftTree, Visibility
from ddtree_cupy.errors import ShapeError, UnsupportedError
from ddtree_cupy.interop._host import INT32, Call
from ddtree_cupy.interop._masks import LAYOUTS, read_flat, units, write_flat


class FlashInferMask(NamedTuple):
    """A ragged mask: request b has qo_indptr[b+1] - qo_indptr[b] rows of kv_lens[b] cells."""

    custom_mask: npt.NDArray[Any]  # bool cells, or uint8 bytes when packed
    mask_indptr: npt.NDArray[np.int32]  # (B + 1), in cells, or in bytes when packed
    qo_indptr: npt.NDArray[np.int32]  # (B + 1), query rows
    kv_lens: npt.NDArray[np.int32]  # (B), context_len + num_nodes


def to_flashinfer_mask(
    visibility: Visibility | DraftTree, context_lens: npt.ArrayLike, *, packed: bool = False
) -> FlashInferMask:
    """Return `custom_mask` (or `packed_custom_mask`) for prefill wrappers whose KV cache holds context and nodes.

    Request b contributes num_nodes rows of context_len + num_nodes cells, row after row, True = may attend; the
    context is visible to every row. When packed, the cells of one request form one run of bits, bit 0 of byte 0 first;
    a request starts at a whole byte, a row need not.

    Parameters
    ----------
    visibility : Visibility or DraftTree
        Any boolean matrix; only the valid nodes become rows, so an inactive request has none.
    context_lens : int or int array_like, shape (B)
        Keys already in the cache, without the root.
    packed : bool
        Pack eight cells into a byte.

    Returns
    -------
    FlashInferMask
        custom_mask bool (cells) or uint8 (bytes); mask_indptr int32 (B + 1) in cells, or in BYTES when packed;
        qo_indptr int32 (B + 1), the root counts as a row; kv_lens int32 (B).

    Raises
    ------
    UnsupportedError
        There are more rows, cells or bytes than int32 offsets reach.

    Notes
    -----
    Given `packed_custom_mask`, `plan` derives the offsets itself, in cells (pull request 2201 reports it), and then
    reads past the end for B > 1: pass the flat mask, which `plan` packs with offsets in bytes. Tokens and positions
    are not part of this form; `tree_from_visibility` makes a tree again. Source: `plan` and `segment_packbits` in
    flashinfer/prefill.py and flashinfer/quantization.py of github.com/flashinfer-ai/flashinfer.

    Examples
    --------
    >>> tree = DraftTree.from_parents([7, 10, 20, 11], [-1, 0, 1, 0])
    >>> found = to_flashinfer_mask(tree, 2, packed=True)
    >>> found.custom_mask.tolist(), found.mask_indptr.tolist(), found.kv_lens.tolist()
    ([199, 243, 157], [0, 3], [6])
    """
    call = Call("to_flashinfer_mask")
    dense, counts = call.dense(visibility)
    past = call.lengths("context_lens", context_lens, len(counts))
    widths = past + counts
    layout = LAYOUTS["flashinfer_packed" if packed else "flashinfer"]
    rows, starts = (list(accumulate(sizes, initial=0)) for sizes in (counts.tolist(), units(layout, counts, past)))
    if max(starts[-1], rows[-1], int(widths.max(initial=0))) > INT32.max:
        unit = "bytes" if packed else "cells"
        raise call.error(
            f"the mask has {starts[-1]} {unit}, but FlashInfer's offsets are int32 (at most {INT32.max})",
            UnsupportedError,
        )
    mask = write_flat(layout, dense, counts, past)
    return FlashInferMask(mask, *(np.array(values, np.int32) for values in (starts, rows, widths)))


def _indptr(call: Call, name: str, array: Any, batch: int) -> npt.NDArray[np.int64]:
    found = call.integers(name, array, (batch + 1,))
    if found[0] != 0 or (found[1:] < found[:-1]).any():
        raise call.error(f"`{name}` is {found.tolist()}, expected offsets that rise from 0")
    return found


def from_flashinfer_mask(
    custom_mask: npt.NDArray[Any],
    qo_indptr: npt.NDArray[Any],
    kv_lens: npt.NDArray[Any],
    *,
    mask_indptr: npt.NDArray[Any] | None = None,
    capacity: int | None = None,
) -> Visibility:
    """Read a flat (bool) or packed (uint8) mask back, always with its request axis.

    Parameters
    ----------
    custom_mask : bool array, shape (cells), or uint8 array, shape (bytes)
        Unused bits in the last byte of a request are ignored.
    qo_indptr : int32 | int64 array, shape (B + 1)
        Offsets of the query rows.
    kv_lens : int32 | int64 array, shape (B)
        Keys of each request, its own nodes included: kv_len - rows is the context length.
    mask_indptr : int32 | int64 array, shape (B + 1)
        Offsets in bytes, needed for a packed mask; offsets in cells, optional and checked, for a flat one.
    capacity : int, optional
        N of the result; default the request with the most rows.

    Returns
    -------
    Visibility
        Batched; num_nodes are the rows of each request.

    Raises
    ------
    ShapeError
        The number of cells or bytes is not that of the batch, or the mask is not flat.
    UnsupportedError
        A row hides context, or a request has more rows than keys.
    DTypeError, ArgumentError
        Another dtype; offsets that do not rise from 0, or that count cells where bytes are read.

    Examples
    --------
    >>> cells = np.array([199, 243, 157], np.uint8)
    >>> offsets = [np.array(values, np.int32) for values in ([0, 4], [6], [0, 3])]
    >>> from_flashinfer_mask(cells, *offsets[:2], mask_indptr=offsets[2]).visibility_bits.ravel().tolist()
    [1, 3, 7, 9]
    """
    call = Call("from_flashinfer_mask")
    call.host("custom_mask", custom_mask, ("cells",), ("bool", "uint8"))
    packed = custom_mask.dtype == np.uint8
    widths = call.lengths("kv_lens", call.integers("kv_lens", kv_lens, ("batch",)), len(kv_lens))
    rows = np.diff(_indptr(call, "qo_indptr", qo_indptr, len(widths)))
    for request in np.flatnonzero(rows > widths):
        raise call.error(
            f"request {request} has {rows[request]} rows but {widths[request]} keys; the nodes' own keys must be in "
            "the cache",
            UnsupportedError,
        )
    layout = LAYOUTS["flashinfer_packed" if packed else "flashinfer"]
    past = widths - rows
    expected = list(accumulate(units(layout, rows, past), initial=0))
    if packed and mask_indptr is None:
        raise call.error("a packed mask needs `mask_indptr`, its offsets in bytes")
    if mask_indptr is not None:
        given = _indptr(call, "mask_indptr", mask_indptr, len(widths)).tolist()
        if given != expected:
            in_cells = packed and given == list(accumulate(units(LAYOUTS["flashinfer"], rows, past), initial=0))
            hint = "; these offsets count cells, a packed mask has them in bytes" if in_cells else ""
            raise call.error(
                f"`mask_indptr` is {given}, expected {expected} for rows {rows.tolist()} and keys "
                f"{widths.tolist()}{hint}"
            )
    if custom_mask.size != expected[-1]:
        raise call.error(
            f"`custom_mask` has {custom_mask.size} {'bytes' if packed else 'cells'}, expected {expected[-1]} for rows "
            f"{rows.tolist()} and keys {widths.tolist()}",
            ShapeError,
        )
    most = int(rows.max(initial=0))
    size = max(most, 1) if capacity is None else call.integer("capacity", capacity, low=max(most, 1))
    call.addressable("qo_indptr" if capacity is None else "capacity", (len(widths), size, size))
    return read_flat(call, layout, custom_mask, past, rows, size)
