"""Probabilities given as logits make a wrong tree silently, so the first row is looked at."""

import warnings

import ml_dtypes
import numpy as np
import pytest

from ddtree_cupy import build_tree, top_candidates
from ddtree_cupy.errors import ProbabilityWarning

ROW = [0.5, 0.3, 0.15, 0.05]
CALLS = {
    "top_candidates": lambda logits: top_candidates(logits, 2),
    "build_tree": lambda logits: build_tree(logits, budget=3, root_token_ids=1),
}

calls = pytest.mark.parametrize("name", CALLS)


def softmax(shape):
    values = np.exp(np.random.default_rng(0).standard_normal(shape) * 3)
    return values / values.sum(axis=-1, keepdims=True)


@calls
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(1, 2), (3, 40), (2, 3, 40), (1, 32_000)])
def test_probabilities_raise_a_warning_whose_advice_works(host, name, dtype, shape):
    draft_logits = softmax(shape).astype(dtype)
    words = rf"{name}: the first row of `draft_logits` is non-negative and sums to 1.*numpy\.log\(draft_logits\)"
    with pytest.warns(ProbabilityWarning, match=words) as caught:
        host.run(CALLS[name], draft_logits)
    assert caught[0].filename == __file__
    with warnings.catch_warnings(), np.errstate(divide="ignore"):
        warnings.simplefilter("error")
        host.run(CALLS[name], np.log(draft_logits))


@calls
@pytest.mark.parametrize(
    "logits",
    [
        [[1.0], [1.0]],  # one token: whatever the logit
        [[1.0, -1e-30], [0.5, 0.5]],
        [[0.5, 0.6], ROW[:2]],  # the first row alone decides
        [[0.7, 0.2], [0.7, 0.3]],
        [[3.0, 5.0], [0.5, 0.5]],
        np.zeros((0, 4)),
        np.zeros((2, 0)),
        np.zeros((0, 2, 4)),
    ],
)
def test_logits_raise_no_warning(name, logits):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CALLS[name](np.array(logits))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_bad_first_row_raises_no_warning(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        top_candidates(np.array([[np.nan, 1.0], ROW[:2]], dtype), 2, check_finite=False)
        top_candidates(np.array([[np.inf, 1.0], ROW[:2]], dtype), 2, check_finite=False)
