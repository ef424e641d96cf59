"""Draft trees of every shape, and arbitrary visibility matrices."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from ddtree_cupy.containers import DraftTree, Visibility
from ddtree_cupy.testing.poison import poison_padding
from ddtree_cupy.testing.strategies.sizes import check_bounds, check_choice, flags, node_counts, seeds

_SHAPES = ("chain", "star", "comb", "binary", "last_parent", "bushy", "deep", "random")


def _parents(shape: str, count: int, random: np.random.Generator) -> list[int]:
    """Return parents of one tree; "comb" is a chain whose every link has one leaf."""
    rules: dict[str, Callable[[int], int]] = {
        "chain": lambda i: i - 1,
        "star": lambda i: 0,
        "comb": lambda i: i - 1 if i % 2 else max(i - 2, 0),
        "binary": lambda i: (i - 1) // 2,
        "last_parent": lambda i: i - 1 if i < count // 2 else max(count // 2 - 1, 0),
        "bushy": lambda i: int(random.integers(0, min(i, 3))),
        "deep": lambda i: int(random.integers(max(i - 3, 0), i)),
        "random": lambda i: int(random.integers(0, i)),
    }
    return [-1, *(rules[shape](i) for i in range(1, count))][:count]


@st.composite
def _parent_arrays(draw: Any, min_nodes: int, max_nodes: int, shapes: tuple[str, ...]) -> npt.NDArray[np.int32]:
    count = draw(node_counts(min_nodes=min_nodes, max_nodes=max_nodes))
    random = np.random.default_rng(draw(seeds()))
    return np.array(_parents(draw(st.sampled_from(shapes)), count, random), np.int32)


def parent_arrays(
    *, min_nodes: int = 1, max_nodes: int = 129, shapes: tuple[str, ...] = _SHAPES
) -> st.SearchStrategy[npt.NDArray[np.int32]]:
    """Draw `parents` of single trees without padding.

    Parameters
    ----------
    min_nodes, max_nodes : int
        Bounds of N, inclusive; sizes next to multiples of 32 are frequent.
    shapes : tuple of str
        Some of chain, star, comb, binary, last_parent, bushy, deep, random.
    """
    check_bounds("parent_arrays", "min_nodes", min_nodes, "max_nodes", max_nodes, at_least=1)
    if not shapes:
        check_choice("parent_arrays", "shapes", shapes, _SHAPES)
    for shape in shapes:
        check_choice("parent_arrays", "shapes", shape, _SHAPES)
    return _parent_arrays(min_nodes, max_nodes, tuple(shapes))


def _tokens(parents: npt.NDArray[np.int32], vocab: int, random: np.random.Generator) -> npt.NDArray[np.int32]:
    """Return tokens with distinct siblings; cousins often have the same token, which may be 0."""
    tokens = np.zeros(len(parents), np.int32)
    tokens[:1] = random.integers(0, vocab)
    for parent in np.unique(parents[1:]):
        children = np.flatnonzero(parents == parent)
        spread = max(len(children), min(vocab, 2 * len(children)))
        tokens[children] = random.permutation(spread)[: len(children)]
    return tokens


def _ragged_counts(draw: Any, low: int, high: int, batch: int, inactive: bool) -> list[int]:
    sizes = node_counts(min_nodes=max(low, 1), max_nodes=max(high, 1))
    return [0 if inactive and draw(st.integers(0, 4)) == 4 else draw(sizes) for _ in range(batch)]


@st.composite
def _draft_trees(draw: Any, bounds: dict[str, Any]) -> DraftTree:
    batched = draw(flags(bounds["batched"]))
    batch = draw(st.integers(bounds["min_batch"], bounds["max_batch"])) if batched else 1
    low, high = bounds["min_nodes"], bounds["max_nodes"]
    counts = _ragged_counts(draw, low, high, batch, bounds["inactive"])
    capacity = max(
        1, draw(st.integers(max(counts, default=1), high)) if draw(st.booleans()) else max(counts, default=1)
    )
    random = np.random.default_rng(draw(seeds()))
    token_ids = np.full((batch, capacity), -1, np.int32)
    parents = np.full((batch, capacity), -1, np.int32)
    for request, count in enumerate(counts):
        one = np.array(_parents(draw(st.sampled_from(_SHAPES)), count, random), np.int32)
        parents[request, :count] = one
        token_ids[request, :count] = _tokens(one, bounds["vocab"], random)
    tree = DraftTree.from_parents(token_ids, parents)
    if bounds["path_scores"]:
        tree = _with_scores(tree, random, draw(st.booleans()))
    return tree if batched else tree.without_batch()


def _with_scores(tree: DraftTree, random: np.random.Generator, tied: bool) -> DraftTree:
    scores = np.full(tree.parents.shape, -np.inf)
    steps = np.asarray(random.integers(0, 3, scores.shape) * 0.5 if tied else random.standard_exponential(scores.shape))
    for request, count in enumerate(tree.num_nodes.tolist()):
        for node in range(count):
            parent = tree.parents[request, node]
            scores[request, node] = scores[request, parent] - steps[request, node] if node else 0.0
    arrays = {name: getattr(tree, name) for name in tree.__dataclass_fields__}
    return DraftTree(**{**arrays, "path_scores": scores})


def draft_trees(
    *,
    batched: bool | None = None,
    min_batch: int = 1,
    max_batch: int = 3,
    min_nodes: int = 1,
    max_nodes: int = 129,
    vocab: int = 1000,
    inactive: bool = True,
    path_scores: bool = False,
) -> st.SearchStrategy[DraftTree]:
    """Draw valid trees, ragged when batched, often with padding after the last node.

    Parameters
    ----------
    batched : bool, optional
        Whether there is an axis B; None draws both.
    min_batch, max_batch, min_nodes, max_nodes : int
        Bounds of B and of the nodes of an active request, inclusive; capacity is at most `max_nodes`.
    vocab : int
        Token ids stay below it, unless a node has more children than that.
    inactive : bool
        Whether requests may have num_nodes 0.
    path_scores : bool
        Whether there are scores (never rising along a path); otherwise they are None.
    """
    name = "draft_trees"
    check_bounds(name, "min_batch", min_batch, "max_batch", max_batch, at_least=0)
    check_bounds(name, "min_nodes", min_nodes, "max_nodes", max_nodes, at_least=1)
    check_bounds(name, "vocab", vocab, "vocab", vocab, at_least=1)
    return _draft_trees(dict(locals()))


@st.composite
def _visibilities(draw: Any, bounds: dict[str, Any]) -> Visibility:
    batched = draw(flags(bounds["batched"]))
    batch = draw(st.integers(bounds["min_batch"], bounds["max_batch"])) if batched else 1
    low, high = bounds["min_nodes"], bounds["max_nodes"]
    counts = _ragged_counts(draw, low, high, batch, bounds["inactive"])
    capacity = draw(st.integers(max([*counts, 1]), high))
    density = draw(st.sampled_from([0.5, 0.0, 1.0, 0.05, 0.95]))
    seed = draw(seeds())
    dense = np.random.default_rng(seed).random((batch, capacity, capacity)) < density
    found = Visibility.from_dense(dense, np.array(counts, np.int32))
    if bounds["garbage"] and draw(st.booleans()):
        found = poison_padding(found, seed=seed)
    return found if batched else found.without_batch()


def visibilities(
    *,
    batched: bool | None = None,
    min_batch: int = 1,
    max_batch: int = 3,
    min_nodes: int = 1,
    max_nodes: int = 129,
    inactive: bool = True,
    garbage: bool = True,
) -> st.SearchStrategy[Visibility]:
    """Draw arbitrary boolean matrices: not closed under ancestors, rows may see nothing, not even themselves.

    Parameters
    ----------
    batched, min_batch, max_batch, min_nodes, max_nodes, inactive
        As in `draft_trees`.
    garbage : bool
        Whether rows and bits from `num_nodes` on, which are ignored by contract, may hold random bits.
    """
    name = "visibilities"
    check_bounds(name, "min_batch", min_batch, "max_batch", max_batch, at_least=0)
    check_bounds(name, "min_nodes", min_nodes, "max_nodes", max_nodes, at_least=1)
    return _visibilities(dict(locals()))
