"""Backend `emulate` of `ddtree_cupy.kernels.get_kernel`: NumPy arrays, kernels on the CPU."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ddtree_cupy._arrays import numpy_dtype
from ddtree_cupy.emulate._arguments import Parameter
from ddtree_cupy.emulate._module import MAX_SHARED_BYTES, Module
from ddtree_cupy.emulate._state import guards
from ddtree_cupy.emulate.guard import ALIGNMENT, GuardedMemory
from ddtree_cupy.errors import CompileError
from ddtree_cupy.kernels import Arg, KernelSpec
from ddtree_cupy.kernels.launch import Dimensions
from ddtree_cupy.kernels.structs import StructLayout


class EmulatedKernel:
    """One kernel of a spec, compiled for the CPU."""

    array_type: type[Any] = np.ndarray
    max_shared_bytes = MAX_SHARED_BYTES

    def __init__(self, spec: KernelSpec) -> None:
        try:
            module = Module(
                spec.text(),
                spec.compiler_options,
                (spec.entry,) if spec.is_template else (),
                flush_subnormals=spec.flush_subnormals,
            )
        except CompileError as error:
            raise CompileError(f"{spec.label} for the CPU emulator: {error}") from error
        self.function = module.get_function(spec.entry)
        compare(spec, self.function.parameters)

    def check_device(self, array: Any, describe: Callable[[], str]) -> None:
        """Accept every array, as there is only one host."""

    def launch(self, grid: Dimensions, block: Dimensions, args: tuple[Any, ...], shared_mem: int) -> None:
        """Run the kernel to its end, with the schedule of the enclosing `active` block."""
        self.function(grid, block, args, shared_mem, strided=True)


def compare(spec: KernelSpec, parameters: tuple[Parameter, ...]) -> None:
    """Raise `CompileError` unless the compiler sees the parameters that were read from the source text."""
    if len(parameters) != len(spec.args):
        raise CompileError(
            f"{spec.label}: {len(spec.args)} parameters were read, the compiler sees {len(parameters)}: "
            f"({', '.join(map(str, parameters))})"
        )
    for arg, parameter in zip(spec.args, parameters, strict=True):
        if not _describes(arg, parameter):
            raise CompileError(f"{spec.label}: `{arg}` was read, the compiler sees {parameter}")


def _describes(arg: Arg, parameter: Parameter) -> bool:
    if arg.role == "struct":
        return not parameter.is_pointer and parameter.nbytes == StructLayout(arg.name, arg.fields).nbytes
    if parameter.is_pointer != (arg.role != "scalar") or (
        parameter.is_pointer and parameter.is_const != (arg.role == "input")
    ):
        return False
    if not arg.dtype or parameter.dtype is None:  # behind a pointer to a struct or a vector anything goes
        return parameter.is_pointer
    return parameter.dtype == numpy_dtype(arg.dtype)


def device_key() -> int:
    """Return the key by which compiled kernels are kept apart, always the same, as there is only one host."""
    return -1


def compile_kernel(spec: KernelSpec, device: int) -> EmulatedKernel:
    """Compile `spec` for the CPU."""
    return EmulatedKernel(spec)


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """Return an unwritten array that holds 0xFF (NaN, -1), so that a forgotten write shows."""
    dtype = np.dtype(dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    raw = (
        np.asarray(GuardedMemory(nbytes, shift=-nbytes % ALIGNMENT, zeroed=False))
        if guards()
        else np.empty(nbytes, np.uint8)
    )
    raw.fill(0xFF)
    return raw.view(dtype).reshape(shape) if nbytes else np.empty(shape, dtype)


def resident(arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Return copies of arrays, which launches find at one place."""
    return {name: array.copy() for name, array in arrays.items()}
