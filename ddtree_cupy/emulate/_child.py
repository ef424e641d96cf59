"""Launches under a sanitizer in a child process: its report becomes an `EmulatorError` here.

One worker per sanitizer waits for launches, since Python takes about a second to start under one. A report ends the
worker, and the next launch starts another one. `_worker.py` is the other side.
"""

import atexit
import ctypes
import os
import pickle
import re
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ddtree_cupy._overlap import address_of
from ddtree_cupy.emulate._build import sanitizer_environment
from ddtree_cupy.emulate._symbols import is_own_code, source_place
from ddtree_cupy.emulate.guard import regions
from ddtree_cupy.errors import EmulatorError

_EXCERPT = 12  # lines of a report
_workers: dict[tuple[int, str], "_Worker"] = {}
_lock = threading.Lock()


class Place(NamedTuple):
    """Where an array lies in the memory that travels."""

    piece: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]

    def array(self, pieces: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[Any]:
        """Return the array in the memory that has arrived."""
        return np.ndarray(self.shape, self.dtype, pieces[self.piece], self.offset, self.strides)


def packed(args: Sequence[Any]) -> tuple[list[bytes], list[Any]]:
    """Return the memory of all arrays, where they share it as one piece, and the arguments with places for arrays."""
    pieces: list[bytes] = []
    places = list(args)
    arrays = {index: value for index, value in enumerate(args) if isinstance(value, np.ndarray)}
    for low, high, indices in regions(arrays):
        for index in indices:
            array = arrays[index]
            places[index] = Place(len(pieces), address_of(array) - low, array.shape, array.strides, array.dtype)
        pieces.append(ctypes.string_at(low, high - low))
    return pieces, places


def run_in_child(
    sanitizer: str,
    name: str,
    launch: dict[str, Any],
    args: Sequence[Any],
    outputs: Sequence[int],
    timeout: float | None,
) -> None:
    """Launch in the worker of a sanitizer and copy the results back.

    Parameters
    ----------
    sanitizer : {"asan", "ubsan", "asan+ubsan", "tsan"}
    name : str
        Of the kernel, for messages.
    launch : dict
        What `_worker.py` needs beside the arguments.
    args : sequence
        Checked arguments.
    outputs : sequence of int
        Places of the arrays that the kernel may write.
    timeout : float, optional
        Seconds, counted from the moment when the kernel is compiled.

    Raises
    ------
    EmulatorError
        The sanitizer or the emulator in the worker found a fault, or the time is over. After a report there are no
        results.
    """
    pieces, places = packed(args)
    request = {**launch, "pieces": pieces, "args": places}
    with _lock:
        key = os.getpid(), sanitizer
        worker = _workers.get(key) or _Worker(sanitizer)
        _workers[key] = worker
        try:
            found, error = worker.ask(request, timeout)
        except BaseException as stopped:  # a report, and Ctrl-C too
            del _workers[key]
            worker.end()
            if isinstance(stopped, _Report):
                raise EmulatorError(f"{name}: {stopped}") from None
            raise
    arrived = [np.frombuffer(piece, np.uint8) for piece in found]
    for index in outputs:
        if isinstance(places[index], Place) and args[index].flags.writeable:
            np.copyto(args[index], places[index].array(arrived))
    if error:
        raise EmulatorError(error)


class _Report(Exception):
    """What ended a worker, in words."""


class _Worker:
    """A Python process under a sanitizer."""

    def __init__(self, sanitizer: str) -> None:
        self._sanitizer = sanitizer
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        self._answers, theirs = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ddtree_cupy.emulate._worker", str(theirs)],
            stdin=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **_environment(sanitizer)},
            pass_fds=(theirs,),
            start_new_session=True,  # Ctrl-C is for this process, which ends the worker
        )
        os.close(theirs)
        atexit.register(self.end)

    def ask(self, request: dict[str, Any], timeout: float | None) -> tuple[list[bytes], str]:
        """Return what the memory holds afterwards, and the emulator's own error or ""; raise `_Report`."""
        assert self._process.stdin is not None
        try:
            pickle.dump(request, self._process.stdin, protocol=5)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._report() from None
        self._next(None)  # the kernel is compiled
        answer: tuple[list[bytes], str] = self._next(timeout)
        return answer

    def _next(self, timeout: float | None) -> Any:
        """Return the next object that the worker sends."""
        ready, _, _ = select.select([self._answers], [], [], timeout)
        if not ready:
            raise _Report(f"the launch took longer than timeout={timeout:g} s under {self._sanitizer}")
        with os.fdopen(os.dup(self._answers), "rb", buffering=0) as stream:
            try:
                answer = pickle.load(stream)
            except EOFError:
                raise self._report() from None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _report(self) -> _Report:
        code = self._process.wait()
        self._log.seek(0)
        text = self._log.read().decode(errors="replace")
        return _Report(_finding(text) or f"the process under {self._sanitizer} ended with exit code {code}:\n{text}")

    def end(self) -> None:
        """End the process, if it has not ended."""
        atexit.unregister(self.end)
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        os.close(self._answers)
        self._log.close()


def _environment(sanitizer: str) -> dict[str, str]:
    found = sanitizer_environment(sanitizer)
    found["TSAN_OPTIONS"] += ":halt_on_error=1"
    return found


def _finding(report: str) -> str:
    """Return thread, line and kind of the first report, and its beginning; "" where there is none."""
    kind = re.search(
        r"(?:WARNING|ERROR): \w+Sanitizer: ([\w -]+?)(?: on | \(|$)|runtime error: (.*)", report, re.MULTILINE
    )
    if kind is None:
        return ""
    text = report[report.rindex("\n", 0, kind.start()) + 1 if "\n" in report[: kind.start()] else 0 :]
    frames = re.findall(r"^(?:\s+#\d+ .*? )?(\S+?):(\d+)(?::\d+)?(?: |:|$)", text, re.MULTILINE)
    own = next((source_place(path, line) for path, line in frames if is_own_code(path)), "an unknown line")
    thread = re.search(r"block \(\d+,\d+,\d+\) thread \(\d+,\d+,\d+\)", text)
    where = f"{thread.group()}: {own}" if thread else own
    excerpt = "\n".join(text.splitlines()[:_EXCERPT])
    return f"{where}: {(kind[1] or kind[2]).strip()}\n{excerpt}"
