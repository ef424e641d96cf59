"""A `PagedKV` as kernels take it by value: `struct Cache` of `cuda_src/common/inputs.cuh`."""

import struct
from typing import Any

import numpy as np

from ddtree_cupy._overlap import Place, address_of
from ddtree_cupy.containers import PagedKV
from ddtree_cupy.kernels import layout_of
from ddtree_cupy.kernels.tensor_map import tensor_map

Array = Any

BOX_KEYS, SMALL_PAGES = 64, (8, 16, 32)  # of a key tile, and page sizes below it
BOX_WIDTHS = (512, 64)  # C and R of kernels that use tensor copies


class CacheFacts:
    """What kernels need to know of a cache besides its lengths; read once, as a frozen cache keeps its arrays.

    Attributes
    ----------
    places : tuple of Place
        Of `ckv`, `kpe` and `page_table`.
    dtype : str
    widths : tuple of int
        C and R.
    bounds : tuple of (int, int)
        The first byte of each of them, and the one after the last.
    is_aligned : bool
        Whether every row of both pools starts at a multiple of 16 bytes.
    box_keys : int
        Keys of a page that one tensor copy brings; 0 where tensor copies cannot read the pools.
    checked : set of str
        Which checks the cache has passed; see the preparations that ask.
    """

    __slots__ = (
        "_bytes",
        "_last",
        "_lens_offset",
        "_maps",
        "bounds",
        "box_keys",
        "checked",
        "dtype",
        "is_aligned",
        "places",
        "widths",
    )

    def __init__(self, kv: PagedKV) -> None:
        ckv, kpe, itemsize = kv.ckv, kv.kpe, kv.ckv.dtype.itemsize
        layout = layout_of("common/inputs.cuh", "Cache<int>")
        num_pages, page_size, _ = ckv.shape
        packed = layout.pack(
            ckv=ckv,
            kpe=kpe,
            page_table=kv.page_table,
            context_lens=None,
            ckv_page_stride=ckv.strides[0] // itemsize,
            ckv_slot_stride=ckv.strides[1] // itemsize,
            kpe_page_stride=kpe.strides[0] // itemsize,
            kpe_slot_stride=kpe.strides[1] // itemsize,
            num_pages=num_pages,
            page_size=page_size,
            max_pages=kv.page_table.shape[-1],
            max_context=kv.max_context,
        )
        self._bytes, self._lens_offset = packed.tobytes(), layout.offset_of("context_lens")
        self._last: tuple[int, Array] = (-1, None)
        self.places = tuple(Place.of(array) for array in (ckv, kpe, kv.page_table))
        self.bounds = tuple(place.bounds for place in self.places)
        self.dtype, self.widths = str(ckv.dtype.name), (int(ckv.shape[-1]), int(kpe.shape[-1]))
        self.is_aligned = all(starts_at_multiples(pool, pool.strides[:2]) for pool in (ckv, kpe))
        self.checked: set[str] = set()
        self.box_keys = self._box_keys(kv)
        self._maps: dict[str, Array] = {}

    def _box_keys(self, kv: PagedKV) -> int:
        num_pages, page_size, _ = kv.ckv.shape
        fits = num_pages > 0 and (page_size in SMALL_PAGES or page_size % BOX_KEYS == 0)
        is_mapped = fits and self.is_aligned and self.dtype != "float32" and self.widths == BOX_WIDTHS
        if not is_mapped or any(not 0 < stride < 2**40 for pool in (kv.ckv, kv.kpe) for stride in pool.strides[:2]):
            return 0
        return min(int(page_size), BOX_KEYS)

    def tensor_maps(self, kv: PagedKV, backend: str) -> Array:
        """Return the bytes of `KeyMaps` in cuda_src/tree_attention/v4_layout.cuh, maps of both pools; made once."""
        if backend not in self._maps:
            num_pages, page_size, _ = kv.ckv.shape
            keys, groups = self.box_keys, 4 if self.box_keys == BOX_KEYS else 1
            page_stride, slot_stride = kv.ckv.strides[:2]
            sizes, strides = (64, page_size, num_pages, 8), (slot_stride, page_stride, 128)
            ckv = tensor_map(backend, kv.ckv, sizes, strides, (64, keys, 1, groups))
            page_stride, slot_stride = kv.kpe.strides[:2]
            kpe = tensor_map(backend, kv.kpe, (64, page_size, num_pages), (slot_stride, page_stride), (64, keys, 1))
            self._maps[backend] = np.frombuffer(ckv.tobytes() + kpe.tobytes(), f"V{ckv.nbytes + kpe.nbytes}")
        return self._maps[backend]

    def __reduce__(self) -> Any:
        return type(None), ()  # addresses mean nothing to a copy: it reads its own

    def packed(self, address: int) -> Array:
        """Return the bytes of the struct with the lengths at an address."""
        if address != self._last[0]:
            changed = bytearray(self._bytes)
            struct.pack_into("Q", changed, self._lens_offset, address)
            self._last = address, np.frombuffer(bytes(changed), f"V{len(changed)}")
        return self._last[1]


def facts_of(kv: PagedKV) -> CacheFacts:
    """Return the facts of a cache, kept on it."""
    facts: CacheFacts | None = vars(kv).get("_facts")
    if facts is None:
        facts = vars(kv)["_facts"] = CacheFacts(kv)
    return facts


def has_passed(kv: PagedKV, mark: str) -> bool:
    """Whether the cache has passed the checks that a preparation marks so."""
    facts = vars(kv).get("_facts")
    return facts is not None and mark in facts.checked


def packed_cache(kv: PagedKV) -> Array:
    """Return the struct of a cache."""
    return facts_of(kv).packed(address_of(kv.context_lens))


def with_lens(kv: PagedKV, context_lens: Array) -> PagedKV:
    """Return the cache with other lengths; its facts go along."""
    changed = object.__new__(PagedKV)  # not `replace`, whose checks have passed
    vars(changed).update(vars(kv), context_lens=context_lens)
    return changed


def starts_at_multiples(array: Array, strides: tuple[int, ...], multiple: int = 16) -> bool:
    """Whether an array, and every step along the axes of these strides, starts at a multiple of so many bytes."""
    places = address_of(array)
    for stride in strides:
        places |= stride
    return places % multiple == 0  # of powers of two
