"""Hugging Face transformers: 4D attention masks and the keyword arguments of `model.forward` that verify a tree."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy.containers import DraftTree, Visibility
from ddtree_cupy.errors import ShapeError, UnsupportedError
from ddtree_cupy.interop._host import Call
from ddtree_cupy.interop._masks import (
    mask_dtype,
    padding_sees_itself,
    read_additive,
    strip_context,
    visibility_from,
    write_additive,
)

Array = Any
DTYPES = ("float32", "float16", "bfloat16", "float64", "bool")
PADDINGS = ("left", "right")


def _start(call: Call, past: Array, past_len: int | None) -> int:
    """Return the column of node 0."""
    longest = int(past.max(initial=0))
    return longest if past_len is None else call.integer("past_len", past_len, low=longest)


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

    Columns: `past_len` slots of the cache, then one slot per node, then hidden ones up to `key_len`.

    Parameters
    ----------
    visibility : Visibility or DraftTree
        Any boolean matrix in which no valid row is empty. Rows from num_nodes on see themselves only, so that no
        softmax is empty.
    context_lens : int or int array_like, shape (B)
        Keys already in the cache, without the root.
    dtype : {"float32", "float16", "bfloat16", "float64", "bool"}
        The dtype of the model, for the eager path; "bool" (True = may attend) is for SDPA only.
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

    Notes
    -----
    The sum of two additive masks may fall below the lowest number, to -inf; `from_huggingface_mask` reads both. Source:
    `AttentionMaskConverter` in src/transformers/modeling_attn_mask_utils.py, pull request 27539 (4D masks pass
    through as they are) and 46507 (dtypes) of github.com/huggingface/transformers.

    Examples
    --------
    >>> tree = DraftTree.from_parents([7, 10, 20, 11], [-1, 0, 1, 0])
    >>> to_huggingface_mask(tree, 2, hidden="-inf")[0, 0, 3].tolist()
    [0.0, 0.0, 0.0, -inf, -inf, 0.0]
    """
    call = Call("to_huggingface_mask")
    call.choice("dtype", dtype, DTYPES)
    call.choice("hidden", hidden, ("min", "-inf"))
    call.choice("context_padding", context_padding, PADDINGS)
    dense, counts = call.dense(visibility)
    batch, size, _ = dense.shape
    past = call.lengths("context_lens", context_lens, batch)
    empty = ~dense.any(axis=-1) & (np.arange(size) < counts[:, None]) & (past[:, None] == 0)
    for request, row in np.argwhere(empty):
        raise call.error(
            f"row {row} of request {request} sees no key; an additive mask makes its softmax NaN (-inf) or uniform "
            "over hidden keys (min), never the output 0 this library defines",
            UnsupportedError,
        )
    start = _start(call, past, past_len)
    width = start + size if key_len is None else call.integer("key_len", key_len, low=start + size)
    source = "key_len" if key_len is not None else "context_lens" if past_len is None else "past_len"
    call.addressable(source, (batch, 1, size, width), itemsize=mask_dtype(dtype).itemsize)
    seen = np.zeros((batch, 1, size, width), bool)
    seen[:, 0, :, start : start + size] = padding_sees_itself(dense, counts)
    for request, (length, count) in enumerate(zip(past.tolist(), counts.tolist(), strict=True)):
        seen[request, 0, :count, _context(length, start, context_padding)] = True
    return write_additive(seen, dtype, hidden)


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

    Examples
    --------
    >>> mask = np.where(np.tri(3, 5, 2, dtype=bool), np.float32(0), np.float32(-np.inf))[None, None]
    >>> from_huggingface_mask(mask, 2).visibility_bits.ravel().tolist()
    [1, 3, 7]
    """
    call = Call("from_huggingface_mask")
    call.choice("context_padding", context_padding, PADDINGS)
    call.host("attention_mask", attention_mask, ("batch", "heads", "num_nodes", "key_len"), DTYPES)
    batch, heads, size, width = attention_mask.shape
    if heads != 1:
        raise call.error(
            f"`attention_mask` differs by head ({heads} of them), a Visibility serves all heads", UnsupportedError
        )
    past = call.lengths("context_lens", context_lens, batch)
    start = _start(call, past, past_len)
    if width < start + size:
        raise call.error(
            f"`attention_mask` has {width} columns, expected at least {start + size}: {start} of the cache and one "
            "per node",
            ShapeError,
        )
    counts = call.node_counts("num_nodes", num_nodes, batch, size)
    dense = np.zeros((batch, size, size), bool)
    for request, (length, count) in enumerate(zip(past.tolist(), counts.tolist(), strict=True)):
        rows = read_additive(call, request, attention_mask[request, 0, :count])
        for row in np.flatnonzero(~rows.any(axis=-1)):
            raise call.error(
                f"row {row} of request {request} hides every key; in transformers it gives NaN or a mean over hidden "
                "keys, here 0",
                UnsupportedError,
            )
        context = _context(length, start, context_padding)
        nodes = slice(start, start + count)
        dense[request, :count, :count] = strip_context(call, request, rows[:, nodes], rows[:, context])
        rows[:, context] = rows[:, nodes] = False
        for row, column in np.argwhere(rows):
            raise call.error(
                f"row {row} of request {request} sees key {column}, which is neither context (columns "
                f"{context.start}..{context.stop - 1}) nor a node ({start}..{start + count - 1})",
                UnsupportedError,
            )
    return visibility_from(dense, counts)


def to_huggingface(
    tree: DraftTree, context_lens: npt.ArrayLike, *, pad_token_id: int | None = None, **options: Any
) -> dict[str, npt.NDArray[Any]]:
    """Return the keyword arguments of `model.forward` that verify a tree: input_ids, attention_mask, position_ids.

    Parameters
    ----------
    tree : DraftTree
        One request or a batch; the root is the first input token.
    context_lens : int or int array_like, shape (B)
        Keys already in the cache, without the root.
    pad_token_id : int, optional
        Token for nodes from num_nodes on; without it, trees with padding raise.
    **options
        Those of `to_huggingface_mask`.

    Returns
    -------
    dict
        input_ids int64 (B, N); attention_mask (B, 1, N, key_len); position_ids int64 (B, N), which is context_len +
        depth, and for padding the position of the root.

    Raises
    ------
    UnsupportedError
        Padding without `pad_token_id`; see also `to_huggingface_mask`.

    Notes
    -----
    Positions count the context of each request, not cache slots; give the model `position_ids`, else it counts
    slots and siblings get different positions. The keys of rejected nodes stay in the cache: crop or move them.

    Examples
    --------
    >>> tree = DraftTree.from_parents([7, 10, 20, 11], [-1, 0, 1, 0])
    >>> to_huggingface(tree, 3)["position_ids"].tolist()
    [[3, 4, 5, 4]]
    """
    call = Call("to_huggingface")
    batched = call.tree(tree)
    tokens = call.padded_tokens(batched, pad_token_id)
    past = call.lengths("context_lens", context_lens, len(tokens))
    return {
        "input_ids": tokens,
        "attention_mask": to_huggingface_mask(batched, past, **options),
        "position_ids": past[:, None] + np.maximum(batched.depths, 0),
    }


def from_huggingface(arrays: Mapping[str, Array], context_lens: npt.ArrayLike, **options: Any) -> DraftTree:
    """Make a tree of input_ids, attention_mask and position_ids, with its request axis; the positions are checked.

    Parameters
    ----------
    arrays : mapping of str to array
        The keys of `to_huggingface`; others are ignored.
    context_lens : int or int array_like, shape (B)
        Keys already in the cache, without the root.
    **options
        Those of `from_huggingface_mask`.

    Returns
    -------
    DraftTree
        Batched; path_scores None.

    Raises
    ------
    UnsupportedError
        A mask that belongs to no tree, a token beyond int32; see also `from_huggingface_mask`.
    ShapeError, DTypeError, ArgumentError
        A missing array, positions that are not context_len + depth, siblings that share a token.

    Examples
    --------
    >>> tree = DraftTree.from_parents([7, 10, 20, 11], [-1, 0, 1, 0])
    >>> from_huggingface(to_huggingface(tree, 3), 3).parents.tolist()
    [[-1, 0, 1, 0]]
    """
    call = Call("from_huggingface")
    call.mapping(arrays, ("input_ids", "attention_mask", "position_ids"))
    mask = from_huggingface_mask(arrays["attention_mask"], context_lens, **options)
    tree = call.tree_behind(mask, "input_ids", arrays["input_ids"])
    batch, size = tree.token_ids.shape
    positions = call.integers("position_ids", arrays["position_ids"], (batch, size))
    past = call.lengths("context_lens", context_lens, batch)
    call.positions("position_ids", positions, tree.depths, past, "{expected}: context_len plus the depth")
    return tree
