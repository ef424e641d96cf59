"""v2_best_first: a block finds a request's nodes in a few rounds, sorts them and derives their links."""

from collections.abc import Iterator
from typing import Any

from ddtree_cupy.containers.topology import words_per_row
from ddtree_cupy.kernels import KernelSpec, Plan, Step, constants
from ddtree_cupy.tree_build.versions.common import TreeSizes, results, state_bytes

Array = Any

SOURCE = "tree_build/v2_best_first.cu"
POOL = "tree_build/v2_pool.cuh"
STATIC_SHARED_BYTES = 12 * 1024  # of the kernel's own arrays
SLOTS_PER_NODE, LEAST_SLOTS, MOST_SLOTS = 16, 256, 12_288  # rows of probabilities need 3 to 10 slots for a node wanted
SLOTS_OF_ALL = 5_376  # fit into the shared memory of every architecture; `refusal` asks the device about more


def shared_bytes(pool_size: int, num_nodes: int, cached: int = 0) -> int:
    """Dynamic shared memory: a pool and log probabilities, or what pops.cuh needs, which takes over in rare cases."""
    return max(constants(POOL)["POOL_BYTES"] * pool_size + 8 * cached, state_bytes(num_nodes))


SPEC = KernelSpec(
    SOURCE,
    "best_first_v2",
    nullable="budgets root_token_ids",
    max_threads=1024,
    max_registers=64,
    shared_bytes=shared_bytes,
    max_shared_bytes=shared_bytes(SLOTS_OF_ALL, 1) + STATIC_SHARED_BYTES,
    flush_subnormals=False,
)


def specs() -> Iterator[KernelSpec]:
    """Its one kernel."""
    yield SPEC


def _pool_size(sizes: TreeSizes) -> int:
    return min(max(SLOTS_PER_NODE * sizes.capacity, LEAST_SLOTS), MOST_SLOTS)


def refusal(sizes: TreeSizes) -> str:
    """Return why v2 cannot build trees of these sizes, "" when it can."""
    limits = constants(POOL)
    if sizes.draft_len > limits["MOST_DEPTHS"]:
        return f"takes at most {limits['MOST_DEPTHS']} rows, got {sizes.draft_len}"
    most = limits["MOST_CANDIDATES"]
    if sizes.capacity > most:
        return f"takes at most {most} nodes besides the root, got {sizes.capacity}"
    needed = shared_bytes(_pool_size(sizes), sizes.num_nodes) + STATIC_SHARED_BYTES
    if needed > sizes.shared_limit:
        return f"needs {needed} bytes of shared memory, the device has {sizes.shared_limit} for a block"
    return ""


def plan(sizes: TreeSizes, limits: Array) -> Plan:
    """Return the one launch."""
    pool_size = _pool_size(sizes)
    threads = 512 if sizes.capacity <= 512 else 1024
    log_probabilities = sizes.draft_len * min(sizes.candidates, sizes.capacity)
    shared = shared_bytes(pool_size, sizes.num_nodes, log_probabilities)
    is_cached = shared <= shared_bytes(SLOTS_OF_ALL, 1)
    return Plan(
        (
            Step(
                SPEC,
                (sizes.batch,),
                (threads,),
                shared if is_cached else shared_bytes(pool_size, sizes.num_nodes),
            ),
        ),
        results=results(sizes),
        args={
            "limits": limits,
            "L": sizes.draft_len,
            "K": sizes.candidates,
            "N": sizes.num_nodes,
            "W": words_per_row(sizes.num_nodes),
            "pool_size": pool_size,
            "is_cached": int(is_cached),
        },
    )
