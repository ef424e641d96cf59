"""Tree-masked speculative verification for MLA models: CUDA kernels, each beside the NumPy reference that defines it.

One decoding round::

    draft logits -> build_tree -> tree_attention -> (the target's own layers) -> accept -> commit_kv -> next round

NumPy arrays run the references, CuPy arrays the kernels. See the README for the conventions.
"""

from ddtree_cupy.containers import AcceptResult, Candidates, DraftTree, PagedKV, Visibility
from ddtree_cupy.tree_accept import (
    accept,
    commit_kv,
    commit_kv_workspace_bytes,
    greedy_targets,
    sample_targets,
)
from ddtree_cupy.tree_attention import (
    convert_lse,
    merge_states,
    tree_attention,
    tree_attention_workspace_bytes,
    write_kv,
)
from ddtree_cupy.tree_build import (
    best_first_tree,
    best_first_tree_workspace_bytes,
    build_tree,
    build_tree_workspace_bytes,
    choose_budget,
    top_candidates,
    top_candidates_workspace_bytes,
)

__version__ = "0.1.0"

__all__ = [
    "AcceptResult",
    "Candidates",
    "DraftTree",
    "PagedKV",
    "Visibility",
    "accept",
    "best_first_tree",
    "best_first_tree_workspace_bytes",
    "build_tree",
    "build_tree_workspace_bytes",
    "choose_budget",
    "commit_kv",
    "commit_kv_workspace_bytes",
    "convert_lse",
    "greedy_targets",
    "merge_states",
    "sample_targets",
    "top_candidates",
    "top_candidates_workspace_bytes",
    "tree_attention",
    "tree_attention_workspace_bytes",
    "write_kv",
]
