"""v3_mma: tensor cores through mma.sync, then a merge of the pieces."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from ddtree_cupy.containers.topology import words_per_row
from ddtree_cupy.kernels import CTYPES, KernelSpec, Plan, Step, constants, register
from ddtree_cupy.tree_attention.call import Sizes
from ddtree_cupy.tree_attention.versions.common import COMPILED_SIZES, MOST_GRID, Traits, results

SOURCE, MERGE_SOURCE = "tree_attention/v3_mma.cu", "tree_attention/v3_merge.cu"
TRAITS = Traits(
    dtypes=("float16", "bfloat16"),
    head_sizes=COMPILED_SIZES,
    least_arch=80,
    cuts_keys=True,
    tensor_cores=True,
    arrives=True,
)
STATIC_SHARED_BYTES = 512  # the Piece
FEW_PIECES = 8  # of a row tile, whose merge wants many warps; where there are more it wants many loads in flight
IN_FLIGHT = (4, 16)  # loads of a warp of the merge kernel, for few pieces and for many


def tile_rows() -> int:
    """Query rows of a row tile."""
    return constants(SOURCE)["TILE_ROWS"]


@dataclass(frozen=True)
class Config:
    """Keys of a tile, tiles in shared memory, and how many of 18 k-steps of the queries are kept in registers.

    The first whose shared memory a device has is taken, if none was made for it.
    """

    keys: int
    stages: int
    held_of_18: int
    archs: tuple[str, ...]

    def held(self, width: int) -> int:
        """K-steps in registers, of one half of `width` = C + R dimensions."""
        return 2 * -(-width // 64) * self.held_of_18 // 18

    def shared_bytes(self, width: int, words: int) -> int:
        """Dynamic shared memory for head sizes of `width` = C + R together and `words` of visibility per row."""
        lines, held = -(-width // 64), self.held(width)
        passing, results = tile_rows() * (32 * held + 8) * 2, 8 * 16 * (64 + 8) * 4
        tiles = max(self.stages * self.keys * lines * 128, passing, results)
        queries = tile_rows() * (32 * (2 * lines - held) + 8) * 2
        exchange = self.keys // 8 * 4 * 32 * 16
        buffers = 3 if self.stages >= 4 else 2
        weights = 4 * self.keys // 16 * 32 * 16
        numbers = (2 * buffers + 1) * tile_rows() + buffers * 4 + words
        return tiles + queries + exchange + buffers * weights + 4 * numbers


# The largest that spill no registers and fit into the shared memory of a block: 227 KiB, 163 KiB, 99 KiB
CONFIGS = (
    Config(32, 4, 8, ("sm_90", "sm_100")),
    Config(32, 3, 9, ("sm_80",)),
    Config(16, 3, 10, ("sm_86", "sm_89", "sm_120")),
)


@cache
def attend_spec(dtype: str, head_dim_ckv: int, head_dim_kpe: int, config: Config) -> KernelSpec:
    """Spec of tree_attention_v3 for one 16-bit dtype, one pair of head sizes and one configuration."""
    width = head_dim_ckv + head_dim_kpe
    sizes = head_dim_ckv, head_dim_kpe, config.keys, config.stages, config.held(width)
    types = ", ".join((CTYPES[dtype], *map(str, sizes)))
    return KernelSpec(
        SOURCE,
        f"tree_attention_v3<{types}>",
        strided="q_nope q_pe ckv kpe",
        archs=config.archs,
        max_threads=constants(SOURCE)["THREADS"],
        max_registers=168,
        shared_bytes=config.shared_bytes,
        max_shared_bytes=config.shared_bytes(width, words_per_row(1_056)) + STATIC_SHARED_BYTES,
    )


def _merge_threads(head_dim_ckv: int) -> int:
    return 32 * constants(MERGE_SOURCE)["MERGED_ROWS"] * -(-head_dim_ckv // 128)


@cache
def merge_spec(dtype: str, head_dim_ckv: int, in_flight: int) -> KernelSpec:
    """Spec of tree_attention_v3_merge, of which a warp has `in_flight` loads in flight."""
    return KernelSpec(
        MERGE_SOURCE,
        f"tree_attention_v3_merge<{CTYPES[dtype]}, {head_dim_ckv}, {in_flight}>",
        strided="q_nope q_pe ckv kpe",
        max_threads=_merge_threads(head_dim_ckv),
        max_registers=64 if in_flight == IN_FLIGHT[0] else 128,
    )


@register
def specs() -> Iterator[KernelSpec]:
    """Every kernel of v3."""
    for dtype in TRAITS.dtypes:
        for head_sizes in COMPILED_SIZES:
            yield from (attend_spec(dtype, *head_sizes, config) for config in CONFIGS)
            yield from (merge_spec(dtype, head_sizes[0], in_flight) for in_flight in IN_FLIGHT)


def refusal(sizes: Sizes) -> str:
    """Return why v3 cannot take a call of these sizes, "" when it can."""
    if sizes.dtype not in TRAITS.dtypes:
        return f"takes {' and '.join(TRAITS.dtypes)}, got {sizes.dtype}"
    if sizes.head_sizes not in COMPILED_SIZES:
        listed = " or ".join(map(str, COMPILED_SIZES))
        return f"takes head sizes (C, R) of {listed}, got {sizes.head_sizes}"
    batch, rows = sizes.batch, f"{sizes.capacity} x {sizes.num_heads}"
    if batch > MOST_GRID or batch * _row_tiles(sizes) >= 2**31:
        return f"takes at most {MOST_GRID} requests and 2**31 row tiles, got {batch} of {rows} rows"
    found = sizes.device.arch
    if found and int(found.removeprefix("sm_")) < TRAITS.least_arch:
        return f"needs sm_{TRAITS.least_arch} or newer, this device is {found}"
    if not fitting_configs(sizes):
        return f"does not fit into {sizes.device.shared_limit} bytes of shared memory"
    return ""


def _row_tiles(sizes: Sizes) -> int:
    """Return how many row tiles a request has at most."""
    return -(-sizes.rows // tile_rows())


def _tiles_per_slice(sizes: Sizes, config: Config) -> int:
    """Return the key tiles of a slice, at most as many as there are; 0 where keys are cut freely."""
    if sizes.split_keys is None:
        return 0
    return min(sizes.split_keys, -(-max(sizes.most_keys, 1) // 32) * 32) // config.keys


def loads_in_flight(sizes: Sizes, blocks: int) -> int:
    """Return the loads in flight that suit the number of pieces which a row tile has, if all requests are alike."""
    if sizes.split_keys is None:
        pieces = blocks // max(sizes.batch * _row_tiles(sizes), 1)
    else:
        pieces = -(-sizes.most_keys // sizes.split_keys)
    few, many = IN_FLIGHT
    return few if pieces <= FEW_PIECES else many


def fitting_configs(sizes: Sizes) -> tuple[Config, ...]:
    """Return the configurations that the device's shared memory holds, those made for its architecture first."""
    limit, words = sizes.device.shared_limit - STATIC_SHARED_BYTES, words_per_row(sizes.capacity)
    fitting = [config for config in CONFIGS if config.shared_bytes(sizes.width, words) <= limit]
    return tuple(sorted(fitting, key=lambda config: sizes.device.arch not in config.archs))


