"""Arrays that share memory: what tells it, what each function does with it."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import (
    AcceptResult,
    DraftTree,
    PagedKV,
    accept,
    best_first_tree,
    build_tree,
    commit_kv,
    emulate,
    greedy_targets,
    merge_states,
    sample_targets,
    top_candidates,
    tree_attention,
    workspace_bytes,
    write_kv,
)
from ddtree_cupy._overlap import MOST_WORK, Place, overlap
from ddtree_cupy.errors import ArgumentError, LayoutError
from ddtree_cupy.testing import assert_identical, unchanged
from ddtree_cupy.tree_attention.versions import VERSIONS
from tests.oracles import logical_row
from tests.refusals import rejects
from tests.tree_accept.cases import result_of

# ---- whether two arrays share a byte ----


def is_overlap(a, b):
    found = overlap(Place.of(a), Place.of(b))
    assert overlap(Place.of(b), Place.of(a)) == found
    return found


@st.composite
def views(draw):
    """Return a view of the first bytes of a buffer with any axes, steps and offsets, and its own item size."""
    buffer = np.zeros(2400, np.uint8)

    def view():
        array = buffer.view(draw(st.sampled_from([np.uint8, np.uint16, np.float32])))
        array = array.reshape(draw(st.sampled_from([(-1,), (20, -1), (2, 3, 4, -1), (5, 2, -1)])))
        for axis in range(array.ndim):
            size = array.shape[axis]
            part = slice(draw(st.integers(0, size)), draw(st.integers(0, size)), draw(st.sampled_from([1, 1, 2, 3])))
            array = array[(slice(None),) * axis + (part,)]
            if draw(st.booleans()):
                array = np.flip(array, axis)
        return array.transpose(draw(st.permutations(range(array.ndim))))

    return view(), view()


@given(views())
def test_overlap_is_true_where_writing_one_array_changes_the_other(pair):
    a, b = pair
    found = is_overlap(a, b)
    a[...] = np.frombuffer(b"\xff" * a.itemsize, a.dtype)[0]
    assert found == (b"\xff" in b.tobytes())


def test_overlap_never_reads_memory_and_is_true_where_telling_takes_long():
    """The addresses are not memory of this process."""
    device = Place(0x7F00_0000_0000, (3, 4), (16, 4), 4)
    assert overlap(device, device._replace(address=device.address + 44))
    assert not overlap(device, device._replace(address=device.address + 48))
    strides = (10007, 10009, 10037, 10039, 10061, 10067, 10069, 10079)
    hard = Place(0x7F00_0000_0000, (20,) * len(strides), strides, 1)
    next_to_it = hard._replace(address=hard.address + 1)
    with pytest.raises(np.exceptions.TooHardError):
        np.shares_memory(hard.stand_in(), next_to_it.stand_in(), max_work=MOST_WORK)
    assert overlap(hard, next_to_it)


POOL = np.zeros((6, 3, 4, 24), np.float32)  # pages, layers, slots, widths


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (POOL[..., :16], POOL[..., 16:]),
        (POOL[..., 16:], POOL[::-1, ..., :16]),
        (POOL[:, 0], POOL[:, 1]),
        (POOL[:, 0], POOL[::-1, 2]),
        (POOL[:, 0, :, :16], POOL[:, 1, :, 16:]),
        (POOL[:, :, 0], POOL[:, :, 3]),
        (POOL[:, :, ::2], POOL[:, :, 1::2]),
        (POOL[::2], POOL[1::2]),
        (POOL[:3], POOL[3:]),
        (POOL[0], POOL[1]),
        (POOL[..., :0], POOL),
        (POOL[:0], POOL[:0]),
        (POOL.reshape(-1)[::2], POOL.reshape(-1)[1::2]),
        (POOL.reshape(-1)[:12:6], POOL.reshape(-1)[4:20:4]),
        (POOL, np.zeros(5)),
    ],
)
def test_overlap_lets_interleaved_slices_pass(a, b):
    assert not np.shares_memory(a, b)
    assert not is_overlap(a, b)


# ---- commit_kv: rows that layers share move once ----

WIDTH = 32
TABLE = np.array([2, 4, 1, 3], np.int32)
CONTEXT = 1
PATH = result_of([[0, 2, 3, 6]], 8).without_batch()


def line():
    """Return a pool of 6 pages of 4 rows and a layer over it, every logical row holding numbers of its own."""
    pool = np.arange(6 * 4 * WIDTH, dtype=np.float32).reshape(6, 4, WIDTH)
    return pool, PagedKV(pool[..., :16], pool[..., 16:], TABLE.copy(), np.array(CONTEXT, np.int32))


def over(pool, table, *, width=16):
    table, context_lens = np.asarray(table, np.int32), np.array(CONTEXT, np.int32)
    return PagedKV(pool[..., :width], pool[..., width:], table, context_lens)


OTHER_VIEWS = {
    "later pages": lambda pool: over(pool[1:], TABLE - 1),
    "reversed pages": lambda pool: over(pool[::-1], 5 - TABLE),
    "other columns": lambda pool: over(pool, TABLE, width=8),
    "swapped columns": lambda pool: PagedKV(pool[..., 16:], pool[..., :16], TABLE.copy(), np.array(CONTEXT, np.int32)),
    "half pages": lambda pool: over(pool.reshape(12, 2, WIDTH), np.stack([2 * TABLE, 2 * TABLE + 1], 1).ravel()),
    "every second page": lambda pool: over(pool[::2], [1, 2, -1, -1]),
    "half of the item size": lambda pool: over(pool.view(np.float16), TABLE, width=32),
}


def moved_once(pool, layer):
    """Return a copy of the pool in which the rows of the path sit behind the context."""
    wanted = pool.copy()
    for j, node in enumerate([0, 2, 3, 6]):
        wanted[logical_row(layer, 0, CONTEXT + j)] = pool[logical_row(layer, 0, CONTEXT + node)]
    return wanted


@pytest.mark.parametrize("case", OTHER_VIEWS)
@pytest.mark.parametrize("first", [True, False])
def test_commit_kv_moves_rows_once_that_layers_name_by_other_views(backend, case, first):
    """Pool slices and shifted page tables of one memory (https://github.com/vllm-project/vllm/issues/41262)."""
    pool, layer = line()
    wanted = moved_once(pool, layer)
    layers = [layer, OTHER_VIEWS[case](pool)]
    after = backend(commit_kv, layers if first else layers[::-1], PATH)
    found = after[0 if first else 1]
    assert_identical(np.concatenate([found.ckv, found.kpe], axis=-1), wanted)


def test_commit_kv_needs_scratch_only_for_layers_that_may_share_memory():
    pool, layer = line()
    buffer = np.zeros((6, 3, 4, WIDTH), np.float32)
    interleaved = [over(buffer[:, n], TABLE) for n in range(3)]
    apart = [over(pool[:3], [0, 1, 2]), over(pool[3:], [0, 1, 2])]
    with emulate.active():
        for layers in (interleaved, apart, [layer], [layer, layer], [over(pool.copy(), TABLE), layer]):
            assert workspace_bytes(commit_kv, layers, PATH) == 0
        for case in OTHER_VIEWS.values():
            assert workspace_bytes(commit_kv, [layer, case(pool)], PATH) > 0
        crossing = PagedKV(pool[..., :20], pool[..., 16:], TABLE, layer.context_lens)
        assert workspace_bytes(commit_kv, [crossing], PATH) > 0


def test_commit_kv_moves_columns_once_that_both_pools_of_a_layer_hold(backend):
    pool, layer = line()
    wanted = moved_once(pool, layer)
    after = backend(commit_kv, replace(layer, ckv=pool[..., :20]), PATH)
    assert_identical((after.ckv, after.kpe), (wanted[..., :20], wanted[..., 16:]))


def test_commit_kv_rejects_out_over_other_arrays_of_the_call(host):
    table, pair = np.array([*TABLE, 5], np.int32), np.zeros(2, np.int32)
    pool, layer = line()
    layer = replace(layer, page_table=table)
    other = over(np.zeros_like(pool), TABLE)
    refused = {
        r"`out`.*`kv\[0\]\.page_table`": ([layer], table[3, ...]),
        r"`out\[0\]`.*`kv\[1\]\.context_lens`": ([layer, other], [other.context_lens, pair[0, ...]]),
        r"`out`.*`result\.num_accepted`": ([layer], PATH.num_accepted),
        r"`out`.*`result\.accepted`": ([layer], PATH.accepted[7, ...]),
    }
    for message, (caches, out) in refused.items():
        with unchanged(pool=pool, table=table, path=PATH), pytest.raises(LayoutError, match=message):
            host.run(commit_kv, caches, PATH, out=out)
    with unchanged(pool=pool), pytest.raises(ArgumentError, match="`out` is one array"):
        host.run(commit_kv, [layer, other], PATH, out=[pair[0, ...], pair[0, ...]])
    after = host.run(commit_kv, [layer, other], PATH, out=[layer.context_lens, pair[0, ...]])
    assert [int(kv.context_lens) for kv in after] == [5, 5]


# ---- write_kv ----


def test_write_kv_rejects_rows_of_its_own_pools_on_every_backend(host):
    """Rows 1 to 3 onto rows 2 to 4: what arrives depends on the order of the copies."""
    pool, layer = line()
    page = pool[2]
    apart = np.zeros((3, 16), np.float32)
    for rows, name in (((page[1:, :16], apart), "ckv_rows"), ((apart, page[1:, 16:]), "kpe_rows")):
        with unchanged(pool=pool), pytest.raises(LayoutError, match=rf"^write_kv: .*shares memory with `{name}`"):
            host.run(write_kv, layer, *rows, num_rows=3)
        host.run(write_kv, layer, *(array.copy() for array in rows), num_rows=3)  # the advice works
    with pytest.raises(LayoutError, match=r"`kv\.ckv`.*`kv\.kpe`"):
        host.run(write_kv, replace(layer, ckv=pool[..., :20]), np.zeros((3, 20), np.float32), apart, num_rows=3)


def test_write_kv_takes_rows_of_another_layer_in_the_same_buffer(host):
    buffer = np.arange(6 * 2 * 4 * WIDTH, dtype=np.float32).reshape(6, 2, 4, WIDTH)
    source, target = buffer[:, 0], over(buffer[:, 1], TABLE)
    rows = source[3]
    host.run(write_kv, target, rows[:, :16], rows[:, 16:], num_rows=4)
    page, slot = zip(*(logical_row(target, 0, CONTEXT + i) for i in range(4)), strict=True)
    assert_identical(buffer[:, 1][list(page), list(slot)], rows)


# ---- out= and workspace= over what a kernel reads ----

TREE = DraftTree.from_parents([7, 10, 20], [-1, 0, 1])
LOGITS = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)


