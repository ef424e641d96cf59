"""Argument tables, shared memory and limits of the tree_attention kernels but v3, which has its own module."""

from functools import cache

from ddtree_cupy._compile import CTYPES, Arg, KernelSpec, ints, register

KEYS = {"all": 0, "context": 1, "tree": 2}
MOST_GRID = 65_535  # blocks along the second and third axis of a CUDA grid
STATIC_SHARED_BYTES = 1024  # room for the kernels' own small arrays

WARPS, _TILE = 4, 32  # constants of v2_slices.cuh


def strides_of(*names: str) -> tuple[Arg, ...]:
    """Return the stride scalars of these axes."""
    return tuple(Arg.scalar(f"{name}_stride", "int64") for name in names)


QUERY_STRIDES = strides_of(*(f"{q}_{axis}" for q in ("q_nope", "q_pe") for axis in ("request", "node", "head")))
CACHE_STRIDES = strides_of("ckv_page", "ckv_slot", "kpe_page", "kpe_slot")


def attention_inputs(dtype: str) -> tuple[Arg, ...]:
    """Return the arrays every version reads, in the order of every kernel."""
    strided = [Arg.input(name, dtype, strided=True) for name in ("q_nope", "q_pe", "ckv", "kpe")]
    tables = [Arg.input(name, "int32") for name in ("page_table", "context_lens", "num_nodes")]
    return (*strided, *tables, Arg.input("visibility_bits", "uint32"))


def results(dtype: str) -> tuple[Arg, ...]:
    """Return the arrays every version writes."""
    return Arg.output("out", dtype), Arg.output("lse", "float32")


def v1_shared_bytes(width: int, most_keys: int) -> int:
    """Dynamic shared memory of v1: one query of `width` = C + R and one score a key, float32."""
    return 4 * (width + most_keys)


@cache
def v1_spec(dtype: str) -> KernelSpec:
    """Spec of v1_three_phase for one dtype; any C and R."""
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
        max_threads=128,
        max_registers=64,
        shared_bytes=v1_shared_bytes,
    )


def v2_rows(dtype: str) -> int:
    """Query rows one block of v2 owns."""
    return WARPS * (2 if dtype == "float32" else 4)


def v2_shared_bytes(dtype: str, width: int) -> int:
    """Dynamic shared memory of v2: a tile of keys of `width` = C + R, the queries and the weights of the block."""
    itemsize = 4 if dtype == "float32" else 2
    return _TILE * (width * itemsize + 16) + v2_rows(dtype) * 4 * (width + _TILE)


@cache
def v2_specs(dtype: str, head_dim_ckv: int, head_dim_kpe: int) -> tuple[KernelSpec, KernelSpec]:
    """Specs of v2_split_kv and of its merge, for one dtype and one pair of head sizes."""
    source, types = "tree_attention/v2_split_kv.cu", f"<{CTYPES[dtype]}, {head_dim_ckv}, {head_dim_kpe}>"
    tables = tuple(Arg.input(name, "int32") for name in ("page_table", "context_lens", "num_nodes"))
    shared = v2_shared_bytes(dtype, head_dim_ckv + head_dim_kpe)
    attend = KernelSpec(
        source=source,
        entry=f"tree_attention_v2{types}",
        args=(
            *attention_inputs(dtype),
            *results(dtype),
            Arg.output("partial_out", "float32"),
            Arg.output("partial_score", "float32"),
            *ints("N", "H"),
            Arg.scalar("region", "int64"),
            *ints("num_pages", "page_size", "max_pages", "max_context"),
            *QUERY_STRIDES,
            *CACHE_STRIDES,
            Arg.scalar("sm_scale", "float32"),
            *ints("keys", "vectors"),
        ),
        max_threads=128,
        max_registers=224,
        shared_bytes=v2_shared_bytes,
        max_shared_bytes=shared + STATIC_SHARED_BYTES,
    )
    merge = KernelSpec(
        source="tree_attention/v2_merge.cu",
        entry=f"tree_attention_v2_merge{types}",
        args=(
            *tables,
            Arg.input("partial_out", "float32"),
            Arg.input("partial_score", "float32"),
            *results(dtype),
            *ints("N", "H"),
            Arg.scalar("region", "int64"),
            *ints("num_pages", "page_size", "max_pages", "max_context", "keys"),
        ),
        max_threads=128,
        max_registers=64,
    )
    return attend, merge


@cache
def merge_spec(dtype: str) -> KernelSpec:
    """Spec of merge_states for one dtype."""
    sides = (
        Arg.input("out_a", dtype),
        Arg.input("lse_a", "float32"),
        Arg.input("out_b", dtype),
        Arg.input("lse_b", "float32"),
    )
    return KernelSpec(
        source="tree_attention/merge_states.cu",
        entry=f"merge_states<{CTYPES[dtype]}>",
        args=(*sides, *results(dtype), Arg.scalar("M", "int64"), Arg.scalar("C", "int32")),
        max_threads=128,
        max_registers=40,
    )


@cache
def write_kv_spec(dtype: str) -> KernelSpec:
    """Spec of write_kv for one dtype."""
    return KernelSpec(
        source="tree_attention/write_kv.cu",
        entry=f"write_kv<{CTYPES[dtype]}>",
        args=(
            Arg.input("ckv_rows", dtype, strided=True),
            Arg.input("kpe_rows", dtype, strided=True),
            Arg.input("page_table", "int32"),
            Arg.input("context_lens", "int32"),
            Arg.input("num_rows", "int32", nullable=True),
            Arg.output("ckv", dtype, strided=True),
            Arg.output("kpe", dtype, strided=True),
            *ints("N", "C", "R", "num_pages", "page_size", "max_pages", "rows_of_all"),
            *strides_of("ckv_rows_request", "ckv_rows_row", "kpe_rows_request", "kpe_rows_row"),
            *CACHE_STRIDES,
        ),
        max_threads=128,
        max_registers=64,
    )


for _dtype in CTYPES:
    register(v1_spec(_dtype))
    for _sizes in ((512, 64), (64, 16)):
        for _spec in v2_specs(_dtype, *_sizes):
            register(_spec)
    register(merge_spec(_dtype))
    register(write_kv_spec(_dtype))
