"""What every kernel version has, traits and a plan, and the limits that versions of any head size share."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ddtree_cupy.kernels import KernelSpec, get_kernel
from ddtree_cupy.kernels.device import shared_limit
from ddtree_cupy.kernels.workspace import Workspace
from ddtree_cupy.tree_attention.call import Call

Array = Any
Sizes = dict[str, tuple[tuple[int, ...], Any]]

MOST_GRID = 65_535  # blocks along the second and third axis of a CUDA grid
MOST_WIDTH = 1024  # of C and of R: a float32 sum runs over at most this many terms
STATIC_SHARED_BYTES = 1024  # room for the own small arrays of kernels of any head size
COMPILED_SIZES = ((512, 64), (64, 16))  # head sizes (C, R) whose kernels the library registers


@dataclass(frozen=True)
class Traits:
    """What a version takes, as data for the bench and the tests.

    Attributes
    ----------
    dtypes : tuple of str
    head_sizes : tuple of (C, R), or None
        None: any multiples of 16 up to `MOST_WIDTH`.
    least_arch : int
        The oldest architecture, such as 80 for sm_80; 0: any.
    cuts_keys : bool
        It cuts keys by the whole batch, and every `split_keys` where that is given.
    any_length : bool
        Its shared memory does not limit the number of keys.
    tensor_cores : bool
        Its products are those of matrix instructions.
    """

    dtypes: tuple[str, ...]
    head_sizes: tuple[tuple[int, int], ...] | None = None
    least_arch: int = 0
    cuts_keys: bool = False
    any_length: bool = True
    tensor_cores: bool = False


class Step(NamedTuple):
    """One kernel of a plan and its launch sizes."""

    spec: KernelSpec
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int = 0

    def launch(self, call: Call, args: tuple[Any, ...], checked: bool) -> None:
        """Launch the kernel on these arguments."""
        kernel = get_kernel(self.spec, call.backend)
        kernel(self.grid, self.block, args, shared_mem=self.shared_bytes, checked=checked)


class Plan(NamedTuple):
    """How a version runs one call: its kernels, its scratch arrays, and the numbers it derived for their arguments."""

    steps: tuple[Step, ...]
    scratch: Sizes
    numbers: tuple[int, ...] = ()


class Version(Protocol):
    """A module of this package."""

    TRAITS: Traits

    def refusal(self, call: Call) -> str:
        """Return why the version cannot take a call, "" when it can; shapes and host integers alone decide."""

    def plan(self, call: Call) -> Plan:
        """Return how the version runs a call that it does not refuse."""

    def launch(self, plan: Plan, call: Call, out: tuple[Array, Array], scratch: Workspace, checked: bool) -> None:
        """Launch the kernels of a plan."""


def size_refusal(call: Call) -> str:
    """Return why a version of any head size cannot take the sizes of a call, "" when it can."""
    batch, capacity = call.q_nope.shape[:2]
    if max(batch, capacity) > MOST_GRID:
        return f"takes at most {MOST_GRID} requests of {MOST_GRID} nodes, got {batch} of {capacity}"
    head_dim_ckv, head_dim_kpe = call.head_sizes
    if head_dim_ckv > 0 and all(size % 16 == 0 and size <= MOST_WIDTH for size in call.head_sizes):
        return ""
    return (
        f"takes head sizes C in 16..{MOST_WIDTH} and R in 0..{MOST_WIDTH}, both multiples of 16, "
        f"got C = {head_dim_ckv} and R = {head_dim_kpe}"
    )


def shared_refusal(needed: int, what: str, backend: str) -> str:
    """Return why `needed` bytes of dynamic shared memory are too many, "" when the device has them."""
    limit = shared_limit(backend) - STATIC_SHARED_BYTES
    return f"{what} {needed} bytes of shared memory, this device has {limit}" if needed > limit else ""
