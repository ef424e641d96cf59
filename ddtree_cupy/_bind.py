"""Bound calls: checked and planned once, launched often."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from ddtree_cupy._call import prepared
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError

Array = Any


class Bound:
    """A call of kernels with everything in place; made by `bind`.

    Attributes
    ----------
    result
        What the function returns: arrays that every call writes anew.
    """

    def __init__(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        self._function, self._arguments = function, arguments
        self._bind()

    def _bind(self) -> None:
        call = prepared("bind", self._function, (), self._arguments)
        self.result, self._launches, self._kept = call.bind(self._arguments.get("workspace"))

    def __call__(self, **arrays: Any) -> Any:
        """Launch; return `result`.

        Parameters
        ----------
        **arrays
            Arguments of the function to use from now on in place of those given before: arrays or containers of
            equal shapes, dtypes and strides. Where no `out` was given, `result` is new then.
        """
        if arrays:
            self._exchange(arrays)
        for launch in self._launches:
            launch()
        return self.result

    def _exchange(self, arrays: Mapping[str, Any]) -> None:
        for name, value in arrays.items():
            if name not in self._arguments:
                raise ArgumentError(f"bind: {self._function.__name__} was bound without `{name}`")
            _require_alike(f"bind: `{name}`", self._arguments[name], value)
        self._arguments = {**self._arguments, **arrays, "checked": False}
        self._bind()


def _require_alike(name: str, old: Any, new: Any) -> None:
    if type(old) is not type(new):
        raise DTypeError(f"{name} is {type(new).__name__}, expected {type(old).__name__} as before")
    if isinstance(old, Sequence) and not isinstance(old, str):
        if len(old) != len(new):
            raise ShapeError(f"{name} has {len(new)} entries, expected {len(old)} as before")
        for at, (one, other) in enumerate(zip(old, new, strict=True)):
            _require_alike(f"{name}[{at}]", one, other)
    elif is_dataclass(old):
        for field in fields(old):
            _require_alike(f"{name}.{field.name}", getattr(old, field.name), getattr(new, field.name))
    elif hasattr(old, "strides"):
        for what in ("shape", "dtype", "strides"):
            if getattr(old, what) != getattr(new, what):
                raise ShapeError(f"{name} has {what} {getattr(new, what)}, expected {getattr(old, what)} as before")
    elif old != new:
        raise ArgumentError(f"{name} is {new!r}, expected {old!r}: plans follow numbers, bind again for another")


def bind(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Bound:
    """Check and plan a call once, for a loop that repeats it: what is left of a call is its launches.

    Parameters
    ----------
    function : callable
        One of this library's that runs kernels, such as `tree_attention`.
    *args, **kwargs
        Its arguments, on a GPU or inside `emulate.active()`. Without `out=` and `workspace=` both are allocated here
        and belong to the bound call.

    Returns
    -------
    Bound
        Call it to launch. It reads and writes the same arrays at every call; `bound(q_nope=other)` exchanges arrays.

    Raises
    ------
    ArgumentError
        `function` is not one that runs kernels, or the arrays are NumPy arrays outside the emulator.

    Examples
    --------
    >>> import numpy as np
    >>> from ddtree_cupy import DraftTree, accept, emulate
    >>> tree, targets = DraftTree.from_parents([9, 10, 20], [-1, 0, 1]), np.array([10, 7, 0], np.int32)
    >>> with emulate.active():
    ...     walk = bind(accept, tree, targets)
    ...     print(walk())
    ...     targets[1] = 20
    ...     print(walk())
    AcceptResult(accepted=[0, 1], num_accepted=1, bonus_token=7)
    AcceptResult(accepted=[0, 1, 2], num_accepted=2, bonus_token=0)
    """
    given = inspect.signature(function).bind(*args, **kwargs).arguments if callable(function) else {}
    return Bound(function, dict(given))
