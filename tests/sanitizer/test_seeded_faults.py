"""Planted kernel faults must be caught without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import FAULTS

ROOT = Path(__file__).parents[2]


def run_tests(*nodes, **environment):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not gpu", "-p", "no:cacheprovider", *nodes]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, "CI": "", **environment}, capture_output=True, text=True, check=False
    )


@pytest.mark.emulate
@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_suite_catches_planted_fault(name):
    found = run_tests(FAULTS[name].caught_by, PLANTED_FAULT=name, HYPOTHESIS_PROFILE="dev")
    assert found.returncode not in (0, 2, 3, 4, 5), found.stdout[-2000:] + found.stderr[-2000:]
    assert "the text to replace is gone" not in found.stdout
    assert "CompileError" not in found.stdout  # a fault must run to be caught


@pytest.mark.emulate
@pytest.mark.slow
def test_the_same_tests_pass_without_a_fault():
    nodes = sorted({fault.caught_by for fault in FAULTS.values()})
    found = run_tests(*nodes, PLANTED_FAULT="", HYPOTHESIS_PROFILE="dev")
    assert found.returncode == 0, found.stdout[-2000:]
