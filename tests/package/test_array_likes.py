"""Lists, integers of any dtype and arrays of other libraries are taken on the host, but not where a call writes."""

import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import ddtree_cupy
from ddtree_cupy import (
    AcceptResult,
    PagedKV,
    Visibility,
    accept,
    bind,
    build_tree,
    convert_lse,
    emulate,
    greedy_targets,
    top_candidates,
    tree_attention,
)
from ddtree_cupy._arrays import as_array
from ddtree_cupy._check import Checker
from ddtree_cupy.errors import ArgumentError, DDTreeError, DTypeError, ShapeError
from ddtree_cupy.testing import assert_identical
from ddtree_cupy.testing.backends import Backend
from tests.package.array_likes import (
    CALLS,
    KV,
    LOGITS,
    QUERIES,
    TREE,
    CupyArray,
    OnlyArray,
    OnlyDLPack,
    Tensor,
    arguments_of,
    of,
    places,
    run_with,
)
from tests.refusals import TorchTensor

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
NUMPY = Backend("numpy")


def named(places):
    return pytest.mark.parametrize(("function", "name"), places, ids=lambda value: getattr(value, "__name__", value))


integers = named(places(lambda name, array: array.dtype == np.int32))
floats = named(places(lambda name, array: array.dtype.kind == "f" and name not in ("kv.ckv", "kv.kpe")))
arrays = named(places(lambda name, array: True))


def field_of(name):
    """Return the name in messages: a container refuses a field itself."""
    return name.partition(".")[2] or name


def value_of(function, name):
    return dict(arguments_of(function))[name]


FORMS = {
    "int64": lambda array: array.astype(np.int64),
    "int8": lambda array: array.astype(np.int8),
    "swapped": lambda array: array.astype(">i4"),
    "list": np.ndarray.tolist,
    "array": lambda array: OnlyArray(array.astype(np.int64)),
    "dlpack": OnlyDLPack,
}


@pytest.mark.parametrize("form", FORMS)
@integers
def test_integers_in_any_form_are_taken(host, function, name, form):
    given = FORMS[form](value_of(function, name))
    assert_identical(run_with(host, function, **{name: given}), run_with(host, function))


def test_unsigned_integers_are_taken(host):
    wide = {"budget": np.array([5, 4], np.uint64), "root_token_ids": np.array([1, 2], np.uint8)}
    assert_identical(run_with(host, build_tree, **wide), run_with(host, build_tree))


@pytest.mark.parametrize("excess", [2**31, -(2**31) - 1, 2**70])
@integers
def test_integers_that_do_not_fit_are_named(function, name, excess):
    array = value_of(function, name).astype(object)
    array[(-1,) * array.ndim] = excess
    place = [size - 1 for size in array.shape]
    field = re.escape(name.partition(".")[2] or name)
    with pytest.raises(
        ArgumentError, match=rf"`{field}`{re.escape(str(place))} is {excess}, expected integers of int32"
    ):
        run_with(NUMPY, function, **{name: array.tolist()})


def test_visibility_takes_lists_of_bits(host):
    seen = Visibility([[[1], [3], [2**32 - 1]]] * 2, [3, 2])
    wanted = Visibility(np.array([[[1], [3], [2**32 - 1]]] * 2, np.uint32), of(3, 2))
    assert_identical(seen, wanted)
    with pytest.raises(ArgumentError, match=r"`visibility_bits`\[0, 0\] is -1, expected integers of uint32"):
        Visibility([[-1]], 1)


@pytest.mark.parametrize("form", [OnlyArray, OnlyDLPack], ids=lambda form: form.__name__)
@floats
def test_floats_of_other_libraries_are_taken(host, function, name, form):
    assert_identical(run_with(host, function, **{name: form(value_of(function, name))}), run_with(host, function))


@floats
def test_lists_of_floats_are_float64(function, name):
    """As NumPy has it: such a call is one of float64 throughout."""
    wide = {each: array.astype(float) for each, array in arguments_of(function) if array.dtype.kind == "f"}
    given = {**wide, name: wide[name].tolist()}
    assert_identical(run_with(NUMPY, function, **given), run_with(NUMPY, function, **wide))


@arrays
def test_ragged_lists_are_refused_in_words(function, name):
    value = value_of(function, name).tolist()
    ragged = [*value[:-1], [*np.ravel(value).tolist(), 0]]
    with pytest.raises(ShapeError, match=rf": `{field_of(name)}` is ragged, expected lists of equal length"):
        run_with(NUMPY, function, **{name: ragged})


@pytest.mark.parametrize(
    "value", ["text", ["a", "b"], [None], object(), {"a": 1}, TREE], ids=lambda v: type(v).__name__
)
@arrays
def test_what_is_no_array_is_refused_by_name(function, name, value):
    with pytest.raises(DDTreeError, match=rf": `{field_of(name)}` (is|has dtype|is None)\b"):
        run_with(NUMPY, function, **{name: value})


