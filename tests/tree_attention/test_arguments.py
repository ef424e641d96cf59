"""What tree_attention, write_kv, merge_states and convert_lse refuse, by name and before anything is written."""

import numpy as np
import pytest

from ddtree_cupy import PagedKV, convert_lse, merge_states, tree_attention, write_kv
from ddtree_cupy.errors import ArgumentError, DDTreeError, DTypeError, LayoutError, ShapeError
from ddtree_cupy.testing import assert_identical
from tests.refusals import TorchTensor, assert_rejects, of, read_only, rejections
from tests.tree_attention.cases import BFLOAT16, tree_case

INF, NAN = np.inf, np.nan
F16, F32, I32 = np.float16, np.float32, np.int32
CASE = tree_case(np.random.default_rng(0), [5, 4], [9, 3], page_size=4, heads=2, head_dims=(16, 8))
ATTENTION = dict(zip(("tree", "q_nope", "q_pe", "kv"), CASE.arguments, strict=True)) | {"sm_scale": CASE.sm_scale}
OUT, LSE = (np.full_like(array, 7) for array in tree_attention(**ATTENTION))
KV = PagedKV.allocate(8, batch=2, page_size=4, head_dim_ckv=16, head_dim_kpe=8)
KV.context_lens[:] = 3
STATE = np.ones((2, 3, 2, 16), F32), np.ones((2, 3, 2), F32)
ARGUMENTS = {
    tree_attention: ATTENTION | {"out": (OUT, LSE)},
    write_kv: {"kv": KV, "ckv_rows": np.ones((2, 4, 16), F32), "kpe_rows": np.ones((2, 4, 8), F32), "num_rows": 4},
    merge_states: dict(zip(("out_a", "lse_a", "out_b", "lse_b"), STATE * 2, strict=True)),
    convert_lse: {"lse": np.zeros((2, 2), F32), "base": 2.0, "empty": -INF},
}


def ones(dtype, *shape):
    return np.ones(shape, dtype)


OF_QUERIES = {
    "q_nope": {
        ShapeError: [ones(F32, 2, 6, 2, 16), ones(F32, 2, 5, 16), ones(F32, 2, 5, 2, 32), ATTENTION["q_nope"][0]],
        DTypeError: [
            *(ones(dtype, 2, 5, 2, 16) for dtype in (I32, F16, np.float64)),
            *(TorchTensor(), ATTENTION["q_nope"].tolist(), None),
        ],
        LayoutError: [np.asfortranarray(ATTENTION["q_nope"])],
    },
    "q_pe": {
        ShapeError: [ones(F32, 2, 5, 3, 8), ones(F32, 1, 5, 2, 8), ones(F32, 2, 5, 2, 16)],
        DTypeError: [ones(np.complex64, 2, 5, 2, 8), ones(BFLOAT16, 2, 5, 2, 8), TorchTensor()],
    },
    "sm_scale": {
        ArgumentError: [NAN, INF, 1e39, -3e38, 10**400],  # beyond float32, too, once it is multiplied by log2(e)
        DTypeError: ["0.1", None, True, np.ones(2)],
    },
    "keys": {ArgumentError: ["both"], DDTreeError: [None]},
    "variant": {DDTreeError: ["v9_magic", None]},
    "out": {
        ShapeError: [(OUT[:, :4], LSE), (OUT, LSE[..., None]), (OUT,), (OUT, LSE, LSE)],
        DTypeError: [(OUT.astype(np.float64), LSE), (OUT, LSE.astype(F16)), (OUT.tolist(), LSE)],
        LayoutError: [(OUT, read_only(LSE))],
        DDTreeError: [OUT],
    },
}
OF_TREE = {
    "tree": {DTypeError: [np.ones((2, 5, 5), bool), None], ShapeError: [ATTENTION["tree"].without_batch()]},
    "tree.visibility_bits": {
        DTypeError: [ones(F32, 2, 5, 1), ones(bool, 2, 5, 1)],
        ArgumentError: [-ones(I32, 2, 5, 1), np.full((2, 5, 1), 2**32)],
        ShapeError: [ones(np.uint32, 2, 5, 2), ones(np.uint32, 2, 5, 0), ones(np.uint32, 10)],
    },
    "tree.num_nodes": {
        DTypeError: [np.array([5.0, 4.0])],
        ShapeError: [of(1, 1, 1)],
        DDTreeError: [of(5, 6), of(5, -1)],
    },
}
OF_CACHE = {
    "kv": {DTypeError: [CASE.kv.ckv]},
    "kv.page_table": {
        DTypeError: [ones(F32, 2, 4), TorchTensor()],
        ArgumentError: [np.full((2, 4), 2**31)],
        DDTreeError: [np.full((2, 4), 99, I32), np.full((2, 4), -1, I32)],
    },
    "kv.context_lens": {DTypeError: [np.array([9.0, 3.0])], ShapeError: [of(9)]},
    "kv.kpe": {ShapeError: [ones(F32, 1, 4, 8), ones(F32, 9, 5, 8)]},
}
OF_ROWS = {
    "kv": {DTypeError: [ones(F32, 2, 4, 16)]},
    "kv.ckv": {LayoutError: [read_only(KV.ckv)]},
    "kv.kpe": {LayoutError: [read_only(KV.kpe)]},
    "ckv_rows": {
        ShapeError: [ones(F32, 2, 4, 8), ones(F32, 3, 4, 16), ones(F32, 4, 16)],
        DTypeError: [ones(F16, 2, 4, 16), ones(I32, 2, 4, 16), None],
    },
    "kpe_rows": {ShapeError: [ones(F32, 2, 4, 16), ones(F32, 2, 3, 8)], DTypeError: [ones(np.float64, 2, 4, 8)]},
    "num_rows": {
        ArgumentError: [5, -1, of(4, 5), of(-1, 4), [4, 5], [2**31, 4]],
        ShapeError: [of(4)],
        DTypeError: [np.array([4.0, 4.0]), 2.0, True, None],
    },
}
OF_STATES = {
    "out_a": {DTypeError: [ones(I32, 2, 3, 2, 16), [[1]], None]},
    "lse_a": {DTypeError: [ones(F16, 2, 3, 2), 1.0]},
    "out_b": {ShapeError: [ones(F32, 2, 3, 2, 8)], DTypeError: [ones(F16, 2, 3, 2, 16)]},
    "lse_b": {ShapeError: [ones(F32, 2, 3, 1), ones(F32, 2, 3, 2, 1)]},
}
OF_LSE = {
    "lse": {DTypeError: [np.zeros(2, I32), [0], "x"]},
    "base": {DDTreeError: [1.0, -2.0, "3", NAN]},
    "empty": {DDTreeError: ["-inf", NAN, None]},
}


