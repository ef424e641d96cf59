"""What the formats share: host checks of trees, masks and lengths before anything is converted."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy._arrays import host_array, library_of
from ddtree_cupy._check import Checker
from ddtree_cupy.containers import Candidates, DraftTree, Visibility
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError

Array = Any
INTEGERS = ("int32", "int64")
INT32 = np.iinfo(np.int32)


class Call(Checker):
    """Check the arguments of one call of a conversion, by value too; arrays must be on the host."""

    def error(self, text: str, kind: type[Exception] = ArgumentError) -> Exception:
        """Return the error to raise; its message begins with the function."""
        return kind(f"{self.function}: {text}")

    def _container(self, name: str, value: Any, array: str, *kinds: type) -> Any:
        self.kind(name, value, *kinds)
        library = library_of(getattr(value, array))
        if library != "numpy":
            raise self.error(
                f"the arrays of `{name}` come from {library}, expected NumPy arrays: this form is made on the host; "
                "cupy.asnumpy or numpy.from_dlpack converts each",
                DTypeError,
            )
        return value.validate()

    def tree(self, tree: Any) -> DraftTree:
        """Return a valid host tree with its request axis."""
        valid: DraftTree = self._container("tree", tree, "token_ids", DraftTree)
        return valid if valid.is_batched else valid.with_batch()

    def candidates(self, candidates: Any) -> Candidates:
        """Return valid host candidates, batched or not."""
        valid: Candidates = self._container("candidates", candidates, "token_ids", Candidates)
        return valid

    def dense(self, visibility: Any) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """Return bool (B, N, N), False outside the valid nodes, and the node counts (B)."""
        valid = self._container("visibility", visibility, "visibility_bits", Visibility, DraftTree)
        found = Visibility(valid.visibility_bits, valid.num_nodes)
        found = found if found.is_batched else found.with_batch()
        return found.to_dense(), found.num_nodes.astype(np.int64)

    def mapping(self, arrays: Any, names: Iterable[str]) -> None:
        """Raise unless `arrays` is a mapping that has all `names`."""
        if not isinstance(arrays, Mapping):
            raise self.error(f"`arrays` is {type(arrays).__name__}, expected a mapping of names to arrays", DTypeError)
        missing = [name for name in names if name not in arrays]
        if missing:
            raise self.error(f"`arrays` lacks {', '.join(missing)}")

    def addressable(self, name: str, shape: tuple[int, ...], itemsize: int = 1) -> None:
        """Raise when `name` asks for an array of more than 1 TiB, whatever the memory."""
        if math.prod(max(size, 1) for size in shape) * itemsize > 2**40:
            raise self.error(f"`{name}` asks for an array of shape {shape}, more than 1 TiB")

    def integer_array(self, name: str, values: npt.ArrayLike) -> npt.NDArray[np.integer[Any]]:
        """Return an integer, or integers nested to equal lengths, as an integer array."""
        array = host_array(self.function, name, values)
        if array.dtype.kind == "O":
            raise self.error(f"`{name}` holds values other than integers of at most 64 bits", DTypeError)
        if array.size and array.dtype.kind not in "iu":
            raise self.error(f"`{name}` has dtype {array.dtype}, expected integers", DTypeError)
        return array if array.size else array.astype(np.int64)

    def lengths(self, name: str, values: npt.ArrayLike, batch: int) -> npt.NDArray[np.int64]:
        """Return one non-negative length per request as int64 (B); a single integer serves a batch of one."""
        array = self.integer_array(name, values)
        if array.ndim == 0 and batch == 1:
            array = array[None]
        if array.shape != (batch,):
            raise self.error(f"`{name}` is {array.shape}, expected ({batch},), one length per request", ShapeError)
        if array.size and int(array.min()) < 0:
            raise self.error(f"`{name}` is {array.tolist()}, expected lengths of at least 0")
        if array.size and int(array.max()) > np.iinfo(np.int64).max // 2:
            raise self.error(f"`{name}` is {array.tolist()}, expected lengths below 2**62")
        return array.astype(np.int64)

    def node_counts(self, name: str, values: npt.ArrayLike | None, batch: int, capacity: int) -> npt.NDArray[np.int64]:
        """Return the valid nodes of each request, all of them by default."""
        if values is None:
            return np.full(batch, capacity, np.int64)
        counts = self.lengths(name, values, batch)
        if (counts > capacity).any():
            raise self.error(f"`{name}` is {counts.tolist()}, expected at most {capacity} nodes")
        return counts

    def host(
        self, name: str, array: Array, axes: Sequence[str | int] | None = None, dtypes: Sequence[str] | None = None
    ) -> None:
        """Raise unless `array` is a NumPy array of this shape (any without `axes`) and dtype."""
        if self.backend(**{name: array}) != "numpy" or not isinstance(array, np.ndarray):
            kind = f"{type(array).__name__} of {library_of(array)}"
            raise self.error(f"`{name}` is {kind}, expected a NumPy array", DTypeError)
        if axes is not None:
            self.array(name, array, axes, dtypes)

    def integers(self, name: str, array: Array, axes: Sequence[str | int]) -> npt.NDArray[np.int64]:
        """Return an int32 or int64 host array as int64 after checking its shape."""
        self.host(name, array, axes, INTEGERS)
        return np.asarray(array, np.int64)

    def as_int32(
        self, name: str, array: npt.NDArray[np.integer[Any]], why: str = "token ids are int32 here"
    ) -> npt.NDArray[np.int32]:
        """Return integers as int32; a value that does not fit raises."""
        if array.size and (array.min() < INT32.min or array.max() > INT32.max):
            raise self.error(f"`{name}` holds a value outside int32; {why}", UnsupportedError)
        return array.astype(np.int32)

    def tree_of(self, name: str, tokens: npt.NDArray[np.int64], parents: npt.NDArray[np.int64]) -> DraftTree:
        """Return the tree of (B, N) tokens and parents; tokens that no tree can have are refused as `name`."""
        ids = self.as_int32(name, tokens)
        for request, (row, links) in enumerate(zip(ids.tolist(), parents.tolist(), strict=True)):
            seen: dict[tuple[int, int], int] = {}
            for node, edge in enumerate(zip(links, row, strict=True)):
                if edge[0] >= 0 and edge in seen:
                    raise self.error(
                        f"`{name}` of request {request} gives the nodes {seen[edge]} and {node}, children of node "
                        f"{edge[0]}, the same token ({edge[1]}); siblings must have distinct tokens"
                    )
                seen[edge] = node
        return DraftTree.from_parents(ids, parents)

    def padded_tokens(self, tree: DraftTree, pad_token_id: int | None) -> npt.NDArray[np.int64]:
        """Return token ids (B, N) as int64 with padding replaced, since the form has no token for "no node"."""
        if pad_token_id is not None:
            self.integer("pad_token_id", pad_token_id, low=0, high=int(INT32.max))
            return np.asarray(np.where(tree.token_ids < 0, pad_token_id, tree.token_ids), np.int64)
        capacity = tree.token_ids.shape[1]
        for request in np.flatnonzero(tree.num_nodes < capacity):
            raise self.error(
                f"request {request} has {tree.num_nodes[request]} of {capacity} nodes, but every request must have "
                "the same number of tokens; `pad_token_id=` fills the rest with a token that is never accepted",
                UnsupportedError,
            )
        return np.asarray(tree.token_ids, np.int64)

    def positions(self, name: str, given: npt.NDArray[np.int64], depths: Array, past: Array, rule: str) -> None:
        """Raise unless every node with a depth (B, N) has the position past + depth; `rule` words the expectation."""
        wanted = np.reshape(past, (-1, 1)) + depths
        for request, node in np.argwhere((depths >= 0) & (given != wanted)):
            said = rule.format(expected=wanted[request, node], past=wanted[request, 0])
            raise self.error(f"`{name}` of node {node} of request {request} is {given[request, node]}, expected {said}")

    def tree_behind(self, visibility: Visibility, name: str, token_ids: npt.NDArray[Any]) -> DraftTree:
        """Recover a tree as `tree_from_visibility` does; `name` is that of the tokens."""
        dense, counts = self.dense(visibility)
        axes: tuple[int, ...] = tuple(dense.shape[:2])[0 if visibility.is_batched else 1 :]
        tokens: Any = self.integers(name, token_ids, axes).reshape(dense.shape[:2])
        parents = np.full(tokens.shape, -1, np.int64)
        for request, count in enumerate(counts.tolist()):
            for node in range(count):
                before = np.flatnonzero(dense[request, node, :node])
                parent = int(before[-1]) if before.size else -1
                expected = dense[request, parent].copy() if parent >= 0 else np.zeros(dense.shape[-1], bool)
                expected[node] = True
                if (parent < 0) != (node == 0) or (dense[request, node] != expected).any():
                    seen = np.flatnonzero(dense[request, node]).tolist()
                    wanted = "itself only" if node == 0 else "a path from node 0 to itself"
                    raise self.error(
                        f"row {node} of request {request} sees {seen}, expected {wanted}; no tree has this mask",
                        UnsupportedError,
                    )
                parents[request, node] = parent
        used = np.arange(tokens.shape[1]) < counts[:, None]
        for request, node in np.argwhere(used & (tokens < 0)):
            raise self.error(
                f"`{name}` of request {request} holds {tokens[request, node]} among its {counts[request]} valid nodes"
            )
        tree = self.tree_of(name, np.where(used, tokens, -1), parents)
        return tree if visibility.is_batched else tree.without_batch()
