"""NVRTC without a GPU and without CuPy: compile for any architecture through ctypes.

NVRTC needs no driver, so a machine without a GPU can check that every kernel compiles everywhere. The options are those
that CuPy adds by itself, so the code that is checked here is the code that runs.
"""

import ctypes
import ctypes.util
import functools
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ddtree_cupy.errors import CompileError, UnsupportedError

# CuPy's own additions (cupy/cuda/compiler.py), in its order; it adds -arch itself.
CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")


@dataclass(frozen=True)
class Compilation:
    """The result of NVRTC for one text: the image, the log, and the mangled name of each expression."""

    cubin: bytes
    log: str
    lowered: dict[str, str]


def available() -> tuple[bool, str]:
    """Return (True, "") if NVRTC can be used here, else (False, the reason)."""
    try:
        _library()
    except UnsupportedError as error:
        return False, str(error)
    return True, ""


def version() -> tuple[int, int]:
    """Return the version of the NVRTC in use."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def supported_archs() -> tuple[str, ...]:
    """Return the plain architectures that this NVRTC knows, such as "sm_90"."""
    count = ctypes.c_int()
    _check(_library().nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    numbers = (ctypes.c_int * count.value)()
    _check(_library().nvrtcGetSupportedArchs(numbers))
    return tuple(f"sm_{number}" for number in numbers)


def compile_text(
    text: str, arch: str, *, options: tuple[str, ...] = (), expressions: tuple[str, ...] = (), name: str = "kernel.cu"
) -> Compilation:
    """Compile self-contained CUDA text to a cubin for one architecture.

    Parameters
    ----------
    text : str
        From `kernels.expand`.
    arch : str
        Such as `"sm_90a"`.
    options : tuple of str
        In addition to `CUPY_OPTIONS`, the header folders and `--ptxas-options=-v`.
    expressions : tuple of str
        Template instances to compile.

    Raises
    ------
    CompileError
        The text does not compile; the message has the first error, architecture, version, options and the log.
    UnsupportedError
        NVRTC is not installed.
    """
    library = _library()
    program = ctypes.c_void_p()
    _check(library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None))
    try:
        for expression in expressions:
            _check(library.nvrtcAddNameExpression(program, expression.encode()))
        flags = [*options, *(f"-I{path}" for path in header_folders()), *CUPY_OPTIONS]
        if not any(flag.startswith(("-std=", "--std=")) for flag in flags):
            flags.append("--std=c++17")
        flags += [f"-arch={arch}", "--ptxas-options=-v"]
        encoded = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        failed = library.nvrtcCompileProgram(program, len(flags), encoded)
        log = _read(program, "ProgramLog").decode(errors="replace").strip("\0")
        if failed:
            first = re.search(r"^.*\berror\b.*$", log, re.MULTILINE)
            raise CompileError(
                f"{first.group() if first else 'NVRTC failed'}\n  {name} for {arch}, NVRTC "
                f"{'.'.join(map(str, version()))}, options {' '.join(flags)}\n{log}"
            )
        lowered = {}
        for expression in expressions:
            mangled = ctypes.c_char_p()
            _check(library.nvrtcGetLoweredName(program, expression.encode(), ctypes.byref(mangled)))
            assert mangled.value is not None
            lowered[expression] = mangled.value.decode()
        return Compilation(_read(program, "CUBIN"), log, lowered)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _read(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(_library(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(max(1, size.value))
    _check(getattr(_library(), f"nvrtcGet{what}")(program, buffer))
    return buffer.raw[: size.value]


def _check(code: int) -> None:
    if code:
        raise CompileError(f"NVRTC: {_library().nvrtcGetErrorString(code).decode()}")


@functools.cache
def _library() -> ctypes.CDLL:
    for path in _candidates():
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library
    raise UnsupportedError(
        "no NVRTC found: pip install 'nvidia-cuda-nvrtc==13.*' 'nvidia-cuda-runtime==13.*', or set CUDA_PATH"
    )


def _candidates() -> list[str]:
    found = [str(path) for folder in _wheel_folders() for path in sorted(folder.glob("**/lib/libnvrtc.so.*"))]
    toolkit = _toolkit()
    if toolkit is not None:
        found += [str(path) for path in sorted(toolkit.glob("lib*/libnvrtc.so*"))]
    system = ctypes.util.find_library("nvrtc")
    return [*found, *([system] if system else [])]


@functools.cache
def header_folders() -> tuple[str, ...]:
    """Return the folders that hold `cuda_fp16.h`: from the wheels, else from a toolkit."""
    for folder in _wheel_folders():
        for header in sorted(folder.glob("**/include/cuda_fp16.h")):
            return (str(header.parent),)
    toolkit = _toolkit()
    return (str(toolkit / "include"),) if toolkit is not None else ()


def _wheel_folders() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec is not None else None
    return [Path(place) for place in places or ()]


def _toolkit() -> Path | None:
    for name in ("CUDA_PATH", "CUDA_HOME"):
        if os.environ.get(name):
            return Path(os.environ[name])
    usual = Path("/usr/local/cuda")
    return usual if usual.is_dir() else None
