"""The version for Hopper: who computes what, warpgroups, pages, folds; one body for the emulator and the GPU."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tree_attention import cases
from tree_attention.cases import BFLOAT16, build, recipes, sizes_for, tree_case
from tree_attention.test_kernels_mma import some, with_scores

from ddtree_cupy import PagedKV, emulate, tree_attention
from ddtree_cupy.emulate import env
from ddtree_cupy.errors import UnsupportedError
from ddtree_cupy.kernels import constants
from ddtree_cupy.kernels.device import EMULATED
from ddtree_cupy.testing import assert_identical
from ddtree_cupy.testing.backends import Backend
from ddtree_cupy.tree_attention.call import Sizes
from ddtree_cupy.tree_attention.versions import v4_wgmma

DTYPES = [np.dtype(np.float16), BFLOAT16]
SIZES = {"head_dims": (512, 64), "dtype": BFLOAT16}
assert_state = partial(cases.assert_state, variant="v4_wgmma")


@pytest.fixture(scope="session")
def kernels(kernels):
    """Matrix instructions of the emulator cut sums off as an H200 does; test_kernels.py runs v4 without that."""
    return replace(kernels, cut_sums=True)


def attend(backend, case, **options):
    return backend(tree_attention, *case.arguments, sm_scale=case.sm_scale, variant="v4_wgmma", **options)


def sizes(nodes, *, batch=1, heads=1, split_keys=None, most_keys=8_192, multiprocessors=132):
    device = EMULATED._replace(multiprocessors=multiprocessors)
    return Sizes("bfloat16", batch, nodes, heads, 512, 64, most_keys, split_keys, device, box_keys=64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    recipe=recipes(),
    split=st.sampled_from([None, 64, 128, 4096]),
    keys=st.sampled_from(["all", "context", "tree"]),
    seed=st.integers(0, 99),
)
def test_v4_matches_oracle_with_given_slices(kernels, dtype, recipe, split, keys, seed):
    case = build(recipe, **{**sizes_for("v4_wgmma", page_size=recipe["page_size"]), "dtype": dtype})
    out, lse = attend(replace(kernels, seed=seed), case, split_keys=split, keys=keys)
    assert_state(case, out, lse, keys)


@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128, 192])
@pytest.mark.parametrize(("nodes", "context"), [(5, 0), (7, 57), (9, 448), (70, 333)])
def test_v4_matches_oracle_for_all_its_page_sizes(kernels, page_size, nodes, context):
    case = tree_case(np.random.default_rng(nodes), [nodes, 3], [context, 65], heads=2, page_size=page_size, **SIZES)
    for keys in ("all", "tree"):
        assert_state(case, *attend(kernels, case, keys=keys), keys)


@pytest.mark.parametrize("page_size", [1, 7, 24, 96])
def test_v4_refuses_pages_that_no_box_fits(kernels, page_size):
    case = tree_case(np.random.default_rng(1), [3], [40], heads=2, page_size=page_size, **SIZES)
    with pytest.raises(UnsupportedError, match=r"v4_wgmma takes caches in pages of 8, 16, 32 or a multiple of 64"):
        attend(kernels, case)


@pytest.mark.parametrize("tiles", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("pairs", [False, True])
def test_v4_roles_never_overtake_each_other(kernels, plan_with, tiles, pairs):
    """Whoever is slow. Who arrives too often is reported, what is read too early is NaN, and all warps have rows."""
    plan_with(v4_wgmma, blocks=2, parts=2 if pairs else 1, pairs=pairs)
    case = tree_case(np.random.default_rng(tiles), [5], [64 * tiles - 5], heads=12, page_size=64, **SIZES)
    for seed in range(3 if env.sanitizer() else 20):
        assert_state(case, *attend(replace(kernels, seed=seed), case))


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 8, 11, 16])
@pytest.mark.parametrize("pairs", [False, True])
def test_v4_matches_oracle_however_the_line_is_cut(kernels, plan_with, blocks, pairs):
    """Blocks end the row tile of another one, have whole ones between, begin the next, or are paired."""
    plan_with(v4_wgmma, blocks=blocks + blocks % 2 if pairs else blocks, parts=0, pairs=pairs)
    case = tree_case(np.random.default_rng(blocks), [24, 1, 9], [320, 912, 0], heads=8, page_size=64, **SIZES)
    for seed in (0, 1, 2):
        assert_state(case, *attend(replace(kernels, seed=seed), case))


@pytest.mark.parametrize(("parts", "pairs"), [(1, False), (2, False), (3, False), (7, False), (2, True)])
@pytest.mark.parametrize("context", [0, 1, 64, 500])
def test_v4_matches_oracle_for_every_number_of_parts(kernels, plan_with, parts, pairs, context):
    """Parts without keys, too, and more row tiles than blocks, except where each pair has one."""
    plan_with(v4_wgmma, blocks=4, parts=parts, pairs=pairs)
    case = tree_case(np.random.default_rng(parts), [33 if pairs else 70], [context], heads=3, page_size=64, **SIZES)
    for seed in (0, 1):
        assert_state(case, *attend(replace(kernels, seed=seed), case))


@pytest.mark.parametrize("batch", [32, 33, 65])
@pytest.mark.parametrize("blocks", [3, 40])
def test_v4_matches_oracle_for_more_requests_than_lanes(kernels, plan_with, batch, blocks):
    """A warp looks at 32 requests at a time; some are inactive, some give whole lengths, some lie on the line."""
    plan_with(v4_wgmma, blocks=blocks)
    counts = [(0, 1, 3)[number % 3] for number in range(batch)]
    contexts = [(0, 5, 700, 40)[number % 4] if number % 5 else 130 for number in range(batch)]
    case = tree_case(np.random.default_rng(batch), counts, contexts, heads=1, page_size=16, **SIZES)
    assert_state(case, *attend(kernels, case))


def test_the_host_chooses_parts_where_lengths_do_not_matter():
    for nodes, heads, batch, split, wanted in (
        (64, 8, 1, None, (16, False)),  # 8 row tiles
        (65, 8, 1, None, (14, False)),  # 9
        (64, 64, 1, None, (2, True)),
        (64, 128, 1, None, (1, False)),  # 128 row tiles for 132 blocks
        (64, 100, 1, None, (0, False)),  # 100, so a third of the blocks would be idle
        (64, 8, 8, None, (0, True)),
        (64, 8, 32, None, (0, False)),
        (64, 64, 1, 512, (0, False)),
        (1, 1, 1, None, (129, False)),  # no more than key tiles
        (0, 8, 1, None, (0, False)),
    ):
        assert v4_wgmma.parts_of(sizes(nodes, batch=batch, heads=heads, split_keys=split), 132) == wanted


@pytest.mark.parametrize(
    ("context", "nodes"), some([(16_321, 3)], [(16_320, 3), (16_384, 3), (16_700, 3), (33_500, 9)])
)
def test_v4_matches_oracle_around_fold_edges(kernels, plan_with, context, nodes):
    """Accumulators are folded when 256 key tiles are left, one after which that is so."""
    plan_with(v4_wgmma, blocks=2, parts=1)
    case = tree_case(np.random.default_rng(context), [nodes], [context], heads=1, page_size=64, **SIZES)
    assert_state(case, *attend(kernels, case))


@pytest.mark.skipif(bool(env.sanitizer()), reason="takes minutes there; the test above folds under sanitizers, too")
@pytest.mark.parametrize("pairs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_v4_shrinks_what_was_folded_when_maxima_rise_later(kernels, plan_with, pairs):
    plan_with(v4_wgmma, blocks=2, parts=2 if pairs else 1, pairs=pairs)
    context = (2 if pairs else 1) * 16_384 + 161
    case = tree_case(np.random.default_rng(6), [3], [context], heads=1, page_size=64, **SIZES)
    case = with_scores(case, 4.0, np.where(np.arange(context + 3) >= context - 40, 30, 0)).with_values(sm_scale=0.5)
    for seed in (0, 1):
        assert_state(case, *attend(replace(kernels, seed=seed), case))


@pytest.mark.parametrize("scale", [0.3, 0.0, -0.3, 1e-40])
def test_v4_takes_scales_of_any_sign(kernels, scale):
    """The sign goes to the queries; scores of scales that float32 flushes to 0 are 0."""
    case = tree_case(np.random.default_rng(3), [9, 2], [70, 0], heads=3, page_size=16, **SIZES)
    assert_state(case := case.with_values(sm_scale=scale), *attend(kernels, case))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("query", [6e4, 3e3])
@pytest.mark.parametrize("factor", [6e4, -6e4])
@pytest.mark.parametrize("scale", [1.0, 192**-0.5])
def test_v4_takes_scores_as_large_as_float32_holds(kernels, dtype, query, factor, scale):
    """Half an ulp of such a score is up to 128: a weight must not be exp2 of it."""
    case = tree_case(np.random.default_rng(3), [4], [40], heads=2, page_size=16, **{**SIZES, "dtype": dtype})
    keys = factor * (1 + 1e-2 * np.random.default_rng(4).standard_normal(44))
    case = with_scores(case, query, keys).with_values(sm_scale=scale)
    assert_state(case, *attend(kernels, case))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", [0.05, 0.6, -0.6])
@pytest.mark.parametrize("pairs", [False, True])
def test_v4_rescales_when_maxima_rise(kernels, plan_with, dtype, step, pairs):
    """Within 40, in float16 10, of the maximum in use nothing is rescaled; a tile adds 5 to 55 here, base 2."""
    plan_with(v4_wgmma, blocks=4, pairs=pairs, parts=0)
    case = tree_case(np.random.default_rng(5), [9, 3], [300, 41], heads=3, page_size=64, **{**SIZES, "dtype": dtype})
    case = with_scores(case, 1.0, step * np.arange(400)).with_values(sm_scale=1.0)
    for seed, split in ((0, {}), (3, {}), (1, {"split_keys": 64})):
        if not (pairs and split):
            assert_state(case, *attend(replace(kernels, seed=seed), case, **split))


def test_v4_takes_results_and_queries_at_any_element(kernels):
    """Results that start at odd elements are stored one by one; such queries are copied one by one."""
    case = tree_case(np.random.default_rng(8), [9], [70], heads=2, page_size=64, **SIZES)
    expected = attend(kernels, case)
    both = np.full((*case.q_nope.shape[:3], 577), np.nan, BFLOAT16)
    both[..., 1:513], both[..., 513:] = case.q_nope, case.q_pe
    store = np.full(case.q_nope.size + 1, np.nan, BFLOAT16)
    both, store, lse = kernels.put((both, store, np.zeros(case.q_nope.shape[:3], np.float32)))
    out = store[1:].reshape(case.q_nope.shape)
    arguments = kernels.put((case.tree, case.kv))
    options = {"sm_scale": case.sm_scale, "variant": "v4_wgmma", "out": (out, lse)}
    kernels.run(tree_attention, arguments[0], both[..., 1:513], both[..., 513:], arguments[1], **options)
    assert_identical(kernels.get((out, lse)), expected)


def test_v4_takes_pools_of_their_own(kernels):
    """Pools of unlike strides, pages that do not follow each other, and queries whose heads lie before their nodes."""
    case = tree_case(np.random.default_rng(9), [9, 4], [170, 64], heads=3, page_size=64, **SIZES)
    pages = len(case.kv.ckv)
    ckv, kpe = np.full((pages, 70, 2, 512), np.nan, BFLOAT16), np.full((64, pages, 72), np.nan, BFLOAT16)
    ckv[:, :64, 1], kpe[:, :, :64] = case.kv.ckv, case.kv.kpe.swapaxes(0, 1)
    q_nope, q_pe = (q.swapaxes(1, 2).copy() for q in (case.q_nope, case.q_pe))
    ckv, kpe, table, lens, tree, q_nope, q_pe = kernels.put(
        (ckv, kpe, case.kv.page_table, case.kv.context_lens, case.tree, q_nope, q_pe)
    )
    kv = PagedKV(ckv[:, :64, 1], kpe.swapaxes(0, 1)[..., :64], table, lens)
    queries = q_nope.swapaxes(1, 2), q_pe.swapaxes(1, 2)
    found = kernels.run(tree_attention, tree, *queries, kv, sm_scale=case.sm_scale, variant="v4_wgmma")
    assert_identical(kernels.get(found), attend(kernels, case))


@pytest.mark.parametrize("pieces", [1, 2, 3, 31, 32, 33, 65])
def test_v4_merges_any_number_of_pieces(kernels, pieces):
    """The last pieces, past 32 too, hold the largest scores, and weigh most."""
    context = 64 * pieces - 1
    case = tree_case(np.random.default_rng(pieces), [1], [context], heads=1, page_size=64, **SIZES)
    case = with_scores(case, 1.0, np.arange(context + 1) / 16).with_values(sm_scale=1.0)
    assert_state(case, *attend(kernels, case, split_keys=64))


@pytest.mark.parametrize(("nodes", "heads", "context"), [(64, 64, 1_000), (64, 8, 3_000), (33, 128, 300), (65, 8, 900)])
@pytest.mark.gpu
def test_v4_is_identical_when_repeated(nodes, heads, context):
    """Two inputs in turn, so that what one call leaves behind would show in the next."""
    backend = Backend("cupy")
    both = [
        tree_case(np.random.default_rng(seed), [nodes], [context], heads=heads, page_size=64, **SIZES)
        for seed in (0, 1)
    ]
    first = [attend(backend, case) for case in both]
    arguments = [backend.put(case.arguments) for case in both]
    for number in range(250):
        case = both[number % 2]
        found = backend.run(tree_attention, *arguments[number % 2], sm_scale=case.sm_scale, variant="v4_wgmma")
        assert_identical(backend.get(found), first[number % 2])


@pytest.mark.emulate
def test_v4_addresses_pools_beyond_32_bits():
    num_pages, page_size = 70_000, 64
    pool = emulate.sparse_array((num_pages, page_size, 576), BFLOAT16)
    case = tree_case(np.random.default_rng(12), [3], [100], heads=1, page_size=page_size, **SIZES)
    pages = np.array([[num_pages - 1, num_pages - 2]], np.int32)
    for number, page in enumerate(pages[0]):
        pool[page, :, :512] = case.kv.ckv[case.kv.page_table[0, number]]
        pool[page, :, 512:] = case.kv.kpe[case.kv.page_table[0, number]]
    kv = PagedKV(pool[..., :512], pool[..., 512:], pages, case.kv.context_lens)
    assert_state(case, *attend(Backend("emulate"), case.with_values(kv=kv)))


def test_python_and_cuda_agree_on_the_room_for_folded_sums():
    found = constants(v4_wgmma.SOURCE)
    plan = v4_wgmma.plan(sizes(64, heads=128, most_keys=20_000))
    assert plan.scratch["carries"][0] == (132, found["CARRY"])
    assert v4_wgmma.plan(sizes(64, heads=128)).scratch["carries"][0][0] == 0
