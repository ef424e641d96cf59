"""What softmax.cu must give, for `ddtree check docs/examples/softmax.cu`."""

import numpy as np
from hypothesis import strategies as st

from ddtree_cupy.testing import Launch


def case(draw):
    rows, n, scale = draw(st.integers(1, 4)), draw(st.integers(1, 300)), draw(st.sampled_from([1, 100]))
    x = np.float32(scale) * np.random.default_rng(rows * n).standard_normal((rows, n), np.float32)
    weights = np.exp(x - x.max(axis=1, keepdims=True), dtype=np.float64)
    right = weights / weights.sum(axis=1, keepdims=True)
    return Launch((rows,), (64,), (x, np.empty_like(x), n), {1: right}, shared_mem=4 * 64)
