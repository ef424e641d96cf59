"""Static trees as rank paths: Medusa's choices and vLLM's former string."""

import ast
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from ddtree_cupy import DraftTree, best_first_tree
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from ddtree_cupy.interop import from_medusa_choices, from_vllm_token_tree, to_medusa_choices, to_vllm_token_tree
from ddtree_cupy.testing import assert_identical
from ddtree_cupy.testing.strategies import candidate_tables, draft_trees
from tests.interop.cases import CANDIDATES, PARENTS, PATHS, ROOT, T6, TOKENS, batch_of, with_candidates

MANY = 10**6
trees = draft_trees(batched=False, min_nodes=2, inactive=False, max_nodes=40)


def cut(tree):
    """Return the tree without padding."""
    count = int(tree.num_nodes)
    return DraftTree.from_parents(tree.token_ids[:count], tree.parents[:count])


def token_paths(tree):
    """Return the token path of every node: what a tree is, whatever the order of its nodes."""
    paths = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        paths.append(((*paths[parent], token)) if parent >= 0 else (token,))
    return set(paths)


@given(with_candidates(trees))
def test_medusa_choices_round_trip(drawn):
    tree, candidates = drawn
    choices = to_medusa_choices(tree, candidates, top_k=MANY)
    root = int(tree.token_ids[0])
    assert_identical(from_medusa_choices(choices, candidates, root_token_ids=root, order="given"), cut(tree))
    by_depth = from_medusa_choices(reversed(choices), candidates, root_token_ids=root)
    assert token_paths(by_depth) == token_paths(cut(tree))
    assert (np.diff(by_depth.depths) >= 0).all()


@given(with_candidates(trees))
def test_vllm_token_tree_round_trip(drawn):
    tree, candidates = drawn
    text = to_vllm_token_tree(tree, candidates, require_uniform=False)
    found = from_vllm_token_tree(text, candidates, root_token_ids=tree.token_ids[0])
    assert token_paths(found) == token_paths(cut(tree))
    assert to_vllm_token_tree(found, candidates, require_uniform=False) == text
    assert_identical(from_vllm_token_tree(text, candidates, root_token_ids=tree.token_ids[0]), found)


@given(candidate_tables(batched=False, min_draft_len=1, min_width=1, max_width=4))
def test_ranks_of_best_first_trees_are_their_places_among_siblings(candidates):
    tree = best_first_tree(candidates, budget=12, root_token_ids=ROOT)
    if int(tree.num_nodes) > 1:
        assert to_medusa_choices(tree) == to_medusa_choices(tree, candidates)


def test_medusa_choices_of_t6():
    assert to_medusa_choices(T6, in_order=True) == PATHS
    assert to_medusa_choices(T6, CANDIDATES) == PATHS
    found = from_medusa_choices(PATHS, CANDIDATES, root_token_ids=ROOT)
    assert found.token_ids.tolist() == [ROOT, 10, 11, 20, 21, 20]
    assert found.parents.tolist() == [-1, 0, 0, 1, 1, 2]
    assert_identical(from_medusa_choices(PATHS, CANDIDATES, root_token_ids=ROOT, order="given"), T6)


def test_vllm_token_tree_of_t6():
    """Node (0,) has two children and (1,) one: the string says so, but vLLM drafted one number a level."""
    text = "[(0,), (1,), (0, 0), (0, 1), (1, 0)]"
    assert to_vllm_token_tree(T6, in_order=True, require_uniform=False) == text
    with pytest.raises(UnsupportedError, match=r"node \(1,\) has 1 children.*ranks 0 to 1.*depth 1"):
        to_vllm_token_tree(T6, in_order=True)
    assert from_vllm_token_tree(text, CANDIDATES, root_token_ids=ROOT).token_ids.tolist() == [ROOT, 10, 11, 20, 21, 20]


@pytest.mark.parametrize(
    ("parents", "text"),
    [
        ([-1, 0], "[(0,)]"),
        ([-1, 0, 1, 2], "[(0,), (0, 0), (0, 0, 0)]"),
        ([-1, 0, 0, 0], "[(0,), (1,), (2,)]"),
        ([-1, 0, 1, 0, 1, 3, 3], "[(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]"),
    ],
)
def test_uniform_trees_pass(parents, text):
    assert to_vllm_token_tree(DraftTree.from_parents(np.arange(len(parents)), parents), in_order=True) == text


def test_ranks_come_from_candidates_when_siblings_skip_one():
    tree = DraftTree.from_parents([ROOT, 11, 22], [-1, 0, 1])
    assert to_medusa_choices(tree, CANDIDATES) == [[1], [1, 2]]
    assert to_medusa_choices(tree, in_order=True) == [[0], [0, 0]]  # the caller's word, not true here
    with pytest.raises(UnsupportedError, match=r"node \(\) has 1 children"):
        to_vllm_token_tree(tree, CANDIDATES)


@pytest.mark.parametrize("choices", [[[0], [0, 1], [0, 1, 1]], [[0], [0, 0], [0, 1], [0, 1, 1]]])
def test_ranks_that_a_tree_does_not_tell_are_refused(choices):
    """The tree of (0, 1, 1) without (0, 1, 0) holds the same parents as that of (0, 1, 0) without (0, 1, 1)."""
    table = CANDIDATES.map(lambda array: array[[0, 1, 1]])
    tree = from_medusa_choices(choices, table, root_token_ids=ROOT)
    assert to_medusa_choices(tree, table) == choices
    for convert in (to_medusa_choices, to_vllm_token_tree):
        with pytest.raises(UnsupportedError, match="the ranks of its tokens are unknown; pass the `candidates`"):
            convert(tree)


