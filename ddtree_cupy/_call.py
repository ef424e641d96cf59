"""The one frame of the public functions: check, batch, choose the backend, run, deliver.

A public function hands its arguments to a *preparation*, which fills in a `Call`: it checks the arguments, and leaves
either the reference to run, or a plan of kernels and their inputs. The frame does what is common to all of them.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np

from ddtree_cupy import emulate
from ddtree_cupy._alike import PassedCalls
from ddtree_cupy._arrays import INT32, LIBRARIES, as_array, as_int32, shares_memory
from ddtree_cupy._check import Checker, deliver_arrays, dtype_name
from ddtree_cupy._overlap import bounds_of
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError
from ddtree_cupy.kernels.plan import Plan
from ddtree_cupy.kernels.workspace import empty, require_given

Array = Any
Function = TypeVar("Function", bound=Callable[..., Any])
NUMBERS = (int, float, str, np.generic)  # one value for all requests, or what can be none
_PREPARATIONS: dict[Callable[..., Any], Callable[..., None]] = {}
_PASSED = PassedCalls()
_OF_THE_FRAME = ("out", "workspace", "checked")  # arguments that preparations do not see


def backend_of(check: Checker, **arrays: Array) -> str:
    """Return "numpy" (the reference), "emulate" (NumPy arrays inside `emulate.active()`) or "cupy"."""
    library = check.backend(**arrays)
    return "emulate" if library == "numpy" and emulate.is_active() else library


class Form:
    """How a function hands over its results: one array, a tuple of named ones, or a container of them.

    Parameters
    ----------
    *names : str
        Default: one array.
    kind : type, optional
        The container whose fields they are.
    """

    def __init__(self, *names: str, kind: Any = None) -> None:
        self.names = tuple(field.name for field in fields(kind)) if kind else names
        self.kind = kind

    def wrap(self, arrays: Sequence[Array]) -> Any:
        """Return what the caller gets."""
        if self.kind is not None:
            return self.kind(*arrays)
        return tuple(arrays) if self.names else arrays[0]

    def arrays_of(self, function: str, out: Any) -> dict[str, Array]:
        """Return the arrays of `out` by their names in messages."""
        if self.kind is not None:
            if not isinstance(out, self.kind):
                raise DTypeError(f"{function}: `out` is {type(out).__name__}, expected {self.kind.__name__}")
            for name in out.copied:
                raise DTypeError(
                    f"{function}: `out.{name}` is a copy that {self.kind.__name__} made of what it was given, expected "
                    f"an array of its dtype, which this call writes"
                )
            return {f"out.{name}": getattr(out, name) for name in self.names}
        if not self.names:
            return {"out": out}
        if not isinstance(out, tuple | list) or len(out) != len(self.names):
            raise ShapeError(
                f"{function}: `out` is {type(out).__name__}, expected a tuple of {len(self.names)} arrays: "
                f"{', '.join(self.names)}"
            )
        return {f"out.{name}": array for name, array in zip(self.names, out, strict=True)}

    def parts(self, result: Any) -> Sequence[Array]:
        """Return the arrays of a result, in the order of `wrap`."""
        if self.kind is not None:
            return [getattr(result, name) for name in self.names]
        return result if self.names else [result]

    def returned(self, out: Any, arrays: Sequence[Array]) -> Any:
        """Return what the caller gets when kernels have written `arrays`, which are those of `out` if that is given."""
        if out is not None or not arrays:
            return out
        return self.wrap(arrays)


class Call:
    """One call of a public function.

    Attributes
    ----------
    check : Checker
    backend : "numpy" (the reference), "emulate" or "cupy"
    is_batched : bool
        Whether the caller's arrays have a request axis; see `batch`.
    is_checked : bool
        Whether the caller wants checks.
    checks : bool
        Whether the preparation checks metadata: always for the reference, and not where a call alike has passed.
    form : Form
    reference : callable, optional
        Returns the result, batched; set for "numpy".
    plan : Plan, optional
        Set for the other backends, with `inputs`: the arguments of its kernels by name, batched.
    read, written : mapping of str to Any
        Arrays and containers that kernels read, and those that they write beside `out`; names are for messages.
    in_place : collection of pairs of names
        An array of `out` that may be one of the arrays read.
    copied : list of str
        Arguments of which this call reads a copy, since they were lists or integers of another dtype.
    """

    def __init__(self, function: str, checked: bool = True, out: Any = None, has_passed: bool = False) -> None:
        self.check = Checker(function)
        self.out = out
        self.is_checked, self._checks_metadata = checked, checked and not has_passed
        self.backend, self.checks, self.is_batched = "numpy", True, True
        self.form = Form()
        self._first: tuple[str, Array] = ("", None)
        self.reference: Callable[[], Any] | None = None
        self.plan: Plan | None = None
        self.inputs: Mapping[str, Any] = {}
        self.read: Mapping[str, Any] = {}
        self.written: Mapping[str, Any] = {}
        self.in_place: Collection[tuple[str, str]] = ()
        self.copied: list[str] = []

    def array(self, name: str, value: Any) -> Array:
        """Return numbers in any form as an array; see `as_array`."""
        if type(value) in LIBRARIES:
            return value
        array = as_array(self.check.function, name, value)
        if not shares_memory(value):
            self.copied.append(name)
        return array

    def int32(self, name: str, value: Any) -> Array:
        """Return integers in any form as an array; on the host it is int32, cast after a check of each value."""
        array = self.array(name, value)
        if not isinstance(array, np.ndarray) or array.dtype is INT32:
            return array
        cast = as_int32(self.check.function, name, array)
        if cast is not array:
            self.copied.append(name)
        return cast

    def per_request(self, name: str, value: Any, low: int, high: int) -> int | Array:
        """Return an integer in low..high for all requests, or an int32 array with one for each, of values not read."""
        if value is None or isinstance(value, NUMBERS):
            return self.check.integer(name, value, low=low, high=high)
        array = self.int32(name, value)
        if self.checks:
            self.require_library(name, array)
            self.check.array(name, array, self.axes(), ("int32",), contiguous=self.backend != "numpy")
        return array

    def choose_backend(self, **arrays: Array) -> bool:
        """Set the backend from the library of the arrays (None skipped); return whether kernels run."""
        if not self._checks_metadata:
            arrays = dict([next(iter(arrays.items()))])
        self._first = next((name, array) for name, array in arrays.items() if array is not None)
        self.backend = backend_of(self.check, **arrays)
        self.checks = self._checks_metadata or self.backend == "numpy"
        return self.backend != "numpy"

    def require_library(self, name: str, array: Array) -> None:
        """Raise unless another array is of the library, and on the device, of those that chose the backend."""
        self.check.backend(**dict([self._first, (name, array)]))

    @property
    def device(self) -> int:
        """The number of the GPU; -1 on the host."""
        return int(self._first[1].data.device_id) if self.backend == "cupy" else -1

    def axes(self, *names: str) -> tuple[str, ...]:
        """Return axis names, the request axis first where the call has one."""
        return ("batch", *names) if self.is_batched else names

    def batch(self, *values: Any) -> Any:
        """Return arrays and containers with a request axis; None and numbers, and all that kernels take, as they are.

        Kernels need addresses, sizes and strides alone, which `batched_shape` and `batched_strides` give at less cost.
        """
        if not self.is_batched and self.backend == "numpy":
            values = tuple(_with_batch(value) for value in values)
        return values if len(values) > 1 else values[0]

    def finish(self, workspace: Array | None = None) -> Any:
        """Run the call and deliver its results, into `out` where it is given."""
        if self.plan is None:
            assert self.reference is not None, "a preparation leaves a reference or a plan"
            result = self.reference()
            return self.deliver(result if self.is_batched else _without_batch(result), self.out)
        results, values = self._arrays(workspace)
        self.plan.run(self.backend, values)
        return self.form.returned(self.out, list(results.values()))

    def bind(self, workspace: Array | None = None) -> "tuple[Any, list[Callable[[], None]], Mapping[str, Any]]":
        """Return the results of a call of kernels, its launches, and what must live as long as these are used."""
        if self.plan is None:
            raise ArgumentError(f"bind: {self.check.function} on NumPy arrays runs no kernel; call it as it is")
        for name in self.copied:
            raise DTypeError(
                f"bind: `{name}` would be copied once, so that later changes to it are not seen; expected an array "
                f"that {self.check.function} takes as it is"
            )
        results, values = self._arrays(workspace)
        returned = self.form.returned(self.out, list(results.values()))
        return returned, self.plan.launches(self.backend, values), values

    def _arrays(self, workspace: Array | None) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return the results, and with inputs and scratch all that kernels take, by their names there."""
        assert self.plan is not None
        given = None if self.out is None else self.form.arrays_of(self.check.function, self.out)
        results = self._results(given)
        if self.is_checked:
            written = {**(given or {}), "workspace": workspace, **self.written}
            known = bounds_of(self.out) if self.form.kind and given else {}
            self.check.separate(written, self.read, self.in_place, known)
        scratch = self.plan.space.cut(self.check.function, self.backend, workspace, checked=self.is_checked)
        return results, {**self.inputs, **results, **scratch}

    def _results(self, given: Mapping[str, Array] | None) -> dict[str, Array]:
        """Return the arrays to write by their names in kernels."""
        assert self.plan is not None
        function, wanted = self.check.function, self.plan.results
        first = 0 if self.is_batched else 1  # of the axes that results have
        if given is None:
            if wanted:
                require_given(function, self.backend, out=None)
            return {name: empty(self.backend, shape[first:], dtype) for name, (shape, dtype) in wanted.items()}
        if self._checks_metadata:
            for (label, array), (_, dtype) in zip(given.items(), wanted.values(), strict=True):
                if array is None:
                    raise DTypeError(f"{function}: `{label}` is None, expected a {np.dtype(dtype).name} array")
            self.check.backend(**dict([self._first]), **given)
            for (label, array), (shape, dtype) in zip(given.items(), wanted.values(), strict=True):
                dtypes = (dtype_name(np.dtype(dtype)),)
                self.check.array(label, array, shape[first:], dtypes, contiguous=True, writable=True)
        return dict(zip(wanted, given.values(), strict=True))

    def deliver(self, result: Any, out: Any) -> Any:
        """Return the reference's result, or copy it into `out` (all arrays checked first) and return `out`."""
        if out is None:
            return result
        function = self.check.function
        targets = self.form.arrays_of(function, out)
        for label, target in targets.items():
            self.require_library(label, target)
        named = dict(zip(targets, self.form.parts(result), strict=True))
        deliver_arrays(function, named, list(targets.values()))
        return self.form.returned(out, list(targets.values()))


