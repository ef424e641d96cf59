"""Every kernel of the library compiles for every architecture, within the limits kept beside its spec."""

import pytest

import ddtree_cupy  # noqa: F401  (registers the specs)
from ddtree_cupy.compile_check import nvrtc, resources
from ddtree_cupy.kernels import registered_specs, source_root
from tests.faults import FAULTS

WORKS, REASON = nvrtc.available()


@pytest.mark.nvrtc
@pytest.mark.slow
@pytest.mark.skipif(not WORKS, reason=f"needs NVRTC: {REASON}")
@pytest.mark.parametrize("arch", resources.ARCHS)
def test_kernels_compile_within_their_limits(arch):
    assert resources.problems(resources.kernel_table([arch])) == []


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_find_their_text(name):
    """The runs that plant them are slow; a fault whose text has changed shows here."""
    fault = FAULTS[name]
    for file in (fault.source,) if isinstance(fault.source, str) else fault.source:
        assert fault.right in (source_root() / file).read_text()


def test_every_source_has_a_registered_kernel():
    sources = {
        f"{folder.name}/{file.name}"
        for folder in source_root().iterdir()
        if folder.is_dir()
        for file in folder.iterdir()
    }
    kernels = {name for name in sources if name.endswith(".cu")}
    assert kernels == {spec.source for spec in registered_specs()}


@pytest.mark.parametrize("path", sorted(source_root().rglob("*.cu*")), ids=lambda path: path.name)
def test_sources_are_of_readable_size(path):
    lines = path.read_text().splitlines()
    assert max(map(len, lines)) <= 120
    assert len(lines) < 280
