"""The tensor-core version: tiles, roles of warps, folds, layouts; one body for the emulator and the GPU."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tree_attention import cases
from tree_attention.cases import BFLOAT16, build, recipes, tree_case

from ddtree_cupy import PagedKV, emulate, tree_attention
from ddtree_cupy.kernels.device import EMULATED, device_of
from ddtree_cupy.testing import assert_identical
from ddtree_cupy.testing.backends import Backend
from ddtree_cupy.tree_attention.call import Sizes
from ddtree_cupy.tree_attention.versions import v3_mma

DTYPES = [np.dtype(np.float16), BFLOAT16]
assert_state = partial(cases.assert_state, variant="v3_mma")
every_config = pytest.mark.parametrize("config", v3_mma.CONFIGS, ids=str)


def some(first, rest):
    """Return parameters of which the `rest`, whose contexts take seconds to emulate, are part of `make test-all`."""
    return [
        *first,
        *(pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.slow) for one in rest),
    ]


@pytest.fixture(scope="session")
def kernels(kernels):
    """Matrix instructions of the emulator cut sums off as an H200 does; test_kernels.py runs v3 without that."""
    return replace(kernels, cut_sums=True)


def attend(backend, case, **options):
    return backend(tree_attention, *case.arguments, sm_scale=case.sm_scale, variant="v3_mma", **options)


def sizes(head_dims, nodes, *, batch=1, heads=3, split_keys=None, **device):
    """Return the sizes of a call over 2,048 keys, on another device."""
    return Sizes("bfloat16", batch, nodes, heads, *head_dims, 2_048, split_keys, EMULATED._replace(**device))


def with_scores(case, query, keys):
    """Return the case with the first dimension alone: scores are query * keys[position] * sm_scale, for all rows."""
    q_nope, rows = np.zeros_like(case.q_nope), case.kv.ckv.copy()
    q_nope[..., 0] = query
    dense = []
    for request, context in enumerate(case.contexts()):
        positions = np.arange(context + int(case.tree.num_nodes[request]))
        pages, slots = case.kv.locate("test", positions, request)
        rows[pages, slots, 0] = keys[: len(positions)].astype(rows.dtype)
        dense.append(rows[pages, slots].astype(np.float64))
    return case.with_values(q_nope=q_nope, q_pe=np.zeros_like(case.q_pe), kv=replace(case.kv, ckv=rows), ckv_rows=dense)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(
    recipe=recipes(),
    split=st.sampled_from([32, 64, 4096]),
    keys=st.sampled_from(["all", "context", "tree"]),
    seed=st.integers(0, 99),
)
def test_v3_matches_oracle_with_given_slices(kernels, dtype, recipe, split, keys, seed):
    case = build(recipe, dtype=dtype, head_dims=(64, 16))
    out, lse = attend(replace(kernels, seed=seed), case, split_keys=split, keys=keys)
    assert_state(case, out, lse, keys)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "nodes", "context"), [(128, 1, 1), (1, 129, 0), (3, 65, 9), (8, 33, 300)])
def test_v3_matches_oracle_for_more_than_100_rows(kernels, dtype, heads, nodes, context):
    """The more numbers lse has, the less a wrong constant can hide in its RMS."""
    case = tree_case(np.random.default_rng(nodes), [nodes], [context], heads=heads, head_dims=(64, 16), dtype=dtype)
    assert_state(case, *attend(kernels, case))


@pytest.mark.parametrize("context", some([31, 32, 33, 159, 160, 161, 16_384], [16_700, 33_500]))
@pytest.mark.parametrize("split", [{}, {"split_keys": 32_768}], ids=str)
def test_v3_matches_oracle_around_tile_and_fold_edges(kernels, context, split):
    """Key tiles of 32, pieces of a fifth of the keys on the emulator, accumulators folded every 16,384 keys."""
    options = {"heads": 1, "head_dims": (64, 16), "dtype": BFLOAT16, "page_size": 64}
    case = tree_case(np.random.default_rng(context), [3, 1], [context, 0], **options)
    assert_state(case, *attend(kernels, case, **split))


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5, 7, 11, 12, 30, 63, 64, 65])
def test_v3_matches_oracle_however_the_line_is_cut(kernels, plan_with, blocks):
    """64 units of 6 row tiles: blocks end the row tile of another one, have whole ones between, begin the next."""
    plan_with(blocks=blocks)
    options = {"heads": 8, "head_dims": (64, 16), "dtype": BFLOAT16, "page_size": 16}
    case = tree_case(np.random.default_rng(blocks), [24, 1, 9], [320, 912, 0], **options)
    for seed in (0, 1):
        assert_state(case, *attend(replace(kernels, seed=seed), case))


@pytest.mark.parametrize("batch", [32, 33, 65])
@pytest.mark.parametrize("blocks", [3, 40])
def test_v3_matches_oracle_for_more_requests_than_lanes(kernels, plan_with, batch, blocks):
    """A warp looks at 32 requests at a time; some are inactive, some give whole lengths, some lie on the line."""
    plan_with(blocks=blocks)
    counts = [(0, 1, 3)[number % 3] for number in range(batch)]
    contexts = [(0, 5, 700, 40)[number % 4] if number % 5 else 130 for number in range(batch)]
    options = {"heads": 1, "head_dims": (64, 16), "dtype": BFLOAT16, "page_size": 16}
    case = tree_case(np.random.default_rng(batch), counts, contexts, **options)
    assert_state(case, *attend(kernels, case))


@pytest.mark.parametrize(
    ("context", "split"),
    some(
        [(16_353, 16_416), (16_384, 16_384)],
        [(context, split) for context in (16_352, 16_385) for split in (16_384, 16_416, 32_768)]
        + [(16_353, 16_384), (16_353, 32_768), (16_384, 16_416), (16_384, 32_768)]
        + [(50_000, 32_768)],  # a second slice folds, too
    ),
)
def test_v3_folds_whatever_the_largest_context_is(kernels, context, split):
    """The room for folded sums depends on the keys a block may meet: the context, the nodes, the slice."""
    options = {"heads": 1, "head_dims": (64, 16), "dtype": BFLOAT16, "page_size": 64}
    nodes = 40 if context < 20_000 else 3
    case = tree_case(np.random.default_rng(context), [nodes, 2], [context, 5], **options)
    kv = replace(case.kv, max_context=context)
    assert_state(case, *attend(kernels, case.with_values(kv=kv), split_keys=split))


@every_config
@pytest.mark.parametrize("tiles", [1, 2, 3, 9])
def test_v3_roles_never_overtake_each_other(kernels, plan_with, config, tiles):
    """Whoever is slow. The emulator reports who arrives at a barrier twice, and what is read too early is NaN."""
    plan_with(config=config)
    options = {"heads": 1, "head_dims": (64, 16), "dtype": BFLOAT16, "page_size": 16}
    case = tree_case(np.random.default_rng(tiles), [5], [5 * tiles * config.keys - 5], **options)
    for seed in range(20):
        assert_state(case, *attend(replace(kernels, seed=seed), case))


@pytest.mark.parametrize("scale", [0.3, 0.0, -0.3])
def test_v3_takes_scales_of_any_sign(kernels, scale):
    """The largest product has the smallest score when the scale is negative."""
    case = tree_case(np.random.default_rng(3), [9, 2], [70, 0], heads=3, head_dims=(64, 16), dtype=BFLOAT16)
    case = case.with_values(sm_scale=scale)
    assert_state(case, *attend(kernels, case))


def test_v3_takes_caches_that_are_not_aligned(kernels):
    """Rows that start at odd elements cannot be copied 16 bytes at a time; the result is the same."""
    case = tree_case(np.random.default_rng(9), [9], [70], heads=2, head_dims=(64, 16), dtype=BFLOAT16)
    pool = np.full((*case.kv.ckv.shape[:2], 83), np.nan, BFLOAT16)
    pool[..., 1:65], pool[..., 66:82] = case.kv.ckv, case.kv.kpe
    kv = replace(case.kv, ckv=pool[..., 1:65], kpe=pool[..., 66:82])
    odd = case.with_values(kv=kv)
    assert_identical(attend(kernels, odd), attend(kernels, case))


@pytest.mark.parametrize(("limit", "config"), [*zip((227, 163, 99), v3_mma.CONFIGS, strict=True)], ids=str)
@pytest.mark.parametrize("head_dims", [(64, 16), (512, 64)])
def test_v3_matches_oracle_in_every_configuration(kernels, plan_with, limit, config, head_dims):
    """The tiles of sm_90, sm_80 and sm_86, in the shared memory of those."""
    if limit * 1024 > device_of(kernels.name).shared_limit:
        pytest.skip(f"needs {limit} KiB of shared memory a block")
    plan_with(config=config)
    for seed, counts, contexts in ((0, [5, 9], [70, 3]), (3, [33], [150]), (4, [1], [700])):
        options = {"heads": 3, "head_dims": head_dims, "dtype": BFLOAT16, "page_size": 16}
        case = tree_case(np.random.default_rng(seed), counts, contexts, **options)
        assert config in v3_mma.fitting_configs(sizes(head_dims, max(counts), shared_limit=limit * 1024))
        assert_state(case, *attend(replace(kernels, seed=seed), case))


@pytest.mark.parametrize(
    ("arch", "limit", "wanted"),
    [
        ("sm_90", 227, (0, 1, 2)),
        ("sm_80", 227, (1, 0, 2)),
        ("sm_80", 163, (1, 2)),
        ("sm_86", 99, (2,)),
        ("", 163, (1, 2)),
        ("sm_90", 48, ()),
    ],
)
def test_v3_prefers_the_configuration_of_the_architecture(arch, limit, wanted):
    """Where none was made for the device, it takes the first that its shared memory holds."""
    found = v3_mma.fitting_configs(sizes((512, 64), 66, arch=arch, shared_limit=limit * 1024))
    assert found == tuple(v3_mma.CONFIGS[number] for number in wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("query", [6e4, 3e3])
@pytest.mark.parametrize("factor", [6e4, -6e4])
@pytest.mark.parametrize("scale", [1.0, 192**-0.5])
def test_v3_takes_scores_as_large_as_float32_holds(kernels, dtype, query, factor, scale):
    """Half an ulp of such a score is up to 128: a weight must not be exp2 of it."""
    case = tree_case(np.random.default_rng(3), [4], [40], heads=2, head_dims=(64, 16), dtype=dtype)
    keys = factor * (1 + 1e-2 * np.random.default_rng(4).standard_normal(44))
    case = with_scores(case, query, keys).with_values(sm_scale=scale)
    assert_state(case, *attend(kernels, case))


@every_config
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", [0.1, 0.6, 1.5, -0.6])
def test_v3_rescales_when_maxima_rise(kernels, plan_with, config, dtype, step):
    """Within 8 of the maximum in use nothing is rescaled; a tile of 16 or 32 keys adds 2 to 70 here, base 2."""
    plan_with(config=config)
    case = tree_case(np.random.default_rng(5), [9, 3], [300, 41], heads=3, head_dims=(64, 16), dtype=dtype)
    case = with_scores(case, 1.0, step * np.arange(400)).with_values(sm_scale=1.0)
    for seed, split in ((0, {}), (3, {}), (1, {"split_keys": 64})):
        assert_state(case, *attend(replace(kernels, seed=seed), case, **split))


@pytest.mark.parametrize("config", some(v3_mma.CONFIGS[:1], v3_mma.CONFIGS[1:]), ids=str)
def test_v3_shrinks_what_was_folded_when_maxima_rise_later(kernels, plan_with, config):
    plan_with(config=config)
    context = 16_384 + 61
    case = tree_case(np.random.default_rng(6), [3], [context], heads=1, head_dims=(64, 16), dtype=BFLOAT16)
    case = with_scores(case, 4.0, np.where(np.arange(context + 3) >= context - 40, 10, 0)).with_values(sm_scale=0.5)
    for seed in (0, 1):
        assert_state(case, *attend(replace(kernels, seed=seed), case, split_keys=32_768))


@pytest.mark.gpu
def test_v3_blocks_fold_into_carries_of_their_own():
    """Blocks of the emulator take turns; here four row tiles of two slices fold at the same time."""
    case = tree_case(np.random.default_rng(7), [64], [60_000], heads=4, head_dims=(64, 16), dtype=BFLOAT16)
    assert_state(case, *attend(Backend("cupy"), case, split_keys=32_768))


def test_v3_takes_results_and_queries_at_any_element(kernels):
    """Results that start at odd elements are stored one by one; such queries are copied one by one."""
    case = tree_case(np.random.default_rng(8), [9], [70], heads=2, head_dims=(64, 16), dtype=BFLOAT16)
    expected = attend(kernels, case)
    both = np.full((*case.q_nope.shape[:3], 81), np.nan, BFLOAT16)
    both[..., 1:65], both[..., 65:81] = case.q_nope, case.q_pe
    store = np.full(case.q_nope.size + 1, np.nan, BFLOAT16)
    both, store, lse = kernels.put((both, store, np.zeros(case.q_nope.shape[:3], np.float32)))
    out = store[1:].reshape(case.q_nope.shape)
    arguments = kernels.put((case.tree, case.kv))
    options = {"sm_scale": case.sm_scale, "variant": "v3_mma", "out": (out, lse)}
    kernels.run(tree_attention, arguments[0], both[..., 1:65], both[..., 65:81], arguments[1], **options)
    assert_identical(kernels.get((out, lse)), expected)


def test_v3_takes_caches_that_run_backwards(kernels):
    case = tree_case(np.random.default_rng(9), [5], [100], heads=1, head_dims=(64, 16), dtype=BFLOAT16)
    backwards = np.concatenate([case.kv.ckv, case.kv.kpe], -1)[::-1, ::-1].copy()
    pool = kernels.put(backwards)[::-1, ::-1]
    table, lens, tree, q_nope, q_pe = kernels.put(
        (case.kv.page_table, case.kv.context_lens, case.tree, case.q_nope, case.q_pe)
    )
    kv = PagedKV(pool[..., :64], pool[..., 64:], table, lens)
    found = kernels.run(tree_attention, tree, q_nope, q_pe, kv, sm_scale=case.sm_scale, variant="v3_mma")
    assert_identical(kernels.get(found), attend(kernels, case))


@pytest.mark.parametrize("split", [32 * (2**31 - 1), 2**40])
def test_v3_takes_slices_longer_than_any_context(kernels, split):
    case = tree_case(np.random.default_rng(10), [3], [100], heads=2, head_dims=(64, 16), dtype=BFLOAT16)
    assert_identical(attend(kernels, case, split_keys=split), attend(kernels, case, split_keys=128))


@pytest.mark.parametrize("pieces", [1, 2, 31, 32, 33, 48, 49, 64, 65, 451])
@pytest.mark.parametrize("in_flight", v3_mma.IN_FLIGHT)
def test_v3_merges_any_number_of_pieces(kernels, plan_with, pieces, in_flight):
    """The last pieces, past 32 too, hold the largest scores, and weigh most."""
    plan_with(in_flight=in_flight)
    context = 32 * pieces - 1
    case = tree_case(np.random.default_rng(pieces), [1], [context], heads=1, head_dims=(64, 16), dtype=BFLOAT16)
    case = with_scores(case, 1.0, np.arange(context + 1) / 4).with_values(sm_scale=1.0)
    assert_state(case, *attend(kernels, case, split_keys=32))


def test_v3_merge_has_more_loads_in_flight_where_pieces_are_many():
    for batch, nodes, heads, split, wanted in (
        (1, 8, 64, None, 16),  # 8 row tiles of 9 pieces each
        (1, 9, 64, None, 4),  # 9 of 8
        (3, 3, 64, None, 4),
        (1, 200, 128, None, 4),  # more row tiles than blocks
        (1, 9, 64, 256, 4),  # 2,048 keys are 8 slices
        (1, 9, 64, 224, 16),  # and 10
    ):
        call = sizes((64, 16), nodes, batch=batch, heads=heads, split_keys=split)
        assert v3_mma.loads_in_flight(call, 72) == wanted


@pytest.mark.parametrize("nodes", [1, 4, 40])
@pytest.mark.parametrize("split", [{}, {"split_keys": 32}], ids=str)
def test_v3_merges_the_same_with_few_and_many_loads_in_flight(kernels, plan_with, nodes, split):
    case = tree_case(np.random.default_rng(nodes), [nodes], [2_500], heads=3, head_dims=(64, 16), dtype=BFLOAT16)
    merged = []
    for in_flight in v3_mma.IN_FLIGHT:
        plan_with(in_flight=in_flight)
        merged.append(attend(kernels, case, **split))
    assert_state(case, *merged[0])
    assert_identical(*merged)


@pytest.mark.emulate
def test_v3_addresses_pools_beyond_32_bits():
    num_pages, page_size = 70_000, 64
    pool = emulate.sparse_array((num_pages, page_size, 576), BFLOAT16)
    options = {"head_dims": (512, 64), "heads": 1, "page_size": page_size, "dtype": BFLOAT16}
    case = tree_case(np.random.default_rng(12), [3], [100], **options)
    pages = np.array([[num_pages - 1, num_pages - 2]], np.int32)
    for number, page in enumerate(pages[0]):
        pool[page, :, :512] = case.kv.ckv[case.kv.page_table[0, number]]
        pool[page, :, 512:] = case.kv.kpe[case.kv.page_table[0, number]]
    kv = PagedKV(pool[..., :512], pool[..., 512:], pages, case.kv.context_lens)
    assert_state(case, *attend(Backend("emulate"), case.with_values(kv=kv)))
