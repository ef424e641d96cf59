"""One call of tree_attention as its kernels see it: the sizes that decide how it runs, and the inputs by name."""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from ddtree_cupy._arrays import batched_shape, batched_strides
from ddtree_cupy._cache_struct import facts_of, starts_at_multiples
from ddtree_cupy._overlap import address_of
from ddtree_cupy.containers import DraftTree, PagedKV, Visibility
from ddtree_cupy.kernels import constants, layout_of
from ddtree_cupy.kernels.device import Device, device_of

Array = Any

KEYS = ("all", "context", "tree")
TENSOR_COPIES = ("", "sm_90")  # architectures of kernels that use them; the emulator has none of its own
LOG2_E, SMALLEST = np.float32(np.log2(np.e)), np.finfo(np.float32).tiny


class Sizes(NamedTuple):
    """Shapes, host integers and the device of a batched call: calls of equal sizes share one plan."""

    dtype: str
    batch: int
    capacity: int  # nodes, N
    num_heads: int
    head_dim_ckv: int
    head_dim_kpe: int
    most_keys: int  # of a request
    split_keys: int | None
    device: Device
    box_keys: int = 0  # of a page that one tensor copy can bring; 0: none

    @property
    def head_sizes(self) -> tuple[int, int]:
        """C and R."""
        return self.head_dim_ckv, self.head_dim_kpe

    @property
    def width(self) -> int:
        """C + R."""
        return self.head_dim_ckv + self.head_dim_kpe

    @property
    def rows(self) -> int:
        """Query rows of a request."""
        return self.capacity * self.num_heads


def sizes_of(q_nope: Array, q_pe: Array, kv: PagedKV, keys: str, split_keys: int | None, backend: str) -> Sizes:
    """Return the sizes of a call."""
    batch, capacity, num_heads, head_dim_ckv = batched_shape(q_nope, 4)
    most_keys = (0 if keys == "tree" else kv.max_context) + (0 if keys == "context" else capacity)
    rope, device, facts = q_pe.shape[-1], device_of(backend), facts_of(kv)
    boxes = facts.box_keys if device.arch in TENSOR_COPIES else 0
    return Sizes(facts.dtype, batch, capacity, num_heads, head_dim_ckv, rope, most_keys, split_keys, device, boxes)


def inputs_of(
    tree: DraftTree | Visibility, q_nope: Array, q_pe: Array, kv: PagedKV, sm_scale: float, keys: str, sizes: Sizes
) -> dict[str, Any]:
    """Return what kernels of all versions take of a call, by their names for it."""
    itemsize, nope, pe = q_nope.dtype.itemsize, batched_strides(q_nope, 4), batched_strides(q_pe, 4)
    facts, (capacity, num_heads, _) = facts_of(kv), q_nope.shape[-3:]
    queries_are_aligned = starts_at_multiples(q_nope, nope[:3]) and starts_at_multiples(q_pe, pe[:3])
    queries = layout_of("common/inputs.cuh", "Queries<int>").pack(
        q_nope=q_nope,
        q_pe=q_pe,
        num_nodes=tree.num_nodes,
        visibility_bits=tree.visibility_bits,
        nope_request_stride=nope[0] // itemsize,
        nope_node_stride=nope[1] // itemsize,
        nope_head_stride=nope[2] // itemsize,
        pe_request_stride=pe[0] // itemsize,
        pe_node_stride=pe[1] // itemsize,
        pe_head_stride=pe[2] // itemsize,
        N=capacity,
        H=num_heads,
    )
    inputs = {
        "queries": queries,
        "cache": facts.packed(address_of(kv.context_lens)),
        "sm_scale": sm_scale,
        "keys": _number_of(keys),
        "vectors": int(facts.is_aligned),
        "aligned": int(facts.is_aligned and queries_are_aligned),
    }
    if sizes.box_keys:
        inputs["scale"], inputs["sign"] = _scale_and_sign(sm_scale)
        inputs["maps"] = facts.tensor_maps(kv, "cupy" if sizes.device.arch else "emulate")
    return inputs


@lru_cache(16)
def _scale_and_sign(sm_scale: float) -> tuple[float, float]:
    """Return the scale of base-2 scores, which is positive, and the sign that goes to the queries."""
    scale = float(abs(np.float32(sm_scale)) * LOG2_E)
    return (1.0, 0.0) if scale < SMALLEST else (scale, 1.0 if sm_scale > 0 else -1.0)


@cache
def _number_of(keys: str) -> int:
    return constants("common/visibility.cuh")[f"KEYS_{keys.upper()}"]
