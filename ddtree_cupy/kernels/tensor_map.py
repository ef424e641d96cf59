"""Tensor maps: how Hopper's tensor copies see an array; CUDA's own opaque 128 bytes, or those of the emulator.

A kernel takes one by value (`const __grid_constant__ TensorMap` of `cuda_src/common/hopper.cuh`).
"""

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from ddtree_cupy._overlap import address_of
from ddtree_cupy.errors import UnsupportedError

Array = Any

_NBYTES = 128
# of CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion in cuda.h
_DTYPES = {"float16": 6, "bfloat16": 9}
_SWIZZLE_128B, _PROMOTE_256B = 3, 3


def tensor_map(backend: str, array: Array, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> Array:
    """Return a map over the memory of a 16-bit array, with the 128-byte swizzle.

    Parameters
    ----------
    backend : {"cupy", "emulate"}
    array : ndarray of float16 or bfloat16
        Its first element is that of the map; the map does not keep it alive.
    sizes, box : sequence of 2 to 4 int
        Of the tensor and of one copy, the contiguous axis first; a row of the box has 128 bytes.
    strides : sequence of int
        In bytes, of the axes after the first.

    Returns
    -------
    ndarray, shape (1,), 128 bytes

    Raises
    ------
    UnsupportedError
        The driver refuses the map, or there is no driver.
    """
    if backend == "emulate":
        return _emulated(array, sizes, strides, box)
    rank = len(sizes)
    memory = np.zeros(2 * _NBYTES, np.uint8)
    start = -memory.ctypes.data % 64
    code = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(memory.ctypes.data + start),
        _DTYPES[str(array.dtype.name)],
        rank,
        ctypes.c_void_p(address_of(array)),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*([1] * rank)),
        0,
        _SWIZZLE_128B,
        _PROMOTE_256B,
        0,
    )
    if code:
        raise UnsupportedError(
            f"the driver refuses a tensor map (error {code}) of sizes {tuple(sizes)}, strides {tuple(strides)} bytes "
            f"and boxes {tuple(box)}"
        )
    return np.frombuffer(memory[start : start + _NBYTES].tobytes(), f"V{_NBYTES}")


def _emulated(array: Array, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> Array:
    """Return the bytes of HostMap in cuda_src/common/hopper_twins.cuh."""
    layout = np.dtype(
        [("base", "u8"), ("strides", "i8", 3), ("sizes", "i4", 4), ("box", "i4", 4), ("rank", "i4"), ("itemsize", "i4")]
    )
    host = np.zeros((), layout)
    host["base"], host["rank"], host["itemsize"] = address_of(array), len(sizes), array.dtype.itemsize
    host["strides"][: len(strides)] = strides
    host["sizes"], host["box"] = 1, 1
    host["sizes"][: len(sizes)], host["box"][: len(box)] = sizes, box
    return np.frombuffer(host.tobytes().ljust(_NBYTES, b"\0"), f"V{_NBYTES}")


@cache
def _driver() -> ctypes.CDLL:
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise UnsupportedError(f"no tensor maps without the CUDA driver: {error}") from error
