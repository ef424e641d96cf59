"""Draft trees of every shape, and arbitrary visibility matrices."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from ddtree_cupy.containers import DraftTree, Visibility
from ddtree_cupy.testing.poison import poison_padding
from ddtree_cupy.testing.strategies.sizes import batch_axes, check_bounds, check_choice, node_counts, seeds

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
    check_bounds("parent_arrays", locals(), nodes=1)
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


def _ragged_counts(draw: Any, bounds: dict[str, Any]) -> tuple[bool, list[int]]:
    """Return whether there is a batch axis, and the number of nodes of each request."""
    axes = batch_axes(draw, bounds)
    sizes = node_counts(min_nodes=bounds["min_nodes"], max_nodes=bounds["max_nodes"])
    batch = axes[0] if axes else 1
    return bool(axes), [0 if bounds["inactive"] and draw(st.integers(0, 4)) == 4 else draw(sizes) for _ in range(batch)]


@st.composite
def _draft_trees(draw: Any, bounds: dict[str, Any]) -> DraftTree:
    batched, counts = _ragged_counts(draw, bounds)
    capacity = max([1, *counts])
    if draw(st.booleans()):
        capacity = draw(st.integers(capacity, bounds["max_nodes"]))
    random = np.random.default_rng(draw(seeds()))
    token_ids, parents = np.full((2, len(counts), capacity), -1, np.int32)
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
    return replace(tree, path_scores=scores)


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
    bounds = dict(locals())
    check_bounds("draft_trees", bounds, batch=0, nodes=1, vocab=1)
    return _draft_trees(bounds)


@st.composite
def _visibilities(draw: Any, bounds: dict[str, Any]) -> Visibility:
    batched, counts = _ragged_counts(draw, bounds)
    capacity = draw(st.integers(max([1, *counts]), bounds["max_nodes"]))
    density = draw(st.sampled_from([0.5, 0.0, 1.0, 0.05, 0.95]))
    seed = draw(seeds())
    dense = np.random.default_rng(seed).random((len(counts), capacity, capacity)) < density
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
    bounds = dict(locals())
    check_bounds("visibilities", bounds, batch=0, nodes=1)
    return _visibilities(bounds)
