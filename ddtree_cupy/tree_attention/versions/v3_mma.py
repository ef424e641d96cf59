"""v3_mma: tensor cores through mma.sync, then a merge of the pieces."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ddtree_cupy.containers.topology import words_per_row
from ddtree_cupy.kernels import CTYPES, Arg, KernelSpec, ints, register
from ddtree_cupy.kernels.device import architecture, multiprocessors, shared_limit
from ddtree_cupy.kernels.workspace import Workspace
from ddtree_cupy.tree_attention.call import CACHE_STRIDES, KEYS, QUERY_STRIDES, TABLES, Call, attention_inputs, results
from ddtree_cupy.tree_attention.versions.common import COMPILED_SIZES, MOST_GRID, Plan, Step, Traits

Array = Any

TRAITS = Traits(
    dtypes=("float16", "bfloat16"), head_sizes=COMPILED_SIZES, least_arch=80, cuts_keys=True, tensor_cores=True
)
STATIC_SHARED_BYTES = 512  # the Piece
TILE_ROWS, FOLD_KEYS, THREADS = 64, 16_384, 384  # constants of v3_schedule.cuh and v3_layout.cuh
MERGED_ROWS = 2  # of v3_merge.cu
FEW_PIECES = 8  # of a row tile, whose merge wants many warps; where there are more it wants many loads in flight
IN_FLIGHT = (4, 16)  # loads of a warp of the merge kernel, for few pieces and for many


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
        """Dynamic shared memory for head sizes of `width` = C + R together and `words` of visibility a row."""
        lines, held = -(-width // 64), self.held(width)
        passing, results = TILE_ROWS * (32 * held + 8) * 2, 8 * 16 * (64 + 8) * 4
        tiles = max(self.stages * self.keys * lines * 128, passing, results)
        queries = TILE_ROWS * (32 * (2 * lines - held) + 8) * 2
        exchange = self.keys // 8 * 4 * 32 * 16
        buffers = 3 if self.stages >= 4 else 2
        weights = 4 * self.keys // 16 * 32 * 16
        numbers = (2 * buffers + 1) * TILE_ROWS + buffers * 4 + words
        return tiles + queries + exchange + buffers * weights + 4 * numbers


# The most that spills no registers and fits: 227 KiB of shared memory a block; 163 KiB; 99 KiB
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
        source="tree_attention/v3_mma.cu",
        entry=f"tree_attention_v3<{types}>",
        args=(
            *attention_inputs(dtype),
            *results(dtype),
            *(Arg.output(name, "float32") for name in ("partial_out", "partial_score", "carry")),
            Arg.output("cuts", "int32"),
            *ints("B", "N", "H", "num_pages", "page_size", "max_pages", "max_context"),
            *QUERY_STRIDES,
            *CACHE_STRIDES,
            Arg.scalar("sm_scale", "float32"),
            *ints("keys", "tiles_per_slice", "aligned"),
        ),
        archs=config.archs,
        max_threads=THREADS,
        max_registers=168,
        shared_bytes=config.shared_bytes,
        max_shared_bytes=config.shared_bytes(width, words_per_row(1_056)) + STATIC_SHARED_BYTES,
    )


def _merge_threads(head_dim_ckv: int) -> int:
    return 32 * MERGED_ROWS * -(-head_dim_ckv // 128)


@cache
def merge_spec(dtype: str, head_dim_ckv: int, in_flight: int) -> KernelSpec:
    """Spec of tree_attention_v3_merge, of which a warp has `in_flight` loads under way."""
    return KernelSpec(
        source="tree_attention/v3_merge.cu",
        entry=f"tree_attention_v3_merge<{CTYPES[dtype]}, {head_dim_ckv}, {in_flight}>",
        args=(
            *TABLES,
            *(Arg.input(name, "float32") for name in ("partial_out", "partial_score")),
            Arg.input("cuts", "int32"),
            *results(dtype),
            *ints("B", "N", "H", "num_pages", "page_size", "max_pages", "max_context", "keys", "blocks"),
        ),
        max_threads=_merge_threads(head_dim_ckv),
        max_registers=64 if in_flight == IN_FLIGHT[0] else 128,
    )


for _dtype in TRAITS.dtypes:
    for _sizes in COMPILED_SIZES:
        for _config in CONFIGS:
            register(attend_spec(_dtype, *_sizes, _config))
        for _in_flight in IN_FLIGHT:
            register(merge_spec(_dtype, _sizes[0], _in_flight))


def refusal(call: Call) -> str:
    """Return why v3 cannot take a call, "" when it can; shapes and host integers alone decide."""
    if call.dtype not in TRAITS.dtypes:
        return f"takes {' and '.join(TRAITS.dtypes)}, got {call.dtype}"
    if call.head_sizes not in COMPILED_SIZES:
        listed = " or ".join(map(str, COMPILED_SIZES))
        return f"takes head sizes (C, R) of {listed}, got {call.head_sizes}"
    batch, capacity, num_heads, _ = call.q_nope.shape
    if batch > MOST_GRID or batch * _row_tiles(call) >= 2**31:
        return f"takes at most {MOST_GRID} requests and 2**31 row tiles, got {batch} of {capacity} x {num_heads} rows"
    found = architecture(call.backend)
    if found and int(found.removeprefix("sm_")) < TRAITS.least_arch:
        return f"needs sm_{TRAITS.least_arch} or newer, this device is {found}"
    if not _configs_of(call):
        return f"fits no {shared_limit(call.backend)} bytes of shared memory"
    return ""


def _row_tiles(call: Call) -> int:
    """Return how many row tiles a request has at most."""
    _, capacity, num_heads, _ = map(int, call.q_nope.shape)
    return -(-capacity * num_heads // TILE_ROWS)


def _tiles_per_slice(call: Call, config: Config) -> int:
    """Return the key tiles of a slice, at most as many as there are; 0 where keys are cut freely."""
    if call.split_keys is None:
        return 0
    return min(call.split_keys, -(-max(call.most_keys, 1) // 32) * 32) // config.keys


def loads_in_flight(call: Call, blocks: int) -> int:
    """Return the loads in flight that suit the number of pieces which a row tile has, if all requests are alike."""
    if call.split_keys is None:
        pieces = blocks // max(len(call.q_nope) * _row_tiles(call), 1)
    else:
        pieces = -(-call.most_keys // call.split_keys)
    few, many = IN_FLIGHT
    return few if pieces <= FEW_PIECES else many


def _configs_of(call: Call) -> tuple[Config, ...]:
    """Return the configurations that the device's shared memory holds, those made for its architecture first."""
    width, words = sum(call.head_sizes), words_per_row(call.q_nope.shape[1])
    return fitting_configs(architecture(call.backend), shared_limit(call.backend), width, words)


