"""Whether arrays share memory, told from addresses, shapes and strides of NumPy and CuPy arrays; no value is read."""

import math
from typing import Any, NamedTuple

import numpy as np

Array = Any


class Place(NamedTuple):
    """Where an array lies; two arrays of one place are the same elements."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, array: Array) -> "Place":
        """Return the place of a NumPy or CuPy array."""
        return cls(address_of(array), array.shape, array.strides, array.dtype.itemsize)

    @property
    def bounds(self) -> tuple[int, int]:
        """The first byte and the one after the last; (0, 0) for an empty array."""
        if 0 in self.shape:
            return 0, 0
        low = high = self.address
        for size, stride in zip(self.shape, self.strides, strict=True):
            if stride < 0:
                low += (size - 1) * stride
            else:
                high += (size - 1) * stride
        return low, high + self.itemsize


def address_of(array: Array) -> int:
    """Return the address of the first element."""
    on_host = isinstance(array, np.ndarray)
    return int(array.__array_interface__["data"][0] if on_host else array.data.ptr)


def byte_bounds(array: Array) -> tuple[int, int]:
    """Return `Place.of(array).bounds`, quickly for the usual array."""
    if not array.flags.c_contiguous or not array.size:
        return Place.of(array).bounds
    address = address_of(array)
    return address, address + array.nbytes


def overlap(one: Place, other: Place) -> bool:
    """Whether two arrays may share a byte; False for slices of one pool that lie between each other's rows."""
    (low, high), (other_low, other_high) = one.bounds, other.bounds
    if high <= other_low or other_high <= low:
        return False
    axes = [
        [(abs(stride), size) for size, stride in zip(place.shape, place.strides, strict=True) if size > 1 and stride]
        for place in (one, other)
    ]
    # Take the axes of small strides as one run of bytes, whichever axes these are: all runs of an array start at
    # multiples of `period` from its first byte. Runs of both that never meet within one period never meet.
    strides = {stride for each in axes for stride, _ in each}
    for least in strides:
        period = math.gcd(*(stride for stride in strides if stride >= least))
        run, other_run = (
            place.itemsize + sum((size - 1) * stride for stride, size in each if stride < least)
            for place, each in zip((one, other), axes, strict=True)
        )
        start = (other_low - low) % period
        if run <= start and start + other_run <= period:
            return False
    return True
