"""write_kv puts row i at logical position context_len + i, across pages, and touches nothing else."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import PagedKV, Visibility, tree_attention, write_kv
from ddtree_cupy.errors import ArgumentError, DDTreeError, DTypeError, LayoutError, ShapeError
from ddtree_cupy.testing import assert_identical, reachable_rows, unchanged
from ddtree_cupy.testing.strategies import paged_caches
from tests.oracles import logical_row
from tests.tree_attention.cases import DTYPES, seeds


def copy_of(kv):
    """Return the cache with copies of its pools."""
    return replace(kv, ckv=kv.ckv.copy(), kpe=kv.kpe.copy())


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


@given(caches_and_counts(), seeds)
def test_write_kv_never_writes_other_rows(drawn, seed):
    kv, counts, capacity = drawn
    before = copy_of(kv)
    write_kv(kv, *rows_for(kv, seed, counts, capacity), num_rows=np.array(counts, np.int32))
    new_rows = reachable_rows(kv, counts) & ~reachable_rows(kv, 0)
    for now, old in ((kv.ckv, before.ckv), (kv.kpe, before.kpe)):
        assert_identical(now[~new_rows], old[~new_rows])
        assert not np.isnan(now[new_rows].astype(np.float64)).any()


@given(paged_caches(num_rows=np.array([5, 5], np.int32)), seeds, st.integers(0, 5))
def test_write_kv_is_identical_for_an_int_and_an_array_of_it(kv, seed, count):
    one, other = copy_of(kv), copy_of(kv)
    rows = rows_for(kv, seed, [count, count], 5)
    write_kv(one, *rows, num_rows=count)
    write_kv(other, *rows, num_rows=np.full(2, count, np.int32))
    assert_identical(one, other)
    as_numpy_int = copy_of(kv)
    write_kv(as_numpy_int, *rows, num_rows=np.int64(count))
    assert_identical(as_numpy_int, one)


@given(paged_caches(num_rows=4), seeds, st.integers(0, 4), st.booleans())
def test_write_kv_is_identical_without_the_batch_axis(kv, seed, count, as_array):
    one, other = copy_of(kv), copy_of(kv).with_batch()
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


def test_write_kv_matches_oracle_when_called_twice():
    """The second call overwrites the same positions: a round may rewrite its tree keys."""
    kv = PagedKV.allocate(8, page_size=4, head_dim_ckv=16, head_dim_kpe=16)
    first, second = np.full((5, 16), 1, np.float32), np.full((3, 16), 2, np.float32)
    write_kv(kv, first, first, num_rows=5)
    write_kv(kv, second, second, num_rows=3)
    assert kv.ckv.reshape(-1, 16)[:, 0].tolist() == [2, 2, 2, 1, 1, 0, 0, 0]


def batched_arguments():
    kv = PagedKV.allocate(8, batch=2, page_size=4, head_dim_ckv=16, head_dim_kpe=8)
    kv.context_lens[:] = 3
    return {
        "kv": kv,
        "ckv_rows": np.ones((2, 4, 16), np.float32),
        "kpe_rows": np.ones((2, 4, 8), np.float32),
        "num_rows": 4,
    }


def read_only(array):
    array.flags.writeable = False
    return array


REJECTED = {
    "rows of another width": ({"ckv_rows": np.ones((2, 4, 8), np.float32)}, ShapeError, "ckv_rows"),
    "rope rows of another width": ({"kpe_rows": np.ones((2, 4, 16), np.float32)}, ShapeError, "kpe_rows"),
    "fewer rope rows": ({"kpe_rows": np.ones((2, 3, 8), np.float32)}, ShapeError, "kpe_rows"),
    "another batch": ({"ckv_rows": np.ones((3, 4, 16), np.float32)}, ShapeError, "ckv_rows"),
    "no batch axis": ({"ckv_rows": np.ones((4, 16), np.float32)}, ShapeError, "ckv_rows"),
    "float16 rows": ({"ckv_rows": np.ones((2, 4, 16), np.float16)}, DTypeError, "ckv_rows"),
    "float64 rope rows": ({"kpe_rows": np.ones((2, 4, 8))}, DTypeError, "kpe_rows"),
    "integer rows": ({"ckv_rows": np.ones((2, 4, 16), np.int32)}, DTypeError, "ckv_rows"),
    "a list": ({"ckv_rows": [[1.0]]}, DTypeError, "ckv_rows"),
    "too many rows": ({"num_rows": 5}, ArgumentError, "num_rows"),
    "a negative count": ({"num_rows": -1}, ArgumentError, "num_rows"),
    "too many rows in one request": ({"num_rows": np.array([4, 5], np.int32)}, ArgumentError, "num_rows"),
    "a negative count in one request": ({"num_rows": np.array([-1, 4], np.int32)}, ArgumentError, "num_rows"),
    "counts of another batch": ({"num_rows": np.array([4], np.int32)}, ShapeError, "num_rows"),
    "int64 counts": ({"num_rows": np.array([4, 4])}, DTypeError, "num_rows"),
    "a float count": ({"num_rows": 2.0}, DTypeError, "num_rows"),
    "a boolean count": ({"num_rows": True}, DTypeError, "num_rows"),
    "no count": ({"num_rows": None}, DTypeError, "num_rows"),
    "no cache": ({"kv": np.ones((2, 4, 16), np.float32)}, DTypeError, "kv"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_write_kv_rejects(case):
    changes, error, name = REJECTED[case]
    arguments = batched_arguments() | changes
    kv = batched_arguments()["kv"] if "kv" in changes else arguments["kv"]
    with unchanged(kv=kv), pytest.raises(error, match=f"^write_kv: .*`{name}"):
        write_kv(arguments["kv"], arguments["ckv_rows"], arguments["kpe_rows"], num_rows=arguments["num_rows"])


@pytest.mark.parametrize("pool", ["ckv", "kpe"])
def test_write_kv_rejects_a_read_only_cache(pool):
    arguments = batched_arguments()
    kv = replace(arguments.pop("kv"), **{pool: read_only(getattr(batched_arguments()["kv"], pool).copy())})
    with unchanged(kv=kv), pytest.raises(LayoutError, match=rf"`kv\.{pool}` is read-only"):
        write_kv(kv, arguments["ckv_rows"], arguments["kpe_rows"], num_rows=4)


@pytest.mark.parametrize("page", [-1, 4, 2**30, -(2**31)])
def test_write_kv_rejects_a_page_outside_the_pool_before_writing(page):
    """The last request's last page is bad: nothing of the first request may have been written."""
    arguments = batched_arguments()
    kv = arguments.pop("kv")
    kv.page_table[1, 1] = page
    with unchanged(kv=kv), pytest.raises(DDTreeError, match=r"write_kv: .*page_table"):
        write_kv(kv, arguments["ckv_rows"], arguments["kpe_rows"], num_rows=4)


def test_write_kv_rejects_rows_past_the_last_page_before_writing():
    arguments = batched_arguments()
    kv = arguments.pop("kv")
    kv.context_lens[:] = [0, 6]
    with unchanged(kv=kv), pytest.raises(DDTreeError, match=r"write_kv: .*`kv"):
        write_kv(kv, arguments["ckv_rows"], arguments["kpe_rows"], num_rows=4)


def test_write_kv_rejects_a_negative_context_length_before_writing():
    arguments = batched_arguments()
    kv = arguments.pop("kv")
    kv.context_lens[:] = [0, -2]
    with unchanged(kv=kv), pytest.raises(DDTreeError, match=r"write_kv: .*`kv"):
        write_kv(kv, arguments["ckv_rows"], arguments["kpe_rows"], num_rows=4)
