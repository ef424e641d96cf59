"""The arrays of one decoding round, grouped: frozen dataclasses that hold NumPy or CuPy arrays and own no logic.

Letters of the shape comments: B requests, L draft length, K candidates per depth, N nodes including the root,
W = ceil(N / 32), P pages, C latent width, R rope width. The leading axis B may be absent everywhere at once; then
`num_nodes`, `status`, `page_table` (1-d), `context_lens`, `num_accepted` and `bonus_token` lose it too.
"""

from ddtree_cupy.containers.cache import AcceptResult, PagedKV
from ddtree_cupy.containers.tree import Candidates, DraftTree, Visibility

__all__ = ["AcceptResult", "Candidates", "DraftTree", "PagedKV", "Visibility"]
