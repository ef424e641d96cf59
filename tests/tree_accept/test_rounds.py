"""Fifty rounds of write, accept and commit leave the cache that computing the text anew gives."""

from dataclasses import replace

import numpy as np
import pytest

from ddtree_cupy import DraftTree, PagedKV, Visibility, accept, commit_kv, tree_attention, write_kv
from ddtree_cupy.testing import assert_identical
from tests.oracles import gather
from tests.tree_accept.cases import key_rows, random_targets


class Round:
    """A decoding loop over made-up tokens: the text grows, and every key depends on token and position alone."""

    def __init__(self, seed, batch, page_sizes):
        self.rng = np.random.default_rng(seed)
        self.text = [[int(token)] for token in self.rng.integers(0, 5, batch)]
        pools = [
            PagedKV.allocate(60 * 7, batch=batch, page_size=size, head_dim_ckv=16, head_dim_kpe=16)
            for size in page_sizes
        ]
        for kv in pools:
            kv.ckv[...] = kv.kpe[...] = np.nan
        self.layers = tuple(self._shuffled(kv) for kv in pools)

    def _shuffled(self, kv):
        labels = self.rng.permutation(kv.page_table.size).astype(np.int32)
        return replace(kv, page_table=labels.reshape(kv.page_table.shape))

    def draft(self):
        """Return a tree of up to 6 nodes a request, rooted at the last token of each text; some sit out."""
        batch = len(self.text)
        tokens, parents = np.full((batch, 6), -1, np.int32), np.full((batch, 6), -1, np.int32)
        for b in range(batch):
            if self.rng.random() < 0.1:
                continue
            count = int(self.rng.integers(1, 7))
            tokens[b, 0] = self.text[b][-1]
            used = set()
            for node in range(1, count):
                parents[b, node] = self.rng.integers(0, node)
                free = [t for t in range(8) if (int(parents[b, node]), t) not in used]
                tokens[b, node] = self.rng.choice(free)
                used.add((int(parents[b, node]), int(tokens[b, node])))
        return DraftTree.from_parents(tokens, parents)

    def step(self):
        """Write, accept, commit; return the tree of this round."""
        tree = self.draft()
        lens = self.layers[0].context_lens
        rows = key_rows(np.maximum(tree.token_ids, 0), lens[:, None] + np.maximum(tree.depths, 0), 32)
        for kv in self.layers:
            write_kv(kv, rows[..., :16], rows[..., 16:], num_rows=tree.num_nodes)
        targets = np.maximum(random_targets(self.rng, tree), 0)
        result = accept(tree, targets)
        self.layers = commit_kv(self.layers, result)
        for b, (path, bonus) in enumerate(zip(result.accepted, result.bonus_token, strict=True)):
            if bonus >= 0:
                self.text[b] += [int(tree.token_ids[b, node]) for node in path[path > 0]] + [int(bonus)]
        return tree

    def fresh(self, b, page_size):
        """Return an unbatched cache of the committed text but its last token, computed anew, with 2 free rows."""
        tokens = np.array(self.text[b][:-1], np.int64)
        rows = key_rows(tokens, np.arange(len(tokens)), 32)
        return PagedKV.from_dense(rows[:, :16], rows[:, 16:], page_size=page_size, capacity=len(tokens) + 2)


@pytest.mark.parametrize("page_sizes", [(1,), (4, 7), (16, 64)])
def test_commit_kv_is_identical_to_a_fresh_cache_after_50_rounds(page_sizes):
    """No drift, no stale row, no overlap of the next round's slots with committed ones, in every page group."""
    loop = Round(0, 3, page_sizes)
    for _ in range(50):
        loop.step()
        for kv in loop.layers:
            for b, text in enumerate(loop.text):
                assert int(kv.context_lens[b]) == len(text) - 1
    assert min(len(text) for text in loop.text) > 60
    q = np.random.default_rng(1).standard_normal((3, 2, 3, 32)).astype(np.float32)
    last_keys = key_rows(np.array([[text[-1], 3] for text in loop.text]), np.array([[9, 10]] * 3), 32)
    pair = Visibility.from_dense(np.tri(2, dtype=bool))
    for kv in loop.layers:
        write_kv(kv, last_keys[..., :16], last_keys[..., 16:], num_rows=2)
        for b in range(3):
            fresh = loop.fresh(b, kv.page_size)
            length = len(loop.text[b]) - 1
            assert_identical(gather(kv, b, length), gather(fresh, 0, length))
            write_kv(fresh, last_keys[b, :, :16], last_keys[b, :, 16:], num_rows=2)
            mine = replace(kv, page_table=kv.page_table[b], context_lens=kv.context_lens[b, ...])
            states = [
                tree_attention(pair, q[b, ..., :16], q[b, ..., 16:], each, sm_scale=0.2) for each in (mine, fresh)
            ]
            assert_identical(*states)
