"""Faults to plant into the kernels, to see that the suite catches them: a test of the tests.

Each is one replacement in one file of `cuda_src`. `conftest.py` plants the one that PLANTED_FAULT names.
"""

from dataclasses import dataclass

from ddtree_cupy.kernels import source


@dataclass(frozen=True)
class Fault:
    """Replace `right` by `wrong` in `source`, one file or several; at least one of the tests `caught_by` must fail."""

    source: str | tuple[str, ...]
    right: str
    wrong: str
    caught_by: str


V1, V2, V3 = (f"tree_attention/{name}" for name in ("v1_three_phase.cu", "v2_split_kv.cu", "v3_mma.cu"))
SCORES, VALUES = "tree_attention/v3_scores.cuh", "tree_attention/v3_values.cuh"
ACCUMULATORS = "tree_attention/v3_accumulators.cuh"
WARP, MERGE = "common/warp.cuh", "tree_attention/merge_states.cu"
WRITE, POPS = "tree_attention/write_kv.cu", "tree_build/pops.cuh"
ROUNDS, POOL = "tree_build/v2_rounds.cuh", "tree_build/v2_pool.cuh"
TESTS = "tests/tree_attention/test_kernels.py"
STATES = "tests/tree_attention/test_kernels_states.py"
SCHEDULE = "tests/tree_attention/test_schedule.py"
BUILD = "tests/tree_build/test_kernels_best_first.py"
BUILD_ROUNDS = "tests/tree_build/test_kernels_rounds.py"
HIDDEN = "tests/tree_attention/test_hidden_nodes.py"
MMA_TESTS = "tests/tree_attention/test_kernels_mma.py"
WGMMA_TESTS = "tests/tree_attention/test_kernels_wgmma.py"
COMMIT, LAYERS = "tree_accept/commit_kv.cu", "tests/tree_accept/test_kernels_commit_layers.py"

