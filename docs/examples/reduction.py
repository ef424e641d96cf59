"""What reduction.cu must give, for `ddtree check docs/examples/reduction.cu`."""

import numpy as np
from hypothesis import strategies as st

from ddtree_cupy.testing import Launch


def case(draw):
    n, blocks = draw(st.integers(1, 1000)), draw(st.integers(1, 3))
    x = np.random.default_rng(n).integers(-1000, 1000, n, dtype=np.int32)
    return Launch((blocks,), (128,), (x, np.zeros(1, np.int32), n), {1: [x.sum()]})
