"""tree_accept: the longest verified path, the bonus token, and the cache after it."""

from ddtree_cupy.tree_accept.api import accept, commit_kv, greedy_targets, sample_targets

__all__ = ["accept", "commit_kv", "greedy_targets", "sample_targets"]
