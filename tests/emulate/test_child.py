"""`check(sanitizer=...)`: launches in a child process, whose reports are errors here."""

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import find
from hypothesis import strategies as st

from ddtree_cupy import emulate
from ddtree_cupy.errors import ArgumentError, EmulatorError

pytestmark = [pytest.mark.emulate, pytest.mark.sanitizer, pytest.mark.slow]


@pytest.fixture(autouse=True)
def gnu_compiler():
    if "clang" in emulate.compiler():
        pytest.skip("the sanitizer modes need g++")


def kernel(body, parameters="int* x, int n"):
    code = f'extern "C" __global__ void k({parameters}) {{\nint t = threadIdx.x, b = blockIdx.x;\n{body}\n}}'
    return emulate.Module(code).get_function("k")


def check(body, *, sanitizer="tsan", threads=32, blocks=1, n=64, length=64, **options):
    x = np.zeros(length, np.int32)
    emulate.check(kernel(body), (blocks,), (threads,), (x, n), sanitizer=sanitizer, **options)
    return x


SHARED = "__shared__ int s[64];\ns[t] = t;\n{}\nx[64 * b + t] = s[63 - t];"
# the last block adds what all blocks have written, the usual way
LAST = """if (t == 0) {{
    x[1 + b] = b;
    {}
    if (atomicAdd(&x[0], 1) == gridDim.x - 1)
      for (int i = 1; i <= gridDim.x; ++i) x[63] += x[i];
  }}"""
LOOP = """__shared__ int s[64];
  for (int i = 0; i < 3; ++i) {{
    s[t] = t + i;
    __syncthreads();
    x[64 * b + t] += s[63 - t];
    {}
  }}"""
AFTER = """__shared__ int s[32];
  s[t] = t;
  __syncwarp();
  int v = s[(t + 1) & 31];
  {};
  s[t] = v;
  __syncwarp();
  x[t] = s[t];"""


@pytest.mark.parametrize(
    ("right", "wrong", "options"),
    [
        ("atomicAdd(&x[0], 1);", "x[0] += 1;", {}),
        ("atomicAdd(&x[0], 1);", "x[0] += 1;", {"threads": 1, "blocks": 4}),
        (SHARED.format("__syncthreads();"), SHARED.format(""), {"threads": 64, "blocks": 3, "length": 192}),
        (LOOP.format("__syncthreads();"), LOOP.format(""), {"threads": 64, "blocks": 2, "length": 128}),
        (AFTER.format("__syncwarp()"), AFTER.format("__shfl_sync(~0u, v, 0)"), {}),
        (AFTER.format("__syncwarp()"), AFTER.format("__ballot_sync(~0u, 1)"), {}),
        (LAST.format("__threadfence();"), LAST.format(""), {"threads": 1, "blocks": 6}),
    ],
    ids=["threads", "blocks", "shared", "loop", "shuffle", "vote", "fence"],
)
def test_races_are_found_and_what_is_ordered_is_not(right, wrong, options):
    check(right, **options)
    with pytest.raises(EmulatorError, match=r"^k: block \(\d,0,0\) thread \(\d+,0,0\): kernel\.cu:\d: data race\n"):
        check(wrong, **options)


def test_shared_memory_of_the_next_block_is_other_memory():
    body = "extern __shared__ int d[];\n__shared__ int s[32];\nd[t] = s[t] = b;\nx[32 * b + t] = d[t] + s[t];"
    assert check(body, blocks=5, length=160, shared_mem=128).tolist() == [2 * (i // 32) for i in range(160)]


@pytest.mark.parametrize(
    ("body", "sanitizer", "message"),
    [
        ("x[t + 33] = 1;", "asan", r"block \(0,0,0\) thread \(31,0,0\): kernel\.cu:3: heap-buffer-overflow"),
        ("x[t] = x[t - 1];", "asan+ubsan", r"thread \(0,0,0\): kernel\.cu:3: heap-buffer-overflow"),
        (
            "__shared__ int s[31]; int* p = s; p[t] = 1; x[t] = p[t];",
            "asan",
            r"thread \(31,0,0\): kernel\.cu:3: global-buf",
        ),
        ("x[t] = n + 2147483647;", "ubsan", r"kernel\.cu:3: signed integer overflow"),
        ("if (t) __syncthreads();", "tsan", r"kernel\.cu:3: __syncthreads after 1 threads"),
    ],
    ids=["end", "start", "shared", "overflow", "misuse"],
)
def test_reports_become_errors(body, sanitizer, message):
    with pytest.raises(EmulatorError, match=message):
        check(body, sanitizer=sanitizer)
    assert check("x[t] = t;", sanitizer=sanitizer)[:32].tolist() == list(range(32))


def test_results_come_back_and_views_stay_views():
    k = kernel("if (t == 0) { x[0] = 5; y[0] += x[0]; }", "int* x, int* y")
    both = np.zeros(6, np.int32)
    emulate.check(k, (1,), (32,), (both, both[2:]), sanitizer="asan")
    assert both.tolist() == [5, 0, 5, 0, 0, 0]


def test_endless_loops_end_the_worker_and_not_python():
    with pytest.raises(EmulatorError, match=r"^k: the launch took longer than timeout=0\.3 s under asan"):
        check("while (x[0] == 0) x[1] = 0;", sanitizer="asan", timeout=0.3)
    assert check("x[t] = 1;", sanitizer="asan").sum() == 32


def test_ctrl_c_ends_the_worker():
    check("x[t] = 1;", sanitizer="asan")
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        check("while (x[0] == 0) x[1] = 0;", sanitizer="asan", timeout=None)
    assert check("x[t] = 1;", sanitizer="asan").sum() == 32


def test_workers_end_with_python():
    program = (
        "import numpy, ddtree_cupy.emulate as e\n"
        "k = e.Module('extern \"C\" __global__ void k(int* x) { x[0] = 1; }').get_function('k')\n"
        "e.check(k, (1,), (1,), (numpy.zeros(4, 'i4'),), sanitizer='asan')\n"
        "from ddtree_cupy.emulate._child import _workers\n"
        "print(*(worker._process.pid for worker in _workers.values()))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


def test_hypothesis_shrinks_a_race_to_its_smallest_case():
    count = kernel("if (t < n) x[t / 4] += 1;")  # threads in fours share a counter

    def races(n):
        try:
            emulate.check(count, (1,), (64,), (np.zeros(16, np.int32), n), sanitizer="tsan")
        except EmulatorError as error:
            return "data race" in str(error)
        return False

    assert find(st.integers(1, 64), races) == 2


def test_options_that_do_not_go_together_are_rejected():
    with pytest.raises(ArgumentError, match=r"emulate\.check: `sanitizer` is 'msan', expected one of 'asan'"):
        check("x[t] = 1;", sanitizer="msan")
    with pytest.raises(ArgumentError, match=r"emulate\.check: `max_steps` goes without `sanitizer`"):
        check("x[t] = 1;", sanitizer="asan", max_steps=10)
