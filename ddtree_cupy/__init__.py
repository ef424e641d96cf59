"""Tree-masked speculative verification for MLA models: CUDA kernels, each beside the NumPy reference that defines it.

One decoding round::

    draft logits -> build_tree -> tree_attention -> (the target's own layers) -> accept -> commit_kv -> next round

NumPy arrays run the references, CuPy arrays the kernels. On the host every function and container takes what is like
an array, too: lists of equal length, CPU tensors of other libraries, and integers of any dtype where int32 is said, if
their values fit. Nothing is converted on a GPU, nor what a call writes: `out=`, `workspace=` and the pages of a cache.
See the README for the conventions.
"""

from ddtree_cupy._bind import bind
from ddtree_cupy._call import workspace_bytes
from ddtree_cupy.containers import AcceptResult, Candidates, DraftTree, PagedKV, Visibility
from ddtree_cupy.tree_accept import accept, commit_kv, greedy_targets, sample_targets
from ddtree_cupy.tree_attention import convert_lse, merge_states, tree_attention, write_kv
from ddtree_cupy.tree_build import best_first_tree, build_tree, choose_budget, top_candidates

__version__ = "0.1.0"

__all__ = [
    "AcceptResult",
    "Candidates",
    "DraftTree",
    "PagedKV",
    "Visibility",
    "accept",
    "best_first_tree",
    "bind",
    "build_tree",
    "choose_budget",
    "commit_kv",
    "convert_lse",
    "greedy_targets",
    "merge_states",
    "sample_targets",
    "top_candidates",
    "tree_attention",
    "workspace_bytes",
    "write_kv",
]
