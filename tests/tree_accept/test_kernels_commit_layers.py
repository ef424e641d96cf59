"""commit_kv moves the rows of all layers in one launch, whatever their layouts are and whatever memory they share."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddtree_cupy import PagedKV, bind, commit_kv, emulate, workspace_bytes
from ddtree_cupy.emulate import Function
from ddtree_cupy.errors import UnsupportedError
from ddtree_cupy.kernels import constants
from ddtree_cupy.testing import GuardedArray, assert_identical
from ddtree_cupy.testing.backends import Backend
from ddtree_cupy.testing.strategies import seeds
from ddtree_cupy.tree_accept import reference
from tests.tree_accept.cases import result_of

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
KINDS = ("slices", "pair", "interleaved", "reversed", "other rows", "same rows", "same arrays")


def layers_of(kinds, *, seed=0, batch=2, nodes=20, same_lens=True, dtypes=(np.float32,), widths=((16, 16),)):
    """Return one layer for each kind; the last three kinds lie in the memory of the layer before them.

    Every buffer has twice the pages that a layer needs, so that "other rows" is a layer of its own in it.
    """
    rng = np.random.default_rng(seed)
    lens = rng.integers(0, 30, batch).astype(np.int32)
    layers: list[PagedKV] = []
    for number, kind in enumerate(kinds):
        own = lens if same_lens else lens.copy()
        if layers and kind == "same arrays":
            layers.append(layers[-1])
            continue
        if layers and kind == "same rows":
            last = layers[-1]
            views = {"ckv": last.ckv[:], "kpe": last.kpe[:], "page_table": last.page_table.copy()}
            layers.append(replace(last, context_lens=own, **views))
            continue
        if layers and kind == "other rows":
            last = layers[-1]
            layers.append(replace(last, page_table=last.page_table ^ 1, context_lens=own))
            continue
        page_size, (c, r) = int(rng.choice([1, 3, 16])), widths[number % len(widths)]
        max_pages = -(-(30 + nodes) // page_size)
        table = 2 * rng.permutation(batch * max_pages).astype(np.int32).reshape(batch, max_pages)
        shape, dtype = (2 * batch * max_pages, page_size), dtypes[number % len(dtypes)]
        ckv, kpe = (rng.standard_normal((*shape, width)).astype(dtype) for width in (c, r))
        if kind != "pair":
            buffer = np.stack([np.concatenate([ckv, kpe], axis=-1)] * 2, axis=1)
            buffer = buffer[:, 0] if kind == "interleaved" else buffer[:, 0].copy()
            buffer = buffer[::-1, ::-1] if kind == "reversed" else buffer
            ckv, kpe = buffer[..., :c], buffer[..., c:]
        layers.append(PagedKV(ckv, kpe, table, own))
    return layers


def paths_of(seed, batch, nodes):
    """Return accepted nodes in ascending order, or none, for each request."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, nodes + 1, batch)
    return result_of([sorted({0, *rng.choice(nodes, count).tolist()}) if count else [] for count in counts], nodes)


def launches_of(function, *args, **options):
    """Return the names of the kernels that a call launches on the emulator."""
    names = []
    launch = Function.__call__

    def noted(kernel, *arguments, **settings):
        names.append(kernel.name)
        launch(kernel, *arguments, **settings)

    with pytest.MonkeyPatch.context() as patch, emulate.active():
        patch.setattr(Function, "__call__", noted)
        function(*args, **options)
    return names


@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=6),
    seed=seeds(),
    schedule=st.integers(0, 31),
    batch=st.sampled_from([1, 2, 5]),
    nodes=st.sampled_from([1, 15, 17, 33, 63, 65, 130]),
    same_lens=st.booleans(),
)
@example(kinds=["slices", "other rows"], seed=0, schedule=3, batch=2, nodes=65, same_lens=True)
def test_commit_kv_matches_reference_for_layers_of_any_layout(kernels, kinds, seed, schedule, batch, nodes, same_lens):
    """Different dtypes, widths, page sizes and strides in one call, some layers over one memory."""
    options = {"seed": seed, "batch": batch, "nodes": nodes, "same_lens": same_lens}
    options |= {
        "dtypes": (np.float32, BFLOAT16, np.float16),
        "widths": ((16, 8), (5, 3), (72, 24), (6, 2)),
    }
    result = paths_of(seed, batch, nodes)
    wanted = reference.commit_kv(layers_of(kinds, **options), result)
    found = replace(kernels, seed=schedule)(commit_kv, layers_of(kinds, **options), result)
    for one, other in zip(found, wanted, strict=True):
        assert_identical((one.ckv, one.kpe, one.context_lens), (other.ckv, other.kpe, other.context_lens))


