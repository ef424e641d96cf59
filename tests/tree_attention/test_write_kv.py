"""write_kv puts row i at logical position context_len + i, across pages, and touches nothing else."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import PagedKV, Visibility, tree_attention, write_kv
from ddtree_cupy.testing import assert_identical, unchanged
from ddtree_cupy.testing.strategies import paged_caches
from tests.oracles import logical_row
from tests.tree_attention.cases import DTYPES, seeds


def written_one_by_one(kv, ckv_rows, kpe_rows, counts):
    """Return copies of both pools after storing every row by its own logical position."""
    ckv, kpe = kv.ckv.copy(), kv.kpe.copy()
    for request, count in enumerate(counts):
        for row in range(count):
            page, slot = logical_row(kv, request, int(kv.context_lens[request]) + row)
            ckv[page, slot], kpe[page, slot] = ckv_rows[request, row], kpe_rows[request, row]
    return ckv, kpe


def rows_for(kv, seed, counts, capacity):
    """Return random rows; those no request may write hold NaN."""
    rng = np.random.default_rng(seed)
    widths = kv.ckv.shape[2], kv.kpe.shape[2]
    arrays = [rng.standard_normal((len(counts), capacity, width)).astype(kv.ckv.dtype) for width in widths]
    for request, count in enumerate(counts):
        for array in arrays:
            array[request, count:] = np.nan
    return arrays


@st.composite
def caches_and_counts(draw):
    counts = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    kv = draw(
        paged_caches(
            num_rows=np.array(counts, np.int32),
            unused_pages="absurd",
            page_sizes=(1, 3, 7, 16, 64),
            dtypes=("float32", "float16", "bfloat16", "float64"),
        )
    )
    return kv, counts, max(counts) + draw(st.integers(0, 2))


@given(drawn=caches_and_counts(), seed=seeds, schedule=st.integers(0, 9))
def test_write_kv_matches_oracle(backend, drawn, seed, schedule):
    """Numbers of rows in an array, as an integer where all are equal, and of one request without the batch axis."""
    kv, counts, capacity = drawn
    kv = backend.narrowed(kv)
    rows = rows_for(kv, seed, counts, capacity)
    wanted = replace(kv, **dict(zip(("ckv", "kpe"), written_one_by_one(kv, *rows, counts), strict=True)))
    lens, table = kv.context_lens.copy(), kv.page_table.copy()

    def assert_written(given_kv, given_rows, num_rows, unbatched=False):
        result, (found, *_) = replace(backend, seed=schedule).change(write_kv, given_kv, *given_rows, num_rows=num_rows)
        assert result is None
        assert_identical(found.with_batch() if unbatched else found, wanted)

    with unchanged(ckv_rows=rows[0], kpe_rows=rows[1]):
        if len(set(counts)) == 1:
            assert_written(kv.map(np.copy), rows, counts[0])
            assert_written(kv.map(np.copy), rows, np.int64(counts[0]))
        if len(counts) == 1:
            for count in (counts[0], np.array(counts[0], np.int32)):
                assert_written(kv.map(np.copy).without_batch(), [array[0] for array in rows], count, unbatched=True)
        assert_written(kv, rows, np.array(counts, np.int32))  # last, since it writes where the drawn layout lies
    assert_identical((kv.context_lens, kv.page_table), (lens, table))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
@pytest.mark.parametrize("context", [0, 6, 7, 15, 16, 17, 63, 64, 65])
def test_write_kv_matches_oracle_across_page_edges(page_size, context, dtype):
    """The round trip: what is written after the context is what attention reads there."""
    rng = np.random.default_rng(context)
    rows = rng.standard_normal((context + 9, 32)).astype(dtype)
    kv = PagedKV.allocate(context + 9, page_size=page_size, head_dim_ckv=16, head_dim_kpe=16, dtype=dtype)
    write_kv(kv, rows[:, :16], rows[:, 16:], num_rows=context)
    kv = replace(kv, context_lens=np.array(context, np.int32))
    write_kv(kv, rows[context:, :16], rows[context:, 16:], num_rows=9)
    wanted = PagedKV.from_dense(rows[:, :16], rows[:, 16:], page_size=page_size, context_lens=context)
    q = rng.standard_normal((9, 2, 32)).astype(dtype)
    everything = Visibility.from_dense(np.ones((9, 9), bool))
    results = [tree_attention(everything, q[..., :16], q[..., 16:], cache, sm_scale=0.2) for cache in (kv, wanted)]
    assert_identical(*results)


def test_write_kv_never_writes_for_inactive_requests():
    kv = PagedKV.allocate(8, batch=3, page_size=4, head_dim_ckv=16, head_dim_kpe=16)
    kv.page_table[1] = 2**30
    kv.context_lens[:] = [2, 99, 0]
    rows = np.full((3, 3, 16), np.nan, np.float32)
    rows[[0, 2]] = 1
    write_kv(kv, rows, rows, num_rows=np.array([2, 0, 3], np.int32))
    assert not np.isnan(kv.ckv).any()
    assert int(kv.ckv.any(axis=-1).sum()) == 5
