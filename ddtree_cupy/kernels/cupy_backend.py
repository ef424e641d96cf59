"""Backend `cupy`: kernels through `cupy.RawModule`, on the current device and CuPy's current stream."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy.errors import CompileError, LayoutError, UnsupportedError
from ddtree_cupy.kernels.device import EXACT_NVRTC, current_device, nvrtc_version
from ddtree_cupy.kernels.launch import Dimensions
from ddtree_cupy.kernels.spec import KernelSpec

# Blocks may use this much, static plus dynamic, without opting in.
_DEFAULT_SHARED_BYTES = 48 * 1024
_resident: dict[Hashable, dict[str, Any]] = {}


class CupyKernel:
    """One kernel compiled for one device."""

    def __init__(self, spec: KernelSpec, device: int) -> None:
        import cupy

        self.array_type: type[Any] = cupy.ndarray
        self._device = device
        self._label = spec.label
        properties = cupy.cuda.Device(device)
        arch = f"sm_{properties.compute_capability}"
        optin = int(properties.attributes["MaxSharedMemoryPerBlockOptin"])
        options = (*spec.compiler_options, *_arch_options(spec, arch))
        try:
            module = cupy.RawModule(
                code=spec.text(), options=options, name_expressions=(spec.entry,) if spec.is_template else None
            )
            self._kernel = module.get_function(spec.entry)
            static = int(self._kernel.shared_size_bytes)
            self._function = self._kernel.kernel  # of this device: saves the look-up of every launch
        except cupy.cuda.compiler.CompileException as error:
            version = ".".join(map(str, nvrtc_version()))
            raise CompileError(
                f"{spec.label} for {spec.arch_specific or arch} by NVRTC {version} with {' '.join(options)}:\n{error}"
            ) from error
        self.max_shared_bytes = optin - static
        # Opting in is a driver call, unsafe during graph capture: do it once, for any later launch.
        if spec.max_shared_bytes > _DEFAULT_SHARED_BYTES or spec.shared_bytes is not None:
            self._kernel.max_dynamic_shared_size_bytes = self.max_shared_bytes
            self._granted = self.max_shared_bytes
        else:
            self._granted = _DEFAULT_SHARED_BYTES - static

    def check_device(self, array: Any, describe: Callable[[], str]) -> None:
        """Raise `LayoutError` for an array on another device."""
        if array.device.id != self._device:
            raise LayoutError(f"{describe()} is on device {array.device.id}, the current device is {self._device}")

    def launch(self, grid: Dimensions, block: Dimensions, args: tuple[Any, ...], shared_mem: int) -> None:
        """Launch on the current stream."""
        if shared_mem > self._granted:
            self._kernel.max_dynamic_shared_size_bytes = self.max_shared_bytes
            self._granted = self.max_shared_bytes
        self._function(grid, block, args, shared_mem)

    @property
    def attributes(self) -> dict[str, int]:
        """Registers, local and shared bytes, as the driver reports them."""
        return dict(self._kernel.attributes)


def _arch_options(spec: KernelSpec, arch: str) -> tuple[str, ...]:
    if spec.arch_specific is None:
        return ()
    if spec.arch_specific != f"{arch}a":
        raise UnsupportedError(f"{spec.label} runs on {spec.arch_specific} only, this device is {arch}")
    version = nvrtc_version()
    if version < EXACT_NVRTC:
        raise UnsupportedError(
            f"{spec.label} needs NVRTC 12.9 or later for {spec.arch_specific}, CuPy uses {version[0]}.{version[1]}"
        )
    return (f"-arch={spec.arch_specific}",)


def device_key() -> int:
    """Return what compiled kernels are kept apart by."""
    return current_device()


def compile_kernel(spec: KernelSpec, device: int) -> CupyKernel:
    """Compile `spec` for the current device."""
    return CupyKernel(spec, device)


def empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return an unwritten array on the current device."""
    import cupy

    return cupy.empty(shape, dtype)


def resident(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, np.uint64]:
    """Return the addresses of copies of arrays on the current device, made once for each contents.

    They are never freed, as a captured graph may read them at any time.
    """
    import cupy

    key = (current_device(), *((name, array.tobytes()) for name, array in arrays.items()))
    if key not in _resident:
        stream = cupy.cuda.Stream(non_blocking=True)  # the caller's may be capturing a graph
        with stream:
            copies = {name: cupy.empty(array.shape, array.dtype) for name, array in arrays.items()}
            for name, array in arrays.items():
                copies[name].set(array, stream=stream)
        stream.synchronize()
        _resident[key] = copies
    return {name: np.uint64(array.data.ptr) for name, array in _resident[key].items()}
