"""Skip what needs a C++ compiler where there is none (never in CI)."""

import os

import pytest

from ddtree_cupy import emulate


def pytest_runtest_setup(item):
    if item.get_closest_marker("emulate"):
        ok, reason = emulate.available()
        if not ok and not os.environ.get("CI"):
            pytest.skip(reason)
