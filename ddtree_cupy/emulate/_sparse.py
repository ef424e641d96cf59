"""Huge arrays that take memory only where they are touched."""

import math
import sys
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ddtree_cupy.emulate.guard import GuardedMemory
from ddtree_cupy.errors import ArgumentError, UnsupportedError


def sparse_array(shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return a zero array whose pages take memory only once they are written.

    For testing 64-bit offsets: a pool of more than 2**31 elements is addressed in full while a test touches a few rows
    at its ends.

    Parameters
    ----------
    shape : int or tuple of int
    dtype : data-type

    Returns
    -------
    numpy.ndarray
        C-contiguous and writable. The memory is returned when the last view of it is gone.

    Notes
    -----
    The address space comes from an anonymous private `mmap` without swap reservation. Reading an untouched page gives
    zeros (and maps a shared zero page); `array.fill`, `copy` or a comparison over the whole array touches all of it.
    A kernel that leaves the array meets a protected page, so `check` uses it in place.

    Examples
    --------
    >>> pool = sparse_array((3, 2**30), "float16")
    >>> pool[2, -1] = 1.5
    >>> pool.nbytes, float(pool[2, -1]), float(pool[0, 0])
    (6442450944, 1.5, 0.0)
    """
    if not sys.platform.startswith("linux"):
        raise UnsupportedError("emulate.sparse_array: needs Linux (mmap without reservation)")
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(size < 0 for size in sizes):
        raise ArgumentError(f"emulate.sparse_array: `shape` is {sizes}, expected sizes >= 0")
    element = np.dtype(dtype)
    count = math.prod(sizes)
    if count == 0:
        return np.zeros(sizes, element)
    return np.asarray(GuardedMemory(count * element.itemsize)).view(element).reshape(sizes)
