"""What top_candidates, best_first_tree and build_tree write: all of `out=`, nothing around it, never their input."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import best_first_tree, build_tree, top_candidates
from ddtree_cupy.testing import assert_identical, unchanged
from ddtree_cupy.testing.strategies import draft_logits
from tests.tree_build.cases import ROOT, build, garbage_like, options, table, tables

logits = draft_logits(max_vocab=9, dtypes=("float32", "float16", "bfloat16", "float64"), non_finite=True)
INPUTS = {top_candidates: logits, best_first_tree: tables, build_tree: logits}


@pytest.mark.parametrize("function", INPUTS, ids=lambda function: function.__name__)
@given(data=st.data(), chosen=options, budget=st.integers(0, 34), seed=st.integers(0, 9))
def test_tree_build_is_identical_in_out_and_never_writes_its_input(host, function, data, chosen, budget, seed):
    """Stale contents of `out` never survive, nothing around its arrays is written, and a repeat gives the same."""
    host = replace(host, seed=seed)
    given_input = host.narrowed(data.draw(INPUTS[function]))
    arrays = [given_input] if isinstance(given_input, np.ndarray) else [*vars(given_input).values()]
    if function is top_candidates:
        arguments = {"k": budget, "check_finite": False}
    else:
        batch = arrays[-1].shape[:1] if arrays[0].ndim == 3 else ()
        budgets, roots = np.full(batch, budget, np.int32), np.full(batch, ROOT, np.int32)
        arrays += [budgets, roots]
        arguments = {"budget": budgets, "root_token_ids": roots, "capacity": budget, **chosen}
        if function is build_tree:
            arguments["check_finite"] = False
    for array in arrays:
        array.flags.writeable = False
    before = dict(arguments)
    with unchanged(**{str(number): array for number, array in enumerate(arrays)}):
        fresh = host.run(function, given_input, **arguments)
        out, guards = garbage_like(fresh)
        assert host.run(function, given_input, **arguments, out=out) is out
    assert arguments == before
    assert_identical(out, fresh)
    assert sum(guard.num_touched() for guard in guards) == 0
    for field in fields(fresh):
        made = getattr(fresh, field.name)
        assert made.flags.writeable
        assert not any(np.shares_memory(made, array) for array in arrays)


def test_best_first_tree_is_identical_in_a_reused_out():
    """A large tree, then a small one, in the same buffers: the second equals a fresh build."""
    out = build(table([[0, -1, -2]] * 4), 40)
    build(table([[0, -1, -2]]), 3, capacity=40, out=out)
    assert_identical(out, build(table([[0, -1, -2]]), 3, capacity=40))
