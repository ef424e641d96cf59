"""The arrays of one decoding round, grouped: frozen dataclasses that hold NumPy or CuPy arrays and own no logic.

Letters of the shape comments: B requests, L draft length, K candidates per depth, N nodes including the root,
W = ceil(N / 32), P pages, C latent width, R rope width. The leading axis B may be absent everywhere at once; then
`num_nodes`, `status`, `page_table` (1-d), `context_lens`, `num_accepted` and `bonus_token` lose it too.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ddtree_cupy import _layout, _topology, _validate
from ddtree_cupy._check import deliver_arrays
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError

__all__ = ["AcceptResult", "Candidates", "DraftTree", "PagedKV", "Visibility"]

Array = Any


def _where(array: Array) -> str:
    """Return " on cuda:0" for a device array, "" for a host array."""
    return "" if isinstance(array, np.ndarray) else f" on cuda:{array.device.id}"


class _Arrays:
    """What all containers share: mapping a function over the fields, and reading them back to the host."""

    def _map(self, function: Callable[[Array], Array]) -> Self:
        changed = {}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            changed[field.name] = value if value is None or isinstance(value, int) else function(value)
        return replace(self, **changed)  # type: ignore[type-var]

    def _on_host(self) -> Self:
        return self._map(lambda array: array if isinstance(array, np.ndarray) else array.get())

    def deliver(self, function: str, out: Self | None) -> Self:
        """Return self, or copy every array into `out` (all of them checked first) and return `out`."""
        if out is None:
            return self
        if type(out) is not type(self):
            raise DTypeError(f"{function}: `out` is {type(out).__name__}, expected {type(self).__name__}")
        pairs = {field.name: (getattr(self, field.name), getattr(out, field.name)) for field in fields(self)}  # type: ignore[arg-type]
        deliver_arrays(
            function, "out.", {name: pair[0] for name, pair in pairs.items()}, [p[1] for p in pairs.values()]
        )
        return out

    def with_batch(self) -> Self:
        """Return the container with a leading request axis of 1 on every array (views, no copy)."""
        return self._map(lambda array: array[None])

    def without_batch(self) -> Self:
        """Return the container of request 0 without the request axis (views, no copy; 0-d stays an array)."""
        return self._map(lambda array: array[0, ...])


@dataclass(frozen=True, eq=False)
class Candidates(_Arrays):
    """The best tokens of every draft position.

    Attributes
    ----------
    token_ids : int32 array, shape ([B,] L, K)
        By logit descending, then token id ascending; -1 where a row has fewer candidates.
    logits : float32 array (float64 for float64 input), shape ([B,] L, K)
        The logits of `token_ids`; -inf beside id -1.
    lse : same dtype as `logits`, shape ([B,] L)
        Log-sum-exp of the whole row in nats; NaN marks a row that held NaN or +inf.
    """

    token_ids: Array
    logits: Array
    lse: Array

    @property
    def is_batched(self) -> bool:
        """Whether the arrays have a request axis."""
        return bool(self.lse.ndim == 2)

    def __repr__(self) -> str:
        *_, draft_len, width = self.token_ids.shape
        batch = f"batch={self.lse.shape[0]}, " if self.is_batched else ""
        return f"Candidates({batch}draft_len={draft_len}, per_depth={width}{_where(self.lse)})"

    def validate(self) -> Self:
        """Check every value against the contract and return self; synchronises on CuPy arrays.

        Raises
        ------
        ShapeError, DTypeError, ArgumentError
        """
        _validate.candidates(self._on_host())
        return self


@dataclass(frozen=True, eq=False)
class Visibility(_Arrays):
    """Who may attend to whom, one bit a pair; any boolean matrix is legal, ancestor closure is not assumed.

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
        """Pack a bool matrix of shape ([B,] N, N), True = may attend; `num_nodes` defaults to N."""
        visibility = np.asarray(visibility)
        if visibility.dtype != np.bool_:
            raise DTypeError(f"Visibility.from_dense: `visibility` has dtype {visibility.dtype}, expected bool")
        if visibility.ndim not in (2, 3) or visibility.shape[-1] != visibility.shape[-2]:
            raise ShapeError(
                f"Visibility.from_dense: `visibility` is {visibility.shape}, expected (num_nodes, num_nodes) "
                f"or (batch, num_nodes, num_nodes)"
            )
        if num_nodes is None:
            num_nodes = np.full(visibility.shape[:-2], visibility.shape[-1], np.int32)
        return cls(_topology.pack_visibility(visibility), np.asarray(num_nodes, np.int32)).validate()

    @property
    def is_batched(self) -> bool:
        """Whether the arrays have a request axis."""
        return bool(self.visibility_bits.ndim == 3)

    def to_dense(self) -> npt.NDArray[np.bool_]:
        """Return bool ([B,] N, N) on the host, True = may attend; synchronises on CuPy arrays."""
        host = self._on_host()
        dense: npt.NDArray[np.bool_] = _topology.unpack_visibility(host.visibility_bits, host.num_nodes)
        return dense

    def __repr__(self) -> str:
        batch = f"batch={self.visibility_bits.shape[0]}, " if self.is_batched else ""
        return f"Visibility({batch}capacity={self.visibility_bits.shape[-2]}{_where(self.visibility_bits)})"

    def validate(self) -> Self:
        """Check shapes, dtypes and `num_nodes` and return self; synchronises on CuPy arrays.

        Raises
        ------
        ShapeError, DTypeError, ArgumentError
        """
        _validate.visibility(self._on_host())
        return self


