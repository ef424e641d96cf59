"""From a file in `cuda_src`, or of your own, to a kernel that can be launched: specs, sources, backends.

KernelSpec(source, entry, ...)    one kernel; its arguments are read from the source
get_kernel(spec, backend)         compiled once for a device; `kernel(grid, block, **arguments)` checks and launches
Plan, Step                        several launches with results and scratch
registered_specs()                every kernel of the library
"""

from ddtree_cupy.kernels.launch import Kernel
from ddtree_cupy.kernels.plan import Plan, Step
from ddtree_cupy.kernels.registry import get_kernel, register, registered_specs
from ddtree_cupy.kernels.signature import Arg
from ddtree_cupy.kernels.source import constants, expand, source_root
from ddtree_cupy.kernels.spec import CTYPES, KernelSpec
from ddtree_cupy.kernels.structs import layout_of

__all__ = [
    "CTYPES",
    "Arg",
    "Kernel",
    "KernelSpec",
    "Plan",
    "Step",
    "constants",
    "expand",
    "get_kernel",
    "layout_of",
    "register",
    "registered_specs",
    "source_root",
]