FAULTS = {
    "missing barrier": Fault(
        V2,
        "    load_tile<T, C, R>(tile, where, cache.ckv, cache.kpe, vectors != 0);\n    __syncthreads();\n",
        "    load_tile<T, C, R>(tile, where, cache.ckv, cache.kpe, vectors != 0);\n",
        f"{TESTS}::test_v2_matches_oracle_around_slice_edges",
    ),
    "off-by-one store": Fault(
        V1,
        "out[row * C + c] = from_float<T>(value * inverse);",
        "out[row * C + c + 1] = from_float<T>(value * inverse);",
        f"{TESTS}::test_tree_attention_never_writes_outside_its_results",
    ),
    "int32 offset": Fault(
        "common/paging.cuh",
        "return page(position) * page_stride + (position % page_size) * slot_stride;",
        "return (int)(page(position) * page_stride) + (position % page_size) * slot_stride;",
        f"{TESTS}::test_emulated_tree_attention_addresses_pools_beyond_32_bits",
    ),
    "transposed mask": Fault(
        V1,
        "is_visible(bits, position - range.context_len)",
        "is_visible(queries.bits(request, max(position - range.context_len, 0)), "
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
        POPS,
        "__syncwarp();",
        "",
        BUILD,
    ),
    "one tie too many": Fault(
        "common/select.cuh",
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
        VALUES,
        "copy_async_wait<STAGES - 4>();",
        "copy_async_wait<STAGES - 1>();",
        f"{MMA_TESTS}::test_v3_matches_oracle_around_tile_and_fold_edges",
    ),
    "lost fold": Fault(
        VALUES,
        "if (Layout::is_long() && Layout::folds(tile, piece.plan.first_tile, piece.plan.last_tile)) fold(tile);",
        "",
        f"{MMA_TESTS}::test_v3_matches_oracle_around_tile_and_fold_edges",
    ),
    "folded sums that do not shrink": Fault(
        ACCUMULATORS,
        "fmaf(*at, shrink, value[m][n][i])",
        "fmaf(*at, 1.0f, value[m][n][i])",
        f"{MMA_TESTS}::test_v3_shrinks_what_was_folded_when_maxima_rise_later",
    ),
    "weights that overflow": Fault(
        "tree_attention/v3_layout.cuh",
        "STALE_BY = 8.0f",
        "STALE_BY = 100.0f",
        f"{MMA_TESTS}::test_v3_rescales_when_maxima_rise",
    ),
    "missing pair barrier": Fault(
        SCORES,
        "    named_barrier(PAIR + pair(), 64);\n",
        "",
        f"{MMA_TESTS}::test_v3_roles_never_overtake_each_other",
    ),
    "one barrier for even and odd tiles": Fault(
        (SCORES, VALUES),
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
    "one float32 sum over all keys": Fault(
        V1,
        "KEYS_PER_SUM = 1024",
        "KEYS_PER_SUM = 1 << 30",
        f"{TESTS}::test_tree_attention_matches_oracle_for_long_sums_of_one_sign",
    ),
    "results truncated to bfloat16": Fault(
        "common/dtype.cuh",
        "__float2bfloat16_rn(x)",
        "__float2bfloat16_rn(__int_as_float(__float_as_int(x) & 0xffff0000))",
        f"{TESTS}::test_tree_attention_matches_oracle_at_deepseek_sizes",
    ),
    "ln 2 wrong in its seventh digit": Fault(
        "common/softmax_state.cuh",
        "LN_2 = 0.6931471805599453f",
        "LN_2 = 0.6931475f",
        f"{MMA_TESTS}::test_v3_matches_oracle_for_more_than_100_rows",
    ),
    "pieces past 32 weighed as the first 32": Fault(
        "tree_attention/v3_merge.cu",
        "if (start > 0) score = score_of(start + lane);",
        "",
        f"{MMA_TESTS}::test_v3_merges_any_number_of_pieces",
    ),
    "scratch of a reduction used again too early": Fault(
        WARP,
        "combine(result, scratch[other]);\n  __syncthreads();\n",
        "combine(result, scratch[other]);\n",
        f"{TESTS}::test_tree_attention_matches_oracle",
    ),
    "scratch of a later request at the wrong place": Fault(
        V2,
        "request * region + (long long)slice",
        "request * (region - 1) + (long long)slice",
        f"{TESTS}::test_tree_attention_matches_oracle_when_a_later_request_is_long",
    ),
    "int32 offset of a query": Fault(
        "common/inputs.cuh",
        "q_nope + request * nope_request_stride + node * nope_node_stride +",
        "q_nope + request * nope_request_stride + (int)(node * nope_node_stride) +",
        f"{TESTS}::test_tree_attention_addresses_queries_beyond_32_bits",
    ),
    "folds counted from the first key": Fault(
        ACCUMULATORS,
        "tile + 1 - piece.plan.first_tile == Layout::FOLD_TILES",
        "tile + 1 == Layout::FOLD_TILES",
        f"{MMA_TESTS}::test_v3_folds_whatever_the_largest_context_is",
    ),
    "line of ends in 32 bits": Fault(
        "tree_attention/v3_schedule.cuh",
        "return ends * part / blocks;",
        "return (int)ends * part / blocks;",
        f"{SCHEDULE}::test_blocks_share_the_line_of_ends_evenly",
    ),
    "slices of any number of tiles": Fault(
        "tree_attention/v2_slices.cuh",
        "max(max(min(wanted, worth), least), 1)",
        "max(min(wanted, worth), 1)",
        f"{SCHEDULE}::test_slices_of_v2_cover_the_keys_in_sums_of_bounded_length",
    ),
    "ties within a bucket in the wrong order": Fault(
        POPS,
        "gained == best_score && comes_first(nodes, added, best_node)",
        "gained == best_score && comes_first(nodes, best_node, added)",
        f"{BUILD}::test_best_first_tree_matches_reference_when_more_than_a_warp_ties",
    ),
    "ties within a lane in the wrong order": Fault(
        POPS,
        "other == score && comes_first(nodes, i, node)",
        "other == score && comes_first(nodes, node, i)",
        f"{BUILD}::test_best_first_tree_matches_reference_when_more_than_a_warp_ties",
    ),
    "a threshold above its bin": Fault(
        ROUNDS,
        "(bin - 0.125) / BINS",
        "(bin + 1.5) / BINS",
        f"{BUILD_ROUNDS}::test_best_first_tree_matches_reference_on_probabilities",
    ),
    "histogram read while it is written": Fault(
        ROUNDS,
        "    if (!is_first) last_bin = histogram.bin_of_last(wanted);\n    __syncthreads();\n",
        "    if (!is_first) last_bin = histogram.bin_of_last(wanted);\n",
        BUILD_ROUNDS,
    ),
    "ties within a bin in the wrong order": Fault(
        POOL,
        "return rank_a < rank_b;",
        "return rank_a > rank_b;",
        f"{BUILD_ROUNDS}::test_best_first_tree_matches_reference_on_drawn_rows",
    ),
    "rows whose scores rise taken for falling ones": Fault(
        ROUNDS,
        "if (!(here <= before)) atomicOr",
        "if (here > before + 100.0) atomicOr",
        f"{BUILD_ROUNDS}::test_best_first_tree_pops_where_scores_do_not_fall",
    ),
    "state of neighbouring requests that overlaps": Fault(
        "tree_build/v1_best_first.cu",
        "state + request * bucket_size * WARP_SIZE * 4",
        "state + request * bucket_size * WARP_SIZE * 3",
        f"{BUILD}::test_best_first_tree_keeps_the_state_of_each_request_apart",
    ),
    "lse written before all lanes have read it": Fault(
        MERGE,
        "  __syncwarp();  //",
        "  //",
        "tests/tree_attention/test_merge_states.py::test_merge_states_is_identical_with_out_over_its_own_input",
    ),
    "rows of one kind at the stride of the other": Fault(
        WRITE,
        "kpe_rows + request * kpe_request_stride",
        "kpe_rows + request * ckv_request_stride",
        f"{STATES}::test_write_kv_is_identical_to_reference_with_unlike_strides",
    ),
    "hidden keys that hold NaN weighed by 0": Fault(
        V2,
        "range.first + start + TILE > range.context_len",
        "false",
        HIDDEN,
    ),
    "hidden keys that hold NaN not noted": Fault(
        "tree_attention/v3_softmax.cuh",
        "is_non_finite |= !(fabsf(product) < POSITIVE_INFINITY);",
        "",
        HIDDEN,
    ),
    "weights awaited in the wrong phase": Fault(
        "tree_attention/v4_values.cuh",
        "barrier_wait(base + WEIGHTS + 8 * buffer, count >> 1 & 1);",
        "barrier_wait(base + WEIGHTS + 8 * buffer, (count >> 1 & 1) ^ 1);",
        f"{WGMMA_TESTS}::test_v4_roles_never_overtake_each_other",
    ),
    "stage loaded while warps still read it": Fault(
        "tree_attention/v4_values.cuh",
        "      named_barrier(OF_VALUES + half, WARPGROUP);  // all warps have read this half of the stage\n",
        "",
        f"{WGMMA_TESTS}::test_v4_roles_never_overtake_each_other",
    ),
    "weights written before they were read": Fault(
        "tree_attention/v4_scores.cuh",
        "          barrier_wait(base + WEIGHTS_READ + 8 * (count & 1), count >> 1 & 1 ^ 1);\n",
        "",
        f"{WGMMA_TESTS}::test_v4_roles_never_overtake_each_other",
    ),
    "sums of a pair weighed alike": Fault(
        "tree_attention/v4_pair.cuh",
        "others[upper] = of_other * inverse;",
        "others[upper] = of_mine * inverse;",
        f"{WGMMA_TESTS}::test_v4_matches_oracle_for_every_number_of_parts",
    ),
    "folded sums not relative to the new maximum": Fault(
        "tree_attention/v4_values.cuh",
        "          Carry(scratch.carries).shrink(fabsf(lower), fabsf(upper));\n",
        "          ;\n",
        f"{WGMMA_TESTS}::test_v4_shrinks_what_was_folded_when_maxima_rise_later",
    ),
    "next piece found too early": Fault(
        "tree_attention/v4_values.cuh",
        "      barrier_wait(base + QUERIES_READ, number & 1);\n      find_piece",
        "      find_piece",
        f"{WGMMA_TESTS}::test_v4_matches_oracle_for_more_requests_than_lanes",
    ),
    "hidden keys that hold NaN weighed on tensor cores": Fault(
        "tree_attention/v4_softmax.cuh",
        "seen & bit ? 0 : HIDES",
        "0",
        HIDDEN,
    ),
    "rows written back before all are staged": Fault(
        COMMIT,
        "while (!__syncthreads_or(threadIdx.x == 0 && atomicAdd(&counters[STAGED], 0u) == stages)) {",
        "while (false) {",
        f"{LAYERS}::test_commit_kv_writes_back_when_all_is_staged",
    ),
    "length advanced before all have read it": Fault(
        COMMIT,
        "read_before == readers - 1",
        "read_before == 0",
        f"{LAYERS}::test_bound_commits_move_on_in_place",
    ),
    "rows of one word for all": Fault(
        COMMIT,
        "places.moving[first / 32] >> first % 32",
        "places.moving[0] >> first % 32",
        f"{LAYERS}::test_commit_kv_matches_reference_for_layers_of_any_layout",
    ),
    "one length for all pieces": Fault(
        COMMIT,
        "lengths.old_lens[piece.length]",
        "lengths.old_lens[0]",
        f"{LAYERS}::test_commit_kv_matches_reference_for_layers_of_unlike_lengths",
    ),
}


def plant(name: str) -> None:
    """Make every text that includes the file, or is it, have the fault in it."""
    fault = FAULTS[name]
    files = (fault.source,) if isinstance(fault.source, str) else fault.source
    healthy = source._read

    def read(file: str, search: tuple) -> str | None:
        text = healthy(file, search)
        if file not in files or text is None:
            return text
        assert text.count(fault.right) >= 1, f"{name}: the text to replace is gone"
        return text.replace(fault.right, fault.wrong)

    source._read = read