def as_ints(array, shape):
    """Return the first bytes of an array as int32 of another shape."""
    return array.reshape(-1).view(np.int32)[: int(np.prod(shape))].reshape(shape)


TARGETS = np.array([10, 20, 4], np.int32)


def accept_into(name):
    tree, targets = TREE.map(np.copy), TARGETS.copy()
    fields = {"accepted": np.zeros(3, np.int32), "num_accepted": np.zeros((), np.int32)}
    fields |= {"bonus_token": np.zeros((), np.int32)}
    shape = fields[name].shape
    fields[name] = as_ints(tree.first_child if name == "num_accepted" else targets, shape)
    return accept(tree, targets, out=AcceptResult(**fields))


def sample_into(name):
    arrays = {"target_logits": LOGITS.copy(), "uniforms": np.full(3, 0.5), "temperature": np.ones(())}
    out = as_ints(arrays[name], (3,)) if name != "temperature" else np.zeros(3, np.int32)
    if name == "temperature":
        arrays[name] = out[:2].view(np.float64)[0, ...]
        arrays[name][...] = 1.0
    return sample_targets(**arrays, out=out)


def build_into(function, name):
    tree = build_tree(LOGITS, budget=4, root_token_ids=0)
    out, budget, logits = tree.map(np.zeros_like), np.array(4, np.int32), LOGITS.copy()
    first = logits if function is build_tree else replace(top_candidates(LOGITS, 4), logits=logits[:, :4].copy())
    read = logits if function is build_tree else first.logits
    out = replace(out, parents=as_ints(read, (5,))) if name == "first" else replace(out, status=budget)
    return function(first, budget=budget, capacity=4, root_token_ids=0, out=out)


