"""Every planted bug is found by the modes that its row names, with its line, and shrunk; right kernels by none."""

from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from ddtree_cupy import emulate
from tests.emulate.planted_bugs import BUGS, LARGEST, find, table

pytestmark = [pytest.mark.emulate, pytest.mark.sanitizer, pytest.mark.slow]

EACH = pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)


@pytest.fixture(autouse=True)
def gnu_compiler():
    if "clang" in emulate.compiler():
        pytest.skip("the sanitizer modes need g++")


@EACH
def test_a_right_kernel_is_reported_by_no_mode(bug):
    for n in bug.sizes:
        for mode in ("result", "check", "start", "seeds"):
            assert find(bug, mode, n, is_wrong=False) == ""
    for mode in ("asan", "tsan"):
        assert find(bug, mode, bug.sizes[-1], is_wrong=False) == ""


@EACH
def test_modes_find_the_fault_and_name_its_line(bug):
    assert bug.modes
    for mode in bug.modes:
        found = find(bug, mode, bug.shows)
        assert found == "wrong result" or any(f"kernel.cu:{line}: " in found for line in bug.lines), (mode, found)


@EACH
def test_hypothesis_shrinks_the_fault_to_its_smallest_case(bug):
    mode = bug.modes[0]
    settings = hypothesis.settings(database=None, max_examples=20 if mode == "tsan" else 200)
    smallest = hypothesis.find(st.integers(1, LARGEST), lambda n: find(bug, mode, n) != "", settings=settings)
    assert smallest == bug.smallest


def test_bugs_are_of_many_kinds_and_some_were_public():
    assert len(BUGS) >= 20
    assert len({bug.kind for bug in BUGS}) >= 10
    assert sum(bool(bug.report) for bug in BUGS) >= 8


def test_the_page_is_that_of_the_table():
    page = Path(__file__).parents[2] / "docs" / "planted_bugs.md"
    assert page.read_text("utf-8") == table(), "python -m tests.emulate.planted_bugs > docs/planted_bugs.md"
