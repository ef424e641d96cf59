"""One call of tree_attention as its kernels see it, and the argument tables that its kernels share.

A call has batched arrays, host integers and strides in elements. Each table stands beside the values it describes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ddtree_cupy.containers import DraftTree, PagedKV, Visibility
from ddtree_cupy.kernels import Arg

Array = Any

KEYS = {"all": 0, "context": 1, "tree": 2}


def strides_of(*names: str) -> tuple[Arg, ...]:
    """Return the stride scalars of these axes."""
    return tuple(Arg.scalar(f"{name}_stride", "int64") for name in names)


QUERY_STRIDES = strides_of(*(f"{q}_{axis}" for q in ("q_nope", "q_pe") for axis in ("request", "node", "head")))
CACHE_STRIDES = strides_of("ckv_page", "ckv_slot", "kpe_page", "kpe_slot")
TABLES = tuple(Arg.input(name, "int32") for name in ("page_table", "context_lens", "num_nodes"))


def attention_inputs(dtype: str) -> tuple[Arg, ...]:
    """Return the arrays every version reads, in the order of every kernel."""
    strided = [Arg.input(name, dtype, strided=True) for name in ("q_nope", "q_pe", "ckv", "kpe")]
    return (*strided, *TABLES, Arg.input("visibility_bits", "uint32"))


def results(dtype: str) -> tuple[Arg, ...]:
    """Return the arrays every version writes."""
    return Arg.output("out", dtype), Arg.output("lse", "float32")


@dataclass(frozen=True, eq=False)
class Call:
    """The checked arguments of a batched call; what every version derives from them."""

    tree: DraftTree | Visibility
    q_nope: Array
    q_pe: Array
    kv: PagedKV
    sm_scale: float
    keys: str
    split_keys: int | None
    backend: str

    @property
    def dtype(self) -> str:
        """Name of the input dtype."""
        return str(self.q_nope.dtype.name)

    @property
    def head_sizes(self) -> tuple[int, int]:
        """C and R."""
        return self.q_nope.shape[-1], self.q_pe.shape[-1]

    @property
    def most_keys(self) -> int:
        """Upper bound of a request's keys, by host integers."""
        context = 0 if self.keys == "tree" else self.kv.max_context
        return context + (0 if self.keys == "context" else int(self.q_nope.shape[1]))

    @property
    def tables(self) -> tuple[Array, ...]:
        """The arrays of `TABLES`."""
        return self.kv.page_table, self.kv.context_lens, self.tree.num_nodes

    @property
    def inputs(self) -> tuple[Array, ...]:
        """The arrays every version reads, in the order of `attention_inputs`."""
        return (self.q_nope, self.q_pe, self.kv.ckv, self.kv.kpe, *self.tables, self.tree.visibility_bits)

    @property
    def page_sizes(self) -> tuple[int, int, int, int]:
        """num_pages, page_size, max_pages, max_context."""
        num_pages, page_size, _ = self.kv.ckv.shape
        return num_pages, page_size, self.kv.page_table.shape[1], self.kv.max_context

    @property
    def strides(self) -> list[int]:
        """Strides of queries and cache in elements, in the order of the argument tables."""
        of_queries = [stride // q.dtype.itemsize for q in (self.q_nope, self.q_pe) for stride in q.strides[:3]]
        pools = (self.kv.ckv, self.kv.kpe)
        return of_queries + [stride // pool.dtype.itemsize for pool in pools for stride in pool.strides[:2]]

    def cache_is_aligned(self) -> bool:
        """Whether every cache row starts at a multiple of 16 bytes."""
        return all(_is_aligned(pool, 2, 16) for pool in (self.kv.ckv, self.kv.kpe))

    def queries_are_aligned(self) -> bool:
        """Whether every query row starts at a multiple of 16 bytes."""
        return all(_is_aligned(q, 3, 16) for q in (self.q_nope, self.q_pe))


def _is_aligned(array: Array, leading_axes: int, multiple: int) -> bool:
    pointer = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    return pointer % multiple == 0 and not any(stride % multiple for stride in array.strides[:leading_axes])
