"""SGLang's EAGLE verification: its inputs (tokens, links, positions), its tree masks, and its results."""

from collections.abc import Mapping
from enum import IntEnum
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy.containers import AcceptResult, DraftTree, Visibility
from ddtree_cupy.errors import ShapeError, UnsupportedError
from ddtree_cupy.interop._host import Call
from ddtree_cupy.interop._masks import LAYOUTS, Layout, read_flat, write_flat

Array = Any
SPELLINGS = ("retrieve", "retrive")


class TreeMaskMode(IntEnum):
    """SGLang's three layouts of `tree_mask`, with its names and numbers."""

    FULL_MASK = 0
    QLEN_ONLY = 1
    QLEN_ONLY_BITPACKING = 2


def _mask_mode(call: Call, mode: Any) -> TreeMaskMode:
    """Return the mode for a TreeMaskMode, its number or its name."""
    try:
        return TreeMaskMode[mode] if isinstance(mode, str) else TreeMaskMode(mode)
    except (KeyError, ValueError):
        known = ", ".join(f"{known.name}={known.value}" for known in TreeMaskMode)
        raise call.error(f"`mode` is {mode!r}, expected one of {known}") from None


def _dtype(call: Call, layout: Layout, draft_token_num: int) -> "np.dtype[Any]":
    """Return the dtype of the mask: bool, or the narrowest word that holds a row."""
    if layout.unit == "cell":
        return np.dtype(bool)
    for bits in (8, 16, 32):
        if draft_token_num <= bits:
            return np.dtype(f"uint{bits}")
    raise call.error(
        f"QLEN_ONLY_BITPACKING holds one word of at most 32 bits per row, this tree has {draft_token_num} nodes; use "
        "QLEN_ONLY, or TensorRT-LLM's packed words, several of which hold a row",
        UnsupportedError,
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
        Any boolean matrix. Rows from num_nodes on see the context and themselves, as SGLang computes them too.
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
    call = Call("to_sglang_mask")
    chosen = _mask_mode(call, mode)
    layout = LAYOUTS[chosen.name]
    dense, counts = call.dense(visibility)
    batch, size, _ = dense.shape
    dtype = _dtype(call, layout, size)
    past = np.zeros(batch, np.int64)
    if layout.context:
        if context_lens is None:
            raise call.error("FULL_MASK has context columns and so needs `context_lens`")
        past = call.lengths("context_lens", context_lens, batch)
        call.addressable("context_lens", (size, sum(past.tolist()) + batch * size))
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
        Exactly the cells of this batch. Cut a larger, reused buffer first: its tail belongs to another batch.
    draft_token_num : int
        D, the rows of each request in SGLang, root included.
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

    Examples
    --------
    >>> packed = np.array([1, 3, 7, 9], np.uint8)
    >>> from_sglang_mask(packed, draft_token_num=4, mode=2).to_dense()[0, 3].astype(int).tolist()
    [1, 0, 0, 1]
    """
    call = Call("from_sglang_mask")
    chosen = _mask_mode(call, mode)
    layout = LAYOUTS[chosen.name]
    size = call.integer("draft_token_num", draft_token_num, low=1)
    call.host("tree_mask", tree_mask, ("cells",), (_dtype(call, layout, size).name,))
    if layout.context and context_lens is None:
        raise call.error("FULL_MASK has context columns and so needs `context_lens`")
    each = size if layout.unit == "word" else size * size
    batch = tree_mask.size // each
    past = np.zeros(batch, np.int64)
    if context_lens is not None:
        batch = call.integer_array("context_lens", context_lens).size
        past = call.lengths("context_lens", context_lens, batch)
    cells = batch * each + size * sum(past.tolist()) * layout.context
    if tree_mask.size != cells:
        raise call.error(
            f"`tree_mask` has {tree_mask.size} cells, expected {cells} for {batch} requests of {size} rows in "
            f"{chosen.name}; cut a reused buffer, and count the same requests on both sides",
            ShapeError,
        )
    call.addressable("draft_token_num", (batch, size, size))
    counts = call.node_counts("num_nodes", num_nodes, batch, size)
    return read_flat(call, layout, tree_mask, past, counts, size)


def to_sglang(
    tree: DraftTree,
    context_lens: npt.ArrayLike,
    *,
    mode: TreeMaskMode | int | str = TreeMaskMode.FULL_MASK,
    pad_token_id: int | None = None,
    spelling: str = "retrieve",
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays with which SGLang verifies a tree: D = N tokens per request, the last bonus (the root) first.

    Parameters
    ----------
    tree : DraftTree
        One request or a batch; the result always has the request axis.
    context_lens : int or int array_like, shape (B)
        Keys already in the cache, SGLang's `seq_lens`: without the root.
    mode : TreeMaskMode, its number or its name
        Layout of `tree_mask`, see `to_sglang_mask`.
    pad_token_id : int, optional
        Token for nodes from num_nodes on, as SGLang runs exactly D rows per request. No link leads to them, so the
        walk never reaches them. Without it, trees of unequal size raise.
    spelling : {"retrieve", "retrive"}
        Prefix of the three link arrays: SGLang's Python code renamed them, its kernels kept the old spelling.

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

    Notes
    -----
    All index arrays are int64, which SGLang's kernels check; those of this library are int32. Links equal `first_child`
    and `next_sibling`. The position of a padding row is that of the root. Source: python/sglang/srt/speculative/
    eagle_utils.py and sgl-kernel/csrc/speculative/eagle_utils.cu of github.com/sgl-project/sglang.

    Examples
    --------
    >>> tree = DraftTree.from_parents([7, 10, 20, 11], [-1, 0, 1, 0])
    >>> arrays = to_sglang(tree, 3, mode="QLEN_ONLY")
    >>> arrays["positions"].tolist(), arrays["retrieve_next_sibling"].tolist()
    ([3, 4, 5, 4], [[-1, 3, -1, -1]])
    """
    call = Call("to_sglang")
    call.choice("spelling", spelling, SPELLINGS)
    layout = _mask_mode(call, mode)
    batched = call.tree(tree)
    batch, size = batched.token_ids.shape
    for request in np.flatnonzero(batched.num_nodes == 0):
        raise call.error(
            f"request {request} is inactive (num_nodes 0), but SGLang's walk always starts at a root; leave the "
            "request out of the batch",
            UnsupportedError,
        )
    past = call.lengths("context_lens", context_lens, batch)
    tokens = call.padded_tokens(batched, pad_token_id)
    return {
        "draft_token": tokens.ravel(),
        "positions": (past[:, None] + np.maximum(batched.depths, 0)).ravel(),
        f"{spelling}_index": np.arange(batch * size, dtype=np.int64).reshape(batch, size),
        f"{spelling}_next_token": batched.first_child.astype(np.int64),
        f"{spelling}_next_sibling": batched.next_sibling.astype(np.int64),
        "tree_mask": to_sglang_mask(batched, past, mode=layout),
    }


def _field(call: Call, arrays: Mapping[str, Array], *names: str) -> Array:
    found = [name for name in names if name in arrays]
    if len(found) != 1:
        given = "none of them" if not found else "all of them"
        raise call.error(f"expected one of {', '.join(map(repr, names))} in `arrays`, got {given}")
    return arrays[found[0]]


def _walk(call: Call, request: int, next_token: list[int], next_sibling: list[int]) -> list[int]:
    """Return the parent of every node, -1 for the root and -2 for nodes no link leads to."""
    count = len(next_token)
    parents = [-1, *([-2] * (count - 1))]
    if next_sibling[0] != -1:
        raise call.error(f"the root of request {request} has the sibling {next_sibling[0]}, expected -1")
    for parent in range(count):  # a parent comes before its children, so its own parent is known here
        if parents[parent] == -2:
            continue
        child = next_token[parent]
        while child != -1:
            if not parent < child < count:
                raise call.error(
                    f"node {parent} of request {request} links to child {child}, expected {parent} < child < {count}: "
                    "a node comes after its parent",
                    UnsupportedError,
                )
            if parents[child] != -2:
                raise call.error(
                    f"node {child} of request {request} is a child of nodes {parents[child]} and {parent}, or linked "
                    "twice"
                )
            parents[child] = parent
            child = next_sibling[child]
    return parents


def _tree(call: Call, arrays: Mapping[str, Array]) -> tuple[DraftTree, npt.NDArray[np.int64]]:
    """Return the tree behind the links and the positions (B, D)."""
    index, children, siblings = (
        call.integers(f"retrieve_{part}", _field(call, arrays, f"retrieve_{part}", f"retrive_{part}"), ("batch", "D"))
        for part in ("index", "next_token", "next_sibling")
    )
    batch, size = index.shape
    if size == 0:
        raise call.error("D is 0, expected at least the root")
    tokens = call.integers("draft_token", _field(call, arrays, "draft_token"), (batch * size,)).reshape(batch, size)
    positions = call.integers("positions", _field(call, arrays, "positions"), (batch * size,)).reshape(batch, size)
    parents = np.full((batch, size), -2, np.int64)
    for request in range(batch):
        parents[request] = _walk(call, request, children[request].tolist(), siblings[request].tolist())
    linked = parents != -2
    counts = linked.sum(axis=1)
    for request, _ in np.argwhere(linked != (np.arange(size) < counts[:, None])):
        node = int(np.flatnonzero(~linked[request])[0])
        raise call.error(
            f"no link leads to node {node} of request {request}, though later nodes are linked; SGLang skips such a "
            "node (its parent was not selected, often after NaN scores), a DraftTree cannot hold it",
            UnsupportedError,
        )
    for request, node in np.argwhere(~linked & ((children >= 0) | (siblings >= 0))):
        raise call.error(
            f"node {node} of request {request} has links, though none leads to it; expected -1 in the rows of padding"
        )
    rows = np.arange(batch * size).reshape(batch, size)
    for request, node in np.argwhere(linked & (index != rows)):
        raise call.error(
            f"`retrieve_index`[{request}, {node}] is {index[request, node]}, expected {rows[request, node]}: node i "
            "of request b sits in row b * D + i of the flat arrays",
            UnsupportedError,
        )
    if (tokens[linked] < 0).any():
        raise call.error("`draft_token` holds a token below 0 in a linked row")
    tree = call.tree_of("draft_token", np.where(linked, tokens, -1), np.where(linked, parents, -1))
    return tree, positions


def from_sglang(
    arrays: Mapping[str, Array], *, mode: TreeMaskMode | int | str = TreeMaskMode.FULL_MASK
) -> tuple[DraftTree, npt.NDArray[np.int32]]:
    """Read SGLang's arrays back and check that links, positions and mask describe the same tree.

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
    Siblings may be linked in any order, also against the order of their rows. The tree links them by ascending row,
    as every DraftTree does. The walk takes the same path, since their tokens are distinct, and nodes keep their
    numbers, so results can be passed to `to_sglang_accept` unchanged.

    Examples
    --------
    >>> tree = DraftTree.from_parents([7, 10, 20, 11], [-1, 0, 1, 0])
    >>> same, context_lens = from_sglang(to_sglang(tree, 3))
    >>> same.parents.tolist(), context_lens.tolist()
    ([[-1, 0, 1, 0]], [3])
    """
    call = Call("from_sglang")
    layout = _mask_mode(call, mode)
    call.mapping(arrays, ())
    tree, positions = _tree(call, arrays)
    past = call.lengths("positions of the roots", positions[:, 0], len(positions))
    call.positions("positions", positions, tree.depths, past, "{expected}: the root's {past} plus the depth")
    mask = from_sglang_mask(
        _field(call, arrays, "tree_mask", "custom_mask"),
        draft_token_num=positions.shape[1],
        context_lens=past,
        num_nodes=tree.num_nodes,
        mode=layout,
    )
    for request, node, key in np.argwhere(mask.to_dense() != tree.visibility):
        wrongly = "hides" if tree.visibility[request, node, key] else "shows"
        raise call.error(f"the mask of request {request} {wrongly} node {key} in row {node}, against the links")
    return tree, call.as_int32("positions", past, "context lengths are int32 here")


def _check_path(call: Call, request: int, path: list[int], tree: DraftTree) -> None:
    parents = tree.parents[request]
    for before, node in pairwise(path):
        if parents[node] != before:
            raise call.error(f"request {request} accepts node {node} after {before}, but its parent is {parents[node]}")


def to_sglang_accept(
    result: AcceptResult, tree: DraftTree, *, num_spec_step: int | None = None, counts_bonus: bool = False
) -> dict[str, npt.NDArray[np.int32]]:
    """Return what SGLang's `verify_tree_greedy` writes for an accepted path.

    Parameters
    ----------
    result : AcceptResult
        One request or a batch; shape ([B,] N).
    tree : DraftTree
        The tree it belongs to, with N = D nodes: its tokens become the predictions along the path.
    num_spec_step : int, default N
        S, columns of `accept_index`: SGLang's spec_steps + 1, so the root counts.
    counts_bonus : bool
        Whether `accept_token_num` counts the bonus: the kernel does not, `accept_length` after SGLang's sampling
        code (`add_(1)`, later `accept_lens`) does.

    Returns
    -------
    dict
        predicts int32 (B * D), the target's token in the rows of the path, 0 elsewhere; accept_index int32 (B, S),
        flat rows b * D + node from the root down, -1 for none; accept_token_num int32 (B), root excluded.

    Raises
    ------
    UnsupportedError
        An inactive request (SGLang always accepts a root), a missing bonus (-1: its argmax always has a token), or
        a path longer than S.
    ShapeError, DTypeError, ArgumentError
        A result that is not of this tree, or arrays on a GPU.

    Notes
    -----
    The bonus sits in `predicts` at the row of the last accepted node. Source: `VerifyTreeGreedy` in
    sgl-kernel/csrc/speculative/eagle_utils.cu of github.com/sgl-project/sglang.

    Examples
    --------
    >>> tree = DraftTree.from_parents([7, 10, 20, 11, 21, 20], [-1, 0, 1, 0, 1, 3])
    >>> result = AcceptResult(np.array([0, 3, 5, -1, -1, -1], np.int32), np.array(2, np.int32), np.array(9, np.int32))
    >>> arrays = to_sglang_accept(result, tree, num_spec_step=3)
    >>> arrays["predicts"].tolist(), arrays["accept_index"].tolist()
    ([11, 0, 0, 20, 0, 9], [[0, 3, 5]])
    """
    call = Call("to_sglang_accept")
    call.kind("result", result, AcceptResult)
    call.host("result.accepted", result.accepted)
    batched_tree = call.tree(tree)
    batched = result.validate() if result.is_batched else result.validate().with_batch()
    if batched.accepted.shape != batched_tree.token_ids.shape:
        raise call.error(
            f"`result` is {batched.accepted.shape}, expected {batched_tree.token_ids.shape} like `tree`", ShapeError
        )
    batch, size = batched.accepted.shape
    steps = size if num_spec_step is None else call.integer("num_spec_step", num_spec_step, low=1)
    call.addressable("num_spec_step", (batch, steps), itemsize=4)
    predicts = np.zeros((batch, size), np.int32)
    accept_index = np.full((batch, steps), -1, np.int32)
    for request, count in enumerate((batched.num_accepted + 1).tolist()):
        path, bonus = batched.accepted[request, :count].tolist(), int(batched.bonus_token[request])
        why = ""
        if count == 0:
            why = "is inactive (num_accepted -1), but SGLang always accepts a root"
        elif count > steps:
            why = f"accepts {count} nodes with its root, more than the {steps} columns of `accept_index`"
        elif bonus < 0:
            why = f"has bonus token {bonus}, but SGLang's argmax always gives one"
        if why:
            raise call.error(f"request {request} {why}", UnsupportedError)
        if path[-1] >= batched_tree.num_nodes[request]:
            raise call.error(f"request {request} accepts node {path[-1]}, which is padding of `tree`")
        _check_path(call, request, path, batched_tree)
        predicts[request, path] = [*batched_tree.token_ids[request, path[1:]].tolist(), bonus]
        accept_index[request, :count] = np.array(path) + request * size
    return {
        "predicts": predicts.ravel(),
        "accept_index": accept_index,
        "accept_token_num": (batched.num_accepted + counts_bonus).astype(np.int32),
    }


def from_sglang_accept(
    predicts: npt.NDArray[Any],
    accept_index: npt.NDArray[Any],
    accept_token_num: npt.NDArray[Any],
    *,
    draft_token_num: int,
    counts_bonus: bool = False,
    tree: DraftTree | None = None,
) -> AcceptResult:
    """Read SGLang's verification results, always with their request axis.

    Parameters
    ----------
    predicts : int32 | int64 array, shape (B * D) or (B * D + 1)
        Only rows of accepted nodes are read; the others may hold anything. Some versions of SGLang add one entry.
    accept_index : int32 | int64 array, shape (B, S)
        Flat rows b * D + node, -1 for none; the row stride is S, not D.
    accept_token_num : int32 | int64 array, shape (B)
        Accepted drafts: without the root, and without the bonus unless `counts_bonus`.
    draft_token_num : int
        D, the rows of each request, root included.
    counts_bonus : bool
        Whether `accept_token_num` counts the bonus, see `to_sglang_accept`.
    tree : DraftTree, optional
        When given, the path must be one of this tree and its tokens those of `predicts`.

    Returns
    -------
    AcceptResult
        Batched, N = D.

    Raises
    ------
    UnsupportedError
        A predicted token beyond int32.
    ShapeError, DTypeError, ArgumentError
        Shapes that do not fit, a row of another request, a path that does not start at the root or is not in node
        order, a count that does not match it, or a predicted token below 0.

    Examples
    --------
    >>> int32 = lambda *values: np.array(values, np.int32)
    >>> predicts, accept_index = int32(11, 0, 0, 20, 0, 9), int32([0, 3, 5])
    >>> from_sglang_accept(predicts, accept_index, int32(2), draft_token_num=6).bonus_token.tolist()
    [9]
    """
    call = Call("from_sglang_accept")
    size = call.integer("draft_token_num", draft_token_num, low=1)
    index = call.integers("accept_index", accept_index, ("batch", "S"))
    counts = call.integers("accept_token_num", accept_token_num, ("batch",)) + 1 - counts_bonus
    batch, steps = index.shape
    call.host("predicts", predicts)
    extra = int(predicts.shape == (batch * size + 1,))
    tokens = call.integers("predicts", predicts, (batch * size + extra,))
    batched_tree = None if tree is None else call.tree(tree)
    if batched_tree is not None and batched_tree.token_ids.shape != (batch, size):
        raise call.error(f"`tree` is {batched_tree.token_ids.shape}, expected ({batch}, {size})", ShapeError)
    call.addressable("draft_token_num", (batch, size), itemsize=8)
    accepted = np.full((batch, size), -1, np.int32)
    bonus = np.full(batch, -1, np.int64)
    for request, count in enumerate(counts.tolist()):
        used = int((index[request] != -1).sum())
        if not 1 <= count <= min(steps, size) or used != count:
            raise call.error(
                f"`accept_token_num`[{request}] is {accept_token_num[request]} and `accept_index` holds {used} rows, "
                f"expected the root and one row per token (counts_bonus={counts_bonus})"
            )
        path = (index[request, :count] - request * size).tolist()
        if path[0] != 0 or sorted(set(path)) != path or path[-1] >= size:
            raise call.error(
                f"`accept_index`[{request}] is {index[request].tolist()}, expected {request * size} (the root) and "
                f"then ascending rows below {(request + 1) * size}, -1 at the end"
            )
        row = tokens[index[request, :count]]
        if (row < 0).any():
            raise call.error(f"`predicts` holds {row.tolist()} along request {request}, expected tokens")
        if batched_tree is not None:
            _check_path(call, request, path, batched_tree)
            if batched_tree.token_ids[request, path[1:]].tolist() != row[:-1].tolist():
                raise call.error(f"`predicts` of request {request} does not hold the tokens of its path")
        accepted[request, :count] = path
        bonus[request] = row[-1]
    tokens32 = call.as_int32("predicts", bonus)
    return AcceptResult(accepted, (counts - 1).astype(np.int32), tokens32).validate()
