"""Masked arrays and numpy.matrix are refused by name everywhere; NumPy scalars serve as 0-d fields of containers."""

import warnings
from dataclasses import replace

import numpy as np
import pytest

from ddtree_cupy import (
    AcceptResult,
    Candidates,
    DraftTree,
    PagedKV,
    Visibility,
    accept,
    best_first_tree,
    build_tree,
    choose_budget,
    commit_kv,
    convert_lse,
    greedy_targets,
    merge_states,
    sample_targets,
    top_candidates,
    tree_attention,
    write_kv,
)
from ddtree_cupy.errors import DTypeError
from ddtree_cupy.testing import assert_identical
from ddtree_cupy.testing.backends import Backend

TREE = DraftTree.from_parents([7, 10, 20], [-1, 0, 1])
CANDIDATES = top_candidates(np.zeros((2, 3), np.float32), 3)
RESULT = AcceptResult(np.array([0, 2, -1], np.int32), np.array(1, np.int32), np.array(5, np.int32))
KV = PagedKV.allocate(8, page_size=4, head_dim_ckv=16, head_dim_kpe=16)
ROWS = np.ones((3, 16), np.float32)
QUERY = np.ones((3, 2, 16), np.float32)
LOGITS = np.array([[1, 5, 3]], np.float32)
STATE = QUERY, QUERY[..., 0]


def masked(array):
    return np.ma.masked_array(array, mask=np.zeros(array.shape, bool))


def matrix(array):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        return np.asmatrix(array.reshape(-1, array.shape[-1]) if array.ndim else array.reshape(1, 1))


CALLS = [
    ("draft_logits", LOGITS, lambda a: top_candidates(a, 2)),
    ("draft_logits", LOGITS, lambda a: build_tree(a, budget=2, root_token_ids=0)),
    ("budget", np.array([2], np.int32), lambda a: build_tree(LOGITS[None], budget=a, root_token_ids=0, capacity=2)),
    (
        "logits",
        CANDIDATES.logits,
        lambda a: best_first_tree(replace(CANDIDATES, logits=a), budget=2, root_token_ids=0),
    ),
    ("target_logits", LOGITS, greedy_targets),
    ("uniforms", np.array([0.5]), lambda a: sample_targets(LOGITS, a, temperature=1.0)),
    ("target_token_ids", TREE.token_ids, lambda a: accept(TREE, a)),
    ("accepted", RESULT.accepted, lambda a: commit_kv(KV, replace(RESULT, accepted=a))),
    ("ckv", KV.ckv, lambda a: commit_kv(replace(KV, ckv=a), RESULT)),
    ("ckv_rows", ROWS, lambda a: write_kv(KV, a, ROWS, num_rows=3)),
    ("q_pe", QUERY, lambda a: tree_attention(TREE, QUERY, a, KV, sm_scale=1.0)),
    ("lse_b", STATE[1], lambda a: merge_states(*STATE, QUERY, a)),
    ("out", np.zeros(1, np.int32), lambda a: greedy_targets(LOGITS, out=a)),
]
HOST_CALLS = [
    ("path_scores", np.array([0.0, -1.0]), lambda a: choose_budget(a, lambda n: 1.0)),
    ("lse", LOGITS, lambda a: convert_lse(a, base=2.0, empty=-np.inf)),
    ("parents", TREE.parents, lambda a: DraftTree.from_parents(TREE.token_ids, a)),
    ("visibility", np.eye(3, dtype=bool), Visibility.from_dense),
    ("kpe", ROWS, lambda a: PagedKV.from_dense(ROWS, a)),
    ("lse", CANDIDATES.lse, lambda a: Candidates.from_topk(CANDIDATES.token_ids, CANDIDATES.logits, a)),
    ("visibility_bits", np.array([[1], [3]], np.uint32), lambda a: Visibility(a, np.int32(2)).to_dense()),
    ("visibility_bits", TREE.visibility_bits, lambda a: replace(TREE, visibility_bits=a).visibility),
    ("logits", CANDIDATES.logits, lambda a: replace(CANDIDATES, logits=a).validate()),
]


@pytest.mark.parametrize("kind", [masked, matrix])
@pytest.mark.parametrize(
    ("backend_name", "name", "array", "call"),
    [
        *(("numpy", *case) for case in (*CALLS, *HOST_CALLS)),
        *(pytest.param("emulate", *case, marks=pytest.mark.emulate) for case in CALLS),
    ],
)
def test_public_functions_reject_odd_arrays(backend_name, name, array, call, kind):
    """A kernel returned the masked token; https://github.com/numpy/numpy/issues/26669 shows how masks get lost."""
    with pytest.raises(DTypeError, match=rf": `{name}` is a (masked array|numpy\.matrix), .*expected a plain array"):
        Backend(backend_name).run(call, kind(array))


def test_advice_for_a_masked_array_works():
    logits = np.ma.masked_array(LOGITS, mask=[[False, True, False]])
    assert greedy_targets(logits.filled(-np.inf)).tolist() == [2]


def test_containers_take_numpy_scalars_as_0d_fields(backend):
    """arr[()] and int32 arithmetic on a 0-d array give scalars."""
    visible = Visibility(np.array([[1], [3]], np.uint32), np.int32(2))
    assert visible.to_dense().tolist() == [[True, False], [True, True]]
    assert isinstance(visible.validate().num_nodes, np.ndarray)
    result = replace(RESULT, num_accepted=np.int32(1), bonus_token=np.int32(5)).validate()
    assert_identical(result, RESULT)
    tree = replace(TREE, num_nodes=np.int32(3), status=np.int32(0)).validate()
    assert repr(tree) == repr(TREE)
    assert tree.visibility.tolist() == TREE.visibility.tolist()
    kv = PagedKV(KV.ckv.copy(), KV.kpe.copy(), KV.page_table, np.int32(3), np.int64(8)).validate()
    assert type(kv.max_context) is int
    found = backend(accept, tree, np.array([10, 20, 4], np.int32))
    assert (int(found.num_accepted), int(found.bonus_token)) == (2, 4)
    assert int(backend(commit_kv, kv, result).context_lens) == 5
    out, lse = backend(tree_attention, tree, QUERY, QUERY, kv, sm_scale=1.0)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()
