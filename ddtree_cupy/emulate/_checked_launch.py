"""`check`: one guarded launch of a kernel, which turns its faults into exceptions."""

import signal
from collections.abc import Sequence
from typing import Any

from ddtree_cupy._check import Checker
from ddtree_cupy.emulate import env
from ddtree_cupy.emulate._child import run_in_child
from ddtree_cupy.emulate._fault import SI_KERNEL, error_of, raise_for
from ddtree_cupy.emulate._module import Function
from ddtree_cupy.emulate._native import SIGNAL, Stopped
from ddtree_cupy.emulate._state import checked_seed, current_seed
from ddtree_cupy.emulate.guard import Copies
from ddtree_cupy.errors import ArgumentError, EmulatorError

GUARDS = ("end", "start", "none")
SANITIZERS = tuple(filter(None, env.SANITIZERS))
_NOWHERE, _END, _ALIGNED_END, _START = range(4)  # emu_guard of emu_runtime.h


def check(
    kernel: Function,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    args: Sequence[Any],
    *,
    shared_mem: int = 0,
    seed: int | None = None,
    guard: str = "end",
    max_steps: int | None = None,
    timeout: float | None = 10.0,
    sanitizer: str | None = None,
    strided: bool = False,
) -> None:
    """Run a kernel once on guarded copies of its arrays; raise an exception for its first fault.

    Whatever the kernel does, Python goes on: wild pointers, endless loops and traps become an `EmulatorError` with
    block, thread and line, so that Hypothesis can shrink them.

    Parameters
    ----------
    kernel : Function
        From `Module(...).get_function(...)`.
    grid, block : tuple of one to three int
    args : sequence
        NumPy arrays (or None, a null pointer) for pointers; for numbers NumPy scalars of the exact type, or Python
        numbers that fit it.
    shared_mem : int
        Bytes of dynamic shared memory.
    seed : int, optional
        Schedule, as in `active`; default: that of the enclosing `active` block, else 0.
    guard : {"end", "start", "none"}
        On which side of every array, and of dynamic shared memory, lies a page that cannot be accessed. On the other
        side writes are found when the launch has ended, without their line.
    max_steps : int, optional
        How many basic blocks all threads together may run. Unlike `timeout` it ends a launch at the same place every
        time; the module is compiled a second time, to count them.
    timeout : float, optional
        Seconds of CPU time; with `sanitizer` of time.
    sanitizer : {"asan", "ubsan", "asan+ubsan", "tsan"}, optional
        Run in a child process under a sanitizer (g++), which takes the place of the guard: "asan" sees every access
        outside of an array and of shared memory, "ubsan" undefined behaviour, "tsan" data races. The first report ends
        the launch; then nothing is written to the arrays.
    strided : bool
        Accept arrays that are not C-contiguous.

    Raises
    ------
    EmulatorError
        The kernel made a fault. What it had written until then is in the arrays.
    DTypeError, LayoutError, ArgumentError
        The arguments do not fit the kernel's own C++ signature, or an option is not one of those above.
    UnsupportedError
        The compiler has no such sanitizer.

    Notes
    -----
    Arrays that share memory are copied as one piece, so that they share it in the copy. An array whose last byte is not
    the last of 16 is first copied to an address at which it ends at the protected page; if the kernel then asks for an
    alignment that the array has lost, it runs again with addresses as aligned as the original ones. So a kernel with
    vector loads may read up to 15 bytes behind such an array unseen.

    Examples
    --------
    >>> import numpy as np
    >>> from ddtree_cupy import emulate
    >>> code = \'\'\'
    ... extern "C" __global__ void scale(float* x, int n) {
    ...   int i = blockIdx.x * blockDim.x + threadIdx.x;
    ...   if (i <= n) x[i] *= 2;
    ... }\'\'\'
    >>> scale = emulate.Module(code).get_function("scale")
    >>> emulate.check(scale, (1,), (32,), (np.ones(5, np.float32), 5))
    Traceback (most recent call last):
    ddtree_cupy.errors.EmulatorError: scale: block (0,0,0) thread (5,0,0): kernel.cu:4: reads element 5 ...
    """
    options = Checker("emulate.check")
    options.kind("kernel", kernel, Function)
    options.choice("guard", guard, GUARDS)
    if max_steps is not None:
        options.integer("max_steps", max_steps, low=1, high=2**63)
    if timeout is not None:
        options.real("timeout", timeout, above=0.0)
    schedule = None if seed is None else checked_seed("emulate.check", seed)
    values = kernel.numbers(args)
    if sanitizer is not None:
        options.choice("sanitizer", sanitizer, SANITIZERS)
        if max_steps is not None:
            raise ArgumentError("emulate.check: `max_steps` goes without `sanitizer`; use `timeout`")
        kernel.checked(grid, block, values, shared_mem, strided)
        launch = {
            "module": kernel.module.parts,
            "kernel": kernel.name,
            "shape": (grid, block),
            "shared_mem": shared_mem,
            "seed": current_seed() if schedule is None else schedule,
        }
        outputs = _outputs_of(kernel)
        return run_in_child(sanitizer, kernel.name, launch, values, outputs, timeout)
    limits = {"max_steps": max_steps or 0, "timeout_ns": int(1e9 * (timeout or 0))}
    run = _Run(kernel, grid, block, values, shared_mem, schedule, strided, limits)
    if guard == "none" or env.sanitizer():  # sanitizers know the arrays' own memory
        run.plain()
    else:
        run.guarded(at_end=guard == "end")


