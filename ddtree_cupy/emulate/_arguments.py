"""Check arguments against the C++ parameters of a kernel, and lay them out as `cuLaunchKernel` does."""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddtree_cupy.emulate._native import NativeKernel
from ddtree_cupy.errors import ArgumentError, DTypeError, LayoutError

_KINDS = {1: "int", 2: "uint", 3: "float"}


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter as the compiler sees it.

    `dtype` is None for a pointer to a struct, a vector type or void: any array is accepted there.
    """

    is_pointer: bool
    is_const: bool
    dtype: np.dtype[Any] | None
    nbytes: int

    def __str__(self) -> str:
        name = self.dtype.name if self.dtype is not None else f"{self.nbytes}-byte struct" if self.nbytes else "void"
        return f"{'const ' * self.is_const}{name}{'*' * self.is_pointer}"


def parameters_of(kernel: NativeKernel) -> tuple[Parameter, ...]:
    """Return the parameters of a compiled kernel, in order."""
    found = []
    for i in range(kernel.num_parameters):
        raw = kernel.parameters[i]
        dtype: np.dtype[Any] | None = None
        if raw.kind in _KINDS:
            dtype = np.dtype(f"{_KINDS[raw.kind]}{8 * raw.bytes}") if raw.bytes <= 8 else None
        elif raw.kind:
            dtype = _bfloat16() if raw.kind == 6 else np.dtype({4: np.bool_, 5: np.float16}[raw.kind])
        found.append(Parameter(bool(raw.is_pointer), bool(raw.is_const), dtype, int(raw.bytes)))
    return tuple(found)


def _bfloat16() -> np.dtype[Any]:
    import ml_dtypes  # here, so that importing the package pulls in NumPy only

    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def from_numbers(kernel: str, parameters: tuple[Parameter, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments, Python numbers as scalars of the kernel's types; raise where one does not fit."""
    return (
        tuple(
            _from_number(f"{kernel}: argument {i}", value, parameter) if isinstance(value, int | float) else value
            for i, (value, parameter) in enumerate(zip(args, parameters, strict=False))
        )
        + args[len(parameters) :]
    )


def _from_number(name: str, value: Any, parameter: Parameter) -> Any:
    dtype = parameter.dtype
    if parameter.is_pointer or dtype is None or isinstance(value, np.generic):
        return value
    if dtype.kind == "b" and not isinstance(value, bool):
        raise DTypeError(f"{name} is {value!r}, the kernel takes {parameter}")
    if dtype.kind in "iu":
        if not isinstance(value, int):
            raise DTypeError(f"{name} is {value!r}, the kernel takes {parameter}")
        limits = np.iinfo(dtype)
        if not limits.min <= value <= limits.max:
            raise ArgumentError(f"{name} is {value}, which does not fit {parameter}: {limits.min}..{limits.max}")
    return dtype.type(value)


def pack(kernel: str, parameters: tuple[Parameter, ...], args: tuple[Any, ...], *, strided: bool) -> tuple[Any, Any]:
    """Return (`void**`, objects to keep alive during the launch); raise for arguments that a GPU would misread."""
    if len(args) != len(parameters):
        expected = ", ".join(map(str, parameters))
        raise ArgumentError(f"{kernel}: {len(args)} arguments, expected {len(parameters)}: ({expected})")
    keep = []
    pointers = (ctypes.c_void_p * max(1, len(args)))()
    for i, (value, parameter) in enumerate(zip(args, parameters, strict=True)):
        name = f"{kernel}: argument {i}"
        held = _pointer(name, value, parameter, strided) if parameter.is_pointer else _scalar(name, value, parameter)
        keep.append((held, value))
        pointers[i] = ctypes.addressof(held)
    return pointers, keep


def _pointer(name: str, value: Any, parameter: Parameter, strided: bool) -> Any:
    if value is None:
        return ctypes.c_void_p(None)
    if not isinstance(value, np.ndarray):
        raise DTypeError(f"{name} is a {type(value).__name__}, expected a numpy.ndarray for {parameter}, or None")
    if parameter.dtype is not None and value.dtype != parameter.dtype:
        raise DTypeError(f"{name} is {value.dtype}, the kernel takes {parameter}")
    if not strided and not value.flags.c_contiguous:
        raise LayoutError(
            f"{name} is not C-contiguous (strides {value.strides}), and the kernel sees only its address; "
            "pass numpy.ascontiguousarray(...), or strided=True if the kernel takes strides"
        )
    if not parameter.is_const and not value.flags.writeable:
        raise LayoutError(f"{name} is read-only, but the kernel's pointer is not const: {parameter}")
    return ctypes.c_void_p(value.__array_interface__["data"][0] if value.size else None)


def _scalar(name: str, value: Any, parameter: Parameter) -> Any:
    if isinstance(value, np.ndarray) and value.size == 1 and parameter.dtype is None:
        value = value.reshape(())[()]  # a struct by value, as CuPy takes it
    if not isinstance(value, np.generic):
        raise DTypeError(f"{name} is a {type(value).__name__}, expected a NumPy scalar for {parameter}")
    exact = value.dtype == parameter.dtype if parameter.dtype is not None else value.nbytes == parameter.nbytes
    if not exact:
        raise DTypeError(f"{name} is {value.dtype}, the kernel takes {parameter}")
    return ctypes.create_string_buffer(value.tobytes(), value.nbytes)
