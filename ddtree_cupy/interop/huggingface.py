"""Hugging Face transformers: the keyword arguments of `model.forward` that verify a tree."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import Checker
from ddtree_cupy.containers import DraftTree
from ddtree_cupy.errors import ArgumentError
from ddtree_cupy.interop._host import integers, lengths, mapping_with, padded_tokens, tree_on_host
from ddtree_cupy.interop.huggingface_masks import from_huggingface_mask, to_huggingface_mask
from ddtree_cupy.interop.parents import tree_behind

Array = Any


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
        input_ids int64 (B, N); attention_mask (B, 1, N, key_len); position_ids int64 (B, N), context_len + depth,
        that of the root for padding.

    Raises
    ------
    UnsupportedError
        Padding without `pad_token_id`, see also `to_huggingface_mask`.
    ShapeError, DTypeError, ArgumentError
        As in `to_huggingface_mask`.

    Notes
    -----
    Positions count the context of each request, not cache slots; give the model `position_ids`, else it counts
    slots and siblings get different positions. Cache slots of rejected nodes stay in the cache: crop or move them.

    Examples
    --------
    >>> tree = DraftTree.from_parents([7, 10, 20, 11], [-1, 0, 1, 0])
    >>> to_huggingface(tree, 3)["position_ids"].tolist()
    [[3, 4, 5, 4]]
    """
    function = "to_huggingface"
    batched = tree_on_host(function, tree)
    tokens = padded_tokens(function, batched, pad_token_id)
    past = lengths(function, "context_lens", context_lens, len(tokens))
    return {
        "input_ids": tokens,
        "attention_mask": to_huggingface_mask(batched, past, **options),
        "position_ids": past[:, None] + np.maximum(batched.depths, 0),
    }


def from_huggingface(
    arrays: Mapping[str, Array],
    context_lens: npt.ArrayLike,
    *,
    num_nodes: npt.ArrayLike | None = None,
    context_padding: str = "left",
    past_len: int | None = None,
) -> DraftTree:
    """Make a tree of input_ids, attention_mask and position_ids, with its request axis; the positions are checked.

    Parameters
    ----------
    arrays : mapping of str to array
        The keys of `to_huggingface`; others are ignored.
    context_lens, num_nodes, context_padding, past_len
        As in `from_huggingface_mask`.

    Returns
    -------
    DraftTree
        Batched; path_scores None.

    Raises
    ------
    UnsupportedError
        A mask that is no tree's, a token beyond int32, see also `from_huggingface_mask`.
    ShapeError, DTypeError, ArgumentError
        A missing array, positions that are not context_len + depth, siblings that share a token.

    Examples
    --------
    >>> tree = DraftTree.from_parents([7, 10, 20, 11], [-1, 0, 1, 0])
    >>> from_huggingface(to_huggingface(tree, 3), 3).parents.tolist()
    [[-1, 0, 1, 0]]
    """
    function = "from_huggingface"
    mapping_with(function, arrays, ("input_ids", "attention_mask", "position_ids"))
    mask = from_huggingface_mask(
        arrays["attention_mask"], context_lens, num_nodes=num_nodes, context_padding=context_padding, past_len=past_len
    )
    tree = tree_behind(function, mask, "input_ids", arrays["input_ids"])
    batch, size = tree.token_ids.shape
    positions = integers(Checker(function), "position_ids", arrays["position_ids"], (batch, size))
    past = lengths(function, "context_lens", context_lens, batch)
    wrong = np.argwhere((tree.depths >= 0) & (positions != past[:, None] + tree.depths))
    if wrong.size:
        request, node = wrong[0]
        raise ArgumentError(
            f"{function}: `position_ids` of node {node} of request {request} is {positions[request, node]}, expected "
            f"{past[request] + tree.depths[request, node]}: context_len plus the depth"
        )
    return tree
