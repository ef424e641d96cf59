"""Parent lists, with the root counted in three ways, and trees out of bare visibility matrices."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy.containers import DraftTree, Visibility
from ddtree_cupy.containers.topology import words_per_row
from ddtree_cupy.errors import DTypeError, ShapeError, UnsupportedError
from ddtree_cupy.interop._host import INT32, Call

ROOTS = ("minus_one", "self", "omitted")


def to_parent_lists(tree: DraftTree, *, root: str = "minus_one") -> tuple[list[Any], list[Any]]:
    """Return (token_ids, parents) as plain Python lists without padding, ready for JSON.

    With N nodes, root included: "minus_one" gives N parents, the root's is -1 (as here); "self" gives N parents,
    the root's is 0; "omitted" leaves the root out of both lists, numbers the N - 1 drafts from 0, and -1 means
    "child of the root".

    Parameters
    ----------
    tree : DraftTree
        Host arrays. The lists do not hold `path_scores` and `status`, like every format of this package.
    root : {"minus_one", "self", "omitted"}
        How the root is written.

    Returns
    -------
    token_ids : list of int
        A list of such lists for a batch.
    parents : list of int
        Likewise.

    Raises
    ------
    UnsupportedError
        "omitted" for an inactive request (num_nodes 0): its empty list would read as a lone root.
    DTypeError, ArgumentError
        Arrays on a GPU, an invalid tree, or an unknown `root`.

    Notes
    -----
    Public code uses one name for lists of N and of N - 1 entries, also the official DDTree code
    (github.com/liranringel/ddtree). An inactive request is an empty list.

    Examples
    --------
    >>> tree = DraftTree.from_parents([7, 10, 20, 11], [-1, 0, 1, 0])
    >>> to_parent_lists(tree, root="omitted")
    ([10, 20, 11], [-1, 0, -1])
    """
    call = Call("to_parent_lists")
    call.choice("root", root, ROOTS)
    batched = call.tree(tree)
    tokens, parents = [], []
    for request, count in enumerate(batched.num_nodes.tolist()):
        ids: list[int] = batched.token_ids[request, :count].tolist()
        links: list[int] = batched.parents[request, :count].tolist()
        if root == "self":
            links[:1] = [0] * len(links[:1])
        elif root == "omitted":
            if count == 0:
                raise call.error(
                    f"request {request} is inactive (num_nodes 0); with root='omitted' its empty list would read as a "
                    "lone root",
                    UnsupportedError,
                )
            ids, links = ids[1:], [link - 1 for link in links[1:]]
        tokens.append(ids)
        parents.append(links)
    return (tokens, parents) if tree.is_batched else (tokens[0], parents[0])


def _is_list(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _rooted(call: Call, request: int, parents: Sequence[int], tokens: Sequence[int], root: str, root_token: int) -> Any:
    """Return token ids and parents in this library's form, by the rule of `root`."""
    if root == "omitted":
        low = min(parents, default=0)
        if low < -1:
            raise call.error(f"`parents` of request {request} holds {low}, expected at least -1, the root")
        return [root_token, *tokens], [-1, *(link + 1 for link in parents)]
    wanted = 0 if root == "self" else -1
    if parents and parents[0] != wanted:
        raise call.error(
            f"`parents`[0] of request {request} is {parents[0]}, expected {wanted} with root={root!r}; the other "
            f"forms are {', '.join(repr(name) for name in ROOTS if name != root)}"
        )
    return list(tokens), [-1, *parents[1:]][: len(parents)]