def commit_with_workspace():
    pool, layer = line()
    return commit_kv([layer, over(pool[1:], TABLE - 1)], PATH, workspace=pool.reshape(-1).view(np.uint8))


def attention_into(name):
    kv = line()[1]
    q_nope, q_pe = np.random.default_rng(1).standard_normal((2, 3, 2, 16)).astype(np.float32)
    out, lse = np.zeros_like(q_nope), np.zeros((3, 2), np.float32)
    out = {"q_pe": q_pe, "pool": kv.ckv.base.reshape(-1)[:96].reshape(3, 2, 16)}.get(name, out)
    lse = {"lse on q_nope": q_nope, "lse on out": out}.get(name, lse).reshape(-1)[:6].reshape(3, 2)
    return tree_attention(TREE, q_nope, q_pe, kv, sm_scale=1.0, out=(out, lse), variant="auto")


def merge_shifted():
    rows, lse = np.ones((5, 2, 16), np.float32), np.zeros((4, 2), np.float32)
    return merge_states(rows[:4], lse, np.ones((4, 2, 16), np.float32), lse, out=(rows[1:], lse.copy()))


@pytest.mark.emulate
@rejects(
    (LayoutError, r"^accept: `out\.accepted`.*`target_token_ids`", lambda: accept_into("accepted")),
    (LayoutError, r"^accept: `out\.num_accepted`.*`tree\.first_child`", lambda: accept_into("num_accepted")),
    (LayoutError, r"^accept: `out\.bonus_token`.*`target_token_ids`", lambda: accept_into("bonus_token")),
    (
        LayoutError,
        r"^greedy_targets: `out`.*`target_logits`",
        lambda: greedy_targets(LOGITS, out=as_ints(LOGITS, (3,))),
    ),
    (LayoutError, r"^sample_targets: `out`.*`target_logits`", lambda: sample_into("target_logits")),
    (LayoutError, r"^sample_targets: `out`.*`uniforms`", lambda: sample_into("uniforms")),
    (LayoutError, r"^sample_targets: `out`.*`temperature`", lambda: sample_into("temperature")),
    (LayoutError, r"^build_tree: `out\.parents`.*`draft_logits`", lambda: build_into(build_tree, "first")),
    (LayoutError, r"^build_tree: `out\.status`.*`budget`", lambda: build_into(build_tree, "budget")),
    (
        LayoutError,
        r"^best_first_tree: `out\.parents`.*`candidates\.logits`",
        lambda: build_into(best_first_tree, "first"),
    ),
    (
        LayoutError,
        r"^top_candidates: `workspace`.*`draft_logits`",
        lambda: top_candidates(LOGITS, 3, workspace=LOGITS.reshape(-1).view(np.uint8)),
    ),
    (LayoutError, r"^commit_kv: `workspace`.*`kv\[0\]\.ckv`", commit_with_workspace),
    (LayoutError, r"^tree_attention: `out\.out`.*`q_pe`", lambda: attention_into("q_pe")),
    (LayoutError, r"^tree_attention: `out\.out`.*`kv\.(ckv|kpe)`", lambda: attention_into("pool")),
    (LayoutError, r"^tree_attention: `out\.lse`.*`q_nope`", lambda: attention_into("lse on q_nope")),
    (LayoutError, r"^tree_attention: `out\.out`.*`out\.lse`", lambda: attention_into("lse on out")),
    (LayoutError, r"^merge_states: `out\.out`.*`out_a`", merge_shifted),
)
def test_kernels_refuse_results_over_what_they_read(call):
    with unchanged(logits=LOGITS), emulate.active():
        call()


