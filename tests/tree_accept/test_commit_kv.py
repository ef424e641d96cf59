"""commit_kv moves the accepted rows behind the context, reads before it writes, and touches nothing else."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import AcceptResult, DraftTree, PagedKV, Visibility, accept, commit_kv, tree_attention, write_kv
from ddtree_cupy.errors import ArgumentError, DDTreeError, DTypeError, LayoutError, ShapeError
from ddtree_cupy.testing import assert_identical, unchanged
from ddtree_cupy.testing.strategies import ragged_batches
from tests.oracles import committed, gather, logical_row
from tests.tree_accept.cases import key_rows, random_paths, random_targets, result_of, seeds


def copy_of(kv):
    """Return the cache with its own pools, tables and lengths."""
    return kv.map(lambda array: array.copy())


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


@given(BATCHES, seeds)
def test_commit_kv_matches_oracle(batch, seed):
    tree, kv = batch.tree, batch.kv
    paths = random_paths(np.random.default_rng(seed), tree)
    result = result_of(paths, tree.token_ids.shape[-1])
    result = result if tree.is_batched else result.without_batch()
    before = copy_of(kv)
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


@given(BATCHES, seeds)
def test_commit_kv_never_writes_other_rows(batch, seed):
    """Bit-identical outside context_len .. context_len + num_accepted, NaN rows included."""
    tree, kv = batch.tree, batch.kv
    paths = random_paths(np.random.default_rng(seed), tree)
    result = result_of(paths, tree.token_ids.shape[-1])
    before = copy_of(kv)
    commit_kv(kv, result if tree.is_batched else result.without_batch())
    written = np.zeros(kv.ckv.shape[:2], bool)
    for request, path in enumerate(paths):
        for j in range(len(path)):
            written[logical_row(kv, request, int(np.atleast_1d(kv.context_lens)[request]) + j)] = True
    assert_identical((kv.ckv[~written], kv.kpe[~written]), (before.ckv[~written], before.kpe[~written]))


@given(BATCHES, seeds)
def test_commit_kv_is_identical_without_the_batch_axis(batch, seed):
    tree, kv = batch.tree, batch.kv
    if tree.is_batched:
        tree, kv = tree.map(lambda array: array[0, ...]), kv.without_batch()
    one, other = copy_of(kv), copy_of(kv)
    result = result_of(random_paths(np.random.default_rng(seed), tree), tree.token_ids.shape[-1])
    assert_identical(commit_kv(one, result.without_batch()), commit_kv(other.with_batch(), result).without_batch())


def line(context, num_nodes, *, page_size=4, batch=None):
    """Return a cache whose row at position p holds p."""
    rows = np.arange(context + num_nodes, dtype=np.float32)[:, None].repeat(16, axis=1)
    if batch is not None:
        rows = np.broadcast_to(rows, (batch, *rows.shape))
    lens = context if batch is None else [context] * batch
    return PagedKV.from_dense(rows, -rows, page_size=page_size, context_lens=lens)


def values(kv):
    """Return the rows of an unbatched `line` cache in logical order, from both pools."""
    pages = kv.page_table
    ckv, kpe = kv.ckv[pages, :, 0].ravel(), kv.kpe[pages, :, 0].ravel()
    np.testing.assert_array_equal(ckv, -kpe)
    return ckv.astype(int).tolist()


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
    assert int(after.context_lens) == context + len(path)


def test_commit_kv_is_identical_to_its_input_when_only_the_root_is_accepted():
    kv = line(5, 4)
    before = copy_of(kv)
    after = commit_kv(kv, result_of([[0]], 4).without_batch())
    assert_identical((after.ckv, after.kpe, after.page_table), (before.ckv, before.kpe, before.page_table))
    assert int(after.context_lens) == 6


def test_commit_kv_is_identical_to_its_input_for_inactive_requests():
    """num_accepted -1: nothing moves, the length stays, and no index -1 wraps to the last row."""
    kv = line(3, 4, batch=3)
    kv.page_table[1] = 2**30
    kv.context_lens[:] = [3, 77, 0]
    before = copy_of(kv)
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


def test_commit_kv_matches_oracle_with_a_0d_context_len():
    after = commit_kv(line(3, 4), result_of([[0, 2]], 4).without_batch())
    assert isinstance(after.context_lens, np.ndarray)
    assert (after.context_lens.shape, after.context_lens.dtype, int(after.context_lens)) == ((), np.int32, 5)


def test_commit_kv_is_identical_to_its_input_for_an_empty_batch():
    kv = replace(line(3, 4, batch=1), page_table=np.zeros((0, 2), np.int32), context_lens=np.zeros(0, np.int32))
    before = copy_of(kv)
    write_kv(kv, np.zeros((0, 4, 16), np.float32), np.zeros((0, 4, 16), np.float32), num_rows=4)
    assert_identical(commit_kv(kv, result_of([], 4)), before)


@pytest.mark.parametrize("kind", [list, tuple])
def test_commit_kv_is_identical_for_a_sequence_of_layers(kind):
    result = result_of([[0, 2, 5]], 6).without_batch()
    layers = [line(3, 6, page_size=size) for size in (1, 4, 64)]
    alone = [commit_kv(copy_of(layer), result) for layer in layers]
    together = commit_kv(kind(layers), result)
    assert type(together) is tuple
    assert_identical(together, tuple(alone))
    assert commit_kv([], result) == ()
    assert type(commit_kv([line(3, 6)], result)) is tuple


SHIFT = result_of([[0, 2, 3, 4]], 6).without_batch()  # moving twice would smear: 0 2 3 4 -> 0 3 4 5


@pytest.mark.parametrize(
    "alias",
    [
        lambda kv: kv,
        lambda kv: replace(kv),
        lambda kv: replace(kv, ckv=kv.ckv[:], kpe=kv.kpe[:]),
        lambda kv: replace(kv, page_table=kv.page_table.copy(), context_lens=kv.context_lens.copy()),
        lambda kv: replace(kv, ckv=kv.ckv[:-1], kpe=kv.kpe[:-1]),
        lambda kv: replace(kv, page_table=np.append(kv.page_table, np.int32(-1))),
        lambda kv: replace(kv, max_context=12),
    ],
    ids=["same", "new container", "new views", "new tables", "fewer pages", "wider table", "other bound"],
)
def test_commit_kv_is_identical_for_aliased_layers(alias):
    rows = np.arange(12, dtype=np.float32)[:, None].repeat(16, axis=1)
    kv = PagedKV.from_dense(rows, -rows, page_size=4, context_lens=3)
    spare = np.zeros((1, 4, 32), np.float32)
    pool = np.concatenate([np.concatenate([kv.ckv, kv.kpe], axis=-1), spare])  # one spare page at the end
    kv = replace(kv, ckv=pool[..., :16], kpe=pool[..., 16:])
    first, second = commit_kv([kv, alias(kv)], SHIFT)
    for each in (first, second):
        assert values(replace(each, page_table=kv.page_table)) == [0, 1, 2, 3, 5, 6, 7, 7, 8, 9, 10, 11]
        assert int(each.context_lens) == 7


def test_commit_kv_matches_oracle_for_layers_in_one_pool():
    """Same base address, other pages: these are two layers, and both move."""
    one = line(3, 6, page_size=3)
    pool = np.concatenate([np.concatenate([one.ckv, one.kpe], axis=-1)] * 2)
    layers = [
        replace(one, ckv=pool[..., :16], kpe=pool[..., 16:], page_table=one.page_table + offset)
        for offset in np.array([0, 3], np.int32)
    ]
    wanted = values(commit_kv(line(3, 6, page_size=3), SHIFT))
    assert [values(layer) for layer in commit_kv(layers, SHIFT)] == [wanted, wanted]


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


@given(BATCHES, seeds)
def test_commit_kv_matches_oracle_after_accept(batch, seed):
    """The result of accept is a legal argument whatever the targets were."""
    tree, kv = batch.tree, batch.kv
    result = accept(tree, random_targets(np.random.default_rng(seed), tree))
    before = copy_of(kv)
    after = commit_kv(kv, result)
    accepted = np.atleast_2d(result.accepted)
    paths = [row[row >= 0].tolist() for row in accepted]
    assert_identical((after.ckv, after.kpe), moved_one_by_one(before, paths))


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


def path_with(**changes):
    return replace(result_of([[0, 2], [0, 1]], 4), **changes)


def of(*values):
    return np.array(values, np.int32)


REJECTED_RESULTS = {
    "array": (of(0, 1), DTypeError, "result"),
    "None": (None, DTypeError, "result"),
    "int64 path": (path_with(accepted=np.zeros((2, 4), np.int64)), DTypeError, "result.accepted"),
    "int64 count": (path_with(num_accepted=np.zeros(2, np.int64)), DTypeError, "result.num_accepted"),
    "counts of another batch": (path_with(num_accepted=of(1)), ShapeError, "result.num_accepted"),
    "another batch": (result_of([[0]], 4), ShapeError, ""),
    "no batch axis": (result_of([[0]], 4).without_batch(), ShapeError, "kv.page_table"),
    "count above the path": (path_with(num_accepted=of(1, 4)), ArgumentError, "result.accepted"),
    "count below -1": (path_with(num_accepted=of(1, -2)), ArgumentError, "result.accepted"),
    "not from the root": (path_with(accepted=of([0, 2, -1, -1], [1, 2, -1, -1])), ArgumentError, "result.accepted"),
    "descending": (path_with(accepted=of([0, 2, 1, -1], [0, 1, -1, -1]), num_accepted=of(2, 1)), ArgumentError, ""),
    "past the tree": (path_with(accepted=of([0, 2, -1, -1], [0, 4, -1, -1])), ArgumentError, "result.accepted"),
    "padding counted": (path_with(num_accepted=of(1, 2)), ArgumentError, "result.accepted"),
}


@pytest.mark.parametrize("case", REJECTED_RESULTS)
def test_commit_kv_rejects_a_result(case):
    result, error, name = REJECTED_RESULTS[case]
    kv = line(3, 4, batch=2)
    with unchanged(kv=kv), pytest.raises(error, match=f"^commit_kv: .*`?{name}"):
        commit_kv(kv, result)


REJECTED_CACHES = {
    "array": (lambda kv: kv.ckv, DDTreeError),
    "list of arrays": (lambda kv: [kv.ckv], DTypeError),
    "second is no cache": (lambda kv: [kv, None], DTypeError),
    "int64 table": (lambda kv: replace(kv, page_table=kv.page_table.astype(np.int64)), DTypeError),
    "int64 lengths": (lambda kv: replace(kv, context_lens=kv.context_lens.astype(np.int64)), DTypeError),
    "lengths of another batch": (lambda kv: replace(kv, context_lens=of(3)), ShapeError),
    "table of another batch": (lambda kv: replace(kv, page_table=kv.page_table[:1]), ShapeError),
    "integer pool": (lambda kv: replace(kv, ckv=kv.ckv.astype(np.int32)), DTypeError),
    "flat pool": (lambda kv: replace(kv, kpe=kv.kpe.reshape(-1, 16)), ShapeError),
    "short kpe": (lambda kv: replace(kv, kpe=kv.kpe[:1]), ShapeError),
}


@pytest.mark.parametrize("case", REJECTED_CACHES)
def test_commit_kv_rejects_a_cache(case):
    change, error = REJECTED_CACHES[case]
    kv = line(3, 4, batch=2)
    with unchanged(kv=kv), pytest.raises(error, match=r"^commit_kv: .*`kv"):
        commit_kv(change(kv), path_with())


@pytest.mark.parametrize("pool", ["ckv", "kpe"])
def test_commit_kv_rejects_a_read_only_layer_before_moving_any(pool):
    good, bad = line(3, 4, batch=2), line(3, 4, batch=2)
    array = getattr(bad, pool).copy()
    array.flags.writeable = False
    bad = replace(bad, **{pool: array})
    with unchanged(good=good, bad=bad), pytest.raises(LayoutError, match="read-only"):
        commit_kv([good, bad], path_with())


@pytest.mark.parametrize("page", [-1, 4, 2**30, -(2**31)])
def test_commit_kv_rejects_a_page_outside_the_pool_before_moving_any(page):
    good, bad = line(3, 4, batch=2), line(3, 4, batch=2)
    bad.page_table[1, 1] = page
    with unchanged(good=good, bad=bad), pytest.raises(DDTreeError, match=r"^commit_kv: .*page_table"):
        commit_kv([good, bad], path_with())


def test_commit_kv_rejects_positions_past_the_last_page_before_moving_any():
    good, bad = line(3, 4, batch=2), line(3, 4, batch=2)
    bad.context_lens[1] = 7
    with unchanged(good=good, bad=bad), pytest.raises(DDTreeError, match=r"^commit_kv: .*`kv"):
        commit_kv([good, bad], path_with())


@given(st.integers(1, 6), seeds)
def test_commit_kv_is_identical_when_called_on_copies_again(num_nodes, seed):
    """Deterministic: the same call on an equal cache gives equal bits."""
    rng = np.random.default_rng(seed)
    tree = DraftTree.from_parents([0] * num_nodes, [-1, *range(num_nodes - 1)])
    result = result_of(random_paths(rng, tree), num_nodes).without_batch()
    one, other = line(5, num_nodes), line(5, num_nodes)
    assert_identical(commit_kv(one, result), commit_kv(other, result))


def test_accept_result_is_identical_to_the_helper():
    """The helper of this folder builds what accept returns."""
    tree = DraftTree.from_parents([[7, 10, 20], [-1, -1, -1]], [[-1, 0, 1], [-1, -1, -1]])
    found = accept(tree, np.array([[10, 20, 7], [0, 0, 0]], np.int32))
    assert isinstance(found, AcceptResult)
    assert_identical(found, result_of([[0, 1, 2], []], 3))
