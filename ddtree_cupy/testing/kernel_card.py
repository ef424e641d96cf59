"""`check_kernel`: the gates that a kernel of one's own passes through, and the card with the results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy import emulate
from ddtree_cupy._arrays import numpy_dtype
from ddtree_cupy.compile_check import nvrtc, resources
from ddtree_cupy.emulate import Function, Module
from ddtree_cupy.errors import CompileError, DTypeError, EmulatorError, UnsupportedError

Array = npt.NDArray[Any]

WIDTH = 60  # columns of a card
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}  # of the largest number expected
SANITIZERS = ("asan+ubsan", "tsan")
_FEW = 10  # examples for what takes long


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel and what it must give.

    Parameters
    ----------
    grid, block : tuple of one to three int
    args : sequence
        Arrays and numbers, as `emulate.check` takes them.
    expected : mapping of int to array
        The right contents of arguments by their place in `args`. Integers must be equal; of floats the largest error
        may be `rtol` times the largest number expected.
    shared_mem : int
        Bytes of dynamic shared memory.
    rtol : float, optional
        Default: 1e-5 for float32, 4e-3 for float16, 3e-2 for bfloat16, 1e-12 for float64.
    """

    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: Sequence[Any]
    expected: Mapping[int, Any]
    shared_mem: int = 0
    rtol: float | None = None

    def __str__(self) -> str:
        shown = [
            f"{value.dtype.name}{list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)
            for value in self.args
        ]
        return f"grid {self.grid}, block {self.block}, ({', '.join(shown)})"


@dataclass(frozen=True)
class Gate:
    """What one gate says: `ok` is None where it could not be tried."""

    name: str
    ok: bool | None
    text: str


@dataclass(frozen=True)
class Card:
    """The verdict on a kernel; `print` shows it in 60 columns."""

    kernel: str
    gates: tuple[Gate, ...] = field(default_factory=tuple)

    @property
    def ok(self) -> bool:
        """Whether no gate failed."""
        return all(gate.ok is not False for gate in self.gates)

    def __str__(self) -> str:
        lines = [f"{self.kernel}: {'passed' if self.ok else 'FAILED'}"]
        for gate in self.gates:
            sign = {True: "passed", False: "FAILED", None: "skipped"}[gate.ok]
            head = f"  {gate.name:<12}{sign:<9}"
            parts = [part for text in gate.text.splitlines() for part in wrap(text, WIDTH - len(head)) or [""]]
            lines += [f"{head if at == 0 else ' ' * len(head)}{part}".rstrip() for at, part in enumerate(parts or [""])]
        return "\n".join(lines)


def check_kernel(
    source: str | Path,
    case: Callable[[Any], Launch],
    *,
    kernel: str | None = None,
    options: Sequence[str] = (),
    examples: int = 100,
    sanitizers: Sequence[str] = SANITIZERS,
) -> Card:
    """Take a kernel of one's own through every gate: compilers, emulator, sanitizers, and a GPU if there is one.

    Parameters
    ----------
    source : str or path
        CUDA source text, or a path that ends in `.cu`.
    case : callable
        `case(draw)` returns a `Launch`; `draw(strategy)` draws its sizes with Hypothesis.
    kernel : str, optional
        Its name, where the source has several.
    options : sequence of str
        `-DNAME=VALUE`, `-Ifolder`.
    examples : int
        Launches on the emulator, each with another schedule and the guard on either side of the arrays.
    sanitizers : sequence of str
        Of `emulate.check`, each for ten launches; empty for none.

    Returns
    -------
    Card
        Of a gate that fails it shows the smallest case that Hypothesis found.

    Raises
    ------
    CompileError
        The source does not compile for the emulator.
    ArgumentError
        There is no such kernel.

    Examples
    --------
    >>> from hypothesis import strategies as st
    >>> from ddtree_cupy.testing import Launch, check_kernel
    >>> code = \'\'\'
    ... extern "C" __global__ void twice(float* x, int n) {
    ...   int i = threadIdx.x;
    ...   if (i <= n) x[i] *= 2;
    ... }\'\'\'
    >>> def case(draw):
    ...     n = draw(st.integers(1, 100))
    ...     x = np.arange(n, dtype=np.float32)
    ...     return Launch((1,), (128,), (x, n), {0: 2 * x})
    >>> card = check_kernel(code, case, sanitizers=())
    >>> [gate.ok for gate in card.gates if gate.name == "emulator"]
    [False]
    """
    module = Module(source, options)
    if kernel is None and len(module.kernels) > 1:
        raise UnsupportedError(f"check_kernel: the source has {', '.join(module.kernels)}; choose one by `kernel=`")
    function = module.get_function(kernel or module.kernels[0])
    gates = [_compiles(module.code, options), _on_emulator(function, case, examples)]
    gates += [_under_sanitizer(function, case, name) for name in sanitizers]
    gates.append(_on_gpu(function, case, options))
    return Card(function.name, tuple(gates))


