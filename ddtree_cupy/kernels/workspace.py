"""Results and scratch of a call: NumPy arrays for the emulator, CuPy arrays for a GPU."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import Checker
from ddtree_cupy._overlap import address_of
from ddtree_cupy.errors import ArgumentError, DTypeError, LayoutError
from ddtree_cupy.kernels.registry import backend_module

Array = Any
Sizes = Mapping[str, tuple[tuple[int, ...], npt.DTypeLike]]

ALIGNMENT = 256  # bytes, for every piece of a workspace


def empty(backend: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Return an unwritten array of the backend."""
    return backend_module(backend).empty(shape, dtype)


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


class Scratch:
    """Scratch arrays of one buffer: how large they are, and where each begins.

    Parameters
    ----------
    sizes : mapping of name to (shape, dtype)
    """

    def __init__(self, sizes: Sizes) -> None:
        self._places = []
        start = 0
        for name, (shape, dtype) in sizes.items():
            self._places.append((name, start, shape, np.dtype(dtype)))
            start += -(-math.prod(shape) * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT
        self.nbytes = start

    def cut(self, function: str, backend: str, buffer: Array | None, *, checked: bool = True) -> dict[str, Any]:
        """Return the arrays, cut from the caller's buffer or from a fresh one; for a GPU their addresses.

        Parameters
        ----------
        function : str
            For messages.
        backend : {"cupy", "emulate"}
        buffer : uint8 array, shape (n,), or None
            n at least `nbytes`.
        checked : bool
            False skips the checks of `buffer`, except its size.

        Returns
        -------
        dict
            By name, and under "workspace" the buffer, which must live as long as they are used.
        """
        if buffer is None:
            if not self._places:
                return {}
            if self.nbytes:
                require_given(function, backend, workspace=None)
            buffer = empty(backend, (self.nbytes,), np.uint8)
        else:
            if checked:
                _check_buffer(function, backend, buffer, self.nbytes)
            if buffer.nbytes < self.nbytes:
                raise ArgumentError(f"{function}: `workspace` has {buffer.size} bytes, expected at least {self.nbytes}")
        found: dict[str, Any] = {"workspace": buffer}
        if backend == "cupy":  # an array takes CuPy 2 us, and a kernel needs no more than the address
            address = buffer.data.ptr
            for name, start, _, _ in self._places:
                found[name] = np.uint64(address + start)
        else:
            for name, start, shape, dtype in self._places:
                found[name] = np.ndarray(shape, dtype, buffer, start)
        return found


def _check_buffer(function: str, backend: str, buffer: Array, needed: int) -> None:
    check = Checker(function)
    if check.backend(workspace=buffer) != ("cupy" if backend == "cupy" else "numpy"):
        raise DTypeError(f"{function}: `workspace` is a {type(buffer).__module__} array, unlike the other arguments")
    check.array("workspace", buffer, ("bytes",), ("uint8",), contiguous=True, writable=True)
    if needed and address_of(buffer) % 16:
        raise LayoutError(f"{function}: `workspace` starts at an address that is not a multiple of 16 bytes")
