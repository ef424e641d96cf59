"""Poison and canaries must notice what they are for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import DraftTree, PagedKV, Visibility
from ddtree_cupy.testing import (
    GuardedArray,
    assert_identical,
    poison_padding,
    poison_spare_rows,
    reachable_rows,
    unchanged,
)
from ddtree_cupy.testing.strategies import paged_caches, visibilities
from tests.oracles import logical_row


@given(kv=paged_caches(max_context=12, page_sizes=(1, 4)), extra=st.integers(0, 2))
def test_reachable_rows_matches_oracle(kv, extra):
    table = np.atleast_2d(kv.page_table)
    expected = np.zeros(kv.ckv.shape[:2], bool)
    for request, length in enumerate(np.atleast_1d(kv.context_lens)):
        for position in range(min(length + extra, table.shape[1] * kv.page_size)):
            page, slot = logical_row(kv, request, position)
            if page >= 0:
                expected[page, slot] = True
    assert_identical(reachable_rows(kv, extra), expected)


def test_poison_spare_rows_never_writes_reachable_rows():
    kv = PagedKV.from_dense(np.ones((13, 2), np.float32), np.ones((13, 1), np.float32), page_size=4, capacity=20)
    assert poison_spare_rows(kv, 2) is kv
    flat = kv.ckv.reshape(-1, 2)
    assert (flat[:13] == 1).all()
    assert (flat[13:15] == 0).all()
    assert np.isnan(flat[15:]).all()
    assert np.isnan(kv.kpe.reshape(-1)[15:]).all()


@given(found=visibilities(garbage=False), seed=st.integers(0, 9))
def test_poison_padding_never_writes_valid_pairs(found, seed):
    poisoned = poison_padding(found, seed=seed)
    assert_identical(poisoned.to_dense(), found.to_dense())


def test_poison_padding_fills_rows_and_bits_from_num_nodes_on():
    clean = Visibility.from_dense(np.zeros((40, 40), bool), np.int32(35))
    bits = np.unpackbits(poison_padding(clean).visibility_bits.view(np.uint8), axis=-1, bitorder="little")
    assert not bits[:35, :35].any()
    assert 0.3 < bits[35:].mean() < 0.7
    assert 0.3 < bits[:, 35:].mean() < 0.7
    assert isinstance(poison_padding(DraftTree.from_parents([1, 2, -1], [-1, 0, -1])), DraftTree)


@pytest.mark.parametrize("offset", [-1, 6])
def test_guarded_array_counts_a_write_outside(offset):
    guard = GuardedArray((2, 3), np.int32, zone=32)
    guard.array[...] = 7
    assert guard.num_touched() == 0
    guard._bytes.view(np.int32)[8 + offset] = 7
    assert guard.num_touched() == 4
    assert guard.array.flags.writeable
    assert guard.array.flags.c_contiguous


def test_guarded_array_rejects_odd_zones():
    with pytest.raises(ValueError, match="multiple of 16"):
        GuardedArray((2,), np.int32, zone=20)
    assert GuardedArray((0, 4), np.float16).array.shape == (0, 4)


def test_unchanged_names_the_modified_argument():
    tree = DraftTree.from_parents([1, 2], [-1, 0])
    with unchanged(tree=tree, nothing=None, number=3, array=np.arange(3)):
        pass

    def write():
        with unchanged(first=np.arange(3), tree=tree):
            tree.token_ids[1] = 5

    with pytest.raises(AssertionError, match=r"`tree` was modified: tree\.token_ids"):
        write()
