"""What the formats share: host checks of trees, masks and lengths before anything is converted."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import Checker, host_array, library_of
from ddtree_cupy.containers import Candidates, DraftTree, Visibility
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError

Array = Any
INTEGERS = ("int32", "int64")
INT32 = np.iinfo(np.int32)


def _on_host(function: str, name: str, value: Any, kinds: tuple[type, ...], array: str) -> Any:
    if not isinstance(value, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise DTypeError(f"{function}: `{name}` is {type(value).__name__}, expected {wanted}")
    library = library_of(getattr(value, array))
    if library != "numpy":
        raise DTypeError(
            f"{function}: the arrays of `{name}` come from {library}, expected NumPy arrays: this form is made on the "
            f"host; cupy.asnumpy or numpy.from_dlpack converts each"
        )
    checked: Any = value
    return checked.validate()


def tree_on_host(function: str, tree: Any) -> DraftTree:
    """Return a valid host tree with its request axis."""
    valid: DraftTree = _on_host(function, "tree", tree, (DraftTree,), "token_ids")
    return valid if valid.is_batched else valid.with_batch()


def candidates_on_host(function: str, candidates: Any) -> Candidates:
    """Return valid host candidates, batched or not."""
    valid: Candidates = _on_host(function, "candidates", candidates, (Candidates,), "token_ids")
    return valid


def dense_on_host(function: str, visibility: Any) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Return bool (B, N, N), False outside the valid nodes, and the node counts (B)."""
    valid = _on_host(function, "visibility", visibility, (Visibility, DraftTree), "visibility_bits")
    found: Visibility = Visibility(valid.visibility_bits, valid.num_nodes) if isinstance(valid, DraftTree) else valid
    found = found if found.is_batched else found.with_batch()
    return found.to_dense(), found.num_nodes.astype(np.int64)


def mapping_with(function: str, arrays: Any, names: Iterable[str]) -> None:
    """Raise unless `arrays` is a mapping that has all `names`."""
    if not isinstance(arrays, Mapping):
        raise DTypeError(f"{function}: `arrays` is {type(arrays).__name__}, expected a mapping of names to arrays")
    missing = [name for name in names if name not in arrays]
    if missing:
        raise ArgumentError(f"{function}: `arrays` lacks {', '.join(missing)}")


def addressable(function: str, name: str, shape: tuple[int, ...], itemsize: int = 1) -> None:
    """Raise when `name` asks for an array of more than 1 TiB, whatever the memory."""
    if math.prod(max(size, 1) for size in shape) * itemsize > 2**40:
        raise ArgumentError(f"{function}: `{name}` asks for an array of shape {shape}, more than 1 TiB")


def integer_array(function: str, name: str, values: npt.ArrayLike) -> npt.NDArray[np.integer[Any]]:
    """Return an integer, or integers nested to equal lengths, as an integer array."""
    array = host_array(function, name, values)
    if array.dtype.kind == "O":
        raise DTypeError(f"{function}: `{name}` holds something else than integers of at most 64 bits")
    if array.size and array.dtype.kind not in "iu":
        raise DTypeError(f"{function}: `{name}` has dtype {array.dtype}, expected integers")
    return array if array.size else array.astype(np.int64)


def lengths(function: str, name: str, values: npt.ArrayLike, batch: int) -> npt.NDArray[np.int64]:
    """Return one non-negative length a request as int64 (B); a single integer serves a batch of one."""
    array = integer_array(function, name, values)
    if array.ndim == 0 and batch == 1:
        array = array[None]
    if array.shape != (batch,):
        raise ShapeError(f"{function}: `{name}` is {array.shape}, expected ({batch},), one length a request")
    if array.size and int(array.min()) < 0:
        raise ArgumentError(f"{function}: `{name}` is {array.tolist()}, expected lengths of at least 0")
    if array.size and int(array.max()) > np.iinfo(np.int64).max // 2:
        raise ArgumentError(f"{function}: `{name}` is {array.tolist()}, expected lengths below 2**62")
    return array.astype(np.int64)


def node_counts(
    function: str, name: str, values: npt.ArrayLike | None, batch: int, capacity: int
) -> npt.NDArray[np.int64]:
    """Return the valid nodes of each request, all of them by default."""
    if values is None:
        return np.full(batch, capacity, np.int64)
    counts = lengths(function, name, values, batch)
    if (counts > capacity).any():
        raise ArgumentError(f"{function}: `{name}` is {counts.tolist()}, expected at most {capacity} nodes")
    return counts


