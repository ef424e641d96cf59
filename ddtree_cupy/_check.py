"""Metadata checks: shape, dtype, stride, array library. Nothing here reads an array's values."""

import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from ddtree_cupy._arrays import LIBRARIES, library_of, refuse_odd_array
from ddtree_cupy._overlap import Place, Region, byte_bounds, overlap
from ddtree_cupy.errors import ArgumentError, DTypeError, LayoutError, ShapeError

Array = Any

FLOATS = ("float32", "float16", "bfloat16")
FLOATS_AND_F64 = (*FLOATS, "float64")

_NAMES: dict[Any, str] = {}  # of dtypes: NumPy works a name out at every call


def dtype_name(dtype: Any) -> str:
    """Return `dtype.name`, worked out once; where the bytes are swapped, the code that says so."""
    name = _NAMES.get(dtype)
    if name is None:
        name = _NAMES[dtype] = str(dtype.name if dtype.isnative else dtype.str)
    return name


class Checker:
    """Check the arguments of one call and remember which argument fixed each axis.

    Every message names the function, the argument, what it is and what was expected, together with the sizes
    known so far and the argument each came from.

    Examples
    --------
    >>> check = Checker("accept")
    >>> check.array("token_ids", np.zeros((2, 7), np.int32), ("batch", "num_nodes"), ("int32",))
    >>> check.array("target_token_ids", np.zeros((2, 6), np.int32), ("batch", "num_nodes"), ("int32",))
    Traceback (most recent call last):
    ddtree_cupy.errors.ShapeError: accept: `target_token_ids` is (2, 6), expected (batch, num_nodes) with ...
    """

    def __init__(self, function: str) -> None:
        self.function = function
        self.sizes: dict[str, tuple[int, str]] = {}

    def backend(self, **arrays: Any) -> str:
        """Return "numpy" or "cupy" when all `arrays` (None skipped) come from that one library."""
        found: dict[str, str] = {}
        for name, array in arrays.items():
            if array is None:
                continue
            library = LIBRARIES.get(type(array)) or self._library(name, array)
            if library not in found:
                found[library] = name
        if len(found) > 1:
            raise DTypeError(
                f"{self.function}: `{found['numpy']}` is a NumPy array and `{found['cupy']}` a CuPy array; "
                f"move one over, e.g. cupy.asarray({found['numpy']}{_dtype_of(arrays[found['numpy']])}) or "
                f"cupy.asnumpy({found['cupy']})"
            )
        if "cupy" in found:
            self._require_current_device(arrays)
            return "cupy"
        return "numpy"

    def _require_current_device(self, arrays: Mapping[str, Any]) -> None:
        cupy: Any = sys.modules.get("cupy")
        if cupy is None:
            return
        current = cupy.cuda.runtime.getDevice()
        for name, array in arrays.items():
            # what only claims to be an array of CuPy is refused where it is used
            if isinstance(array, cupy.ndarray) and array.data.device_id != current:
                raise LayoutError(
                    f"{self.function}: `{name}` is on device {array.data.device_id}, the current device is {current}"
                )

    def _library(self, name: str, array: Any) -> str:
        refuse_odd_array(self.function, name, array)
        library = "numpy" if isinstance(array, np.ndarray | np.generic) else library_of(array)
        if library == "torch":
            raise DTypeError(
                f"{self.function}: `{name}` is a torch tensor; convert it without a copy by "
                f"numpy.from_dlpack({name}) on the CPU or cupy.from_dlpack({name}) on the GPU"
            )
        if library not in ("numpy", "cupy"):
            raise DTypeError(
                f"{self.function}: `{name}` is {type(array).__name__}, expected a NumPy or CuPy array; "
                f"numpy.asarray({name}) makes one"
            )
        if library == "cupy" and type(array).__name__ == "ndarray":
            LIBRARIES[type(array)] = library
        return library

    def array(
        self,
        name: str,
        array: Array,
        axes: Sequence[str | int],
        dtypes: Sequence[str] | None = None,
        *,
        last_contiguous: bool = False,
        contiguous: bool = False,
        writable: bool = False,
    ) -> None:
        """Check one array; an axis named for the first time takes its size from this array."""
        if type(array) not in LIBRARIES:
            if not hasattr(array, "dtype"):
                raise DTypeError(f"{self.function}: `{name}` is {type(array).__name__}, expected an array")
            refuse_odd_array(self.function, name, array)
        shape, dtype = array.shape, array.dtype
        if dtypes is not None and dtype_name(dtype) not in dtypes:
            hint = "" if writable else _conversion(name, array, dtypes)
            raise DTypeError(
                f"{self.function}: `{name}` has dtype {dtype_name(dtype)}, expected {' or '.join(dtypes)}{hint}"
            )
        sizes = self.sizes
        fits = len(shape) == len(axes)
        for axis, size in zip(axes, shape, strict=False):
            if axis in sizes:
                fits &= sizes[axis][0] == size
            elif isinstance(axis, str):
                sizes[axis] = size, name
            else:
                fits &= axis == size
        if not fits:
            self.sizes = {axis: found for axis, found in sizes.items() if found[1] != name}
            raise ShapeError(f"{self.function}: `{name}` is {tuple(shape)}, expected {self._expected(axes)}")
        if not array.flags.c_contiguous:
            self._check_strides(name, array, contiguous, last_contiguous)
        if writable and isinstance(array, np.ndarray) and not array.flags.writeable:
            raise LayoutError(f"{self.function}: `{name}` is read-only, expected an array this call may write")

    def _check_strides(self, name: str, array: Array, contiguous: bool, last_contiguous: bool) -> None:
        strides, itemsize = array.strides, array.dtype.itemsize
        if contiguous:
            raise LayoutError(
                f"{self.function}: `{name}` is not C-contiguous (strides {strides}), expected a C-contiguous "
                f"array; numpy.ascontiguousarray or cupy.ascontiguousarray makes one"
            )
        if last_contiguous and array.size and array.shape[-1] > 1 and strides[-1] != itemsize:
            raise LayoutError(
                f"{self.function}: the last axis of `{name}` has stride {strides[-1]} bytes, expected "
                f"{itemsize} (contiguous)"
            )
        if array.size and any(stride % itemsize for stride in strides):
            raise LayoutError(
                f"{self.function}: `{name}` has strides {strides} bytes, expected multiples of its item size {itemsize}"
            )

    def separate(
        self,
        written: Mapping[str, Any],
        read: Mapping[str, Any],
        in_place: Collection[tuple[str, str]] = (),
        known: Mapping[int, tuple[int, int]] = MappingProxyType({}),
    ) -> None:
        """Raise when an array that this call writes shares memory with another array of the call.

        Values may be arrays, containers of them, regions, or anything else, which is skipped. A pair of names in
        `in_place` may be one and the same array. `known` holds the bounds of some arrays by their `id`.
        """
        outputs = [(name, array, *(known.get(id(array)) or byte_bounds(array))) for name, array in _arrays_of(written)]
        if not outputs:
            return
        near: dict[str, Any] = {}
        for name, value in read.items():
            if not isinstance(value, Region):
                near[name] = value
            elif any(value.is_near(low, high) for _, _, low, high in outputs):
                near |= value.container if isinstance(value.container, Mapping) else {name: value.container}
        arrays = outputs + [(name, array, *byte_bounds(array)) for name, array in _arrays_of(near)]
        for at, (name, array, low, high) in enumerate(outputs, start=1):
            for other, another, other_low, other_high in arrays[at:]:
                if high <= other_low or other_high <= low:  # by far the most
                    continue
                place, other_place = Place.of(array), Place.of(another)
                if ((name, other) in in_place and place == other_place) or not overlap(place, other_place):
                    continue
                raise LayoutError(
                    f"{self.function}: `{name}`, which this call writes, shares memory with `{other}`; expected memory "
                    f"of its own: copy one of them first"
                )

    def same_dtype(self, **arrays: Array) -> None:
        """Check that all `arrays` share one dtype."""
        if len({array.dtype for array in arrays.values()}) > 1:
            names = {name: array.dtype.name for name, array in arrays.items()}
            listed = ", ".join(f"`{name}` {dtype}" for name, dtype in names.items())
            raise DTypeError(f"{self.function}: {listed}; expected one dtype for all of them")

    def items(self, name: str, values: Any, *kinds: type) -> list[Any]:
        """Return the entries of an iterable that is no text; each must be one of `kinds`, if any are named."""
        if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
            raise DTypeError(f"{self.function}: `{name}` is {type(values).__name__}, expected a sequence")
        entries = list(values)
        for at, entry in enumerate(entries):
            self.kind(f"{name}[{at}]", entry, *kinds)
        return entries

    def kind(self, name: str, value: Any, *kinds: type) -> None:
        """Check that `value` is an instance of one of `kinds`, if any are named."""
        if kinds and not isinstance(value, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise DTypeError(f"{self.function}: `{name}` is {type(value).__name__}, expected {wanted}")

    def choice(self, name: str, value: str, choices: Sequence[str]) -> str:
        """Check one of several words; return it."""
        if not isinstance(value, str) or value not in choices:
            raise ArgumentError(
                f"{self.function}: `{name}` is {value!r}, expected one of {', '.join(map(repr, choices))}"
            )
        return value

    def integer(self, name: str, value: Any, *, low: int | None = None, high: int | None = None) -> int:
        """Return `value` as int when it is a Python or NumPy integer inside [low, high]."""
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
            raise DTypeError(f"{self.function}: `{name}` is {value!r}, expected an integer")
        if (low is not None and value < low) or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"in {low}..{high}"
            raise ArgumentError(f"{self.function}: `{name}` is {value}, expected an integer {bounds}")
        return int(value)

    def real(self, name: str, value: Any, *, above: float | None = None) -> float:
        """Return `value` as float when it is a finite real number, larger than `above` if given."""
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
            raise DTypeError(f"{self.function}: `{name}` is {value!r}, expected a real number")
        try:
            number = float(value)
        except OverflowError:  # an integer of more than 308 digits
            number = math.inf
        if not math.isfinite(number) or (above is not None and number <= above):
            wanted = "a finite number" if above is None else f"a finite number > {above:g}"
            raise ArgumentError(f"{self.function}: `{name}` is {value!r}, expected {wanted}")
        return number

    def _expected(self, axes: Sequence[str | int]) -> str:
        shape = f"({', '.join(str(axis) for axis in axes)}{',' if len(axes) == 1 else ''})"
        known = [axis for axis in axes if isinstance(axis, str) and axis in self.sizes]
        sizes = ", ".join(f"{axis}={self.sizes[axis][0]} from `{self.sizes[axis][1]}`" for axis in known)
        return f"{shape} with {sizes}" if sizes else shape


def _dtype_of(array: Array) -> str:
    """Return the argument that keeps an integer dtype where `cupy.asarray` would choose one."""
    return f", dtype='{array.dtype.name}'" if array.dtype.kind in "iu" else ""


def _conversion(name: str, array: Array, dtypes: Sequence[str]) -> str:
    """Return the advice to convert an array of numbers into the first of `dtypes` that NumPy names; "" if none fits."""
    wanted = next((dtype for dtype in dtypes if hasattr(np, dtype)), None)
    if wanted is None or array.dtype.kind not in ("iu" if "int" in wanted else "iuf"):
        return ""
    host = f"numpy.asarray({name})" if isinstance(array, np.ndarray) else name  # lists have no `astype`
    return f"; {host}.astype(numpy.{wanted}) makes one"


def _arrays_of(values: Mapping[str, Any]) -> Iterator[tuple[str, Array]]:
    for name, value in values.items():
        if type(value) in LIBRARIES or (hasattr(value, "strides") and not isinstance(value, np.generic)):
            yield name, value
        elif is_dataclass(value):
            for field, array in vars(value).items():
                if type(array) in LIBRARIES or hasattr(array, "strides"):
                    yield f"{name}.{field}", array


def deliver_arrays(function: str, results: Mapping[str, Array], out: Sequence[Array]) -> None:
    """Copy host `results`, by their names in messages, into the arrays of `out`, all of which are checked first."""
    check = Checker(function)
    named = dict(zip(results, out, strict=True))
    for (name, target), result in zip(named.items(), results.values(), strict=True):
        check.array(name, target, result.shape, (result.dtype.name,), writable=True)
    check.separate(named, {})
    for result, target in zip(results.values(), out, strict=True):
        np.copyto(target, result)
