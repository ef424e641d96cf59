"""`Module`: a CUDA source compiled for the CPU, with the interface of `cupy.RawModule`."""

import ctypes
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddtree_cupy.emulate._arguments import Parameter, from_numbers, pack, parameters_of
from ddtree_cupy.emulate._build import build, preprocessed
from ddtree_cupy.emulate._fault import error_of, raise_for
from ddtree_cupy.emulate._native import NativeKernel, NativeModule, Stopped
from ddtree_cupy.emulate._options import architecture, compiler_options, joined
from ddtree_cupy.emulate._refusals import refusal_in
from ddtree_cupy.emulate._state import checked_seed, current_seed, cuts_sums
from ddtree_cupy.emulate._symbols import static_shared_bytes, variables
from ddtree_cupy.emulate._translate import hides_kernels, kernel_names, shared_alignment, translate
from ddtree_cupy.errors import ArgumentError, CompileError, UnsupportedError
from ddtree_cupy.kernels.source import expand, expand_text

# The most dynamic shared memory any current GPU grants one block (sm_90, sm_100).
MAX_SHARED_BYTES = 232_448
# The most static shared memory that the CUDA compiler grants one kernel, on any GPU.
MAX_STATIC_SHARED_BYTES = 49_152


class Module:
    """Compile a CUDA source with the C++ compiler and run its kernels on the CPU.

    Parameters
    ----------
    code_or_path : str or path
        CUDA source text, or a path that ends in `.cu` or `.cuh`. Includes in quotes are looked up beside the file, in
        the folders of `-I`, and in the library's own `cuda_src`.
    options : sequence of str
        `-DNAME=VALUE`, `-UNAME` and `-Ifolder` reach the compiler, and `-arch=sm_80` sets `__CUDA_ARCH__` (without it
        900); options that mean something only to NVRTC (`-std=...`, `--use_fast_math`, ...) are ignored.
    name_expressions : sequence of str
        Template instances, such as `"scale<float, 4>"`. Kernels declared `extern "C"` need none.
    strict : bool
        Report faults that some GPUs tolerate: a `__syncthreads` after some threads of the block left, different call
        sites that meet in one barrier, a named barrier that is incomplete when the block ends, masks with absent lanes.
    flush_subnormals : bool
        Treat subnormal floats as zero while a kernel runs, as CuPy's `-ftz=true` does. The CPU has one switch for
        both widths, so float64 subnormals are flushed too, which a GPU never does; pass False for a kernel whose
        float64 values may be that small (below 2.2e-308).

    Raises
    ------
    CompileError
        The source does not compile (the message starts with the file and line of the first error, or of a feature that
        the emulator has not, with what to use instead), or a function
        declares more static shared memory than the 48 KiB that CUDA allows (checked where `objdump` is installed).
    UnsupportedError
        There is no compiler, or the system is not Linux.

    Examples
    --------
    >>> import numpy as np
    >>> from ddtree_cupy import emulate
    >>> code = '''
    ... extern "C" __global__ void twice(const float* x, float* y, int n) {
    ...   int i = blockIdx.x * blockDim.x + threadIdx.x;
    ...   if (i < n) y[i] = 2.0f * x[i];
    ... }'''
    >>> x, y = np.arange(5, dtype=np.float32), np.zeros(5, np.float32)
    >>> twice = emulate.Module(code).get_function("twice")
    >>> twice((2,), (4,), (x, y, np.int32(5)))
    >>> y
    array([0., 2., 4., 6., 8.], dtype=float32)
    """

    def __init__(
        self,
        code_or_path: str | Path,
        options: Sequence[str] = (),
        name_expressions: Sequence[str] = (),
        *,
        strict: bool = True,
        flush_subnormals: bool = True,
    ) -> None:
        options = joined(options)
        folders = [Path(option[2:]) for option in compiler_options(options) if option.startswith("-I")]
        if isinstance(code_or_path, Path) or _is_path(code_or_path):
            path = Path(code_or_path)
            code = expand(path.resolve() if path.exists() else str(path), folders=folders)
            self.name = path.name
        else:
            code, self.name = expand_text(code_or_path, folders=folders), "kernel.cu"
        self.strict = strict
        self.flush_subnormals = flush_subnormals
        self.code = code
        self._options = (*compiler_options(options), *architecture(options))
        seen = preprocessed(code, self._options) if hides_kernels(code) else code
        names = list(dict.fromkeys([*name_expressions, *kernel_names(seen)]))
        self._shared_alignment = shared_alignment(code)
        self._text = translate(code, names, name=self.name)
        try:
            self._load()
        except CompileError as error:
            if reason := refusal_in(code):
                raise CompileError(f"{reason}\n{error}") from None
            raise

    def _load(self) -> None:
        library = build(self._text, self._options)
        self._native = NativeModule(library)
        if self._native.static_bytes > MAX_STATIC_SHARED_BYTES:  # of all kernels together
            _check_static_shared(self.name, static_shared_bytes(library))

    def get_global(self, name: str, dtype: Any = np.uint8) -> Any:
        """Return a `__device__` or `__constant__` variable as an array over its memory.

        Parameters
        ----------
        name : str
            As it is declared, without namespaces.
        dtype : data-type
            Of its elements. `cupy.RawModule.get_global` returns a pointer, which knows no more than the bytes here.

        Returns
        -------
        numpy.ndarray, shape (n,)
            Writes are seen by later launches, and kernels write to it.

        Raises
        ------
        ArgumentError
            There is no such variable, or its bytes are not a whole number of elements.

        Examples
        --------
        >>> module = Module('__constant__ float c[2]; extern "C" __global__ void k(float* x) { *x = c[0] + c[1]; }')
        >>> module.get_global("c", np.float32)[:] = 3, 4
        >>> x = np.zeros(1, np.float32)
        >>> module.get_function("k")((1,), (1,), (x,))
        >>> x
        array([7.], dtype=float32)
        """
        known = variables(self._native.path)
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise ArgumentError(f"{self.name} has no variable {name!r}; it has {listed}")
        offset, nbytes = known[name]
        wanted = np.dtype(dtype)
        if nbytes % wanted.itemsize:
            raise ArgumentError(f"{self.name}: {name!r} has {nbytes} bytes, not a whole number of {wanted.name}")
        memory: Any = (ctypes.c_uint8 * nbytes).from_address(self._native.base + offset)
        return np.frombuffer(memory, wanted)  # the library stays loaded as long as the process

    @property
    def parts(self) -> tuple[Any, ...]:
        """What `rebuilt` needs to make the same module in another process."""
        return self.name, self._text, self._options, self._shared_alignment, self.strict, self.flush_subnormals

    @classmethod
    def rebuilt(cls, *parts: Any) -> "Module":
        """Return the module that has these parts."""
        module = object.__new__(cls)
        (
            module.name,
            module._text,
            module._options,
            module._shared_alignment,
            module.strict,
            module.flush_subnormals,
        ) = parts
        module._load()
        return module

    @functools.cached_property
    def _counting(self) -> NativeModule:
        """The module compiled so that it counts basic blocks."""
        return NativeModule(build(self._text, self._options, counts_steps=True))

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names that `get_function` takes."""
        return tuple(self._native.kernels)

    def get_function(self, name: str) -> "Function":
        """Return the kernel with this `extern "C"` name or name expression."""
        if name not in self._native.kernels:
            raise ArgumentError(f"{self.name} has no kernel {name!r}; it has {', '.join(self.kernels)}")
        return Function(self, name, self._native.kernels[name])


class Function:
    """One kernel of a `Module`."""

    def __init__(self, module: Module, name: str, kernel: NativeKernel) -> None:
        self.module, self.name, self._kernel = module, name, kernel
        self.parameters: tuple[Parameter, ...] = parameters_of(kernel)
        self.last_switches = 0

    def __repr__(self) -> str:
        return f"Function({self.name}: {', '.join(map(str, self.parameters))})"

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        shared_mem: int = 0,
        seed: int | None = None,
        *,
        strided: bool = False,
    ) -> None:
        """Run the kernel; it has finished on return.

        Parameters
        ----------
        grid, block : tuple of one to three int
            A grid with a zero does nothing.
        args : sequence
            NumPy arrays (or None, a null pointer) for pointers, NumPy scalars of the exact type for the rest.
        shared_mem : int
            Bytes of dynamic shared memory. The kernel gets exactly that many, and their address has exactly the
            largest alignment that a declaration in the module asks for (16 bytes at least).
        seed : int, optional
            Schedule, as in `active`; default: that of the enclosing `active` block, else 0.
        strided : bool
            Accept arrays that are not C-contiguous.

        Raises
        ------
        DTypeError, LayoutError, ArgumentError
            The arguments do not fit the kernel's own C++ signature.
        EmulatorError
            The kernel made a fault; the message has block, thread and source line.
        """
        schedule = None if seed is None else checked_seed(self.name, seed)
        try:
            self._launch(grid, block, tuple(args), shared_mem, schedule, strided, {})
        except Stopped as stopped:
            raise_for(error_of(self.name, stopped, args, {}))

    def numbers(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return arguments with Python numbers as NumPy scalars of the types that the kernel takes."""
        return from_numbers(self.name, self.parameters, tuple(args))

    def checked(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], shared_mem: int, strided: bool
    ) -> tuple[tuple[int, int, int], tuple[int, int, int], Any, Any]:
        """Return grid and block with three sizes, and what `pack` returns; raise for what does not fit the kernel."""
        sizes, threads = _dimensions("grid", grid), _dimensions("block", block)
        if not isinstance(shared_mem, int | np.integer) or not 0 <= shared_mem <= MAX_SHARED_BYTES:
            raise UnsupportedError(f"{self.name}: {shared_mem} bytes of shared memory, at most {MAX_SHARED_BYTES}")
        return sizes, threads, *pack(self.name, self.parameters, args, strided=strided)

    def _launch(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        shared_mem: int,
        seed: int | None,
        strided: bool,
        settings: Mapping[str, int],
    ) -> None:
        """Check everything and run; raise `Stopped` for a fault. `settings` are further fields of `_native.Launch`."""
        sizes, threads, pointers, keep = self.checked(grid, block, args, shared_mem, strided)
        if 0 in sizes:
            return
        module = self.module
        native = module._counting if settings.get("max_steps") else module._native
        self.last_switches = native.launch(
            native.kernels[self.name],
            sizes,
            threads,
            shared_mem,
            pointers,
            shared_alignment=module._shared_alignment,
            seed=current_seed() if seed is None else seed,
            strict=module.strict,
            flush_subnormals=module.flush_subnormals,
            cut_sums=cuts_sums(),
            **settings,
        ).switches
        del keep


def _check_static_shared(file: str, bytes_of: dict[str, dict[str, int]]) -> None:
    for function, objects in bytes_of.items():
        if sum(objects.values()) > MAX_STATIC_SHARED_BYTES:
            listed = ", ".join(f"`{name}` {size:,}" for name, size in sorted(objects.items()))
            raise CompileError(
                f"{file}: error: `{function}` declares {sum(objects.values()):,} bytes of static shared memory "
                f"({listed}), CUDA allows {MAX_STATIC_SHARED_BYTES:,} per kernel; use dynamic shared memory "
                "(`extern __shared__`) for more"
            )


def _dimensions(name: str, given: tuple[int, ...]) -> tuple[int, int, int]:
    if isinstance(given, tuple | list) and 1 <= len(given) <= 3:
        sizes = (*given, 1, 1)
        if all(isinstance(size, int | np.integer) and 0 <= size < 2**32 for size in sizes):
            return int(sizes[0]), int(sizes[1]), int(sizes[2])
    raise ArgumentError(f"`{name}` is {given!r}, expected a tuple of one to three integers, 0 <= size < 2**32")


def _is_path(text: str) -> bool:
    return text.rstrip().endswith((".cu", ".cuh")) and not re.search(r"[\n{;]", text)
