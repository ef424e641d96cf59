"""Tools that compare results and make inputs, for the tests of this library and for your own kernels.

`check_kernel` takes a kernel through every gate. `compare` and `tolerance` judge results, `poison` makes illegal reads
and writes visible, and `strategies` (imported by name, since it needs Hypothesis) draws inputs.
"""

from ddtree_cupy.testing.compare import assert_close, assert_identical
from ddtree_cupy.testing.kernel_card import Card, Gate, Launch, check_kernel
from ddtree_cupy.testing.poison import GuardedArray, poison_padding, poison_spare_rows, reachable_rows, unchanged
from ddtree_cupy.testing.tolerance import judge, lse_floor, out_floor, tensor_core_matmul

__all__ = [
    "Card",
    "Gate",
    "GuardedArray",
    "Launch",
    "assert_close",
    "assert_identical",
    "check_kernel",
    "judge",
    "lse_floor",
    "out_floor",
    "poison_padding",
    "poison_spare_rows",
    "reachable_rows",
    "tensor_core_matmul",
    "unchanged",
]
