"""v1_three_phase: one block per row, three plain phases."""

from functools import cache
from typing import Any

from ddtree_cupy.kernels import CTYPES, Arg, KernelSpec, ints, register
from ddtree_cupy.kernels.workspace import Workspace
from ddtree_cupy.tree_attention.call import CACHE_STRIDES, KEYS, QUERY_STRIDES, Call, attention_inputs, results
from ddtree_cupy.tree_attention.versions.common import Plan, Step, Traits, shared_refusal, size_refusal

Array = Any

TRAITS = Traits(dtypes=tuple(CTYPES), any_length=False)
THREADS = 128


def shared_bytes(width: int, most_keys: int) -> int:
    """Dynamic shared memory: one query of `width` = C + R and one score per key, float32."""
    return 4 * (width + most_keys)


@cache
def attend_spec(dtype: str) -> KernelSpec:
    """Spec of tree_attention_v1 for one dtype; any C and R."""
    return KernelSpec(
        source="tree_attention/v1_three_phase.cu",
        entry=f"tree_attention_v1<{CTYPES[dtype]}>",
        args=(
            *attention_inputs(dtype),
            *results(dtype),
            *ints("N", "H", "C", "R", "num_pages", "page_size", "max_pages", "max_context"),
            *QUERY_STRIDES,
            *CACHE_STRIDES,
            Arg.scalar("sm_scale", "float32"),
            Arg.scalar("keys", "int32"),
        ),
        max_threads=THREADS,
        max_registers=64,
        shared_bytes=shared_bytes,
    )


for _dtype in TRAITS.dtypes:
    register(attend_spec(_dtype))


def refusal(call: Call) -> str:
    """Return why v1 cannot take a call, "" when it can; shapes and host integers alone decide."""
    needed = shared_bytes(sum(call.head_sizes), call.most_keys)
    return size_refusal(call) or shared_refusal(needed, f"keeps {call.most_keys} scores in", call.backend)


def plan(call: Call) -> Plan:
    """Return the kernel and its grid."""
    batch, capacity, num_heads, _ = call.q_nope.shape
    needed = shared_bytes(sum(call.head_sizes), call.most_keys)
    return Plan((Step(attend_spec(call.dtype), (num_heads, capacity, batch), (THREADS,), needed),), scratch={})


def launch(plan: Plan, call: Call, out: tuple[Array, Array], scratch: Workspace, checked: bool) -> None:
    """Launch the kernel."""
    (attend,) = plan.steps
    _, capacity, num_heads, _ = call.q_nope.shape
    sizes = (capacity, num_heads, *call.head_sizes, *call.page_sizes)
    attend.launch(call, (*call.inputs, *out, *sizes, *call.strides, call.sm_scale, KEYS[call.keys]), checked)
