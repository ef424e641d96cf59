"""Every environment variable of the library: one table, one accessor each.

Variables are read at the moment they matter, not at import, so a test or a notebook may set them.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ddtree_cupy.errors import UnsupportedError

SANITIZERS = ("", "asan", "ubsan", "asan+ubsan", "tsan")


@dataclass(frozen=True)
class Switch:
    """One environment variable: its name, what an unset one means, and what it does."""

    name: str
    default: str
    meaning: str


SWITCHES = (
    Switch(
        "DDTREE_CACHE_DIR",
        "`$XDG_CACHE_HOME/ddtree_cupy` or `~/.cache/ddtree_cupy`",
        "Folder for kernels the emulator has compiled. A temporary folder is used when it cannot be written.",
    ),
    Switch(
        "DDTREE_CXX",
        "`g++`, else `clang++`",
        "C++ compiler of the emulator: a name on the path or a full path.",
    ),
    Switch(
        "DDTREE_EMULATE_SANITIZE",
        "none",
        "Sanitizer for emulated kernels: `asan`, `ubsan`, `asan+ubsan` or `tsan`. Start Python with "
        "`emulate.sanitizer_environment(...)`.",
    ),
    Switch(
        "DDTREE_EMULATE_UCONTEXT",
        "`0`",
        "`1` switches emulated threads with `swapcontext`, as machines other than x86-64 always do (slower).",
    ),
)


def _value(name: str) -> str:
    if name not in {switch.name for switch in SWITCHES}:
        raise KeyError(f"{name} is not in ddtree_cupy._compile.env.SWITCHES")
    return os.environ.get(name, "").strip()


def cache_dir() -> Path:
    """Return a folder that exists and can be written, private to this user.

    Returns
    -------
    pathlib.Path
        `DDTREE_CACHE_DIR`, else the user's cache folder; when neither can be written, a folder in the
        system's temporary folder that belongs to this user.
    """
    chosen = _value("DDTREE_CACHE_DIR")
    if chosen:
        wanted = Path(chosen).expanduser()
    else:
        base = os.environ.get("XDG_CACHE_HOME", "")
        wanted = (Path(base) if base else Path.home() / ".cache") / "ddtree_cupy"
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        if os.access(wanted, os.W_OK | os.X_OK):
            return wanted
    except OSError:
        pass
    fallback = Path(tempfile.gettempdir()) / f"ddtree_cupy-{os.getuid()}"
    try:
        fallback.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        pass
    else:
        if fallback.stat().st_uid == os.getuid() and not fallback.is_symlink():
            return fallback
    return Path(tempfile.mkdtemp(prefix="ddtree_cupy-"))


def cxx() -> str:
    """Return the compiler asked for with `DDTREE_CXX`, or an empty string."""
    return _value("DDTREE_CXX")


def sanitizer() -> str:
    """Return the sanitizer asked for with `DDTREE_EMULATE_SANITIZE`: one of `SANITIZERS`."""
    value = _value("DDTREE_EMULATE_SANITIZE")
    if value not in SANITIZERS:
        known = ", ".join(name for name in SANITIZERS if name)
        raise UnsupportedError(f"DDTREE_EMULATE_SANITIZE is {value!r}, expected one of {known}")
    return value


def use_ucontext() -> bool:
    """Return whether `DDTREE_EMULATE_UCONTEXT` asks for the portable thread switch."""
    return _value("DDTREE_EMULATE_UCONTEXT") not in ("", "0")


def markdown_table() -> str:
    """Return the table of all switches as Markdown, for the README."""
    rows = ["| variable | unset means | meaning |", "|---|---|---|"]
    rows += [f"| `{s.name}` | {s.default} | {s.meaning} |" for s in SWITCHES]
    return "\n".join(rows) + "\n"