@arrays
def test_tensors_on_a_gpu_are_refused_with_the_call_that_shares_them(host, function, name):
    field = name.partition(".")[2] or name
    with pytest.raises(
        DTypeError, match=rf"`{field}` is TorchTensor of torch on a device; cupy\.from_dlpack\({field}\)"
    ):
        run_with(host, function, **{name: TorchTensor()})


@pytest.mark.parametrize("form", [OnlyArray, OnlyDLPack, lambda a: a])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, np.int32])
def test_arrays_of_other_libraries_are_not_copied(form, dtype):
    array = np.arange(6, dtype=dtype).reshape(2, 3)
    taken = as_array("f", "x", form(array))
    assert_identical(taken, array)
    assert np.shares_memory(taken, array)


@pytest.mark.parametrize("form", [OnlyArray, Tensor])
def test_bfloat16_of_other_libraries_is_not_copied(form, host, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(int16=np.int16))
    logits = LOGITS.astype(BFLOAT16)
    taken = as_array("f", "x", form(logits))
    assert_identical(taken, logits)
    assert np.shares_memory(taken, logits)
    assert_identical(
        run_with(host, greedy_targets, target_logits=form(logits)), run_with(host, greedy_targets, target_logits=logits)
    )


def test_bfloat16_tensors_that_require_grad_are_refused():
    tensor = Tensor(LOGITS.astype(BFLOAT16))
    tensor.requires_grad = True
    with pytest.raises(DTypeError, match=r"`x` is Tensor of torch, .*detach\(\)"):
        as_array("f", "x", tensor)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_tensors_of_torch_are_not_copied(dtype):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensor = torch.arange(6).to(getattr(torch, dtype)).reshape(2, 3)
    taken = as_array("f", "x", tensor)
    assert taken.dtype.name == dtype
    tensor[1, 2] = 9
    assert taken[1, 2] == 9
    with pytest.raises(DTypeError, match=r"`x` is Tensor of torch, .*detach\(\)"):
        as_array("f", "x", tensor.requires_grad_())
    assert as_array("f", "x", tensor.detach()).shape == (2, 3)
    assert PagedKV.allocate(8, dtype=getattr(torch, dtype)).ckv.dtype.name == dtype


def test_arrays_of_jax_are_taken(host):
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    logits = jax.device_put(LOGITS.astype(BFLOAT16), jax.devices("cpu")[0])
    wanted = run_with(host, greedy_targets, target_logits=LOGITS.astype(BFLOAT16))
    assert_identical(run_with(host, greedy_targets, target_logits=logits), wanted)


# ---- arrays that a call writes ----


@pytest.mark.parametrize("form", ["int64", "list", "array", "dlpack"])
def test_what_a_call_writes_is_not_converted(host, form):
    given = FORMS[form](np.zeros((2, 3), np.int32))
    with pytest.raises(DTypeError, match="greedy_targets: `out`"):
        host.run(greedy_targets, LOGITS, out=given)


@pytest.mark.emulate
@pytest.mark.parametrize("form", ["int64", "list", "array", "dlpack"])
def test_workspace_is_not_converted(form):
    with emulate.active(), pytest.raises(DDTreeError, match="top_candidates: `workspace`"):
        top_candidates(LOGITS, 2, workspace=FORMS[form](np.zeros(4096, np.int32)))


@pytest.mark.parametrize("form", ["int64", "list", "array"])
def test_containers_of_copies_are_not_written(host, form):
    """The caller would wait for results in an array that nobody writes; over DLPack they do arrive."""
    accepted = np.zeros((2, 3), np.int32)
    with pytest.raises(DTypeError, match=r"accept: `out\.accepted` is a copy that AcceptResult made"):
        host.run(accept, **CALLS[accept], out=AcceptResult(FORMS[form](accepted), of(0, 0), of(0, 0)))
    host.run(accept, **CALLS[accept], out=AcceptResult(OnlyDLPack(accepted), of(0, 0), of(0, 0)))
    assert_identical(accepted, accept(**CALLS[accept]).accepted)


@pytest.mark.parametrize("form", ["list", "array", "dlpack"])
@pytest.mark.parametrize("name", ["ckv", "kpe"])
def test_pools_are_not_converted(name, form):
    given = {"list": np.ndarray.tolist, "array": OnlyArray, "dlpack": OnlyDLPack}[form](getattr(KV, name))
    with pytest.raises(DTypeError, match=rf"PagedKV: `{name}` is .*, since functions write to it") as refusal:
        replace(KV, **{name: given})
    made = advised(refusal, **{name: given})
    assert made.tolist() == getattr(KV, name).tolist()
    replace(KV, **{name: made})


@pytest.mark.emulate
def test_bind_refuses_what_it_would_copy():
    targets = [[11, 5, 6], [12, 1, 9]]
    with emulate.active():
        for given in (targets, np.array(targets)):
            with pytest.raises(DTypeError, match="bind: `target_token_ids` would be copied once"):
                bind(accept, TREE, given)
        assert_identical(bind(accept, TREE, np.array(targets, np.int32))(), accept(TREE, targets))


