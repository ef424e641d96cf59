"""Whether NumPy or CuPy arrays share memory, found from addresses, shapes and strides; no value is read."""

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = Any
MOST_WORK = 10_000  # steps of `np.shares_memory`, 0.4 ms; slices of one pool take a few


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

    def stand_in(self) -> npt.NDArray[np.void]:
        """Return a NumPy array of this place, whose values must not be read: the memory may be a device's."""
        interface = {
            "version": 3,
            "data": (self.address, True),
            "shape": self.shape,
            "strides": self.strides,
            "typestr": f"|V{self.itemsize}",
        }
        return np.asarray(SimpleNamespace(__array_interface__=interface))


class Region(NamedTuple):
    """Arrays, or a container of them, and the first byte and the one after the last of each, known beforehand.

    Of a mapping of arrays by name the bounds may be those of further arrays, too.
    """

    bounds: Collection[tuple[int, int]]
    container: Any

    def is_near(self, low: int, high: int) -> bool:
        """Whether an array of these bounds may share memory with one of the container."""
        return any(low < last and first < high for first, last in self.bounds)


def address_of(array: Array) -> int:
    """Return the address of the first element; 0 for None. An integer is an address."""
    if array is None:
        return 0
    if isinstance(array, np.ndarray):
        return int(array.__array_interface__["data"][0])
    return int(array if isinstance(array, np.integer) else array.data.ptr)


def byte_bounds(array: Array) -> tuple[int, int]:
    """Return `Place.of(array).bounds`, quickly for the usual array."""
    if not array.flags.c_contiguous or not array.size:
        return Place.of(array).bounds
    address = address_of(array)
    return address, address + array.nbytes


def bounds_of(container: Any) -> dict[int, tuple[int, int]]:
    """Return the bounds of a frozen container's arrays by their `id`, kept on the container."""
    kept: _Bounds | None = vars(container).get("_bounds")
    if kept is None:
        arrays = [value for value in vars(container).values() if hasattr(value, "strides")]
        kept = vars(container)["_bounds"] = _Bounds({id(array): byte_bounds(array) for array in arrays})
    return kept


class _Bounds(dict[int, tuple[int, int]]):
    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the container finds its own


def overlap(one: Place, other: Place) -> bool:
    """Whether two arrays share a byte; True also where telling would take long."""
    try:
        # the stub knows only -1 and 0 for max_work
        return np.shares_memory(one.stand_in(), other.stand_in(), max_work=MOST_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
