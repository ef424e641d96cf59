"""Checks of the arguments of displays: arrays, which are copied to the host, and one request of a batch."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy._arrays import library_of, refuse_odd_array
from ddtree_cupy._check import Checker
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError

Array = Any
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class Arguments(Checker):
    """Check the arguments of one call of a display, by value too."""

    def error(self, text: str, kind: type[Exception] = ArgumentError) -> Exception:
        """Return the error to raise, which says whose argument it is."""
        return kind(f"{self.function}: {text}")

    def on_host(self, name: str, array: Array) -> npt.NDArray[Any]:
        """Return a NumPy array; one on a GPU is copied."""
        refuse_odd_array(self.function, name, array)
        try:
            return np.asarray(array.get() if library_of(array) == "cupy" else array)
        except (TypeError, ValueError) as error:
            kind = ShapeError if isinstance(error, ValueError) else DTypeError
            wanted = f"expected an array or even lists ({error})"
            raise self.error(f"`{name}` is {type(array).__name__}, {wanted}", kind) from None

    def integers(self, name: str, value: Array, ndim: int = 1) -> Integers:
        """Return `value` as int64 with `ndim` axes."""
        array = self.on_host(name, value)
        if array.size and array.dtype.kind not in "iu":
            raise self.error(f"`{name}` has dtype {array.dtype}, expected integers", DTypeError)
        return self._with_axes(name, array, ndim).astype(np.int64)

    def floats(self, name: str, value: Array, ndim: int | None = None) -> Floats:
        """Return `value` as float64, with `ndim` axes unless None."""
        array = self.on_host(name, value)
        if array.dtype.kind in "bOSUc" or (array.dtype.kind == "V" and array.dtype.name != "bfloat16"):
            raise self.error(f"`{name}` has dtype {array.dtype}, expected real numbers", DTypeError)
        return self._with_axes(name, array, ndim).astype(np.float64)

    def _with_axes(self, name: str, array: npt.NDArray[Any], ndim: int | None) -> npt.NDArray[Any]:
        if ndim is not None and array.ndim != ndim:
            raise self.error(f"`{name}` is {array.shape}, expected {ndim} axes", ShapeError)
        return array

    def result(self, name: str, value: Any, expected: str, *attributes: str) -> None:
        """Check that `value` is a result with these attributes; `expected` says which function returns it."""
        missing = [attribute for attribute in attributes if not hasattr(value, attribute)]
        if isinstance(value, type) or missing:
            what = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
            lacks = f" (no `{missing[0]}`)" if missing else ""
            raise self.error(f"`{name}` is {what}{lacks}, expected {expected}", DTypeError)

    def positive(self, name: str, array: Floats) -> None:
        """Check that all values are finite and above 0."""
        if not ((array > 0) & np.isfinite(array)).all():
            raise self.error(f"`{name}` is {array.tolist()}, expected finite values above 0")

    def same_length(self, of: str, known: Any, /, **arrays: Any) -> None:
        """Check that all `arrays` (None skipped) have as many entries as the argument `of`, which is `known`."""
        for name, array in arrays.items():
            if array is not None and len(array) != len(known):
                wanted = f"expected {len(known)} like `{of}`"
                raise self.error(f"`{name}` has {len(array)} entries, {wanted}", ShapeError)

    def both_or_none(self, **pair: Any) -> None:
        """Check that two arguments are both given, or neither is."""
        (first, one), (second, other) = pair.items()
        if (one is None) != (other is None):
            raise self.error(f"`{first}` and `{second}` go together, expected both or none")

    def pick_request(self, request: int | None, batch: int | None) -> int | None:
        """Return `request` when it fits: None without a batch, else an index into it (optional in a batch of one)."""
        if batch is None:
            if request is not None:
                raise self.error(f"`request` is {request}, expected None without a request axis")
            return None
        if request is None and batch == 1:
            return 0
        if request is None:
            raise self.error(f"`request` is None, expected 0..{batch - 1} to pick one of the batch")
        return self.integer("request", request, low=0, high=batch - 1)

    def one_request(self, name: str, value: Any, request: int | None, *kinds: type) -> Any:
        """Return the host container of one request, its arrays without the request axis; a tree must have nodes."""
        self.kind(name, value, *kinds)
        first = next(array for array in vars(value).values() if array is not None)
        chosen = self.pick_request(request, first.shape[0] if value.is_batched else None)
        host = value.to("numpy")
        one = host if chosen is None else host.map(lambda array: array[chosen, ...])
        if getattr(one, "num_nodes", 1) == 0:
            raise self.error(f"`{name}` has no nodes (an inactive request)")
        return one

    def row_of(self, name: str, value: Array, request: int | None, batch: int | None) -> Integers:
        """Return one request's row of an integer array that has a request axis when the tree has."""
        array = self.integers(name, value, 1 if batch is None else 2)
        chosen = self.pick_request(request, batch)
        if chosen is None:
            return array
        if len(array) != batch:
            raise self.error(f"`{name}` is {array.shape}, expected {batch} requests like `tree`", ShapeError)
        return array[chosen, :]
