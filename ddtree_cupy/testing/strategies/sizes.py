"""Sizes, seeds and dtypes, which the other strategies draw first."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float64": np.dtype(np.float64),
}

_EDGES = (1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129)  # next to the sizes of visibility words, warps and tiles


def check_bounds(function: str, bounds: dict[str, Any], **least: int) -> None:
    """Raise InvalidArgument unless every size in `least` has integer bounds, least <= min_size <= max_size.

    A size without `min_size` has the one bound `max_size`, or stands for itself.
    """
    for size, at_least in least.items():
        high_name = f"max_{size}" if f"max_{size}" in bounds else size
        low_name = f"min_{size}" if f"min_{size}" in bounds else high_name
        low, high = bounds[low_name], bounds[high_name]
        for name, value in ((low_name, low), (high_name, high)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidArgument(f"{function}: `{name}` is {value!r}, expected an integer")
        if not at_least <= low <= high:
            raise InvalidArgument(
                f"{function}: `{low_name}`={low} and `{high_name}`={high}, "
                f"expected {at_least} <= {low_name} <= {high_name}"
            )


def check_dtypes(function: str, dtypes: Sequence[str]) -> list["np.dtype[Any]"]:
    """Return the dtypes by name; raise InvalidArgument for none or an unknown one."""
    unknown = [name for name in dtypes if name not in DTYPES]
    if isinstance(dtypes, str) or unknown or not dtypes:
        raise InvalidArgument(f"{function}: `dtypes` is {dtypes!r}, expected some of {', '.join(DTYPES)}")
    return [DTYPES[name] for name in dtypes]


def check_choice(function: str, name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise InvalidArgument unless `value` is one of `choices`."""
    if value not in choices:
        raise InvalidArgument(f"{function}: `{name}` is {value!r}, expected one of {list(choices)}")


def seeds() -> st.SearchStrategy[int]:
    """Draw seeds for `numpy.random.default_rng`."""
    return st.integers(0, 2**32 - 1)


def flags(value: bool | None) -> st.SearchStrategy[bool]:
    """Draw `value`; for None both True and False."""
    return st.booleans() if value is None else st.just(value)


def batch_axes(draw: Any, bounds: dict[str, Any]) -> tuple[int, ...]:
    """Draw (batch,), or () for inputs without that axis."""
    batched = draw(flags(bounds["batched"]))
    return (draw(st.integers(bounds["min_batch"], bounds["max_batch"])),) if batched else ()


def sizes(low: int, high: int) -> st.SearchStrategy[int]:
    """Draw sizes in low..high, often one next to 32, 64 or 128."""
    edges = [size for size in _EDGES if low <= size <= high]
    anything = st.integers(low, high)
    return anything | st.sampled_from(edges) if edges else anything


def node_counts(*, min_nodes: int = 1, max_nodes: int = 129) -> st.SearchStrategy[int]:
    """Draw numbers of nodes, often one next to a multiple of 32 (the visibility word).

    Parameters
    ----------
    min_nodes, max_nodes : int
        Bounds, both inclusive.
    """
    check_bounds("node_counts", locals(), nodes=0)
    return sizes(min_nodes, max_nodes)
