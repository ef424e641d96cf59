"""The shipped traces, read once."""

import pytest

from ddtree_cupy.explore import Traces


@pytest.fixture(scope="session")
def traces():
    return Traces.load()


@pytest.fixture(scope="session")
def two_prompts(traces):
    return traces.select([0, 1])
