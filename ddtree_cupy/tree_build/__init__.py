"""tree_build: drafter logits -> best-first draft tree."""

from ddtree_cupy.tree_build.api import best_first_tree, build_tree, choose_budget, top_candidates

__all__ = ["best_first_tree", "build_tree", "choose_budget", "top_candidates"]
