"""The paged key-value cache, and the result of a verification pass."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ddtree_cupy._arrays import as_array, as_dtype, as_int32
from ddtree_cupy._check import FLOATS_AND_F64, Checker
from ddtree_cupy.containers import validation
from ddtree_cupy.containers.base import Arrays, where
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError

Array = Any


@dataclass(frozen=True, eq=False)
class PagedKV(Arrays):
    """The latent key-value cache of one layer, in pages.

    If its table or its lengths are given as lists or numbers, it is validated at once; arrays are checked by
    `validate()` alone.

    Attributes
    ----------
    ckv : float array, shape (P, page_size, C)
        Compressed keys, which are the values too. May be a slice of one (P, page_size, C + R) buffer: the last
        axis is contiguous, the other strides are free.
    kpe : same dtype, shape (P, page_size, R)
        Rope part of the keys.
    page_table : int32 array, shape ([B,] max_pages)
        Entry p is the page of logical positions p * page_size and up; -1 where no page is assigned.
    context_lens : int32 array, shape ([B])
        Keys already in the cache; node i of a tree has its own key at logical position context_len + i.
    max_context : int
        An upper bound of `context_lens` that the host knows; default max_pages * page_size. It decides the sizes of
        launches, and kernels attend no further. It does not change when `dataclasses.replace` changes the page table.

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
        if isinstance(self.max_context, np.integer):
            object.__setattr__(self, "max_context", int(self.max_context))
        super().__post_init__()

    def _is_by_hand(self, fields_by_hand: Collection[str]) -> bool:
        return isinstance(self.page_table, np.ndarray) and isinstance(self.context_lens, np.ndarray)

    def _set_defaults(self) -> None:
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
        dtype: Any = np.float32,
    ) -> Self:
        """Make an empty NumPy cache; `ckv` and `kpe` are slices of one zeroed buffer, context_lens is 0.

        Parameters
        ----------
        capacity : int
            Positions a request can hold, tree rows included.
        batch : int, optional
            Requests; None gives an unbatched cache.
        page_size : int
            Tokens per page.
        head_dim_ckv, head_dim_kpe : int
            C and R.
        dtype : str, or dtype of NumPy, ml_dtypes, JAX or torch
            The dtype of both pools: float32, float16, bfloat16 or float64.

        Raises
        ------
        DTypeError, ArgumentError
            A size that is not an integer, or is too small; another dtype.

        Examples
        --------
        >>> PagedKV.allocate(100, head_dim_ckv=64, head_dim_kpe=16, dtype="bfloat16")
        PagedKV(num_pages=2, page_size=64, head_dim_ckv=64, head_dim_kpe=16, bfloat16)
        """
        for name, value in (("capacity", capacity), ("head_dim_ckv", head_dim_ckv), ("head_dim_kpe", head_dim_kpe)):
            validation.at_least("PagedKV.allocate", name, value, 0)
        validation.at_least("PagedKV.allocate", "page_size", page_size, 1)
        dtype = as_dtype("PagedKV.allocate", "dtype", dtype, FLOATS_AND_F64)
        requests = 1 if batch is None else batch
        validation.at_least("PagedKV.allocate", "batch", requests, 0)
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
        ckv: Array,
        kpe: Array,
        *,
        page_size: int = 64,
        context_lens: npt.ArrayLike | None = None,
        capacity: int | None = None,
    ) -> Self:
        """Copy dense rows into a new cache.

        Parameters
        ----------
        ckv, kpe : float array_like, shape ([B,] T, C) and ([B,] T, R)
        page_size : int
            Tokens per page.
        context_lens : int array_like, shape ([B]), default T
            Rows that are context; rows after them are tree keys.
        capacity : int, default T
            Positions a request can hold.
        """
        check = Checker("PagedKV.from_dense")
        ckv, kpe = (as_array(check.function, name, rows) for name, rows in (("ckv", ckv), ("kpe", kpe)))
        if check.backend(ckv=ckv, kpe=kpe) != "numpy":
            raise DTypeError("PagedKV.from_dense: `ckv` is a CuPy array, expected NumPy; cupy.asnumpy(ckv) makes one")
        check.array("ckv", ckv, ckv.shape, FLOATS_AND_F64)
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
        lens = as_int32("PagedKV.from_dense", "context_lens", context_lens, copy=True)
        if lens.shape != batch or (lens < 0).any() or (lens > tokens).any():
            raise ArgumentError(
                f"PagedKV.from_dense: `context_lens` is {np.asarray(context_lens).tolist()}, expected shape {batch} "
                f"and values in 0..{tokens}"
            )
        capacity = tokens if capacity is None else capacity
        validation.at_least("PagedKV.from_dense", "capacity", capacity, tokens)
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
        """Number of tokens in a page."""
        return int(self.ckv.shape[1])

    @property
    def is_batched(self) -> bool:
        """Whether `page_table` and `context_lens` have a request axis (the pool never has one)."""
        return bool(self.page_table.ndim == 2)

    def locate(self, function: str, positions: Array, request: int = 0) -> tuple[Array, Array]:
        """Return (page ids, slots) of logical positions of one request of a host cache.

        Parameters
        ----------
        function : str
            The caller's name, for messages.
        positions : integer array, shape (n,)
            Ascending.
        request : int
            Row of the page table.

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

    def _by_request(self) -> Array:
        return self.page_table

    def _map_requests(self, function: Callable[[Array], Array]) -> Self:
        return replace(self, page_table=function(self.page_table), context_lens=function(self.context_lens))

    def __repr__(self) -> str:
        pages, page_size, width = self.ckv.shape
        batch = f"batch={self.page_table.shape[0]}, " if self.is_batched else ""
        return (
            f"PagedKV({batch}num_pages={pages}, page_size={page_size}, head_dim_ckv={width}, "
            f"head_dim_kpe={self.kpe.shape[-1]}, {self.ckv.dtype.name}{where(self.ckv)})"
        )

    def validate(self) -> Self:
        """Check shapes, dtypes, page ids and lengths and return self; synchronises on CuPy arrays.

        Raises
        ------
        ShapeError, DTypeError, LayoutError, ArgumentError
            A field does not fit, or a page with positions >= context_len has more than one place.
        """
        host = self.map(lambda a: a) if isinstance(self.page_table, np.ndarray) else self._tables_on_host()
        validation.paged_kv(host)
        return self

    def _tables_on_host(self) -> Self:
        return replace(self, page_table=self.page_table.get(), context_lens=self.context_lens.get())


@dataclass(frozen=True, eq=False)
class AcceptResult(Arrays):
    """The part of one draft tree that the target accepted.

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
            return f"AcceptResult(shape={self.accepted.shape}{where(self.accepted)})"
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
        validation.accept_result(self.to("numpy"))
        return self
