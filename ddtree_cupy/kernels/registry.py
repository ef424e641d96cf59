"""`get_kernel`: from a spec to something callable, compiled once per device.

Examples
--------
>>> import numpy as np
>>> from ddtree_cupy.kernels import KernelSpec, get_kernel
>>> code = '''extern "C" __global__ void twice(const float* x, float* y, int n) {
...     int i = threadIdx.x;
...     if (i < n) y[i] = 2 * x[i];
... }'''
>>> x, y = np.arange(3, dtype=np.float32), np.empty(3, np.float32)
>>> get_kernel(KernelSpec("example.cu", "twice", code=code), "emulate")((1,), (32,), x=x, y=y, n=3)
>>> y
array([0., 2., 4.], dtype=float32)
"""

import importlib
import threading
from collections.abc import Callable, Iterable
from typing import Any

from ddtree_cupy.errors import ArgumentError
from ddtree_cupy.kernels.launch import Kernel
from ddtree_cupy.kernels.spec import KernelSpec

# A backend is a module with `device_key()`, `compile_kernel(spec, device)`, `empty(shape, dtype)` and
# `resident(arrays)`, imported at first use.
_BACKENDS = {
    "cupy": "ddtree_cupy.kernels.cupy_backend",
    "emulate": "ddtree_cupy.emulate.backend",
}
_loaded: dict[str, Any] = {}
_kernels: dict[tuple[str, int, KernelSpec], Kernel] = {}
_registered: list[Callable[[], Iterable[KernelSpec]]] = []
_lock = threading.RLock()
_clears = 0


def get_kernel(spec: KernelSpec, backend: str) -> Kernel:
    """Return the kernel for `spec`, compiled at the first call on each device.

    A source edited later is read again after `clear()`, or in a new process.

    Parameters
    ----------
    spec : KernelSpec
    backend : {"cupy", "emulate"}

    Raises
    ------
    CompileError
        The message names file and line, kernel, architecture and NVRTC version.
    MissingGPUError
        `cupy` without CuPy or without a GPU.
    UnsupportedError
        The kernel needs another architecture or a newer NVRTC; or `emulate` without a C++ compiler.
    """
    module = backend_module(backend)
    key = (backend, module.device_key(), spec)
    kernel = _kernels.get(key)
    if kernel is None:
        with _lock:
            kernel = _kernels.get(key)
            if kernel is None:
                vars(spec).pop("args", None)  # read from the source again, which may have been edited
                kernel = _kernels[key] = Kernel(spec, module.compile_kernel(spec, key[1]))
    return kernel


def current_key(backend: str) -> tuple[str, int, int]:
    """Return what compiled kernels may be kept by: it changes with the backend, the device and every `clear()`."""
    module = backend_module(backend)
    return backend, module.device_key(), _clears


def backend_module(backend: str) -> Any:
    """Return the module of a backend."""
    return _loaded.get(backend) or _load(backend)


def _load(backend: str) -> Any:
    if backend not in _BACKENDS:
        raise ArgumentError(f"backend {backend!r}: expected one of {', '.join(_BACKENDS)}")
    _loaded[backend] = importlib.import_module(_BACKENDS[backend])
    return _loaded[backend]


def register(specs: Callable[[], Iterable[KernelSpec]]) -> Callable[[], Iterable[KernelSpec]]:
    """Add specs of the library to those that the compile check and `ddtree kernels` cover; as a decorator, too."""
    _registered.append(specs)
    return specs


def registered_specs() -> tuple[KernelSpec, ...]:
    """Return the registered specs, each once, in order of registration."""
    return tuple(dict.fromkeys(spec for specs in _registered for spec in specs()))


def clear() -> None:
    """Forget all compiled kernels (a later `get_kernel` compiles, or reads the disk cache, again)."""
    global _clears
    with _lock:
        _kernels.clear()
        _clears += 1
