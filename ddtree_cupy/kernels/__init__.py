"""From a file in `cuda_src`, or of your own, to a kernel that can be launched: specs, sources, backends."""

from ddtree_cupy.kernels.registry import get_kernel, register, registered_specs
from ddtree_cupy.kernels.source import expand, source_root
from ddtree_cupy.kernels.spec import CTYPES, Arg, KernelSpec, ints

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
