"""`KernelSpec`: everything the launcher must know about one kernel, as data."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ddtree_cupy.errors import ArgumentError
from ddtree_cupy.kernels.source import expand, expand_text

Role = Literal["input", "output", "scalar"]
CTYPES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}


@dataclass(frozen=True)
class Arg:
    """One kernel argument: use `Arg.input`, `Arg.output` or `Arg.scalar`.

    `dtype` is a NumPy name, or "bfloat16". `strided` says that the kernel takes this array's strides as scalars, so any
    view is fine; without it the array must be C-contiguous. `nullable` allows None, a null pointer.
    """

    name: str
    dtype: str
    role: Role
    strided: bool = False
    nullable: bool = False

    @classmethod
    def input(cls, name: str, dtype: str, *, strided: bool = False, nullable: bool = False) -> "Arg":
        """A `const T*`."""
        return cls(name, dtype, "input", strided, nullable)

    @classmethod
    def output(cls, name: str, dtype: str, *, strided: bool = False, nullable: bool = False) -> "Arg":
        """A `T*`: written, perhaps read as well."""
        return cls(name, dtype, "output", strided, nullable)

    @classmethod
    def scalar(cls, name: str, dtype: str) -> "Arg":
        """A value; "V128" is a struct of 128 bytes, given as a NumPy array of one element of that dtype."""
        return cls(name, dtype, "scalar")

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The NumPy dtype."""
        if self.dtype == "bfloat16":
            import ml_dtypes  # here, so that importing the package pulls in NumPy only

            dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
            return dtype
        return np.dtype(self.dtype)


def ints(*names: str) -> tuple[Arg, ...]:
    """Return int32 scalars."""
    return tuple(Arg.scalar(name, "int32") for name in names)


@dataclass(frozen=True)
class KernelSpec:
    """One kernel of one source file, with its argument table.

    Parameters
    ----------
    source : str
        Path below `cuda_src`, such as `"tree_build/best_first.cu"`, or the absolute path of your own file. With
        `code`, only a name for messages.
    entry : str
        An `extern "C"` name, or a template expression such as `"attend<__nv_bfloat16, 64>"`.
    args : tuple of Arg
        In the order of the kernel's parameters. The emulator compares it with the C++ signature.
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
    >>> spec = KernelSpec(
    ...     source="tree_build/topology.cu",
    ...     entry="topology",
    ...     args=(Arg.input("parents", "int32"), Arg.output("depths", "int32"), Arg.scalar("num_nodes", "int32")),
    ... )
    >>> spec.label
    'tree_build/topology.cu: topology'
    """

    source: str
    entry: str
    args: tuple[Arg, ...]
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
        names = [arg.name for arg in self.args]
        if len(set(names)) != len(names):
            raise ArgumentError(f"{self.label}: an argument name occurs twice: {', '.join(names)}")
        for arg in self.args:
            if arg.dtype != "bfloat16":
                _ = arg.numpy_dtype  # a misspelt dtype fails here, not at the first launch
        # Specs are dictionary keys in the hot path: hash the long tuple once.
        key = (self.source, self.entry, self.args, self.code, self.defines, self.options, self.arch_specific)
        object.__setattr__(self, "_hash", hash(key))

    def __hash__(self) -> int:
        return self._hash

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
