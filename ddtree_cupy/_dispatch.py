"""Which implementation a call runs: the reference, the emulated kernels, or CUDA."""

from typing import Any

from ddtree_cupy import emulate
from ddtree_cupy._check import Checker


def backend_of(check: Checker, **arrays: Any) -> str:
    """Return "numpy" (the reference), "emulate" (NumPy arrays inside `emulate.active()`) or "cupy"."""
    library = check.backend(**arrays)
    return "emulate" if library == "numpy" and emulate.is_active() else library
