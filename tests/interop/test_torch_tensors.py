"""torch through DLPack on the CPU: shared memory both ways, and what cannot be shared."""

from dataclasses import dataclass, fields

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import AcceptResult, DraftTree, PagedKV, Visibility
from ddtree_cupy.errors import ArgumentError, DTypeError, LayoutError
from ddtree_cupy.interop import from_torch, to_torch
from ddtree_cupy.testing import assert_identical
from ddtree_cupy.testing.strategies import candidate_tables, draft_trees, paged_caches, visibilities
from tests.interop.cases import T6, ints
from tests.refusals import rejects

torch = pytest.importorskip("torch", reason="torch is not installed")

DTYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint32", "bool"]
containers = draft_trees(path_scores=True) | draft_trees() | visibilities() | candidate_tables() | paged_caches()


@given(containers)
def test_containers_round_trip_without_a_copy(container):
    found = from_torch(to_torch(container), type(container))
    assert_identical(found, container)
    for field in fields(container):
        array = getattr(container, field.name)
        if isinstance(array, np.ndarray) and array.size:
            assert np.shares_memory(array, getattr(found, field.name)), field.name


@given(st.sampled_from(DTYPES), st.sampled_from([(), (3,), (0, 2), (2, 3), (4, 1, 2)]), st.booleans())
def test_arrays_round_trip_without_a_copy(dtype, shape, strided):
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(kind)
    if strided and array.ndim:
        array = np.stack([array, array], axis=-1)[..., 0]
    tensor = to_torch(array)
    assert str(tensor.dtype) == f"torch.{dtype}"
    assert tuple(tensor.shape) == shape
    assert_identical(from_torch(tensor), array)
    if array.size:
        assert tensor.data_ptr() == array.ctypes.data
        tensor.view(torch.int8 if dtype == "bool" else tensor.dtype)[...] = 1
        assert (array == 1).all()


def test_writes_are_seen_by_both():
    tree = DraftTree.from_parents([7, 10], [-1, 0])
    tensors = to_torch(tree)
    tensors["token_ids"][1] = 11
    assert tree.token_ids.tolist() == [7, 11]
    assert tensors["path_scores"] is None
    assert tensors["visibility_bits"].dtype == torch.uint32
    assert tensors["visibility_bits"].view(torch.int32).ravel().tolist() == [1, 3]
    assert tensors["num_nodes"].shape == ()


def test_host_integers_pass_through():
    kv = PagedKV.allocate(8, page_size=4, head_dim_ckv=2, head_dim_kpe=2)
    tensors = to_torch(kv)
    assert tensors["max_context"] == 8
    assert not tensors["ckv"].is_contiguous()  # a slice of one buffer, strides kept
    assert from_torch(tensors, PagedKV).ckv.strides == kv.ckv.strides


@dataclass
class Other:
    """A dataclass that is no container."""

    token_ids: object


def read_only():
    array = np.zeros(3)
    array.flags.writeable = False
    return array


@rejects(
    (LayoutError, "read-only", read_only()),
    (LayoutError, "no negative ones", np.arange(4)[::-1]),
    (LayoutError, "not aligned", np.zeros(12, np.uint8)[1:9].view(np.int32)),
    (DTypeError, "cannot be shared.*byte order", np.zeros(3, np.dtype(np.int32).newbyteorder())),
    (DTypeError, "cannot be shared", np.zeros(3, "U4")),
    (DTypeError, "cannot be shared", np.zeros(3, ml_dtypes.float8_e4m3fn)),
    (DTypeError, "`value` is list", [1, 2]),
    (DTypeError, "`value` is Tensor", torch.zeros(3)),
    (DTypeError, "`value` is Other", Other(ints([1]))),
)
def test_to_torch_rejects(value):
    to_torch(value)


@rejects(
    (LayoutError, r"requires grad.*detach", torch.zeros(3, requires_grad=True)),
    (LayoutError, "is on meta; pass xp=cupy", torch.zeros(3, device="meta")),
    (LayoutError, "cannot be shared", torch.zeros(3).to_sparse()),
    (LayoutError, "cannot be shared", torch.zeros(3, dtype=torch.complex64).conj()),
    (LayoutError, "cannot be shared", torch.zeros(3, dtype=torch.float8_e4m3fn)),
    (DTypeError, "`value` is ndarray, expected a torch tensor", np.zeros(3)),
)
def test_from_torch_rejects(value):
    from_torch(value)


TREE = to_torch(T6)
WITHOUT_PARENTS = {name: tensor for name, tensor in TREE.items() if name != "parents"}
KV = to_torch(PagedKV.allocate(8, page_size=4, head_dim_ckv=2, head_dim_kpe=2))
CHAIN = torch.tensor([0, 1, 2, 3, 4, 5], dtype=torch.int32)


@rejects(
    (ArgumentError, "expected the fields of DraftTree", WITHOUT_PARENTS, DraftTree),
    (ArgumentError, "extra, expected the fields of DraftTree", TREE | {"extra": torch.zeros(1)}, DraftTree),
    (ArgumentError, "`value` has 1, x, expected the fields of Visibility", {1: CHAIN, "x": CHAIN}, Visibility),
    (DTypeError, "`depths` has dtype int64, expected int32", TREE | {"depths": CHAIN.long()}, DraftTree),
    (ArgumentError, "follows from `parents`", TREE | {"depths": CHAIN}, DraftTree),
    (DTypeError, "expected a torch tensor", TREE | {"depths": ints([0])}, DraftTree),
    *(
        (DTypeError, f"`{field}`", TREE | {field: value}, DraftTree)
        for field in ("token_ids", "parents", "num_nodes")
        for value in (5, None)
    ),
    *(
        (DTypeError, r"`max_context` is .*, expected an integer", KV | {"max_context": value}, PagedKV)
        for value in (None, torch.tensor(8))
    ),
    *(
        (DTypeError, r"expected a container class \(AcceptResult, Candidates, DraftTree", value, kind)
        for value, kind in (
            *((CHAIN, DraftTree), ({"token_ids": CHAIN}, Other)),
            *(({}, kind) for kind in (dict, int, "DraftTree", T6)),
        )
    ),
)
def test_from_torch_rejects_fields(tensors, kind):
    from_torch(tensors, kind)


def test_accept_results_go_to_torch_too():
    result = AcceptResult(ints([0, -1]), ints(0), ints(3))
    assert_identical(from_torch(to_torch(result), AcceptResult), result)
