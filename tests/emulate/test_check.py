"""`emulate.check`: a fault of a kernel is an exception with block, thread and line, and Python goes on."""

import os
import signal
import threading

import numpy as np
import pytest
from hypothesis import find, given
from hypothesis import strategies as st

from ddtree_cupy import emulate
from ddtree_cupy.errors import ArgumentError, DTypeError, EmulatorError
from tests.emulate.cases import run_python

pytestmark = pytest.mark.emulate


def kernel(body, parameters="float* x, int n"):
    code = f'extern "C" __global__ void k({parameters}) {{\nint i = blockIdx.x * blockDim.x + threadIdx.x;\n{body}\n}}'
    return emulate.Module(code).get_function("k")


def zeros(n, dtype=np.float32):
    return np.zeros(n, dtype)


FINE = kernel("if (i < n) x[i] = i;")
ENDLESS = kernel("while (x[0] == 0)\nx[1] = x[0];")


def check(k, n, *, threads=32, **options):
    x = zeros(n)
    emulate.check(k, (1,), (threads,), (x, n), **options)
    return x


@pytest.mark.parametrize("n", [1, 5, 8, 31])  # bytes of a whole number of 16, and not
@pytest.mark.parametrize(
    ("body", "verb"), [("if (i <= n) x[i] = 1;", "writes"), ("if (i < n) x[i] = x[i + 1];", "reads")]
)
def test_overrun_by_one_names_element_thread_and_line(n, body, verb):
    thread = n if verb == "writes" else n - 1
    message = (
        rf"^k: block \(0,0,0\) thread \({thread},0,0\): kernel\.cu:3: {verb} element {n} of argument 0, which has {n}"
    )
    with pytest.raises(EmulatorError, match=message):
        check(kernel(body), n)
    assert check(FINE, n).tolist() == list(range(n))


@pytest.mark.parametrize("n", [5, 8])
@pytest.mark.parametrize("body", ["if (i < n) x[i] = x[i - 1];", "if (i < n) x[i - 1] = 1;"])
def test_underrun_is_found_by_the_guard_at_the_start(n, body):
    with pytest.raises(EmulatorError, match=r"thread \(0,0,0\): kernel\.cu:3: (reads|writes) element -1 of argument 0"):
        check(kernel(body), n, guard="start")
    if "x[i - 1] =" in body:
        with pytest.raises(EmulatorError, match=r"written 4 bytes in front of the array; guard='start'"):
            check(kernel(body), n)


def test_vector_loads_of_arrays_that_end_anywhere_are_fine():
    body = "if (4 * i + 3 < n) y[i] = reinterpret_cast<const float4*>(x)[i].w;"
    k = kernel(body, "const float* x, float* y, int n")
    x, y = np.arange(7, dtype=np.float32), zeros(1)
    emulate.check(k, (1,), (32,), (x, y, 7))
    assert y[0] == 3
    with pytest.raises(EmulatorError, match=r"element 8 of argument 0, which has 8|behind argument 0|element \d+ of"):
        emulate.check(k, (1,), (32,), (np.arange(8, dtype=np.float32), zeros(2), 12))


@pytest.mark.parametrize("guard", ["end", "start", "none"])
def test_views_of_one_array_stay_views(guard):
    k = kernel("if (i == 0) { x[0] = 5; y[0] += x[0]; }", "float* x, float* y")
    both = zeros(6)
    emulate.check(k, (1,), (32,), (both, both[2:]), guard=guard)
    assert both.tolist() == [5, 0, 5, 0, 0, 0]
    same = zeros(4)
    emulate.check(k, (1,), (32,), (same, same), guard=guard)
    assert same.tolist() == [10, 0, 0, 0]


def test_results_are_copied_back_after_an_error():
    x = zeros(8)
    with pytest.raises(EmulatorError):
        emulate.check(kernel("x[i] = 1;"), (1,), (32,), (x, 8))
    assert x.tolist() == [1] * 8


