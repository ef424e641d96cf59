"""Bound calls: the result of a call, launched again over the same arrays or over others of their sizes."""

from dataclasses import replace

import numpy as np
import pytest

from ddtree_cupy import (
    DraftTree,
    PagedKV,
    accept,
    bind,
    build_tree,
    choose_budget,
    commit_kv,
    emulate,
    greedy_targets,
    top_candidates,
    tree_attention,
    workspace_bytes,
)
from ddtree_cupy.errors import ArgumentError, DTypeError, LayoutError, ShapeError
from ddtree_cupy.testing import assert_identical
from tests.tree_accept.cases import result_of

TREE = DraftTree.from_parents([9, 10, 20, 11], [-1, 0, 1, 0])


def logits(seed, shape=(2, 5, 40)):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def attention_case(seed):
    """Return tree, queries and a cache of their own for 4 nodes."""
    rng = np.random.default_rng(seed)
    q_nope, q_pe, ckv, kpe = (
        rng.standard_normal((*shape, width)).astype(np.float32)
        for shape, width in (((4, 2), 64), ((4, 2), 16), ((40,), 64), ((40,), 16))
    )
    return TREE, q_nope, q_pe, PagedKV.from_dense(ckv, kpe, page_size=8, context_lens=30)


def test_bound_calls_are_identical_to_calls(kernels):
    for function, arguments, options in (
        (build_tree, (logits(0),), {"budget": 12, "root_token_ids": 3}),
        (top_candidates, (logits(1),), {"k": 7}),
        (greedy_targets, (logits(2),), {}),
        (tree_attention, attention_case(3), {"sm_scale": 0.1}),
        (accept, (TREE, np.array([10, 20, 7, 0], np.int32)), {}),
    ):
        on_device = kernels.put(arguments)
        bound = kernels.run(bind, function, *on_device, **options)
        expected = kernels.get(kernels.run(function, *on_device, **options))
        for _ in range(2):
            assert_identical(kernels.get(kernels.run(bound)), expected)


def test_bound_calls_read_their_arrays_anew_and_take_others(kernels):
    first, second = logits(0), logits(1)
    arrays = kernels.put((first.copy(), second))
    bound = kernels.run(bind, greedy_targets, arrays[0])
    assert_identical(kernels.get(kernels.run(bound)), greedy_targets(first))
    arrays[0][:] = arrays[1]
    assert_identical(kernels.get(kernels.run(bound)), greedy_targets(second))
    other = kernels.put(first)
    assert_identical(kernels.get(kernels.run(bound, target_logits=other)), greedy_targets(first))


def test_bound_attention_takes_another_cache(kernels):
    tree, q_nope, q_pe, kv = kernels.put(attention_case(3))
    other = kernels.put(attention_case(4)[3])
    out = kernels.put((np.zeros((4, 2, 64), np.float32), np.zeros((4, 2), np.float32)))
    options = {"sm_scale": 0.1, "variant": "v2_split_kv", "out": out}
    bound = kernels.run(bind, tree_attention, tree, q_nope, q_pe, kv, **options)
    kernels.run(bound, kv=other)
    assert bound.result is out
    found = kernels.get(out)
    assert_identical(found, kernels.get(kernels.run(tree_attention, tree, q_nope, q_pe, other, **options)))


def test_bound_commits_move_on_where_lengths_are_written_in_place(kernels):
    _, _, _, kv = attention_case(5)
    path = result_of([[0, 2]], capacity=4).without_batch()
    expected = commit_kv(commit_kv(replace(kv, ckv=kv.ckv.copy(), kpe=kv.kpe.copy()), path), path)
    kv, path = kernels.put((kv, path))
    bound = kernels.run(bind, commit_kv, kv, path, out=kv.context_lens)
    for _ in range(2):
        kernels.run(bound)
    assert_identical(kernels.get(bound.result), expected)


def test_bound_calls_keep_their_scratch(kernels):
    """What is allocated after `bind` must not lie in memory that its launches write."""
    arguments = kernels.put(attention_case(3))
    options = {"sm_scale": 0.1, "variant": "v2_split_kv", "split_keys": None}
    arguments = (*arguments[:3], replace(arguments[3], max_context=4_000))  # so that it plans several slices
    size = kernels.run(workspace_bytes, tree_attention, *arguments, **options)
    bound = kernels.run(bind, tree_attention, *arguments, **options)
    others = kernels.put([np.zeros(size, np.uint8) for _ in range(8)])
    kernels.run(bound)
    assert not any(kernels.get(other).any() for other in others)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((choose_budget, [0.0], 1), "bind: `function` is .*choose_budget.*, expected one of .*accept"),
        ((greedy_targets, logits(0)), "bind: greedy_targets on NumPy arrays runs no kernel"),
        ((3,), "bind: `function` is 3, expected one of"),
    ],
)
def test_bind_rejects(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        bind(*arguments)


@pytest.mark.emulate
def test_bound_calls_reject_other_sizes():
    with emulate.active():
        bound = bind(greedy_targets, logits(0), num_nodes=3)
        for change, error, message in (
            ({"target_logits": logits(0, (2, 5, 41))}, ShapeError, r"`target_logits` has shape \(2, 5, 41\), expected"),
            ({"target_logits": logits(0).astype(np.float16)}, ShapeError, "`target_logits` has dtype float16"),
            ({"target_logits": [1]}, DTypeError, "`target_logits` is list, expected ndarray as before"),
            ({"num_nodes": 4}, ArgumentError, "`num_nodes` is 4, expected 3"),
            ({"uniforms": logits(0)}, ArgumentError, "greedy_targets was bound without `uniforms`"),
        ):
            with pytest.raises(error, match=message):
                bound(**change)
        with pytest.raises(LayoutError, match="`out`, which this call writes, shares memory"):
            bind(greedy_targets, square := logits(0, (1, 4, 4)), out=square.view(np.int32)[:, 0])


@pytest.mark.emulate
def test_workspace_bytes_names_what_a_bound_call_takes():
    arguments, options = (logits(0, (2, 5, 40_000)),), {"budget": 12, "root_token_ids": 3}
    with emulate.active():
        size = workspace_bytes(build_tree, *arguments, **options)
        with pytest.raises(ArgumentError, match=f"expected at least {size}"):
            bind(build_tree, *arguments, **options, workspace=np.zeros(size - 1, np.uint8))
        tree = bind(build_tree, *arguments, **options, workspace=np.zeros(size, np.uint8))()
    assert int(tree.num_nodes[0]) == 13
