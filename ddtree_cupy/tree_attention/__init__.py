"""tree_attention: MLA attention over a paged context and the visible nodes of a draft tree."""

from ddtree_cupy.tree_attention.api import convert_lse, merge_states, tree_attention, write_kv

__all__ = ["convert_lse", "merge_states", "tree_attention", "write_kv"]
