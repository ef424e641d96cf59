"""Kernels of a few lines, and Python programs in processes of their own."""

import os
import subprocess
import sys

import numpy as np

from ddtree_cupy import emulate


def run(body, *, threads=64, blocks=1, seed=0, shared_mem=0, n=64, dtype=np.float32, element="float", strict=True):
    """Run `body` as a kernel that writes x, an array of n zeros, and return it."""
    code = f'extern "C" __global__ void k({element}* x) {{\n{body}\n}}'
    x = np.zeros(n, dtype)
    emulate.Module(code, strict=strict).get_function("k")((blocks,), (threads,), (x,), shared_mem, seed)
    return x


def run_python(program, *arguments, **environment):
    """Run a program with what this process can import, and return the process when it has ended."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, timeout=300, check=False)
