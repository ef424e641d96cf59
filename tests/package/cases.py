"""Small valid containers."""

from dataclasses import replace

import numpy as np

from ddtree_cupy import AcceptResult, Candidates, DraftTree, PagedKV

# The toy tree T6.
T6_TOKENS = [9, 10, 20, 11, 21, 20]
T6_PARENTS = [-1, 0, 1, 0, 1, 3]
INT32_MAX = 2**31 - 1


def t6():
    return DraftTree.from_parents(T6_TOKENS, T6_PARENTS)


def int32(*values):
    return np.array(values, np.int32)


def cache_case(**changes):
    """Two requests of three 4-row pages, contexts 5 and 9, ten pages."""
    kv = PagedKV(
        ckv=np.ones((10, 4, 8), np.float32),
        kpe=np.ones((10, 4, 2), np.float32),
        page_table=np.array([[3, 5, 7], [2, 9, 0]], np.int32),
        context_lens=int32(5, 9),
    )
    return replace(kv, **changes)


def candidates_case(**changes):
    return replace(
        Candidates(
            token_ids=np.array([[4, 2, -1], [0, 1, 2]], np.int32),
            logits=np.array([[2.0, 1.0, -np.inf], [1.0, 1.0, 0.5]], np.float32),
            lse=np.array([2.5, 2.0], np.float32),
        ),
        **changes,
    )


def result_case(accepted=((0, 1, 3, -1), (-1, -1, -1, -1)), num_accepted=(2, -1), bonus=(7, -1)):
    return AcceptResult(np.array(accepted, np.int32), int32(*num_accepted), int32(*bonus))


def table(token_ids=((4, 2, -1), (0, 1, 2)), logits=((2, 1, -np.inf), (1, 1, 0.5)), lse=(2.5, 2)):
    return candidates_case(
        token_ids=np.array(token_ids, np.int32), logits=np.array(logits, np.float32), lse=np.array(lse, np.float32)
    )
