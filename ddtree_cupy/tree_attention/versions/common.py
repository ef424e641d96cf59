"""What every kernel version has, traits and a plan, and the limits that versions of any head size share."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ddtree_cupy._arrays import numpy_dtype
from ddtree_cupy.kernels import KernelSpec, Plan
from ddtree_cupy.kernels.workspace import Sizes as ArraySizes
from ddtree_cupy.tree_attention.call import Sizes

Array = Any

MOST_GRID = 65_535  # blocks along the second and third axis of a CUDA grid
MOST_WIDTH = 1024  # of C and of R: a float32 sum runs over at most this many terms
STATIC_SHARED_BYTES = 1024  # room for the own small arrays of kernels of any head size
COMPILED_SIZES = ((512, 64), (64, 16))  # head sizes (C, R) whose kernels the library registers


@dataclass(frozen=True)
class Traits:
    """What a version takes, as data for the bench and the tests.

    Attributes
    ----------
    dtypes : tuple of str
    head_sizes : tuple of (C, R), or None
        None: any multiples of 16 up to `MOST_WIDTH`.
    page_sizes : tuple of int, or None
        Keys of a page; multiples of the largest are fine, too. None: any.
    least_arch, most_arch : int
        The oldest and the newest architecture, such as 80 for sm_80; 0 and 999: any.
    cuts_keys : bool
        It cuts keys by the whole batch, and every `split_keys` where that is given.
    any_length : bool
        Its shared memory does not limit the number of keys.
    tensor_cores : bool
        Its products are those of matrix instructions.
    arrives : bool
        Its warps hand over by `bar.arrive`, which compute-sanitizer's racecheck does not follow.
    """

    dtypes: tuple[str, ...]
    head_sizes: tuple[tuple[int, int], ...] | None = None
    page_sizes: tuple[int, ...] | None = None
    least_arch: int = 0
    most_arch: int = 999
    cuts_keys: bool = False
    any_length: bool = True
    tensor_cores: bool = False
    arrives: bool = False


class Version(Protocol):
    """A module of this package."""

    SOURCE: str
    TRAITS: Traits

    def specs(self) -> Iterable[KernelSpec]:
        """Return every kernel of the version that the library registers."""

    def refusal(self, sizes: Sizes) -> str:
        """Return why the version cannot take a call of these sizes, "" when it can."""

    def plan(self, sizes: Sizes) -> Plan:
        """Return how the version runs calls that it does not refuse."""


def results(sizes: Sizes) -> ArraySizes:
    """Return the arrays that every version writes."""
    shape = sizes.batch, sizes.capacity, sizes.num_heads
    return {"out": ((*shape, sizes.head_dim_ckv), numpy_dtype(sizes.dtype)), "lse": (shape, np.float32)}


def size_refusal(sizes: Sizes) -> str:
    """Return why a version of any head size cannot take these sizes, "" when it can."""
    if max(sizes.batch, sizes.capacity) > MOST_GRID:
        return f"takes at most {MOST_GRID} requests of {MOST_GRID} nodes, got {sizes.batch} of {sizes.capacity}"
    head_dim_ckv, head_dim_kpe = sizes.head_sizes
    if head_dim_ckv > 0 and all(size % 16 == 0 and size <= MOST_WIDTH for size in sizes.head_sizes):
        return ""
    return (
        f"takes head sizes C in 16..{MOST_WIDTH} and R in 0..{MOST_WIDTH}, both multiples of 16, "
        f"got C = {head_dim_ckv} and R = {head_dim_kpe}"
    )


def shared_refusal(needed: int, what: str, sizes: Sizes) -> str:
    """Return why `needed` bytes of dynamic shared memory are too many, "" when the device has them."""
    limit = sizes.device.shared_limit - STATIC_SHARED_BYTES
    return f"{what} {needed} bytes of shared memory, this device has {limit}" if needed > limit else ""
