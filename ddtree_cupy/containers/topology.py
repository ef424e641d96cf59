"""Arrays that follow from `parents` alone: depths, child links and packed visibility, for one request or a batch."""

from typing import Any, NamedTuple

import numpy as np

Array = Any
MOST_NODES = 65_535  # in one tree, root included; its visibility takes 512 MiB


class Topology(NamedTuple):
    """The derived arrays of a draft tree; shapes as in :class:`ddtree_cupy.DraftTree`."""

    depths: Array
    first_child: Array
    next_sibling: Array
    visibility_bits: Array


def derive_on_device(parents: Array, num_nodes: Array) -> Topology:
    """Derive the links of CuPy arrays by the kernel; shapes as in `derive_topology`."""
    # containers are below kernels: only here, and only when called
    from ddtree_cupy.tree_build.topology import topology

    return Topology(**topology(parents, num_nodes, backend="cupy"))


def count_nodes(token_ids: Array, parents: Array) -> Array:
    """Return int32 (B): nodes before the first padding entry, 0 where the root's token is -1; no value is read."""
    linked = parents >= 0
    linked[:, :1] = token_ids[:, :1] >= 0
    return np.cumprod(linked, axis=1).sum(axis=1).astype(np.int32)


def fillable_nodes(
    budget: int,
    draft_len: int,
    width: int,
    max_depth: int | None = None,
    max_children: int | tuple[int, ...] | None = None,
) -> int:
    """Return how many of `budget` nodes the full tree has besides the root, with `width` candidates per depth.

    Examples
    --------
    >>> fillable_nodes(10**12, 2, 5), fillable_nodes(7, 2, 5), fillable_nodes(10**12, 4, 5, max_children=1)
    (30, 7, 4)
    """
    level, total = 1, 0
    for depth in range(draft_len if max_depth is None else min(draft_len, max_depth)):
        limit = width
        if isinstance(max_children, int):
            limit = min(width, max_children)
        elif max_children is not None:
            limit = min(width, max_children[depth]) if depth < len(max_children) else 0
        level *= limit
        total += level
        if level == 0 or total >= budget:
            break
    return min(total, budget)


def words_per_row(num_nodes: int) -> int:
    """Return W, the 32-bit words that hold one visibility row of `num_nodes` bits."""
    return (num_nodes + 31) // 32


def derive_topology(parents: Array, num_nodes: Array) -> Topology:
    """Derive the links of every request; nodes from `num_nodes` on are padding.

    depth(i) = depth(parent(i)) + 1 and visible(i) = visible(parent(i)) + {i}, so one pass in node order is
    enough because parents[i] < i.

    Parameters
    ----------
    parents : int32 array, shape (B, N)
        Valid: parents[b, 0] = -1 and 0 <= parents[b, i] < i below `num_nodes[b]`.
    num_nodes : int32 array, shape (B,)

    Returns
    -------
    Topology
        depths, first_child, next_sibling int32 (B, N), padding -1; visibility_bits uint32 (B, N, W), padding 0.
    """
    batch, capacity = parents.shape
    words = words_per_row(capacity)
    depths = np.full((batch, capacity), -1, np.int32)
    first_child = np.full((batch, capacity), -1, np.int32)
    next_sibling = np.full((batch, capacity), -1, np.int32)
    visibility_bits = np.zeros((batch, capacity, words), np.uint32)

    for b in range(batch):
        count = int(num_nodes[b])
        parent_of: list[int] = parents[b, :count].tolist()
        depth_of = [0] * count
        row_of = [0] * count  # Python integers of any width: bit j set when node j is visible
        last_child = [-1] * count
        for i, parent in enumerate(parent_of):
            row_of[i] = 1 << i
            if parent < 0:
                continue
            depth_of[i] = depth_of[parent] + 1
            row_of[i] |= row_of[parent]
            if last_child[parent] < 0:
                first_child[b, parent] = i
            else:
                next_sibling[b, last_child[parent]] = i
            last_child[parent] = i
        depths[b, :count] = depth_of
        packed = b"".join(row.to_bytes(4 * words, "little") for row in row_of)
        visibility_bits[b, :count] = np.frombuffer(packed, "<u4").reshape(count, words)
    return Topology(depths, first_child, next_sibling, visibility_bits)


def pack_visibility(visibility: Array) -> Array:
    """Pack bool (..., N, N) into uint32 (..., N, W), bit j of a row at word j // 32, position j % 32."""
    num_nodes = visibility.shape[-1]
    padding = [(0, 0)] * (visibility.ndim - 1) + [(0, 32 * words_per_row(num_nodes) - num_nodes)]
    packed = np.packbits(np.pad(visibility, padding), axis=-1, bitorder="little")
    return packed.view("<u4").astype(np.uint32, copy=False)


def unpack_visibility(visibility_bits: Array, num_nodes: Array) -> Array:
    """Unpack uint32 (..., N, W) into bool (..., N, N); rows and columns from `num_nodes` on are False."""
    capacity = visibility_bits.shape[-2]
    as_bytes = np.ascontiguousarray(visibility_bits).astype("<u4", copy=False).view(np.uint8)
    dense = np.unpackbits(as_bytes, axis=-1, count=capacity, bitorder="little").astype(bool)
    valid = np.arange(capacity) < np.asarray(num_nodes)[..., None]
    return dense & valid[..., :, None] & valid[..., None, :]
