"""Tensors of torch through DLPack, without a copy in both directions; torch is imported inside the functions only."""

from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any

import numpy as np

from ddtree_cupy._arrays import library_of
from ddtree_cupy._check import Checker
from ddtree_cupy.containers import AcceptResult, Candidates, DraftTree, PagedKV, Visibility
from ddtree_cupy.errors import ArgumentError, DTypeError, LayoutError

Array = Any
CONTAINERS = (AcceptResult, Candidates, DraftTree, PagedKV, Visibility)


def _tensor(name: str, array: Array) -> Any:
    """Return one array as a torch tensor over the same memory."""
    if library_of(array) not in ("numpy", "cupy") or not hasattr(array, "__dlpack__"):
        raise DTypeError(f"to_torch: `{name}` is {type(array).__name__}, expected a NumPy or CuPy array")
    if any(stride < 0 for stride in array.strides):
        raise LayoutError(
            f"to_torch: `{name}` has strides {array.strides}, but torch has no negative ones; copy it with `.copy()`"
        )
    if isinstance(array, np.ndarray):
        if not array.flags.writeable:
            raise LayoutError(f"to_torch: `{name}` is read-only, but torch would write to it; copy it with `.copy()`")
        if not array.flags.aligned:
            raise LayoutError(f"to_torch: `{name}` is not aligned to its item size; copy it with `.copy()`")
    import torch
    from torch.utils.dlpack import from_dlpack

    try:
        if array.dtype.name == "bfloat16":  # DLPack knows bfloat16, NumPy does not export it: pass the 16 bits
            return from_dlpack(array.view(np.int16)).view(torch.bfloat16)
        return from_dlpack(array)
    except (BufferError, RuntimeError, TypeError) as error:
        raise DTypeError(f"to_torch: `{name}` with dtype {array.dtype} cannot be shared: {error}") from error


def to_torch(value: Any) -> Any:
    """Share an array, or every array of a container, with torch; nothing is copied, and both see each other's writes.

    Parameters
    ----------
    value : NumPy or CuPy array, or a container (DraftTree, Visibility, Candidates, PagedKV, AcceptResult)
        float64, float32, float16, bfloat16, any integer width, or bool. Writable, strides not negative.

    Returns
    -------
    torch.Tensor, or dict of str to torch.Tensor for a container
        On the device of the array. Fields that are None or host integers are returned unchanged.

    Raises
    ------
    LayoutError
        A read-only or unaligned array, or one with negative strides: it cannot be shared, copy it first.
    DTypeError
        Not an array, or a dtype that torch does not have (byte-swapped, float8, strings).

    Notes
    -----
    `visibility_bits` becomes torch.uint32, for which torch has few operations; `.view(torch.int32)` keeps the bits.
    A stride of 0 on a writable array is shared as it is. CuPy arrays are exported on CuPy's current stream.

    Examples
    --------
    >>> array = np.zeros(3, np.float32)
    >>> to_torch(array)[0] = 5  # array[0] is 5 now  # doctest: +SKIP
    >>> to_torch(array[::-1])
    Traceback (most recent call last):
    ddtree_cupy.errors.LayoutError: to_torch: `value` has strides (-4,), but torch has no negative ones; ...
    """
    if isinstance(value, CONTAINERS):
        shared = {}
        for field in fields(value):
            array = getattr(value, field.name)
            shared[field.name] = array if array is None or isinstance(array, int) else _tensor(field.name, array)
        return shared
    return _tensor("value", value)


def _array(name: str, tensor: Any, xp: Any) -> Array:
    """Return one torch tensor as an array of `xp` over the same memory."""
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise DTypeError(f"from_torch: `{name}` is {type(tensor).__name__}, expected a torch tensor")
    if tensor.requires_grad:
        raise LayoutError(f"from_torch: `{name}` requires grad, which an array cannot; share `{name}.detach()`")
    if xp is np and tensor.device.type != "cpu":
        raise LayoutError(
            f"from_torch: `{name}` is on {tensor.device}; pass xp=cupy to share it there, or `{name}.cpu()` to copy it"
        )
    try:
        if tensor.dtype == torch.bfloat16:
            import ml_dtypes

            return xp.from_dlpack(tensor.view(torch.int16)).view(ml_dtypes.bfloat16)
        return xp.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise LayoutError(
            f"from_torch: `{name}` ({tensor.dtype} on {tensor.device}) cannot be shared: {error}"
        ) from error


def _field(field: "Field[Any]", value: Any, xp: Any) -> Any:
    """Return the value of one field of a container."""
    if field.type is int:
        return Checker("from_torch").integer(field.name, value)
    if value is None and field.type == Any | None:
        return None
    return _array(field.name, value, xp)


def from_torch(value: Any, kind: type | None = None, *, xp: Any = np) -> Any:
    """Share a tensor, or a mapping of tensors as a container, with NumPy or CuPy; nothing is copied.

    Parameters
    ----------
    value : torch.Tensor, or mapping of str to torch.Tensor
        A mapping has the fields of `kind`; optional ones may be None, and `max_context` is a host integer.
    kind : type, optional
        The container class to make: DraftTree, Visibility, Candidates, PagedKV or AcceptResult.
    xp : module
        The library of the arrays: numpy (for CPU tensors) or cupy (for GPU tensors).

    Returns
    -------
    array of `xp`, or a `kind`
        On NumPy a container is checked by `validate()`. On CuPy it is not, since that would synchronise.

    Raises
    ------
    LayoutError
        A tensor that requires grad, lies on another device, is sparse, or has a dtype that `xp` lacks (float8).
    DTypeError, ArgumentError, ShapeError
        Not a tensor, missing or unknown fields, or values that the container does not allow (int64 instead of int32).

    Examples
    --------
    >>> import torch  # doctest: +SKIP
    >>> from_torch(torch.zeros(2, dtype=torch.bfloat16)).dtype  # doctest: +SKIP
    dtype(bfloat16)
    >>> from_torch({}, int)
    Traceback (most recent call last):
    ddtree_cupy.errors.DTypeError: from_torch: `kind` is <class 'int'> and `value` dict, expected a container ...
    """
    if kind is None:
        return _array("value", value, xp)
    if not isinstance(kind, type) or not issubclass(kind, CONTAINERS) or not isinstance(value, Mapping):
        raise DTypeError(
            f"from_torch: `kind` is {kind!r} and `value` {type(value).__name__}, expected a container class "
            f"({', '.join(known.__name__ for known in CONTAINERS)}) and a mapping"
        )
    names = [field.name for field in fields(kind)]
    if set(names) != set(value):
        raise ArgumentError(
            f"from_torch: `value` has {', '.join(map(str, value))}, expected the fields of {kind.__name__}: "
            f"{', '.join(names)}"
        )
    made: Any = kind(**{field.name: _field(field, value[field.name], xp) for field in fields(kind)})
    for name in made.copied:
        given, wanted = str(value[name].dtype).removeprefix("torch."), getattr(made, name).dtype
        raise DTypeError(
            f"from_torch: `{name}` has dtype {given}, expected {wanted}, since nothing is copied; "
            f"{name}.to(torch.{wanted}) makes one"
        )
    return made.validate() if xp is np else made
