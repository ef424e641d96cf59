"""Every gate of the benchmark passes on right results and fails on wrong ones: NumPy stands for CuPy, and the emulator
for the GPU."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from ddtree_cupy import emulate
from ddtree_cupy.bench import attention, cases, others
from ddtree_cupy.explore import CostTable, MeasuredCost
from ddtree_cupy.tree_attention.versions import VERSIONS

PREPARED = {
    "top_candidates": lambda: others.prepare_top_candidates(1, 8),
    "best_first_tree": lambda: others.prepare_best_first(2, 12),
    "greedy_targets": lambda: others.prepare_targets("greedy_targets", 2, 3),
    "sample_targets": lambda: others.prepare_targets("sample_targets", 2, 3),
    "accept and commit_kv": lambda: others.prepare_commit(2),
    "tree_attention": lambda: attention.prepare_attention(2, 2, 5, 70, "v2_split_kv"),
}
FIRST_RESULT = {
    "top_candidates": (others, "top_candidates", lambda candidates: candidates.token_ids),
    "best_first_tree": (others, "best_first_tree", lambda tree: tree.parents),
    "greedy_targets": (others, "greedy_targets", lambda token_ids: token_ids),
    "sample_targets": (others, "sample_targets", lambda token_ids: token_ids),
    "accept and commit_kv": (others, "commit_kv", lambda kv: kv.context_lens),
    "tree_attention": (attention, "tree_attention", lambda result: result[0]),
}


@pytest.fixture(autouse=True)
def small_host_cases(monkeypatch):
    def normal(seed, shape, scale=1.0):
        values = scale * np.random.default_rng(seed).standard_normal(shape)
        return values.astype(cases.ml_dtypes.bfloat16)

    stand_in = SimpleNamespace(
        **{name: getattr(np, name) for name in ("asarray", "full", "empty", "empty_like")}, asnumpy=np.array
    )
    monkeypatch.setitem(sys.modules, "cupy", stand_in)
    for module in (others, attention):
        monkeypatch.setattr(module, "bfloat16_normal", normal)
        monkeypatch.setattr(module, "to_device", lambda container: container)
    monkeypatch.setattr(others, "VOCAB_SIZE", 3_000)
    monkeypatch.setattr(others, "DRAFT_LEN", 3)
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
        for index, case in enumerate(cases.all_cases("v2_split_kv", tree_sizes=True))
    ]
    environment = {"gpu": "none", "date": "2026-11-30", "command": "none"}
    table = CostTable.from_bench({"environment": environment, "rows": rows}, variant="v2_split_kv", dtype="bfloat16")
    for heads, context in ((8, 8_192), (64, 8_192), (8, 131_072), (64, 131_072)):
        cost = MeasuredCost(table, heads=heads, context=context)
        assert all(cost(budget) > 0 for budget in (0, 1, 7, 100, 256))


def test_curves_vary_one_size_at_a_time_and_cross_the_edges_of_tiles():
    sizes = set(cases.CURVE_SIZES)
    assert len(sizes) == len(cases.CURVE_SIZES)
    base = (1, 8, 64, 8_192), (1, 64, 64, 8_192)
    assert all(min(sum(a != b for a, b in zip(size, one, strict=True)) for one in base) <= 1 for size in sizes)
    for heads in (8, 64):
        assert {(1, heads, nodes, 8_192) for nodes in (63, 64, 65)} <= sizes
        assert {(1, heads, 64, context) for context in (128, 262_144, 8_128 - 1, 8_128 + 1)} <= sizes
    any_length = {name for name, version in VERSIONS.items() if version.TRAITS.any_length}
    assert {case.variant for case in cases.all_cases(curves=True)} == any_length
