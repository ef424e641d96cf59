"""Trees as lists of rank paths, what Medusa's choices and vLLM's tree string have in common."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy.containers import Candidates, DraftTree
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from ddtree_cupy.interop._host import as_int32, candidates_on_host, integer_array, tree_on_host

Path = tuple[int, ...]


def sort_key(path: Path) -> tuple[int, Path]:
    """Order of both systems: by length, then by ranks."""
    return len(path), path


def rank_paths(function: str, tree: DraftTree, candidates: Candidates | None, in_order: bool) -> list[Path]:
    """Return the rank path of every node below the root, in node order.

    A tree holds tokens, not ranks: they come from `candidates`, or are the places among the siblings where those are
    known to be the first candidates in order, because best_first_tree made the tree or the caller says so.
    """
    batched = tree_on_host(function, tree)
    if tree.is_batched:
        raise UnsupportedError(
            f"{function}: `tree` has a request axis, but this form is one static tree that all requests share; convert "
            f"one request (`without_batch()` gives the first)"
        )
    count = int(tree.num_nodes)
    if count < 2:
        raise UnsupportedError(
            f"{function}: `tree` has {count} nodes, but this form lists at least one besides the root"
        )
    table = None if candidates is None else candidates_on_host(function, candidates)
    if table is None and tree.path_scores is None and not in_order:
        raise UnsupportedError(
            f"{function}: `candidates` is None and `tree` has no path scores, so the ranks of its tokens are unknown; "
            f"pass the `candidates` it was made of, or in_order=True when the children of every node are its first "
            f"candidates in order"
        )
    if table is not None and table.is_batched:
        raise ShapeError(f"{function}: `candidates` has a request axis and `tree` has none")
    paths: list[Path] = [()]
    children = [0] * count
    for node in range(1, count):
        parent, depth = int(batched.parents[0, node]), int(batched.depths[0, node])
        rank = children[parent]
        children[parent] += 1
        if table is not None:
            token = int(batched.token_ids[0, node])
            row = table.token_ids[depth - 1].tolist() if depth <= len(table.token_ids) else []
            if token not in row:
                raise UnsupportedError(
                    f"{function}: node {node} has token {token}, which is not among the {len(row)} candidates of depth "
                    f"{depth}; a path holds ranks, not tokens"
                )
            rank = row.index(token)
        paths.append((*paths[parent], rank))
    return paths[1:]


def checked_paths(function: str, name: str, paths: Any) -> list[Path]:
    """Return the paths as tuples after checking that they are those of a tree."""
    try:
        given = list(paths)
    except TypeError:
        raise DTypeError(
            f"{function}: `{name}` is {type(paths).__name__}, expected paths such as [[0], [0, 1]]"
        ) from None
    found: list[Path] = []
    for path in given:
        if not isinstance(path, tuple | list):
            raise DTypeError(f"{function}: `{name}` holds {path!r}, expected paths such as (0,) or [0, 1]")
        ranks = tuple(path)
        if not all(isinstance(rank, int | np.integer) and not isinstance(rank, bool) for rank in ranks):
            raise DTypeError(f"{function}: path {path!r} of `{name}` holds something else than integers")
        if not ranks:
            raise ArgumentError(f"{function}: `{name}` holds an empty path; the root is not listed")
        if min(ranks) < 0:
            raise ArgumentError(f"{function}: path {path!r} of `{name}` holds a rank below 0")
        found.append(tuple(int(rank) for rank in ranks))
    known = set(found)
    if len(known) != len(found):
        twice = next(path for i, path in enumerate(found) if path in found[:i])
        raise ArgumentError(f"{function}: `{name}` holds path {twice} twice")
    for path in found:
        if len(path) > 1 and path[:-1] not in known:
            raise ArgumentError(f"{function}: path {path} of `{name}` lacks its parent {path[:-1]}")
    if not found:
        raise ArgumentError(f"{function}: `{name}` is empty, expected at least one path")
    return found


def tree_from_paths(
    function: str, paths: list[Path], candidates: Candidates, root_token_ids: npt.ArrayLike
) -> DraftTree:
    """Return the tree whose node i + 1 is `paths[i]`, tokens from the candidates; batched when they are."""
    table = candidates_on_host(function, candidates)
    tokens_of = table.token_ids if table.is_batched else table.token_ids[None]
    batch, draft_len, width = tokens_of.shape
    roots = integer_array(function, "root_token_ids", root_token_ids)
    if roots.shape not in ((), (batch,) if table.is_batched else ()):
        raise ShapeError(f"{function}: `root_token_ids` is {roots.shape}, expected () or one token a request")
    if (roots < 0).any():
        raise ArgumentError(f"{function}: `root_token_ids` is {roots.tolist()}, expected tokens of at least 0")
    node_of: dict[Path, int] = {(): 0}
    parents = [-1]
    token_ids = np.zeros((batch, len(paths) + 1), np.int64)
    token_ids[:, 0] = as_int32(function, "root_token_ids", roots, "token ids are int32 here")
    for node, path in enumerate(paths, start=1):
        if path[:-1] not in node_of:
            raise ArgumentError(f"{function}: path {path} comes before its parent {path[:-1]}")
        if len(path) > draft_len or path[-1] >= width:
            raise UnsupportedError(
                f"{function}: path {path} needs candidate {path[-1]} at depth {len(path)}, but `candidates` has "
                f"{width} at each of {draft_len} depths"
            )
        node_of[path] = node
        parents.append(node_of[path[:-1]])
        token_ids[:, node] = tokens_of[:, len(path) - 1, path[-1]]
    missing = np.argwhere(token_ids < 0)
    if missing.size:
        request, node = missing[0]
        raise UnsupportedError(
            f"{function}: request {request} has no candidate for path {paths[node - 1]} (id -1); a static tree cannot "
            f"leave a node out"
        )
    tree = DraftTree.from_parents(token_ids, np.broadcast_to(np.array(parents), token_ids.shape))
    return tree if table.is_batched else tree.without_batch()
