"""What a device has: shared memory, multiprocessors, architecture; stand-ins of the emulator."""

from functools import cache

from ddtree_cupy.errors import MissingGPUError

EMULATED_SHARED_LIMIT = 227 * 1024  # bytes; that of sm_90
EMULATED_MULTIPROCESSORS = 5  # few, so that small cases are cut into pieces too


def current_device() -> int:
    """Return CuPy's current device; raise `MissingGPUError` where there is none."""
    try:
        import cupy
    except Exception as error:  # an unwritable cache folder raises OSError at import
        raise MissingGPUError(
            f"CuPy cannot be imported ({type(error).__name__}: {error}); pip install 'ddtree-cupy[cuda13]'"
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