def from_parent_lists(
    token_ids: Sequence[Any],
    parents: Sequence[Any],
    *,
    root: str = "minus_one",
    root_token_ids: int | Sequence[int] | None = None,
    capacity: int | None = None,
) -> DraftTree:
    """Make a tree from lists of token ids and parents, one list or one list per request (lengths may differ).

    Parameters
    ----------
    token_ids, parents : list of int, or list of such lists
        Without padding. An empty list is an inactive request (with root="omitted" a lone root), so an empty batch
        cannot be expressed.
    root : {"minus_one", "self", "omitted"}
        How the root is written, see `to_parent_lists`.
    root_token_ids : int or one per request
        Needed with root="omitted", where the lists do not hold the root; refused otherwise.
    capacity : int, optional
        N of the result; default the largest request.

    Returns
    -------
    DraftTree
        Shapes ([B,] N); path_scores None.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        Unequal lengths, a parent that does not come before its child (sort the nodes so that it does, for example
        breadth-first), siblings that share a token, or a root that is not written as `root` says.

    Examples
    --------
    >>> from_parent_lists([10, 20, 11], [-1, 0, -1], root="omitted", root_token_ids=7).parents.tolist()
    [-1, 0, 1, 0]
    """
    call = Call("from_parent_lists")
    call.choice("root", root, ROOTS)
    if (root_token_ids is None) == (root == "omitted"):
        raise call.error("`root_token_ids` is needed with root='omitted' and refused otherwise")
    for name, lists in (("token_ids", token_ids), ("parents", parents)):
        if not _is_list(lists):
            raise call.error(f"`{name}` is {type(lists).__name__}, expected a list of integers or of lists", DTypeError)
    batched = any(_is_list(row) for row in (*token_ids, *parents))
    tokens = list(token_ids) if batched else [token_ids]
    links = list(parents) if batched else [parents]
    given: Any = root_token_ids
    roots = list(given) if _is_list(given) else [given] * len(links)
    if not len(tokens) == len(links) == len(roots):
        raise call.error(
            f"`token_ids` has {len(tokens)} requests, `parents` {len(links)}, the roots {len(roots)}; expected equal "
            "numbers",
            ShapeError,
        )
    most = int(INT32.max)
    rows = []
    for request, (ids, row) in enumerate(zip(tokens, links, strict=True)):
        if not _is_list(ids) or not _is_list(row):
            raise call.error(f"request {request} is not a list, though others are", DTypeError)
        if len(ids) != len(row):
            raise call.error(f"request {request} has {len(ids)} token ids and {len(row)} parents", ShapeError)
        ids = [call.integer(f"token_ids[{request}]", token, low=0, high=most) for token in ids]
        row = [call.integer(f"parents[{request}]", link, low=-most, high=most - 1) for link in row]
        root_id = 0 if root_token_ids is None else call.integer("root_token_ids", roots[request], low=0, high=most)
        rows.append(_rooted(call, request, row, ids, root, root_id))
    size = max([len(row[0]) for row in rows], default=0)
    size = size if capacity is None else call.integer("capacity", capacity, low=size)
    call.addressable("capacity", (len(rows), size, words_per_row(size)), itemsize=4)
    arrays = np.full((2, len(rows), max(size, 1)), -1, np.int64)
    for request, row in enumerate(rows):
        arrays[:, request, : len(row[0])] = row
    return DraftTree.from_parents(*(arrays if batched else arrays[:, 0]))


def tree_from_visibility(visibility: Visibility, token_ids: npt.NDArray[Any]) -> DraftTree:
    """Recover the tree behind a visibility matrix: the parent of a node is the last node it sees before itself.

    The mask formats of this package hold a bare mask; with the tokens it becomes a tree again.

    Parameters
    ----------
    visibility : Visibility
        N nodes per request.
    token_ids : int32 | int64 array, shape ([B,] N)
        Entries from num_nodes on are ignored.

    Returns
    -------
    DraftTree
        As many nodes as `visibility`, in its order.

    Raises
    ------
    UnsupportedError
        A row that does not see exactly the ancestors of its node and itself: no tree has this mask. A token beyond
        int32.
    ShapeError, DTypeError, ArgumentError
        Arrays that do not fit, tokens below 0, or siblings that share a token.

    Examples
    --------
    >>> tree = DraftTree.from_parents([7, 10, 20, 11], [-1, 0, 1, 0])
    >>> same = tree_from_visibility(Visibility(tree.visibility_bits, tree.num_nodes), tree.token_ids)
    >>> same.parents.tolist()
    [-1, 0, 1, 0]
    """
    return Call("tree_from_visibility").tree_behind(visibility, "token_ids", token_ids)
