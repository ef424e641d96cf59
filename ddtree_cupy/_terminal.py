"""Output of commands: without characters that a terminal obeys or a locale lacks, and with errors in one sentence."""

import io
import os
import re
import sys
import unicodedata
from collections.abc import Callable
from typing import TextIO

from ddtree_cupy.errors import DDTreeError

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130

_OBEYED = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # controls (C0, C1), formats (bidi overrides), lone surrogates, separators
_JOINERS = "\u200c\u200d"  # format characters that words and emoji need


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


def run_command(name: str, run: Callable[[], int]) -> int:
    """Run a command and return its exit code; an error is printed as one sentence on standard error.

    Parameters
    ----------
    name : str
        The sentence begins with it.
    run : callable
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
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
    sentence = re.sub(r"[ \t\n]+", " ", said.strip())
    print(f"{name}: {escaped(sentence)}", file=sys.stderr)
    return EXIT_FAILED
