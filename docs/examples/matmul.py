"""What matmul.cu must give, for `ddtree check docs/examples/matmul.cu`."""

import numpy as np
from hypothesis import strategies as st

from ddtree_cupy.testing import Launch


def case(draw):
    rows, inner, columns = (draw(st.integers(1, 40)) for _ in range(3))
    rng = np.random.default_rng(rows)
    a, b = rng.standard_normal((rows, inner), np.float32), rng.standard_normal((inner, columns), np.float32)
    grid = (columns + 15) // 16, (rows + 15) // 16
    c = np.empty((rows, columns), np.float32)
    return Launch(grid, (16, 16), (a, b, c, rows, inner, columns), {2: a.astype(np.float64) @ b}, rtol=1e-4)
