"""Memory between protected pages, and copies of arrays in it."""

import ctypes
import functools
import mmap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy._overlap import address_of, byte_bounds

Array = npt.NDArray[Any]

ALIGNMENT = 16  # bytes: NumPy's arrays begin at multiples of it
_FILL = 0xFF  # NaN, -1
_HIDDEN = 0  # PROT_NONE, which mmap does not name
_OPEN = mmap.PROT_READ | mmap.PROT_WRITE
_KIND = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
_MOST_SPARE, _MOST_SPARE_BYTES = 16, 1 << 20  # of each size, and which sizes
_spare: dict[int, list[int]] = {}  # pages that are not in use, by their bytes
_FAILED = ctypes.c_void_p(-1).value


class GuardedMemory:
    """Bytes with a protected page in front of them and one behind; untouched pages take no memory.

    Parameters
    ----------
    nbytes : int
    at_end : bool
        Whether the bytes end at the protected page behind them, or begin at the one in front.
    shift : int
        Bytes between them and that page.
    zeroed : bool
        False takes pages that were in use before, if there are any, which is faster.
    """

    def __init__(self, nbytes: int, *, at_end: bool = True, shift: int = 0, zeroed: bool = True) -> None:
        page = mmap.PAGESIZE
        self._inner = inner = -(-max(nbytes + shift, 1) // page) * page
        spare = _spare.get(inner)
        self._first = spare.pop() if spare and not zeroed else _mapped(inner)
        begin = self._first + page
        self.nbytes, self.address = nbytes, begin + (inner - nbytes - shift if at_end else shift)
        self._slack = ((begin, self.address), (self.address + nbytes, begin + inner))

    def __del__(self) -> None:
        first = getattr(self, "_first", None)
        if first is None:  # there was no memory
            return
        spare = _spare.setdefault(self._inner, [])
        if self._inner <= _MOST_SPARE_BYTES and len(spare) < _MOST_SPARE:
            spare.append(first)
        else:
            _libc().munmap(first, self._inner + 2 * mmap.PAGESIZE)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "data": (self.address, False), "shape": (self.nbytes,), "typestr": "|u1"}

    def fill_slack(self) -> None:
        """Fill the bytes between the memory and the protected pages."""
        for first, last in self._slack:
            ctypes.memset(first, _FILL, last - first)

    def changed(self) -> int | None:
        """Return how far from the first byte somebody wrote into the slack, None if nobody did."""
        for first, last in self._slack:
            found = ctypes.string_at(first, last - first)
            if found.count(_FILL) != len(found):
                at = next(at for at, byte in enumerate(found) if byte != _FILL)
                return int(first + at - self.address)
        return None


def _mapped(inner: int) -> int:
    """Return the first of new pages, of which all but the outer two may be accessed."""
    page, libc = mmap.PAGESIZE, _libc()
    first: int = libc.mmap(None, inner + 2 * page, _HIDDEN, _KIND, -1, 0)
    if first == _FAILED or libc.mprotect(first + page, inner, _OPEN):
        raise MemoryError(f"emulate: no address space for {inner:,} bytes between protected pages")
    return first


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


def regions(arrays: Mapping[int, Array]) -> list[tuple[int, int, list[int]]]:
    """Return first byte, the one after the last, and the keys of arrays that share memory, taken together."""
    found: list[tuple[int, int, list[int]]] = []
    for (low, high), key in sorted((byte_bounds(array), key) for key, array in arrays.items() if array.size):
        if found and low < found[-1][1]:
            first, last, keys = found[-1]
            found[-1] = first, max(last, high), [*keys, key]
        else:
            found.append((low, high, [key]))
    return found


class Copies:
    """The arguments of a launch with every array copied between protected pages; views of one array stay that.

    Parameters
    ----------
    args : sequence
        Arrays of `sparse_array` have protected pages already and are not copied.
    at_end : bool
        On which side of an array a page begins.
    exact : bool
        Whether an array comes as close to that page as it can. Otherwise addresses keep their alignment to 16 bytes.

    Attributes
    ----------
    args : list
    is_shifted : bool
        Whether an array lost its alignment.
    """

    def __init__(self, args: Sequence[Any], *, at_end: bool, exact: bool) -> None:
        self._originals = {
            index: value for index, value in enumerate(args) if isinstance(value, np.ndarray) and not _is_guarded(value)
        }
        self.args, self.is_shifted = list(args), False
        self._regions = []
        for low, high, indices in regions(self._originals):
            shift = -high % ALIGNMENT if at_end else low % ALIGNMENT
            self.is_shifted |= exact and shift > 0
            memory = GuardedMemory(high - low, at_end=at_end, shift=0 if exact else shift, zeroed=False)
            memory.fill_slack()
            ctypes.memmove(memory.address, low, high - low)
            self._regions.append((memory, indices))
            whole = np.asarray(memory)
            for index in indices:
                old = self._originals[index]
                new = np.ndarray(old.shape, old.dtype, whole, address_of(old) - low, old.strides)
                new.flags.writeable = old.flags.writeable
                self.args[index] = new

    def copy_back(self, indices: Iterable[int]) -> None:
        """Copy these arguments to where they came from."""
        for index in indices:
            if index in self._originals and self._originals[index].flags.writeable:
                np.copyto(self._originals[index], self.args[index])

    def overrun(self) -> str:
        """Return in words what a kernel wrote outside of an array without reaching a protected page; "" if nothing."""
        for memory, indices in self._regions:
            at = memory.changed()
            if at is not None:
                side = f"{-at} bytes in front of" if at < 0 else f"{at - memory.nbytes} bytes behind the end of"
                return f"argument {indices[0]}: something was written {side} the array"
        return ""


def _is_guarded(array: Array) -> bool:
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return isinstance(owner, GuardedMemory)
