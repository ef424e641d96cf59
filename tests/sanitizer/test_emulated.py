"""The kernel tests once more in child processes whose emulated kernels run under ASan and UBSan."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_cupy import emulate

ROOT = Path(__file__).parents[2]


@pytest.mark.emulate
@pytest.mark.sanitizer
@pytest.mark.slow
@pytest.mark.parametrize("op", ["tree_build", "tree_attention", "tree_accept"])
def test_kernels_are_clean_under_asan_and_ubsan(op):
    tests = sorted(str(path) for path in (ROOT / "tests" / op).glob("test_kernels*.py"))
    assert tests
    environment = {**os.environ, **emulate.sanitizer_environment("asan+ubsan"), "HYPOTHESIS_PROFILE": "sanitize"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "emulate", "-p", "no:cacheprovider", *tests]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
