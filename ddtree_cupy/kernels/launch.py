"""The launcher around a compiled kernel: checks by the argument table, exact scalars, empty grids.

CuPy passes whatever it is given: it ignores dtype, strides and device, sends a Python float as a double and launches
one block for an empty grid. The argument table of the spec closes these gaps once, for every backend.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ddtree_cupy.errors import ArgumentError, DTypeError, LayoutError
from ddtree_cupy.kernels.spec import Arg, KernelSpec

Dimensions = tuple[int, ...]


class Compiled(Protocol):
    """What a backend gives back for a spec."""

    array_type: type[Any]
    max_shared_bytes: int

    def check_device(self, array: Any, describe: Callable[[], str]) -> None:
        """Raise `LayoutError` for an array that this kernel's device cannot reach."""

    def launch(self, grid: Dimensions, block: Dimensions, args: tuple[Any, ...], shared_mem: int) -> None:
        """Launch; `args` are arrays, None and exact NumPy scalars."""


class Kernel:
    """A kernel ready to be launched; get one from `get_kernel`."""

    def __init__(self, spec: KernelSpec, compiled: Compiled) -> None:
        self.spec, self.compiled = spec, compiled
        self._converters = tuple(_converter(arg) if arg.role == "scalar" else None for arg in spec.args)
        self._dtypes = tuple(arg.numpy_dtype for arg in spec.args)

    def __repr__(self) -> str:
        return f"Kernel({self.spec.label})"

    def __call__(
        self,
        grid: Dimensions,
        block: Dimensions,
        args: Sequence[Any],
        shared_mem: int = 0,
        *,
        checked: bool = True,
    ) -> None:
        """Launch on the current stream; returns before a GPU has finished.

        Parameters
        ----------
        grid, block : tuple of one to three int
            Nothing happens when a grid size is zero.
        args : sequence
            One value per `Arg`, in order: arrays of this backend, None for null pointers, plain numbers for scalars.
        shared_mem : int
            Dynamic shared memory in bytes.
        checked : bool
            False skips the checks of arrays and sizes; scalars are always converted.
        """
        if len(args) != len(self._converters):
            expected = ", ".join(arg.name for arg in self.spec.args)
            raise ArgumentError(
                f"{self.spec.label}: {len(args)} arguments, expected {len(self._converters)}: {expected}"
            )
        if checked:
            self._check(grid, block, args, shared_mem)
        if 0 in grid:
            return
        try:
            values = tuple(
                value if convert is None else convert(value)
                for convert, value in zip(self._converters, args, strict=True)
            )
        except (OverflowError, TypeError, ValueError):
            self._explain_scalars(args)
            raise
        self.compiled.launch(grid, block, values, shared_mem)

    def _check(self, grid: Dimensions, block: Dimensions, args: Sequence[Any], shared_mem: int) -> None:
        threads = 1
        for size in block:
            threads *= size
        if not 0 < threads <= self.spec.max_threads:
            raise ArgumentError(f"{self.spec.label}: block {block}: expected 1 to {self.spec.max_threads} threads")
        limits = (2**31 - 1, 65_535, 65_535)
        if not 1 <= len(grid) <= 3 or any(not 0 <= n <= most for n, most in zip(grid, limits, strict=False)):
            raise ArgumentError(f"{self.spec.label}: grid {grid}: expected up to three sizes of at most {limits}")
        if not 0 <= shared_mem <= self.compiled.max_shared_bytes:
            raise ArgumentError(
                f"{self.spec.label}: {shared_mem} bytes of dynamic shared memory, at most "
                f"{self.compiled.max_shared_bytes} on this device"
            )
        for arg, dtype, value in zip(self.spec.args, self._dtypes, args, strict=True):
            if arg.role != "scalar":
                self._check_array(arg, dtype, value)

    def _check_array(self, arg: Arg, dtype: np.dtype[Any], value: Any) -> None:
        def describe() -> str:
            return f"{self.spec.label}: `{arg.name}`"

        if value is None:
            if not arg.nullable:
                raise ArgumentError(f"{describe()} is None, expected a {arg.dtype} array")
            return
        wanted = self.compiled.array_type
        if not isinstance(value, wanted):
            kind = f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"
            module = wanted.__module__.partition(".")[0]
            raise DTypeError(f"{describe()} is a {kind}, expected a {module}.{wanted.__name__}")
        if value.dtype != dtype:
            raise DTypeError(f"{describe()} is {value.dtype}, expected {dtype}")
        if not arg.strided and not value.flags.c_contiguous:
            raise LayoutError(f"{describe()} has strides {value.strides}, expected a C-contiguous array")
        self.compiled.check_device(value, describe)

    def _explain_scalars(self, args: Sequence[Any]) -> None:
        for arg, convert, value in zip(self.spec.args, self._converters, args, strict=True):
            if convert is None:
                continue
            try:
                convert(value)
            except OverflowError:
                raise ArgumentError(f"{self.spec.label}: `{arg.name}` is {value}, too large for {arg.dtype}") from None
            except (TypeError, ValueError):
                kind = type(value).__name__
                raise DTypeError(f"{self.spec.label}: `{arg.name}` is a {kind}, expected {arg.dtype}") from None


def _converter(arg: Arg) -> Callable[[Any], Any]:
    """Return the function that makes the exact NumPy scalar (CuPy passes its bytes)."""
    dtype = arg.numpy_dtype
    exact: Any = dtype.type
    if dtype.kind in "iu":
        return lambda value: exact(operator.index(value))
    if dtype.kind == "b":
        return lambda value: exact(bool(value))
    if dtype.kind == "V" and dtype.names is None and arg.dtype != "bfloat16":

        def struct(value: Any) -> Any:
            if not isinstance(value, np.ndarray) or value.size != 1 or value.dtype.itemsize != dtype.itemsize:
                raise TypeError
            return value

        return struct
    return lambda value: exact(float(value))