def _with_batch(value: Any) -> Any:
    if hasattr(value, "with_batch"):
        return value.with_batch()
    return value[None] if hasattr(value, "shape") else value


def _without_batch(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_without_batch(item) for item in value)
    if hasattr(value, "without_batch"):
        return value.without_batch()
    return value[0, ...] if isinstance(value, np.ndarray) else value


def prepared_by(prepare: Callable[..., None]) -> Callable[[Function], Function]:
    """Name the preparation of a public function: `prepare(call, *args, **options)`, without `out` and the like."""

    def register(function: Function) -> Function:
        _PREPARATIONS[function] = prepare
        return function

    return register


def run(
    function: Callable[..., Any],
    *args: Any,
    out: Any = None,
    workspace: Array | None = None,
    checked: bool = True,
    **options: Any,
) -> Any:
    """Prepare and finish one call of a public function."""
    key = _PASSED.key_of(function, args, options, out) if checked else None
    call = Call(function.__name__, checked, out, has_passed=key in _PASSED)
    _PREPARATIONS[function](call, *args, **options)
    result = call.finish(workspace)
    if key is not None and call.checks:
        _PASSED.add(key)
    return result


def workspace_bytes(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> int:
    """Return the bytes of `workspace` that a call of a public function needs; 0 on NumPy.

    Parameters
    ----------
    function : callable
        One of this library's, such as `tree_attention`.
    *args, **kwargs
        Its arguments; of the arrays only library, shapes, dtypes and strides matter, for `commit_kv` addresses too.

    Returns
    -------
    int
        Pass a uint8 array of at least this size; needed while a CUDA graph is captured.

    Raises
    ------
    ArgumentError
        `function` is not one that runs kernels. Bad arguments raise what the function itself raises.

    Examples
    --------
    >>> from ddtree_cupy import top_candidates
    >>> workspace_bytes(top_candidates, np.zeros((15, 1000), np.float32), 64)
    0
    """
    call = prepared("workspace_bytes", function, args, kwargs)
    return 0 if call.plan is None else call.plan.space.nbytes


def prepared(caller: str, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Return a call that has gone through its preparation; ArgumentError for a function that has none."""
    prepare = _PREPARATIONS.get(inspect.unwrap(function)) if callable(function) else None
    if prepare is None:
        known = ", ".join(known.__name__ for known in _PREPARATIONS)
        raise ArgumentError(f"{caller}: `function` is {function!r}, expected one of {known}")
    call = Call(function.__name__, kwargs.get("checked", True), kwargs.get("out"))
    prepare(call, *args, **{name: value for name, value in kwargs.items() if name not in _OF_THE_FRAME})
    return call
