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


@given(caches_and_counts(), seeds)
def test_write_kv_matches_oracle(drawn, seed):
    kv, counts, capacity = drawn
    ckv_rows, kpe_rows = rows_for(kv, seed, counts, capacity)
    wanted_ckv, wanted_kpe = written_one_by_one(kv, ckv_rows, kpe_rows, counts)
    lens, table = kv.context_lens.copy(), kv.page_table.copy()
    with unchanged(ckv_rows=ckv_rows, kpe_rows=kpe_rows):
        assert write_kv(kv, ckv_rows, kpe_rows, num_rows=np.array(counts, np.int32)) is None
    assert_identical((kv.ckv, kv.kpe), (wanted_ckv, wanted_kpe))
    assert_identical((kv.context_lens, kv.page_table), (lens, table))


@given(paged_caches(num_rows=np.array([5, 5], np.int32)), seeds, st.integers(0, 5))
def test_write_kv_is_identical_for_an_int_and_an_array_of_it(kv, seed, count):
    one, other = kv.map(np.copy), kv.map(np.copy)
    rows = rows_for(kv, seed, [count, count], 5)
    write_kv(one, *rows, num_rows=count)
    write_kv(other, *rows, num_rows=np.full(2, count, np.int32))
    assert_identical(one, other)
    as_numpy_int = kv.map(np.copy)
    write_kv(as_numpy_int, *rows, num_rows=np.int64(count))
    assert_identical(as_numpy_int, one)


@given(paged_caches(num_rows=4), seeds, st.integers(0, 4), st.booleans())
def test_write_kv_is_identical_without_the_batch_axis(kv, seed, count, as_array):
    one, other = kv.map(np.copy), kv.map(np.copy).with_batch()
    rows = rows_for(kv, seed, [count], 4)
    write_kv(one, rows[0][0], rows[1][0], num_rows=np.array(count, np.int32) if as_array else count)
    write_kv(other, *rows, num_rows=count)
    assert_identical(one, other.without_batch())


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
