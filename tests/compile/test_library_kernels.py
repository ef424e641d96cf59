"""Every kernel of the library compiles for every architecture, within the limits kept beside its spec."""

import pytest

import ddtree_cupy  # noqa: F401  (registers the specs)
from ddtree_cupy._compile import nvrtc, registered_specs, resources, signature

WORKS, REASON = nvrtc.available()


@pytest.mark.nvrtc
@pytest.mark.skipif(not WORKS, reason=f"needs NVRTC: {REASON}")
@pytest.mark.parametrize("arch", resources.ARCHS)
def test_kernels_compile_within_their_limits(arch):
    assert resources.problems(resources.kernel_table([arch])) == []


@pytest.mark.parametrize("spec", registered_specs(), ids=lambda spec: spec.label)
def test_argument_table_is_the_kernels_signature(spec):
    assert signature.mismatches(spec) == []


def test_every_source_has_a_registered_kernel():
    from ddtree_cupy._compile import source_root

    sources = {
        f"{folder.name}/{file.name}"
        for folder in source_root().iterdir()
        if folder.is_dir()
        for file in folder.iterdir()
    }
    kernels = {name for name in sources if name.endswith(".cu")}
    assert kernels == {spec.source for spec in registered_specs()}
