"""Faults to plant into the kernels, to see that the suite catches them: a test of the tests.

Each is one replacement in one source text. `conftest.py` plants the one that PLANTED_FAULT names.
"""

from dataclasses import dataclass

from ddtree_cupy._compile import KernelSpec


@dataclass(frozen=True)
class Fault:
    """Replace `right` by `wrong` in `source`; `caught_by` are the tests, of which at least one must fail.

    A fault of a header is planted into every kernel that includes it.
    """

    source: str
    right: str
    wrong: str
    caught_by: str


V1, V2, V3 = (f"tree_attention/{name}" for name in ("v1_three_phase.cu", "v2_split_kv.cu", "v3_mma.cu"))
TESTS = "tests/tree_attention/test_kernels.py"
MMA_TESTS = "tests/tree_attention/test_kernels_mma.py"

FAULTS = {
    "missing barrier": Fault(
        V2,
        "    load_tile<T, C, R>(tile, where, ckv, kpe, vectors != 0);\n    __syncthreads();\n",
        "    load_tile<T, C, R>(tile, where, ckv, kpe, vectors != 0);\n",
        f"{TESTS}::test_v2_matches_oracle_around_slice_edges",
    ),
    "off-by-one store": Fault(
        V1,
        "out[row * C + c] = from_float<T>(value * inverse);",
        "out[row * C + c + 1] = from_float<T>(value * inverse);",
        f"{TESTS}::test_tree_attention_never_writes_outside_its_results",
    ),
    "int32 offset": Fault(
        V1,
        "return page(position) * page_stride + (position % page_size) * slot_stride;",
        "return (int)(page(position) * page_stride) + (position % page_size) * slot_stride;",
        f"{TESTS}::test_emulated_tree_attention_addresses_pools_beyond_32_bits",
    ),
    "transposed mask": Fault(
        V1,
        "is_visible(bits, position - range.context_len)",
        "is_visible(visibility_bits + ((long long)request * N + max(position - range.context_len, 0)) * W, "
        "position < range.context_len ? -1 : node)",
        f"{TESTS}::test_tree_attention_matches_oracle",
    ),
    "lost tail tile": Fault(
        V2,
        "start < stop; start += TILE",
        "start + TILE <= stop; start += TILE",
        f"{TESTS}::test_v2_matches_oracle_around_slice_edges",
    ),
    "race in the bucket search": Fault(
        "tree_build/best_first.cu",
        "__syncwarp();",
        "",
        "tests/tree_build/test_kernels_best_first.py",
    ),
    "one tie too many": Fault(
        "tree_build/top_candidates.cu",
        "level_before < chosen.quota",
        "level_before <= chosen.quota",
        "tests/tree_build/test_kernels_top_candidates.py",
    ),
    "late lane": Fault(
        V2,
        "    __syncwarp();\n\n    // the tile's weighted values",
        "\n    // the tile's weighted values",
        f"{TESTS}::test_v2_matches_oracle_around_slice_edges",
    ),
    "tile read before its copy ends": Fault(
        V3,
        "copy_async_wait<STAGES - 4>();",
        "copy_async_wait<STAGES - 1>();",
        f"{MMA_TESTS}::test_v3_matches_oracle_around_tile_and_fold_edges",
    ),
    "lost fold": Fault(
        V3,
        "if (Layout::is_long() && Layout::folds(tile, piece.plan.first_tile, piece.plan.last_tile)) fold(tile);",
        "",
        f"{MMA_TESTS}::test_v3_matches_oracle_around_tile_and_fold_edges",
    ),
    "folded sums that do not shrink": Fault(
        V3,
        "fmaf(*at, shrink, value[m][n][i])",
        "fmaf(*at, 1.0f, value[m][n][i])",
        f"{MMA_TESTS}::test_v3_shrinks_what_was_folded_when_maxima_rise_later",
    ),
    "weights that overflow": Fault(
        V3,
        "STALE_BY = 8.0f",
        "STALE_BY = 100.0f",
        f"{MMA_TESTS}::test_v3_rescales_when_maxima_rise",
    ),
    "missing pair barrier": Fault(
        V3,
        "    named_barrier(PAIR + pair(), 64);\n",
        "",
        f"{MMA_TESTS}::test_v3_roles_never_overtake_each_other",
    ),
    "one barrier for even and odd tiles": Fault(
        V3,
        "% 2, THREADS);",
        "% 1, THREADS);",
        f"{MMA_TESTS}::test_v3_roles_never_overtake_each_other",
    ),
    "lines of shared memory that are not aligned": Fault(
        V3,
        "extern __shared__ __align__(128) uint4 shared[];",
        "extern __shared__ uint4 shared[];",
        f"{MMA_TESTS}::test_v3_matches_oracle_in_every_configuration",
    ),
    "lost end of a row tile": Fault(
        V3,
        "if (piece.index >= piece.stop && piece.put_off >= 0) {",
        "if (false) {",
        f"{MMA_TESTS}::test_v3_matches_oracle_however_the_line_is_cut",
    ),
    "one slot for all ends that begin in a block": Fault(
        "tree_attention/v3_schedule.cuh",
        "blocks + (whole > 0 ? number : block)",
        "blocks + block",
        f"{MMA_TESTS}::test_v3_matches_oracle_however_the_line_is_cut",
    ),
    "pieces past 32 weighed as the first 32": Fault(
        "tree_attention/v3_merge.cu",
        "if (start > 0) score = score_of(start + lane);",
        "",
        f"{MMA_TESTS}::test_v3_merges_any_number_of_pieces",
    ),
}


def plant(name: str) -> None:
    """Make every spec return its text with the fault in it."""
    fault = FAULTS[name]
    healthy = KernelSpec.text

    def text(self: KernelSpec) -> str:
        original = healthy(self)
        is_included = fault.source.endswith(".cuh") and f'"{fault.source}"' in original  # by its #line directive
        if self.source != fault.source and not is_included:
            return original
        assert original.count(fault.right) >= 1, f"{name}: the text to replace is gone"
        return original.replace(fault.right, fault.wrong)

    KernelSpec.text = text
