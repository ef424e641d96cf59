"""What all containers share: mapping a function over the arrays, moving them, a request axis."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Self

import numpy as np

from ddtree_cupy._check import refuse_odd_array
from ddtree_cupy.errors import ArgumentError

Array = Any


def where(array: Array) -> str:
    """Return " on cuda:0" for a device array, "" for a host array.

    Parameters
    ----------
    array : NumPy or CuPy array
    """
    return "" if isinstance(array, np.ndarray) else f" on cuda:{array.device.id}"


class Arrays:
    """A frozen dataclass whose fields are arrays (or None, or host integers).

    NumPy scalars become 0-d arrays; masked arrays and numpy.matrix are refused.
    """

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            if type(value) is np.ndarray or value is None:
                continue
            if isinstance(value, np.generic):
                object.__setattr__(self, name, np.asarray(value))
            else:
                refuse_odd_array(type(self).__name__, name, value)

    def map(self, function: Callable[[Array], Array]) -> Self:
        """Return the container of `function` of every array; host integers and None stay.

        Parameters
        ----------
        function : callable

        Examples
        --------
        >>> from ddtree_cupy import DraftTree
        >>> two = DraftTree.from_parents([[5, 6], [7, 8]], [[-1, 0], [-1, 0]])
        >>> two.map(lambda array: array[::-1]).token_ids.tolist()
        [[7, 8], [5, 6]]
        """
        changed = {}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            changed[field.name] = value if value is None or isinstance(value, int) else function(value)
        return replace(self, **changed)  # type: ignore[type-var]

    def to(self, backend: str) -> Self:
        """Return the container with its arrays on the host or on the current device; arrays there are not copied.

        Parameters
        ----------
        backend : "numpy" or "cupy"

        Raises
        ------
        ArgumentError
            Another backend.
        MissingGPUError
            "cupy" without CuPy or without a GPU.

        Examples
        --------
        >>> from ddtree_cupy import DraftTree
        >>> DraftTree.from_parents([5, 6], [-1, 0]).to("numpy").token_ids.tolist()
        [5, 6]
        """
        if backend == "numpy":
            return self.map(lambda array: array if isinstance(array, np.ndarray) else array.get())
        if backend != "cupy":
            raise ArgumentError(f"{type(self).__name__}.to: `backend` is {backend!r}, expected 'numpy' or 'cupy'")
        from ddtree_cupy.kernels.device import current_device

        current_device()
        import cupy

        return self.map(cupy.asarray)

    def with_batch(self) -> Self:
        """Return the container with a leading request axis of 1 on every array (views, no copy)."""
        return self.map(lambda array: array[None])

    def without_batch(self) -> Self:
        """Return the container of request 0 without the request axis (views, no copy; 0-d stays an array)."""
        return self.map(lambda array: array[0, ...])
