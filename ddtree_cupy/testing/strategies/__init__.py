"""Hypothesis strategies for the library's inputs; names are plural nouns, bounds are keyword-only and checked.

Hypothesis draws the structure (sizes near word and page edges, shapes of trees, dtypes, strides) and a seed. NumPy's
Generator fills the arrays from that seed. No value is a float32 subnormal.
"""

from ddtree_cupy.testing.strategies.caches import RaggedBatch, paged_caches, ragged_batches
from ddtree_cupy.testing.strategies.logits import candidate_tables, draft_logits
from ddtree_cupy.testing.strategies.sizes import node_counts, seeds
from ddtree_cupy.testing.strategies.trees import draft_trees, parent_arrays, visibilities

__all__ = [
    "RaggedBatch",
    "candidate_tables",
    "draft_logits",
    "draft_trees",
    "node_counts",
    "paged_caches",
    "parent_arrays",
    "ragged_batches",
    "seeds",
    "visibilities",
]
