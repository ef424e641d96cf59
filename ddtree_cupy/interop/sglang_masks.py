"""SGLang's tree masks: FULL_MASK, QLEN_ONLY and QLEN_ONLY_BITPACKING."""

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import Checker
from ddtree_cupy.containers import DraftTree, Visibility
from ddtree_cupy.errors import ArgumentError, ShapeError, UnsupportedError
from ddtree_cupy.interop._host import (
    addressable,
    check_host,
    dense_on_host,
    integer_array,
    lengths,
    node_counts,
)
from ddtree_cupy.interop._masks import LAYOUTS, Layout, read_flat, write_flat


class TreeMaskMode(IntEnum):
    """SGLang's three layouts of `tree_mask`, with its names and numbers."""

    FULL_MASK = 0
    QLEN_ONLY = 1
    QLEN_ONLY_BITPACKING = 2


def mask_mode(function: str, mode: Any) -> TreeMaskMode:
    """Return the mode for a TreeMaskMode, its number or its name.

    Parameters
    ----------
    function : str
        The caller, for the message.
    mode : TreeMaskMode, int or str

    Raises
    ------
    ArgumentError
        Anything else.
    """
    try:
        return TreeMaskMode[mode] if isinstance(mode, str) else TreeMaskMode(mode)
    except (KeyError, ValueError):
        known = ", ".join(f"{known.name}={known.value}" for known in TreeMaskMode)
        raise ArgumentError(f"{function}: `mode` is {mode!r}, expected one of {known}") from None


def _dtype(function: str, layout: Layout, draft_token_num: int) -> "np.dtype[Any]":
    """Return that of the mask: bool, or the narrowest word that holds a row."""
    if layout.unit == "cell":
        return np.dtype(bool)
    for bits in (8, 16, 32):
        if draft_token_num <= bits:
            return np.dtype(f"uint{bits}")
    raise UnsupportedError(
        f"{function}: QLEN_ONLY_BITPACKING holds one word of at most 32 bits a row, this tree has {draft_token_num} "
        f"nodes; use QLEN_ONLY, or TensorRT-LLM's packed words, which span several a row"
    )


def to_sglang_mask(
    visibility: Visibility | DraftTree,
    context_lens: npt.ArrayLike | None = None,
    *,
    mode: TreeMaskMode | int | str = TreeMaskMode.FULL_MASK,
) -> npt.NDArray[Any]:
    """Return the flat `tree_mask` of a batch in which every request has D = N rows, the root among them.

    FULL_MASK concatenates, request by request, D rows of context_len + D cells; QLEN_ONLY leaves the context
    columns out; QLEN_ONLY_BITPACKING holds bit j of a row (bit 0 first) in one word.

    Parameters
    ----------
    visibility : Visibility or DraftTree
        Any boolean matrix. Rows from num_nodes on see the context and themselves, since SGLang runs them anyhow.
    context_lens : int or int array_like, shape (B)
        Keys already in the cache, SGLang's `seq_lens`. Needed by FULL_MASK only.
    mode : TreeMaskMode, its number or its name
        The layout.

    Returns
    -------
    bool array, shape (sum of D * (context_len + D)) or (B * D * D); uint8, uint16 or uint32, shape (B * D), for
    D up to 8, 16 and 32

    Raises
    ------
    UnsupportedError
        QLEN_ONLY_BITPACKING with D > 32: SGLang has no second word.
    ShapeError, DTypeError, ArgumentError
        Lengths that do not fit, arrays on a GPU, an unknown mode.

    Notes
    -----
    True = may attend. The mask does not tell how many of the D rows are real; `from_sglang_mask` takes
    `num_nodes=`. Source: `build_tree_efficient` in sgl-kernel/csrc/speculative/eagle_utils.cu and
    python/sglang/srt/speculative/eagle_utils.py of github.com/sgl-project/sglang.

    Examples
    --------
    >>> tree = DraftTree.from_parents([7, 10, 20, 11], [-1, 0, 1, 0])
    >>> to_sglang_mask(tree, mode="QLEN_ONLY_BITPACKING").tolist()
    [1, 3, 7, 9]
    >>> to_sglang_mask(tree, 2).reshape(4, 6).astype(int)[3].tolist()
    [1, 1, 1, 0, 0, 1]
    """
    function = "to_sglang_mask"
    chosen = mask_mode(function, mode)
    layout = LAYOUTS[chosen.name]
    dense, counts = dense_on_host(function, visibility)
    batch, size, _ = dense.shape
    dtype = _dtype(function, layout, size)
    past = np.zeros(batch, np.int64)
    if layout.context:
        if context_lens is None:
            raise ArgumentError(f"{function}: FULL_MASK has context columns and so needs `context_lens`")
        past = lengths(function, "context_lens", context_lens, batch)
        addressable(function, "context_lens", (size, sum(past.tolist()) + batch * size))
    return write_flat(layout, dense, counts, past).astype(dtype, copy=False)


