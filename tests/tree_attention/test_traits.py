"""What a version says of itself is what it does: traits against refusals and plans, for sizes of any device."""

import pytest

from ddtree_cupy.kernels.device import EMULATED
from ddtree_cupy.tree_attention.call import Sizes
from ddtree_cupy.tree_attention.versions import VERSIONS

every_version = pytest.mark.parametrize("version", VERSIONS.values(), ids=VERSIONS)
OTHER_SIZES = (48, 32)  # of heads, which no version names


def sizes_for(version, **changes):
    """Return the sizes of a call that the version takes, by its traits."""
    traits = version.TRAITS
    width, rope = (traits.head_sizes or ((512, 64),))[0]
    sizes = Sizes(traits.dtypes[0], 2, 5, 3, width, rope, 2_048, None, EMULATED, box_keys=64)
    return sizes._replace(**changes)


@every_version
def test_versions_take_the_dtypes_they_name(version):
    for dtype in ("float32", "float16", "bfloat16"):
        assert (version.refusal(sizes_for(version, dtype=dtype)) == "") == (dtype in version.TRAITS.dtypes)


@every_version
def test_versions_take_the_head_sizes_they_name(version):
    named = version.TRAITS.head_sizes
    for width, rope in (*(named or ()), OTHER_SIZES):
        found = version.refusal(sizes_for(version, head_dim_ckv=width, head_dim_kpe=rope))
        assert (found == "") == (named is None or (width, rope) in named)


@every_version
def test_versions_cut_keys_if_they_say_so(version):
    free, cut = (version.plan(sizes_for(version, split_keys=split)) for split in (None, 64))
    assert ((free.scratch, free.args) != (cut.scratch, cut.args)) == version.TRAITS.cuts_keys


@every_version
def test_versions_take_any_length_if_they_say_so(version):
    assert (version.refusal(sizes_for(version, most_keys=2**21)) == "") == version.TRAITS.any_length


@every_version
@pytest.mark.parametrize("arch", [70, 75, 80, 86, 90, 100, 120])
def test_versions_run_from_the_architecture_they_name(version, arch):
    sizes = sizes_for(version, device=EMULATED._replace(arch=f"sm_{arch}"))
    assert (version.refusal(sizes) == "") == (version.TRAITS.least_arch <= arch <= version.TRAITS.most_arch)


@every_version
def test_versions_take_any_pages_unless_they_name_some(version):
    assert (version.refusal(sizes_for(version, box_keys=0)) == "") == (version.TRAITS.page_sizes is None)
