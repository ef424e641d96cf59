"""Candidates.from_topk brings a foreign top-k table, such as that of torch.topk, into the library's order."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import Candidates, best_first_tree, top_candidates
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError
from ddtree_cupy.testing import assert_identical, unchanged
from tests.refusals import rejects


def table(token_ids, logits, lse):
    return np.array(token_ids), np.array(logits, np.float32), np.array(lse, np.float32)


def test_from_topk_sorts_ties_by_id():
    """torch.topk leaves the order of equal logits open."""
    arrays = table([[5, 3]], [[1, 1]], [2])
    with pytest.raises(ArgumentError, match=r"Candidates\.from_topk sorts"):
        Candidates(arrays[0].astype(np.int32), *arrays[1:]).validate()
    found = Candidates.from_topk(*arrays)
    assert_identical(found, Candidates(np.array([[3, 5]], np.int32), *arrays[1:]))
    assert best_first_tree(found, budget=2, root_token_ids=0).token_ids.tolist() == [0, 3, 5]


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16, np.float64]),
    st.sampled_from([(), (3,)]),
)
def test_from_topk_of_whole_shuffled_rows_is_identical_to_top_candidates(seed, dtype, batch):
    """With ties, -0.0, -inf, subnormals and bad rows; the given arrays stay as they are."""
    rng = np.random.default_rng(seed)
    shape = (*batch, 4, 9)
    values = rng.choice([-1.0, -0.0, 0.0, 1e-40, -1e-40, 0.5, 2.0, -np.inf], shape)
    values[rng.random(shape) < 0.02] = rng.choice([np.nan, np.inf])
    logits = values.astype(dtype)
    if dtype == np.float64:
        logits[np.abs(logits) < 1e-30] = 0.0
    wanted = top_candidates(logits, 9, check_finite=False)
    shuffled = rng.permuted(np.broadcast_to(np.arange(9), shape), axis=-1)
    arrays = shuffled, np.take_along_axis(logits, shuffled, axis=-1), wanted.lse
    with unchanged(token_ids=arrays[0], logits=arrays[1], lse=arrays[2]):
        found = Candidates.from_topk(*arrays)
    assert_identical(found, wanted)


@rejects(
    (ShapeError, "`logits`", table([[5, 3], [1, 2]], [[1, 1]], [2])),
    (ShapeError, "`token_ids`", table([5, 3], [[1, 1]], [2])),
    (DTypeError, "`token_ids`", table([[5.0, 3.0]], [[1, 1]], [2])),
    (ArgumentError, "`token_ids`", table([[2**31, 3]], [[1, 1]], [2])),
    (ArgumentError, "`token_ids`", table([[3, 3]], [[1, 1]], [2])),  # an id twice
    (ArgumentError, "`token_ids`", table([[-1, 3]], [[1, 1]], [2])),  # no id beside a logit
    (ArgumentError, "`lse`", table([[5, 3]], [[1, 1]], [0])),  # below a logit
    (ShapeError, "`lse`", table([[5, 3]], [[1, 1]], [2, 2])),
    (DTypeError, "`logits`", ([[5, 3]], [[1, 1]], [2.0])),
    (ShapeError, "`lse` is ragged", ([[5, 3]], [[1.0, 1.0]], [[2.0], []])),
)
def test_from_topk_rejects(arrays):
    Candidates.from_topk(*arrays)
