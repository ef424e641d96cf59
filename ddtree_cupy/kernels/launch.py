"""The launcher around a compiled kernel: arguments by keyword, checked by the signature, exact scalars, empty grids.

CuPy passes whatever it is given: it ignores dtype, strides and device, sends a Python float as a double and launches
one block for an empty grid. The signature of the kernel closes these gaps once, for every backend.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from ddtree_cupy._arrays import numpy_dtype
from ddtree_cupy.errors import ArgumentError, DTypeError, LayoutError
from ddtree_cupy.kernels.signature import Arg
from ddtree_cupy.kernels.spec import KernelSpec
from ddtree_cupy.kernels.structs import StructLayout

Array = Any
Dimensions = tuple[int, ...]


class Compiled(Protocol):
    """What a backend gives back for a spec."""

    array_type: type[Any]
    max_shared_bytes: int

    def check_device(self, array: Any, describe: Callable[[], str]) -> None:
        """Raise `LayoutError` for an array that this kernel's device cannot reach."""

    def launch(self, grid: Dimensions, block: Dimensions, args: tuple[Any, ...], shared_mem: int) -> None:
        """Launch; `args` are arrays, None, exact NumPy scalars and structs as bytes."""


class Kernel:
    """A kernel ready to be launched; get one from `get_kernel`."""

    def __init__(self, spec: KernelSpec, compiled: Compiled) -> None:
        self.spec, self.compiled = spec, compiled
        self.structs = {
            arg.name: StructLayout(f"{spec.label}: `{arg.name}`", arg.fields)
            for arg in spec.args
            if arg.role == "struct"
        }
        self.converters = tuple((arg.name, self._converter(arg)) for arg in spec.args)
        reserved = {"shared_mem"} & {arg.name for arg in spec.args}
        if reserved:
            raise ArgumentError(f"{spec.label}: a parameter is named `{reserved.pop()}`, as an option of the launch is")

    def __repr__(self) -> str:
        return f"Kernel({self.spec.label})"

    def __call__(self, grid: Dimensions, block: Dimensions, /, *, shared_mem: int = 0, **args: Any) -> None:
        """Check everything, then launch on the current stream; returns before a GPU has finished.

        Parameters
        ----------
        grid, block : tuple of one to three int
            Nothing happens when a grid size is zero.
        shared_mem : int
            Dynamic shared memory in bytes.
        **args
            One value for each parameter of the kernel, by its name there: arrays of this backend, None for null
            pointers, plain numbers for scalars, and for a struct a mapping of the same, by member.
        """
        expected = [arg.name for arg in self.spec.args]
        missing, unknown = [n for n in expected if n not in args], [n for n in args if n not in expected]
        if missing or unknown:
            found = [f"`{name}` is missing" for name in missing] + [f"`{name}` is unknown" for name in unknown]
            raise ArgumentError(f"{self.spec.label}: {', '.join(found)}; expected {', '.join(expected)}")
        self._check_sizes(grid, block, shared_mem)
        for arg in self.spec.args:
            if arg.role == "struct" and isinstance(args[arg.name], Mapping):
                for field in arg.fields:
                    if field.role in ("input", "output") and field.name in args[arg.name]:
                        self._check_array(f"{arg.name}.{field.name}", field, args[arg.name][field.name])
            elif arg.role in ("input", "output"):
                self._check_array(arg.name, arg, args[arg.name])
        self.launch(grid, block, args, shared_mem)

    def launch(self, grid: Dimensions, block: Dimensions, values: Mapping[str, Any], shared_mem: int = 0) -> None:
        """Launch with arguments that the caller has checked; `values` may hold more than the kernel takes."""
        if 0 not in grid:
            self.compiled.launch(grid, block, self.convert(values), shared_mem)

    def convert(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the arguments in their order, scalars and structs exact."""
        try:
            return tuple(
                [values[name] if convert is None else convert(values[name]) for name, convert in self.converters]
            )
        except (OverflowError, TypeError, ValueError):
            self._explain(values)
            raise

    def _check_sizes(self, grid: Dimensions, block: Dimensions, shared_mem: int) -> None:
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

    def _check_array(self, name: str, arg: Arg, value: Any) -> None:
        def describe() -> str:
            return f"{self.spec.label}: `{name}`"

        if value is None:
            if not arg.nullable:
                raise ArgumentError(f"{describe()} is None, expected a {arg.dtype} array")
            return
        wanted = self.compiled.array_type
        if not isinstance(value, wanted):
            kind = f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"
            module = wanted.__module__.partition(".")[0]
            raise DTypeError(f"{describe()} is a {kind}, expected a {module}.{wanted.__name__}")
        if arg.dtype and value.dtype != numpy_dtype(arg.dtype):
            raise DTypeError(f"{describe()} is {value.dtype}, expected {arg.dtype}")
        if not arg.strided and not value.flags.c_contiguous:
            raise LayoutError(f"{describe()} has strides {value.strides}, expected a C-contiguous array")
        self.compiled.check_device(value, describe)

    def _converter(self, arg: Arg) -> Callable[[Any], Any] | None:
        """Return the function that makes the exact bytes of a number or a struct (CuPy passes its bytes)."""
        if arg.role == "struct":
            return self._struct_converter(self.structs[arg.name])
        if arg.role != "scalar":
            return None
        dtype = numpy_dtype(arg.dtype)
        exact: Any = dtype.type
        if dtype.kind in "iu":
            return lambda value: exact(operator.index(value))
        if dtype.kind == "b":
            return lambda value: exact(bool(value))
        return lambda value: exact(float(value))

    def _struct_converter(self, layout: StructLayout) -> Callable[[Any], Any]:
        def convert(value: Any) -> Any:
            if isinstance(value, np.ndarray):
                if value.nbytes == layout.nbytes:
                    return value
                raise TypeError
            return layout.pack(**value)

        return convert

    def _explain(self, values: Mapping[str, Any]) -> None:
        for arg, (name, convert) in zip(self.spec.args, self.converters, strict=True):
            if convert is None:
                continue
            value = values[name]
            try:
                convert(value)
            except OverflowError:
                raise ArgumentError(f"{self.spec.label}: `{name}` is {value}, too large for {arg.dtype}") from None
            except (TypeError, ValueError):
                kind = type(value).__name__
                wanted = arg.dtype or f"a mapping of {', '.join(field.name for field in arg.fields)}"
                raise DTypeError(f"{self.spec.label}: `{name}` is a {kind}, expected {wanted}") from None
