"""The `speculative_token_tree` string vLLM used to take: one static tree as a Python list of rank tuples."""

import ast
from collections import Counter

import numpy.typing as npt

from ddtree_cupy.containers import Candidates, DraftTree
from ddtree_cupy.errors import ArgumentError, DTypeError, UnsupportedError
from ddtree_cupy.interop._paths import Path, checked_paths, rank_paths, sort_key, tree_from_paths


def _check_uniform(function: str, paths: list[Path]) -> None:
    """Raise unless all nodes of a level have the same number of children, ranks 0 and up."""
    children = Counter(path[:-1] for path in paths)
    known = set(paths)
    for depth in range(max(map(len, paths))):
        level = [path for path in ((), *paths) if len(path) == depth]
        wanted = max(children[path] for path in level)
        for path in level:
            if any((*path, rank) not in known for rank in range(wanted)):
                raise UnsupportedError(
                    f"{function}: node {path} has {children[path]} children, but vLLM drafts the same number, ranks 0 "
                    f"to {wanted - 1}, for every node of depth {depth}; `require_uniform=False` skips this check"
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
        of children. Forks lift that.

    Returns
    -------
    str
        Paths sorted by length, then by ranks, as vLLM sorts them. The root is not listed;
        `num_speculative_tokens` is the number of paths. Token ids and scores cannot be held.

    Raises
    ------
    UnsupportedError
        A batch (the tree is shared by all requests), a lone root, ranks that nothing tells, a token without a rank,
        or a tree that is not uniform by level.
    ShapeError, DTypeError, ArgumentError
        Candidates that do not fit, arrays on a GPU.

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
    function = "to_vllm_token_tree"
    paths = sorted(rank_paths(function, tree, candidates, in_order), key=sort_key)
    if require_uniform:
        _check_uniform(function, paths)
    return str(paths)


def from_vllm_token_tree(text: str, candidates: Candidates, *, root_token_ids: npt.ArrayLike) -> DraftTree:
    """Make the tree that a string describes, with the tokens of a round; nodes breadth-first, as vLLM numbers them.

    Parameters
    ----------
    text : str
        A Python literal, list of tuples of ranks; a one-rank path is written (0,).
    candidates : Candidates
        Shapes ([B,] L, K): entry [d - 1, r] is the token of rank r at depth d.
    root_token_ids : int or int array_like, shape ([B])
        The root, in vLLM the last sampled token.

    Returns
    -------
    DraftTree
        Shapes ([B,] N), N = number of paths + 1; path_scores None.

    Raises
    ------
    UnsupportedError
        A path deeper than L, a rank of K or more, or a candidate that is missing (id -1), roots beyond int32.
    ShapeError, DTypeError, ArgumentError
        Text that is no literal list, an empty list, and what `from_medusa_choices` refuses.

    Examples
    --------
    >>> import numpy as np
    >>> ids, logits = np.array([[10, 11], [20, 21]], np.int32), np.zeros((2, 2), np.float32)
    >>> table = Candidates(ids, logits, np.ones(2, np.float32))
    >>> from_vllm_token_tree("[(0,), (0, 0), (1,)]", table, root_token_ids=7).token_ids.tolist()
    [7, 10, 11, 20]
    """
    function = "from_vllm_token_tree"
    if not isinstance(text, str):
        raise DTypeError(f"{function}: `text` is {type(text).__name__}, expected str")
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ArgumentError(f"{function}: `text` is not a Python literal ({error}): {text[:80]!r}") from None
    if not isinstance(found, list | tuple):
        raise ArgumentError(f"{function}: `text` is a {type(found).__name__}, expected a list of tuples")
    paths = checked_paths(function, "text", found)
    return tree_from_paths(function, sorted(paths, key=sort_key), candidates, root_token_ids)
