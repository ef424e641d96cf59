"""Kernels do not check the metadata of a call that is alike to one which has passed; whatever differs is checked."""

from dataclasses import replace

import numpy as np
import pytest

from ddtree_cupy import AcceptResult, DraftTree, accept, build_tree, commit_kv, emulate, tree_attention
from ddtree_cupy._check import Checker
from ddtree_cupy.errors import ArgumentError, DTypeError, LayoutError, ProbabilityWarning, ShapeError
from tests.package.test_bind import attention_case

pytestmark = pytest.mark.emulate

TREE = DraftTree.from_parents([9, 10, 20, 11], [-1, 0, 1, 0])


@pytest.fixture
def checked(monkeypatch):
    """The names of the arrays that are checked, in order."""
    names = []
    array = Checker.array

    def note(self, name, *args, **options):
        names.append(name)
        array(self, name, *args, **options)

    monkeypatch.setattr(Checker, "array", note)
    with emulate.active():
        yield names


def targets(dtype=np.int32):
    return np.array([10, 20, 7, 0], dtype)


def calls():
    """Return calls of kernels whose results lie in memory of their own, by name."""
    tree, q_nope, q_pe, kv = attention_case(3)
    out = np.empty_like(q_nope), np.empty((4, 2), np.float32)
    path = accept(tree, targets())
    logits = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32)
    return {
        "tree_attention": lambda: tree_attention(tree, q_nope, q_pe, kv, sm_scale=0.1, out=out),
        "accept": lambda: accept(TREE, targets(), out=AcceptResult(*(np.empty_like(a) for a in vars(path).values()))),
        "commit_kv": lambda: commit_kv(kv, path),
        "build_tree": lambda: build_tree(logits, budget=7, root_token_ids=3),
    }


@pytest.mark.parametrize("name", ["tree_attention", "accept", "commit_kv", "build_tree"])
def test_a_call_alike_is_not_checked_again(checked, name):
    call = calls()[name]
    call()
    checked.clear()
    call()
    assert checked == []


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda tree, at: (tree, at[:3]), ShapeError),
        (lambda tree, at: (tree, at.astype(np.float32)), DTypeError),
        (lambda tree, at: (tree, np.repeat(at, 2)[::2]), LayoutError),
        (lambda tree, at: (replace(tree, next_sibling=tree.next_sibling[:3]), at), ShapeError),
        (lambda tree, at: (TREE.with_batch(), at), ShapeError),
    ],
    ids=["shape", "dtype", "strides", "field", "batch"],
)
def test_what_differs_is_refused_after_a_call_that_passed(checked, change, error):
    accept(TREE, targets())
    with pytest.raises(error, match=r"^accept: `"):
        accept(*change(TREE, targets()))


def test_results_and_options_are_part_of_what_a_call_is(checked):
    tree, q_nope, q_pe, kv = attention_case(3)
    out = np.empty_like(q_nope), np.empty((4, 2), np.float32)
    tree_attention(tree, q_nope, q_pe, kv, sm_scale=0.1, out=out)
    fixed = out[0].copy()
    fixed.flags.writeable = False
    for options, error in (
        ({"out": (out[0], out[1][:3])}, ShapeError),
        ({"out": (fixed, out[1])}, LayoutError),
        ({"out": (out[0], out[1].astype(np.float64))}, DTypeError),
        ({"sm_scale": np.inf}, ArgumentError),
        ({"keys": "some"}, ArgumentError),
    ):
        with pytest.raises(error):
            tree_attention(tree, q_nope, q_pe, kv, **{"sm_scale": 0.1, "out": out, **options})


def test_an_array_of_a_container_that_became_read_only_is_refused(checked):
    _, _, _, kv = attention_case(3)
    path = accept(TREE, targets())
    commit_kv(kv, path)
    kv.ckv.flags.writeable = False
    with pytest.raises(LayoutError, match=r"`kv\.ckv` is read-only"):
        commit_kv(kv, path)


def test_shared_memory_is_found_in_every_call(checked):
    both = np.zeros(8, np.int32)
    out = AcceptResult(both[4:], np.empty((), np.int32), np.empty((), np.int32))
    accept(TREE, targets(), out=out)
    with pytest.raises(LayoutError, match=r"accept: `out\.accepted`, which this call writes, shares memory with"):
        accept(TREE, both[2:6], out=out)
    links = replace(TREE, first_child=both[3:7])
    with pytest.raises(LayoutError, match=r"shares memory with `tree\.first_child`"):
        accept(links, targets(), out=out)


def test_the_reference_is_checked_every_time():
    for _ in range(2):
        with pytest.raises(ShapeError):
            accept(TREE, targets()[:3])
    with emulate.active():
        accept(TREE, targets())
    assert accept(TREE, targets()).num_accepted == 2
    links = replace(TREE, first_child=np.array([1, 2, 9, -1], np.int32))
    with pytest.raises(ArgumentError, match=r"`tree\.first_child`\[2\]"):
        accept(links, targets())


def test_probabilities_are_warned_of_every_time():
    rows = np.full((3, 4), 0.25, np.float32)
    with emulate.active():
        for _ in range(2):
            with pytest.warns(ProbabilityWarning):
                build_tree(rows, budget=3, root_token_ids=0)