def integers(check: Checker, name: str, array: Array, axes: tuple[str | int, ...]) -> npt.NDArray[np.int64]:
    """Return an int32 or int64 host array as int64 after checking its shape."""
    check_host(check, name, array)
    check.array(name, array, axes, INTEGERS)
    return np.asarray(array, np.int64)


def check_host(check: Checker, name: str, array: Array) -> None:
    """Raise unless `array` is a NumPy array."""
    if check.backend(**{name: array}) != "numpy" or not isinstance(array, np.ndarray):
        raise DTypeError(
            f"{check.function}: `{name}` is {type(array).__name__} of {library_of(array)}, expected a NumPy array"
        )


def as_int32(function: str, name: str, array: npt.NDArray[np.integer[Any]], why: str) -> npt.NDArray[np.int32]:
    """Return integers as int32; a value that does not fit raises."""
    if array.size and (array.min() < INT32.min or array.max() > INT32.max):
        raise UnsupportedError(f"{function}: `{name}` holds a value outside int32; {why}")
    return array.astype(np.int32)


def tree_of(function: str, name: str, tokens: npt.NDArray[np.int64], parents: npt.NDArray[np.int64]) -> DraftTree:
    """Return the tree of (B, N) tokens and parents; tokens that no tree can have are refused under their own name."""
    ids = as_int32(function, name, tokens, "token ids are int32 here")
    for request, (row, links) in enumerate(zip(ids.tolist(), parents.tolist(), strict=True)):
        seen: dict[tuple[int, int], int] = {}
        for node, edge in enumerate(zip(links, row, strict=True)):
            if edge[0] >= 0 and edge in seen:
                raise ArgumentError(
                    f"{function}: `{name}` of request {request} gives nodes {seen[edge]} and {node}, children of node "
                    f"{edge[0]}, one token ({edge[1]}); siblings must have distinct tokens"
                )
            seen[edge] = node
    return DraftTree.from_parents(ids, parents)


def padded_tokens(function: str, tree: DraftTree, pad_token_id: int | None) -> npt.NDArray[np.int64]:
    """Return token ids (B, N) as int64 with padding replaced, since the form has no token for "no node"."""
    counts = tree.num_nodes
    capacity = tree.token_ids.shape[1]
    if pad_token_id is None:
        short = np.flatnonzero(counts < capacity)
        if short.size:
            raise UnsupportedError(
                f"{function}: request {short[0]} has {counts[short[0]]} of {capacity} nodes, but every request must "
                f"bring the same number of tokens; `pad_token_id=` fills up with a token that is never accepted"
            )
        return np.asarray(tree.token_ids, np.int64)
    Checker(function).integer("pad_token_id", pad_token_id, low=0, high=int(INT32.max))
    filled: npt.NDArray[np.int64] = np.where(tree.token_ids < 0, pad_token_id, tree.token_ids).astype(np.int64)
    return filled


def tree_behind(function: str, visibility: Visibility, name: str, token_ids: npt.NDArray[Any]) -> DraftTree:
    """Recover a tree as `tree_from_visibility` does; `name` is that of the tokens."""
    dense, counts = dense_on_host(function, visibility)
    axes: tuple[int, ...] = tuple(dense.shape[:2])[0 if visibility.is_batched else 1 :]
    tokens: Any = integers(Checker(function), name, token_ids, axes).reshape(dense.shape[:2])
    parents = np.full(tokens.shape, -1, np.int64)
    for request, count in enumerate(counts.tolist()):
        for node in range(count):
            before = np.flatnonzero(dense[request, node, :node])
            parent = int(before[-1]) if before.size else -1
            expected = dense[request, parent].copy() if parent >= 0 else np.zeros(dense.shape[-1], bool)
            expected[node] = True
            if (parent < 0) != (node == 0) or (dense[request, node] != expected).any():
                seen = np.flatnonzero(dense[request, node]).tolist()
                raise UnsupportedError(
                    f"{function}: row {node} of request {request} sees {seen}, expected "
                    f"{'itself only' if node == 0 else 'a path from node 0 to itself'}; no tree has this mask"
                )
            parents[request, node] = parent
    used = np.arange(tokens.shape[1]) < counts[:, None]
    negative = np.argwhere(used & (tokens < 0))
    if negative.size:
        request, node = negative[0]
        raise ArgumentError(
            f"{function}: `{name}` of request {request} holds {tokens[request, node]} among its {counts[request]} "
            f"valid nodes"
        )
    tree = tree_of(function, name, np.where(used, tokens, -1), parents)
    return tree if visibility.is_batched else tree.without_batch()
