"""`check_kernel` and `ddtree check`: the card of right and of wrong kernels that somebody else might have written."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from ddtree_cupy import cli, emulate
from ddtree_cupy.errors import ArgumentError, CompileError, UnsupportedError
from ddtree_cupy.testing import Card, Gate, Launch, check_kernel

pytestmark = pytest.mark.emulate

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
KERNELS = ("reduction", "matmul", "softmax")
WRONG = {  # a realistic slip, what the emulator says of it, and the smallest case
    "reduction": (
        "i < n; i += gridDim",
        "i <= n; i += gridDim",
        r"reduction\.cu:\d+: reads element 1 of argument 0",
        "int32[1]",
    ),
    "matmul": (
        "    __syncthreads();\n    for (int i = 0",
        "    for (int i = 0",
        r"argument 2 at \[\d+, \d+\] is nan, expected",
        "grid (1, 1)",
    ),
    "softmax": (
        "expf(x[i] - largest)",
        "expf(x[i])",
        r"argument 1 at \[0, 0\] is (inf|nan|0\.0), expected",
        "grid (1,)",
    ),
}


def case_of(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.case


def gates(card):
    return {gate.name: gate for gate in card.gates}


@pytest.mark.parametrize("name", KERNELS)
def test_a_right_kernel_passes_every_gate_that_is_here(name):
    card = check_kernel(EXAMPLES / f"{name}.cu", case_of(name), examples=20, sanitizers=())
    assert card.ok, str(card)
    assert gates(card)["emulator"].ok
    assert gates(card)["compiler"].ok in (True, None)


@pytest.mark.parametrize("name", KERNELS)
def test_a_wrong_kernel_fails_with_its_smallest_case(name, tmp_path):
    right, wrong, message, smallest = WRONG[name]
    text = (EXAMPLES / f"{name}.cu").read_text()
    assert right in text
    path = tmp_path / f"{name}.cu"
    path.write_text(text.replace(right, wrong))
    card = check_kernel(path, case_of(name), examples=60, sanitizers=())
    gate = gates(card)["emulator"]
    assert (card.ok, gate.ok) == (False, False)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(gate.text)
    assert smallest in gate.text.partition("smallest case:")[2]


@pytest.mark.sanitizer
@pytest.mark.slow
@pytest.mark.skipif("clang" in emulate.compiler() if emulate.available()[0] else False, reason="sanitizers need g++")
def test_sanitizers_are_gates(tmp_path):
    text, path = (EXAMPLES / "softmax.cu").read_text(), tmp_path / "softmax.cu"
    line = "  largest = part[0];\n"
    assert f"{line}  __syncthreads();\n" in text
    path.write_text(text.replace(f"{line}  __syncthreads();\n", line))  # who is late reads a sum
    card = check_kernel(path, case_of("softmax"), examples=1)
    assert gates(card)["tsan"].ok is False
    assert "softmax.cu:" in gates(card)["tsan"].text
    assert "data race" in gates(card)["tsan"].text
    assert check_kernel(EXAMPLES / "softmax.cu", case_of("softmax"), examples=5).ok


def test_integers_are_exact_and_floats_have_a_tolerance():
    def gate(kind, dtype, error, **options):
        def case(draw):
            x = np.full(3, 100, dtype)
            return Launch((1,), (32,), (x, 0), {0: np.full(3, 100 + error)}, **options)

        code = f'extern "C" __global__ void k({kind}* x, {kind} add) {{ x[0] += add; }}'
        return gates(check_kernel(code, case, examples=1, sanitizers=()))["emulator"]

    assert gate("int", np.int32, 0).ok
    assert "argument 0 at [0] is 100, expected 101; 3 of 3 differ" in gate("int", np.int32, 1).text
    assert gate("float", np.float32, 5e-4).ok
    assert gate("float", np.float32, 5e-3).ok is False
    assert gate("float", np.float32, 5e-3, rtol=1e-3).ok


def test_compile_errors_and_names_are_reported_before_anything_runs():
    two = 'extern "C" __global__ void a() {} extern "C" __global__ void b() {}'

    def never(draw):
        raise AssertionError("no launch was wanted")

    with pytest.raises(CompileError, match=r"kernel\.cu:1:.*oops"):
        check_kernel('extern "C" __global__ void a() { oops; }', never)
    with pytest.raises(UnsupportedError, match=r"check_kernel: the source has a, b; choose one by `kernel=`"):
        check_kernel(two, never)
    with pytest.raises(ArgumentError, match="has no kernel 'c'"):
        check_kernel(two, never, kernel="c")


def test_what_only_the_host_compiler_takes_fails_the_compiler_gate():
    def case(draw):
        return Launch((1,), (draw(st.integers(1, 32)),), (np.zeros(1, np.int32),), {})

    card = check_kernel(
        'extern "C" __global__ void k(int* x) { x[0] = __builtin_parity(1); }',
        case,
        sanitizers=(),
    )
    gate = gates(card)["compiler"]
    assert gate.ok is not True
    assert gate.ok is None or "__builtin_parity" in gate.text


def test_a_fault_that_comes_and_goes_is_shown():
    from ddtree_cupy.testing.kernel_card import _search

    outcomes = iter([*("ok", "ok", "argument 0 is wrong"), *("",) * 1000])

    def attempt(draw):
        draw(st.integers())
        found = next(outcomes)
        return "n = 1", "" if found == "ok" else found

    gate = _search("gpu", attempt, 10, "fine")
    assert gate == Gate("gpu", False, "argument 0 is wrong\nsmallest case: n = 1\nnot every time")


def test_cards_fit_into_60_columns():
    card = Card("k", (Gate("emulator", False, "word " * 40 + "\nsmallest case: n = 1"), Gate("gpu", None, "")))
    assert str(card).startswith("k: FAILED\n  emulator    FAILED   word word")
    assert max(map(len, str(card).splitlines())) <= 60
    assert Card("k", (Gate("gpu", None, "no GPU"),)).ok


def test_the_command_prints_the_card(capsys, tmp_path):
    assert cli.main(["check", str(EXAMPLES / "reduction.cu"), "--examples", "5", "--no-sanitizers"]) == 0
    assert capsys.readouterr().out.startswith("reduction: passed\n  compiler")
    path = tmp_path / "wrong.cu"
    path.write_text((EXAMPLES / "reduction.cu").read_text().replace("i < n; i +=", "i <= n; i +="))
    case = str(EXAMPLES / "reduction.py")
    assert cli.main(["check", str(path), "--case", case, "--examples", "20", "--no-sanitizers"]) == 1
    assert "wrong.cu:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "absent.cu"], "absent.cu does not exist, expected a .cu file"),
        (
            ["check", str(EXAMPLES / "softmax.cu"), "--case", "absent.py"],
            "absent.py does not exist, expected a Python file",
        ),
        (["check", str(EXAMPLES / "softmax.cu"), "--case", __file__], "has no function `case(draw)`"),
        (["check", str(EXAMPLES / "softmax.cu"), "--examples", "0"], "--examples is 0, expected at least 1"),
    ],
)
def test_the_command_refuses_in_one_line(arguments, message, capsys):
    assert cli.main(arguments) != 0
    found = capsys.readouterr().err
    assert message in found
    assert "Traceback" not in found
