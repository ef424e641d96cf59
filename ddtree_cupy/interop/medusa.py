"""Medusa's tree choices (EAGLE-1 uses the same lists): one static tree as paths of candidate ranks."""

from collections.abc import Iterable, Sequence

import numpy.typing as npt

from ddtree_cupy._check import Checker
from ddtree_cupy.containers import Candidates, DraftTree
from ddtree_cupy.errors import UnsupportedError
from ddtree_cupy.interop._paths import checked_paths, rank_paths, sort_key, tree_from_paths


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
        Where the ranks come from: a node's rank is the place of its token among the candidates of its depth. Trees
        with path scores do without: `best_first_tree` takes candidates in order.
    in_order : bool
        Says of another tree, without candidates, that the children of every node are its first candidates in order,
        so that a rank is the place among the siblings.
    top_k : int
        Candidates a head offers; Medusa's buffers are built for 10, and rank 10 would name the next head's first.
    num_heads : int, optional
        Depth limit: head d predicts depth d.

    Returns
    -------
    list of list of int
        In node order. The root is not listed; token ids and scores cannot be held.

    Raises
    ------
    UnsupportedError
        A batch (the tree is shared by all requests), a lone root, ranks that nothing tells, a token without a rank,
        a rank of `top_k` or more, or a path longer than `num_heads`.
    ShapeError, DTypeError, ArgumentError
        Candidates that do not fit, arrays on a GPU.

    Notes
    -----
    Medusa sorts the list by length, then by ranks, so its node order is breadth-first whatever the order here.
    Source: `generate_medusa_buffers` in medusa/model/utils.py of github.com/FasterDecoding/Medusa.

    Examples
    --------
    >>> to_medusa_choices(DraftTree.from_parents([7, 10, 20, 11], [-1, 0, 1, 0]), in_order=True)
    [[0], [0, 0], [1]]
    """
    function = "to_medusa_choices"
    check = Checker(function)
    limit = check.integer("top_k", top_k, low=1)
    heads = None if num_heads is None else check.integer("num_heads", num_heads, low=1)
    paths = rank_paths(function, tree, candidates, in_order)
    for node, path in enumerate(paths, start=1):
        if path[-1] >= limit:
            raise UnsupportedError(
                f"{function}: node {node} has rank {path[-1]} at depth {len(path)}, but a head offers {limit} "
                f"candidates (`top_k`)"
            )
        if heads is not None and len(path) > heads:
            raise UnsupportedError(f"{function}: node {node} lies at depth {len(path)}, deeper than {heads} heads")
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
        An empty list or path, a path twice or without its parent, entries that are no ranks, roots that do not fit.

    Examples
    --------
    >>> import numpy as np
    >>> ids, logits = np.array([[10, 11], [20, 21]], np.int32), np.zeros((2, 2), np.float32)
    >>> table = Candidates(ids, logits, np.ones(2, np.float32))
    >>> from_medusa_choices([[0], [0, 0], [1]], table, root_token_ids=7).token_ids.tolist()
    [7, 10, 11, 20]
    """
    function = "from_medusa_choices"
    Checker(function).choice("order", order, ("sorted", "given"))
    paths = checked_paths(function, "choices", choices)
    return tree_from_paths(
        function, sorted(paths, key=sort_key) if order == "sorted" else paths, candidates, root_token_ids
    )
