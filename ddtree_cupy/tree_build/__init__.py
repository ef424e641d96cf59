"""tree_build: drafter logits -> best-first draft tree."""

from ddtree_cupy.tree_build.api import (
    best_first_tree,
    best_first_tree_workspace_bytes,
    build_tree,
    build_tree_workspace_bytes,
    choose_budget,
    top_candidates,
    top_candidates_workspace_bytes,
)

__all__ = [
    "best_first_tree",
    "best_first_tree_workspace_bytes",
    "build_tree",
    "build_tree_workspace_bytes",
    "choose_budget",
    "top_candidates",
    "top_candidates_workspace_bytes",
]
