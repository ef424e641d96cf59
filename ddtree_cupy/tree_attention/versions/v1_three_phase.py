"""v1_three_phase: one block per row, three plain phases."""

from collections.abc import Iterator
from functools import cache

from ddtree_cupy.kernels import CTYPES, KernelSpec, Plan, Step, constants, register
from ddtree_cupy.tree_attention.call import Sizes
from ddtree_cupy.tree_attention.versions.common import Traits, results, shared_refusal, size_refusal

SOURCE = "tree_attention/v1_three_phase.cu"
TRAITS = Traits(dtypes=tuple(CTYPES), any_length=False)


def shared_bytes(width: int, most_keys: int) -> int:
    """Dynamic shared memory: one query of `width` = C + R and one score per key, float32."""
    return 4 * (width + most_keys)


@cache
def attend_spec(dtype: str) -> KernelSpec:
    """Spec of tree_attention_v1 for one dtype; any C and R."""
    return KernelSpec(
        SOURCE,
        f"tree_attention_v1<{CTYPES[dtype]}>",
        strided="q_nope q_pe ckv kpe",
        max_threads=constants(SOURCE)["THREADS"],
        max_registers=64,
        shared_bytes=shared_bytes,
    )


@register
def specs() -> Iterator[KernelSpec]:
    """Every kernel of v1."""
    return map(attend_spec, TRAITS.dtypes)


def refusal(sizes: Sizes) -> str:
    """Return why v1 cannot take a call of these sizes, "" when it can."""
    needed = shared_bytes(sizes.width, sizes.most_keys)
    return size_refusal(sizes) or shared_refusal(needed, f"keeps {sizes.most_keys} scores in", sizes)


def plan(sizes: Sizes) -> Plan:
    """Return the kernel and its grid."""
    spec = attend_spec(sizes.dtype)
    grid = sizes.num_heads, sizes.capacity, sizes.batch
    return Plan(
        (Step(spec, grid, (spec.max_threads,), shared_bytes(sizes.width, sizes.most_keys)),),
        results(sizes),
        args={"C": sizes.head_dim_ckv, "R": sizes.head_dim_kpe},
    )
