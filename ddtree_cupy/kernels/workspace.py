"""Results and scratch of a kernel call: NumPy arrays for the emulator, CuPy arrays for a GPU."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import Checker
from ddtree_cupy.errors import ArgumentError, DTypeError, LayoutError

Array = Any

ALIGNMENT = 256  # bytes, for every piece of a workspace


def empty(backend: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Return an unwritten array; the emulator's holds 0xFF (NaN, -1), so that a forgotten write shows."""
    if backend == "emulate":
        dtype = np.dtype(dtype)
        raw = np.full(math.prod(shape) * dtype.itemsize, 0xFF, np.uint8)
        return raw.view(dtype).reshape(shape) if raw.size else np.empty(shape, dtype)
    import cupy

    return cupy.empty(shape, dtype)


def is_capturing(backend: str) -> bool:
    """Whether CuPy's current stream records a CUDA graph."""
    if backend != "cupy":
        return False
    import cupy

    return bool(cupy.cuda.get_current_stream().is_capturing())


def require_given(function: str, backend: str, **given: Any) -> None:
    """Raise during graph capture unless every buffer in `given` was passed in: pool memory would dangle."""
    missing = [name for name, value in given.items() if value is None]
    if missing and is_capturing(backend):
        listed = " and ".join(f"`{name}=`" for name in missing)
        raise ArgumentError(
            f"{function}: the stream captures a CUDA graph, so pass {listed}; memory allocated here may be reused "
            f"before the graph is replayed"
        )


class Workspace:
    """Cut scratch arrays from one buffer, which is the caller's or fresh.

    Parameters
    ----------
    function : str
        For messages.
    backend : {"cupy", "emulate"}
    sizes : mapping of name to (shape, dtype)
    buffer : uint8 array, shape (n,), optional
        n at least `workspace_bytes(sizes)`.
    """

    def __init__(
        self, function: str, backend: str, sizes: dict[str, tuple[tuple[int, ...], npt.DTypeLike]], buffer: Array
    ) -> None:
        needed = workspace_bytes(sizes)
        if buffer is None:
            if needed:
                require_given(function, backend, workspace=None)
            buffer = empty(backend, (needed,), np.uint8)
        else:
            _check_buffer(function, backend, buffer, needed)
        self._arrays = {}
        start = 0
        for name, (shape, dtype) in sizes.items():
            self._arrays[name] = _array_at(backend, buffer, start, shape, dtype)
            start += _aligned(math.prod(shape) * np.dtype(dtype).itemsize)

    def __getitem__(self, name: str) -> Array:
        """Return one scratch array."""
        return self._arrays[name]


def _array_at(backend: str, buffer: Array, start: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Return an array over part of a buffer in one step: slicing, viewing and reshaping take CuPy three."""
    if backend == "cupy":
        import cupy

        return cupy.ndarray(shape, dtype, memptr=buffer.data + start)
    return np.ndarray(shape, dtype, buffer, start)


def _check_buffer(function: str, backend: str, buffer: Array, needed: int) -> None:
    check = Checker(function)
    if check.backend(workspace=buffer) != ("cupy" if backend == "cupy" else "numpy"):
        raise DTypeError(f"{function}: `workspace` is a {type(buffer).__module__} array, unlike the other arguments")
    check.array("workspace", buffer, ("bytes",), ("uint8",), contiguous=True, writable=True)
    if buffer.size < needed:
        raise ArgumentError(f"{function}: `workspace` has {buffer.size} bytes, expected at least {needed}")
    address = buffer.ctypes.data if isinstance(buffer, np.ndarray) else buffer.data.ptr
    if needed and address % 16:
        raise LayoutError(f"{function}: `workspace` starts at an address that is no multiple of 16 bytes")
    if backend == "cupy":
        import cupy

        current = int(cupy.cuda.runtime.getDevice())
        if buffer.device.id != current:
            raise LayoutError(f"{function}: `workspace` is on device {buffer.device.id}, the current one is {current}")


def workspace_bytes(sizes: dict[str, tuple[tuple[int, ...], npt.DTypeLike]]) -> int:
    """Return the bytes a `Workspace` of these sizes takes."""
    return sum(_aligned(math.prod(shape) * np.dtype(dtype).itemsize) for shape, dtype in sizes.values())


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
