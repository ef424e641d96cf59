"""Random targets and paths on draft trees, and caches whose every row is recognisable."""

import numpy as np
from hypothesis import strategies as st

from ddtree_cupy import AcceptResult, PagedKV
from ddtree_cupy.testing.strategies import draft_trees, seeds

ABSURD = [-(2**31), -2, -1, 0, 1, 5, 2**30, 2**31 - 1]


def children_of(parents, node, num_nodes):
    """Return the children of a node by scanning the parents."""
    return [i for i in range(1, num_nodes) if parents[i] == node]


def random_targets(rng, tree):
    """Return int32 targets shaped like token_ids: mostly a child's token, else any token, -1 or a stranger.

    Rows from num_nodes on hold tokens of real children of the root, which a walk must not use.
    """
    parents, tokens = np.atleast_2d(tree.parents), np.atleast_2d(tree.token_ids)
    targets = np.zeros(tokens.shape, np.int32)
    for b, count in enumerate(np.atleast_1d(tree.num_nodes).tolist()):
        for node in range(tokens.shape[1]):
            children = children_of(parents[b], node if node < count else 0, count)
            if children and rng.random() < 0.75:
                targets[b, node] = tokens[b, rng.choice(children)]
            else:
                targets[b, node] = rng.choice([-1, 0, 1, 2, 1000, 2**31 - 1])
    return targets.reshape(tree.token_ids.shape)


@st.composite
def trees_and_targets(draw, **options):
    """Draw a tree with few distinct tokens and targets for it."""
    tree = draw(draft_trees(**({"vocab": 6, "max_nodes": 40} | options)))
    return tree, random_targets(np.random.default_rng(draw(seeds())), tree)


def result_of(paths, capacity, bonus=7):
    """Return an AcceptResult from one list of nodes a request; an empty list is an inactive request."""
    accepted = np.full((len(paths), capacity), -1, np.int32)
    for b, path in enumerate(paths):
        accepted[b, : len(path)] = path
    num_accepted = np.array([len(path) - 1 for path in paths], np.int32)
    bonus_token = np.where(num_accepted >= 0, bonus, -1).astype(np.int32)
    return AcceptResult(accepted, num_accepted, bonus_token)


def random_paths(rng, tree):
    """Return, per request, the nodes from the root down to a random node."""
    paths = []
    parents = np.atleast_2d(tree.parents)
    for b, count in enumerate(np.atleast_1d(tree.num_nodes).tolist()):
        path, node = [], int(rng.integers(0, count)) if count else -1
        while node >= 0:
            path.append(node)
            node = int(parents[b, node])
        paths.append(path[::-1])
    return paths


def key_rows(token_ids, positions, width):
    """Return float32 rows that depend on token and position alone, as a model's keys would."""
    phase = np.asarray(token_ids)[..., None] * 0.37 + np.asarray(positions)[..., None] * 1.61
    return np.sin(phase * np.arange(1, width + 1)).astype(np.float32)


def line(context, num_nodes, *, page_size=4, batch=None):
    """Return a cache whose row at position p holds p in `ckv` and -p in `kpe`."""
    rows = np.arange(context + num_nodes, dtype=np.float32)[:, None].repeat(16, axis=1)
    if batch is not None:
        rows = np.broadcast_to(rows, (batch, *rows.shape))
    lens = context if batch is None else [context] * batch
    return PagedKV.from_dense(rows, -rows, page_size=page_size, context_lens=lens)


def values(kv):
    """Return the rows of an unbatched `line` cache in logical order, from both pools."""
    ckv, kpe = kv.ckv[kv.page_table, :, 0].ravel(), kv.kpe[kv.page_table, :, 0].ravel()
    np.testing.assert_array_equal(ckv, -kpe)
    return ckv.astype(int).tolist()
