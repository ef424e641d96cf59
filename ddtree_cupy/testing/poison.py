"""Make illegal reads and writes visible: NaN in memory that must not be read, canaries where nothing may be written."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ddtree_cupy.containers import DraftTree, PagedKV, Visibility
from ddtree_cupy.testing.compare import assert_identical, to_host

__all__ = ["GuardedArray", "poison_padding", "poison_spare_rows", "reachable_rows", "unchanged"]

_CANARY = 0xA5

Masked = TypeVar("Masked", DraftTree, Visibility)


def reachable_rows(kv: PagedKV, num_rows: Any = 0) -> npt.NDArray[np.bool_]:
    """Return bool (P, page_size): which rows hold a position 0 .. context_len + num_rows - 1 of any request.

    Parameters
    ----------
    kv : PagedKV
        NumPy arrays; entries of the page table outside the pool are never followed.
    num_rows : int or int array, shape ([B])
        Rows after the context that count too, such as the keys of tree nodes.
    """
    page_size = kv.page_size
    used = np.zeros(kv.ckv.shape[:2], bool)
    table, lens = np.atleast_2d(kv.page_table), np.atleast_1d(kv.context_lens)
    for request, rows in enumerate(np.broadcast_to(num_rows, lens.shape)):
        for position in range(min(int(lens[request]) + int(rows), table.shape[1] * page_size)):
            page = table[request, position // page_size]
            if 0 <= page < len(used):
                used[page, position % page_size] = True
    return used


def poison_spare_rows(kv: PagedKV, num_rows: Any = 0, *, value: float = np.nan) -> PagedKV:
    """Overwrite, in place, every row of the pool that `reachable_rows` does not name; return `kv`."""
    spare = ~reachable_rows(kv, num_rows)
    kv.ckv[spare] = value
    kv.kpe[spare] = value
    return kv


def poison_padding(tree: Masked, *, seed: int = 0) -> Masked:
    """Return a copy whose visibility rows and bits from `num_nodes` on are random; valid pairs keep their bits."""
    random = np.random.default_rng(seed)
    bits = tree.visibility_bits
    node = np.arange(bits.shape[-2])
    column = np.arange(32 * bits.shape[-1])
    counts = np.asarray(tree.num_nodes)[..., None, None]
    valid = (node[:, None] < counts) & (column < counts)
    keep = np.packbits(valid, axis=-1, bitorder="little").view("<u4").astype(np.uint32)
    garbage = random.integers(0, 2**32, bits.shape, np.uint32)
    return replace(tree, visibility_bits=(bits & keep) | (garbage & ~keep))


class GuardedArray:
    """An array between two canary zones, to be passed as `out=`.

    Attributes
    ----------
    array : array
        It is filled with the canary byte as well, so that unwritten entries can be found.

    Examples
    --------
    >>> guard = GuardedArray((2, 3), np.int32)
    >>> guard.array[:] = 0
    >>> guard.num_touched()
    0
    """

    def __init__(self, shape: tuple[int, ...], dtype: npt.DTypeLike, *, zone: int = 256, xp: Any = np) -> None:
        """Allocate with `zone` canary bytes (a multiple of 16) on both sides, by `xp` = numpy or cupy."""
        if zone < 16 or zone % 16:
            raise ValueError(f"GuardedArray: `zone` is {zone}, expected a positive multiple of 16")
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        self._zone, self._end = zone, zone + size
        self._bytes = xp.full(size + 2 * zone, _CANARY, dtype=np.uint8)
        self.array: Any = self._bytes[zone : zone + size].view(dtype).reshape(shape)

    def num_touched(self) -> int:
        """Return how many canary bytes around the array have changed; synchronises on the GPU."""
        host = to_host(self._bytes)
        zones = np.concatenate([host[: self._zone], host[self._end :]])
        return int(np.count_nonzero(zones != _CANARY))


@contextmanager
def unchanged(**arrays: Any) -> Iterator[None]:
    """Raise AssertionError, naming the argument, when the block changes one of `arrays` (containers and None too).

    Examples
    --------
    >>> tokens = np.zeros(2, np.int32)
    >>> with unchanged(tokens=tokens):
    ...     tokens[1] = 5
    Traceback (most recent call last):
    AssertionError: `tokens` was modified: ...
    """
    before = {name: _copy(value) for name, value in arrays.items()}
    yield
    for name, value in arrays.items():
        try:
            assert_identical(value, before[name], name=name)
        except AssertionError as error:
            raise AssertionError(f"`{name}` was modified: {error}") from None


def _copy(value: Any) -> Any:
    if hasattr(value, "map"):
        return value.map(lambda array: array.copy())
    return value.copy() if hasattr(value, "copy") else value
