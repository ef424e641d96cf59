r"""Find `cuda_src` and turn one `.cu` file into one self-contained string.

CuPy's disk cache does not look into included files, so a changed header would silently give the old binary. Therefore
our `#include "..."` lines are expanded here and the compiler sees one text, with `#line` directives that make its
messages name the right file and line.

Examples
--------
>>> import pathlib, tempfile
>>> root = pathlib.Path(tempfile.mkdtemp())
>>> _ = (root / "two.cuh").write_text("#pragma once\nint two = 2;\n")
>>> _ = (root / "one.cu").write_text('#include "two.cuh"\nint one = 1;\n')
>>> print(expand("one.cu", root=root), end="")
#line 1 "one.cu"
#line 1 "two.cuh"
<BLANKLINE>
int two = 2;
#line 2 "one.cu"
int one = 1;
"""

import ast
import operator
import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from ddtree_cupy.errors import CompileError

_INCLUDE = re.compile(r'^\s*#\s*include\s*("[^"]+"|<[^>]+>)')
_PRAGMA_ONCE = re.compile(r"^\s*#\s*pragma\s+once\b")
_CONSTANT = re.compile(r"^constexpr\s+[\w ]+?\b(\w+(?:<\w+>)?)\s*=\s*([^;]+);", re.MULTILINE)
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.LShift: operator.lshift,
}


def source_root() -> Traversable:
    """Return the folder that holds the CUDA sources.

    In a wheel this is `ddtree_cupy/_cuda_src` (also inside a zipped one); in a checkout or an editable install it is
    `cuda_src`, beside the package.
    """
    packaged = files("ddtree_cupy") / "_cuda_src"
    if packaged.is_dir():
        return packaged
    beside = Path(__file__).resolve().parents[2] / "cuda_src"
    if beside.is_dir():
        return beside
    raise CompileError(f"cuda_src is missing: neither {packaged} nor {beside} exists; reinstall ddtree_cupy")


def expand(source: str | Path, *, root: Traversable | None = None, folders: Sequence[Traversable] = ()) -> str:
    """Return the text of one source with our own includes expanded.

    Parameters
    ----------
    source : str or path
        Path relative to `root`, such as `"tree_build/topology.cu"`, or the absolute path of any file, whose
        includes are then looked up beside it and after that in `root`.
    root : folder, optional
        Default: `source_root()`.
    folders : sequence of folders
        Further places of included files, looked up before `root`.

    Returns
    -------
    str
        Each header appears once, at its first include. `#include <...>` lines stay unless the file is in one of these
        folders.

    Raises
    ------
    CompileError
        A file does not exist; the message names the file and line that include it.
    """
    if Path(source).is_absolute():
        path = Path(source)
        search: tuple[Traversable, ...] = (path.parent, *folders, *((root,) if root else _optional_root()))
        name = path.name
    else:
        search = (*folders, root if root is not None else source_root())
        name = posixpath.normpath(str(source))
    seen: set[str] = set()
    return "\n".join(_expand(name, search, seen, "")) + "\n"


def expand_text(
    code: str, *, name: str = "kernel.cu", root: Traversable | None = None, folders: Sequence[Traversable] = ()
) -> str:
    """Return `code`, a source given as text, with its includes from `folders` and `root` expanded."""
    search = (*folders, *((root,) if root is not None else _optional_root()))
    return "\n".join(_lines(code, name, search, set())) + "\n"


def _optional_root() -> tuple[Traversable, ...]:
    try:
        return (source_root(),)
    except CompileError:
        return ()


def _read(name: str, search: tuple[Traversable, ...]) -> str | None:
    for folder in search:
        candidate = folder.joinpath(*name.split("/"))
        if candidate.is_file():
            return candidate.read_bytes().decode("utf-8", "replace")  # comments may be of another encoding
    return None


def _expand(name: str, search: tuple[Traversable, ...], seen: set[str], origin: str) -> Iterator[str]:
    text = _read(name, search)
    if text is None:
        where = ", ".join(str(folder) for folder in search)
        raise CompileError(f"{origin}cannot find {name!r} in {where}; the option -Ifolder adds one")
    seen.add(name)
    yield from _lines(text, name, search, seen)


def _lines(text: str, name: str, search: tuple[Traversable, ...], seen: set[str]) -> Iterator[str]:
    yield f'#line 1 "{name}"'
    for number, line in enumerate(text.splitlines(), 1):
        match = _INCLUDE.match(line)
        if match is None:
            yield "" if _PRAGMA_ONCE.match(line) else line
            continue
        wanted = _resolve(match[1][1:-1], name, search)
        if match[1][0] == "<" and _read(wanted, search) is None:  # the compiler's own
            yield line
            continue
        if wanted in seen:
            yield ""
            continue
        yield from _expand(wanted, search, seen, f"{name}:{number}: ")
        yield f'#line {number + 1} "{name}"'


def _resolve(included: str, includer: str, search: tuple[Traversable, ...]) -> str:
    """Return the name of an included file: beside the including one if it is there, else below the root."""
    beside = posixpath.normpath(posixpath.join(posixpath.dirname(includer), included))
    if not beside.startswith("..") and _read(beside, search) is not None:
        return beside
    return posixpath.normpath(included)


@cache
def constants(source: str) -> dict[str, int]:
    """Return the integer constants of a file below `cuda_src` and of the headers it includes.

    Parameters
    ----------
    source : str

    Examples
    --------
    >>> constants("common/warp.cuh")["WARP_SIZE"]
    32
    """
    return constants_of(expand(source))


def constants_of(text: str) -> dict[str, int]:
    """Return the integers among the `constexpr` variables that start a line of a text."""
    found: dict[str, int] = {}
    for match in _CONSTANT.finditer(text):
        try:
            found[match[1]] = _value_of(ast.parse(match[2].replace("/", "//"), mode="eval").body, found)
        except (SyntaxError, KeyError, TypeError):  # not an integer, or known to the compiler alone
            continue
    return found


def _value_of(node: Any, known: dict[str, int]) -> int:
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value_of(node.left, known), _value_of(node.right, known))
    if isinstance(node, ast.Name):
        return known[node.id]
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise TypeError
