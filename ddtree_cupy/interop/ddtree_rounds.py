"""Rounds as the official DDTree code saves them: a tree without its root, and the nodes that were accepted."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ddtree_cupy.containers import AcceptResult, DraftTree
from ddtree_cupy.errors import DTypeError, ShapeError, UnsupportedError
from ddtree_cupy.interop._host import Call

Array = Any


def _list_of(call: Call, where: str, values: Mapping[str, Any], name: str) -> list[int]:
    if name not in values:
        raise call.error(f"`{where}` lacks `{name}`")
    array = call.integer_array(f"{where}[{name!r}]", values[name])
    if array.ndim != 1:
        raise call.error(f"`{where}[{name!r}]` is {array.shape}, expected (n,)", ShapeError)
    return list(array.tolist())


def from_ddtree_rounds(
    rounds: Sequence[Mapping[str, Any]], *, root_token_ids: Sequence[int] | None = None
) -> list[tuple[DraftTree, AcceptResult]]:
    """Read saved rounds of the official DDTree code.

    Parameters
    ----------
    rounds : sequence of mapping
        As parsed from the file: `accepted_indices`, which begin with the root, 0; and `tree` with `node_token_ids` and
        `node_depths`, which leave the root out, and `parents`, which begin with that of the root, -1.
    root_token_ids : sequence of int, optional
        The form does not hold the tokens of the roots. Default: 0 for all.

    Returns
    -------
    list of (DraftTree, AcceptResult)
        Unbatched, `path_scores` None. The form does not hold the bonus tokens; they are -1.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        A field is missing or contradicts another: parents that do not come before their nodes, depths that do not
        follow from them, siblings with one token, accepted nodes that are no path from the root.
    UnsupportedError
        A token beyond int32.

    Notes
    -----
    Source: what github.com/liranringel/ddtree saves as the trees of its rounds.

    Examples
    --------
    >>> tree = {"node_token_ids": [10, 20, 11], "node_depths": [1, 2, 1], "parents": [-1, 0, 1, 0]}
    >>> [(draft, result)] = from_ddtree_rounds([{"accepted_indices": [0, 1, 2], "tree": tree}], root_token_ids=[7])
    >>> draft.token_ids.tolist(), int(result.num_accepted)
    ([7, 10, 20, 11], 2)
    """
    call = Call("from_ddtree_rounds")
    given = call.items("rounds", rounds, Mapping)
    roots = [0] * len(given) if root_token_ids is None else call.items("root_token_ids", root_token_ids)
    if len(roots) != len(given):
        raise call.error(f"`root_token_ids` has {len(roots)} entries, expected {len(given)}, one per round", ShapeError)
    return [_read(call, f"rounds[{at}]", entry, roots[at], at) for at, entry in enumerate(given)]


def _read(call: Call, where: str, entry: Mapping[str, Any], root: Any, at: int) -> tuple[DraftTree, AcceptResult]:
    root = call.integer(f"root_token_ids[{at}]", root, low=0, high=2**31 - 1)
    accepted = _list_of(call, where, entry, "accepted_indices")
    saved = entry.get("tree")
    where_tree = f"{where}['tree']"
    if not isinstance(saved, Mapping):
        raise call.error(f"`{where_tree}` is {type(saved).__name__}, expected a mapping of names to lists", DTypeError)
    tokens, depths, parents = (
        _list_of(call, where_tree, saved, name) for name in ("node_token_ids", "node_depths", "parents")
    )
    if not len(tokens) == len(depths) == len(parents) - 1:
        raise call.error(
            f"`{where_tree}` has {len(tokens)} tokens, {len(depths)} depths and {len(parents)} parents, expected n, n "
            f"and n + 1: only `parents` has an entry for the root",
            ShapeError,
        )
    for node, parent in enumerate(parents):
        if (parent != -1) if node == 0 else not 0 <= parent < node:
            wanted = "-1, for the root" if node == 0 else f"0..{node - 1}"
            raise call.error(f"`{where_tree}['parents'][{node}]` is {parent}, expected {wanted}")
    if min(tokens, default=0) < 0:
        raise call.error(f"`{where_tree}['node_token_ids']` holds {min(tokens)}, expected token ids of at least 0")
    tree = call.tree_of(f"{where_tree}['node_token_ids']", np.array([[root, *tokens]]), np.array([parents]))
    tree = tree.without_batch()
    for node, (depth, wanted) in enumerate(zip(depths, tree.depths[1:].tolist(), strict=True)):
        if depth != wanted:
            raise call.error(f"`{where_tree}['node_depths'][{node}]` is {depth}, expected {wanted} from `parents`")
    for step, node in enumerate(accepted or [-1]):
        before = accepted[step - 1] if step else -1
        if not 0 <= node < len(parents) or parents[node] != before:
            wanted = "0, the root" if step == 0 else f"a child of node {before}"
            raise call.error(f"`{where}['accepted_indices']` is {accepted}, expected {wanted} at place {step}")
    path = np.full(len(parents), -1, np.int32)
    path[: len(accepted)] = accepted
    return tree, AcceptResult(path, np.array(len(accepted) - 1, np.int32), np.array(-1, np.int32))


def to_ddtree_rounds(rounds: Sequence[tuple[DraftTree, AcceptResult]]) -> list[dict[str, Any]]:
    """Return rounds in the form that the official DDTree code saves; the tokens of root and bonus are lost.

    Parameters
    ----------
    rounds : sequence of (DraftTree, AcceptResult)
        Unbatched, on the host.

    Returns
    -------
    list of dict
        Lists of Python integers, which `json.dump` writes.

    Raises
    ------
    UnsupportedError
        An inactive round, which the form cannot hold.
    ShapeError, DTypeError, ArgumentError
        A tree or a result is batched, not valid, or they do not belong together.

    Examples
    --------
    >>> from ddtree_cupy import accept
    >>> tree = DraftTree.from_parents([7, 10, 20], [-1, 0, 1])
    >>> to_ddtree_rounds([(tree, accept(tree, np.array([10, 5, 5], np.int32)))])[0]["accepted_indices"]
    [0, 1]
    """
    call = Call("to_ddtree_rounds")
    saved = []
    for at, pair in enumerate(call.items("rounds", rounds, tuple, list)):
        if len(pair) != 2:
            raise call.error(f"`rounds[{at}]` has {len(pair)} entries, expected a tree and a result", ShapeError)
        tree, result = pair
        batched = call.tree(tree)
        call.kind(f"rounds[{at}][1]", result, AcceptResult)
        result.validate()
        if tree.is_batched or result.is_batched or result.accepted.shape != tree.token_ids.shape:
            raise call.error(
                f"`rounds[{at}]` is a tree {tree.token_ids.shape} and a result {result.accepted.shape}, expected both "
                f"(num_nodes,), one request",
                ShapeError,
            )
        count, last = int(batched.num_nodes[0]), int(result.num_accepted)
        if count == 0 or last < 0:
            raise call.error(f"`rounds[{at}]` is inactive, and the form has no such round", UnsupportedError)
        saved.append(
            {
                "accepted_indices": result.accepted[: last + 1].tolist(),
                "tree": {
                    "node_token_ids": tree.token_ids[1:count].tolist(),
                    "node_depths": tree.depths[1:count].tolist(),
                    "parents": tree.parents[:count].tolist(),
                },
            }
        )
    return saved