@dataclass(frozen=True, eq=False)
class DraftTree(_Arrays):
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
        -1 for none; siblings in ascending node index, with distinct tokens.

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
            A request whose first token is -1 is inactive.

        Raises
        ------
        ShapeError, DTypeError, ArgumentError
            Unequal shapes, non-integers, a parent that does not come before its child, or siblings that share
            a token.
        """
        token_array = _validate.as_int32("DraftTree.from_parents", "token_ids", token_ids)
        parent_array = _validate.as_int32("DraftTree.from_parents", "parents", parents)
        if token_array.shape != parent_array.shape or token_array.ndim not in (1, 2):
            raise ShapeError(
                f"DraftTree.from_parents: `parents` is {parent_array.shape} and `token_ids` {token_array.shape}, "
                f"expected (num_nodes,) or (batch, num_nodes) for both"
            )
        batched_parents = np.atleast_2d(parent_array)
        batched_tokens = np.atleast_2d(token_array)
        linked = (np.arange(batched_parents.shape[1]) == 0) | (batched_parents >= 0)
        used = np.where(batched_tokens[:, :1] < 0, False, linked) if linked.size else linked
        num_nodes = np.cumprod(used, axis=1).sum(axis=1).astype(np.int32)
        _validate.parent_order("DraftTree.from_parents", batched_parents, num_nodes)
        topology = _topology.derive_topology(batched_parents, num_nodes)
        tree = cls(
            token_ids=batched_tokens,
            parents=batched_parents,
            path_scores=None,
            num_nodes=num_nodes,
            status=np.zeros(len(num_nodes), np.int32),
            **topology._asdict(),
        )
        return (tree if token_array.ndim == 2 else tree.without_batch()).validate()

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
            return f"DraftTree(shape={self.token_ids.shape}{_where(self.token_ids)})"
        if self.is_batched:
            return f"DraftTree(batch={len(self.num_nodes)}, capacity={self.token_ids.shape[1]})"
        depth = int(self.depths.max(initial=0))
        return f"DraftTree(num_nodes={int(self.num_nodes)}, depth={depth})"

    def _repr_html_(self) -> str | None:
        """Draw an unbatched host tree of at most 64 nodes; None (plain repr) otherwise."""
        if not isinstance(self.token_ids, np.ndarray) or self.is_batched or not 1 <= self.num_nodes <= 64:
            return None
        count = int(self.num_nodes)
        scores = ["" if self.path_scores is None else f", path score {s:.3f} nats" for s in self._scores(count)]
        labels = [str(token) for token in self.token_ids[:count]]
        titles = [
            f"node {i}, token {token}, depth {depth}{score}"
            for i, (token, depth, score) in enumerate(zip(labels, self.depths[:count], scores, strict=True))
        ]
        return _layout.tree_svg(self.parents[:count].tolist(), labels, titles)

    def _scores(self, count: int) -> list[float]:
        return [0.0] * count if self.path_scores is None else self.path_scores[:count].tolist()

    def validate(self) -> Self:
        """Check every value against the contract and return self; synchronises on CuPy arrays.

        Raises
        ------
        ShapeError, DTypeError, ArgumentError
            The message names the array, the request and the node.
        """
        _validate.draft_tree(self._on_host())
        return self


@dataclass(frozen=True, eq=False)
class PagedKV(_Arrays):
    """The latent key-value cache of one layer, in pages.

    Attributes
    ----------
    ckv : float array, shape (P, page_size, C)
        Compressed keys, which are the values too. May be a slice of one (P, page_size, C + R) buffer: the last
        axis is contiguous, the other strides are free.
    kpe : same dtype, shape (P, page_size, R)
        Rope part of the keys.
    page_table : int32 array, shape ([B,] max_pages)
        Entry p holds the page of logical positions p * page_size and up; -1 where no page is assigned.
    context_lens : int32 array, shape ([B])
        Keys already in the cache; node i of a tree has its own key at logical position context_len + i.
    max_context : int
        The host's upper bound of `context_lens`; default max_pages * page_size.

    Examples
    --------
    >>> kv = PagedKV.allocate(100, page_size=16, head_dim_ckv=64, head_dim_kpe=16)
    >>> kv
    PagedKV(num_pages=7, page_size=16, head_dim_ckv=64, head_dim_kpe=16, float32)
    """

    ckv: Array
    kpe: Array
    page_table: Array
    context_lens: Array
    max_context: int = -1

    def __post_init__(self) -> None:
        if self.max_context < 0:
            object.__setattr__(self, "max_context", self.page_table.shape[-1] * self.ckv.shape[1])

    @classmethod
    def allocate(
        cls,
        capacity: int,
        *,
        batch: int | None = None,
        page_size: int = 64,
        head_dim_ckv: int = 512,
        head_dim_kpe: int = 64,
        dtype: npt.DTypeLike = np.float32,
    ) -> Self:
        """Make an empty NumPy cache with `capacity` positions a request, tree rows included.

        `ckv` and `kpe` are slices of one zeroed buffer, so a row is contiguous; context_lens is 0.
        """
        for name, value in (("capacity", capacity), ("head_dim_ckv", head_dim_ckv), ("head_dim_kpe", head_dim_kpe)):
            _validate.at_least("PagedKV.allocate", name, value, 0)
        _validate.at_least("PagedKV.allocate", "page_size", page_size, 1)
        requests = 1 if batch is None else batch
        _validate.at_least("PagedKV.allocate", "batch", requests, 0)
        max_pages = -(-capacity // page_size)
        pool = np.zeros((requests * max_pages, page_size, head_dim_ckv + head_dim_kpe), dtype)
        page_table = np.arange(requests * max_pages, dtype=np.int32).reshape(requests, max_pages)
        context_lens = np.zeros(requests, np.int32)
        ckv, kpe = pool[..., :head_dim_ckv], pool[..., head_dim_ckv:]
        if batch is None:
            return cls(ckv, kpe, page_table[0], context_lens[0, ...])
        return cls(ckv, kpe, page_table, context_lens)

    @classmethod
    def from_dense(
        cls,
        ckv: npt.NDArray[Any],
        kpe: npt.NDArray[Any],
        *,
        page_size: int = 64,
        context_lens: npt.ArrayLike | None = None,
        capacity: int | None = None,
    ) -> Self:
        """Copy dense rows into a new cache.

        Parameters
        ----------
        ckv, kpe : float array, shape ([B,] T, C) and ([B,] T, R)
        page_size : int
            Tokens a page.
        context_lens : int array_like, shape ([B]), default T
            Rows that are context; rows after them are tree keys.
        capacity : int, default T
            Positions a request can hold.
        """
        if ckv.ndim not in (2, 3) or ckv.shape[:-1] != kpe.shape[:-1]:
            raise ShapeError(
                f"PagedKV.from_dense: `ckv` is {ckv.shape} and `kpe` {kpe.shape}, expected (tokens, head_dim) or "
                f"(batch, tokens, head_dim) with equal leading axes"
            )
        if ckv.dtype != kpe.dtype:
            raise DTypeError(f"PagedKV.from_dense: `kpe` has dtype {kpe.dtype}, expected {ckv.dtype} like `ckv`")
        batch, tokens = ckv.shape[:-2], ckv.shape[-2]
        if context_lens is None:
            context_lens = np.full(batch, tokens)
        lens = _validate.as_int32("PagedKV.from_dense", "context_lens", context_lens)
        if lens.shape != batch or (lens < 0).any() or (lens > tokens).any():
            raise ArgumentError(
                f"PagedKV.from_dense: `context_lens` is {np.asarray(context_lens).tolist()}, expected shape {batch} "
                f"and values in 0..{tokens}"
            )
        capacity = tokens if capacity is None else capacity
        _validate.at_least("PagedKV.from_dense", "capacity", capacity, tokens)
        kv = cls.allocate(
            capacity,
            batch=batch[0] if batch else None,
            page_size=page_size,
            head_dim_ckv=ckv.shape[-1],
            head_dim_kpe=kpe.shape[-1],
            dtype=ckv.dtype,
        )
        positions = np.arange(tokens)
        pages = kv.page_table[..., positions // page_size]
        kv.ckv[pages, positions % page_size] = ckv
        kv.kpe[pages, positions % page_size] = kpe
        return replace(kv, context_lens=lens)

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return int(self.ckv.shape[1])

    @property
    def is_batched(self) -> bool:
        """Whether `page_table` and `context_lens` have a request axis (the pool never has one)."""
        return bool(self.page_table.ndim == 2)

    def locate(self, function: str, positions: Array, request: int = 0) -> tuple[Array, Array]:
        """Return (page ids, slots) of logical positions of one request of a host cache.

        Raises
        ------
        ArgumentError
            A position without a page in the pool; nothing may be read or written then.

        Examples
        --------
        >>> kv = PagedKV.allocate(8, page_size=4)
        >>> [array.tolist() for array in kv.locate("example", np.array([0, 3, 4]))]
        [[0, 0, 1], [0, 3, 0]]
        """
        row = self.page_table[request] if self.is_batched else self.page_table
        num_pages, page_size = self.ckv.shape[:2]
        entries = positions // page_size
        if positions.size and (positions[0] < 0 or entries[-1] >= row.size):
            raise ArgumentError(
                f"{function}: `kv` has pages for {row.size * page_size} positions of request {request}, "
                f"expected room for {int(positions[-1]) + 1}"
            )
        pages = row[entries]
        bad = (pages < 0) | (pages >= num_pages)
        if bad.any():
            raise ArgumentError(
                f"{function}: `kv.page_table` of request {request} holds page {int(pages[bad][0])} for position "
                f"{int(positions[bad][0])}, expected 0..{num_pages - 1}"
            )
        return pages, positions % page_size

    def with_batch(self) -> Self:
        """Return the cache with a leading request axis of 1 on `page_table` and `context_lens`."""
        return replace(self, page_table=self.page_table[None], context_lens=self.context_lens[None])

    def without_batch(self) -> Self:
        """Return the cache of request 0 without the request axis."""
        return replace(self, page_table=self.page_table[0], context_lens=self.context_lens[0, ...])

    def __repr__(self) -> str:
        pages, page_size, width = self.ckv.shape
        batch = f"batch={self.page_table.shape[0]}, " if self.is_batched else ""
        return (
            f"PagedKV({batch}num_pages={pages}, page_size={page_size}, head_dim_ckv={width}, "
            f"head_dim_kpe={self.kpe.shape[-1]}, {self.ckv.dtype.name}{_where(self.ckv)})"
        )

    def validate(self) -> Self:
        """Check shapes, dtypes, page ids and lengths and return self; synchronises on CuPy arrays.

        Raises
        ------
        ShapeError, DTypeError, LayoutError, ArgumentError
            Also when a page that covers positions >= context_len belongs to more than one place.
        """
        host = self._map(lambda a: a) if isinstance(self.page_table, np.ndarray) else self._tables_on_host()
        _validate.paged_kv(host)
        return self

    def _tables_on_host(self) -> Self:
        return replace(self, page_table=self.page_table.get(), context_lens=self.context_lens.get())


@dataclass(frozen=True, eq=False)
class AcceptResult(_Arrays):
    """What the target accepted of one draft tree.

    Attributes
    ----------
    accepted : int32 array, shape ([B,] N)
        Node indices from the root down; padding -1.
    num_accepted : int32 array, shape ([B])
        Draft tokens accepted: excludes root and bonus; -1 for an inactive request.
    bonus_token : int32 array, shape ([B])
        The target's token at the last accepted node; becomes the next root; -1 where the target had none.
    """

    accepted: Array
    num_accepted: Array
    bonus_token: Array

    @property
    def is_batched(self) -> bool:
        """Whether the arrays have a request axis."""
        return bool(self.accepted.ndim == 2)

    def __repr__(self) -> str:
        if self.is_batched or not isinstance(self.accepted, np.ndarray):
            return f"AcceptResult(shape={self.accepted.shape}{_where(self.accepted)})"
        path = self.accepted[: int(self.num_accepted) + 1].tolist()
        return (
            f"AcceptResult(accepted={path}, num_accepted={int(self.num_accepted)}, bonus_token={int(self.bonus_token)})"
        )

    def validate(self) -> Self:
        """Check shapes, dtypes and padding and return self; synchronises on CuPy arrays.

        Raises
        ------
        ShapeError, DTypeError, ArgumentError
        """
        _validate.accept_result(self._on_host())
        return self