@rejections(
    {
        tree_attention: (OF_QUERIES, OF_TREE, OF_CACHE),
        write_kv: (OF_ROWS,),
        merge_states: (OF_STATES,),
        convert_lse: (OF_LSE,),
    }
)
def test_tree_attention_rejects(function, name, value, error):
    assert_rejects(function, ARGUMENTS[function], name, value, error)


@pytest.mark.parametrize(
    ("function", "name", "value", "error", "words"),
    [
        (tree_attention, "kv", CASE.kv.without_batch(), ShapeError, ""),
        (tree_attention, "kv.kpe", CASE.kv.kpe.astype(F16), DTypeError, ".*`kpe`"),
        (tree_attention, "kv.page_table", ones(I32, 3, 4), ShapeError, ""),
        (tree_attention, "kv.context_lens", of(9, -1), DDTreeError, ".*`kv"),
        (tree_attention, "kv.context_lens", of(9, 900), DDTreeError, ".*`kv"),  # past the table
        (tree_attention, "q_nope", TorchTensor(), DTypeError, r".*from_dlpack\(q_nope\)"),
        *(  # the last page of the last request: nothing of the first request may be written
            (write_kv, "kv.page_table", of([0, 1], [2, page]), DDTreeError, ".*page_table")
            for page in (-1, 4, 2**30, -(2**31))
        ),
        (write_kv, "kv.context_lens", of(0, 6), DDTreeError, ".*`kv"),  # past the last page
        (write_kv, "kv.context_lens", of(0, -2), DDTreeError, ".*`kv"),
    ],
)
def test_tree_attention_rejects_with_other_words(function, name, value, error, words):
    assert_rejects(function, ARGUMENTS[function], name, value, error, words)


def test_tree_attention_rejects_queries_that_agree_but_not_with_the_cache():
    half = {name: ATTENTION[name].astype(F16) for name in ("q_nope", "q_pe")}
    alone = {name: ATTENTION[name][0] for name in ("q_nope", "q_pe")}
    for queries, error in ((half, DTypeError), (alone, ShapeError)):
        with pytest.raises(error, match=r"^tree_attention: .*`q_nope`"):
            tree_attention(**ATTENTION | queries)


def test_tree_attention_requires_a_scale():
    with pytest.raises(TypeError, match="sm_scale"):
        tree_attention(*CASE.arguments)


def test_tree_attention_is_identical_unchecked():
    assert_identical(tree_attention(**ATTENTION, checked=False), tree_attention(**ATTENTION))
