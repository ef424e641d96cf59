"""`KernelSpec`: everything the launcher must know about one kernel, as data."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ddtree_cupy.errors import CompileError
from ddtree_cupy.kernels.signature import Arg, parse_args
from ddtree_cupy.kernels.source import expand, expand_text

CTYPES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}


@dataclass(frozen=True)
class KernelSpec:
    """One kernel of one source file. Its arguments are read from the source: names, types, what is written.

    Parameters
    ----------
    source : str
        Path below `cuda_src`, such as `"tree_build/topology.cu"`, or the absolute path of your own file. With
        `code`, only a name for messages.
    entry : str
        An `extern "C"` name, or a template expression such as `"attend<__nv_bfloat16, 64>"`.
    strided, nullable : str
        Names of array arguments, separated by spaces, about which the signature cannot say: any strides are fine (the
        kernel takes them as numbers); None is fine (a null pointer).
    code : str, optional
        Source text to use in place of the file.
    defines : tuple of str
        `"NAME"` or `"NAME=VALUE"`.
    options : tuple of str
        Further compiler options.
    arch_specific : str, optional
        `"sm_90a"`: the kernel needs exactly this architecture and NVRTC 12.9 or later.
    archs : tuple of str, optional
        The architectures the compile check covers, such as a configuration made for large shared memory; default all.
    max_threads : int
        Largest block the wrapper launches.
    max_registers, max_spill_bytes : int
        Limits that the compile check holds the kernel to, on every architecture.
    shared_bytes : callable, optional
        Dynamic shared memory of a launch in bytes, from the wrapper's own sizes.
    max_shared_bytes : int
        The most static plus dynamic shared memory a legal launch takes; must fit the architectures meant.
    flush_subnormals : bool
        False for kernels whose float64 values may be subnormal; see `emulate.Module`.

    Examples
    --------
    >>> spec = KernelSpec("tree_build/topology.cu", "topology")
    >>> spec.label
    'tree_build/topology.cu: topology'
    >>> print(spec.args[0], spec.args[-1], sep=", ")
    const int32* parents, int32 W
    """

    source: str
    entry: str
    strided: str = ""
    nullable: str = ""
    code: str | None = field(default=None, repr=False)
    defines: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    arch_specific: str | None = None
    archs: tuple[str, ...] | None = None
    max_threads: int = 1024
    max_registers: int = 255
    max_spill_bytes: int = 0
    shared_bytes: Callable[..., int] | None = None
    max_shared_bytes: int = 48 * 1024
    flush_subnormals: bool = True
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        # Specs are dictionary keys in the hot path: hash the long tuple once.
        key = (self.source, self.entry, self.code, self.defines, self.options, self.arch_specific)
        object.__setattr__(self, "_hash", hash(key))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def args(self) -> tuple[Arg, ...]:
        """The parameters, in order; CompileError for one that the source does not explain."""
        macros = {name: value or "1" for name, _, value in (define.partition("=") for define in self.defines)}
        try:
            return parse_args(self.text(), self.entry, defines=macros, strided=self.strided, nullable=self.nullable)
        except CompileError as error:
            raise CompileError(f"{self.label}: {error}") from None

    @property
    def name(self) -> str:
        """Entry and defines: with `source`, what tells one spec from another in tables."""
        return " ".join((self.entry, *(f"-D{define}" for define in self.defines)))

    @property
    def label(self) -> str:
        """File and name, for messages."""
        return f"{Path(self.source).name if Path(self.source).is_absolute() else self.source}: {self.name}"

    @property
    def is_template(self) -> bool:
        """Whether `entry` is a template expression."""
        return "<" in self.entry

    @property
    def compiler_options(self) -> tuple[str, ...]:
        """`options` and `defines` in the spelling of NVRTC, C++17."""
        return ("--std=c++17", *self.options, *(f"-D{define}" for define in self.defines))

    def text(self) -> str:
        """Return the self-contained source text."""
        return expand(self.source) if self.code is None else expand_text(self.code, name=self.source)