def _compiles(text: str, options: Sequence[str]) -> Gate:
    """Compile for every architecture by NVRTC; say what a thread takes."""
    works, reason = nvrtc.available()
    if not works:
        return Gate("compiler", None, reason)
    archs = [arch for arch in resources.ARCHS if arch in nvrtc.supported_archs()]
    registers, spilled, shared = 0, 0, 0
    for arch in archs:
        try:
            log = nvrtc.compile_text(text, arch, options=tuple(options)).log
        except CompileError as error:
            return Gate("compiler", False, f"{arch}: {str(error).splitlines()[0]}")
        for row in resources.parse_log(log).values():
            registers, shared = max(registers, row["registers"]), max(shared, row["static_shared_bytes"])
            spilled = max(spilled, row["spill_store_bytes"])
    numbers = f"up to {registers} registers, {spilled} bytes spilled, {shared} bytes of static shared memory"
    return Gate("compiler", True, f"{archs[0]} to {archs[-1]}: {numbers}")


def _on_emulator(function: Function, case: Callable[[Any], Launch], examples: int) -> Gate:
    from hypothesis import strategies as st

    def attempt(draw: Any) -> tuple[str, str]:
        launch = case(draw)
        seed, guard = draw(st.integers(0, 63)), draw(st.sampled_from(("end", "start")))
        return f"{launch}, seed {seed}", _fault(function, launch, {"seed": seed, "guard": guard})

    return _search("emulator", attempt, examples, f"{examples} launches, any schedule, guarded on both sides")


def _under_sanitizer(function: Function, case: Callable[[Any], Launch], sanitizer: str) -> Gate:
    try:
        emulate.sanitizer_environment(sanitizer)
    except UnsupportedError as error:
        return Gate(sanitizer, None, str(error))

    def attempt(draw: Any) -> tuple[str, str]:
        launch = case(draw)
        return str(launch), _fault(function, replace(launch, expected={}), {"sanitizer": sanitizer})  # reports alone

    return _search(sanitizer, attempt, _FEW, f"{_FEW} launches, nothing reported")


def _on_gpu(function: Function, case: Callable[[Any], Launch], options: Sequence[str]) -> Gate:
    try:
        import cupy

        cupy.cuda.runtime.getDevice()
    except Exception as error:  # an import error, a missing driver
        return Gate("gpu", None, f"no GPU here ({type(error).__name__})")
    try:
        compiled = cupy.RawModule(code=function.module.code, options=tuple(options)).get_function(function.name)
    except cupy.cuda.compiler.CompileException as error:
        return Gate("gpu", False, str(error).splitlines()[0])

    def attempt(draw: Any) -> tuple[str, str]:
        launch = case(draw)
        exact = function.numbers(launch.args)
        args = [cupy.asarray(value) if isinstance(value, np.ndarray) else value for value in exact]
        compiled(launch.grid, launch.block, tuple(args), shared_mem=launch.shared_mem)
        host = [cupy.asnumpy(value) if isinstance(value, cupy.ndarray) else value for value in args]
        return str(launch), _difference(launch, host)

    return _search("gpu", attempt, _FEW, f"{_FEW} launches give the same")


def _search(name: str, attempt: Callable[[Any], tuple[str, str]], examples: int, success: str) -> Gate:
    """Try examples; on failure return the gate of the smallest one."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st
    from hypothesis.errors import Flaky

    smallest: list[str] = []

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(st.data())
    def run(data: Any) -> None:
        shown, fault = attempt(data.draw)
        if fault:
            smallest[:] = [f"{fault}\nsmallest case: {shown}"]
            raise AssertionError

    try:
        run()
    except AssertionError:
        return Gate(name, False, smallest[0])
    except Flaky:  # a race on a GPU
        return Gate(name, False, f"{smallest[0]}\nnot every time")
    return Gate(name, True, success)


def _fault(function: Function, launch: Launch, options: Mapping[str, Any]) -> str:
    """Return the error or the difference of one launch on the emulator, "" where there is none."""
    args = [value.copy() if isinstance(value, np.ndarray) else value for value in launch.args]
    try:
        emulate.check(function, launch.grid, launch.block, args, shared_mem=launch.shared_mem, **options)
    except EmulatorError as error:
        return str(error).splitlines()[0]
    return _difference(launch, args)


def _difference(launch: Launch, args: Sequence[Any]) -> str:
    """Return in words how the results differ from what is expected; "" if they do not."""
    for place, wanted in launch.expected.items():
        got, right = args[place], np.asarray(wanted)
        if not isinstance(got, np.ndarray):
            raise DTypeError(f"Launch: `expected` names argument {place}, which is not an array")
        right = np.broadcast_to(right, got.shape)
        if got.dtype.kind in "iub":
            bad = got != right
        else:
            kind = got.dtype.name
            rtol = TOLERANCE[kind] if launch.rtol is None else launch.rtol
            exact, found = right.astype(np.float64), got.astype(np.float64)
            finite = np.abs(exact[np.isfinite(exact)])
            with np.errstate(invalid="ignore"):
                near = np.abs(found - exact) <= rtol * finite.max(initial=np.finfo(numpy_dtype("float32")).tiny)
            bad = ~(near | (found == exact) | (np.isnan(found) & np.isnan(exact)))
        if bad.any():
            at = tuple(int(index) for index in np.argwhere(bad)[0])
            where = f"argument {place} at [{', '.join(map(str, at))}]"
            return f"{where} is {got[at]}, expected {right[at]}; {int(bad.sum())} of {bad.size} differ"
    return ""
