"""The kernel versions of tree_attention, one module each under the name of its source; this is their registry."""

from ddtree_cupy.tree_attention.versions import v1_three_phase, v2_split_kv, v3_mma, v4_wgmma
from ddtree_cupy.tree_attention.versions.common import Version

__all__ = ["VERSIONS", "Version"]

VERSIONS: dict[str, Version] = {  # "auto" takes the first that refuses nothing
    "v4_wgmma": v4_wgmma,
    "v3_mma": v3_mma,
    "v2_split_kv": v2_split_kv,
    "v1_three_phase": v1_three_phase,
}