@pytest.mark.parametrize("name", ["accepted", "num_accepted", "bonus_token"])
def test_accept_on_numpy_reads_everything_before_it_writes(name):
    assert_identical(accept_into(name), accept(TREE, TARGETS))


def test_results_over_each_other_are_refused_on_every_backend(host):
    accepted = np.zeros(3, np.int32)
    out = AcceptResult(accepted, accepted[0, ...], np.zeros((), np.int32))
    with pytest.raises(LayoutError, match=r"^accept: `out\.accepted`.*`out\.num_accepted`"):
        host.run(accept, TREE, TARGETS, out=out)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("variant", [*VERSIONS, "auto"])
@pytest.mark.parametrize("context", [3, 700])
def test_tree_attention_is_identical_with_out_over_q_nope(backend, variant, dtype, context):
    """Every query row is read before its result is written, in rows of one and of several slices."""
    if backend.name == "numpy" and variant != "auto":
        pytest.skip("a version is a kernel's")
    if variant != "auto" and np.dtype(dtype).name not in VERSIONS[variant].TRAITS.dtypes:
        pytest.skip("this version takes other dtypes")
    rng = np.random.default_rng(context)
    tree = DraftTree.from_parents([7, 10, 20, 11, 3], [-1, 0, 1, 0, 2])
    widths = (64, 16) if variant == "auto" else min(VERSIONS[variant].TRAITS.head_sizes or ((64, 16),))
    ckv, kpe = (rng.standard_normal((context + 5, width)).astype(dtype) for width in widths)
    kv = PagedKV.from_dense(ckv, kpe, page_size=16, context_lens=context)
    q_nope, q_pe = (rng.standard_normal((5, 3, width)).astype(dtype) for width in widths)
    wanted = backend(tree_attention, tree, q_nope, q_pe, kv, sm_scale=0.1, variant=variant)
    placed = backend.put((tree, q_nope.copy(), q_pe, kv))
    out = placed[1], backend.put(np.zeros((5, 3), np.float32))
    backend.run(tree_attention, *placed, sm_scale=0.1, variant=variant, out=out)
    assert_identical(backend.get(out), wanted)
