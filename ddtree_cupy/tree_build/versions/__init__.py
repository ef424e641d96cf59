"""The kernel versions of tree_build, one module each under the name of its source; this is their registry."""

from ddtree_cupy.tree_build.versions import v1_best_first, v2_best_first
from ddtree_cupy.tree_build.versions.common import TreeSizes, TreeVersion

__all__ = ["BEST_FIRST", "TreeSizes", "TreeVersion"]

BEST_FIRST: dict[str, TreeVersion] = {  # the first that refuses nothing is taken
    "v2_best_first": v2_best_first,
    "v1_best_first": v1_best_first,
}
