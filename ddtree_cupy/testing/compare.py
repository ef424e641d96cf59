"""Assertions on arrays and containers: identical for discrete results, close by the float rule for the rest."""

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy.testing.tolerance import judge

__all__ = ["assert_close", "assert_identical", "to_host"]


def to_host(array: Any) -> npt.NDArray[Any]:
    """Return a NumPy array; a CuPy array is copied and synchronises."""
    return np.asarray(array.get() if hasattr(array, "get") and not isinstance(array, np.ndarray) else array)


def _show(array: npt.NDArray[Any], where: Iterable[Any]) -> str:
    return repr(array[tuple(where)].item())


def _different(actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return where the bits differ; every NaN counts as equal to every NaN."""
    width = actual.dtype.itemsize
    if actual.dtype.kind in "biu" or width not in (1, 2, 4, 8):
        return np.asarray(actual != expected)
    bits = np.dtype(f"u{width}")
    differ = np.ascontiguousarray(actual).view(bits) != np.ascontiguousarray(expected).view(bits)
    both_nan = np.isnan(actual.astype(np.float64)) & np.isnan(expected.astype(np.float64))
    return np.asarray(differ).reshape(actual.shape) & ~both_nan


def _check_metadata(name: str, actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape {actual.shape}, expected {expected.shape}")
    if actual.dtype != expected.dtype:
        raise AssertionError(f"{name}: dtype {actual.dtype}, expected {expected.dtype}")


def assert_identical(actual: Any, expected: Any, *, name: str = "") -> None:
    """Raise unless both hold the same types, shapes, dtypes and bits.

    Containers are compared field by field and tuples or lists element by element; None, integers and strings must
    be equal. NaN equals NaN whatever its payload; -0.0 differs from 0.0.

    Parameters
    ----------
    actual, expected : array, container, tuple, list, int, str or None
        CuPy arrays are copied to the host.
    name : str
        The message begins with it.

    Raises
    ------
    AssertionError
        Says which array differs, in how many entries, and shows the first five with both values.

    Examples
    --------
    >>> assert_identical(np.array([1, 2, 3]), np.array([1, 5, 3]), name="parents")
    Traceback (most recent call last):
    AssertionError: parents: 1 of 3 entries differ; [1] is 2, expected 5
    """
    name = name or type(expected).__name__
    if is_dataclass(expected) and not isinstance(expected, type):
        if type(actual) is not type(expected):
            raise AssertionError(f"{name}: {type(actual).__name__}, expected {type(expected).__name__}")
        for field in fields(expected):
            path = f"{name}.{field.name}"
            assert_identical(getattr(actual, field.name), getattr(expected, field.name), name=path)
        return
    if isinstance(expected, tuple | list):
        if type(actual) is not type(expected) or len(actual) != len(expected):
            raise AssertionError(f"{name}: {actual!r} has another type or length than {expected!r}")
        for index, (left, right) in enumerate(zip(actual, expected, strict=True)):
            assert_identical(left, right, name=f"{name}[{index}]")
        return
    if expected is None or isinstance(expected, int | str):
        if type(actual) is not type(expected) or actual != expected:
            raise AssertionError(f"{name}: {actual!r}, expected {expected!r}")
        return
    if not hasattr(actual, "dtype"):
        raise AssertionError(f"{name}: {actual!r}, expected an array")
    left, right = to_host(actual), to_host(expected)
    _check_metadata(name, left, right)
    places = np.argwhere(_different(left, right))
    if len(places):
        shown = ", ".join(
            f"{[int(axis) for axis in where]} is {_show(left, where)}, expected {_show(right, where)}"
            for where in places[:5]
        )
        raise AssertionError(f"{name}: {len(places)} of {left.size} entries differ; {shown}")


def assert_close(
    actual: Any,
    reference: Any,
    baseline: Any,
    *,
    floor: Any,
    name: str = "array",
    widen: float = 1.0,
    rms_factor: float = 2.0,
    reason: str = "",
) -> None:
    """Raise unless `actual` meets the float rule of :mod:`ddtree_cupy.testing.tolerance`.

    Parameters
    ----------
    actual : float array
        The result to judge.
    reference : float64 array
        The result computed in float64 throughout.
    baseline : float array
        NumPy's result in the kernel's precision, rounded to the dtype that `actual` must have.
    floor : float or array
        From `out_floor` or `lse_floor`.
    name : str
        The message begins with it.
    widen : float
        Multiplies all bounds; a value other than 1 needs a `reason`.
    rms_factor : float
        Multiplies the RMS of the baseline; 1.25 for kernels whose arithmetic is as good as that of the baseline. A
        value above 2 needs a `reason`.
    reason : str
        Why the rule is widened; part of the message.

    Raises
    ------
    AssertionError
        Shows the worst coordinates and the values there.

    Examples
    --------
    >>> one = np.ones(3, np.float32)
    >>> assert_close(one, one.astype(np.float64), one, floor=2.0**-24)
    >>> assert_close(one + np.float32(1e-3), one.astype(np.float64), one, floor=2.0**-24, name="out")
    Traceback (most recent call last):
    AssertionError: out: max error 0.001 > 5.96e-08 ...
    """
    for option, is_wider in (("widen", widen != 1.0), ("rms_factor", rms_factor > 2.0)):
        if is_wider and not reason:
            raise ValueError(f"assert_close: `{option}` needs a `reason`")
    left, exact, base = to_host(actual), to_host(reference), to_host(baseline)
    if exact.dtype != np.float64:
        raise TypeError(f"assert_close: `reference` has dtype {exact.dtype}, expected float64")
    if base.shape != exact.shape:
        raise ValueError(f"assert_close: `baseline` is {base.shape} and `reference` {exact.shape}")
    _check_metadata(name, left, base)
    _check_places(f"{name}: the baseline", base, exact)
    _check_places(name, left, exact)
    found = judge(left, exact, base, floor=floor, widen=widen, rms_factor=rms_factor)
    if found.passes:
        return
    shown = ", ".join(
        f"{list(where)} is {_show(left, where)}, reference {_show(exact, where)}, baseline {_show(base, where)}"
        for where in found.worst
    )
    note = f" (bounds times {widen:g}, rms factor {rms_factor:g}: {reason})" if reason else ""
    raise AssertionError(
        f"{name}: max error {_against(found.max_error, found.max_allowed)} allowed, "
        f"rms {_against(found.rms_error, found.rms_allowed)}, "
        f"bias {found.bias:.3g} of at most {found.bias_allowed:.3g} ulp{note}; worst {shown}"
    )


def _against(error: float, allowed: float) -> str:
    return f"{error:.3g} {'<=' if error <= allowed else '>'} {allowed:.3g}"


def _check_places(name: str, actual: npt.NDArray[Any], reference: npt.NDArray[Any]) -> None:
    """Raise unless NaN, +inf and -inf are at the same places."""
    values = actual.astype(np.float64)
    both_finite = np.isfinite(values) & np.isfinite(reference)
    same = both_finite | (values == reference) | (np.isnan(values) & np.isnan(reference))
    places = np.argwhere(~same)
    if len(places):
        where = tuple(places[0])
        raise AssertionError(
            f"{name} has inf or NaN elsewhere than the reference at {len(places)} of {values.size} entries; "
            f"{[int(axis) for axis in where]} is {_show(actual, where)}, reference {_show(reference, where)}"
        )
