"""SGLang's verification results: predicts, accept_index and accept_token_num."""

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import Checker
from ddtree_cupy.containers import AcceptResult, DraftTree
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from ddtree_cupy.interop._host import addressable, as_int32, check_host, integers, tree_on_host


def _check_path(function: str, request: int, path: list[int], tree: DraftTree) -> None:
    parents = tree.parents[request]
    for before, node in pairwise(path):
        if parents[node] != before:
            raise ArgumentError(
                f"{function}: request {request} accepts node {node} after {before}, but its parent is {parents[node]}"
            )


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
    function = "to_sglang_accept"
    if not isinstance(result, AcceptResult):
        raise DTypeError(f"{function}: `result` is {type(result).__name__}, expected AcceptResult")
    check_host(Checker(function), "result.accepted", result.accepted)
    batched_tree = tree_on_host(function, tree)
    batched = result.validate() if result.is_batched else result.validate().with_batch()
    if batched.accepted.shape != batched_tree.token_ids.shape:
        raise ShapeError(
            f"{function}: `result` is {batched.accepted.shape}, expected {batched_tree.token_ids.shape} like `tree`"
        )
    batch, size = batched.accepted.shape
    steps = size if num_spec_step is None else Checker(function).integer("num_spec_step", num_spec_step, low=1)
    addressable(function, "num_spec_step", (batch, steps), itemsize=4)
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
            raise UnsupportedError(f"{function}: request {request} {why}")
        if path[-1] >= batched_tree.num_nodes[request]:
            raise ArgumentError(f"{function}: request {request} accepts node {path[-1]}, which is padding of `tree`")
        _check_path(function, request, path, batched_tree)
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
        Only rows of accepted nodes are read: the rest is whatever the buffer held. Some versions add one entry.
    accept_index : int32 | int64 array, shape (B, S)
        Flat rows b * D + node, -1 for none; the row stride is S, not D.
    accept_token_num : int32 | int64 array, shape (B)
        Accepted drafts: without the root, and without the bonus unless `counts_bonus`.
    draft_token_num : int
        D, rows a request, root included.
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
    function = "from_sglang_accept"
    check = Checker(function)
    size = check.integer("draft_token_num", draft_token_num, low=1)
    index = integers(check, "accept_index", accept_index, ("batch", "S"))
    counts = integers(check, "accept_token_num", accept_token_num, ("batch",)) + 1 - counts_bonus
    batch, steps = index.shape
    check_host(check, "predicts", predicts)
    extra = int(predicts.shape == (batch * size + 1,))
    tokens = integers(check, "predicts", predicts, (batch * size + extra,))
    batched_tree = None if tree is None else tree_on_host(function, tree)
    if batched_tree is not None and batched_tree.token_ids.shape != (batch, size):
        raise ShapeError(f"{function}: `tree` is {batched_tree.token_ids.shape}, expected ({batch}, {size})")
    addressable(function, "draft_token_num", (batch, size), itemsize=8)
    accepted = np.full((batch, size), -1, np.int32)
    bonus = np.full(batch, -1, np.int64)
    for request, count in enumerate(counts.tolist()):
        used = int((index[request] != -1).sum())
        if not 1 <= count <= min(steps, size) or used != count:
            raise ArgumentError(
                f"{function}: `accept_token_num`[{request}] is {accept_token_num[request]} and `accept_index` holds "
                f"{used} rows, expected the root and one row a token (counts_bonus={counts_bonus})"
            )
        path = (index[request, :count] - request * size).tolist()
        if path[0] != 0 or sorted(set(path)) != path or path[-1] >= size:
            raise ArgumentError(
                f"{function}: `accept_index`[{request}] is {index[request].tolist()}, expected {request * size} (the "
                f"root) and then ascending rows below {(request + 1) * size}, -1 at the end"
            )
        row = tokens[index[request, :count]]
        if (row < 0).any():
            raise ArgumentError(f"{function}: `predicts` holds {row.tolist()} along request {request}, expected tokens")
        if batched_tree is not None:
            _check_path(function, request, path, batched_tree)
            if batched_tree.token_ids[request, path[1:]].tolist() != row[:-1].tolist():
                raise ArgumentError(f"{function}: `predicts` of request {request} does not hold the tokens of its path")
        accepted[request, :count] = path
        bonus[request] = row[-1]
    tokens32 = as_int32(function, "predicts", bonus, "token ids are int32 here")
    return AcceptResult(accepted, (counts - 1).astype(np.int32), tokens32).validate()