def test_one_static_tree_serves_a_batch_of_candidates():
    tables = CANDIDATES.map(lambda array: np.stack([array, array]))
    found = from_medusa_choices(PATHS, tables, root_token_ids=[ROOT, 0], order="given")
    assert_identical(found, batch_of((TOKENS, PARENTS), ([0, *TOKENS[1:]], PARENTS)))
    assert from_vllm_token_tree("[(0,)]", tables, root_token_ids=5).token_ids.tolist() == [[5, 10], [5, 10]]


STAR = DraftTree.from_parents(np.arange(12), [-1] + [0] * 11)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: to_medusa_choices(STAR, in_order=True),
            UnsupportedError,
            "node 11 has rank 10 at depth 1, but a head offers 10",
        ),
        (
            lambda: to_medusa_choices(T6, CANDIDATES, num_heads=1),
            UnsupportedError,
            "node 2 lies at depth 2, deeper than 1 heads",
        ),
        (lambda: to_medusa_choices(T6.with_batch()), UnsupportedError, "one static tree that all requests share"),
        (lambda: to_vllm_token_tree(T6.with_batch()), UnsupportedError, "one static tree"),
        (
            lambda: to_medusa_choices(DraftTree.from_parents([7], [-1])),
            UnsupportedError,
            "1 nodes.*at least one besides",
        ),
        (lambda: to_vllm_token_tree(DraftTree.from_parents([7], [-1])), UnsupportedError, "at least one besides"),
        (lambda: to_medusa_choices(STAR, CANDIDATES), UnsupportedError, "token 1, which is not among the 3 candidates"),
        (
            lambda: to_medusa_choices(DraftTree.from_parents([7, 10, 20, 30], [-1, 0, 1, 2]), CANDIDATES),
            UnsupportedError,
            "node 3 has token 30, which is not among the 0 candidates of depth 3",
        ),
        (lambda: to_medusa_choices(T6, CANDIDATES.with_batch()), ShapeError, "`candidates` has a request axis"),
        (lambda: to_medusa_choices(T6, top_k=0), ArgumentError, "top_k"),
        (lambda: to_medusa_choices([[0]]), DTypeError, "`tree` is list"),
        (lambda: to_medusa_choices(T6, [10]), DTypeError, "`candidates` is list"),
    ],
)
def test_to_paths_rejects(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("choices", "error", "message"),
    [
        ([], ArgumentError, "is empty"),
        ([[]], ArgumentError, "the root is not listed"),
        ([[0], [0]], ArgumentError, r"path \(0,\) twice"),
        ([[0, 0]], ArgumentError, r"path \(0, 0\) of `choices` lacks its parent \(0,\)"),
        ([[-1]], ArgumentError, "rank below 0"),
        ([[0.0]], DTypeError, "something else than integers"),
        ([[True]], DTypeError, "something else than integers"),
        ([0], DTypeError, "expected paths such as"),
        ([[3]], UnsupportedError, "needs candidate 3 at depth 1, but `candidates` has 3 at each of 2 depths"),
        ([[0], [0, 0], [0, 0, 0]], UnsupportedError, "at depth 3, but"),
    ],
)
def test_from_paths_rejects(choices, error, message):
    with pytest.raises(error, match=message):
        from_medusa_choices(choices, CANDIDATES, root_token_ids=ROOT)
    text = str([tuple(path) if isinstance(path, list) else path for path in choices])
    with pytest.raises(error, match=message.replace("choices", "text")):
        from_vllm_token_tree(text, CANDIDATES, root_token_ids=ROOT)


def test_from_medusa_choices_rejects_children_before_parents_in_the_given_order():
    with pytest.raises(ArgumentError, match=r"path \(0, 0\) comes before its parent \(0,\)"):
        from_medusa_choices([[0, 0], [0]], CANDIDATES, root_token_ids=ROOT, order="given")
    with pytest.raises(ArgumentError, match="`order`"):
        from_medusa_choices([[0]], CANDIDATES, root_token_ids=ROOT, order="depth")


def test_from_paths_rejects_missing_candidates_and_bad_roots():
    ids, logits = CANDIDATES.token_ids.copy(), CANDIDATES.logits.copy()
    ids[1, 1:], logits[1, 1:] = -1, -np.inf
    short = replace(CANDIDATES, token_ids=ids, logits=logits)
    with pytest.raises(UnsupportedError, match=r"request 0 has no candidate for path \(0, 1\)"):
        from_medusa_choices(PATHS, short, root_token_ids=ROOT)
    for root, error in ((-1, ArgumentError), (7.0, DTypeError), ([7], ShapeError), ([7, 7], ShapeError)):
        with pytest.raises(error, match="root_token_ids"):
            from_medusa_choices([[0]], CANDIDATES, root_token_ids=root)
    with pytest.raises(DTypeError, match="`candidates`"):
        from_medusa_choices([[0]], ids, root_token_ids=ROOT)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("[(0), (0, 0)]", DTypeError, r"holds 0, expected paths such as \(0,\)"),
        ("[(0,", ArgumentError, "not a Python literal"),
        ("__import__('os')", ArgumentError, "not a Python literal"),
        ("{(0,): 1}", ArgumentError, "is a dict, expected a list of tuples"),
        ("[" * 10000, ArgumentError, "not a Python literal"),
        (["(0,)"], DTypeError, "expected str"),
    ],
)
def test_from_vllm_token_tree_rejects_text(text, error, message):
    with pytest.raises(error, match=message):
        from_vllm_token_tree(text, CANDIDATES, root_token_ids=ROOT)


def test_the_string_is_a_literal_of_tuples():
    assert ast.literal_eval(to_vllm_token_tree(T6, CANDIDATES, require_uniform=False)) == sorted(
        map(tuple, PATHS), key=lambda p: (len(p), p)
    )
