"""What holds for every form: host arrays only, inputs stay as they were, importing is cheap, T6 travels."""

import inspect
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from ddtree_cupy import DraftTree, Visibility, interop
from ddtree_cupy.errors import ArgumentError, DTypeError
from ddtree_cupy.testing import assert_identical, unchanged
from tests.interop.cases import CANDIDATES, T6, TOKENS, ints
from tests.refusals import CupyArray, TorchTensor

TO_FORMS = {
    "to_flashinfer_mask": lambda tree: interop.to_flashinfer_mask(tree, 3, packed=True),
    "to_huggingface": lambda tree: interop.to_huggingface(tree, 3),
    "to_huggingface_mask": lambda tree: interop.to_huggingface_mask(tree, 3),
    "to_medusa_choices": lambda tree: interop.to_medusa_choices(tree, CANDIDATES),
    "to_parent_lists": lambda tree: interop.to_parent_lists(tree, root="self"),
    "to_sglang": lambda tree: interop.to_sglang(tree, 3),
    "to_sglang_mask": lambda tree: interop.to_sglang_mask(tree, 3),
    "to_tensorrt_llm": lambda tree: interop.to_tensorrt_llm(tree),
    "to_tensorrt_llm_mask": lambda tree: interop.to_tensorrt_llm_mask(tree),
    "to_vllm_token_tree": lambda tree: interop.to_vllm_token_tree(tree, CANDIDATES, require_uniform=False),
    "tree_from_visibility": lambda tree: interop.tree_from_visibility(tree, ints(TOKENS)),
}


@pytest.mark.parametrize("form", TO_FORMS)
def test_forms_never_write_to_the_tree(form):
    tree = DraftTree.from_parents(T6.token_ids, T6.parents)
    with unchanged(**{name: getattr(tree, name) for name in tree.__dataclass_fields__ if name != "path_scores"}):
        TO_FORMS[form](tree)


@pytest.mark.parametrize("name", TO_FORMS)
def test_forms_reject_arrays_on_a_gpu(name):
    tree = DraftTree(**{field: CupyArray() for field in T6.__dataclass_fields__})
    with pytest.raises(DTypeError, match=r"come from cupy, expected NumPy arrays.*cupy\.asnumpy"):
        TO_FORMS[name](tree)


@pytest.fixture(params=["without CuPy", "with CuPy"])
def installed(request, monkeypatch):
    """Whether a module named cupy is there, whose device is known."""
    runtime = SimpleNamespace(getDevice=lambda: 0)
    cupy = SimpleNamespace(ndarray=type("ndarray", (), {}), cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy if request.param == "with CuPy" else None)


@pytest.mark.parametrize("kind", [CupyArray, TorchTensor])
def test_foreign_arrays_must_be_on_the_host(kind, installed):
    for call in (
        lambda: interop.from_sglang_mask(kind(), draft_token_num=6, mode=1),
        lambda: interop.from_flashinfer_mask(kind(), ints([0, 6]), ints([9])),
        lambda: interop.from_huggingface_mask(kind(), 3),
        lambda: interop.from_tensorrt_llm_mask(kind(), ints([6])),
        lambda: interop.from_sglang_accept(kind(), ints([[0]]), ints([0]), draft_token_num=6),
        lambda: interop.tree_from_visibility(T6, kind()),
    ):
        with pytest.raises(DTypeError, match=r"expected a NumPy array|numpy.from_dlpack"):
            call()


@pytest.mark.parametrize("name", TO_FORMS)
def test_forms_reject_an_invalid_tree(name):
    tree = DraftTree.from_parents(T6.token_ids, T6.parents)
    tree.parents[3] = 4
    with pytest.raises(ArgumentError, match="`parents`"):
        TO_FORMS[name](tree)


def test_every_pair_of_functions_is_exported_and_documented():
    names = {name for name in interop.__all__ if inspect.isfunction(getattr(interop, name))}
    assert {name.removeprefix("to_") for name in names if name.startswith("to_")} == {
        name.removeprefix("from_") for name in names if name.startswith("from_")
    }
    for name in names:
        doc = getattr(interop, name).__doc__
        assert "Raises\n" in doc, name
        assert "Examples\n" in doc, name


def test_import_pulls_in_neither_torch_nor_cupy():
    code = "import sys; import ddtree_cupy.interop; print(sorted({'torch', 'cupy', 'scipy'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_t6_travels_from_form_to_form():
    tree = T6.with_batch()
    tree, context_lens = interop.from_sglang(interop.to_sglang(tree, 3))
    tree = interop.from_huggingface(interop.to_huggingface(tree, context_lens), context_lens)
    tree = interop.from_tensorrt_llm(interop.to_tensorrt_llm(tree), tree.token_ids)
    flat = interop.to_flashinfer_mask(tree, context_lens)
    tree = interop.tree_from_visibility(
        interop.from_flashinfer_mask(flat.custom_mask, flat.qo_indptr, flat.kv_lens), tree.token_ids
    )
    tree = interop.from_parent_lists(*interop.to_parent_lists(tree))
    assert_identical(tree, T6.with_batch())


def test_masks_take_trees_and_bare_visibilities():
    bare = Visibility(T6.visibility_bits, T6.num_nodes)
    np.testing.assert_array_equal(interop.to_sglang_mask(bare, 3), interop.to_sglang_mask(T6, 3))
    assert interop.to_tensorrt_llm_mask(bare)[0].tolist() == interop.to_tensorrt_llm_mask(T6)[0].tolist()