def test_arrays_that_are_const_or_read_only_are_not_written():
    k = kernel("const_cast<float*>(x)[0] = 7; y[0] = x[0];", "const float* x, float* y")
    x, y = zeros(4), zeros(4)
    x.flags.writeable = False
    emulate.check(k, (1,), (1,), (x, y))
    assert (x[0], y[0]) == (0, 7)


@pytest.mark.parametrize("guard", ["end", "start"])
def test_dynamic_shared_memory_is_guarded(guard):
    k = kernel("extern __shared__ float s[];\ns[i] = 1;\nx[i] = s[i];")
    assert check(k, 32, shared_mem=128, guard=guard).sum() == 32
    with pytest.raises(
        EmulatorError, match=r"thread \(31,0,0\): kernel\.cu:4: writes byte 124 of dynamic shared memory"
    ):
        check(k, 32, shared_mem=124)
    with pytest.raises(EmulatorError, match=r"kernel\.cu:4: writes dynamic shared memory, of which .*pass shared_mem="):
        check(k, 32)
    before = kernel("extern __shared__ float s[];\ns[i - 1] = 1;\nx[i] = 1;")
    with pytest.raises(EmulatorError, match=r"kernel\.cu:4: writes byte -4 of dynamic shared memory, which has 128"):
        check(before, 32, shared_mem=128, guard="start")


def test_sparse_arrays_are_guarded_in_place():
    pool = emulate.sparse_array((3, 2**30), np.float32)
    k = kernel("x[at] = 2;", "float* x, long long at")
    emulate.check(k, (1,), (1,), (pool, 3 * 2**30 - 1))
    assert pool[2, -1] == 2
    with pytest.raises(EmulatorError, match=r"kernel\.cu:3: writes element 3221225472 of argument 0"):
        emulate.check(k, (1,), (1,), (pool, 3 * 2**30))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("float* p = nullptr;\np[i + 2] = 1;", r"kernel\.cu:4: writes through a null pointer, 8 bytes behind it"),
        (
            "*reinterpret_cast<float*>(0x123456789000) = 1;",
            r"kernel\.cu:3: writes address 0x[0-9a-f]+, where no argument lies",
        ),
        ("x[1ull << 60] = 1;", r"kernel\.cu:3: accesses an address that no memory can have"),
        ("x[0] = n / int(x[1]);", r"kernel\.cu:3: .*division by zero"),
        ("x[0] = 1;\n__builtin_trap();", r"kernel\.cu:4: a trap"),
        ("if (n) abort();\nx[0] = 1;", r"kernel\.cu:3: abort\(\) was called"),
        ("volatile char big[300000];\nbig[i] = 1;\nx[0] = big[n];", r"kernel\.cu:\d: the stack of this thread is full"),
    ],
    ids=["null", "wild", "none", "division", "trap", "abort", "stack"],
)
def test_signals_become_errors(body, message):
    k = kernel(body)
    with pytest.raises(EmulatorError, match=message):
        check(k, 32)
    with pytest.raises(EmulatorError, match=message):
        k((1,), (32,), (zeros(32), np.int32(32)))
    assert check(FINE, 3).tolist() == [0, 1, 2]


def test_endless_loops_end_at_the_limits():
    for options, reached in (({"timeout": 0.2}, "timeout=0.2 s"), ({"max_steps": 9_999}, "max_steps=9999")):
        with pytest.raises(EmulatorError, match=rf"k: block \(0,0,0\) thread \(0,0,0\): kernel\.cu:[34]: .*{reached}"):
            check(ENDLESS, 4, **options)
    waiting = kernel("while (x[0] == 0)\n__syncthreads();")
    for options in ({"timeout": 0.2}, {"max_steps": 9_999}):
        with pytest.raises(EmulatorError, match=r"kernel\.cu:[34]: the launch reached"):
            check(waiting, 4, **options)


def test_the_limit_of_steps_is_exact():
    k = kernel("for (int j = 0; j < n; ++j) x[j & 3] += 1;")

    def reaches(steps):
        return _raises(lambda: check(k, 8, max_steps=steps))

    least = find(st.integers(1, 100_000), lambda steps: not reaches(steps))
    assert [reaches(least - 1), reaches(least), reaches(least - 1)] == [True, False, True]


