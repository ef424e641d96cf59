"""One test body for three backends: the same NumPy inputs go to the reference, the emulated kernels and a GPU."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from ddtree_cupy import emulate
from ddtree_cupy.emulate import env
from ddtree_cupy.emulate.guard import Copies
from ddtree_cupy.errors import EmulatorError

__all__ = ["Backend"]

Array = Any


@dataclass(frozen=True)
class Backend:
    """Runs a function of the library on one backend with NumPy inputs and results.

    Parameters
    ----------
    name : {"numpy", "emulate", "cupy"}
    seed : int
        The schedule of the emulator.
    cut_sums : bool
        Whether matrix instructions of the emulator cut sums off as tensor cores do; see `emulate.active`.

    Examples
    --------
    >>> from ddtree_cupy import greedy_targets
    >>> Backend("numpy")(greedy_targets, np.array([[0.0, 2.0, 1.0]])).tolist()
    [1]
    """

    name: str
    seed: int = 0
    cut_sums: bool = False

    def __call__(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call `function` and return its result on the host; in-place changes stay on the device.

        The emulator gets copies of the arrays that end at pages which cannot be accessed, unless a sanitizer watches
        the arrays themselves.
        """
        if self.name != "emulate" or env.sanitizer():
            return self.get(self.run(function, *self.put(args), **self.put(options)))
        found: list[Array] = []

        def note(array: Array) -> Array:
            found.append(array)
            return array

        _map((args, options), note)
        copies = Copies(found, at_end=True, exact=False)
        guarded = dict(zip(map(id, found), copies.args, strict=True))
        original = dict(zip(map(id, copies.args), found, strict=True))
        args, options = _map((args, options), lambda array: guarded[id(array)])
        result = self.run(function, *args, **options)
        copies.copy_back(range(len(found)))
        if overrun := copies.overrun():
            raise EmulatorError(f"{function.__name__}: {overrun}")
        return _map(result, lambda array: original.get(id(array), array))

    def change(self, function: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, tuple[Any, ...]]:
        """Call `function`, which writes into its arguments; return its result and `args` as it left them, on the host.

        On NumPy and on the emulator they are the arrays that were given.
        """
        placed = self.put(args)
        result = self.run(function, *placed, **self.put(options))
        return self.get(result), self.get(placed)

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call `function` on arrays that are on the backend already."""
        if self.name == "emulate":
            with emulate.active(seed=self.seed, cut_sums=self.cut_sums, guard=not env.sanitizer()):
                return function(*args, **options)
        return function(*args, **options)

    def put(self, value: Any) -> Any:
        """Return `value` with every NumPy array moved to the backend, its strides kept; containers too."""
        return _map(value, _to_device({})) if self.name == "cupy" else value

    def get(self, value: Any) -> Any:
        """Return `value` with every array on the host."""
        return _map(value, lambda array: array if isinstance(array, np.ndarray) else array.get())

    def narrowed(self, value: Any) -> Any:
        """Return `value` with float64 arrays as float32 on the backends that run kernels, which take no float64."""
        if self.name == "numpy":
            return value
        return _map(value, lambda array: array.astype(np.float32) if array.dtype == np.float64 else array)

    def fill_pool(self) -> None:
        """Overwrite free GPU memory with 0xFF (NaN, -1), so that unwritten results show; elsewhere do nothing."""
        if self.name != "cupy":
            return
        import cupy

        held = [cupy.full(1 << 20, 0xFF, cupy.uint8) for _ in range(64)]
        held += [cupy.full(1 << size, 0xFF, cupy.uint8) for size in range(9, 25) for _ in range(4)]
        del held


def _map(value: Any, change: Callable[[Array], Array]) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_map(item, change) for item in value)
    if isinstance(value, dict):
        return {name: _map(item, change) for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _map(getattr(value, f.name), change) for f in fields(value)})
    if isinstance(value, np.ndarray) or type(value).__module__.partition(".")[0] == "cupy":
        return change(value)
    return value


def _to_device(buffers: dict[int, Array]) -> Callable[[Array], Array]:
    """Return a copier that keeps strides: views of one NumPy buffer become views of one CuPy buffer."""
    import cupy

    def copy(array: Array) -> Array:
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        if array.flags.c_contiguous or not owner.flags.c_contiguous:
            return cupy.asarray(array)
        if id(owner) not in buffers:
            buffers[id(owner)] = cupy.asarray(owner)
        whole = buffers[id(owner)]
        offset = array.ctypes.data - owner.ctypes.data
        return cupy.ndarray(array.shape, array.dtype, whole.data + offset, strides=array.strides)

    return copy