def from_sglang_mask(
    tree_mask: npt.NDArray[Any],
    *,
    draft_token_num: int,
    context_lens: npt.ArrayLike | None = None,
    num_nodes: npt.ArrayLike | None = None,
    mode: TreeMaskMode | int | str = TreeMaskMode.FULL_MASK,
) -> Visibility:
    """Read a `tree_mask` back, always with its request axis.

    Parameters
    ----------
    tree_mask : bool array, 1-d (uint8, uint16 or uint32 when packed)
        Exactly the cells of this batch: cut a larger, reused buffer first, its tail belongs to another batch.
    draft_token_num : int
        D, SGLang's rows a request, root included.
    context_lens : int or int array_like, shape (B)
        SGLang's `seq_lens`; needed by FULL_MASK only.
    num_nodes : int array_like, shape (B), default D
        How many of the D rows are real; the rest is ignored.
    mode : TreeMaskMode, its number or its name
        The layout.

    Returns
    -------
    Visibility
        Batched, N = D.

    Raises
    ------
    ShapeError
        The number of cells is not that of the batch (a mask made for a padded batch, or D counted twice).
    UnsupportedError
        A row hides context (a sliding window), or D > 32 when packed.
    DTypeError, ArgumentError
        Another dtype than the mode has, lengths out of range, an unknown mode.

    Examples
    --------
    >>> packed = np.array([1, 3, 7, 9], np.uint8)
    >>> from_sglang_mask(packed, draft_token_num=4, mode=2).to_dense()[0, 3].astype(int).tolist()
    [1, 0, 0, 1]
    """
    function = "from_sglang_mask"
    chosen = mask_mode(function, mode)
    layout = LAYOUTS[chosen.name]
    check = Checker(function)
    size = check.integer("draft_token_num", draft_token_num, low=1)
    check_host(check, "tree_mask", tree_mask)
    check.array("tree_mask", tree_mask, ("cells",), (_dtype(function, layout, size).name,))
    if layout.context and context_lens is None:
        raise ArgumentError(f"{function}: FULL_MASK has context columns and so needs `context_lens`")
    each = size if layout.unit == "word" else size * size
    batch = tree_mask.size // each
    past = np.zeros(batch, np.int64)
    if context_lens is not None:
        batch = integer_array(function, "context_lens", context_lens).size
        past = lengths(function, "context_lens", context_lens, batch)
    cells = batch * each + size * sum(past.tolist()) * layout.context
    if tree_mask.size != cells:
        raise ShapeError(
            f"{function}: `tree_mask` has {tree_mask.size} cells, expected {cells} for {batch} requests of {size} "
            f"rows in {chosen.name}; cut a reused buffer, and count the same requests on both sides"
        )
    addressable(function, "draft_token_num", (batch, size, size))
    counts = node_counts(function, "num_nodes", num_nodes, batch, size)
    return read_flat(function, layout, tree_mask, past, counts, size)
