"""Specs, geometry and launch of v3_mma: tensor cores through mma.sync."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ddtree_cupy._compile import CTYPES, Arg, KernelSpec, get_kernel, ints, register
from ddtree_cupy._compile.memory import Workspace, architecture, multiprocessors, shared_limit
from ddtree_cupy._topology import words_per_row
from ddtree_cupy.tree_attention.kernel_call import Call
from ddtree_cupy.tree_attention.kernel_specs import (
    CACHE_STRIDES,
    KEYS,
    MOST_GRID,
    QUERY_STRIDES,
    attention_inputs,
    results,
)

Array = Any
Sizes = dict[str, tuple[tuple[int, ...], Any]]

HEAD_SIZES = ((512, 64), (64, 16))
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
            *(Arg.input(name, "int32") for name in ("page_table", "context_lens", "num_nodes")),
            *(Arg.input(name, "float32") for name in ("partial_out", "partial_score")),
            Arg.input("cuts", "int32"),
            *results(dtype),
            *ints("B", "N", "H", "num_pages", "page_size", "max_pages", "max_context", "keys", "blocks"),
        ),
        max_threads=_merge_threads(head_dim_ckv),
        max_registers=64 if in_flight == IN_FLIGHT[0] else 128,
    )


for _dtype in ("float16", "bfloat16"):
    for _sizes in HEAD_SIZES:
        for _config in CONFIGS:
            register(attend_spec(_dtype, *_sizes, _config))
        for _in_flight in IN_FLIGHT:
            register(merge_spec(_dtype, _sizes[0], _in_flight))


def refusal(call: Call) -> str:
    """Return why v3 cannot take a call, "" when it can; shapes and host integers alone decide."""
    if call.dtype not in ("float16", "bfloat16"):
        return f"takes float16 and bfloat16, got {call.dtype}"
    if call.head_sizes not in HEAD_SIZES:
        listed = " or ".join(map(str, HEAD_SIZES))
        return f"takes head sizes (C, R) of {listed}, got {call.head_sizes}"
    batch, capacity, num_heads, _ = call.q_nope.shape
    if batch > MOST_GRID or batch * _row_tiles(call) >= 2**31:
        return f"takes at most {MOST_GRID} requests and 2**31 row tiles, got {batch} of {capacity} x {num_heads} rows"
    found = architecture(call.backend)
    if found and int(found.removeprefix("sm_")) < 80:
        return f"needs sm_80 or newer, this device is {found}"
    if choose_config(call) is None:
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


def _loads_in_flight(call: Call) -> int:
    """Return the loads in flight that suit the number of pieces which a row tile has, if all requests are alike."""
    if call.split_keys is None:
        pieces = multiprocessors(call.backend) // max(len(call.q_nope) * _row_tiles(call), 1)
    else:
        pieces = -(-call.most_keys // call.split_keys)
    few, many = IN_FLIGHT
    return few if pieces <= FEW_PIECES else many


def choose_config(call: Call) -> Config | None:
    """Return the configuration made for the device's architecture, else the first that its shared memory holds."""
    width, words = sum(call.head_sizes), words_per_row(call.q_nope.shape[1])
    return _choose(CONFIGS, architecture(call.backend), shared_limit(call.backend), width, words)


@cache
def _choose(configs: tuple[Config, ...], arch: str, limit: int, width: int, words: int) -> Config | None:
    fitting = [config for config in configs if config.shared_bytes(width, words) <= limit - STATIC_SHARED_BYTES]
    made_for_it = [config for config in fitting if arch in config.archs]
    return next(iter(made_for_it or fitting), None)


def scratch_sizes(call: Call) -> Sizes:
    """Return the scratch arrays of a call."""
    batch, _, _, head_dim_ckv = call.q_nope.shape
    blocks = multiprocessors(call.backend)
    slots = 2 * blocks
    if call.split_keys is not None:
        slices = -(-call.most_keys // call.split_keys)
        slots = batch * _row_tiles(call) * slices if slices > 1 else 0
    config = choose_config(call)
    assert config is not None, "refusal() was asked first"
    carries = blocks if -(-call.most_keys // config.keys) * config.keys > FOLD_KEYS else 0  # whole tiles are folded
    return {
        "partial_out": ((slots, TILE_ROWS, head_dim_ckv), np.float32),
        "partial_score": ((slots, TILE_ROWS), np.float32),
        "cuts": ((batch, _row_tiles(call), 4), np.int32),
        "carry": ((carries, TILE_ROWS, head_dim_ckv), np.float32),
    }


def run(call: Call, out: tuple[Array, Array], scratch: Workspace, checked: bool) -> None:
    """Launch both kernels."""
    batch, capacity, num_heads, head_dim_ckv = call.q_nope.shape
    config = choose_config(call)
    assert config is not None, "refusal() was asked first"
    partials = scratch["partial_out"], scratch["partial_score"]
    cuts = scratch["cuts"]
    blocks = multiprocessors(call.backend)
    per_slice = _tiles_per_slice(call, config)
    sizes = (batch, capacity, num_heads, *call.page_sizes)
    keys = KEYS[call.keys]
    get_kernel(attend_spec(call.dtype, *call.head_sizes, config), call.backend)(
        (blocks if batch * capacity * num_heads else 0,),
        (THREADS,),
        (
            *(*call.inputs, *out, *partials, scratch["carry"], cuts, *sizes, *call.strides),
            *(call.sm_scale, keys, per_slice, int(call.cache_is_aligned() and call.queries_are_aligned())),
        ),
        shared_mem=config.shared_bytes(sum(call.head_sizes), words_per_row(capacity)),
        checked=checked,
    )
    get_kernel(merge_spec(call.dtype, head_dim_ckv, _loads_in_flight(call)), call.backend)(
        (-(-capacity * num_heads // MERGED_ROWS), batch),
        (_merge_threads(head_dim_ckv),),
        (*call.tables, *partials, cuts, *out, *sizes, keys, blocks),
        checked=checked,
    )
