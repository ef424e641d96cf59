"""`get_kernel`: from a spec to something callable, compiled once per device.

Examples
--------
>>> import numpy as np
>>> from ddtree_cupy.kernels import Arg, KernelSpec, get_kernel
>>> spec = KernelSpec(
...     source="example.cu",
...     code='extern "C" __global__ void twice(const float* x, float* y, int n) '
...          "{ int i = threadIdx.x; if (i < n) y[i] = 2 * x[i]; }",
...     entry="twice",
...     args=(Arg.input("x", "float32"), Arg.output("y", "float32"), Arg.scalar("n", "int32")),
... )
>>> x, y = np.arange(3, dtype=np.float32), np.empty(3, np.float32)
>>> get_kernel(spec, "emulate")((1,), (32,), (x, y, 3))
>>> y
array([0., 2., 4.], dtype=float32)
"""

import importlib
import threading
from typing import Any

from ddtree_cupy.errors import ArgumentError
from ddtree_cupy.kernels.launch import Kernel
from ddtree_cupy.kernels.spec import Arg, KernelSpec

__all__ = ["Arg", "Kernel", "KernelSpec", "clear", "get_kernel", "register", "registered_specs"]

# A backend is a module with `device_key()` and `compile_kernel(spec, device)`, imported at first use.
_BACKENDS = {
    "cupy": "ddtree_cupy.kernels.cupy_backend",
    "emulate": "ddtree_cupy.emulate.backend",
}
_loaded: dict[str, Any] = {}
_kernels: dict[tuple[str, int, KernelSpec], Kernel] = {}
_registered: dict[KernelSpec, None] = {}
_lock = threading.RLock()


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
    module = _loaded.get(backend) or _load(backend)
    key = (backend, module.device_key(), spec)
    kernel = _kernels.get(key)
    if kernel is None:
        with _lock:
            kernel = _kernels.get(key)
            if kernel is None:
                kernel = _kernels[key] = Kernel(spec, module.compile_kernel(spec, key[1]))
    return kernel


def _load(backend: str) -> Any:
    if backend not in _BACKENDS:
        raise ArgumentError(f"backend {backend!r}: expected one of {', '.join(_BACKENDS)}")
    _loaded[backend] = importlib.import_module(_BACKENDS[backend])
    return _loaded[backend]


def register(spec: KernelSpec) -> KernelSpec:
    """Add a spec of the library to those that the compile check and `ddtree kernels` cover; return it."""
    _registered[spec] = None
    return spec


def registered_specs() -> tuple[KernelSpec, ...]:
    """Return the registered specs, in order of registration."""
    return tuple(_registered)


def clear() -> None:
    """Forget all compiled kernels (a later `get_kernel` compiles, or reads the disk cache, again)."""
    with _lock:
        _kernels.clear()
