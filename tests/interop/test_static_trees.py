"""Static trees as rank paths: Medusa's choices and vLLM's former string."""

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
from tests.refusals import rejects

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


STAR, LONE = DraftTree.from_parents(np.arange(12), [-1] + [0] * 11), DraftTree.from_parents([7], [-1])
DEEP = DraftTree.from_parents([7, 10, 20, 30], [-1, 0, 1, 2])


@rejects(
    (UnsupportedError, "node 11 has rank 10 at depth 1, but a head offers 10", STAR, None, {"in_order": True}),
    (UnsupportedError, "node 2 lies at depth 2, deeper than 1 heads", T6, CANDIDATES, {"num_heads": 1}),
    (UnsupportedError, "one static tree that all requests share", T6.with_batch(), None, {}),
    (UnsupportedError, "1 nodes.*at least one besides", LONE, None, {}),
    (UnsupportedError, "token 1, which is not among the 3 candidates", STAR, CANDIDATES, {}),
    (UnsupportedError, "node 3 has token 30, which is not among the 0 candidates of depth 3", DEEP, CANDIDATES, {}),
    (ShapeError, "`candidates` has a request axis", T6, CANDIDATES.with_batch(), {}),
    (ArgumentError, "top_k", T6, None, {"top_k": 0}),
    (DTypeError, "`tree` is list", [[0]], None, {}),
    (DTypeError, "`candidates` is list", T6, [10], {}),
)
def test_to_medusa_choices_rejects(tree, candidates, options):
    to_medusa_choices(tree, candidates, **options)


@rejects(
    (UnsupportedError, "one static tree", T6.with_batch()),
    (UnsupportedError, "at least one besides", LONE),
    (UnsupportedError, "ranks of its tokens are unknown", T6),
)
def test_to_vllm_token_tree_rejects(tree):
    to_vllm_token_tree(tree)


def as_text(choices):
    return str([tuple(path) if isinstance(path, list) else path for path in choices])


IDS = CANDIDATES.token_ids
SHORT_IDS, SHORT_LOGITS = IDS.copy(), CANDIDATES.logits.copy()
SHORT_IDS[1, 1:], SHORT_LOGITS[1, 1:] = -1, -np.inf
SHORT = replace(CANDIDATES, token_ids=SHORT_IDS, logits=SHORT_LOGITS)


@pytest.mark.parametrize("form", ["choices", "text"])
@rejects(
    (ArgumentError, "is empty", [], {}),
    (ArgumentError, "the root is not listed", [[]], {}),
    (ArgumentError, r"path \(0,\) twice", [[0], [0]], {}),
    (ArgumentError, r"path \(0, 0\) of `(choices|text)` lacks its parent \(0,\)", [[0, 0]], {}),
    (ArgumentError, "rank below 0", [[-1]], {}),
    (DTypeError, "values other than integers", [[0.0]], {}),
    (DTypeError, "values other than integers", [[True]], {}),
    (DTypeError, "expected paths such as", [0], {}),
    (UnsupportedError, "needs candidate 3 at depth 1, but `candidates` has 3 at each of 2 depths", [[3]], {}),
    (UnsupportedError, "at depth 3, but", [[0], [0, 0], [0, 0, 0]], {}),
    (UnsupportedError, r"request 0 has no candidate for path \(0, 1\)", PATHS, {"candidates": SHORT}),
    (ArgumentError, "root_token_ids", [[0]], {"root_token_ids": -1}),
    (DTypeError, "root_token_ids", [[0]], {"root_token_ids": 7.0}),
    (ShapeError, "root_token_ids", [[0]], {"root_token_ids": [7]}),
    (ShapeError, "root_token_ids", [[0]], {"root_token_ids": [7, 7]}),
    (DTypeError, "`candidates`", [[0]], {"candidates": IDS}),
)
def test_from_paths_rejects(choices, options, form):
    convert, paths = (from_medusa_choices, choices) if form == "choices" else (from_vllm_token_tree, as_text(choices))
    convert(paths, **{"candidates": CANDIDATES, "root_token_ids": ROOT, **options})


@rejects(
    (ArgumentError, r"path \(0, 0\) comes before its parent \(0,\)", [[0, 0], [0]], "given"),
    (ArgumentError, "`order`", [[0]], "depth"),
)
def test_from_medusa_choices_rejects_orders(choices, order):
    from_medusa_choices(choices, CANDIDATES, root_token_ids=ROOT, order=order)


@rejects(
    (DTypeError, r"holds 0, expected paths such as \(0,\)", "[(0), (0, 0)]"),
    (ArgumentError, "not a Python literal", "[(0,"),
    (ArgumentError, "not a Python literal", "__import__('os')"),
    (ArgumentError, "is a dict, expected a list of tuples", "{(0,): 1}"),
    (ArgumentError, "not a Python literal", "[" * 10000),
    (DTypeError, "expected str", ["(0,)"]),
)
def test_from_vllm_token_tree_rejects_text(text):
    from_vllm_token_tree(text, CANDIDATES, root_token_ids=ROOT)
