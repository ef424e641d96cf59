"""Calls that are alike to the checks of metadata: same types, shapes, dtypes, strides, devices, options.

Checks of metadata read nothing else, so a call that is alike to one that has passed them passes them, too.
"""

import sys
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from typing import Any

import numpy as np

from ddtree_cupy import emulate
from ddtree_cupy._arrays import LIBRARIES
from ddtree_cupy.containers.base import Arrays

_PLAIN = {int, float, bool, str, type(None)}
_MOST = 4096  # calls that are remembered


class _Unusual(Exception):
    """A value of which the checks may read something else."""


class _Kept:
    """What stands for a container of CuPy arrays, kept on it: a frozen container keeps its arrays."""

    __slots__ = ("part",)

    def __init__(self, part: Hashable) -> None:
        self.part = part

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy reads its own


class PassedCalls:
    """The calls of kernels that have passed their checks."""

    def __init__(self) -> None:
        self._keys: set[Hashable] = set()

    def key_of(self, function: Callable[..., Any], args: Any, options: Mapping[str, Any], out: Any) -> Hashable | None:
        """Return what a call has in common with those alike to it; None for the reference and for unusual values."""
        where = -1 if emulate.is_active() else _current_device()
        if where is None:
            return None
        try:
            parts = [_part(value) for value in args]
            parts += [_part(value) for value in options.values()]
            parts.append(_part(out))
        except _Unusual:
            return None
        return (function, where, *options, *parts)

    def __contains__(self, key: Hashable | None) -> bool:
        return key in self._keys

    def add(self, key: Hashable) -> None:
        """Remember a call that has passed."""
        if len(self._keys) >= _MOST:
            self._keys.clear()
        self._keys.add(key)


def _current_device() -> int | None:
    """Return the number of CuPy's current device, None where CuPy is not in use."""
    cupy = sys.modules.get("cupy")
    return _query(cupy)() if cupy is not None else None


@cache
def _query(cupy: Any) -> Callable[[], int | None]:
    """Return CuPy's function, or one that returns None where it raises since there is no GPU."""
    try:
        cupy.cuda.runtime.getDevice()
    except Exception:  # of a missing driver, or of a module that is only called cupy
        return lambda: None
    query: Callable[[], int] = cupy.cuda.runtime.getDevice
    return query


def _part(value: Any) -> Hashable:
    kind = type(value)
    library = LIBRARIES.get(kind)
    if library == "cupy":
        return value.dtype, value.shape, value.strides, value.data.device_id
    if library is not None:
        return value.dtype, value.shape, value.strides, value.flags.writeable, kind
    if kind in _PLAIN:
        return kind, value
    if isinstance(value, Arrays):
        kept: _Kept | None = vars(value).get("_alike")
        if kept is not None:
            return kept.part
        arrays = [array for name, array in vars(value).items() if not name.startswith("_")]
        part = (kind, *map(_part, arrays))
        if not any(isinstance(array, np.ndarray) for array in arrays):  # which can become read-only later
            vars(value)["_alike"] = _Kept(part)
        return part
    if kind is list or kind is tuple:
        return kind, *[_part(item) for item in value]
    raise _Unusual
