"""SGLang's EAGLE verification inputs: flat tokens, retrieve links, positions and a tree mask."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import Checker
from ddtree_cupy.containers import DraftTree
from ddtree_cupy.errors import ArgumentError, UnsupportedError
from ddtree_cupy.interop._host import (
    as_int32,
    integers,
    lengths,
    mapping_with,
    padded_tokens,
    tree_of,
    tree_on_host,
)
from ddtree_cupy.interop.sglang_masks import TreeMaskMode, from_sglang_mask, mask_mode, to_sglang_mask

Array = Any
SPELLINGS = ("retrieve", "retrive")


def to_sglang(
    tree: DraftTree,
    context_lens: npt.ArrayLike,
    *,
    mode: TreeMaskMode | int | str = TreeMaskMode.FULL_MASK,
    pad_token_id: int | None = None,
    spelling: str = "retrieve",
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays SGLang verifies a tree with; D = N tokens a request, the root (bonus of last round) first.

    Parameters
    ----------
    tree : DraftTree
        One request or a batch; the result always has the batch in it.
    context_lens : int or int array_like, shape (B)
        Keys already in the cache, SGLang's `seq_lens`: without the root.
    mode : TreeMaskMode, its number or its name
        Layout of `tree_mask`, see `to_sglang_mask`.
    pad_token_id : int, optional
        Token for nodes from num_nodes on: SGLang runs exactly D rows a request. They hang in no link, so the walk
        never reaches them. Without it, trees of unequal size raise.
    spelling : {"retrieve", "retrive"}
        Prefix of the three link arrays: SGLang's Python renamed them, its kernels kept the old spelling.

    Returns
    -------
    dict
        draft_token int64 (B * D); positions int64 (B * D), context_len + depth; retrieve_index int64 (B, D), the
        row b * D + i of node i in the flat arrays; retrieve_next_token and retrieve_next_sibling int64 (B, D),
        node indices inside the request, -1 for none; tree_mask (`custom_mask` in EagleVerifyInput).

    Raises
    ------
    UnsupportedError
        Trees of unequal size without `pad_token_id`; an inactive request (SGLang always has a root); more than 32
        nodes when packed.
    ShapeError, DTypeError, ArgumentError
        Lengths that do not fit, arrays on a GPU, an unknown mode or spelling.

    Notes
    -----
    All index arrays are int64 (the kernels check that), ours are int32. Links equal `first_child` and
    `next_sibling`. The position of a padding row is that of the root. Source: python/sglang/srt/speculative/
    eagle_utils.py and sgl-kernel/csrc/speculative/eagle_utils.cu of github.com/sgl-project/sglang.

    Examples
    --------
    >>> tree = DraftTree.from_parents([7, 10, 20, 11], [-1, 0, 1, 0])
    >>> arrays = to_sglang(tree, 3, mode="QLEN_ONLY")
    >>> arrays["positions"].tolist(), arrays["retrieve_next_sibling"].tolist()
    ([3, 4, 5, 4], [[-1, 3, -1, -1]])
    """
    function = "to_sglang"
    Checker(function).choice("spelling", spelling, SPELLINGS)
    layout = mask_mode(function, mode)
    batched = tree_on_host(function, tree)
    batch, size = batched.token_ids.shape
    inactive = np.flatnonzero(batched.num_nodes == 0)
    if inactive.size:
        raise UnsupportedError(
            f"{function}: request {inactive[0]} is inactive (num_nodes 0), but SGLang's walk always starts at a root; "
            f"leave the request out of the batch"
        )
    past = lengths(function, "context_lens", context_lens, batch)
    tokens = padded_tokens(function, batched, pad_token_id)
    return {
        "draft_token": tokens.ravel(),
        "positions": (past[:, None] + np.maximum(batched.depths, 0)).ravel(),
        f"{spelling}_index": np.arange(batch * size, dtype=np.int64).reshape(batch, size),
        f"{spelling}_next_token": batched.first_child.astype(np.int64),
        f"{spelling}_next_sibling": batched.next_sibling.astype(np.int64),
        "tree_mask": to_sglang_mask(batched, past, mode=layout),
    }


def _field(arrays: Mapping[str, Array], *names: str) -> Array:
    found = [name for name in names if name in arrays]
    if len(found) != 1:
        given = "none of them" if not found else "all of them"
        raise ArgumentError(f"from_sglang: expected one of {', '.join(map(repr, names))} in `arrays`, got {given}")
    return arrays[found[0]]


def _walk(request: int, next_token: list[int], next_sibling: list[int]) -> list[int]:
    """Return the parent of every node, -1 for the root and -2 for nodes no link leads to."""
    count = len(next_token)
    parents = [-1, *([-2] * (count - 1))]
    if next_sibling[0] != -1:
        raise ArgumentError(
            f"from_sglang: the root of request {request} has the sibling {next_sibling[0]}, expected -1"
        )
    for parent in range(count):  # a parent comes before its children, so node order reaches every node in time
        if parents[parent] == -2:
            continue
        child = next_token[parent]
        while child != -1:
            if not parent < child < count:
                raise UnsupportedError(
                    f"from_sglang: node {parent} of request {request} links to child {child}, expected {parent} < "
                    f"child < {count}: a node comes after its parent"
                )
            if parents[child] != -2:
                raise ArgumentError(
                    f"from_sglang: node {child} of request {request} is a child of nodes {parents[child]} and "
                    f"{parent}, or linked twice"
                )
            parents[child] = parent
            child = next_sibling[child]
    return parents


