"""Batches of containers as sequences of their requests, and containers in files."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from ddtree_cupy import DraftTree, PagedKV, Visibility
from ddtree_cupy.errors import (
    DDTreeError,
    DTypeError,
    RequestIndexError,
    ShapeError,
    WeightsError,
)
from ddtree_cupy.testing import assert_identical
from ddtree_cupy.testing.strategies import candidate_tables, draft_trees, paged_caches, visibilities
from tests.package.cases import (
    cache_case,
    result_case,
    t6,
    table,
)


def batches():
    """Return a batch of two requests of every container, the second shorter or inactive."""
    tree = DraftTree.from_parents([[1, 2, 3], [4, -1, -1]], [[-1, 0, 0], [-1, -1, -1]])
    tree = replace(tree, path_scores=np.array([[0, -1, -2], [0, -np.inf, -np.inf]]))
    seen = Visibility.from_dense(np.array([np.eye(3), np.ones((3, 3))], bool), num_nodes=[3, 1])
    candidates = table().map(lambda array: np.stack([array, array[::-1]]))
    return [tree, seen, candidates, cache_case(), result_case()]


kinds = pytest.mark.parametrize("batch", batches(), ids=lambda batch: type(batch).__name__)


@kinds
def test_a_batch_is_a_sequence_of_its_requests(batch):
    assert len(batch) == 2
    for found in (list(batch), [batch[0], batch[1]], [batch[-2], batch[np.int64(-1)]], [*batch[:1], *batch[1:]]):
        for one, number in zip(found, range(2), strict=True):
            assert not one.is_batched
            assert_identical(one.validate().with_batch(), batch[number : number + 1])
    first, _ = batch
    assert_identical(first, batch.without_batch())
    assert len(batch[:0]) == len(list(batch[5:])) == 0
    assert [len(part) for part in (batch[::2], batch[:], batch[-1:])] == [1, 2, 1]
    for part in (batch[::-1], batch[:0]):
        assert part.is_batched
    for field in ("ckv", "token_ids", "visibility_bits", "accepted"):
        if hasattr(batch, field):
            assert np.shares_memory(getattr(batch[1], field), getattr(batch, field))


@kinds
def test_a_batch_rejects_other_indices(batch):
    for request, said in ((2, r"index is 2, expected a request in -2\.\.1"), (-3, "index is -3"), (10**30, "index")):
        with pytest.raises(RequestIndexError, match=said):
            batch[request]
    with pytest.raises(IndexError, match="none, as the batch is empty"):
        batch[:0][0]
    for request in ("0", 1.0, None, (0, 1), [0]):
        with pytest.raises(DTypeError, match=r"\[\.\.\.\]: the index is \w+, expected an integer or a slice"):
            batch[request]


@kinds
def test_a_container_without_requests_says_how_to_get_one(batch):
    one = batch[0]
    for use in (len, iter, list, lambda found: found[0], lambda found: found[:1]):
        with pytest.raises(ShapeError, match=r"no request axis, expected a batch; \.with_batch\(\)"):
            use(one)
    assert len(one.with_batch()) == 1  # the advice
    assert_identical(one.with_batch()[0], one)
    assert bool(one) is bool(batch) is bool(batch[:0]) is True  # `if tree:` asks whether there is one


@kinds
def test_load_is_identical_to_what_was_saved(batch, tmp_path):
    for number, container in enumerate((batch, batch[1], batch[:0])):
        path = tmp_path / f"{number}.of any name"
        container.save(path)
        found = type(batch).load(str(path))
        assert_identical(found, container)
        assert all(array.flags.c_contiguous for array in vars(found).values() if isinstance(array, np.ndarray))


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "bfloat16"])
def test_load_keeps_every_dtype_of_a_cache(tmp_path, dtype):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rows = np.random.default_rng(0).standard_normal((5, 9)).astype(dtype)
    kv = replace(PagedKV.from_dense(rows[:, :6], rows[:, 6:], page_size=2), max_context=5)
    kv.save(tmp_path / "kv")
    assert_identical(PagedKV.load(tmp_path / "kv"), kv)
    assert PagedKV.load(tmp_path / "kv").max_context == 5


@given(tree=draft_trees(), found=visibilities(), kv=paged_caches(), candidates=candidate_tables())
def test_load_is_identical_to_any_container(tmp_path_factory, tree, found, kv, candidates):
    path = tmp_path_factory.getbasetemp() / "any.npz"
    for container in (tree, found, kv, candidates):
        container.save(path)
        assert_identical(type(container).load(path), container)


def test_load_rejects_other_containers_and_wrong_ones(tmp_path):
    path = tmp_path / "tree.npz"
    with pytest.raises(WeightsError, match=r"tree\.npz: no such DraftTree file"):
        DraftTree.load(path)
    t6().save(path)
    with pytest.raises(WeightsError, match=r"tree\.npz: holds 'DraftTree', expected 'PagedKV'"):
        PagedKV.load(path)
    np.savez(path, **{name: array for name, array in vars(t6()).items() if array is not None})
    with pytest.raises(WeightsError, match=r"tree\.npz: not a DraftTree file of format ddtree-container-1"):
        DraftTree.load(path)
    with pytest.raises(DTypeError, match=r"DraftTree\.load: `max_bytes` is '9', expected an integer"):
        DraftTree.load(path, max_bytes="9")


def test_load_says_how_to_allow_more_memory(tmp_path):
    path = tmp_path / "kv.npz"
    kv = PagedKV.allocate(1 << 17)  # zeros, which take little of the file
    kv.save(path)
    with pytest.raises(WeightsError, match=r"expected at most [\d,]+; PagedKV\.load\(path, max_bytes=\.\.\.\) allows"):
        PagedKV.load(path)
    assert_identical(PagedKV.load(path, max_bytes=1 << 30), kv)


def test_save_writes_nothing_that_validate_refuses(tmp_path):
    path = tmp_path / "tree.npz"
    path.write_bytes(b"old")
    with pytest.raises(DDTreeError, match="depths"):
        replace(t6(), depths=t6().depths + 1).save(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
