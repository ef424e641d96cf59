"""What every test of a display has: matplotlib without a screen."""

import pytest


@pytest.fixture(autouse=True)
def drawn_alone():
    """Draw into memory; figures are closed, and drawing leaves matplotlib's settings alone."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    before = dict(matplotlib.rcParams)
    yield
    pyplot.close("all")
    assert dict(matplotlib.rcParams) == before
