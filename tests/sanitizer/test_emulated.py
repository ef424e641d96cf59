"""The kernel tests once more in child processes whose emulated kernels run under ASan and UBSan."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_cupy import emulate

ROOT = Path(__file__).parents[2]
TESTS = sorted((ROOT / "tests").glob("tree_*/test_kernels*.py"))


@pytest.mark.emulate
@pytest.mark.sanitizer
@pytest.mark.slow
@pytest.mark.parametrize("tests", TESTS, ids=lambda path: path.stem)
def test_kernels_are_clean_under_asan_and_ubsan(tests):
    environment = {**os.environ, **emulate.sanitizer_environment("asan+ubsan"), "HYPOTHESIS_PROFILE": "sanitize"}
    marks = "emulate and not slow"  # what is slow already takes ten times as long here, and runs the same lines
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", marks, "-p", "no:cacheprovider", str(tests)]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
