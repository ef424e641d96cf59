"""v1_best_first: one warp pops a request's nodes one after the other; a second kernel derives the links."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ddtree_cupy.kernels import KernelSpec, Plan, Step
from ddtree_cupy.tree_build.topology import topology_plan
from ddtree_cupy.tree_build.versions.common import TreeSizes, results, state_bytes

Array = Any

SOURCE = "tree_build/v1_best_first.cu"
MOST_SHARED_BYTES = 64 * 1024  # of the state of a tree; more goes to the workspace


SPEC = KernelSpec(
    SOURCE,
    "best_first",
    nullable="budgets root_token_ids state",
    max_threads=32,
    max_registers=128,
    shared_bytes=state_bytes,
    max_shared_bytes=MOST_SHARED_BYTES,
    flush_subnormals=False,
)


def specs() -> Iterator[KernelSpec]:
    """Its kernel; that of the links is another op's, too."""
    yield SPEC


def refusal(sizes: TreeSizes) -> str:
    """Trees of any size are fine."""
    return ""


def plan(sizes: TreeSizes, limits: Array) -> Plan:
    """Return best_first and topology."""
    shared = state_bytes(sizes.num_nodes)
    in_workspace = shared > MOST_SHARED_BYTES
    topology = topology_plan(sizes.batch, sizes.num_nodes)
    return Plan(
        (Step(SPEC, (sizes.batch,), (32,), 0 if in_workspace else shared), *topology.steps),
        results=results(sizes),
        scratch={"state": ((sizes.batch, shared // 8), np.uint64)} if in_workspace else {},
        args={
            **topology.args,
            **({} if in_workspace else {"state": None}),
            "limits": limits,
            "L": sizes.draft_len,
            "K": sizes.candidates,
        },
    )
