"""Bad arguments of tree_attention: one error each, naming the argument."""

from dataclasses import replace

import numpy as np
import pytest

from ddtree_cupy import DraftTree, tree_attention
from ddtree_cupy.errors import ArgumentError, DDTreeError, DTypeError, LayoutError, ShapeError
from ddtree_cupy.testing import assert_identical, unchanged
from tests.tree_attention.cases import BFLOAT16, tree_case


def arguments():
    case = tree_case(np.random.default_rng(0), [5, 4], [9, 3], page_size=4, heads=2, head_dims=(16, 8))
    return {
        "tree": case.tree,
        "q_nope": case.q_nope,
        "q_pe": case.q_pe,
        "kv": case.kv,
        "sm_scale": case.sm_scale,
        "keys": "all",
        "variant": "auto",
    }


def call(given):
    given = dict(given)
    positional = [given.pop(name) for name in ("tree", "q_nope", "q_pe", "kv")]
    return tree_attention(*positional, **given)


class Tensor:
    """Stands for a torch tensor, which is told by the module of its type."""

    __module__ = "torch"
    shape = (2, 5, 2, 16)
    ndim = 4


def of(value, axes):
    return np.ones(axes, value)


F32 = np.float32
CHANGED = {
    "wrong node count": (lambda a: {"q_nope": of(F32, (2, 6, 2, 16))}, ShapeError, "q_nope"),
    "no head axis": (lambda a: {"q_nope": of(F32, (2, 5, 16))}, ShapeError, "q_nope"),
    "other heads in q_pe": (lambda a: {"q_pe": of(F32, (2, 5, 3, 8))}, ShapeError, "q_pe"),
    "other batch in q_pe": (lambda a: {"q_pe": of(F32, (1, 5, 2, 8))}, ShapeError, "q_pe"),
    "latent width unlike the cache": (lambda a: {"q_nope": of(F32, (2, 5, 2, 32))}, ShapeError, "q_nope"),
    "rope width unlike the cache": (lambda a: {"q_pe": of(F32, (2, 5, 2, 16))}, ShapeError, "q_pe"),
    "unbatched queries": (lambda a: {"q_nope": a["q_nope"][0], "q_pe": a["q_pe"][0]}, ShapeError, "q_nope"),
    "unbatched tree": (lambda a: {"tree": a["tree"].without_batch()}, ShapeError, "tree"),
    "unbatched cache": (lambda a: {"kv": a["kv"].without_batch()}, ShapeError, ""),
    "integer query": (lambda a: {"q_nope": of(np.int32, (2, 5, 2, 16))}, DTypeError, "q_nope"),
    "complex query": (lambda a: {"q_pe": of(np.complex64, (2, 5, 2, 8))}, DTypeError, "q_pe"),
    "query dtype unlike the cache": (
        lambda a: {"q_nope": of(np.float16, (2, 5, 2, 16)), "q_pe": of(np.float16, (2, 5, 2, 8))},
        DTypeError,
        "q_nope",
    ),
    "q_pe dtype unlike q_nope": (lambda a: {"q_pe": of(BFLOAT16, (2, 5, 2, 8))}, DTypeError, "q_pe"),
    "float64 query, float32 cache": (lambda a: {"q_nope": of(np.float64, (2, 5, 2, 16))}, DTypeError, "q_nope"),
    "torch query": (lambda a: {"q_nope": Tensor()}, DTypeError, "q_nope"),
    "torch q_pe": (lambda a: {"q_pe": Tensor()}, DTypeError, "q_pe"),
    "list query": (lambda a: {"q_nope": a["q_nope"].tolist()}, DTypeError, "q_nope"),
    "scattered last axis": (lambda a: {"q_nope": np.asfortranarray(a["q_nope"])}, LayoutError, "q_nope"),
    "matrix for a tree": (lambda a: {"tree": np.ones((2, 5, 5), bool)}, DTypeError, "tree"),
    "no tree": (lambda a: {"tree": None}, DTypeError, "tree"),
    "array for a cache": (lambda a: {"kv": a["kv"].ckv}, DTypeError, "kv"),
    "sm_scale NaN": (lambda a: {"sm_scale": np.nan}, ArgumentError, "sm_scale"),
    "sm_scale inf": (lambda a: {"sm_scale": np.inf}, ArgumentError, "sm_scale"),
    "sm_scale beyond float32": (lambda a: {"sm_scale": 1e39}, ArgumentError, "sm_scale"),
    "sm_scale beyond float32 in base 2": (lambda a: {"sm_scale": -3e38}, ArgumentError, "sm_scale"),
    "sm_scale beyond float64": (lambda a: {"sm_scale": 10**400}, ArgumentError, "sm_scale"),
    "sm_scale string": (lambda a: {"sm_scale": "0.1"}, DTypeError, "sm_scale"),
    "sm_scale None": (lambda a: {"sm_scale": None}, DTypeError, "sm_scale"),
    "sm_scale bool": (lambda a: {"sm_scale": True}, DTypeError, "sm_scale"),
    "sm_scale array": (lambda a: {"sm_scale": np.ones(2)}, DTypeError, "sm_scale"),
    "unknown keys": (lambda a: {"keys": "both"}, ArgumentError, "keys"),
    "keys None": (lambda a: {"keys": None}, DDTreeError, "keys"),
    "unknown variant": (lambda a: {"variant": "v9_magic"}, DDTreeError, "variant"),
    "variant None": (lambda a: {"variant": None}, DDTreeError, "variant"),
}
TREE_FIELDS = {
    "int32 bits": ({"visibility_bits": of(np.int32, (2, 5, 1))}, DTypeError, "visibility_bits"),
    "bool bits": ({"visibility_bits": of(bool, (2, 5, 1))}, DTypeError, "visibility_bits"),
    "too many words": ({"visibility_bits": of(np.uint32, (2, 5, 2))}, ShapeError, "visibility_bits"),
    "too few words": ({"visibility_bits": of(np.uint32, (2, 5, 0))}, ShapeError, "visibility_bits"),
    "flat bits": ({"visibility_bits": of(np.uint32, (10,))}, ShapeError, "visibility_bits"),
    "int64 num_nodes": ({"num_nodes": np.array([5, 4])}, DTypeError, "num_nodes"),
    "num_nodes of another batch": ({"num_nodes": of(np.int32, (3,))}, ShapeError, "num_nodes"),
    "num_nodes above capacity": ({"num_nodes": np.array([5, 6], np.int32)}, DDTreeError, "num_nodes"),
    "negative num_nodes": ({"num_nodes": np.array([5, -1], np.int32)}, DDTreeError, "num_nodes"),
}
KV_FIELDS = {
    "int64 page table": ({"page_table": of(np.int64, (2, 4))}, DTypeError, "page_table"),
    "float page table": ({"page_table": of(F32, (2, 4))}, DTypeError, "page_table"),
    "page table of another batch": ({"page_table": of(np.int32, (3, 4))}, ShapeError, ""),
    "int64 context_lens": ({"context_lens": np.array([9, 3])}, DTypeError, "context_lens"),
    "context_lens shorter than the batch": ({"context_lens": np.array([9], np.int32)}, ShapeError, "context_lens"),
    "negative context length": ({"context_lens": np.array([9, -1], np.int32)}, DDTreeError, "kv"),
    "context past the table": ({"context_lens": np.array([9, 900], np.int32)}, DDTreeError, "kv"),
    "kpe of other pages": ({"kpe": of(F32, (1, 4, 8))}, ShapeError, "kpe"),
    "kpe of another page size": ({"kpe": of(F32, (9, 5, 8))}, ShapeError, "kpe"),
    "kpe of another dtype": ({"kpe": None}, DTypeError, "kpe"),
    "page out of the pool": ({"page_table": np.full((2, 4), 99, np.int32)}, DDTreeError, "page_table"),
    "negative page": ({"page_table": np.full((2, 4), -1, np.int32)}, DDTreeError, "page_table"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_tree_attention_rejects(case):
    change, error, name = CHANGED[case]
    given = arguments()
    given |= change(given)
    with pytest.raises(error, match=rf"^tree_attention: .*`[\w.]*{name}"):
        call(given)


@pytest.mark.parametrize("case", TREE_FIELDS)
def test_tree_attention_rejects_a_tree_with(case):
    changes, error, name = TREE_FIELDS[case]
    given = arguments()
    given["tree"] = replace(given["tree"], **changes)
    with pytest.raises(error, match=rf"^tree_attention: .*`[\w.]*{name}"):
        call(given)


@pytest.mark.parametrize("case", KV_FIELDS)
def test_tree_attention_rejects_a_cache_with(case):
    changes, error, name = KV_FIELDS[case]
    given = arguments()
    if case == "kpe of another dtype":
        changes = {"kpe": given["kv"].kpe.astype(np.float16)}
    given["kv"] = replace(given["kv"], **changes)
    with pytest.raises(error, match=rf"^tree_attention: .*`[\w.]*{name}"):
        call(given)


def test_tree_attention_rejects_a_missing_scale():
    given = arguments()
    del given["sm_scale"]
    with pytest.raises(TypeError, match="sm_scale"):
        call(given)


def test_tree_attention_rejects_a_torch_tensor_naming_the_conversion():
    given = arguments() | {"q_nope": Tensor()}
    with pytest.raises(DTypeError, match=r"from_dlpack\(q_nope\)"):
        call(given)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda out, lse: (out[:, :4], lse), ShapeError),
        (lambda out, lse: (out.astype(np.float64), lse), DTypeError),
        (lambda out, lse: (out, lse[..., None]), ShapeError),
        (lambda out, lse: (out, lse.astype(np.float16)), DTypeError),
        (lambda out, lse: (out,), ShapeError),
        (lambda out, lse: (out, lse, lse), ShapeError),
        (lambda out, lse: (out.tolist(), lse), DTypeError),
        (lambda out, lse: out, DDTreeError),
    ],
)
def test_tree_attention_rejects_a_wrong_out_before_writing(wrong, error):
    given = arguments()
    pair = tuple(np.full_like(array, 7) for array in call(given))
    with unchanged(out=pair[0], lse=pair[1]), pytest.raises(error, match=r"^tree_attention: .*`out"):
        call(given | {"out": wrong(*pair)})


def test_tree_attention_rejects_a_read_only_out():
    given = arguments()
    out, lse = (np.full_like(array, 7) for array in call(given))
    lse.flags.writeable = False
    with unchanged(out=out, lse=lse), pytest.raises(LayoutError, match="read-only"):
        call(given | {"out": (out, lse)})


def test_tree_attention_is_identical_unchecked():
    given = arguments()
    assert_identical(call(given | {"checked": False}), call(given))


def test_tree_attention_rejects_nothing_in_an_unbatched_tree_of_one():
    """The smallest legal call: one root, no context."""
    case = tree_case(np.random.default_rng(0), [1], [0], page_size=1)
    root = DraftTree.from_parents([0], [-1])
    out, lse = tree_attention(root, case.q_nope[0], case.q_pe[0], case.kv.without_batch(), sm_scale=1.0)
    np.testing.assert_allclose(out[0, 0], case.ckv_rows[0][0], rtol=1e-6)
    assert np.isfinite(lse).all()
