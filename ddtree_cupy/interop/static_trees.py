"""Static trees as lists of rank paths: Medusa's choices (EAGLE-1 uses the same lists) and vLLM's tree string.

vLLM used to take the string as `speculative_token_tree`, a Python list of rank tuples.
"""

import ast
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy.containers import Candidates, DraftTree
from ddtree_cupy.errors import DTypeError, ShapeError, UnsupportedError
from ddtree_cupy.interop._host import Call

Path = tuple[int, ...]


def _sorted(paths: list[Path]) -> list[Path]:
    """Return the paths in the order of both systems: by length, then by ranks."""
    return sorted(paths, key=lambda path: (len(path), path))


def _rank_paths(call: Call, tree: DraftTree, candidates: Candidates | None, in_order: bool) -> list[Path]:
    """Return the rank path of every node below the root, in node order.

    A tree holds tokens, not ranks. Ranks come from `candidates`, or they are the places among the siblings where those
    are known to be the first candidates in order: because best_first_tree made the tree, or because the caller says so.
    """
    batched = call.tree(tree)
    if tree.is_batched:
        raise call.error(
            "`tree` has a request axis, but this form is one static tree that all requests share; convert one "
            "request (`without_batch()` gives the first)",
            UnsupportedError,
        )
    count = int(tree.num_nodes)
    if count < 2:
        raise call.error(
            f"`tree` has {count} nodes, but this form lists at least one besides the root", UnsupportedError
        )
    table = None if candidates is None else call.candidates(candidates)
    if table is None and tree.path_scores is None and not in_order:
        raise call.error(
            "`candidates` is None and `tree` has no path scores, so the ranks of its tokens are unknown; pass the "
            "`candidates` it was made of, or in_order=True when the children of every node are its first candidates "
            "in order",
            UnsupportedError,
        )
    if table is not None and table.is_batched:
        raise call.error("`candidates` has a request axis and `tree` has none", ShapeError)
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
                raise call.error(
                    f"node {node} has token {token}, which is not among the {len(row)} candidates of depth {depth}; a "
                    "path holds ranks, not tokens",
                    UnsupportedError,
                )
            rank = row.index(token)
        paths.append((*paths[parent], rank))
    return paths[1:]


def _checked_paths(call: Call, name: str, paths: Any) -> list[Path]:
    """Return the paths as tuples after checking that they are those of a tree."""
    try:
        given = list(paths)
    except TypeError:
        raise call.error(
            f"`{name}` is {type(paths).__name__}, expected paths such as [[0], [0, 1]]", DTypeError
        ) from None
    found: list[Path] = []
    for path in given:
        if not isinstance(path, tuple | list):
            raise call.error(f"`{name}` holds {path!r}, expected paths such as (0,) or [0, 1]", DTypeError)
        ranks = tuple(path)
        if not all(isinstance(rank, int | np.integer) and not isinstance(rank, bool) for rank in ranks):
            raise call.error(f"path {path!r} of `{name}` holds values other than integers", DTypeError)
        if not ranks:
            raise call.error(f"`{name}` holds an empty path; the root is not listed")
        if min(ranks) < 0:
            raise call.error(f"path {path!r} of `{name}` holds a rank below 0")
        found.append(tuple(int(rank) for rank in ranks))
    known = set(found)
    if len(known) != len(found):
        twice = next(path for i, path in enumerate(found) if path in found[:i])
        raise call.error(f"`{name}` holds path {twice} twice")
    for path in found:
        if len(path) > 1 and path[:-1] not in known:
            raise call.error(f"path {path} of `{name}` lacks its parent {path[:-1]}")
    if not found:
        raise call.error(f"`{name}` is empty, expected at least one path")
    return found