@pytest.mark.parametrize("schedule", range(16))
def test_commit_kv_matches_reference_for_61_layers_in_one_pool(kernels, schedule):
    """One buffer and a page table for each layer: all rows are staged, in schedules in which blocks overlap."""
    kinds = ["slices", *["other rows", "same rows"] * 30]
    options = {"batch": 3, "nodes": 70}
    result = paths_of(1, 3, 70)
    wanted = reference.commit_kv(layers_of(kinds, **options), result)
    found = replace(kernels, seed=schedule)(commit_kv, layers_of(kinds, **options), result)
    assert_identical(found, wanted)


@pytest.mark.emulate
def test_commit_kv_writes_back_when_all_is_staged():
    """Layers over the same rows: a block that stages the last ones overlaps the one that writes back the first."""
    kinds = ["slices", *["same rows"] * 3]
    options = {"batch": 1, "nodes": 130, "widths": ((16, 0),)}
    result = result_of([[0, *range(2, 130)]], 130)
    wanted = reference.commit_kv(layers_of(kinds, **options), result)
    for schedule in range(60):
        layers = layers_of(kinds, **options)
        with emulate.active(seed=schedule):
            assert_identical(commit_kv(layers, result), wanted)


def test_commit_kv_matches_reference_at_widths_of_a_model(kernels):
    """61 layers of bfloat16 [512 + 64] and a path of 16 nodes."""
    path = result_of([[0, *range(5, 65, 4)]], 65)
    options = {"batch": 1, "nodes": 65, "dtypes": (BFLOAT16,), "widths": ((512, 64),)}
    wanted = reference.commit_kv(layers_of(["slices"] * 61, **options), path)
    assert_identical(kernels(commit_kv, layers_of(["slices"] * 61, **options), path), wanted)


@pytest.mark.emulate
@pytest.mark.parametrize(
    "kinds",
    [["slices"], ["slices"] * 61, ["pair", "interleaved", "reversed"] * 5, ["slices", "same arrays"] * 9],
    ids=["one layer", "61 layers", "unlike strides", "layers given twice"],
)
@pytest.mark.parametrize("shared", [False, True], ids=["memory apart", "memory shared"])
def test_commit_kv_launches_once_for_all_layers(kinds, shared):
    layers = layers_of([*kinds, *["other rows", "same rows"] * shared], dtypes=(np.float32, BFLOAT16))
    result = paths_of(0, 2, 20)
    assert launches_of(commit_kv, layers, result) == ["commit_kv"]
    apart = [replace(layer, context_lens=layer.context_lens.copy()) for layer in layers[:61]]
    wanted = ["commit_kv_apart", "advance_context"] if len(layers) > 1 else ["commit_kv"]
    assert launches_of(commit_kv, apart, result) == wanted


@pytest.mark.emulate
def test_bound_commits_of_shared_memory_start_from_zero_each_time():
    """The counters in device memory are left as they were found."""
    kinds = ["slices", "other rows", "same rows", "slices"]
    layers, others = layers_of(kinds, nodes=9), layers_of(kinds, nodes=9)
    result = result_of([[0, 2], [0, 1, 3]], 9)
    with emulate.active(seed=6):
        space = GuardedArray((workspace_bytes(commit_kv, layers, result),), np.uint8)
        commit = bind(commit_kv, layers, result, out=layers[0].context_lens, workspace=space.array)
        for _ in range(3):
            commit()
    for _ in range(3):
        others = reference.commit_kv(others, result)
    assert space.num_touched() == 0
    assert_identical(tuple(layers), tuple(others))


@pytest.mark.emulate
@pytest.mark.parametrize("schedule", range(8))
def test_bound_commits_move_on_in_place(schedule):
    """Blocks that begin late must still read the old length, though it is advanced in the same launch."""
    layers, others = layers_of(["slices", "pair"] * 8, nodes=9), layers_of(["slices", "pair"] * 8, nodes=9)
    result = result_of([[0, 2], [0, 1, 3]], 9)
    with emulate.active(seed=schedule):
        commit = bind(commit_kv, layers, result, out=layers[0].context_lens)
        for _ in range(2):
            commit()
    for _ in range(2):
        others = reference.commit_kv(others, result)
    assert_identical(tuple(layers), tuple(others))