# ---- advice, carried out ----


def advised(refusal, **values):
    """Return what the call that a message names makes of the refused value."""
    call = re.search(r"[;:] ((?:numpy|cupy|ddtree_cupy|\w+)\.[\w.]*\(.*\)) makes one", str(refusal.value))[1]
    return eval(call, {"numpy": np, "ddtree_cupy": ddtree_cupy, **values})


@pytest.mark.emulate
@pytest.mark.parametrize(
    ("name", "value", "call"),
    [
        ("draft_logits", LOGITS.astype(float), lambda x: build_tree(x, budget=3, root_token_ids=1)),
        ("draft_logits", LOGITS.tolist(), lambda x: build_tree(x, budget=3, root_token_ids=1)),
        ("draft_logits", LOGITS.astype(">f4"), lambda x: build_tree(x, budget=3, root_token_ids=1)),
        ("target_logits", LOGITS.astype(int), greedy_targets),
        ("q_pe", QUERIES.astype(int), lambda x: tree_attention(TREE, QUERIES, x, KV, sm_scale=1.0)),
        ("lse", np.arange(3), lambda x: convert_lse(x, base=2.0, empty=-np.inf)),
    ],
)
def test_advice_to_convert_works(name, value, call):
    with emulate.active():
        with pytest.raises(DTypeError, match=f"`{name}` .*makes one") as refusal:
            call(value)
        call(advised(refusal, **{name: value}))


@pytest.mark.parametrize("dtype", ["int64", "uint8", "float64", ">i4"])
def test_a_cupy_array_keeps_its_dtype_and_the_advice_works(dtype):
    budget = CupyArray(np.array([3, 4], dtype))
    check = Checker("build_tree")
    if dtype == "float64":  # no advice to cut numbers off
        with pytest.raises(DTypeError, match=r"`budget` has dtype float64, expected int32$"):
            check.array("budget", budget, (2,), ("int32",))
        return
    with pytest.raises(
        DTypeError, match=r"`budget` has dtype .*, expected int32; budget\.astype\(numpy\.int32\)"
    ) as refusal:
        check.array("budget", budget, (2,), ("int32",))
    check.array("budget", advised(refusal, budget=budget), (2,), ("int32",))


@pytest.mark.gpu
@named(places(lambda name, array: array.dtype == np.int32 and "." not in name))
def test_integers_on_a_gpu_keep_their_dtype_and_the_advice_works(function, name):
    on_device = Backend("cupy")
    given = {key: on_device.put(value) for key, value in CALLS[function].items()}
    given |= {"capacity": 5} if "budget" in given else {}
    wide = given[name].astype(np.int64)
    with pytest.raises(DTypeError, match=f"`{name}` has dtype int64, expected int32") as refusal:
        function(**{**given, name: wide})
    function(**{**given, name: advised(refusal, **{name: wide})})


@pytest.mark.parametrize("budget", [[3, 4], np.array([3, 4])], ids=["list", "int64"])
def test_host_integers_beside_cupy_arrays_get_advice_that_works(budget):
    logits = CupyArray(LOGITS)
    with pytest.raises(DTypeError, match=r"cupy\.asarray\(budget, dtype='int32'\)") as refusal:
        build_tree(logits, budget=budget, root_token_ids=1, capacity=4)
    call = re.search(r"cupy\.asarray\(.*?\)", str(refusal.value))[0]
    cupy = SimpleNamespace(asarray=lambda array, dtype: CupyArray(np.asarray(array, dtype)))
    moved = eval(call, {"cupy": cupy, "budget": budget})
    Checker("build_tree").array("budget", moved, (2,), ("int32",))


# ---- dtypes ----


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float64"])
def test_dtypes_are_taken_in_any_form(name):
    class Dtype:
        """Looks like a dtype of torch."""

        def __repr__(self):
            return f"torch.{name}"

    Dtype.__module__ = "torch"
    forms = [name, getattr(np, name, None) or ml_dtypes.bfloat16, np.dtype(getattr(np, name, BFLOAT16)), Dtype()]
    for form in forms:
        assert PagedKV.allocate(4, dtype=form).ckv.dtype == np.dtype(forms[1])


@pytest.mark.parametrize("dtype", [None, "int32", np.int8, "float8_e4m3fn", "words", 7, ml_dtypes.float8_e5m2])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(DTypeError, match=r"PagedKV\.allocate: `dtype` is .*, expected float32 or float16 or bfloat16"):
        PagedKV.allocate(4, dtype=dtype)


def test_allocated_pools_have_the_byte_order_of_the_machine():
    assert PagedKV.allocate(4, dtype=">f4").ckv.dtype == np.float32


def test_from_dense_takes_lists():
    rows = [[1.0, 2.0], [3.0, 4.0]]
    kv = PagedKV.from_dense(rows, rows, page_size=2, context_lens=np.uint8(1))
    assert kv.ckv[0].tolist() == rows
    assert (kv.ckv.dtype, kv.context_lens.dtype) == (np.float64, np.int32)
