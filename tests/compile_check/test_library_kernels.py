"""Every kernel of the library compiles for every architecture, within the limits kept beside its spec."""

import re

import pytest

import ddtree_cupy  # noqa: F401  (registers the specs)
from ddtree_cupy.compile_check import nvrtc, resources
from ddtree_cupy.kernels import registered_specs, signature, source_root
from ddtree_cupy.tree_attention import call
from ddtree_cupy.tree_attention.versions import v2_split_kv, v3_mma
from ddtree_cupy.tree_build import kernel_specs as build_specs

WORKS, REASON = nvrtc.available()


@pytest.mark.nvrtc
@pytest.mark.slow
@pytest.mark.skipif(not WORKS, reason=f"needs NVRTC: {REASON}")
@pytest.mark.parametrize("arch", resources.ARCHS)
def test_kernels_compile_within_their_limits(arch):
    assert resources.problems(resources.kernel_table([arch])) == []


@pytest.mark.parametrize("spec", registered_specs(), ids=lambda spec: spec.label)
def test_argument_table_is_the_kernels_signature(spec):
    assert signature.mismatches(spec) == []


def test_every_source_has_a_registered_kernel():
    sources = {
        f"{folder.name}/{file.name}"
        for folder in source_root().iterdir()
        if folder.is_dir()
        for file in folder.iterdir()
    }
    kernels = {name for name in sources if name.endswith(".cu")}
    assert kernels == {spec.source for spec in registered_specs()}


V2, V3 = "tree_attention/v2_slices.cuh", "tree_attention/v3_layout.cuh"
CONSTANTS = [
    (V2, "WARPS", v2_split_kv.WARPS),
    (V2, "TILE", v2_split_kv.TILE),
    (V2, "LEAST_KEYS", v2_split_kv.LEAST_KEYS),
    (V2, "MOST_KEYS", v2_split_kv.MOST_KEYS),
    (V2, "BLOCKS_WANTED", v2_split_kv.BLOCKS_WANTED),
    (V3, "FOLD_KEYS", v3_mma.FOLD_KEYS),
    (V3, "THREADS", v3_mma.THREADS),
    ("tree_attention/v3_merge.cu", "MERGED_ROWS", v3_mma.MERGED_ROWS),
    ("tree_attention/v3_schedule.cuh", "TILE_ROWS", v3_mma.TILE_ROWS),
    *(("common/visibility.cuh", f"KEYS_{name.upper()}", value) for name, value in call.KEYS.items()),
    ("tree_build/best_first.cu", "WIDTHS", build_specs.WIDTHS),
    ("tree_build/top_candidates.cu", "ITEMS", build_specs.ITEMS),
    ("tree_build/topology.cu", "WARPS", build_specs.NODES_PER_BLOCK),
    *(("common/ordered.cuh", f"SILENT_BITS<{build_specs.CTYPES[d]}>", v) for d, v in build_specs.SILENT_BITS.items()),
]


@pytest.mark.parametrize(("source", "name", "value"), CONSTANTS)
def test_constants_are_those_of_the_sources(source, name, value):
    """The launcher sizes grids and scratch by them; a kernel with other ones would write past the end."""
    text = (source_root() / source).read_text()
    constants = dict(re.findall(r"constexpr int ([\w<>]+) = ([^;]+);", text))
    written = constants.get(name, constants.get(name.removesuffix("<float>")))
    assert written is not None
    for other, number in constants.items():
        written = re.sub(rf"\b{re.escape(other)}\b", number, written)
    assert eval(written, {"__builtins__": {}}) == value


@pytest.mark.parametrize("path", sorted(source_root().rglob("*.cu*")), ids=lambda path: path.name)
def test_sources_are_of_readable_size(path):
    lines = path.read_text().splitlines()
    assert max(map(len, lines)) <= 120
    assert len(lines) < 280