def test_commit_kv_matches_reference_for_layers_of_unlike_lengths(backend):
    layers, others = layers_of(["slices"] * 4, same_lens=False), layers_of(["slices"] * 4, same_lens=False)
    result = result_of([[0, 2, 3], [0, 4]], 20)
    for number, pair in enumerate(zip(layers, others, strict=True)):
        for layer in pair:
            layer.context_lens[:] = [number, 2 * number]
    assert_identical(backend(commit_kv, layers, result), reference.commit_kv(others, result))


def test_commit_kv_advances_lengths_once_that_several_results_come_from(backend):
    """`out` may be the old array for one layer and another array for the next."""
    layers, result = layers_of(["slices"] * 3, batch=2), result_of([[0, 3], []], 20)
    first, second = layers[0].context_lens.tolist()
    out = [layers[0].context_lens, *(np.zeros(2, np.int32) for _ in range(2))]
    after = backend(commit_kv, layers, result, out=out)
    assert [each.context_lens.tolist() for each in after] == [[first + 2, second]] * 3


@pytest.mark.emulate
def test_commit_kv_plans_once_for_other_containers_over_the_same_memory():
    layers = layers_of(["slices"] * 4)
    result = paths_of(0, 2, 20)
    plans = []
    with emulate.active():
        for _ in range(2):
            bound = bind(commit_kv, [replace(layer) for layer in layers], result)
            plans.append(bound._launches[0].args)
    (first, _, one, _), (second, _, other, _) = plans
    assert first == second
    assert one[2] is other[2]  # the table of pieces


def test_commit_kv_matches_reference_where_no_row_can_move(backend):
    """Heads of no width, and pools without pages: only the lengths change."""
    kv = PagedKV.allocate(40, batch=2, head_dim_ckv=0, head_dim_kpe=0)
    empty = PagedKV.allocate(40, batch=2, head_dim_ckv=16, head_dim_kpe=16)
    empty = replace(empty, ckv=empty.ckv[:0], kpe=empty.kpe[:0], context_lens=kv.context_lens)
    result = result_of([[0, 2], []], 5)
    assert backend(commit_kv, kv, result).context_lens.tolist() == [2, 0]
    if backend.name != "numpy":  # the reference refuses positions without a page
        assert [each.context_lens.tolist() for each in backend(commit_kv, [kv, empty], result)] == [[2, 0]] * 2


def test_commit_kv_kernels_reject_more_arrays_of_lengths_than_parameters_hold(kernels):
    most = constants("tree_accept/commit_kv.cu")["MOST_LENGTHS"]
    one, result = layers_of(["pair"])[0], paths_of(0, 2, 20)
    layers = [replace(one, context_lens=one.context_lens.copy()) for _ in range(most + 1)]
    with pytest.raises(UnsupportedError, match=rf"{most + 1} different pairs.*at most {most}; layers may share one"):
        kernels(commit_kv, layers, result)
    kernels(commit_kv, layers[1:], result)


@pytest.mark.gpu
def test_commit_kv_can_be_captured_before_its_table_is_on_the_device():
    """Compiled by a call on other caches; then the first call on these is captured, and replayed."""
    import cupy

    gpu, kinds, result = Backend("cupy"), ["slices", "pair", "other rows"], paths_of(4, 2, 20)
    wanted = reference.commit_kv(layers_of(kinds), result)
    path = gpu.put(result)
    commit_kv(gpu.put(layers_of(kinds)), path)
    first, *others = gpu.put(layers_of(kinds))
    layers = [first, *(replace(other, context_lens=first.context_lens) for other in others)]
    out = cupy.empty_like(first.context_lens)
    space = cupy.empty(workspace_bytes(commit_kv, layers, path), np.uint8)
    before = [layer.map(cupy.copy) for layer in layers]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        after = commit_kv(layers, path, out=out, workspace=space)
        graph = stream.end_capture()
        for layer, old in zip(layers, before, strict=True):
            assert_identical(gpu.get(layer), gpu.get(old))  # captured, not run
        graph.launch(stream)
        stream.synchronize()
    assert_identical(gpu.get(after), wanted)
