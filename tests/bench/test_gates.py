"""Every gate of the benchmark passes on right results and fails on wrong ones: NumPy stands for CuPy, and the emulator
for the GPU."""

import sys
from functools import wraps
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from ddtree_cupy import emulate
from ddtree_cupy.bench import sizes, tree_accept, tree_attention, tree_build
from ddtree_cupy.bench.report import all_cases
from ddtree_cupy.explore import CostTable, MeasuredCost
from ddtree_cupy.tree_attention.versions import VERSIONS

ANY_LENGTH = [name for name, version in VERSIONS.items() if version.TRAITS.any_length]
PREPARED = {
    "top_candidates": lambda: tree_build.prepare_top_candidates(1, 8),
    "best_first_tree": lambda: tree_build.prepare_best_first(2, 12),
    "greedy_targets": lambda: tree_accept.prepare_targets("greedy_targets", 2, 3),
    "sample_targets": lambda: tree_accept.prepare_targets("sample_targets", 2, 3),
    "accept and commit_kv": lambda: tree_accept.prepare_commit(2),
    "commit_kv": lambda: tree_accept.prepare_layers(2, 3),
    "tree_attention": lambda: tree_attention.prepare_attention(2, 2, 5, 70, ANY_LENGTH[-1]),
}
FIRST_RESULT = {
    "top_candidates": (tree_build, "top_candidates", lambda candidates: candidates.token_ids),
    "best_first_tree": (tree_build, "best_first_tree", lambda tree: tree.parents),
    "greedy_targets": (tree_accept, "greedy_targets", lambda token_ids: token_ids),
    "sample_targets": (tree_accept, "sample_targets", lambda token_ids: token_ids),
    "accept and commit_kv": (tree_accept, "commit_kv", lambda kv: kv.context_lens),
    "commit_kv": (tree_accept, "commit_kv", lambda caches: caches[0].context_lens),
    "tree_attention": (tree_attention, "tree_attention", lambda result: result[0]),
}


@pytest.fixture(autouse=True)
def small_host_cases(monkeypatch):
    def normal(seed, shape, scale=1.0):
        values = scale * np.random.default_rng(seed).standard_normal(shape)
        return values.astype(ml_dtypes.bfloat16)

    stand_in = SimpleNamespace(
        **{name: getattr(np, name) for name in ("asarray", "full", "empty", "empty_like")}, asnumpy=np.array
    )
    monkeypatch.setitem(sys.modules, "cupy", stand_in)
    for module in (tree_build, tree_attention, tree_accept):
        monkeypatch.setattr(module, "bfloat16_normal", normal)
        monkeypatch.setattr(module, "to_device", lambda container: container)
    for module in (tree_build, tree_accept):
        monkeypatch.setattr(module, "VOCAB_SIZE", 3_000)
    monkeypatch.setattr(tree_build, "DRAFT_LEN", 3)
    with emulate.active():
        yield


@pytest.mark.emulate
@pytest.mark.parametrize("op", PREPARED)
def test_gate_passes_on_right_results(op):
    prepared = PREPARED[op]()
    prepared.run()
    prepared.gate()
    prepared.gate()


@pytest.mark.emulate
@pytest.mark.parametrize("op", PREPARED)
def test_gate_fails_on_one_wrong_element(op, monkeypatch):
    module, name, first = FIRST_RESULT[op]
    real = getattr(module, name)

    @wraps(real)
    def spoiled(*arguments, **options):
        result = real(*arguments, **options)
        first(result).flat[-1] += 1
        return result

    monkeypatch.setattr(module, name, spoiled)
    prepared = PREPARED[op]()
    prepared.run()
    with pytest.raises(AssertionError):
        prepared.gate()


def test_tree_sizes_fill_the_cost_table():
    """Rows named as these, once timed, answer every budget from 0 to 256 without extrapolation."""
    rows = [
        {"op": case.op, "name": case.name, "variant": case.variant, "event_us": 1.0 + index}
        for index, case in enumerate(all_cases(ANY_LENGTH[0], grid="tree_sizes"))
    ]
    environment = {"gpu": "none", "date": "2026-11-30", "command": "none"}
    table = CostTable.from_bench({"environment": environment, "rows": rows}, variant=ANY_LENGTH[0], dtype="bfloat16")
    for heads, context in ((8, 8_192), (64, 8_192), (8, 131_072), (64, 131_072)):
        cost = MeasuredCost(table, heads=heads, context=context)
        assert all(cost(budget) > 0 for budget in (0, 1, 7, 100, 256))


def test_curves_vary_one_size_at_a_time_and_cross_the_edges_of_tiles():
    curve_sizes = set(sizes.CURVE_SIZES)
    assert len(curve_sizes) == len(sizes.CURVE_SIZES)
    base = (1, 8, 64, 8_192), (1, 64, 64, 8_192)
    assert all(min(sum(a != b for a, b in zip(size, one, strict=True)) for one in base) <= 1 for size in curve_sizes)
    for heads in (8, 64):
        assert {(1, heads, nodes, 8_192) for nodes in (63, 64, 65)} <= curve_sizes
        assert {(1, heads, 64, context) for context in (128, 262_144, 8_128 - 1, 8_128 + 1)} <= curve_sizes
    assert {case.variant for case in all_cases(grid="curves")} == set(ANY_LENGTH)