def plan(
    sizes: Sizes, *, config: Config | None = None, blocks: int | None = None, in_flight: int | None = None
) -> Plan:
    """Return both kernels, the scratch arrays between them, and the key tiles of a slice.

    The device decides the configuration, the number of blocks (one per multiprocessor) and the loads in flight of the
    merge, unless they are given.
    """
    config = config or fitting_configs(sizes)[0]
    blocks = blocks or sizes.device.multiprocessors
    in_flight = in_flight or loads_in_flight(sizes, blocks)
    batch, rows, row_tiles, width = sizes.batch, sizes.rows, _row_tiles(sizes), sizes.head_dim_ckv
    slots = 2 * blocks
    if sizes.split_keys is not None:
        slices = -(-sizes.most_keys // sizes.split_keys)
        slots = batch * row_tiles * slices if slices > 1 else 0
    longest = -(-sizes.most_keys // config.keys) * config.keys  # whole tiles are folded
    carries = blocks if longest > constants(SOURCE)["FOLD_KEYS"] else 0
    shared_bytes = config.shared_bytes(sizes.width, words_per_row(sizes.capacity))
    attend = attend_spec(sizes.dtype, *sizes.head_sizes, config)
    merge = merge_spec(sizes.dtype, width, in_flight)
    merge_blocks = -(-rows // constants(MERGE_SOURCE)["MERGED_ROWS"])
    return Plan(
        (
            Step(attend, (blocks if batch * rows else 0,), (attend.max_threads,), shared_bytes),
            Step(merge, (merge_blocks, batch), (merge.max_threads,)),
        ),
        results(sizes),
        scratch={
            "partial_out": ((slots, tile_rows(), width), np.float32),
            "partial_score": ((slots, tile_rows()), np.float32),
            "cuts": ((batch, row_tiles, 4), np.int32),
            "carry": ((carries, tile_rows(), width), np.float32),
        },
        args={"B": batch, "tiles_per_slice": _tiles_per_slice(sizes, config), "blocks": blocks},
    )
