"""commit_kv moves the accepted rows behind the context, reads before it writes, and touches nothing else."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from ddtree_cupy import DraftTree, PagedKV, Visibility, accept, commit_kv, tree_attention, write_kv
from ddtree_cupy.testing import assert_identical, unchanged
from ddtree_cupy.testing.strategies import ragged_batches, seeds
from tests.oracles import committed, gather, logical_row
from tests.tree_accept.cases import key_rows, line, random_paths, random_targets, result_of, values


def moved_one_by_one(kv, paths):
    """Return copies of both pools in which row j of every path sits at context_len + j."""
    ckv, kpe = kv.ckv.copy(), kv.kpe.copy()
    for request, path in enumerate(paths):
        context = int(np.atleast_1d(kv.context_lens)[request])
        for j, node in enumerate(path):
            source = logical_row(kv, request, context + node)
            target = logical_row(kv, request, context + j)
            ckv[target], kpe[target] = kv.ckv[source], kv.kpe[source]
    return ckv, kpe


BATCHES = ragged_batches(
    kind="tree",
    max_nodes=20,
    unused_pages="absurd",
    page_sizes=(1, 3, 7, 16, 64),
    dtypes=("float32", "float16", "bfloat16", "float64"),
)


@given(BATCHES, seeds())
def test_commit_kv_matches_oracle(batch, seed):
    tree, kv = batch.tree, batch.kv
    paths = random_paths(np.random.default_rng(seed), tree)
    result = result_of(paths, tree.token_ids.shape[-1])
    result = result if tree.is_batched else result.without_batch()
    before = kv.map(np.copy)
    wanted_pools = moved_one_by_one(before, paths)
    with unchanged(result=result, page_table=kv.page_table, context_lens=kv.context_lens):
        after = commit_kv(kv, result)
    assert_identical((after.ckv, after.kpe), wanted_pools)
    assert_identical((kv.ckv, kv.kpe), wanted_pools)
    advance = np.array([len(path) for path in paths], np.int32).reshape(np.shape(kv.context_lens))
    assert_identical(after.context_lens, np.asarray(kv.context_lens + advance, np.int32))
    for request, path in enumerate(paths):
        context = int(np.atleast_1d(before.context_lens)[request])
        if path:
            rows = gather(after, request, context + len(path))
            wanted = committed(before, request, path)
            assert_identical(rows, tuple(array.astype(np.float64) for array in wanted))


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 5, 64])
@pytest.mark.parametrize("path", [[0], [0, 1, 2], [0, 2, 3, 4, 5], [0, 1, 3, 5, 7], [0, 7], [0, 3, 4, 5, 6, 7]])
@pytest.mark.parametrize("context", [0, 1, 3, 4, 5])
def test_commit_kv_matches_oracle_when_source_and_target_overlap(page_size, path, context):
    """[0, 2, 3, 4, 5] shifts by one over itself: a copy loop in the wrong order or a partial read smears rows."""
    kv = line(context, 8, page_size=page_size)
    old = values(kv)
    after = commit_kv(kv, result_of([path], 8).without_batch())
    wanted = old.copy()
    wanted[context : context + len(path)] = [context + node for node in path]
    assert values(after) == wanted
    assert isinstance(after.context_lens, np.ndarray)
    assert (after.context_lens.shape, int(after.context_lens)) == ((), context + len(path))


def test_commit_kv_is_identical_to_its_input_for_inactive_requests():
    """num_accepted -1: nothing moves, the length stays, and no index -1 wraps to the last row."""
    kv = line(3, 4, batch=3)
    kv.page_table[1] = 2**30
    kv.context_lens[:] = [3, 77, 0]
    before = kv.map(np.copy)
    after = commit_kv(kv, result_of([[], [], []], 4))
    assert_identical(after, before)


def test_commit_kv_matches_oracle_with_a_new_context_lens_array():
    kv = line(3, 4, batch=2)
    lens = kv.context_lens
    after = commit_kv(kv, result_of([[0, 2], []], 4))
    assert after.context_lens is not lens
    assert not np.shares_memory(after.context_lens, lens)
    assert lens.tolist() == [3, 3]
    assert after.context_lens.tolist() == [5, 3]
    assert after.context_lens.dtype == np.int32
    assert np.shares_memory(after.ckv, kv.ckv)
    assert np.shares_memory(after.kpe, kv.kpe)
    assert after.max_context == kv.max_context


def test_commit_kv_is_identical_to_its_input_for_an_empty_batch():
    kv = replace(line(3, 4, batch=1), page_table=np.zeros((0, 2), np.int32), context_lens=np.zeros(0, np.int32))
    before = kv.map(np.copy)
    write_kv(kv, np.zeros((0, 4, 16), np.float32), np.zeros((0, 4, 16), np.float32), num_rows=4)
    assert_identical(commit_kv(kv, result_of([], 4)), before)


@pytest.mark.parametrize("kind", [list, tuple])
def test_commit_kv_is_identical_for_a_sequence_of_layers(kind):
    result = result_of([[0, 2, 5]], 6).without_batch()
    layers = [line(3, 6, page_size=size) for size in (1, 4, 64)]
    alone = [commit_kv(layer.map(np.copy), result) for layer in layers]
    together = commit_kv(kind(layers), result)
    assert type(together) is tuple
    assert_identical(together, tuple(alone))
    assert commit_kv([], result) == ()
    assert type(commit_kv([line(3, 6)], result)) is tuple


SHIFT = result_of([[0, 2, 3, 4]], 6).without_batch()  # moving twice would smear: 0 2 3 4 -> 0 3 4 5


def test_commit_kv_matches_oracle_for_layers_interleaved_in_one_buffer():
    """[P, layer, page, C + R]: neighbouring layers are strided views of one buffer."""
    one = line(3, 6, page_size=3)
    rows = np.concatenate([one.ckv, one.kpe], axis=-1)
    buffer = np.stack([rows] * 3, axis=1)
    layers = [replace(one, ckv=buffer[:, n, :, :16], kpe=buffer[:, n, :, 16:]) for n in range(3)]
    wanted = values(commit_kv(line(3, 6, page_size=3), SHIFT))
    assert [values(layer) for layer in commit_kv(layers, SHIFT)] == [wanted] * 3


def test_commit_kv_matches_oracle_for_page_groups_of_two_sizes():
    """Every group moves by its own page table and page size."""
    layers = [line(5, 6, page_size=size) for size in (4, 7)]
    for layer in commit_kv(layers, SHIFT):
        assert values(layer)[:11] == [0, 1, 2, 3, 4, 5, 7, 8, 9, 9, 10]
        assert int(layer.context_lens) == 9


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
