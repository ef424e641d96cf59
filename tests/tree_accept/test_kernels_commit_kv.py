"""commit_kv moves the accepted rows behind the context, reads before it writes, and touches nothing else."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import (
    AcceptResult,
    PagedKV,
    commit_kv,
    emulate,
    workspace_bytes,
    write_kv,
)
from ddtree_cupy.errors import ArgumentError, DTypeError
from ddtree_cupy.testing import GuardedArray, assert_identical, unchanged
from ddtree_cupy.testing.strategies import ragged_batches, seeds
from ddtree_cupy.tree_accept import reference
from tests.oracles import committed, gather, logical_row
from tests.tree_accept.cases import ABSURD, line, random_paths, result_of, values

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


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


def copied(kv, spare=0):
    """Return the same cache over a copy of its pages, ckv and kpe in one buffer, with `spare` more pages."""
    pool = np.concatenate([kv.ckv, kv.kpe], axis=-1)
    pool = np.concatenate([pool, np.zeros((spare, *pool.shape[1:]), pool.dtype)])
    return replace(kv, ckv=pool[..., : kv.ckv.shape[-1]], kpe=pool[..., kv.ckv.shape[-1] :])


@given(
    batch=ragged_batches(
        kind="tree",
        max_nodes=70,
        unused_pages="absurd",
        page_sizes=(1, 3, 7, 16, 64),
        dtypes=("float32", "float16", "bfloat16", "float64"),
        head_dims=[(16, 16), (5, 3), (24, 8), (72, 16)],
    ),
    seed=seeds(),
    schedule=st.integers(0, 9),
)
def test_commit_kv_matches_oracle(backend, batch, seed, schedule):
    """Two layers, the first in the drawn layout; every other row of the pools stays as it is, NaN included."""
    tree, kv = batch.tree, backend.narrowed(batch.kv)
    paths = random_paths(np.random.default_rng(seed), tree)
    result = result_of(paths, tree.token_ids.shape[-1])
    result = result if tree.is_batched else result.without_batch()
    before = kv.map(np.copy)
    wanted_pools = moved_one_by_one(before, paths)
    advance = np.array([len(path) for path in paths], np.int32).reshape(np.shape(kv.context_lens))
    with unchanged(result=result, page_table=kv.page_table, context_lens=kv.context_lens):
        layers, (given_layers, _) = replace(backend, seed=schedule).change(commit_kv, [kv, copied(kv)], result)
    for after, given_kv in zip(layers, given_layers, strict=True):
        assert_identical((after.ckv, after.kpe), wanted_pools)
        assert_identical((given_kv.ckv, given_kv.kpe), wanted_pools)
        assert_identical(after.context_lens, np.asarray(kv.context_lens + advance, np.int32))
    for request, path in enumerate(paths):
        context = int(np.atleast_1d(before.context_lens)[request])
        if path:
            rows = gather(layers[0], request, context + len(path))
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


def shuffled(dtype, widths=(16, 16), page_size=4, batch=2, tokens=80, context=9):
    """Return a cache whose rows are all different, its pages shuffled."""
    random = np.random.default_rng(0)
    kv = PagedKV.allocate(
        tokens, batch=batch, page_size=page_size, head_dim_ckv=widths[0], head_dim_kpe=widths[1], dtype=dtype
    )
    kv.ckv[...] = random.standard_normal(kv.ckv.shape)
    kv.kpe[...] = random.standard_normal(kv.kpe.shape)
    table = random.permutation(kv.page_table.size).astype(np.int32).reshape(kv.page_table.shape)
    return replace(kv, page_table=table, context_lens=np.full(batch, context, np.int32))


PATHS = result_of([[0, *range(2, 70)], [0, 1, 2, 40, 41, 60]], 70)  # overlaps, and more rows than one tile


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=str)
@pytest.mark.parametrize("widths", [(16, 16), (512, 64), (5, 3), (16, 3)])
def test_commit_kv_matches_reference_on_long_paths(kernels, dtype, widths):
    kv = shuffled(dtype, widths)
    assert_identical(kernels(commit_kv, copied(kv), PATHS), commit_kv(copied(kv), PATHS))


def test_commit_kv_is_identical_on_reversed_pages(kernels):
    """Negative strides: offsets below the base address."""
    kv = shuffled(np.float32)
    turned = replace(kv, ckv=kv.ckv[::-1, ::-1].copy()[::-1, ::-1], kpe=kv.kpe[::-1].copy()[::-1])
    assert_identical(kernels(commit_kv, turned, PATHS), commit_kv(copied(kv), PATHS))


ALIASES = {
    "same": lambda kv: kv,
    "new container": lambda kv: replace(kv),
    "new views": lambda kv: replace(kv, ckv=kv.ckv[:], kpe=kv.kpe[:]),
    "new tables": lambda kv: replace(kv, page_table=kv.page_table.copy()),
    "wider table": lambda kv: replace(kv, page_table=np.pad(kv.page_table, ((0, 0), (0, 1)), constant_values=-1)),
    "other lengths": lambda kv: replace(kv, context_lens=kv.context_lens.copy()),
    "fewer pages": lambda kv: replace(kv, ckv=kv.ckv[:-1], kpe=kv.kpe[:-1]),
    "other bound": lambda kv: replace(kv, max_context=78),
}


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=["float32", "bfloat16"])
def test_commit_kv_is_identical_for_aliased_layers(backend, alias, dtype):
    """Layers over one memory move once, whether or not their tables are one array; PATHS moved twice would smear."""
    kv, other = copied(shuffled(dtype), spare=1), copied(shuffled(dtype), spare=1)
    wanted = commit_kv(other, PATHS)
    for each in backend(commit_kv, [kv, ALIASES[alias](kv)], PATHS):
        pages = len(each.ckv)
        assert_identical((each.ckv, each.kpe), (wanted.ckv[:pages], wanted.kpe[:pages]))
        assert_identical(each.context_lens, wanted.context_lens)


def test_commit_kv_moves_every_layer_of_one_pool(backend):
    """Same base address, other pages: two layers, and both move."""
    one = shuffled(np.float32)
    pool = np.concatenate([np.concatenate([one.ckv, one.kpe], axis=-1)] * 2)

    def layers():
        own = pool.copy()
        tables = one.page_table, one.page_table + np.int32(len(one.ckv))
        return [replace(one, ckv=own[..., :16], kpe=own[..., 16:], page_table=table) for table in tables]

    alone = tuple(commit_kv(layer, PATHS) for layer in layers())
    assert_identical(backend(commit_kv, layers(), PATHS), alone)


@pytest.mark.parametrize("page", [-1, -(2**31), 10**6, 2**31 - 1])
def test_commit_kv_never_moves_rows_without_a_page(kernels, page):
    kv = shuffled(np.float32, batch=1)
    kv.page_table[0, [3, 5]] = page
    before = copied(kv)
    path = result_of([[0, 2, 4, 6, 8, 10, 13, 20]], 70)
    after = kernels(commit_kv, kv, path)
    wanted = np.concatenate([before.ckv, before.kpe], axis=-1)
    for j, node in enumerate(path.accepted[0, :8]):
        source, target = 9 + node, 9 + j
        pages = before.page_table[0, [source // 4, target // 4]]
        if (pages != page).all():
            wanted[pages[1], target % 4] = wanted[pages[0], source % 4]
    assert_identical((after.ckv, after.kpe), (wanted[..., :16], wanted[..., 16:]))


@given(seed=seeds())
def test_commit_kv_never_trusts_device_values(kernels, seed):
    random = np.random.default_rng(seed)
    kv = shuffled(np.float32)
    kv = replace(kv, context_lens=random.choice(ABSURD, 2).astype(np.int32))
    accepted = random.choice([*ABSURD, 3, 4], (2, 70)).astype(np.int32)
    result = AcceptResult(accepted, random.choice(ABSURD, 2).astype(np.int32), np.zeros(2, np.int32))
    assert kernels(commit_kv, kv, result).ckv.shape == kv.ckv.shape


@pytest.mark.emulate
def test_emulated_commit_kv_is_identical_with_out_and_workspace():
    """Layers may share the new lengths, which may be the old array; staging fits its workspace."""
    kv, other = copied(shuffled(np.float32)), copied(shuffled(np.float32))
    wanted = reference.commit_kv([other], PATHS)[0]
    layers = [kv, replace(kv, page_table=kv.page_table.copy())]
    with emulate.active():
        size = workspace_bytes(commit_kv, layers, PATHS)
        workspace = GuardedArray((size,), np.uint8)
        after = commit_kv(layers, PATHS, out=kv.context_lens, workspace=workspace.array, checked=False)
    assert size > 0
    assert workspace.num_touched() == 0
    assert_identical((kv.ckv, kv.kpe, kv.context_lens), (wanted.ckv, wanted.kpe, wanted.context_lens))
    assert all(each.context_lens is kv.context_lens for each in after)
    assert workspace_bytes(commit_kv, layers, PATHS) == 0  # NumPy


@pytest.mark.emulate
@pytest.mark.parametrize("given", [{}, {"out": np.zeros(2, np.int32)}], ids=["nothing", "no workspace"])
def test_commit_kv_refuses_during_capture_before_it_moves_a_row(monkeypatch, given):
    monkeypatch.setattr("ddtree_cupy.kernels.workspace.is_capturing", lambda backend: True)
    kv = shuffled(np.float32)
    with (
        emulate.active(),
        unchanged(ckv=kv.ckv, kpe=kv.kpe, lens=kv.context_lens),
        pytest.raises(ArgumentError, match=r"captures a CUDA graph, so pass `(out|workspace)="),
    ):
        commit_kv([kv, replace(kv, page_table=kv.page_table.copy())], PATHS, **given)


def test_commit_kv_writes_lengths_into_out(backend):
    kv = shuffled(np.float32)
    with unchanged(lens=kv.context_lens):
        after = backend(commit_kv, kv, PATHS, out=np.zeros(2, np.int32))
    assert after.context_lens.tolist() == [78, 15]
    with pytest.raises(ArgumentError, match="`out` is one array"):
        backend(commit_kv, [kv, replace(kv, context_lens=kv.context_lens + 1)], PATHS, out=np.zeros(2, np.int32))
    with pytest.raises(DTypeError, match="`out`"):
        backend(commit_kv, kv, PATHS, out=np.zeros(2, np.int64))


def test_commit_kv_kernels_reject(kernels):
    kv = shuffled(np.float32)
    with pytest.raises(DTypeError, match=r"`kv\.ckv`.*float64.*astype"):
        kernels(commit_kv, replace(kv, ckv=kv.ckv.astype(np.float64), kpe=kv.kpe.astype(np.float64)), PATHS)
    with pytest.raises(DTypeError, match="one dtype"):
        kernels(commit_kv, replace(kv, kpe=kv.kpe.astype(np.float16)), PATHS)