def _tree_from_paths(call: Call, paths: list[Path], candidates: Candidates, root_token_ids: npt.ArrayLike) -> DraftTree:
    """Return the tree whose node i + 1 is `paths[i]`, tokens from the candidates; batched when they are."""
    table = call.candidates(candidates)
    tokens_of = table.token_ids if table.is_batched else table.token_ids[None]
    batch, draft_len, width = tokens_of.shape
    roots = call.integer_array("root_token_ids", root_token_ids)
    if roots.shape not in ((), (batch,) if table.is_batched else ()):
        raise call.error(f"`root_token_ids` is {roots.shape}, expected () or one token per request", ShapeError)
    if (roots < 0).any():
        raise call.error(f"`root_token_ids` is {roots.tolist()}, expected tokens of at least 0")
    node_of: dict[Path, int] = {(): 0}
    parents = [-1]
    token_ids = np.zeros((batch, len(paths) + 1), np.int64)
    token_ids[:, 0] = call.as_int32("root_token_ids", roots)
    for node, path in enumerate(paths, start=1):
        if path[:-1] not in node_of:
            raise call.error(f"path {path} comes before its parent {path[:-1]}")
        if len(path) > draft_len or path[-1] >= width:
            raise call.error(
                f"path {path} needs candidate {path[-1]} at depth {len(path)}, but `candidates` has {width} at each "
                f"of {draft_len} depths",
                UnsupportedError,
            )
        node_of[path] = node
        parents.append(node_of[path[:-1]])
        token_ids[:, node] = tokens_of[:, len(path) - 1, path[-1]]
    for request, node in np.argwhere(token_ids < 0):
        raise call.error(
            f"request {request} has no candidate for path {paths[node - 1]} (id -1); a static tree cannot leave a "
            "node out",
            UnsupportedError,
        )
    tree = DraftTree.from_parents(token_ids, np.broadcast_to(np.array(parents), token_ids.shape))
    return tree if table.is_batched else tree.without_batch()


def to_medusa_choices(
    tree: DraftTree,
    candidates: Candidates | None = None,
    *,
    in_order: bool = False,
    top_k: int = 10,
    num_heads: int | None = None,
) -> list[list[int]]:
    """Return the tree as Medusa choices: for every node below the root its path of ranks, from the root down.

    Parameters
    ----------
    tree : DraftTree
        One request, at least one node besides the root.
    candidates : Candidates, optional
        The source of the ranks: the rank of a node is the place of its token among the candidates of its depth. Not
        needed for trees with path scores, as `best_first_tree` takes candidates in order.
    in_order : bool
        For another tree, without candidates: asserts that the children of every node are its first candidates in
        order, so that a rank is the place among the siblings.
    top_k : int
        Candidates that a head offers; Medusa's buffers are built for 10, and rank 10 would name the next head's first.
    num_heads : int, optional
        Depth limit: head d predicts depth d.

    Returns
    -------
    list of list of int
        In node order. The root is not listed; the form has no token ids and no scores.

    Raises
    ------
    UnsupportedError
        A batch (the tree is shared by all requests), a lone root, unknown ranks, a token without a rank,
        a rank of `top_k` or more, or a path longer than `num_heads`.

    Notes
    -----
    Medusa sorts the list by length, then by ranks, so its node order is breadth-first whatever the order here.
    Source: `generate_medusa_buffers` in medusa/model/utils.py of github.com/FasterDecoding/Medusa.

    Examples
    --------
    >>> to_medusa_choices(DraftTree.from_parents([7, 10, 20, 11], [-1, 0, 1, 0]), in_order=True)
    [[0], [0, 0], [1]]
    """
    call = Call("to_medusa_choices")
    limit = call.integer("top_k", top_k, low=1)
    heads = None if num_heads is None else call.integer("num_heads", num_heads, low=1)
    paths = _rank_paths(call, tree, candidates, in_order)
    for node, path in enumerate(paths, start=1):
        if path[-1] >= limit:
            raise call.error(
                f"node {node} has rank {path[-1]} at depth {len(path)}, but a head offers {limit} candidates (`top_k`)",
                UnsupportedError,
            )
        if heads is not None and len(path) > heads:
            raise call.error(f"node {node} lies at depth {len(path)}, deeper than {heads} heads", UnsupportedError)
    return [list(path) for path in paths]


def from_medusa_choices(
    choices: Iterable[Sequence[int]],
    candidates: Candidates,
    *,
    root_token_ids: npt.ArrayLike,
    order: str = "sorted",
) -> DraftTree:
    """Make the tree that choices describe, with the tokens of a round.

    Parameters
    ----------
    choices : iterable of sequences of int
        Paths of ranks without the root, in any order.
    candidates : Candidates
        Shapes ([B,] L, K): entry [d - 1, r] is the token of rank r at depth d. A batch gives one tree a request,
        all of one shape.
    root_token_ids : int or int array_like, shape ([B])
        The root, in Medusa the base model's own next token.
    order : {"sorted", "given"}
        Node order: by length and ranks as in Medusa's buffers, or that of the list, parents before children.

    Returns
    -------
    DraftTree
        Shapes ([B,] N), N = number of choices + 1; path_scores None.

    Raises
    ------
    UnsupportedError
        A path deeper than L, a rank of K or more, or a candidate that is missing (id -1), roots beyond int32.
    ShapeError, DTypeError, ArgumentError
        An empty list or path, a path twice or without its parent, entries that are not ranks, roots that do not fit.

    Examples
    --------
    >>> ids, logits = np.array([[10, 11], [20, 21]], np.int32), np.zeros((2, 2), np.float32)
    >>> table = Candidates(ids, logits, np.ones(2, np.float32))
    >>> from_medusa_choices([[0], [0, 0], [1]], table, root_token_ids=7).token_ids.tolist()
    [7, 10, 11, 20]
    """
    call = Call("from_medusa_choices")
    call.choice("order", order, ("sorted", "given"))
    paths = _checked_paths(call, "choices", choices)
    return _tree_from_paths(call, _sorted(paths) if order == "sorted" else paths, candidates, root_token_ids)


