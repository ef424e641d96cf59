"""What a hidden node's key holds, NaN and inf too, never reaches a row that hides it; rows that see it do get it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tree_attention.cases import BFLOAT16, build, recipes, sizes_for, tree_case

from ddtree_cupy import DraftTree, PagedKV, merge_states, tree_attention
from ddtree_cupy.kernels.device import device_of
from ddtree_cupy.testing import assert_identical, lse_floor, out_floor
from ddtree_cupy.testing.backends import Backend
from ddtree_cupy.tree_attention.versions import VERSIONS, v3_mma

VALUES = [np.nan, np.inf, -np.inf]
DTYPES = [np.dtype(np.float32), np.dtype(np.float16), BFLOAT16]
REFERENCE = pytest.param(Backend("numpy"), "reference", id="numpy")
KERNELS = [
    pytest.param(Backend(name), variant, marks=mark, id=f"{name}-{variant}")
    for name, mark in (("emulate", pytest.mark.emulate), ("cupy", pytest.mark.gpu))
    for variant in VERSIONS
]
everywhere = pytest.mark.parametrize(("backend", "variant"), [REFERENCE, *KERNELS])


def head_dims_of(variant):
    """Return the smallest head sizes that a version takes, of those that tensor cores do."""
    return (64, 16) if variant == "reference" else min(VERSIONS[variant].TRAITS.head_sizes or ((64, 16),))


def spoil(case, spoilt):
    """Write `spoilt`, one (request, node, column, value) each, into the keys; columns run over ckv, then kpe.

    Returns bool [B, N]: which rows see a spoilt key.
    """
    width = case.kv.ckv.shape[-1]
    sees = np.zeros(case.q_nope.shape[:2], bool)
    for request, node, column, value in spoilt:
        context = case.contexts()[request]
        pages, slots = case.kv.locate("test", np.array([context + node]), request)
        pool, at = (case.kv.ckv, column) if column < width else (case.kv.kpe, column - width)
        pool[pages, slots, at] = value
        allowed = case.allowed[request]
        sees[request, : len(allowed)] |= allowed[:, context + node]
    return sees


def assert_spoilt_alone(case, spoilt, attend, keys="all", *, on_tensor_cores=False):
    """Judge a case after `spoil`: rows that hide every spoilt key are those of the clean case, others by where NaN is.

    v3 weighs a tile that hides NaN or inf without tensor cores, and two rows of a lane share how scores are rounded.
    """
    clean = attend(case)
    sees = spoil(case, spoilt)
    out, lse = attend(case)
    expected = tree_attention(*case.arguments, sm_scale=case.sm_scale, keys=keys)
    for found, wanted in zip((out, lse), expected, strict=True):
        found, wanted = found.astype(np.float32), wanted.astype(np.float32)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
        np.testing.assert_array_equal(np.isinf(found), np.isinf(wanted))
    if keys != "context" and all(column < out.shape[-1] for _, _, column, _ in spoilt):  # else a score may be -inf
        assert np.isnan(out[sees].astype(np.float32)).any(axis=-1).all()
    if on_tensor_cores:
        errors = np.abs(out[~sees].astype(np.float64) - clean[0][~sees].astype(np.float64))
        assert errors.max(initial=0) <= out_floor(out.dtype, clean[0], None)
        lse, of_clean = lse[~sees], clean[1][~sees]
        np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(of_clean))
        seen = np.isfinite(of_clean)
        assert (np.abs(lse[seen] - of_clean[seen]) <= lse_floor(of_clean[seen])).all()
    else:
        assert_identical((out[~sees], lse[~sees]), (clean[0][~sees], clean[1][~sees]))


@everywhere
@pytest.mark.parametrize("dtype", [*DTYPES, np.dtype(np.float64)], ids=str)
@pytest.mark.parametrize("value", VALUES)
def test_hidden_values_stay_hidden_in_the_smallest_tree(backend, variant, dtype, value):
    """Two children of a root, one of which holds NaN or inf (0 * NaN of pytorch#101967)."""
    if backend.name != "numpy" and dtype.name not in VERSIONS[variant].TRAITS.dtypes:
        pytest.skip("this version takes other dtypes, as test_kernels.py shows")
    tree = DraftTree.from_parents([7, 8, 9], [-1, 0, 0])
    width, rope = head_dims_of(variant)
    ckv, q_nope = np.ones((3, width), dtype), np.ones((3, 1, width), dtype)
    kpe, q_pe = np.ones((3, rope), dtype), np.ones((3, 1, rope), dtype)
    ckv[2] = value
    kv = PagedKV.from_dense(ckv, kpe, context_lens=0)
    whole = backend(tree_attention, tree, q_nope, q_pe, kv, sm_scale=1.0, variant=variant)
    parts = [
        backend(tree_attention, tree, q_nope, q_pe, kv, sm_scale=1.0, variant=variant, keys=keys)
        for keys in ("context", "tree")
    ]
    for out, lse in (whole, backend(merge_states, *parts[0], *parts[1])):
        assert (out[:2] == 1).all()
        assert np.isnan(out[2].astype(np.float32)).all()
        assert np.isfinite(lse[:2]).all()


@everywhere
@given(
    recipe=recipes(),
    dtype=st.sampled_from(DTYPES),
    keys=st.sampled_from(["all", "context", "tree"]),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_tree_attention_never_reads_what_hidden_nodes_hold(backend, variant, recipe, dtype, keys, seed, data):
    if backend.name != "numpy" and dtype.name not in VERSIONS[variant].TRAITS.dtypes:
        dtype = BFLOAT16
    sizes = {} if variant == "reference" else sizes_for(variant, page_size=recipe["page_size"])
    case = build(recipe, **{**sizes, "dtype": dtype, "head_dims": head_dims_of(variant)})
    nodes = [(request, node) for request, count in enumerate(recipe["counts"]) for node in range(count)]
    picked = data.draw(st.lists(st.sampled_from(nodes), max_size=4)) if nodes else []
    columns, values = st.integers(0, sum(head_dims_of(variant)) - 1), st.sampled_from(VALUES)
    spoilt = [(*place, data.draw(columns), data.draw(values)) for place in picked]

    def attend(case):
        options = {"sm_scale": case.sm_scale, "keys": keys, "variant": variant}
        return (backend if backend.name == "numpy" else Backend(backend.name, seed))(
            tree_attention, *case.arguments, **options
        )

    on_tensor_cores = backend.name != "numpy" and VERSIONS[variant].TRAITS.tensor_cores
    assert_spoilt_alone(case, spoilt, attend, keys, on_tensor_cores=on_tensor_cores)


@pytest.mark.parametrize("config", v3_mma.CONFIGS, ids=str)
@pytest.mark.parametrize(
    ("head_dims", "nodes", "context", "split_keys"),
    [
        ((512, 64), 70, 70, None),
        ((512, 64), 70, 0, None),
        pytest.param((64, 16), 20, 16_400, 32_768, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", [0.05, -0.05])
def test_v3_never_reads_what_hidden_nodes_hold(
    kernels, plan_with, config, head_dims, nodes, context, split_keys, scale
):
    """In every layout of its tiles, in a batch, and where sums are folded."""
    if config.shared_bytes(sum(head_dims), 3) + 1024 > device_of(kernels.name).shared_limit:
        pytest.skip("needs more shared memory than a block has here")
    plan_with(config=config)
    heads = 3 if split_keys is None else 1
    sizes = {"heads": heads, "head_dims": head_dims, "dtype": BFLOAT16, "sm_scale": scale}
    case = tree_case(np.random.default_rng(context), [nodes, 9], [context, 5], **sizes)
    last = nodes - 1
    spoilt = [(0, 1, 3, np.nan), (0, 9, 63, np.inf), (0, last, 17, -np.inf), (1, 8, 64, np.nan), (1, 7, 0, -np.inf)]
    options = {"sm_scale": scale, "variant": "v3_mma", "split_keys": split_keys}
    assert_spoilt_alone(
        case, spoilt, lambda case: kernels(tree_attention, *case.arguments, **options), on_tensor_cores=True
    )
