"""What a device has: shared memory, multiprocessors, architecture; stand-ins of the emulator."""

from functools import cache
from typing import NamedTuple

from ddtree_cupy.errors import MissingGPUError


def current_device() -> int:
    """Return CuPy's current device; raise `MissingGPUError` where there is none."""
    try:
        import cupy
    except Exception as error:  # an unwritable cache folder raises OSError at import
        raise MissingGPUError(
            f"CuPy cannot be imported ({type(error).__name__}: {error}); in the checkout of ddtree_cupy run "
            "pip install -e '.[cuda13]'"
        ) from error
    try:
        return int(cupy.cuda.runtime.getDevice())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise MissingGPUError(
            f"no usable GPU ({error}); on the CPU use NumPy arrays, inside ddtree_cupy.emulate.active() "
            "to run the CUDA kernels"
        ) from error


def nvrtc_version() -> tuple[int, int]:
    """Return the version of the NVRTC that CuPy uses."""
    from cupy.cuda import nvrtc

    major, minor = nvrtc.getVersion()
    return int(major), int(minor)


EXACT_NVRTC = (12, 9)  # the first that keeps our -arch=sm_90a in front of the -arch=sm_90 which CuPy adds


class Device(NamedTuple):
    """What plans depend on.

    Attributes
    ----------
    arch : str
        Such as "sm_90"; the emulator has none of its own ("").
    shared_limit : int
        Shared memory in bytes, static plus dynamic, that one block may use.
    multiprocessors : int
        How many blocks that fill a multiprocessor run at once.
    compiles_exactly : bool
        Whether kernels for this architecture alone, such as sm_90a, can be compiled.
    """

    arch: str
    shared_limit: int
    multiprocessors: int
    compiles_exactly: bool = True


# few multiprocessors, so that small cases are cut into pieces too; the shared memory of sm_90
EMULATED = Device("", 227 * 1024, 5)


def device_of(backend: str) -> Device:
    """Return the device that kernels of a backend run on now."""
    if backend == "emulate":
        return EMULATED
    import cupy

    return _cuda_device(cupy.cuda.runtime.getDevice())


@cache
def _cuda_device(number: int) -> Device:
    import cupy

    found = cupy.cuda.Device(number)
    attributes = found.attributes
    return Device(
        f"sm_{found.compute_capability}",
        int(attributes["MaxSharedMemoryPerBlockOptin"]),
        int(attributes["MultiProcessorCount"]),
        nvrtc_version() >= EXACT_NVRTC,
    )
