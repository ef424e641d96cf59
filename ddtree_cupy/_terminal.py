"""Output of commands: no characters that a terminal obeys or a locale lacks, tables that fit, errors as sentences."""

import codecs
import io
import math
import os
import re
import sys
import textwrap
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TextIO

from ddtree_cupy.errors import DDTreeError

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130

_OBEYED = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls (C0, C1), formats (bidi overrides), lone surrogates, separators
_JOINERS = "\u200c\u200d"  # format characters that words and emoji need
_SIMILAR = dict(zip("└├│─‹›–—…“”‘’", ["`", "|", "|", "-", "<", ">", "-", "-", "...", '"', '"', "'", "'"], strict=True))


def _replaced(error: UnicodeError) -> tuple[str, int]:
    """Give what an encoding lacks as similar ASCII, or as a question mark."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_SIMILAR.get(character, "?") for character in error.object[error.start : error.end]), error.end


codecs.register_error("ddtree.similar", _replaced)


def escaped(text: object, *, keep: str = "") -> str:
    r"""Return text in which every character that a terminal could obey is written as its escape.

    Parameters
    ----------
    text : object
        Its `str`.
    keep : str
        Characters to leave as they are; commands keep line breaks and tabs in whole texts.

    Examples
    --------
    >>> print(escaped("a\x1b[31m\u202eb"))
    a\x1b[31m\u202eb
    """
    return "".join(
        character.encode("unicode_escape").decode("ascii")
        if unicodedata.category(character) in _OBEYED and character not in _JOINERS + keep
        else character
        for character in str(text)
    )


def show(text: object, *, end: str = "\n", file: TextIO | None = None) -> None:
    """Print text of one or several lines, escaped."""
    print(escaped(text, keep="\n\t"), end=end, file=file, flush=True)


def columns() -> float:
    """Return the width of the terminal, or of the variable COLUMNS; infinity where output is neither."""
    try:
        found = int(os.environ.get("COLUMNS", "0"))
    except ValueError:
        found = 0
    try:
        return found if found > 0 else os.get_terminal_size(sys.stdout.fileno()).columns or math.inf
    except (AttributeError, ValueError, OSError):  # no stream, or one that is no terminal
        return math.inf


def fitted(line: str, indent: str = "  ") -> str:
    """Return a line, broken at spaces where the terminal is narrower; further lines begin with `indent`."""
    width = columns()
    return line if len(line) <= width else textwrap.fill(line, int(width), subsequent_indent=indent)


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1) -> str:
    """Return rows as aligned columns; where a line would be wider than the terminal, every cell has its own line.

    Parameters
    ----------
    heads : sequence of str
    rows : iterable of sequences
        One cell for each head; their `str` is shown.
    left : int
        So many columns begin at the same place, the others end there.

    Examples
    --------
    >>> print(table(("way", "passes"), [("chain", 8), ("autoregressive", 40)]))
    way             passes
    chain                8
    autoregressive      40
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    if sum(widths) + 2 * (len(widths) - 1) > columns():
        name = max(map(len, heads[1:]), default=0)
        lines = []
        for first, *others in cells:
            lines.append(fitted(first))
            lines += [fitted(f"  {head:<{name}}  {cell}", "    ") for head, cell in zip(heads[1:], others, strict=True)]
        return "\n".join(lines)
    aligned = [
        "  ".join(
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (heads, *cells)
    ]
    return "\n".join(aligned)


def run_command(name: str, run: Callable[[], int]) -> int:
    """Run a command and return its exit code; errors and warnings are printed as one sentence on standard error.

    Parameters
    ----------
    name : str
        The sentence begins with it.
    run : callable
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="ddtree.similar")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: _say(f"{name}: warning", message)
            code = run()
        if sys.stdout is not None:  # None where the process was started without one
            sys.stdout.flush()
        return code
    except OSError as error:
        if not error.filename and sys.__stdout__ is not None and sys.stdout is sys.__stdout__:
            # It was our own output: the interpreter must not try again at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())
        if isinstance(error, BrokenPipeError) and not error.filename:
            return EXIT_FAILED  # the reader has closed the pipe
        said = f"{error.filename}: {error.strerror}" if error.filename else f"{error.strerror or error}"
    except MemoryError as error:
        said = f"not enough memory{f': {error}' if str(error) else ''}"
    except DDTreeError as error:
        said = str(error)
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    _say(name, said)
    return EXIT_FAILED


def _say(name: str, said: object) -> None:
    sentence = re.sub(r"[ \t\n]+", " ", str(said).strip())
    print(f"{name}: {escaped(sentence)}", file=sys.stderr)
