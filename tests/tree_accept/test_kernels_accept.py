"""The kernels accept and commit_kv: bit-identical to the reference, on the emulator and on the GPU."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import AcceptResult, DraftTree, PagedKV, accept, commit_kv, emulate
from ddtree_cupy.errors import ArgumentError, DTypeError, LayoutError
from ddtree_cupy.testing import GuardedArray, assert_identical, unchanged
from ddtree_cupy.testing.strategies import ragged_batches
from ddtree_cupy.tree_accept import reference
from ddtree_cupy.tree_accept.api import commit_kv_workspace_bytes
from tests.tree_accept.cases import random_paths, result_of, trees_and_targets

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = ["float32", "float16", "bfloat16"]
schedules = st.integers(0, 9)
ABSURD = [-(2**31), -2, -1, 0, 1, 5, 2**30, 2**31 - 1]


@given(case=trees_and_targets(max_nodes=70), seed=schedules)
def test_accept_matches_reference(kernels, case, seed):
    tree, targets = case
    assert_identical(replace(kernels, seed=seed)(accept, tree, targets), accept(tree, targets))


@pytest.mark.parametrize("count", [1, 31, 32, 33, 63, 64, 65, 1025])
@pytest.mark.parametrize("shape", ["chain", "star"])
def test_accept_matches_reference_at_node_counts(kernels, count, shape):
    parents = [-1, *(range(count - 1) if shape == "chain" else [0] * (count - 1))]
    tree = DraftTree.from_parents(list(range(count)), parents)
    targets = np.array([*range(1, count), 7], np.int32) if shape == "chain" else np.full(count, count - 1, np.int32)
    assert_identical(kernels(accept, tree, targets), accept(tree, targets))


@given(case=trees_and_targets(batched=True), seed=st.integers(0, 2**32 - 1))
def test_accept_never_trusts_device_values(kernels, case, seed):
    """Links and counts that lead anywhere: the walk ends inside the arrays."""
    tree, targets = case
    random = np.random.default_rng(seed)

    def absurd(array):
        return np.where(random.random(array.shape) < 0.5, random.choice(ABSURD, array.shape), array).astype(np.int32)

    links = {name: absurd(getattr(tree, name)) for name in ("first_child", "next_sibling", "num_nodes")}
    found = kernels(accept, replace(tree, **links), targets)
    assert (found.num_accepted < tree.token_ids.shape[1]).all()
    assert (found.accepted < tree.token_ids.shape[1]).all()


def copied(kv, spare=0):
    """Return the same cache over a copy of its pages, ckv and kpe in one buffer, with `spare` more pages."""
    pool = np.concatenate([kv.ckv, kv.kpe], axis=-1)
    pool = np.concatenate([pool, np.zeros((spare, *pool.shape[1:]), pool.dtype)])
    return replace(kv, ckv=pool[..., : kv.ckv.shape[-1]], kpe=pool[..., kv.ckv.shape[-1] :])


@given(
    batch=ragged_batches(kind="tree", dtypes=DTYPES, head_dims=[(16, 16), (5, 3), (24, 8), (72, 16)]),
    seed=schedules,
)
def test_commit_kv_matches_reference(kernels, batch, seed):
    tree, kv = batch.tree, batch.kv
    result = result_of(random_paths(np.random.default_rng(seed), tree), tree.token_ids.shape[-1])
    if not tree.is_batched:
        result = result.without_batch()
    found = replace(kernels, seed=seed)(commit_kv, [copied(kv), copied(kv)], result)
    assert_identical(found, commit_kv([copied(kv), copied(kv)], result))


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


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=DTYPES)
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


@given(seed=st.integers(0, 2**32 - 1))
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
        size = commit_kv_workspace_bytes(layers, PATHS)
        workspace = GuardedArray((size,), np.uint8)
        after = commit_kv(layers, PATHS, out=kv.context_lens, workspace=workspace.array, checked=False)
    assert size > 0
    assert workspace.num_touched() == 0
    assert_identical((kv.ckv, kv.kpe, kv.context_lens), (wanted.ckv, wanted.kpe, wanted.context_lens))
    assert all(each.context_lens is kv.context_lens for each in after)
    assert commit_kv_workspace_bytes(layers, PATHS) == 0  # NumPy


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


def test_accept_kernels_reject(kernels):
    tree = DraftTree.from_parents([1, 2, 3], [-1, 0, 0])
    with pytest.raises(DTypeError, match="`target_token_ids`"):
        kernels(accept, tree, np.zeros(3, np.int64))
    with pytest.raises(LayoutError, match="`target_token_ids`"):
        kernels(accept, tree, np.zeros(6, np.int32)[::2])
    kv = shuffled(np.float32)
    with pytest.raises(DTypeError, match=r"`kv\.ckv`.*float64.*astype"):
        kernels(commit_kv, replace(kv, ckv=kv.ckv.astype(np.float64), kpe=kv.kpe.astype(np.float64)), PATHS)
    with pytest.raises(DTypeError, match="one dtype"):
        kernels(commit_kv, replace(kv, kpe=kv.kpe.astype(np.float16)), PATHS)
