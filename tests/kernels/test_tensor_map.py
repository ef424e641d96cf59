"""Tensor maps: the emulator's are read back by kernels (tests/emulate/test_hopper.py), CUDA's come from the driver."""

import ctypes

import numpy as np
import pytest

from ddtree_cupy.errors import UnsupportedError
from ddtree_cupy.kernels.tensor_map import tensor_map


def has_driver():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def test_maps_have_the_size_that_kernels_take():
    array = np.zeros((3, 5, 64), np.float16)
    box = tensor_map("emulate", array, (64, 5, 3), (128, 640), (64, 4, 1))
    assert (box.shape, box.nbytes) == ((1,), 128)


@pytest.mark.skipif(has_driver(), reason="this machine has a CUDA driver")
def test_without_a_driver_the_error_says_so():
    with pytest.raises(UnsupportedError, match="no tensor maps without the CUDA driver"):
        tensor_map("cupy", np.zeros((5, 64), np.float16), (64, 5), (128,), (64, 4))


@pytest.mark.gpu
def test_what_the_driver_refuses_is_named():
    import cupy

    array = cupy.zeros((5, 64), np.float16)
    assert tensor_map("cupy", array, (64, 5), (128,), (64, 4)).nbytes == 128
    with pytest.raises(UnsupportedError, match=r"error \d+\) of sizes \(64, 5\), strides \(100,\) bytes"):
        tensor_map("cupy", array, (64, 5), (100,), (64, 4))
