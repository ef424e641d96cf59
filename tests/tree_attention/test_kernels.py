"""The attention kernels, version by version, against the dense answer: one body for the emulator and the GPU."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tree_attention.cases import (
    BFLOAT16,
    assert_state,
    build,
    expected,
    matrix_case,
    of_one_sign,
    recipes,
    sizes_for,
    tree_case,
)

from ddtree_cupy import (
    PagedKV,
    Visibility,
    emulate,
    tree_attention,
    workspace_bytes,
)
from ddtree_cupy.errors import ArgumentError, DTypeError, LayoutError, UnsupportedError
from ddtree_cupy.testing import assert_identical
from ddtree_cupy.tree_attention.call import sizes_of
from ddtree_cupy.tree_attention.kernel import choose_version
from ddtree_cupy.tree_attention.versions import VERSIONS

DTYPES = [np.dtype(np.float32), np.dtype(np.float16), BFLOAT16]
ANY_SIZE = [name for name, version in VERSIONS.items() if version.TRAITS.head_sizes is None]  # of head

versions = pytest.mark.parametrize("variant", VERSIONS)
versions_of_any_size = pytest.mark.parametrize("variant", ANY_SIZE)
versions_and_dtypes = pytest.mark.parametrize(
    ("variant", "dtype"),
    [(name, dtype) for name, version in VERSIONS.items() for dtype in DTYPES if dtype.name in version.TRAITS.dtypes],
    ids=str,
)


def attend(backend, case, **options):
    return backend(tree_attention, *case.arguments, sm_scale=case.sm_scale, **options)


@versions_and_dtypes
@given(recipe=recipes(), keys=st.sampled_from(["all", "context", "tree"]), seed=st.integers(0, 9))
def test_tree_attention_matches_oracle(kernels, variant, dtype, recipe, keys, seed):
    case = build(recipe, **{**sizes_for(variant, page_size=recipe["page_size"]), "dtype": dtype})
    out, lse = attend(replace(kernels, seed=seed), case, keys=keys, variant=variant)
    assert_state(case, out, lse, keys, variant=variant)


def test_v3_cuts_sums_off_on_tensor_cores(kernels):
    """One row of one key: lse on an H200 is 4 units of 2^-24 off, where NumPy in float32 happens to be exact."""
    recipe = {"seed": 0, "counts": [1], "contexts": [1], "capacity": 1, "page_size": 1, "heads": 1, "is_tree": False}
    case = build(recipe, dtype=np.dtype(np.float16), head_dims=(64, 16))
    out, lse = attend(replace(kernels, cut_sums=True), case, variant="v3_mma")
    assert_state(case, out, lse, variant="v3_mma")
    units = (lse - expected(case)[1]).item() / 2.0**-24
    assert round(units) == 4


@versions_of_any_size
@pytest.mark.parametrize("head_dims", [(16, 16), (64, 16), (48, 32), (144, 16), (16, 0), (512, 0)])
def test_tree_attention_matches_oracle_for_other_head_sizes(kernels, variant, head_dims):
    case = matrix_case(np.random.default_rng(1), [5, 9], [70, 3], head_dims=head_dims, heads=3)
    assert_state(case, *attend(kernels, case, variant=variant), variant=variant)


@versions_and_dtypes
@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_tree_attention_matches_oracle_at_deepseek_sizes(kernels, variant, dtype, page_size):
    options = {**sizes_for(variant, page_size=page_size), "head_dims": (512, 64), "heads": 2, "dtype": dtype}
    case = tree_case(np.random.default_rng(2), [9, 4], [300, 65], **options)
    assert_state(case, *attend(kernels, case, variant=variant), variant=variant)


@versions
@pytest.mark.parametrize("count", [1, 31, 32, 33, 63, 64, 65, pytest.param(1025, marks=pytest.mark.slow)])
def test_tree_attention_matches_oracle_for_many_nodes(kernels, variant, count):
    case = tree_case(np.random.default_rng(count), [count], [5], heads=1, **sizes_for(variant, head_dims=(16, 16)))
    assert_state(case, *attend(kernels, case, variant=variant), variant=variant)


@versions
@pytest.mark.parametrize("heads", [0, 1, 8, 12, 64, 128])
def test_tree_attention_matches_oracle_for_many_heads(kernels, variant, heads):
    case = matrix_case(np.random.default_rng(heads), [3], [9], heads=heads, **sizes_for(variant, head_dims=(16, 16)))
    assert_state(case, *attend(kernels, case, variant=variant), variant=variant)


@pytest.mark.parametrize("context", [255, 256, 257, 511, 513, 1500])
def test_v2_matches_oracle_around_slice_edges(kernels, context):
    case = tree_case(np.random.default_rng(context), [3, 1], [context, 0], heads=1, head_dims=(16, 16))
    assert_state(case, *attend(kernels, case, variant="v2_split_kv"), variant="v2_split_kv")


@versions_of_any_size
def test_tree_attention_matches_oracle_for_long_sums_of_one_sign(kernels, variant):
    """One float32 sum over all keys shows in such values from about 8,000 keys on."""
    case = of_one_sign(tree_case(np.random.default_rng(0), [1], [20_000], heads=1, head_dims=(16, 16)))
    assert_state(case, *attend(kernels, case, variant=variant), variant=variant)


@versions
@pytest.mark.parametrize("contexts", [[0, 600], [300, 2, 1_030], [5, 5, 5, 290]], ids=str)
def test_tree_attention_matches_oracle_when_a_later_request_is_long(kernels, variant, contexts):
    """Every request has scratch of its own, also one that comes after shorter ones."""
    sizes = sizes_for(variant, head_dims=(16, 16))
    case = tree_case(np.random.default_rng(6), [3] * len(contexts), contexts, heads=2, **sizes)
    assert_state(case, *attend(kernels, case, variant=variant), variant=variant)


@versions
def test_tree_attention_matches_oracle_for_huge_scores(kernels, variant):
    """Scores of about +-6e4, where a finite sentinel such as -5e4 for masked keys would win."""
    rng = np.random.default_rng(3)
    for factor in (6e4, -6e4):
        case = matrix_case(rng, [4], [40], heads=2, **sizes_for(variant, head_dims=(16, 16)))
        one = np.zeros_like(case.q_nope)
        one[..., 0] = 1
        rows = case.kv.ckv.copy()
        rows[..., 0] = (factor * (1 + 1e-4 * rng.standard_normal(rows.shape[:2]))).astype(rows.dtype)
        pages, slots = case.kv.locate("test", np.arange(44), 0)
        dense = [rows[pages, slots].astype(np.float64)]
        case = case.with_values(
            q_nope=one, q_pe=np.zeros_like(case.q_pe), kv=replace(case.kv, ckv=rows), ckv_rows=dense, sm_scale=1.0
        )
        assert_state(case, *attend(kernels, case, variant=variant), variant=variant)


@versions_and_dtypes
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_of_non_finite_queries_are_nan_as_in_the_reference(kernels, variant, dtype, value):
    """An lse of -inf would say that the row saw nothing, and a merge would take the other side for the whole."""
    case = tree_case(np.random.default_rng(0), [3], [100], **{**sizes_for(variant), "dtype": dtype, "heads": 2})
    clean = attend(kernels, case, variant=variant)
    q_nope = case.q_nope.copy()
    q_nope[0, 1, 0, 0] = value
    found = attend(kernels, case.with_values(q_nope=q_nope), variant=variant)
    for with_it, without in zip(found, clean, strict=True):
        assert np.isnan(with_it[0, 1, 0].astype(np.float32)).all()
        with_it[0, 1, 0] = without[0, 1, 0]
        assert_identical(with_it, without)


@versions
@given(recipe=recipes())
def test_tree_attention_is_identical_when_others_join_the_batch(kernels, variant, recipe):
    case = build(recipe, **sizes_for(variant, page_size=recipe["page_size"]))
    split = {"split_keys": 64} if VERSIONS[variant].TRAITS.cuts_keys else {}
    joined = attend(kernels, case, variant=variant, **split)
    for b in range(len(recipe["counts"])):
        one = slice(b, b + 1)
        tree = Visibility(case.tree.visibility_bits[one], case.tree.num_nodes[one])
        kv = replace(case.kv, page_table=case.kv.page_table[one], context_lens=case.kv.context_lens[one])
        options = {"sm_scale": case.sm_scale, "variant": variant, **split}
        alone = kernels(tree_attention, tree, case.q_nope[one], case.q_pe[one], kv, **options)
        assert_identical((joined[0][one], joined[1][one]), alone)


@versions
@given(recipe=recipes())
def test_tree_attention_never_writes_outside_its_results(kernels, variant, recipe):
    """Guard zones around out and lse keep their canaries; every entry between them is written."""
    case = build(recipe, **sizes_for(variant, page_size=recipe["page_size"]))
    rows, dtype = case.q_nope.size // case.q_nope.shape[-1], case.q_nope.dtype
    store = kernels.put([np.full(case.q_nope.size + 512, np.nan, dtype), np.full(rows + 64, np.nan, np.float32)])
    out = store[0][256:-256].reshape(case.q_nope.shape)
    lse = store[1][32:-32].reshape(case.q_nope.shape[:-1])
    arguments = kernels.put(case.arguments)
    kernels.run(tree_attention, *arguments, sm_scale=case.sm_scale, variant=variant, out=(out, lse))
    outer_out, outer_lse = kernels.get(store)
    assert np.isnan(outer_out[:256]).all()
    assert np.isnan(outer_out[-256:]).all()
    assert np.isnan(outer_lse[:32]).all()
    assert np.isnan(outer_lse[-32:]).all()
    assert_state(case, *kernels.get((out, lse)), variant=variant)


@pytest.mark.parametrize(
    ("variant", "split"),
    [
        ("v2_split_kv", {}),
        ("v3_mma", {}),
        ("v3_mma", {"split_keys": 96}),
        ("v4_wgmma", {}),
        ("v4_wgmma", {"split_keys": 128}),
    ],
)
def test_versions_take_a_workspace_of_the_size_they_name(kernels, variant, split):
    case = tree_case(np.random.default_rng(4), [5, 7], [600, 30], heads=1, **sizes_for(variant, head_dims=(16, 16)))
    arguments = kernels.put(case.arguments)
    options = {"sm_scale": case.sm_scale, "variant": variant, **split}
    size = kernels.run(workspace_bytes, tree_attention, *arguments, **options)
    assert size > 0
    poisoned = kernels.put(np.full(size, 0xFF, np.uint8))
    found = kernels.get(kernels.run(tree_attention, *arguments, workspace=poisoned, **options))
    assert_state(case, *found, variant=variant)
    with pytest.raises(ArgumentError, match="`workspace` has"):
        kernels.run(tree_attention, *arguments, workspace=poisoned[:-1], **options)
    larger = kernels.put(np.zeros(2 * size + 1, np.uint8))
    for refused, message in ((larger[1 : size + 1], "multiple of 16"), (larger[::2], "contiguous")):
        with pytest.raises(LayoutError, match=message):
            kernels.run(tree_attention, *arguments, workspace=refused, **options)


@pytest.mark.emulate
def test_a_workspace_must_be_writable():
    case = tree_case(np.random.default_rng(4), [5], [600], heads=1, head_dims=(16, 16))
    workspace = np.zeros(1 << 20, np.uint8)
    workspace.flags.writeable = False
    with emulate.active(), pytest.raises(LayoutError, match="`workspace` is read-only"):
        tree_attention(*case.arguments, sm_scale=1.0, variant="v2_split_kv", workspace=workspace)


@pytest.mark.emulate
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
def test_grids_that_cuda_cannot_launch_are_refused(dtype):
    case = tree_case(np.random.default_rng(4), [1], [1], heads=1, head_dims=(64, 16), dtype=dtype)
    requests = 65_536
    kv = replace(
        case.kv, page_table=np.zeros((requests, 1), np.int32), context_lens=np.zeros(requests, np.int32), max_context=1
    )
    tree = Visibility(np.zeros((requests, 1, 1), np.uint32), np.zeros(requests, np.int32))
    q_nope, q_pe = (np.zeros((requests, 1, 1, size), dtype) for size in (64, 16))
    with emulate.active(), pytest.raises(UnsupportedError, match="at most 65535 requests"):
        tree_attention(tree, q_nope, q_pe, kv, sm_scale=1.0)


@versions
def test_tree_attention_survives_wrong_numbers_in_device_arrays(kernels, variant):
    """Lengths, page ids and node counts out of range give wrong rows, never an access out of bounds."""
    sizes = sizes_for(variant, head_dims=(16, 16))
    case = tree_case(np.random.default_rng(5), [4, 6], [40, 9], heads=2, poison=0.0, **sizes)
    for lens, nodes, page in (
        ([2**30, -5], [6, 6], 3),
        ([40, 9], [-1, 2**30], 3),
        ([40, 9], [4, 6], 2**30),
        (
            [40, 9],
            [4, 6],
            -7,
        ),
    ):
        table = np.where(np.arange(case.kv.page_table.shape[1]) == 0, page, case.kv.page_table).astype(np.int32)
        kv = replace(case.kv, context_lens=np.array(lens, np.int32), page_table=table)
        tree = Visibility(case.tree.visibility_bits, np.array(nodes, np.int32))
        out, _ = kernels(tree_attention, tree, case.q_nope, case.q_pe, kv, sm_scale=0.1, variant=variant)
        assert out.shape == case.q_nope.shape


def test_auto_picks_the_last_version_that_fits():
    for dtype, head_dims, wanted in [
        (BFLOAT16, (64, 16), "v3_mma"),
        (np.float16, (512, 64), "v4_wgmma"),
        (np.float32, (64, 16), "v2_split_kv"),
        (BFLOAT16, (48, 16), "v2_split_kv"),
    ]:
        case = tree_case(np.random.default_rng(10), [3], [5], head_dims=head_dims, dtype=dtype)
        sizes = sizes_of(case.q_nope, case.q_pe, case.kv, "all", None, "emulate")
        assert choose_version("auto", sizes) is VERSIONS[wanted]


def test_v1_refuses_a_context_that_does_not_fit(kernels):
    case = tree_case(np.random.default_rng(6), [2], [3], head_dims=(16, 16))
    kv = replace(case.kv, max_context=200_000)
    with pytest.raises(UnsupportedError, match="v1_three_phase keeps 200002 scores"):
        kernels(tree_attention, case.tree, case.q_nope, case.q_pe, kv, sm_scale=1.0, variant="v1_three_phase")
    out, lse = kernels(tree_attention, case.tree, case.q_nope, case.q_pe, kv, sm_scale=case.sm_scale)
    assert_state(case, out, lse, variant="v2_split_kv")


def test_tree_attention_rejects_what_no_kernel_takes(kernels):
    case = tree_case(np.random.default_rng(7), [2], [3], head_dims=(16, 16), dtype=np.float64)
    with pytest.raises(DTypeError, match=r"float32.*astype"):
        attend(kernels, case)
    case = tree_case(np.random.default_rng(7), [2], [3], head_dims=(24, 16))
    with pytest.raises(UnsupportedError, match="multiples of 16"):
        attend(kernels, case)
    with pytest.raises(UnsupportedError, match=r"v2_split_kv takes.* C = 24 and R = 16; no other version takes"):
        attend(kernels, case, variant="v2_split_kv")
    case = tree_case(np.random.default_rng(7), [2], [3], head_dims=(64, 0), dtype=BFLOAT16)
    with pytest.raises(UnsupportedError, match=r"v3_mma takes.*, got \(64, 0\); v2_split_kv \(or 'auto'\) takes them"):
        attend(kernels, case, variant="v3_mma")
    assert_state(case, *attend(kernels, case))
    case = tree_case(np.random.default_rng(7), [2], [3], head_dims=(16, 16))
    with pytest.raises(UnsupportedError, match="expected one of: auto, v1_three_phase"):
        attend(kernels, case, variant="v9")
    bits = np.zeros((1, 2, 2), np.uint32)[..., ::2]
    with pytest.raises(LayoutError, match="visibility_bits"):
        kernels.run(
            tree_attention, *kernels.put((Visibility(bits, np.array([2], np.int32)), *case.arguments[1:])), sm_scale=1.0
        )


def test_emulated_tree_attention_addresses_pools_beyond_32_bits():
    """A pool of 2.4e9 elements, of which a few rows exist: an int32 offset would wrap into memory that is not there."""
    available, reason = emulate.available()
    if not available:
        pytest.skip(f"needs a C++ compiler: {reason}")
    num_pages, page_size, width = 70_000, 64, 544
    pool = emulate.sparse_array((num_pages, page_size, width), np.float32)
    rng = np.random.default_rng(8)
    case = tree_case(rng, [3], [100], head_dims=(512, 32), heads=1, page_size=page_size)
    pages = np.array([[num_pages - 1, num_pages - 2]], np.int32)
    for number, page in enumerate(pages[0]):
        pool[page, :, :512] = case.kv.ckv[case.kv.page_table[0, number]]
        pool[page, :, 512:] = case.kv.kpe[case.kv.page_table[0, number]]
    kv = PagedKV(pool[..., :512], pool[..., 512:], pages, case.kv.context_lens)
    for variant in ANY_SIZE:
        with emulate.active():
            out, lse = tree_attention(*case.arguments[:3], kv, sm_scale=case.sm_scale, variant=variant)
        assert_state(case, out, lse, variant=variant)


@pytest.mark.emulate
@versions
@pytest.mark.parametrize("axis", ["node", "head"])
def test_tree_attention_addresses_queries_beyond_32_bits(variant, axis):
    """Nodes or heads that lie 2^31 + 64 elements apart, in an array of which a few rows exist."""
    sizes = sizes_for(variant, head_dims=(64, 16), dtype=np.dtype(np.float32))
    nodes, heads = (2, 1) if axis == "node" else (1, 2)
    case = tree_case(np.random.default_rng(13), [nodes], [40], heads=heads, **sizes)
    far = [emulate.sparse_array((2, 2**31 + 64), q.dtype) for q in (case.q_nope, case.q_pe)]
    queries = [array[:, : q.shape[-1]].reshape(q.shape) for array, q in zip(far, (case.q_nope, case.q_pe), strict=True)]
    assert all(np.shares_memory(view, array) for view, array in zip(queries, far, strict=True))
    queries[0][:], queries[1][:] = case.q_nope, case.q_pe
    with emulate.active():
        found = tree_attention(case.tree, *queries, case.kv, sm_scale=case.sm_scale, variant=variant)
    assert_state(case, *found, variant=variant)
