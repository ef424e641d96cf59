"""The process in which `_child.py` runs launches: it reads requests from stdin and writes answers to a pipe."""

import ctypes
import os
import pickle
import signal
import sys
from typing import Any

import numpy as np

from ddtree_cupy.emulate._child import Place
from ddtree_cupy.emulate._module import Module
from ddtree_cupy.errors import DDTreeError, EmulatorError

_PR_SET_PDEATHSIG = 1


def main(answers: int) -> None:
    """Launch what is asked for until there is nothing more to read."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # never outlive the process that asks
    modules: dict[Any, Module] = {}
    with os.fdopen(answers, "wb") as stream:

        def send(value: Any) -> None:
            pickle.dump(value, stream, protocol=5)
            stream.flush()

        while True:
            try:
                request = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            try:
                key = request["module"]
                module = modules.get(key) or Module.rebuilt(*key)
                modules[key] = module
                function = module.get_function(request["kernel"])
            except DDTreeError as error:
                send(error)
                continue
            send("compiled")
            # every piece is an allocation of its own, exactly as long as the memory it stands for
            pieces = [np.empty(len(piece), np.uint8) for piece in request["pieces"]]
            for piece, content in zip(pieces, request["pieces"], strict=True):
                piece[:] = np.frombuffer(content, np.uint8)
            args = [value.array(pieces) if isinstance(value, Place) else value for value in request["args"]]
            error_text = ""
            try:
                grid, block = request["shape"]
                function(grid, block, args, request["shared_mem"], request["seed"], strided=True)
            except EmulatorError as error:
                error_text = str(error)
            send(([piece.tobytes() for piece in pieces], error_text))


if __name__ == "__main__":
    main(int(sys.argv[1]))
