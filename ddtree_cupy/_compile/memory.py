"""Results and scratch of a kernel call: NumPy arrays for the emulator, CuPy arrays for a GPU."""

import math
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import Checker
from ddtree_cupy.errors import ArgumentError, DTypeError, LayoutError

Array = Any

ALIGNMENT = 256  # bytes, for every piece of a workspace
EMULATED_SHARED_LIMIT = 227 * 1024  # bytes; that of sm_90
EMULATED_MULTIPROCESSORS = 5  # few, so that small cases are cut into pieces too


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


def shared_limit(backend: str) -> int:
    """Return the shared memory in bytes, static plus dynamic, that one block may use on the current device."""
    if backend == "emulate":
        return EMULATED_SHARED_LIMIT
    import cupy

    return _device_shared_limit(cupy.cuda.runtime.getDevice())


@cache
def _device_shared_limit(device: int) -> int:
    import cupy

    return int(cupy.cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"])


def multiprocessors(backend: str) -> int:
    """Return how many blocks that fill a multiprocessor run at once on the current device."""
    if backend == "emulate":
        return EMULATED_MULTIPROCESSORS
    import cupy

    return _device_multiprocessors(cupy.cuda.runtime.getDevice())


@cache
def _device_multiprocessors(device: int) -> int:
    import cupy

    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


def architecture(backend: str) -> str:
    """Return the current device's architecture, such as "sm_90"; the emulator has none of its own ("")."""
    if backend == "emulate":
        return ""
    import cupy

    return _device_architecture(cupy.cuda.runtime.getDevice())


@cache
def _device_architecture(device: int) -> str:
    import cupy

    return f"sm_{cupy.cuda.Device(device).compute_capability}"


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