class _Run:
    """What all tries of one launch have in common."""

    def __init__(
        self,
        kernel: Function,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        values: tuple[Any, ...],
        shared_mem: int,
        seed: int | None,
        strided: bool,
        limits: dict[str, int],
    ) -> None:
        self.kernel, self.values, self.limits = kernel, values, limits
        self._shape, self._rest = (grid, block), (shared_mem, seed, strided)
        self._outputs = _outputs_of(kernel)

    def guarded(self, *, at_end: bool) -> None:
        """Launch on copies; again with aligned ones where the first were not and that may be what failed."""
        copies, stopped = self._on_copies(at_end, exact=True)
        if stopped and not _is_certain(stopped):
            copies, stopped = self._on_copies(at_end, exact=False)
        copies.copy_back(self._outputs)
        if stopped:
            self._raise(stopped, copies.args)
        if found := copies.overrun():
            other = "start" if at_end else "end"
            raise EmulatorError(f"{self.kernel.name}: {found}; guard={other!r} or sanitizer='asan' names the line")

    def _on_copies(self, at_end: bool, exact: bool) -> tuple[Copies, Stopped | None]:
        copies = Copies(self.values, at_end=at_end, exact=exact)
        try:
            self._launch(copies.args, (_END if exact else _ALIGNED_END) if at_end else _START)
        except Stopped as stopped:
            return copies, stopped
        return copies, None

    def plain(self) -> None:
        """Launch on the arrays themselves."""
        try:
            self._launch(self.values, _NOWHERE)
        except Stopped as stopped:
            self._raise(stopped, self.values)

    def _launch(self, args: Sequence[Any], guard_shared: int) -> None:
        shared_mem, seed, strided = self._rest
        settings = {"guard_shared": guard_shared, **self.limits}
        self.kernel._launch(*self._shape, tuple(args), shared_mem, seed, strided, settings)

    def _raise(self, stopped: Stopped, args: Sequence[Any]) -> None:
        raise_for(error_of(self.kernel.name, stopped, args, self.limits))


def _outputs_of(kernel: Function) -> list[int]:
    return [i for i, parameter in enumerate(kernel.parameters) if parameter.is_pointer and not parameter.is_const]


def _is_certain(stopped: Stopped) -> bool:
    """Whether a launch would have been stopped with aligned addresses, too."""
    fault = stopped.fault
    if fault.kind == SIGNAL:  # an address that cannot be accessed; of a misaligned one the kernel does not tell
        return bool(fault.signal in (signal.SIGSEGV, signal.SIGBUS) and fault.code != SI_KERNEL)
    return bool(fault.kind)
