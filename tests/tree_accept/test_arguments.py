"""What greedy_targets, sample_targets, accept and commit_kv refuse, by name and before anything is written."""

from dataclasses import replace

import numpy as np
import pytest

from ddtree_cupy import DraftTree, accept, commit_kv, greedy_targets, sample_targets
from ddtree_cupy.errors import ArgumentError, DDTreeError, DTypeError, LayoutError, ShapeError
from tests.refusals import assert_rejects, of, read_only, rejections
from tests.tree_accept.cases import line, result_of

NAN = np.nan
TREE = DraftTree.from_parents([[7, 10, 11], [7, 12, -1]], [[-1, 0, 0], [-1, 0, -1]])
PATHS = result_of([[0, 2], [0, 1]], 4)
TARGETS = np.zeros((2, 3), np.int32)
LOGITS = {"target_logits": np.zeros((2, 3, 5), np.float32), "num_nodes": of(3, 2), "out": TARGETS}
ARGUMENTS = {
    greedy_targets: LOGITS,
    sample_targets: {**LOGITS, "uniforms": np.full((2, 3), 0.5), "temperature": 1.0},
    accept: {"tree": TREE, "target_token_ids": TARGETS, "out": accept(TREE, TARGETS)},
    commit_kv: {"kv": line(3, 4, batch=2), "result": PATHS},
}

OF_LOGITS = {
    "target_logits": {
        ShapeError: [np.zeros(5, np.float32), [[0.0], [1.0, 2.0]]],
        DTypeError: [np.zeros((2, 3, 5), np.int32), [[[0]]], None],
    },
    "num_nodes": {
        ShapeError: [of(3)],
        DTypeError: [np.array([3.0, 2.0]), 2.0],
        DDTreeError: [of(3, 4), of(3, -1)],
        ArgumentError: [4, [3, 4], [3, 2**32]],
    },
    "out": {DTypeError: [np.zeros((2, 3), np.int64)], ShapeError: [np.zeros((2, 4), np.int32)]},
}
OF_SAMPLING = {
    "uniforms": {
        ShapeError: [np.zeros((2, 4)), np.zeros(3), 0.5],
        DTypeError: [np.zeros((2, 3), np.float16), np.zeros((2, 3), np.int64), None],
        ArgumentError: [np.ones((2, 3)), np.full((2, 3), -0.1), np.full((2, 3), NAN)],
    },
    "temperature": {
        ArgumentError: [0.0, -1.0, NAN, np.inf, np.array([1.0, 0.0]), np.array([1.0, NAN])],
        DTypeError: [None, "1", np.ones(2, np.int32)],
        ShapeError: [np.ones(3), np.ones((2, 3))],
    },
}
OF_ACCEPT = {
    "tree": {DTypeError: [TREE.parents]},
    "tree.first_child": {
        DTypeError: [TREE.first_child.astype(float)],
        ArgumentError: [TREE.first_child + np.int64(2**40)],
    },
    "tree.next_sibling": {ShapeError: [TREE.next_sibling[:, :2]]},
    "tree.num_nodes": {ShapeError: [np.array(3, np.int32)]},
    "target_token_ids": {
        ShapeError: [np.zeros(shape, np.int32) for shape in ((2, 4), (3, 3), 3)],
        DTypeError: [np.zeros((2, 3), np.float32), None],
        ArgumentError: [np.full((2, 3), 2**31), np.full((2, 3), 2**32 - 1, np.uint32)],
    },
    "out": {DDTreeError: [TARGETS]},
    "out.accepted": {ShapeError: [np.zeros((2, 4), np.int32)]},
    "out.num_accepted": {DTypeError: [np.zeros(2, np.int64)]},
    "out.bonus_token": {LayoutError: [read_only(of(0, 0))]},
}
KV = ARGUMENTS[commit_kv]["kv"]
OF_COMMIT = {
    "result": {DTypeError: [of(0, 1), None]},
    "result.accepted": {
        DTypeError: [np.zeros((2, 4), np.float32)],
        ArgumentError: [  # not from the root, past the tree
            of([0, 2, -1, -1], [1, 2, -1, -1]),
            of([0, 2, -1, -1], [0, 4, -1, -1]),
        ],
    },
    "result.num_accepted": {DTypeError: [np.zeros(2)], ShapeError: [of(1)]},
    "kv.page_table": {DTypeError: [KV.page_table.astype(float)], ArgumentError: [KV.page_table + np.int64(2**31)]},
    "kv.context_lens": {DTypeError: [np.array([3.0, 3.0])], ShapeError: [of(3), [3]]},
    "kv.ckv": {DTypeError: [KV.ckv.astype(np.int32)]},
    "kv.kpe": {ShapeError: [KV.kpe.reshape(-1, 16), KV.kpe[:1]]},
}


@rejections(
    {
        greedy_targets: (OF_LOGITS,),
        sample_targets: (OF_LOGITS, OF_SAMPLING),
        accept: (OF_ACCEPT,),
        commit_kv: (OF_COMMIT,),
    }
)
def test_tree_accept_rejects(function, name, value, error):
    assert_rejects(function, ARGUMENTS[function], name, value, error)


def test_accept_rejects_a_batch_for_one_tree():
    tree = DraftTree.from_parents([7, 10, 11], [-1, 0, 0])
    arguments = {"tree": tree, "target_token_ids": np.zeros(3, np.int32)}
    assert_rejects(accept, arguments, "target_token_ids", np.zeros((1, 3), np.int32), ShapeError)


def test_sample_targets_requires_a_temperature():
    with pytest.raises(TypeError, match="temperature"):
        sample_targets(np.zeros((1, 2)), np.zeros(1))


@pytest.mark.parametrize(
    ("result", "error", "words"),
    [
        (result_of([[0]], 4), ShapeError, ""),
        (result_of([[0]], 4).without_batch(), ShapeError, ".*`kv.page_table"),
        *(
            (replace(PATHS, **change), ArgumentError, ".*`result.accepted")
            for change in (
                {"num_accepted": of(1, 4)},  # above the path
                {"num_accepted": of(1, -2)},
                {"num_accepted": of(1, 2)},  # padding counted
                {"accepted": of([0, 2, 1, -1], [0, 1, -1, -1]), "num_accepted": of(2, 1)},  # descending
            )
        ),
    ],
)
def test_commit_kv_rejects_a_result(result, error, words):
    assert_rejects(commit_kv, ARGUMENTS[commit_kv], "result", result, error, words)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda kv: kv.ckv, DDTreeError),
        (lambda kv: [kv.ckv], DTypeError),
        (lambda kv: [kv, None], DTypeError),
        (lambda kv: replace(kv, page_table=kv.page_table[:1]), ShapeError),
        *(
            (lambda kv, pool=pool: [kv, replace(kv, **{pool: read_only(kv.ckv)})], LayoutError)
            for pool in ("ckv", "kpe")
        ),
        *(
            (lambda kv, page=page: [kv, replace(kv, page_table=of([0, 1], [2, page]))], DDTreeError)
            for page in (-1, 4, 2**30, -(2**31))  # outside the pool
        ),
        (lambda kv: [kv, replace(kv, context_lens=of(3, 7))], DDTreeError),  # past the last page
    ],
)
def test_commit_kv_rejects_a_cache_before_moving_any(change, error):
    kv = line(3, 4, batch=2)
    assert_rejects(commit_kv, {"kv": kv, "result": PATHS}, "kv", change(kv), error, ".*`kv")
