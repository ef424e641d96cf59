"""Training text: the source of the Python standard library, without the held-out modules.

Their test files and files that copy from them never enter it, either.
"""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ddtree_cupy._files import open_arrays, written_whole

#: Held-out modules, as paths inside the standard library.
HELDOUT_MODULES = (
    "calendar.py",
    "csv.py",
    "fractions.py",
    "gzip.py",
    "heapq.py",
    "pprint.py",
    "sched.py",
    "socketserver.py",
    "tempfile.py",
    "textwrap.py",
)

# Byte 0 stands between files; Python source never holds it.
SEPARATOR = b"\0"

# Folders that are not the library's own source, and generated tables.
_SKIPPED_PARTS = frozenset({"site-packages", "__pycache__", "encodings", "ensurepip", "pydoc_data"})
_SKIPPED_PREFIXES = ("_sysconfigdata", "bad_", "badsyntax_", "config-3")
_TEST_PARTS = frozenset({"test", "tests", "idle_test"})

# A training file is dropped when this many of a held-out file's shingles appear in it.
_SHINGLE_LINES = 4
_MAX_SHARED_SHINGLES = 4


@dataclass(frozen=True, eq=False)
class Corpus:
    """Training text as two byte streams.

    Attributes
    ----------
    library, tests : uint8 arrays, shape (num_bytes,)
        Library modules and test modules, files separated by one zero byte.
    names : tuple of str
        Paths of the files inside the standard library.
    """

    library: npt.NDArray[np.uint8]
    tests: npt.NDArray[np.uint8]
    names: tuple[str, ...]

    def save(self, path: Path) -> None:
        """Write the streams to one compressed `.npz` file."""
        with written_whole(path) as stream:
            np.savez_compressed(stream, library=self.library, tests=self.tests, names=np.array(self.names))

    @classmethod
    def load(cls, path: Path) -> "Corpus":
        """Read what `save` wrote."""
        with open_arrays(path, "corpus") as file:
            return cls(file.read("library"), file.read("tests"), tuple(map(str, file.read("names"))))


def collect(stdlib: Path | None = None) -> Corpus:
    """Read the training text from an installed standard library.

    Parameters
    ----------
    stdlib : path, optional
        Default: the running interpreter's library. Installations without ``Lib/test`` give
        an empty `tests` stream.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if stdlib is None else stdlib
    heldout = set()
    for name in HELDOUT_MODULES:
        heldout |= _shingles((root / name).read_bytes())
    streams: dict[bool, list[bytes]] = {False: [], True: []}
    names = []
    for path in _source_files(root):
        text = path.read_bytes().replace(b"\r\n", b"\n")
        if SEPARATOR in text or len(_shingles(text) & heldout) > _MAX_SHARED_SHINGLES:
            continue
        relative = path.relative_to(root)
        streams[not _TEST_PARTS.isdisjoint(relative.parts)].append(text)
        names.append(relative.as_posix())
    return Corpus(_join(streams[False]), _join(streams[True]), tuple(names))


def _source_files(root: Path) -> Iterator[Path]:
    skipped = set(HELDOUT_MODULES) | {_test_of(name) for name in HELDOUT_MODULES}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not _SKIPPED_PARTS.isdisjoint(relative.parts[:-1]):
            continue
        if path.name.startswith(_SKIPPED_PREFIXES) or relative.as_posix() in skipped:
            continue
        yield path


def _test_of(module: str) -> str:
    return f"test/test_{Path(module).name}"


def _shingles(text: bytes) -> set[bytes]:
    """Return every run of four consecutive lines that carry text, white space dropped."""
    lines = [b" ".join(line.split()) for line in text.splitlines()]
    lines = [line for line in lines if len(line) > 8]
    return {b"\n".join(lines[i : i + _SHINGLE_LINES]) for i in range(len(lines) - _SHINGLE_LINES + 1)}


def _join(texts: list[bytes]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(SEPARATOR.join(texts), dtype=np.uint8)
