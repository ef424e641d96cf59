"""The form of a case, and random arrays from which the cases of several steps are made."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ddtree_cupy.containers import DraftTree

Array = Any


@dataclass(frozen=True)
class Case:
    """One row of a table.

    Attributes
    ----------
    op, name, variant : str
    prepare : callable
        Makes the arrays on the GPU and returns a `Prepared`.
    bytes_moved : int
        Each input read once, each output written once.
    flops : int
        Multiplications and additions over all pairs of query row and key, masked ones included (the convention of
        the published tables); 0 for memory-bound ops.
    visible_flops : int
        The same over visible pairs only.
    """

    op: str
    name: str
    variant: str
    prepare: Callable[[], "Prepared"]
    bytes_moved: int
    flops: int = 0
    visible_flops: int = 0


@dataclass(frozen=True)
class Prepared:
    """A case with its arrays in place.

    Attributes
    ----------
    run : callable
        One call into preallocated results, as it can be captured in a graph.
    gate : callable
        Raises AssertionError unless the results of the last `run` agree with the reference.
    """

    run: Callable[[], None]
    gate: Callable[[], None]


def kept(call: Callable[[Any], Any]) -> tuple[Callable[[], None], Callable[[], Any]]:
    """Return `run`, which writes into the arrays of the first call, and a function that returns them."""
    result = call(None)

    def run() -> None:
        call(result)

    return run, lambda: result


def bfloat16_normal(seed: int, shape: tuple[int, ...], scale: float = 1.0) -> Array:
    """Return a CuPy array of random normal bfloat16 values."""
    import cupy

    values = cupy.random.default_rng(seed).standard_normal(shape, dtype=cupy.float32)
    return (scale * values).astype(ml_dtypes.bfloat16)


def random_tree(nodes: int, seed: int = 0) -> DraftTree:
    """Return a tree with random earlier nodes as parents, as in a best-first tree: those near the root more often."""
    rng = np.random.default_rng(seed)
    parents = [-1] + [int(i * rng.random() ** 1.5) for i in range(1, nodes)]
    return DraftTree.from_parents(np.arange(nodes), parents)


def repeated(tree: DraftTree, batch: int) -> DraftTree:
    """Return a batch of the same tree."""
    return tree.map(lambda array: np.repeat(array[None], batch, axis=0))


def to_device(container: Any) -> Any:
    """Return a container with its arrays copied to the GPU."""
    import cupy

    return container.map(cupy.asarray)
