"""Hugging Face transformers: additive 4D attention masks."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import Checker
from ddtree_cupy.containers import DraftTree, Visibility
from ddtree_cupy.errors import ShapeError, UnsupportedError
from ddtree_cupy.interop._host import (
    addressable,
    check_host,
    dense_on_host,
    lengths,
    node_counts,
    padding_sees_itself,
    strip_context,
    visibility_from,
)

Array = Any
DTYPES = ("float32", "float16", "bfloat16", "float64", "bool")
PADDINGS = ("left", "right")


def _lowest(dtype: "np.dtype[Any]") -> float:
    """Return the lowest finite value, torch.finfo(dtype).min."""
    if dtype.name == "bfloat16":
        import ml_dtypes

        lowest: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
        return float(lowest.min)
    return float(np.finfo(dtype).min)


def _dtype(name: str) -> "np.dtype[Any]":
    if name == "bfloat16":
        import ml_dtypes

        kind: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return kind
    return np.dtype(name)


def _start(check: Checker, past: Array, past_len: int | None) -> int:
    """Return the column of node 0."""
    longest = int(past.max(initial=0))
    return longest if past_len is None else check.integer("past_len", past_len, low=longest)


def _context(length: int, start: int, padding: str) -> slice:
    return slice(start - length, start) if padding == "left" else slice(0, length)


def to_huggingface_mask(
    visibility: Visibility | DraftTree,
    context_lens: npt.ArrayLike,
    *,
    dtype: str = "float32",
    hidden: str = "min",
    context_padding: str = "left",
    past_len: int | None = None,
    key_len: int | None = None,
) -> npt.NDArray[Any]:
    """Return a 4D mask that transformers adds to the scores: 0 = may attend, a huge negative number = hidden.

    Columns: `past_len` slots of the cache, then one slot a node, then hidden ones up to `key_len`.

    Parameters
    ----------
    visibility : Visibility or DraftTree
        Any boolean matrix in which no valid row is empty. Rows from num_nodes on see themselves only, so that no
        softmax is empty.
    context_lens : int or int array_like, shape (B)
        Keys already in the cache, without the root.
    dtype : {"float32", "float16", "bfloat16", "float64", "bool"}
        That of the model for the eager path; "bool" (True = may attend) for SDPA only.
    hidden : {"min", "-inf"}
        The hidden value: the dtype's lowest finite number, as transformers writes it, or -inf. Not for "bool".
    context_padding : {"left", "right"}
        Where a request shorter than `past_len` has its unused, hidden slots.
    past_len : int, default max(context_lens)
        Slots of the cache before the nodes.
    key_len : int, default past_len + N
        Columns; larger for a static cache.

    Returns
    -------
    array of `dtype`, shape (B, 1, N, key_len)
        Axis 1 broadcasts over the heads.

    Raises
    ------
    UnsupportedError
        A valid row that sees no key: the softmax over it is NaN with -inf and uniform over hidden keys with min,
        where this library gives 0.
    ShapeError, DTypeError, ArgumentError
        Lengths that do not fit, arrays on a GPU, unknown options.

    Notes
    -----
    Two additive masks summed may pass below the lowest number to -inf; `from_huggingface_mask` takes both. Source:
    `AttentionMaskConverter` in src/transformers/modeling_attn_mask_utils.py, pull request 27539 (4D masks pass
    through as they are) and 46507 (dtypes) of github.com/huggingface/transformers.

    Examples
    --------
    >>> tree = DraftTree.from_parents([7, 10, 20, 11], [-1, 0, 1, 0])
    >>> to_huggingface_mask(tree, 2, hidden="-inf")[0, 0, 3].tolist()
    [0.0, 0.0, 0.0, -inf, -inf, 0.0]
    """
    function = "to_huggingface_mask"
    Checker(function).choice("dtype", dtype, DTYPES)
    Checker(function).choice("hidden", hidden, ("min", "-inf"))
    Checker(function).choice("context_padding", context_padding, PADDINGS)
    dense, counts = dense_on_host(function, visibility)
    batch, size, _ = dense.shape
    past = lengths(function, "context_lens", context_lens, batch)
    empty = np.argwhere(~dense.any(axis=-1) & (np.arange(size) < counts[:, None]) & (past[:, None] == 0))
    if empty.size:
        request, row = empty[0]
        raise UnsupportedError(
            f"{function}: row {row} of request {request} sees no key; an additive mask makes its softmax NaN (-inf) or "
            f"uniform over hidden keys (min), never the output 0 this library defines"
        )
    check = Checker(function)
    start = _start(check, past, past_len)
    width = start + size if key_len is None else check.integer("key_len", key_len, low=start + size)
    source = "key_len" if key_len is not None else "context_lens" if past_len is None else "past_len"
    addressable(function, source, (batch, 1, size, width), itemsize=_dtype(dtype).itemsize)
    seen = np.zeros((batch, 1, size, width), bool)
    seen[:, 0, :, start : start + size] = padding_sees_itself(dense, counts)
    for request, (length, count) in enumerate(zip(past.tolist(), counts.tolist(), strict=True)):
        seen[request, 0, :count, _context(length, start, context_padding)] = True
    if dtype == "bool":
        return seen
    kind = _dtype(dtype)
    return np.asarray(np.where(seen, kind.type(0), kind.type(-np.inf if hidden == "-inf" else _lowest(kind))))


def _seen(function: str, request: int, mask: Array) -> npt.NDArray[np.bool_]:
    """Return, as a new array, where the rows (N, key_len) of one request attend."""
    if mask.dtype == np.bool_:
        return np.array(mask)
    values = mask.astype(np.float64)
    seen = values == 0
    bad = np.argwhere(~seen & ~(values <= _lowest(mask.dtype)))
    if bad.size:
        row, column = bad[0]
        raise UnsupportedError(
            f"{function}: `attention_mask`[{request}, 0, {row}, {column}] is {values[row, column]:g}, expected 0, "
            f"{_lowest(mask.dtype):g} (the lowest {mask.dtype.name}) or -inf: a bias is neither seen nor hidden, and "
            f"1/0 masks want dtype bool"
        )
    return np.asarray(seen)


def from_huggingface_mask(
    attention_mask: npt.NDArray[Any],
    context_lens: npt.ArrayLike,
    *,
    num_nodes: npt.ArrayLike | None = None,
    context_padding: str = "left",
    past_len: int | None = None,
) -> Visibility:
    """Read a 4D mask back, always with its request axis.

    Parameters
    ----------
    attention_mask : float32 | float16 | bfloat16 | float64 | bool array, shape (B, 1, N, key_len)
        Floats hold 0, the lowest finite number of their dtype or -inf; bool holds True = may attend.
    context_lens : int or int array_like, shape (B)
        Keys in the cache, without the root.
    num_nodes : int array_like, shape (B), default N
        Valid rows; the rest is ignored.
    context_padding : {"left", "right"}
        As in `to_huggingface_mask`.
    past_len : int, default max(context_lens)
        The column of node 0.

    Returns
    -------
    Visibility
        Batched.

    Raises
    ------
    UnsupportedError
        A value between hidden and 0 (also a mask cast from a narrower dtype, whose lowest number is no longer the
        lowest), a mask per head, hidden context, a visible key outside context and nodes, or an empty row.
    ShapeError, DTypeError, ArgumentError
        Shapes, dtypes or lengths that do not fit, unknown options.

    Examples
    --------
    >>> mask = np.where(np.tri(3, 5, 2, dtype=bool), np.float32(0), np.float32(-np.inf))[None, None]
    >>> from_huggingface_mask(mask, 2).visibility_bits.ravel().tolist()
    [1, 3, 7]
    """
    function = "from_huggingface_mask"
    Checker(function).choice("context_padding", context_padding, PADDINGS)
    check = Checker(function)
    check_host(check, "attention_mask", attention_mask)
    check.array("attention_mask", attention_mask, ("batch", "heads", "num_nodes", "key_len"), DTYPES)
    batch, heads, size, width = attention_mask.shape
    if heads != 1:
        raise UnsupportedError(
            f"{function}: `attention_mask` differs by head ({heads} of them), a Visibility serves all heads"
        )
    past = lengths(function, "context_lens", context_lens, batch)
    start = _start(check, past, past_len)
    if width < start + size:
        raise ShapeError(
            f"{function}: `attention_mask` has {width} columns, expected at least {start + size}: {start} of the cache "
            f"and one a node"
        )
    counts = node_counts(function, "num_nodes", num_nodes, batch, size)
    dense = np.zeros((batch, size, size), bool)
    for request, (length, count) in enumerate(zip(past.tolist(), counts.tolist(), strict=True)):
        rows = _seen(function, request, attention_mask[request, 0, :count])
        if not rows.any(axis=-1).all():
            row = int(np.flatnonzero(~rows.any(axis=-1))[0])
            raise UnsupportedError(
                f"{function}: row {row} of request {request} hides every key; transformers makes of it NaN or a mean "
                f"over hidden keys, this library 0"
            )
        context = _context(length, start, context_padding)
        nodes = slice(start, start + count)
        dense[request, :count, :count] = strip_context(function, request, rows[:, nodes], rows[:, context])
        rows[:, context] = rows[:, nodes] = False
        if rows.any():
            row, column = np.argwhere(rows)[0]
            raise UnsupportedError(
                f"{function}: row {row} of request {request} sees key {column}, which is neither context (columns "
                f"{context.start}..{context.stop - 1}) nor a node ({start}..{start + count - 1})"
            )
    return visibility_from(dense, counts)
