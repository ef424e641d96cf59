"""From a file in `cuda_src` to something that can be called: sources, specs, backends, compile checks."""

from ddtree_cupy._compile.kernel import (
    Arg,
    KernelSpec,
    get_kernel,
    register,
    registered_specs,
)
from ddtree_cupy._compile.sources import expand, source_root

__all__ = [
    "Arg",
    "KernelSpec",
    "expand",
    "get_kernel",
    "register",
    "registered_specs",
    "source_root",
]
