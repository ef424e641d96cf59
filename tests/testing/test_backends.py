"""`Backend` gives emulated kernels arrays that end at pages which cannot be accessed."""

import numpy as np
import pytest

from ddtree_cupy import emulate
from ddtree_cupy.errors import EmulatorError
from ddtree_cupy.kernels import KernelSpec, get_kernel
from ddtree_cupy.kernels.workspace import empty
from ddtree_cupy.testing.backends import Backend

pytestmark = pytest.mark.emulate

CODE = """extern "C" __global__ void add(const int* x, int* y, int at, int to) { y[to] = x[at] + 1; }"""


def add(x, at, to=0):
    """Return an array of four numbers of which a kernel writes one; a place of 4 is outside."""
    y = empty("emulate", (4,), np.int32)
    get_kernel(KernelSpec("add.cu", "add", code=CODE), "emulate")((1,), (1,), x=x, y=y, at=at, to=to)
    return y


@pytest.mark.parametrize("n", [4, 16])
def test_emulated_kernels_never_leave_their_arrays(n):
    backend, x = Backend("emulate"), np.arange(n, dtype=np.int32)
    assert backend(add, x, n - 1)[0] == n
    with pytest.raises(EmulatorError, match=rf"thread \(0,0,0\): add\.cu:1: reads element {n} of argument 0"):
        backend(add, x, n)
    with pytest.raises(EmulatorError, match=r"add\.cu:1: writes element 4 of argument 1"):
        backend(add, x, 0, 4)
    with emulate.active():
        assert add(np.arange(n + 4, dtype=np.int32)[:n], n)[0] == n + 1  # unguarded, it reads what lies behind


def test_arrays_given_and_returned_are_those_of_the_caller():
    def write(x):
        get_kernel(KernelSpec("add.cu", "add", code=CODE), "emulate")((1,), (1,), x=x, y=x, at=1, to=0)
        return x

    x = np.arange(4, dtype=np.int32)
    assert Backend("emulate")(write, x) is x
    assert x.tolist() == [2, 1, 2, 3]
