"""A budget or capacity far beyond what the candidates fill costs no more than the full tree, or is refused by name."""

import tracemalloc

import numpy as np
import pytest

from ddtree_cupy import best_first_tree, build_tree, top_candidates
from ddtree_cupy.cli import main
from ddtree_cupy.containers.topology import fillable_nodes
from ddtree_cupy.errors import ArgumentError, DDTreeError
from ddtree_cupy.testing import assert_identical

LOGITS = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
HUGE = [1_000_000, 2**31 - 2]


def stages(logits, **options):
    return best_first_tree(top_candidates(logits, 3), **options)


def peak_of(call):
    """Return the result and the most bytes that Python and NumPy held meanwhile."""
    tracemalloc.start()
    try:
        result = call()
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("build", [build_tree, stages], ids=["build_tree", "best_first_tree"])
@pytest.mark.parametrize("budget", HUGE)
@pytest.mark.parametrize(
    ("limits", "reach"),
    [
        ({}, 12),
        ({"max_depth": 1}, 3),
        ({"max_depth": 0}, 0),
        ({"max_children": 2}, 6),
        ({"max_children": [3, 1]}, 6),
        ({"max_children": [2]}, 2),
        ({"max_children": []}, 0),
        ({"max_children": 0}, 0),
        ({"spine": 10**6}, 12),
        ({"max_children": 10**6, "max_depth": 10**6}, 12),
    ],
    ids=str,
)
def test_a_huge_budget_gives_the_full_tree(backend, build, budget, limits, reach):
    """Its visibility would take 116 GiB at a million nodes."""
    wanted = backend(build, LOGITS, budget=reach, root_token_ids=0, **limits)
    backend(build, LOGITS, budget=20, root_token_ids=0, **limits)  # compiles
    tree, peak = peak_of(lambda: backend(build, LOGITS, budget=budget, root_token_ids=0, **limits))
    assert_identical(tree, wanted)
    assert (int(tree.num_nodes), tree.token_ids.shape) == (reach + 1, (reach + 1,))
    assert peak < 4_000_000


@pytest.mark.parametrize("build", [build_tree, stages], ids=["build_tree", "best_first_tree"])
def test_huge_budgets_of_a_batch_give_the_full_trees(build):
    logits = np.stack([LOGITS, -LOGITS])
    budgets = np.array([3, 2**31 - 1], np.int32)
    tree = build(logits, budget=budgets, root_token_ids=0)
    assert tree.token_ids.shape == (2, 13)
    assert tree.num_nodes.tolist() == [4, 13]
    assert_identical(tree, build(logits, budget=np.array([3, 12], np.int32), root_token_ids=0))


def test_empty_rows_take_a_huge_budget(backend):
    for shape in ((0, 3), (2, 0), (0, 0)):
        tree = backend(build_tree, np.zeros(shape, np.float32), budget=10**9, root_token_ids=5)
        assert tree.token_ids.tolist() == [5]


@pytest.mark.parametrize("build", [build_tree, stages], ids=["build_tree", "best_first_tree"])
def test_a_capacity_beyond_any_tree_is_refused(backend, build):
    with pytest.raises(ArgumentError, match=r"_tree: `capacity` is 1000000, expected an integer in 0\.\.65534"):
        backend(build, LOGITS, budget=4, capacity=1_000_000, root_token_ids=0)


def test_a_budget_that_candidates_fill_is_refused_before_it_is_built(backend):
    logits = np.zeros((30, 50), np.float32)
    with pytest.raises(ArgumentError, match=r"^build_tree: `budget` is 1000000, expected at most 65534 where the cand"):
        backend(build_tree, logits, budget=1_000_000, root_token_ids=0)


def test_padding_is_kept_up_to_1024_and_with_a_capacity():
    assert build_tree(LOGITS, budget=1024, root_token_ids=0).token_ids.shape == (1025,)
    assert build_tree(LOGITS, budget=1025, root_token_ids=0).token_ids.shape == (13,)
    assert build_tree(LOGITS, budget=1025, capacity=2000, root_token_ids=0).token_ids.shape == (2001,)


def test_out_for_a_huge_budget_has_the_shapes_of_the_full_tree(backend):
    tree = backend(build_tree, LOGITS, budget=12, root_token_ids=0)
    out = backend(build_tree, -LOGITS, budget=12, root_token_ids=1)
    assert_identical(backend(build_tree, LOGITS, budget=10**6, root_token_ids=0, out=out), tree)
    wide = backend(build_tree, LOGITS, budget=13, root_token_ids=1)
    with pytest.raises(DDTreeError, match=r"`out\.token_ids` is \(14,\), expected \(13,\)"):
        backend(build_tree, LOGITS, budget=10**6, root_token_ids=0, out=wide)


def test_the_command_line_takes_a_huge_budget(tmp_path, capsys):
    np.save(tmp_path / "logits.npy", LOGITS)
    assert main(["tree", str(tmp_path / "logits.npy"), "--budget", "1000000"]) == 0
    assert "13 nodes, depth 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ((10**9, 15, 163_840, None, None), 10**9),
        ((100, 15, 163_840, None, None), 100),
        ((10**9, 3, 2, None, None), 14),
        ((10**9, 10**6, 1, None, None), 10**6),
        ((10**9, 4, 5, 2, None), 30),
        ((10**9, 4, 5, None, 2), 30),
        ((10**9, 4, 5, None, (3, 0, 7)), 3),
        ((10**9, 4, 5, None, (9, 9)), 30),
        ((0, 4, 5, None, None), 0),
    ],
)
def test_fillable_counts_the_full_tree(arguments, wanted):
    assert fillable_nodes(*arguments) == wanted
