"""Fixtures of the tree_build tests."""

import pytest

from ddtree_cupy.tree_build import kernel
from ddtree_cupy.tree_build.versions import BEST_FIRST


@pytest.fixture(scope="module", params=BEST_FIRST)
def best_first(request):
    """Let kernels build trees by this version, or by an older one where it refuses."""
    names = list(BEST_FIRST)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "BEST_FIRST", {name: BEST_FIRST[name] for name in names[names.index(request.param) :]})
        kernel.tree_plan.cache_clear()
        kernel.build_plan.cache_clear()
        yield request.param
    kernel.tree_plan.cache_clear()
    kernel.build_plan.cache_clear()
