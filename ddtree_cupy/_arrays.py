"""Values as callers have them, taken as arrays and dtypes: the one place where arguments are converted.

What is on the host becomes a NumPy array, without a copy where possible, and integers become int32 after a check by
value. Arrays of CuPy stay as they are, since nothing on a device is converted or read.
"""

import sys
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError

Array = Any

LIBRARIES: dict[type, str] = {np.ndarray: "numpy"}  # the two plain array types, CuPy's as soon as one is seen
INT32 = np.dtype(np.int32)
_ON_HOST = (1, 3)  # kDLCPU and kDLCUDAHost of DLPack


def library_of(array: Any) -> str:
    """Return the top-level module that defines the type of `array`: numpy, cupy, torch, builtins, ..."""
    return type(array).__module__.partition(".")[0]


def refuse_odd_array(function: str, name: str, array: Any) -> None:
    """Refuse the two subclasses of a NumPy array that mean something else by the same calls; others are taken."""
    if isinstance(array, np.ma.MaskedArray):
        raise DTypeError(
            f"{function}: `{name}` is a masked array, whose mask would be ignored; expected a plain array: "
            f"{name}.filled(value) makes one"
        )
    if isinstance(array, np.matrix):
        raise DTypeError(
            f"{function}: `{name}` is a numpy.matrix, expected a plain array: numpy.asarray({name}) makes one"
        )


def host_array(function: str, name: str, values: Any) -> npt.NDArray[Any]:
    """Return an array_like as a NumPy array, without a copy where possible; any dtype, for the caller to check."""
    refuse_odd_array(function, name, values)
    kind, library = type(values).__name__, library_of(values)
    try:
        if isinstance(values, np.ndarray) or library == "cupy" or not hasattr(values, "__dlpack__"):
            return np.asarray(values)
        if values.__dlpack_device__()[0] in _ON_HOST:
            return _shared(values, library)
    except ValueError:
        raise ShapeError(f"{function}: `{name}` is ragged, expected lists of equal length") from None
    except (BufferError, RuntimeError, TypeError) as error:
        raise DTypeError(
            f"{function}: `{name}` is {kind} of {library}, expected an array on the host: {error}"
        ) from None
    raise DTypeError(
        f"{function}: `{name}` is {kind} of {library} on a device; cupy.from_dlpack({name}) makes an array of CuPy "
        f"without a copy"
    )


def _shared(tensor: Any, library: str) -> npt.NDArray[Any]:
    """Return an array over the memory of a tensor on the host."""
    if library == "torch" and str(tensor.dtype) == "torch.bfloat16":  # of which torch makes no NumPy array
        if tensor.requires_grad:  # which torch itself asks for with other dtypes
            raise TypeError("it requires grad; detach() makes a tensor that does not")
        return np.from_dlpack(tensor.view(sys.modules["torch"].int16)).view(numpy_dtype("bfloat16"))
    return np.asarray(tensor) if hasattr(tensor, "__array__") else np.from_dlpack(tensor)


def shares_memory(value: Any) -> bool:
    """Whether `as_array(value)` is known to lie in the memory of `value`."""
    return hasattr(value, "__array_interface__") or hasattr(value, "__dlpack__")


def as_array(function: str, name: str, value: Any) -> Array:
    """Return numbers in any form as an array: those of the host of NumPy, those of CuPy as they are."""
    if type(value) in LIBRARIES or library_of(value) == "cupy":
        return value
    array = np.asarray(None) if is_dataclass(value) else host_array(function, name, value)
    if array.dtype.kind in "OSU" and not isinstance(value, np.ndarray) and not _holds_integers(array):
        kind = "None" if value is None else type(value).__name__
        inside = " of other things than numbers" if isinstance(value, Sequence) and not isinstance(value, str) else ""
        raise DTypeError(f"{function}: `{name}` is {kind}{inside}, expected an array of numbers, or lists of them")
    return array


def _holds_integers(array: npt.NDArray[Any]) -> bool:
    return array.dtype.kind in "iu" or (array.dtype.kind == "O" and all(type(value) is int for value in array.flat))


def as_int32(
    function: str, name: str, values: Any, dtype: npt.DTypeLike = INT32, *, copy: bool = False
) -> npt.NDArray[Any]:
    """Return host integers of any dtype as int32, or as another integer `dtype`, after a check that each value fits.

    Without `copy`, an array that has the dtype is returned itself.
    """
    array = host_array(function, name, values)
    if array.size == 0 or array.dtype == dtype:
        return array.astype(dtype, copy=copy)
    wanted = np.dtype(dtype)
    if not _holds_integers(array):
        raise DTypeError(f"{function}: `{name}` has dtype {array.dtype}, expected integers")
    limits = np.iinfo(wanted)
    if array.min() < limits.min or array.max() > limits.max:
        place = tuple(int(i) for i in np.argwhere((array < limits.min) | (array > limits.max))[0])
        where = str(list(place)) if place else ""
        raise ArgumentError(
            f"{function}: `{name}`{where} is {array[place]}, expected integers of {wanted.name}: "
            f"{limits.min}..{limits.max}"
        )
    return array.astype(wanted)


def batched_shape(array: Array, ndim: int) -> Any:
    """Return the shape of an array of `ndim` axes in a batch, that of a single request with a request axis of 1."""
    return array.shape if array.ndim == ndim else (1, *array.shape)


def batched_strides(array: Array, ndim: int) -> Any:
    """Return the strides of an array of `ndim` axes in a batch, those of a single request with one of 0 before them."""
    return array.strides if array.ndim == ndim else (0, *array.strides)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a name; "bfloat16" is that of ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes  # here, so that importing the package pulls in NumPy only

        dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return dtype
    return np.dtype(name)


def as_dtype(function: str, name: str, value: Any, known: Sequence[str]) -> np.dtype[Any]:
    """Return one of the `known` dtypes, given as a word, or as a dtype of NumPy, ml_dtypes, JAX or torch."""
    word = str(value).removeprefix("torch.") if library_of(value) == "torch" else value
    try:
        found = numpy_dtype(word) if isinstance(word, str) else np.dtype(word)
    except TypeError:
        found = None
    if value is None or found is None or found.name not in known:
        given = repr(value) if value is None or found is None else found.name
        raise DTypeError(f"{function}: `{name}` is {given}, expected {' or '.join(known)}")
    return numpy_dtype(found.name)
