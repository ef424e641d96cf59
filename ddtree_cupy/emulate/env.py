"""Every environment variable of the library: one table, and one function for each.

Variables are read at the moment they matter, not at import, so a test or a notebook may set them.
"""

import functools
import os
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ddtree_cupy.errors import EmulatorError, UnsupportedError

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
        "Folder for the kernels that the emulator compiles. If it cannot be written, a temporary folder is used; a "
        "folder that other users may write is refused.",
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
        raise KeyError(f"{name} is not in ddtree_cupy.emulate.env.SWITCHES")
    return os.environ.get(name, "").strip()


def cache_dir() -> Path:
    """Return a folder that exists and that this user alone may write.

    Returns
    -------
    pathlib.Path
        An absolute path: `DDTREE_CACHE_DIR`, else the user's cache folder. If that cannot be written, a folder in
        the temporary folder of the system, the same at every call.

    Raises
    ------
    EmulatorError
        The folder belongs to another user, or other users may write it: libraries in it would run in this process.
    """
    chosen = _value("DDTREE_CACHE_DIR")
    try:
        if chosen:
            wanted = Path(chosen).expanduser()
        else:
            wanted = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddtree_cupy"
        wanted = Path(os.path.abspath(wanted))  # a compiler would read a path that begins with "-" as an option
        _create(wanted)
        is_writable = os.access(wanted, os.W_OK | os.X_OK)
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        is_writable = False
    if not is_writable:
        return _temporary_cache_dir()
    check_private(wanted)
    return wanted


def _temporary_cache_dir() -> Path:
    shared = Path(tempfile.gettempdir()) / f"ddtree_cupy-{os.getuid()}"
    try:
        shared.mkdir(mode=0o700, exist_ok=True)
        if not shared.is_symlink():
            check_private(shared)
            return shared
    except (OSError, EmulatorError):  # it belongs to another user
        pass
    return _folder_of_this_process()


@functools.cache
def _folder_of_this_process() -> Path:
    return Path(tempfile.mkdtemp(prefix="ddtree_cupy-"))


def private_folder(folder: Path) -> Path:
    """Return `folder`, created where it is missing; raise `EmulatorError` unless it is private to this user."""
    _create(folder)
    check_private(folder)
    return folder


def _create(folder: Path) -> None:
    if not folder.is_dir():
        _create(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def check_private(path: Path) -> None:
    """Raise `EmulatorError` where another user owns `path` or may write it."""
    found, me = path.stat(), os.geteuid()
    if found.st_uid != me:
        problem, cure = f"belongs to user {found.st_uid}, you are user {me}", ""
    elif found.st_mode & 0o022:
        problem = f"may be written by other users (its mode is {found.st_mode & 0o777:04o})"
        cure = f"if you trust what is in it, run `chmod -R go-w {shlex.quote(str(path))}`; otherwise "
    else:
        return
    raise EmulatorError(
        f"ddtree_cupy.emulate: {path} {problem}, and the compiled kernels there would run as you; {cure}"
        "delete it or set DDTREE_CACHE_DIR to a folder of your own"
    )


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
