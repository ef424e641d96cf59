"""Whether the emulator stands in for a GPU in this context, and with which schedule."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from ddtree_cupy.errors import ArgumentError, DTypeError

_SEED: ContextVar[int | None] = ContextVar("ddtree_cupy_emulate_seed", default=None)
_GUARD: ContextVar[bool] = ContextVar("ddtree_cupy_emulate_guard", default=False)
_CUT_SUMS: ContextVar[bool] = ContextVar("ddtree_cupy_emulate_cut_sums", default=False)


@contextmanager
def active(seed: int = 0, *, cut_sums: bool = False, guard: bool = False) -> Iterator[None]:
    """Run the CUDA kernels on the CPU for NumPy arrays, inside a `with` block.

    Parameters
    ----------
    seed : int
        The schedule; a correct kernel gives the same bits for every seed. 0 takes blocks and threads in index order,
        the threads of every odd block backwards. Any other seed shuffles the threads of each block, interleaves two
        blocks at a time (not under `tsan`) and takes the blocks backwards when it is odd, in an order that jumps when
        its bit 2 is set. The next thread is chosen in one of two ways, unfair where bit 1 of the block's index and of
        the seed agree, fair elsewhere. Unfair: always the first ready thread of the order, so that one warp runs as far
        ahead of the others as barriers allow or, when bit 3 of the seed is set, one thread waits until no other can
        run. Fair: the next one, or for seeds above 0 a random one.
    cut_sums : bool
        Whether matrix instructions cut sums off as the tensor cores of an H200 do (`testing.tensor_core_matmul` has
        the rule); without it each product of 16 terms is exact until it is rounded and added.
    guard : bool
        Whether the library's functions get memory for results and scratch that ends at a page which cannot be
        accessed, so that a kernel which leaves it is an `EmulatorError`. `check` guards the arrays of one's own kernel.

    Raises
    ------
    DTypeError, ArgumentError
        `seed` is not an integer, or not in 0 <= seed < 2**64; `cut_sums` or `guard` is not a bool.
    UnsupportedError
        There is no C++ compiler, or the system is not Linux; see `available`.

    Notes
    -----
    The settings belong to the current context (`contextvars`): other threads and tasks are not affected.

    Examples
    --------
    >>> from ddtree_cupy import emulate
    >>> emulate.is_active()
    False
    """
    from ddtree_cupy.emulate._build import find_compiler

    checked = checked_seed("emulate.active", seed)
    for name, value in (("cut_sums", cut_sums), ("guard", guard)):
        if not isinstance(value, bool | np.bool_):
            raise DTypeError(f"emulate.active: `{name}` is {value!r}, expected True or False")
    find_compiler()
    tokens = _SEED.set(checked), _CUT_SUMS.set(bool(cut_sums)), _GUARD.set(bool(guard))
    try:
        yield
    finally:
        _SEED.reset(tokens[0])
        _CUT_SUMS.reset(tokens[1])
        _GUARD.reset(tokens[2])


def checked_seed(function: str, seed: Any) -> int:
    """Return `seed` as an int; raise for a value that is not a seed."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise DTypeError(f"{function}: `seed` is {seed!r}, expected an integer, 0 <= seed < 2**64")
    if not 0 <= seed < 2**64:
        raise ArgumentError(f"{function}: `seed` is {seed}, expected 0 <= seed < 2**64")
    return int(seed)


def is_active() -> bool:
    """Return whether NumPy arrays run the CUDA kernels in this context."""
    return _SEED.get() is not None


def current_seed() -> int:
    """Return the schedule seed of the enclosing `active` block, 0 outside."""
    return _SEED.get() or 0


def cuts_sums() -> bool:
    """Return whether the enclosing `active` block asks for sums cut off as tensor cores do, False outside."""
    return _CUT_SUMS.get()


def guards() -> bool:
    """Return whether the enclosing `active` block asks for guarded memory, False outside."""
    return _GUARD.get()
