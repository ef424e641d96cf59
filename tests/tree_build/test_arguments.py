"""What top_candidates, best_first_tree, build_tree and choose_budget refuse, by name and before anything is written."""

from dataclasses import fields

import numpy as np
import pytest

from ddtree_cupy import best_first_tree, build_tree, choose_budget, top_candidates
from ddtree_cupy.errors import ArgumentError, DDTreeError, DTypeError, ShapeError
from tests.refusals import CupyArray, TorchTensor, assert_rejects, of, read_only, rejections
from tests.tree_build.cases import batch_of, garbage_like, t6_candidates

INF, NAN = np.inf, np.nan
LOGITS = np.zeros((2, 3, 4), np.float32)
ROW = np.array([[1, 2]], np.float32)
ARGUMENTS = {
    top_candidates: {"draft_logits": ROW, "k": 2},
    best_first_tree: {"candidates": batch_of(t6_candidates(), 2), "budget": 3, "root_token_ids": 1},
    build_tree: {"draft_logits": LOGITS, "budget": 3, "root_token_ids": 1},
    choose_budget: {"path_scores": [0.0, -1.0], "cost": [1.0, 1.0]},
}
OUT = {
    function: garbage_like(function(**ARGUMENTS[function]))[0]
    for function in (top_candidates, best_first_tree, build_tree)
}

OPTIONS = {
    "budget": {
        ArgumentError: [-1, of(1, -1)],
        DTypeError: [
            *(1.0, True, None, "4", NAN, np.array([1.0, 2.0]), [1, 2.5], [True, False], {1: 2}),
            *(TorchTensor(), CupyArray()),
        ],
        ShapeError: [of(1), of(1, 2, 3), [1], [[1], [2, 3]], np.array(3, np.int32), np.ones((2, 1), np.int32)],
    },
    "root_token_ids": {
        ArgumentError: [-2, 2**31, of(1, -2), [1, -2], [0, 2**31]],
        DTypeError: [1.0, None, [1, None], TorchTensor(), CupyArray()],
        ShapeError: [of(1), of(1, 2, 3)],
    },
    "capacity": {ArgumentError: [-1], DTypeError: [2.0, np.array(2, np.int32)]},
    "max_depth": {ArgumentError: [-1], DTypeError: [1.5, "deep"]},
    "max_children": {ArgumentError: [-1, [1, -1]], DTypeError: [[1.0], [2, 0.5], "3"]},
    "min_path_score": {ArgumentError: [NAN], DTypeError: ["0"]},
    "spine": {ArgumentError: [-1], DTypeError: [True, 1.0]},
    "out": {DTypeError: [3]},
}
CANDIDATES = {
    "candidates": {DTypeError: [None, (1, 2, 3), LOGITS, TorchTensor()]},
    "candidates.token_ids": {
        DTypeError: [np.zeros((2, 2, 3)), TorchTensor(), CupyArray()],
        ArgumentError: [np.full((2, 2, 3), 2**31)],
        ShapeError: [np.zeros((2, 2, 4), np.int32), np.zeros((2, 3), np.int32), [[0, 1, 2]] * 2],
    },
    "candidates.logits": {
        DTypeError: [np.zeros((2, 2, 3), np.float16)],
        ShapeError: [np.zeros((2, 3, 3), np.float32), np.zeros(3, np.float32)],
    },
    "candidates.lse": {DTypeError: [np.zeros((2, 2), np.int32)], ShapeError: [np.zeros((1, 1, 2), np.float32)]},
}
DRAFT_LOGITS = {
    "draft_logits": {
        ShapeError: [
            np.zeros(4, np.float32),
            np.zeros((1, 1, 1, 4), np.float32),
            np.float32(1),
            3.0,
            [[1.0], [2.0, 3.0]],
        ],
        DTypeError: [
            *(np.zeros((2, 4), dtype) for dtype in (np.int32, np.int64, bool, np.complex64, object, ">u2")),
            *([[1, 2]], None, "logits", [["a"]], np.zeros((2, 4), ">f4"), TorchTensor()),
        ],
    }
}
LENS = {  # of one request of four rows
    ArgumentError: [-1, 5, [5], of(-1)],
    DTypeError: [1.0, True, "1", TorchTensor(), CupyArray()],
    ShapeError: [[1, 1], of(1, 1), np.array(1)],
}
K = {"k": {ArgumentError: [-1], DTypeError: [1.0, True, "3", None]}, "out": {DTypeError: [(1, 2, 3)]}}
CHOOSE = {
    "path_scores": {
        ShapeError: [[], 0.0, [[0.0, -1.0]]],
        ArgumentError: [[0.0, NAN], [0.0, 0.5], [0.0, INF], [NAN, -1.0]],
        DDTreeError: [None],
    },
    "cost": {
        ShapeError: [[1.0], 1.0, [[1.0, 1.0]]],
        ArgumentError: [[1.0, 0.0], [1.0, -1.0], [1.0, NAN], [1.0, INF], lambda n: -1.0],
    },
}