@cache
def fitting_configs(arch: str, limit: int, width: int, words: int) -> tuple[Config, ...]:
    """Return the configurations that `limit` bytes of shared memory hold, those made for `arch` first."""
    fitting = [config for config in CONFIGS if config.shared_bytes(width, words) <= limit - STATIC_SHARED_BYTES]
    return tuple(sorted(fitting, key=lambda config: arch not in config.archs))


def plan(call: Call, *, config: Config | None = None, blocks: int | None = None, in_flight: int | None = None) -> Plan:
    """Return both kernels, the scratch arrays between them, and the key tiles of a slice.

    The device decides the configuration, the number of blocks (one per multiprocessor) and the loads in flight of the
    merge, unless they are given.
    """
    config = config or _configs_of(call)[0]
    blocks = blocks or multiprocessors(call.backend)
    in_flight = in_flight or loads_in_flight(call, blocks)
    batch, capacity, num_heads, head_dim_ckv = call.q_nope.shape
    rows, row_tiles = capacity * num_heads, _row_tiles(call)
    slots = 2 * blocks
    if call.split_keys is not None:
        slices = -(-call.most_keys // call.split_keys)
        slots = batch * row_tiles * slices if slices > 1 else 0
    carries = blocks if -(-call.most_keys // config.keys) * config.keys > FOLD_KEYS else 0  # whole tiles are folded
    shared_bytes = config.shared_bytes(sum(call.head_sizes), words_per_row(capacity))
    attend = attend_spec(call.dtype, *call.head_sizes, config)
    merge = merge_spec(call.dtype, head_dim_ckv, in_flight)
    return Plan(
        (
            Step(attend, (blocks if batch * rows else 0,), (THREADS,), shared_bytes),
            Step(merge, (-(-rows // MERGED_ROWS), batch), (_merge_threads(head_dim_ckv),)),
        ),
        scratch={
            "partial_out": ((slots, TILE_ROWS, head_dim_ckv), np.float32),
            "partial_score": ((slots, TILE_ROWS), np.float32),
            "cuts": ((batch, row_tiles, 4), np.int32),
            "carry": ((carries, TILE_ROWS, head_dim_ckv), np.float32),
        },
        numbers=(_tiles_per_slice(call, config), blocks),
    )


def launch(plan: Plan, call: Call, out: tuple[Array, Array], scratch: Workspace, checked: bool) -> None:
    """Launch both kernels."""
    attend, merge = plan.steps
    per_slice, blocks = plan.numbers
    partials, cuts = (scratch["partial_out"], scratch["partial_score"]), scratch["cuts"]
    sizes, keys = (*call.q_nope.shape[:3], *call.page_sizes), KEYS[call.keys]
    aligned = int(call.cache_is_aligned() and call.queries_are_aligned())
    scalars = (*sizes, *call.strides, call.sm_scale, keys, per_slice, aligned)
    attend.launch(call, (*call.inputs, *out, *partials, scratch["carry"], cuts, *scalars), checked)
    merge.launch(call, (*call.tables, *partials, cuts, *out, *sizes, keys, blocks), checked)