def _raises(call):
    try:
        call()
    except EmulatorError:
        return True
    return False


@pytest.mark.parametrize("body", ["while (x[0] == 0)\nx[1] = x[0];", "while (x[0] == 0)\n__syncthreads();"])
def test_ctrl_c_ends_a_launch_and_names_the_line(body):
    k = kernel(body)
    check(kernel("x[i & 3] = 1;"), 4)  # all is compiled before the time counts
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt, match=r"k: block .*kernel\.cu:[34]: interrupted"):
        check(k, 4, timeout=None)
    assert check(FINE, 3).tolist() == [0, 1, 2]


def test_ctrl_c_runs_the_handler_of_the_program():
    seen = []
    old = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt, match="interrupted"):
            check(ENDLESS, 4, timeout=None)
    finally:
        signal.signal(signal.SIGINT, old)
    assert seen == [signal.SIGINT]


def test_signals_outside_of_a_launch_are_left_alone():
    before = {number: signal.getsignal(number) for number in (signal.SIGSEGV, signal.SIGFPE, signal.SIGINT)}
    check(FINE, 3)
    assert {number: signal.getsignal(number) for number in before} == before
    program = "import numpy, ctypes\nfrom ddtree_cupy import emulate\n" + (
        "k = emulate.Module('extern \"C\" __global__ void k(float* x) { x[0] = 1; }').get_function('k')\n"
        "emulate.check(k, (1,), (1,), (numpy.zeros(4, 'f4'),))\nctypes.string_at(0)"
    )
    assert run_python(program).returncode == -signal.SIGSEGV


def test_threads_of_python_may_launch():
    found = []

    def work():
        try:
            check(kernel("x[i] = 1;"), 8)
        except EmulatorError as error:
            found.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all("writes element 8 of argument 0" in text for text in found)


@given(st.integers(1, 100))
def test_any_healthy_launch_passes(n):
    assert check(FINE, n, threads=128).tolist() == list(range(n))


def test_hypothesis_shrinks_an_overrun_to_its_smallest_case():
    k = kernel("if (i / 4 < (n + 3) / 4) x[i] = i;")  # rounds up to a multiple of four
    assert find(st.integers(1, 1000), lambda n: _raises(lambda: check(k, n, threads=1024))) == 1


def test_python_numbers_are_taken_where_they_fit():
    k = kernel("x[0] = n + f + (b ? 100 : 0);", "float* x, unsigned char n, double f, bool b")
    x = zeros(4)
    emulate.check(k, (1,), (1,), (x, 7, 0.5, True))
    assert x[0] == 107.5
    for args, message in (
        ((x, 256, 0.5, True), r"argument 1 is 256, which does not fit uint8: 0\.\.255"),
        ((x, 1.5, 0.5, True), r"argument 1 is 1\.5, the kernel takes uint8"),
        ((x, 1, 0.5, 2), r"argument 3 is 2, the kernel takes bool"),
        ((3, 1, 0.5, True), r"argument 0 is a int, expected a numpy\.ndarray"),
        ((x, 1, 0.5), r"3 arguments, expected 4"),
    ):
        with pytest.raises((ArgumentError, DTypeError), match=message):
            emulate.check(k, (1,), (1,), args)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guard": "left"}, r"emulate\.check: `guard` is 'left', expected one of 'end', 'start', 'none'"),
        ({"max_steps": 0}, r"emulate\.check: `max_steps` is 0"),
        ({"timeout": 0}, r"emulate\.check: `timeout` is 0"),
        ({"seed": -1}, r"emulate\.check: `seed` is -1"),
    ],
)
def test_check_rejects_odd_options(options, message):
    with pytest.raises(ArgumentError, match=message):
        check(FINE, 3, **options)
    with pytest.raises(DTypeError, match=r"`kernel` is str, expected Function"):
        emulate.check("k", (1,), (1,), ())
