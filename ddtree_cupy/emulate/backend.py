"""Backend `emulate` of `ddtree_cupy.kernels.get_kernel`: NumPy arrays, kernels on the CPU."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ddtree_cupy.emulate._arguments import Parameter
from ddtree_cupy.emulate._module import MAX_SHARED_BYTES, Module
from ddtree_cupy.errors import CompileError
from ddtree_cupy.kernels.launch import Dimensions
from ddtree_cupy.kernels.spec import Arg, KernelSpec


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
    """Raise `CompileError` unless the argument table of the spec describes the C++ parameters of the kernel."""
    if len(parameters) != len(spec.args):
        raise CompileError(
            f"{spec.label}: the argument table has {len(spec.args)} rows, the kernel takes {len(parameters)}: "
            f"({', '.join(map(str, parameters))})"
        )
    for arg, parameter in zip(spec.args, parameters, strict=True):
        if not _describes(arg, parameter):
            raise CompileError(f"{spec.label}: `{arg.name}` is {arg.role} {arg.dtype}, the kernel takes {parameter}")


def _describes(arg: Arg, parameter: Parameter) -> bool:
    if parameter.is_pointer != (arg.role != "scalar"):
        return False
    if parameter.is_pointer and parameter.is_const != (arg.role == "input"):
        return False
    if parameter.dtype is None:  # a struct: by value the size must match, behind a pointer every array is accepted
        return parameter.is_pointer or parameter.nbytes == arg.numpy_dtype.itemsize
    return parameter.dtype == arg.numpy_dtype


def device_key() -> int:
    """Return the key by which compiled kernels are kept apart, always the same, as there is only one host."""
    return -1


def compile_kernel(spec: KernelSpec, device: int) -> EmulatedKernel:
    """Compile `spec` for the CPU."""
    return EmulatedKernel(spec)
