"""Strategies draw valid containers, cover the cases they promise, and refuse bad bounds."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument, NoSuchExample

from ddtree_cupy import (
    Candidates,
    DraftTree,
    PagedKV,
    Visibility,
    accept,
    best_first_tree,
    build_tree,
    emulate,
    greedy_targets,
    top_candidates,
    tree_attention,
    write_kv,
)
from ddtree_cupy.testing import reachable_rows, strategies


@given(strategies.draft_logits(dtypes=("float32", "float16", "bfloat16", "float64"), non_finite=True))
def test_draft_logits_keep_their_bounds(logits):
    assert logits.ndim in (2, 3)
    assert logits.shape[-2] <= 4
    assert 1 <= logits.shape[-1] <= 130
    assert logits.flags.c_contiguous
    as_double = logits.astype(np.float64)
    assert not ((as_double != 0) & (np.abs(as_double) < 2.0**-126)).any()


@given(strategies.draft_logits(strided=True, batched=False, min_draft_len=2))
def test_draft_logits_are_slices_of_longer_rows_when_asked(logits):
    size = logits.dtype.itemsize
    assert logits.strides == ((logits.shape[1] + 3) * size, size)
    assert not np.isnan(logits.astype(np.float64)).any()


@given(strategies.draft_logits(ties="distinct", minus_inf=False, max_vocab=256))
def test_draft_logits_are_distinct(logits):
    ordered = np.sort(logits.astype(np.float64), axis=-1)
    assert (np.diff(ordered, axis=-1) > 0).all()


@given(strategies.draft_logits(ties="tied", minus_inf=False, min_vocab=6))
def test_draft_logits_tie(logits):
    for row in logits.reshape(-1, logits.shape[-1]).astype(np.float64):
        assert len(np.unique(row)) <= 5


@given(strategies.parent_arrays(min_nodes=2, max_nodes=9))
def test_parent_arrays_come_before_children(parents):
    assert 2 <= len(parents) <= 9
    assert parents[0] == -1
    assert all(0 <= parent < node for node, parent in enumerate(parents.tolist()) if node)


@given(strategies.paged_caches(min_batch=0))
def test_paged_caches_are_valid(kv):
    assert isinstance(kv.validate(), PagedKV)
    reachable = reachable_rows(kv)
    assert not np.isnan(kv.ckv[reachable].astype(np.float64)).any()
    assert not np.isnan(kv.kpe[reachable].astype(np.float64)).any()


@given(rows=st.lists(st.integers(0, 20), max_size=3), data=st.data())
def test_paged_caches_poison_what_nothing_may_read(rows, data):
    kv = data.draw(strategies.paged_caches(num_rows=np.array(rows, np.int32)))
    reachable = reachable_rows(kv, rows)
    assert np.isnan(kv.ckv[~reachable].astype(np.float64)).all()
    assert np.isfinite(kv.ckv[reachable].astype(np.float64)).all()
    assert kv.page_table.shape[0] == len(rows)
    assert all(kv.context_lens + rows <= kv.page_table.shape[1] * kv.page_size)


@given(strategies.ragged_batches(max_nodes=20))
def test_ragged_batches_are_valid(batch):
    batch.tree.validate()
    kv = batch.kv.validate()
    assert kv.is_batched == batch.tree.is_batched
    assert kv.context_lens.shape == batch.tree.num_nodes.shape
    reachable = reachable_rows(kv, batch.tree.num_nodes)
    assert np.isnan(kv.ckv[~reachable].astype(np.float64)).all()


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        (strategies.candidate_tables(bad_rows=True, dtypes=("float32", "float64")), Candidates),
        (strategies.draft_trees(path_scores=True), DraftTree),
        (strategies.visibilities(), Visibility),
    ],
    ids=str,
)
@given(data=st.data())
def test_strategies_are_valid(strategy, kind, data):
    drawn = data.draw(strategy)
    assert isinstance(drawn.validate(), kind)
    assert kind is Candidates or drawn.visibility_bits.shape[-2] <= 129


SEARCH = settings(
    max_examples=2000, phases=[Phase.generate], derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def _is_comb(tree):
    parents = tree.parents[: tree.num_nodes].tolist() if not tree.is_batched else []
    return len(parents) > 5 and sorted(np.bincount(parents[1:]).tolist())[-1] == 2 and tree.depths.max() >= 3


def _is_not_closed(found):
    if found.is_batched:
        return False
    dense = found.to_dense()
    return any(dense[i, j] and (dense[j] & ~dense[i]).any() for i, j in np.argwhere(dense))


COVERED = [  # a strategy, and what some of its examples must be
    (
        strategies.draft_logits(non_finite=True),
        [
            lambda x: x.size and np.isnan(x.astype(np.float64)).any(),
            lambda x: (x == np.inf).any(),
            lambda x: x.shape[-2] > 1 and (x == -np.inf).all(axis=-1).any() and not (x == -np.inf).all(),
            lambda x: ((x == 0) & np.signbit(x.astype(np.float64))).any(),
            lambda x: x.ndim == 2 and x.shape[0] == 0,
            lambda x: x.ndim == 3 and x.shape[0] == 0,
            lambda x: x.shape[-1] == 1,
            lambda x: x.dtype == ml_dtypes.bfloat16,
            lambda x: x.dtype == np.float16,
            *[lambda x, n=n: x.shape[-1] == n for n in (63, 64, 65, 127, 128, 129)],
        ],
    ),
    (
        strategies.candidate_tables(bad_rows=True),
        [
            lambda c: np.isnan(c.lse).any() and not np.isnan(c.lse).all(),
            lambda c: c.token_ids.shape[-1] == 0,
            lambda c: ((c.logits[..., 1:] == c.logits[..., :-1]) & (c.token_ids[..., 1:] >= 0)).any(),
            lambda c: (c.token_ids == 0).any(),
            lambda c: c.token_ids.size and ((c.token_ids == -1).any(axis=-1) & (c.token_ids >= 0).any(axis=-1)).any(),
            lambda c: c.lse.size and (c.lse == -np.inf).any(),
            *[lambda c, n=n: c.token_ids.shape[-1] == n for n in (31, 33, 63, 64, 65)],
        ],
    ),
    (
        strategies.draft_trees(),
        [
            lambda t: not t.is_batched and t.num_nodes > 3 and t.depths.max() == t.num_nodes - 1,
            lambda t: not t.is_batched and t.num_nodes > 3 and t.depths.max() == 1,
            _is_comb,
            lambda t: t.is_batched and len(set(t.num_nodes.tolist())) == 3,
            lambda t: t.is_batched and (t.num_nodes == 0).any() and (t.num_nodes > 0).any(),
            lambda t: t.is_batched and (t.num_nodes < t.token_ids.shape[1]).all(),
            lambda t: not t.is_batched and t.num_nodes == 0,
            lambda t: (t.token_ids == 0).any(),
            *[lambda t, n=n: not t.is_batched and t.num_nodes == n for n in (1, 31, 32, 33, 63, 64, 65, 127, 128, 129)],
        ],
    ),
    (
        strategies.visibilities(max_nodes=34),
        [
            _is_not_closed,
            lambda v: not v.is_batched and v.num_nodes > 2 and not v.to_dense().any(),
            lambda v: not v.is_batched and v.num_nodes > 2 and np.triu(v.to_dense(), 1).any(),
            lambda v: v.is_batched and any(b[n:].any() for b, n in zip(v.visibility_bits, v.num_nodes, strict=True)),
        ],
    ),
    (
        strategies.paged_caches(),
        [
            lambda kv: kv.ckv.size and not kv.ckv.flags.c_contiguous and kv.ckv.base is kv.kpe.base,
            lambda kv: kv.ckv.flags.c_contiguous and kv.ckv.size,
            lambda kv: (
                kv.is_batched
                and len(kv.page_table) > 1
                and (kv.page_table[0, :1] == kv.page_table[1, :1]).any()
                and kv.page_table[0, 0] >= 0
            ),
            lambda kv: not kv.is_batched and (kv.page_table == -1).any(),
            lambda kv: not kv.is_batched and (kv.page_table[1:] < kv.page_table[:-1]).any() and kv.context_lens > 20,
            lambda kv: kv.page_size == 1,
            lambda kv: (kv.context_lens == 0).any(),
            lambda kv: not kv.is_batched and kv.page_size > 1 and kv.context_lens == kv.page_size,
            *[lambda kv, n=n: not kv.is_batched and kv.context_lens == n for n in (63, 64, 65, 127, 128, 129)],
            lambda kv: np.isnan(kv.ckv.astype(np.float64)).all(axis=(1, 2)).any(),
        ],
    ),
    (
        strategies.paged_caches(batched=False, unused_pages="absurd"),
        [lambda kv: (kv.page_table == 2**30).any(), lambda kv: (kv.page_table == -(2**31)).any()],
    ),
    (
        strategies.ragged_batches(max_nodes=20),
        [
            lambda b: isinstance(b.tree, DraftTree) and b.tree.is_batched and (b.tree.num_nodes == 0).any(),
            lambda b: isinstance(b.tree, Visibility) and not b.tree.is_batched,
        ],
    ),
]


@pytest.mark.parametrize(
    ("strategy", "condition"), [(strategy, condition) for strategy, conditions in COVERED for condition in conditions]
)
def test_strategies_cover(strategy, condition):
    try:
        find(strategy, condition, settings=SEARCH)
    except NoSuchExample:
        pytest.fail("no such example in 2,000")


def _attend(tree, kv):
    """Call tree_attention with queries that fit."""
    lead = tree.visibility_bits.shape[:-1]
    q_nope, q_pe = (np.ones((*lead, 1, pool.shape[-1]), pool.dtype) for pool in (kv.ckv, kv.kpe))
    tree_attention(tree, q_nope, q_pe, kv, sm_scale=0.25)


def _attend_alone(tree):
    """Call tree_attention on a cache of zeros without context."""
    batch = tree.visibility_bits.shape[0] if tree.is_batched else None
    _attend(tree, PagedKV.allocate(tree.visibility_bits.shape[-2], batch=batch, head_dim_ckv=16, head_dim_kpe=16))


def _accept_nothing(tree):
    accept(tree, np.zeros(tree.token_ids.shape, np.int32))
    _attend_alone(tree)


def _build(logits):
    roots = np.zeros(logits.shape[0], np.int32) if logits.ndim == 3 else 0
    top_candidates(logits, 5)
    build_tree(logits, budget=9, root_token_ids=roots)


def _write_nothing(kv):
    rows = [np.zeros((*kv.context_lens.shape, 1, pool.shape[-1]), pool.dtype) for pool in (kv.ckv, kv.kpe)]
    write_kv(kv, *rows, num_rows=np.zeros(kv.context_lens.shape, np.int32))


def _grow(candidates):
    best_first_tree(candidates, budget=9, root_token_ids=0)


KERNELS = {  # of every public strategy, the kernels that take what it draws
    "draft_logits": _build,
    "candidate_tables": _grow,
    "parent_arrays": lambda parents: _accept_nothing(DraftTree.from_parents(np.arange(len(parents)), parents)),
    "draft_trees": _accept_nothing,
    "visibilities": _attend_alone,
    "paged_caches": _write_nothing,
    "ragged_batches": lambda batch: _attend(batch.tree, batch.kv),
    "node_counts": lambda count: greedy_targets(np.zeros((count, 3), np.float32)),
    "seeds": lambda seed: greedy_targets(np.random.default_rng(seed).random((2, 40), np.float32)),
}


def test_every_strategy_has_a_kernel_below():
    assert {*KERNELS, "RaggedBatch"} == set(strategies.__all__)


@pytest.mark.emulate
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_take_what_a_strategy_draws_by_default(name):
    @given(getattr(strategies, name)())
    def launch(drawn):
        with emulate.active():
            KERNELS[name](drawn)

    launch()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: strategies.node_counts(min_nodes=-1), "min_nodes"),
        (lambda: strategies.draft_logits(min_vocab=0), "min_vocab"),
        (lambda: strategies.draft_logits(min_draft_len=3, max_draft_len=2), "max_draft_len"),
        (lambda: strategies.draft_logits(max_batch=True), "max_batch"),
        (lambda: strategies.draft_logits(dtypes=("float8",)), "float8"),
        (lambda: strategies.draft_logits(dtypes="float32"), "dtypes"),
        (lambda: strategies.draft_logits(dtypes=()), "dtypes"),
        (lambda: strategies.draft_logits(ties="never"), "ties"),
        (lambda: strategies.draft_logits(ties="distinct", min_vocab=300, max_vocab=400), "max_vocab"),
        (lambda: strategies.candidate_tables(dtypes=("float16",)), "float16"),
        (lambda: strategies.candidate_tables(min_width=2.0), "min_width"),
        (lambda: strategies.parent_arrays(min_nodes=0), "min_nodes"),
        (lambda: strategies.parent_arrays(shapes=("ring",)), "ring"),
        (lambda: strategies.parent_arrays(shapes=()), "shapes"),
        (lambda: strategies.draft_trees(min_nodes=9, max_nodes=8), "max_nodes"),
        (lambda: strategies.draft_trees(vocab=0), "vocab"),
        (lambda: strategies.visibilities(min_nodes=0), "min_nodes"),
        (lambda: strategies.paged_caches(page_sizes=(0,)), "page_sizes"),
        (lambda: strategies.paged_caches(head_dims=()), "head_dims"),
        (lambda: strategies.paged_caches(num_rows=-1), "num_rows"),
        (lambda: strategies.paged_caches(unused_pages="wild"), "unused_pages"),
        (lambda: strategies.paged_caches(min_context=5, max_context=4), "min_context"),
        (lambda: strategies.ragged_batches(kind="mask"), "kind"),
        (lambda: strategies.ragged_batches(num_rows=3), "num_rows"),
        (lambda: strategies.ragged_batches(page_sizes=(-1,)), "page_sizes"),
    ],
)
def test_strategies_rejects_bad_bounds(make, named):
    with pytest.raises(InvalidArgument, match=named):
        make()