def _check_uniform(call: Call, paths: list[Path]) -> None:
    """Raise unless all nodes of a level have the same number of children, ranks 0 and up."""
    children = Counter(path[:-1] for path in paths)
    known = set(paths)
    for depth in range(max(map(len, paths))):
        level = [path for path in ((), *paths) if len(path) == depth]
        wanted = max(children[path] for path in level)
        for path in level:
            if any((*path, rank) not in known for rank in range(wanted)):
                raise call.error(
                    f"node {path} has {children[path]} children, but vLLM drafts the same number, ranks 0 to "
                    f"{wanted - 1}, for every node of depth {depth}; `require_uniform=False` skips this check",
                    UnsupportedError,
                )


def to_vllm_token_tree(
    tree: DraftTree,
    candidates: Candidates | None = None,
    *,
    in_order: bool = False,
    require_uniform: bool = True,
) -> str:
    """Return the tree as the string vLLM took as `speculative_token_tree`.

    Parameters
    ----------
    tree : DraftTree
        One request, at least one node besides the root.
    candidates, in_order
        Where the ranks come from, as in `to_medusa_choices`.
    require_uniform : bool
        Whether to refuse trees that vLLM parsed but did not draft: it gave every node of a level the same number
        of children. Some forks do not have that limit.

    Returns
    -------
    str
        Paths sorted by length, then by ranks, as vLLM sorts them. The root is not listed;
        `num_speculative_tokens` is the number of paths. Token ids and scores cannot be held.

    Raises
    ------
    UnsupportedError, ShapeError, DTypeError, ArgumentError
        As in `to_medusa_choices`; also a tree that is not uniform by level.

    Notes
    -----
    vLLM removed tree attention in pull request 42121. Source: vllm/config/speculative.py,
    vllm/v1/spec_decode/eagle.py and vllm/v1/attention/backends/tree_attn.py of github.com/vllm-project/vllm before
    that.

    Examples
    --------
    >>> to_vllm_token_tree(DraftTree.from_parents([7, 10, 20, 21], [-1, 0, 1, 1]), in_order=True)
    '[(0,), (0, 0), (0, 1)]'
    """
    call = Call("to_vllm_token_tree")
    paths = _sorted(_rank_paths(call, tree, candidates, in_order))
    if require_uniform:
        _check_uniform(call, paths)
    return str(paths)


def from_vllm_token_tree(text: str, candidates: Candidates, *, root_token_ids: npt.ArrayLike) -> DraftTree:
    """Make the tree that a string describes, with the tokens of a round; nodes breadth-first, as vLLM numbers them.

    Parameters
    ----------
    text : str
        A Python literal, list of tuples of ranks; a one-rank path is written (0,).
    candidates, root_token_ids
        As in `from_medusa_choices`; in vLLM the root is the last sampled token.

    Returns
    -------
    DraftTree
        Shapes ([B,] N), N = number of paths + 1; path_scores None.

    Raises
    ------
    UnsupportedError, ShapeError, DTypeError, ArgumentError
        Text that is not a literal list; also as in `from_medusa_choices`.

    Examples
    --------
    >>> ids, logits = np.array([[10, 11], [20, 21]], np.int32), np.zeros((2, 2), np.float32)
    >>> table = Candidates(ids, logits, np.ones(2, np.float32))
    >>> from_vllm_token_tree("[(0,), (0, 0), (1,)]", table, root_token_ids=7).token_ids.tolist()
    [7, 10, 11, 20]
    """
    call = Call("from_vllm_token_tree")
    call.kind("text", text, str)
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise call.error(f"`text` is not a Python literal ({error}): {text[:80]!r}") from None
    if not isinstance(found, list | tuple):
        raise call.error(f"`text` is a {type(found).__name__}, expected a list of tuples")
    return _tree_from_paths(call, _sorted(_checked_paths(call, "text", found)), candidates, root_token_ids)