def _tree(arrays: Mapping[str, Array]) -> tuple[DraftTree, npt.NDArray[np.int64]]:
    """Return the tree behind the links and the positions (B, D)."""
    check = Checker("from_sglang")
    index, children, siblings = (
        integers(check, f"retrieve_{part}", _field(arrays, f"retrieve_{part}", f"retrive_{part}"), ("batch", "D"))
        for part in ("index", "next_token", "next_sibling")
    )
    batch, size = index.shape
    if size == 0:
        raise ArgumentError("from_sglang: D is 0, expected at least the root")
    tokens = integers(check, "draft_token", _field(arrays, "draft_token"), (batch * size,)).reshape(batch, size)
    positions = integers(check, "positions", _field(arrays, "positions"), (batch * size,)).reshape(batch, size)
    parents = np.full((batch, size), -2, np.int64)
    for request in range(batch):
        parents[request] = _walk(request, children[request].tolist(), siblings[request].tolist())
    linked = parents != -2
    counts = linked.sum(axis=1)
    holes = np.argwhere(linked != (np.arange(size) < counts[:, None]))
    if holes.size:
        request = holes[0][0]
        node = int(np.flatnonzero(~linked[request])[0])
        raise UnsupportedError(
            f"from_sglang: no link leads to node {node} of request {request}, though later nodes are linked; SGLang "
            f"skips such a node (its parent was not selected, often after NaN scores), a DraftTree cannot hold it"
        )
    stray = np.argwhere(~linked & ((children >= 0) | (siblings >= 0)))
    if stray.size:
        request, node = stray[0]
        raise ArgumentError(
            f"from_sglang: node {node} of request {request} has links, though none leads to it; expected -1 in the "
            f"rows of padding"
        )
    rows = np.arange(batch * size).reshape(batch, size)
    wrong = np.argwhere(linked & (index != rows))
    if wrong.size:
        request, node = wrong[0]
        raise UnsupportedError(
            f"from_sglang: `retrieve_index`[{request}, {node}] is {index[request, node]}, expected "
            f"{rows[request, node]}: node i of request b sits in row b * D + i of the flat arrays"
        )
    if (tokens[linked] < 0).any():
        raise ArgumentError("from_sglang: `draft_token` holds a token below 0 in a linked row")
    return tree_of("from_sglang", "draft_token", np.where(linked, tokens, -1), np.where(linked, parents, -1)), positions


def from_sglang(
    arrays: Mapping[str, Array], *, mode: TreeMaskMode | int | str = TreeMaskMode.FULL_MASK
) -> tuple[DraftTree, npt.NDArray[np.int32]]:
    """Read SGLang's arrays back and check that links, positions and mask tell of the same tree.

    Parameters
    ----------
    arrays : mapping of str to int64 (or int32) and mask arrays
        The keys of `to_sglang`, in either spelling; `tree_mask` may be called `custom_mask` as in
        EagleVerifyInput. Other keys are ignored.
    mode : TreeMaskMode, its number or its name
        Layout of the mask.

    Returns
    -------
    tree : DraftTree
        Batched, N = D; node i is row i of its request. Rows at the end that no link reaches are padding; path_scores
        None.
    context_lens : int32 array, shape (B)
        The position of the root.

    Raises
    ------
    UnsupportedError
        A node without a link before linked ones, a child before its parent, rows in another order than b * D + i,
        token ids or lengths beyond int32, a mask that hides context.
    ShapeError, DTypeError, ArgumentError
        Missing arrays, shapes that do not fit, a node with two parents, siblings that share a token, positions or
        a mask that do not follow from the links.

    Notes
    -----
    Siblings may be linked in any order, also one that runs against their rows. The tree links them by ascending row,
    as every DraftTree does; the walk takes the same path, since their tokens are distinct, and nodes keep their
    numbers, so that results go back by `to_sglang_accept` as they are.

    Examples
    --------
    >>> tree = DraftTree.from_parents([7, 10, 20, 11], [-1, 0, 1, 0])
    >>> same, context_lens = from_sglang(to_sglang(tree, 3))
    >>> same.parents.tolist(), context_lens.tolist()
    ([[-1, 0, 1, 0]], [3])
    """
    function = "from_sglang"
    layout = mask_mode(function, mode)
    mapping_with(function, arrays, ())
    tree, positions = _tree(arrays)
    valid = tree.depths >= 0
    past = lengths(function, "positions of the roots", positions[:, 0], len(positions))
    wrong = np.argwhere(valid & (positions != past[:, None] + tree.depths))
    if wrong.size:
        request, node = wrong[0]
        raise ArgumentError(
            f"{function}: `positions` of node {node} of request {request} is {positions[request, node]}, expected "
            f"{past[request] + tree.depths[request, node]}: the root's {past[request]} plus the depth"
        )
    mask = from_sglang_mask(
        _field(arrays, "tree_mask", "custom_mask"),
        draft_token_num=positions.shape[1],
        context_lens=past,
        num_nodes=tree.num_nodes,
        mode=layout,
    )
    differ = np.argwhere(mask.to_dense() != tree.visibility)
    if differ.size:
        request, node, key = differ[0]
        wrongly = "hides" if tree.visibility[request, node, key] else "shows"
        raise ArgumentError(
            f"{function}: the mask of request {request} {wrongly} node {key} in row {node}, against the links"
        )
    return tree, as_int32(function, "positions", past, "context lengths are int32 here")
