"""Compile translated kernels: find a compiler, choose flags, keep the results on disk."""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ddtree_cupy.emulate import env
from ddtree_cupy.emulate._symbols import FOLDER, tool_output
from ddtree_cupy.errors import CompileError, EmulatorError, UnsupportedError

RUNTIME = Path(__file__).resolve().parent / "runtime"
_DEFINED = ("-DDDTREE_EMULATE=1", "-D__CUDACC__=1", "-D__CUDACC_RTC__=1", "-D__CUDA_ARCH__=EMU_ARCH")
_SEAL_BYTES = hashlib.sha256().digest_size
_ENDS = "-fno-sanitize-recover=all"
_SANITIZE_FLAGS = {
    # for what runtime/emu_undefined.cpp reports
    "": ("-fsanitize=alignment,bounds,shift-exponent,integer-divide-by-zero,float-cast-overflow", _ENDS),
    "asan": ("-fsanitize=address",),
    "ubsan": ("-fsanitize=undefined", _ENDS),
    "asan+ubsan": ("-fsanitize=address,undefined", _ENDS),
    "tsan": ("-fsanitize=thread",),
}
# DWARF 4, since binutils before 2.40 misread the files of DWARF 5.
# No fused multiply-add unless the kernel asks for one, so that results do not depend on the optimiser.
_FLAGS = (
    *("-std=c++17", "-O2", "-g1", "-gdwarf-4", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-strict-aliasing"),
    *("-ffp-contract=off", "-fno-math-errno", "-fsigned-char", "-w", "-Wno-psabi"),
    "-Wl,--no-as-needed",  # bind every kernel to the runtime, whose launch function Python finds through it
)


@dataclass(frozen=True)
class Compiler:
    """A usable C++ compiler and what it can do."""

    path: str
    version: str
    is_clang: bool
    extra_flags: tuple[str, ...]


def unsupported_reason() -> str:
    """Return why the emulator cannot run here, or an empty string."""
    if not sys.platform.startswith("linux"):
        return f"the emulator runs on Linux (x86-64 or aarch64), this is {sys.platform}"
    if platform.machine() not in ("x86_64", "aarch64"):
        return f"the emulator runs on x86-64 and aarch64, this is {platform.machine()}"
    wanted = env.cxx()
    if wanted and shutil.which(wanted) is None:
        return f"DDTREE_CXX is {wanted!r}, which is not an executable"
    if not wanted and shutil.which("g++") is None and shutil.which("clang++") is None:
        return "no C++ compiler: install g++ or clang++, or set DDTREE_CXX"
    return ""


def find_compiler() -> Compiler:
    """Return the compiler in use; raise `UnsupportedError` with the reason where there is none."""
    reason = unsupported_reason()
    if reason:
        raise UnsupportedError(f"ddtree_cupy.emulate: {reason}")
    found = shutil.which(env.cxx()) if env.cxx() else shutil.which("g++") or shutil.which("clang++")
    assert found is not None
    return _describe(found)


@functools.cache
def _describe(path: str) -> Compiler:
    version = tool_output([path, "--version"]).stdout.partition("\n")[0]
    flags = []
    # Uninitialised local variables hold a pattern, as registers on a GPU hold old values; compilers before 2022 cannot.
    probe = [path, "-ftrivial-auto-var-init=pattern", "-E", "-x", "c++", os.devnull]
    if tool_output(probe).returncode == 0:
        flags.append("-ftrivial-auto-var-init=pattern")
    if platform.machine() == "x86_64":
        flags += [flag for flag in ("-mfma", "-mavx2") if {"fma", "avx2"} <= _cpu_flags()]
    return Compiler(path, version, "clang" in version.lower(), tuple(flags))


@functools.cache
def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    match = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(match.group(1).split()) if match else frozenset()


def sanitizer_environment(kind: str) -> dict[str, str]:
    """Return the environment variables a Python process needs to run kernels under a sanitizer.

    Parameters
    ----------
    kind : {"asan", "ubsan", "asan+ubsan", "tsan"}
        Bounds of every array, shared memory included; undefined behaviour; both; data races within a block.

    Returns
    -------
    dict of str
        Add these to `os.environ` of a *new* process: `subprocess.run(..., env=os.environ | ...)`. A fault ends that
        process with a report on stderr; for `tsan` the exit code 66 says that races were reported.

    Raises
    ------
    UnsupportedError
        The compiler is not g++, or its sanitizer library is not installed.
    """
    if kind not in _SANITIZE_FLAGS or not kind:
        raise UnsupportedError(f"sanitizer {kind!r}: expected one of {', '.join(filter(None, _SANITIZE_FLAGS))}")
    found = {
        "DDTREE_EMULATE_SANITIZE": kind,
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=0",
        "TSAN_OPTIONS": "report_signal_unsafe=0:exitcode=66",
        # Python's own small-object arenas hide overruns of small arrays.
        "PYTHONMALLOC": "malloc",
    }
    runtime = {"asan": "asan", "ubsan": "ubsan", "asan+ubsan": "asan", "tsan": "tsan"}[kind]
    found["LD_PRELOAD"] = _sanitizer_library(find_compiler(), runtime)
    return found


def _sanitizer_library(compiler: Compiler, runtime: str) -> str:
    if compiler.is_clang:
        # clang does not watch objects in a named section, and all static shared memory is in one.
        raise UnsupportedError(f"sanitizers need g++, the emulator's compiler is {compiler.path}")
    name = f"lib{runtime}.so"
    path = tool_output([compiler.path, f"-print-file-name={name}"]).stdout.strip()
    if not os.path.isabs(path):
        raise UnsupportedError(f"{compiler.path} has no {name}: install its sanitizer runtime")
    return path


def _check_preloaded(kind: str) -> None:
    for runtime, symbol in (("asan", "__asan_init"), ("tsan", "__tsan_init")):
        if runtime in kind.split("+") and not hasattr(ctypes.CDLL(None), symbol):
            raise EmulatorError(
                f"DDTREE_EMULATE_SANITIZE={kind}: {runtime} must be loaded before Python starts; use a new process "
                "with emulate.sanitizer_environment(...)"
            )


def build(text: str, options: tuple[str, ...], *, counts_steps: bool = False) -> Path:
    """Compile one translated source, or find it in the cache; return the shared library.

    Safe for concurrent processes: everything is written under another name and moved into place.
    """
    compiler, kind = find_compiler(), env.sanitizer()
    _check_preloaded(kind)
    if counts_steps:
        options = (*options, "-O0", "-fsanitize-coverage=trace-pc")  # optimised, a loop may be without a block
    try:
        return _build(text, options, compiler, kind)
    except OSError as error:
        raise EmulatorError(
            f"ddtree_cupy.emulate: the folder of compiled kernels cannot be used ({error}); repair it or set "
            "DDTREE_CACHE_DIR to another folder"
        ) from error


def _build(text: str, options: tuple[str, ...], compiler: Compiler, kind: str) -> Path:
    folder = env.private_folder(env.cache_dir() / "emulate")
    runtime = _build_runtime(compiler, kind, folder)
    flags = [*_FLAGS, *compiler.extra_flags, *_SANITIZE_FLAGS[kind], f"-I{RUNTIME / 'include'}", *options]
    if "asan" in kind:
        flags.append("-fsanitize-sections=emu_shared")
    if not compiler.is_clang:
        flags += ["-fno-gnu-unique", "-fdata-sections", f"-Wl,-T,{RUNTIME / 'emu_shared.ld'}"]
    key = _digest(text, runtime.name, compiler.version, *flags)
    library = folder / f"{key}.so"
    if not _is_usable(library):
        source = folder / f"{key}.cpp"
        _write(source, text)
        _compile(compiler, flags, [source], library, [str(runtime), "-Wl,-rpath,$ORIGIN"])
    return library


def _build_runtime(compiler: Compiler, kind: str, folder: Path) -> Path:
    flags = ["-std=c++17", "-O2", "-g1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra"]
    flags += [f"-DEMU_{name.upper()}" for name in ("asan", "tsan") if name in kind.split("+")]
    if env.use_ucontext():
        flags.append("-DEMU_UCONTEXT")
    library = folder / f"runtime-{_digest(_runtime_text(), compiler.version, *flags)}.so"
    if not _is_usable(library):
        sources = sorted(RUNTIME.glob("*.cpp"))
        _compile(compiler, flags, sources, library, [f"-Wl,-soname,{library.name}"])
    return library


@functools.cache
def _runtime_text() -> str:
    return "\0".join(p.read_text("utf-8") for p in sorted(RUNTIME.rglob("*")) if p.suffix in (".h", ".cpp", ".ld"))


def _is_usable(library: Path) -> bool:
    """Return whether a library of the cache is there and whole; raise `EmulatorError` if others may have written it."""
    if not library.exists():
        return False
    env.check_private(library)
    content = library.read_bytes()
    return content[-_SEAL_BYTES:] == _seal(content[:-_SEAL_BYTES])


def _seal(content: bytes) -> bytes:
    """Return the seal that follows the content of a library, as loading a truncated one may end the process."""
    return hashlib.sha256(content).digest()


def _digest(*parts: str) -> str:
    return hashlib.sha256(_bytes("\0".join(parts))).hexdigest()[:24]


def _bytes(text: str) -> bytes:
    """Encode a source, whatever the locale; the name of a file in it may hold any bytes."""
    return text.encode("utf-8", "surrogateescape")


def _write(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        file.write(_bytes(text))
    os.replace(file.name, path)


def preprocessed(code: str, options: tuple[str, ...]) -> str:
    """Return a text without macros and conditions; what it includes in angle brackets is left out."""
    text = re.sub(r"^[ \t]*#[ \t]*include\b.*$", "", code, flags=re.MULTILINE)
    compiler = find_compiler()
    with tempfile.NamedTemporaryFile("w", suffix=".cpp", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
        file.flush()
        result = tool_output([compiler.path, *_DEFINED, *options, "-E", "-x", "c++", "-w", file.name])
    return result.stdout if result.returncode == 0 else code


def _compile(compiler: Compiler, flags: list[str], sources: list[Path], target: Path, link: list[str]) -> None:
    """Compile sources and link them, in two steps: checks without a sanitizer must not bring in its library."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        objects = [f"{folder}/{source.stem}.o" for source in sources]
        here = f"-fdebug-prefix-map={os.getcwd()}={FOLDER}"
        for source, made in zip(sources, objects, strict=True):
            _run(compiler, [*flags, here, "-c", str(source), "-o", made], source)
        aside = Path(folder, target.name)
        kept = [flag for flag in flags if flag not in _SANITIZE_FLAGS[""]]
        _run(compiler, [*kept, *objects, "-o", str(aside), *link], sources[0])
        with open(aside, "r+b") as file:
            file.write(_seal(file.read()))
        os.chmod(aside, 0o700)  # whatever the umask
        os.replace(aside, target)


def _run(compiler: Compiler, arguments: list[str], source: Path) -> None:
    result = tool_output([compiler.path, *arguments])
    if result.returncode:
        raise CompileError(
            f"{_first_error(result.stderr)}\n  compiled for the CPU emulator by {compiler.version}, "
            f"full text in {source}\n{result.stderr[:4000]}"
        )


def _first_error(log: str) -> str:
    match = re.search(r"^(.*?:\d+(?::\d+)?: (?:fatal )?error: .*)$", log, re.MULTILINE | re.IGNORECASE)
    first = match.group(1) if match else "the compiler failed"
    return first
