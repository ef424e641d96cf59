"""The CUDA kernel that derives the links of any tree; `containers/topology.py` has the reference."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from ddtree_cupy.containers.topology import words_per_row
from ddtree_cupy.kernels import KernelSpec, Plan, Step, constants
from ddtree_cupy.kernels.workspace import Sizes

Array = Any

SPEC = KernelSpec("tree_build/topology.cu", "topology", max_threads=256, max_registers=40)


@lru_cache(256)
def topology_plan(batch: int, num_nodes: int) -> Plan:
    """Return the kernel that derives depths, child links and visibility from parents."""
    words, warps = words_per_row(num_nodes), constants(SPEC.source)["WARPS"]
    links: Sizes = dict.fromkeys(("depths", "first_child", "next_sibling"), ((batch, num_nodes), np.int32))
    return Plan(
        (Step(SPEC, (batch, -(-num_nodes // warps)), (32 * warps,)),),
        results={**links, "visibility_bits": ((batch, num_nodes, words), np.uint32)},
        args={"N": num_nodes, "W": words},
    )


def topology(parents: Array, num_nodes: Array, *, backend: str) -> Mapping[str, Array]:
    """Derive the links of parents (B, N) and num_nodes (B), int32 and C-contiguous, by name."""
    return topology_plan(*parents.shape).allocate_and_run("topology", backend, parents=parents, num_nodes=num_nodes)
