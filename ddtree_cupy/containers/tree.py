"""Candidates, visibility and the draft tree."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ddtree_cupy._arrays import as_array, as_int32, host_array, library_of
from ddtree_cupy._check import FLOATS_AND_F64, Checker
from ddtree_cupy.containers import interactive, topology, validation
from ddtree_cupy.containers.base import Arrays, where
from ddtree_cupy.errors import DTypeError, ShapeError

Array = Any

_MOST_REQUESTS = 16  # of a batch, that a notebook draws


@dataclass(frozen=True, eq=False)
class Candidates(Arrays):
    """The best tokens of every draft position.

    Attributes
    ----------
    token_ids : int32 array, shape ([B,] L, K)
        By descending logit, then ascending token id; -1 where a row has fewer candidates.
    logits : float32 array (float64 for float64 input), shape ([B,] L, K)
        The logits of `token_ids`; -inf beside id -1.
    lse : same dtype as `logits`, shape ([B,] L)
        Log-sum-exp of the whole row in nats; NaN marks a row that held NaN or +inf.
    """

    token_ids: Array
    logits: Array
    lse: Array

    @classmethod
    def from_topk(cls, token_ids: Array, logits: Array, lse: Array) -> Self:
        """Sort the rows of a top-k table, such as that of `torch.topk`, into the order of this class.

        Parameters
        ----------
        token_ids : integer array, shape ([B,] L, K)
            In any order, -1 where there is no candidate.
        logits : float array, shape ([B,] L, K)
            The logits of `token_ids`; float16 and bfloat16 become float32. Subnormals of float32 count as 0.
        lse : float array, shape ([B,] L)
            Log-sum-exp of each whole row in nats, not of its K logits. A row is bad if it is NaN or +inf, or if one of
            the logits is.

        Returns
        -------
        Candidates
            By descending logit, then ascending token id; NumPy arrays.

        Raises
        ------
        ShapeError, DTypeError, ArgumentError
            Arrays do not fit each other in shape or dtype, or their values are not valid candidates.

        Notes
        -----
        The other function decides which of several equal logits at the cut are in its table; `top_candidates` takes
        the lowest ids.

        Examples
        --------
        >>> token_ids, logits = np.array([[4, 5, 3]]), np.array([[2.0, 1.0, 1.0]], np.float32)
        >>> Candidates.from_topk(token_ids, logits, np.log(np.exp(logits).sum(axis=1))).token_ids.tolist()
        [[4, 3, 5]]
        """
        function = "Candidates.from_topk"
        check = Checker(function)
        logits, lse = as_array(function, "logits", logits), as_array(function, "lse", lse)
        if check.backend(logits=logits, lse=lse) != "numpy":
            raise DTypeError(f"{function}: `logits` is a CuPy array, expected NumPy; cupy.asnumpy(logits) makes one")
        ids = as_int32(function, "token_ids", token_ids, copy=True)
        lead = ("batch",) if ids.ndim == 3 else ()
        check.array("token_ids", ids, (*lead, "draft_len", "candidates"))
        check.array("logits", logits, (*lead, "draft_len", "candidates"), FLOATS_AND_F64)
        check.array("lse", lse, (*lead, "draft_len"), FLOATS_AND_F64)
        dtype = np.dtype(np.float64 if logits.dtype == np.float64 else np.float32)
        values = logits.astype(dtype)
        if dtype == np.float32:
            values[np.abs(values) < np.finfo(np.float32).smallest_normal] = 0
        bad = ~(lse < np.inf) | ~(values < np.inf).all(axis=-1)
        values[bad] = -np.inf
        ids[values == -np.inf] = -1
        order = np.lexsort((ids, -values))
        ids, values = (np.take_along_axis(array, order, axis=-1) for array in (ids, values))
        return cls(ids, values, np.where(bad, np.nan, lse).astype(dtype)).validate()

    @property
    def is_batched(self) -> bool:
        """Whether the arrays have a request axis."""
        return bool(self.lse.ndim == 2)

    def __repr__(self) -> str:
        *_, draft_len, width = self.token_ids.shape
        batch = f"batch={self.lse.shape[0]}, " if self.is_batched else ""
        return f"Candidates({batch}draft_len={draft_len}, per_depth={width}{where(self.lse)})"

    def validate(self) -> Self:
        """Check every value against the contract and return self; synchronises on CuPy arrays.

        Raises
        ------
        ShapeError, DTypeError, ArgumentError
        """
        validation.candidates(self.to("numpy"))
        return self


@dataclass(frozen=True, eq=False)
class Visibility(Arrays):
    """Which nodes may attend to which, one bit per pair; any boolean matrix is legal, ancestor closure is not assumed.

    Attributes
    ----------
    visibility_bits : uint32 array, shape ([B,] N, W)
        Bit j of row i (bit 0 first) is set when node i may attend to node j.
    num_nodes : int32 array, shape ([B])
        Valid nodes; rows and bits from `num_nodes` on are ignored.

    Examples
    --------
    >>> causal = Visibility.from_dense(np.tri(3, dtype=bool))
    >>> causal.visibility_bits.ravel().tolist()
    [1, 3, 7]
    >>> causal.to_dense().astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """

    visibility_bits: Array
    num_nodes: Array

    @classmethod
    def from_dense(cls, visibility: npt.NDArray[np.bool_], num_nodes: Array = None) -> Self:
        """Pack a bool matrix, True = may attend.

        Parameters
        ----------
        visibility : bool array_like, shape ([B,] N, N)
        num_nodes : int array_like, shape ([B]), default N
            Valid nodes of each request.

        Raises
        ------
        ShapeError, DTypeError, ArgumentError
            `visibility` is not a bool array of shape ([B,] N, N), or `num_nodes` does not fit it.
        """
        if library_of(visibility) == "cupy":
            raise DTypeError(
                "Visibility.from_dense: `visibility` is a CuPy array, expected a NumPy array; cupy.asnumpy(visibility) "
                "makes one"
            )
        visibility = host_array("Visibility.from_dense", "visibility", visibility)
        if visibility.dtype != np.bool_:
            raise DTypeError(f"Visibility.from_dense: `visibility` has dtype {visibility.dtype}, expected bool")
        if visibility.ndim not in (2, 3) or visibility.shape[-1] != visibility.shape[-2]:
            raise ShapeError(
                f"Visibility.from_dense: `visibility` is {visibility.shape}, expected (num_nodes, num_nodes) "
                f"or (batch, num_nodes, num_nodes)"
            )
        if num_nodes is None:
            num_nodes = np.full(visibility.shape[:-2], visibility.shape[-1], np.int32)
        counts = as_int32("Visibility.from_dense", "num_nodes", num_nodes, copy=True)
        return cls(topology.pack_visibility(visibility), counts).validate()

    @property
    def is_batched(self) -> bool:
        """Whether the arrays have a request axis."""
        return bool(self.visibility_bits.ndim == 3)

    def to_dense(self) -> npt.NDArray[np.bool_]:
        """Return bool ([B,] N, N) on the host, True = may attend; synchronises on CuPy arrays."""
        host = self.to("numpy")
        dense: npt.NDArray[np.bool_] = topology.unpack_visibility(host.visibility_bits, host.num_nodes)
        return dense

    def __repr__(self) -> str:
        batch = f"batch={self.visibility_bits.shape[0]}, " if self.is_batched else ""
        return f"Visibility({batch}capacity={self.visibility_bits.shape[-2]}{where(self.visibility_bits)})"

    def validate(self) -> Self:
        """Check shapes, dtypes and `num_nodes` and return self; synchronises on CuPy arrays.

        Raises
        ------
        ShapeError, DTypeError, ArgumentError
        """
        validation.visibility(self.to("numpy"))
        return self


@dataclass(frozen=True, eq=False)
class DraftTree(Arrays):
    """A tree of guesses for one verification pass; node 0 is the root, the last committed token.

    Attributes
    ----------
    token_ids : int32 array, shape ([B,] N)
        Padding -1; token id 0 is legal.
    parents : int32 array, shape ([B,] N)
        parents[0] = -1 and 0 <= parents[i] < i; padding -1.
    depths : int32 array, shape ([B,] N)
        Root 0; a node's position is context_len + depth; padding -1.
    path_scores : float64 array, shape ([B,] N), or None
        Log-probability of the path in nats, root 0, padding -inf; None for trees made by hand.
    num_nodes : int32 array, shape ([B])
        Valid nodes including the root; 0 marks an inactive request.
    status : int32 array, shape ([B])
        Bit 0: a draft row held NaN or +inf, the tree stops above it.
    visibility_bits : uint32 array, shape ([B,] N, W)
        Bit j of row i is set when j is i or an ancestor of i.
    first_child, next_sibling : int32 array, shape ([B,] N)
        -1 if there is none; siblings in ascending node index, with distinct tokens.

    Examples
    --------
    >>> tree = DraftTree.from_parents([7, 10, 20, 11], [-1, 0, 1, 0])
    >>> tree
    DraftTree(num_nodes=4, depth=2)
    >>> tree.depths.tolist(), tree.first_child.tolist(), tree.next_sibling.tolist()
    ([0, 1, 2, 1], [1, 2, -1, -1], [-1, 3, -1, -1])
    """

    token_ids: Array
    parents: Array
    depths: Array
    path_scores: Array | None
    num_nodes: Array
    status: Array
    visibility_bits: Array
    first_child: Array
    next_sibling: Array

    @classmethod
    def from_parents(cls, token_ids: npt.ArrayLike, parents: npt.ArrayLike) -> Self:
        """Make a tree by hand from tokens and parents, shape ([B,] N); padding -1 at the end of both.

        Parameters
        ----------
        token_ids, parents : integer array_like, shape ([B,] N)
            A request whose first token is -1 is inactive. CuPy arrays must be int32; their values are not read and so
            not checked, which `validate()` does.

        Raises
        ------
        ShapeError, DTypeError, ArgumentError
            Unequal shapes, non-integers, a parent that does not come before its child, or siblings that share
            a token.
        """
        function = "DraftTree.from_parents"
        on_device = library_of(parents) == "cupy"
        if on_device:
            check = Checker(function)
            check.backend(token_ids=token_ids, parents=parents)
            for name, array in (("token_ids", token_ids), ("parents", parents)):
                check.array(name, array, array.shape, ("int32",), contiguous=True)  # type: ignore[union-attr]
            token_array: Array = token_ids
            parent_array: Array = parents
        else:
            token_array = as_int32(function, "token_ids", token_ids, copy=True)
            parent_array = as_int32(function, "parents", parents, copy=True)
        if token_array.shape != parent_array.shape or token_array.ndim not in (1, 2):
            raise ShapeError(
                f"{function}: `parents` is {parent_array.shape} and `token_ids` {token_array.shape}, "
                f"expected (num_nodes,) or (batch, num_nodes) for both"
            )
        batched = token_array.ndim == 2
        if not batched:
            token_array, parent_array = token_array[None], parent_array[None]
        num_nodes = topology.count_nodes(token_array, parent_array)
        if on_device:
            links = topology.derive_on_device(parent_array, num_nodes)
        else:
            validation.parent_order(function, parent_array, num_nodes)
            links = topology.derive_topology(parent_array, num_nodes)
        tree = cls(
            token_ids=token_array,
            parents=parent_array,
            path_scores=None,
            num_nodes=num_nodes,
            status=0 * num_nodes,
            **links._asdict(),
        )
        tree = tree if batched else tree.without_batch()
        return tree if on_device else tree.validate()

    @property
    def is_batched(self) -> bool:
        """Whether the arrays have a request axis."""
        return bool(self.token_ids.ndim == 2)

    @property
    def visibility(self) -> npt.NDArray[np.bool_]:
        """`visibility_bits` unpacked: bool ([B,] N, N) on the host, True = may attend."""
        return Visibility(self.visibility_bits, self.num_nodes).to_dense()

    def __repr__(self) -> str:
        if not isinstance(self.token_ids, np.ndarray):
            return f"DraftTree(shape={self.token_ids.shape}{where(self.token_ids)})"
        if self.is_batched:
            return f"DraftTree(batch={len(self.num_nodes)}, capacity={self.token_ids.shape[1]})"
        depth = int(self.depths.max(initial=0))
        return f"DraftTree(num_nodes={int(self.num_nodes)}, depth={depth})"

    def _repr_html_(self) -> str | None:
        """Draw host trees of at most 256 nodes, with a slider over the budget; None (plain repr) otherwise."""
        if (
            not isinstance(self.token_ids, np.ndarray)
            or not 1 <= np.max(self.num_nodes, initial=0) <= interactive.MOST_DRAWN
        ):
            return None
        if not self.is_batched:
            return self._html()
        drawn = [tree._summary_and_html(request) for request, tree in enumerate(self[:_MOST_REQUESTS])]
        rest = len(self) - len(drawn)
        return interactive.batch_html(drawn + [(f"and {rest} more requests", None)] * (rest > 0))

    def _summary_and_html(self, request: int) -> tuple[str, str | None]:
        count = int(self.num_nodes)
        if count == 0:
            return f"request {request}: inactive", None
        return f"request {request}: {count} nodes, depth {int(self.depths[:count].max())}", self._html()

    def _html(self) -> str:
        count = int(self.num_nodes)
        scores = None if self.path_scores is None else self.path_scores[:count].tolist()
        return interactive.tree_html(self.token_ids[:count].tolist(), self.parents[:count].tolist(), path_scores=scores)

    def validate(self) -> Self:
        """Check every value against the contract and return self; synchronises on CuPy arrays.

        Raises
        ------
        ShapeError, DTypeError, ArgumentError
            A value breaks the rules of the class; the error has the array, the request and the node.
        """
        validation.draft_tree(self.to("numpy"))
        return self
