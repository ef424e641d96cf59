"""A plan: which kernels a call launches, with what sizes, and the arrays it needs for that."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

from ddtree_cupy._overlap import address_of
from ddtree_cupy.kernels.registry import backend_module, current_key, get_kernel
from ddtree_cupy.kernels.spec import KernelSpec
from ddtree_cupy.kernels.structs import StructLayout
from ddtree_cupy.kernels.workspace import Scratch, Sizes, empty, require_given


class Step(NamedTuple):
    """One launch of a plan.

    `args` holds what this launch alone takes; `names` says which array of the plan a parameter means, where that has
    another name. Of a struct's member that holds addresses it gives a tuple of names.
    """

    spec: KernelSpec
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int = 0
    args: Mapping[str, Any] | None = None
    names: Mapping[str, str | tuple[str, ...]] | None = None


@dataclass(frozen=True)
class Plan:
    """What a call launches, by its sizes alone: the same plan serves all calls of equal sizes.

    Kernels take their arguments by name: from `args`, the call's own inputs, `results` and `scratch`.

    Attributes
    ----------
    steps : tuple of Step
    results, scratch : mapping of name to (shape, dtype)
    args : mapping
        Numbers.
    resident : mapping of name to NumPy array
        What kernels find in device memory, where it is put before the first launch and stays.
    """

    steps: tuple[Step, ...]
    results: Sizes = field(default_factory=dict)
    scratch: Sizes = field(default_factory=dict)
    args: Mapping[str, Any] = field(default_factory=dict)
    resident: Mapping[str, Any] = field(default_factory=dict)
    _kept: dict[Any, list["_Launch"]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def space(self) -> Scratch:
        """The scratch of the plan in one buffer."""
        return Scratch(self.scratch)

    def launches(self, backend: str, values: Mapping[str, Any]) -> list[Callable[[], None]]:
        """Return one function for each launch, all arguments in place."""
        return [partial(launch.start, *launch.arguments(values)) for launch in self._prepared(backend)]

    def run(self, backend: str, values: Mapping[str, Any]) -> None:
        """Launch everything; `values` holds inputs, results and scratch, which the caller has checked."""
        try:
            for launch in self._prepared(backend):
                launch.start(*launch.arguments(values))
        except BaseException:  # of the emulator: what is resident may be left half-way
            self._kept.clear()
            raise

    def allocate_and_run(self, function: str, backend: str, **inputs: Any) -> dict[str, Any]:
        """Run with fresh arrays; return the results by name."""
        if self.results:
            require_given(function, backend, out=None)
        results = {name: empty(backend, shape, dtype) for name, (shape, dtype) in self.results.items()}
        self.run(backend, {**inputs, **results, **self.space.cut(function, backend, None)})
        return results

    def _prepared(self, backend: str) -> list["_Launch"]:
        key = current_key(backend)
        if key not in self._kept:
            steps = [step for step in self.steps if 0 not in step.grid]
            resident = backend_module(backend).resident(self.resident) if steps and self.resident else {}
            self._kept[key] = [_Launch(step, {**self.args, **resident}, backend) for step in steps]
        return self._kept[key]


class _Launch:
    """A step with its kernel, numbers converted once; what calls bring is put in by name."""

    def __init__(self, step: Step, args: Mapping[str, Any], backend: str) -> None:
        kernel = get_kernel(step.spec, backend)
        self.start = kernel.compiled.launch
        self._step, self._structs = step, kernel.structs
        constants, names = {**args, **(step.args or {})}, step.names or {}
        self._names = names
        self._template: list[Any] = [None] * len(kernel.converters)
        self._open: list[tuple[int, Any, Callable[[Any], Any] | None]] = []  # place, name of the value, converter
        for place, (name, convert) in enumerate(kernel.converters):
            if name in constants:
                value = constants[name]
                self._template[place] = value if convert is None else convert(value)
            else:
                self._open.append((place, names.get(name, name), convert))
        self._constants = constants

    def arguments(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return what `start` takes: grid, block, the kernel's arguments, and dynamic shared memory in bytes."""
        args = self._template.copy()
        for place, name, convert in self._open:
            if name in values:
                value = values[name]
                args[place] = value if convert is None else convert(value)
            else:  # a struct, of which the call brings the members
                args[place] = self._packed(self._structs[name], values)
        step = self._step
        return step.grid, step.block, tuple(args), step.shared_bytes

    def _packed(self, layout: StructLayout, values: Mapping[str, Any]) -> Any:
        members = {}
        for member in layout.fields:
            given = self._names.get(member.name, member.name)
            if isinstance(given, tuple):
                addresses = [address_of(values[name]) for name in given]
                members[member.name] = addresses + [0] * (member.count - len(addresses))
            else:
                members[member.name] = values[given] if given in values else self._constants[given]
        return layout.pack(**members)
