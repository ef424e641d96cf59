"""From a file in `cuda_src` to something that can be called: sources, specs, backends, compile checks."""

from ddtree_cupy._compile.kernel import get_kernel, register, registered_specs
from ddtree_cupy._compile.sources import expand, source_root
from ddtree_cupy._compile.spec import CTYPES, Arg, KernelSpec, ints

__all__ = [
    "CTYPES",
    "Arg",
    "KernelSpec",
    "expand",
    "get_kernel",
    "ints",
    "register",
    "registered_specs",
    "source_root",
]