@rejections(
    {
        top_candidates: (DRAFT_LOGITS, K),
        best_first_tree: (CANDIDATES, OPTIONS),
        build_tree: (DRAFT_LOGITS, OPTIONS),
        choose_budget: (CHOOSE,),
    }
)
def test_tree_build_rejects(function, name, value, error):
    out = {"out": OUT[function]} if function in OUT else {}
    assert_rejects(function, {**ARGUMENTS[function], **out}, name, value, error)


@pytest.mark.parametrize("fault", ["shape", "dtype", "read-only", "list"])
@pytest.mark.parametrize(
    ("function", "name"),
    [(function, field.name) for function, out in OUT.items() for field in fields(out)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_tree_build_rejects_wrong_out(function, name, fault):
    array = getattr(OUT[function], name)
    made = {"shape": array[..., None], "dtype": array.astype(np.int16), "list": array.tolist()}
    arguments = {**ARGUMENTS[function], "out": OUT[function]}
    assert_rejects(function, arguments, f"out.{name}", made.get(fault, read_only(array)), DDTreeError)


def test_best_first_tree_rejects_out_of_another_tree():
    arguments = {**ARGUMENTS[best_first_tree], "out": OUT[best_first_tree]}
    assert_rejects(best_first_tree, arguments, "out.path_scores", None, DDTreeError)
    wider = best_first_tree(**{**ARGUMENTS[best_first_tree], "budget": 4})
    assert_rejects(best_first_tree, arguments, "out", wider, ShapeError, r"`out\.token_ids`")


@pytest.mark.parametrize("name", ["budget", "root_token_ids"])
def test_best_first_tree_rejects_a_batch_axis_on_unbatched_candidates(name):
    assert_rejects(
        best_first_tree, {**ARGUMENTS[best_first_tree], "candidates": t6_candidates()}, name, of(1), ShapeError
    )


@pytest.mark.parametrize("name", ["budget", "root_token_ids"])
@pytest.mark.parametrize("function", [best_first_tree, build_tree])
def test_tree_build_requires_budget_and_root(function, name):
    with pytest.raises(TypeError, match=name):
        function(**{key: value for key, value in ARGUMENTS[function].items() if key != name})


@pytest.mark.parametrize("function", [top_candidates, build_tree])
def test_tree_build_rejects_draft_lens(function):
    for error, values in LENS.items():
        for value in values:
            arguments = ARGUMENTS[function] | {"draft_logits": np.zeros((1, 4, 3), np.float32)}
            assert_rejects(function, arguments, "draft_lens", value, error)


@pytest.mark.parametrize("function", [top_candidates, build_tree])
def test_tree_build_names_the_call_that_converts_a_torch_tensor(function):
    words = r"`draft_logits` is TorchTensor of torch on a device; cupy.from_dlpack\(draft_logits\)"
    assert_rejects(function, ARGUMENTS[function], "draft_logits", TorchTensor(), DTypeError, words)


@pytest.mark.parametrize("function", [top_candidates, build_tree])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize("bad", [NAN, -NAN, INF])
def test_tree_build_rejects_non_finite_logits_by_name(function, dtype, bad):
    logits = LOGITS.astype(dtype)
    logits[1, 0, 2] = bad
    arguments = {**ARGUMENTS[function], **({"out": OUT[function]} if function is build_tree else {})}
    words = r"`draft_logits`\[1, 0, 2\] is (nan|inf)"
    assert_rejects(function, arguments, "draft_logits", logits, ArgumentError, words)
