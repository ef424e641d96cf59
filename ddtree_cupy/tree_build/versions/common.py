"""What the versions of best_first_tree share: the sizes that decide, the limits of a tree, the arrays of the result."""

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np

from ddtree_cupy.containers.topology import words_per_row
from ddtree_cupy.errors import UnsupportedError
from ddtree_cupy.kernels import KernelSpec, Plan, constants, layout_of
from ddtree_cupy.kernels.workspace import Sizes

Array = Any

LIMITS = "tree_build/candidates.cuh"
NODE_BYTES = 32  # of the state of pops.cuh
_LARGEST_INT = 2**31 - 1


class TreeSizes(NamedTuple):
    """What decides how trees are built.

    Attributes
    ----------
    batch, draft_len, candidates, capacity : int
        Requests, rows of a request, candidates of a row, nodes besides the root.
    shared_limit : int
        Shared memory in bytes that one block may use.
    """

    batch: int
    draft_len: int
    candidates: int
    capacity: int
    shared_limit: int

    @property
    def num_nodes(self) -> int:
        """Nodes of a tree, the root among them."""
        return self.capacity + 1


class TreeVersion(Protocol):
    """A version of best_first_tree: a module of this package."""

    SOURCE: str

    def specs(self) -> Iterable[KernelSpec]:
        """Return every kernel of the version."""

    def refusal(self, sizes: TreeSizes) -> str:
        """Return why the version cannot build trees of these sizes, "" when it can."""

    def plan(self, sizes: TreeSizes, limits: Array) -> Plan:
        """Return its launches; `limits` is what `pack_limits` returns."""


def pack_limits(
    sizes: TreeSizes,
    max_depth: int | None,
    max_children: int | tuple[int, ...] | None,
    min_path_score: float | None,
    spine: int,
) -> Array:
    """Return `struct Limits`; UnsupportedError for too many limits of children."""
    return layout_of(LIMITS, "Limits").pack(
        min_path_score=-np.inf if min_path_score is None else min_path_score,
        max_depth=sizes.draft_len if max_depth is None else min(max_depth, sizes.draft_len),
        spine=min(spine, sizes.capacity),
        widths=_widths(max_children, sizes.draft_len),
    )


def _widths(max_children: int | tuple[int, ...] | None, draft_len: int) -> list[int]:
    """Return the most children of a node by its depth."""
    size = constants(LIMITS)["WIDTHS"]
    if max_children is None or isinstance(max_children, int):
        return [_LARGEST_INT if max_children is None else min(max_children, _LARGEST_INT)] * size
    limits = [min(limit, _LARGEST_INT) for limit in max_children[:draft_len]]
    if len(limits) >= size:
        raise UnsupportedError(
            f"best_first_tree: `max_children` has {len(limits)} entries, a kernel takes at most {size - 1}"
        )
    return limits + [0] * (size - len(limits))


def state_bytes(num_nodes: int) -> int:
    """Shared memory, or workspace of a request, in which pops.cuh keeps `num_nodes` nodes."""
    return NODE_BYTES * 32 * words_per_row(num_nodes)


def results(sizes: TreeSizes) -> Sizes:
    """Return the arrays of a tree in the order of `DraftTree`."""
    nodes, of_request = (sizes.batch, sizes.num_nodes), (sizes.batch,)
    return {
        "token_ids": (nodes, np.int32),
        "parents": (nodes, np.int32),
        "depths": (nodes, np.int32),
        "path_scores": (nodes, np.float64),
        "num_nodes": (of_request, np.int32),
        "status": (of_request, np.int32),
        "visibility_bits": ((*nodes, words_per_row(sizes.num_nodes)), np.uint32),
        "first_child": (nodes, np.int32),
        "next_sibling": (nodes, np.int32),
    }
