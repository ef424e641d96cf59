"""Models that answer in another form than their protocols: a named error before the answer is used, on every loop."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import PagedKV, emulate
from ddtree_cupy.containers.topology import fillable_nodes
from ddtree_cupy.decode import generate, generate_rounds
from ddtree_cupy.decode.tiny import TinyDrafter, TinyTarget
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError
from ddtree_cupy.explore import BestFirst, record, score
from tests.explore.live import live_rounds, replayed_rounds
from tests.toys import NoisyDrafter, TableTarget


class ChangedDrafter(NoisyDrafter):
    """A drafter whose logits pass through a function, from its call number `first` on."""

    def __init__(self, target, change, first=1, noise=1.0):
        super().__init__(target, noise)
        self.change, self.first, self.calls = change, first, 0

    def propose(self, state, root_token_id):
        logits = super().propose(state, root_token_id)
        self.calls += 1
        return self.change(logits) if self.calls >= self.first else logits


class ChangedTarget(TableTarget):
    """A target whose caches, or whose answers from its third pass on, pass through a function."""

    def __init__(self, allocate=lambda kv: [kv], forward=lambda logits, features: (logits, features)):
        super().__init__()
        self.change_allocate, self.change_forward, self.seen = allocate, forward, []

    def allocate(self, max_context, max_nodes):
        return self.change_allocate(super().allocate(max_context, max_nodes)[0])

    def forward(self, tree, kv):
        self.seen.append(kv)
        logits, features = super().forward(tree, kv)
        return self.change_forward(np.nan_to_num(logits), features) if self.passes > 2 else (logits, features)


def run(loop, target, drafter):
    if loop == "generate":
        return generate(target, drafter, [1, 2], budget=6, max_new_tokens=30)
    return record(target, drafter, [[1, 2]], num_positions=20, max_budget=6, progress=False)


LOOPS = ["generate", "record"]

ODD_ANSWERS = {
    "propose": [
        (lambda x: np.zeros((4, 300)), ShapeError, r"is \(4, 300\), expected .*vocab_size=5 from `target`"),
        (lambda x: x[:, :4], ShapeError, r"is \(4, 4\), expected \(draft_len, vocab_size\)"),
        (lambda x: x[None], ShapeError, r"is \(1, 4, 5\), expected \(draft_len, vocab_size\)"),
        (lambda x: x[0], ShapeError, r"is \(5,\)"),
        (lambda x: np.concatenate([x, x]), ShapeError, r"is \(8, 5\), expected"),
        (lambda x: x.tolist(), DTypeError, "is list, expected a NumPy or CuPy array"),
        (lambda x: None, DTypeError, "is NoneType, expected an array"),
        (lambda x: x.astype(np.int64), DTypeError, "has dtype int64, expected float32"),
        (lambda x: x.astype(complex), DTypeError, "has dtype complex128"),
        (lambda x: np.ma.masked_array(x), DTypeError, "is a masked array"),
        (lambda x: x.view(np.matrix), DTypeError, r"is a numpy\.matrix"),
    ],
    "forward": [
        (lambda x, f: (np.zeros((len(x), 300)), f), ShapeError, r"\(...\)\[0\]` is .*vocab_size=5 from `target`"),
        (lambda x, f: (x[:-1], f), ShapeError, r"\(...\)\[0\]` is .*, expected .*from `tree`"),
        (lambda x, f: (x[None], f), ShapeError, r"\(...\)\[0\]` is \(1, "),
        (lambda x, f: (x.tolist(), f), DTypeError, r"\(...\)\[0\]` is list"),
        (lambda x, f: (x.astype(int), f), DTypeError, r"\(...\)\[0\]` has dtype int64"),
        (lambda x, f: (np.ma.masked_array(x), f), DTypeError, r"\(...\)\[0\]` is a masked array"),
        (lambda x, f: (x, f[:-1]), ShapeError, r"\(...\)\[1\]` is "),
        (lambda x, f: (x, f[:, 0]), ShapeError, r"\(...\)\[1\]` is "),
        (lambda x, f: (x, None), DTypeError, r"\(...\)\[1\]` is None"),
        (lambda x, f: (x, f.tolist()), DTypeError, r"\(...\)\[1\]` is list"),
        (lambda x, f: x, DTypeError, r"` returned ndarray, expected \(logits, features\)"),
        (lambda x, f: (x, f, f), DTypeError, "` returned tuple"),
    ],
    "allocate": [
        (lambda kv: kv, DTypeError, "returned PagedKV, expected a sequence of PagedKV"),
        (lambda kv: (), DTypeError, "returned tuple, expected a sequence"),
        (lambda kv: [kv.ckv], DTypeError, "returned list, expected a sequence"),
        (lambda kv: [kv.with_batch()], ShapeError, "holds a batch, expected an empty unbatched cache"),
        (lambda kv: [replace(kv, page_table=kv.page_table[:2])], ShapeError, "holds 6 positions, 0 of them in use"),
        (lambda kv: [replace(kv, context_lens=np.array(2, np.int32))], ShapeError, "2 of them in use"),
    ],
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("part", "change", "error", "words"), [(part, *row) for part, rows in ODD_ANSWERS.items() for row in rows]
)
def test_answers_that_do_not_fit_are_rejected_before_they_are_used(loop, part, change, error, words):
    target = ChangedTarget() if part == "propose" else ChangedTarget(**{part: change})
    drafter = ChangedDrafter(target, change, first=2) if part == "propose" else NoisyDrafter(target)
    begin = {"propose": r"drafter.propose\(\.\.\.\)` ", "forward": "target.forward", "allocate": "target.allocate.*"}
    with pytest.raises(error, match=rf"^{loop}: `{begin[part]}{words}"):
        run(loop, target, drafter)
    assert target.passes == {"propose": 2, "forward": 3, "allocate": 0}[part]
    if part == "forward":  # nothing was committed of the pass that did not fit
        before, after = target.seen[1:]
        assert int(after[0].context_lens) > int(before[0].context_lens)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", ["vocab_size", "allocate", "forward", "draft_len", "start", "observe", "propose"])
def test_models_that_lack_a_part_are_rejected(loop, name):
    target = TableTarget()
    parts = {part: getattr(target, part) for part in ("vocab_size", "allocate", "forward")}
    drafts = {part: getattr(NoisyDrafter(target), part) for part in ("draft_len", "start", "observe", "propose")}
    models = [type("Model", (), {k: v for k, v in has.items() if k != name})() for has in (parts, drafts)]
    with pytest.raises(DTypeError, match=rf"^{loop}: `(target|drafter)` is Model without `{name}`, expected what"):
        run(loop, *models)
    for odd in (None, "gpt"):
        with pytest.raises(DTypeError, match=r"`target` is .* without `vocab_size`"):
            run(loop, odd, NoisyDrafter(target))


def test_record_needs_a_drafter():
    with pytest.raises(DTypeError, match=r"^record: `drafter` is NoneType without `draft_len`, expected what"):
        run("record", TableTarget(), None)


class Float32Target(TableTarget):
    """A target that kernels can judge."""

    def logits_after(self, text):
        return super().logits_after(text).astype(np.float32)

    def forward(self, tree, kv):
        logits, features = super().forward(tree, kv)
        return logits.astype(np.float32), features


def bad_row_drafter(target, row, value):
    """Return a drafter with `value` in one row of every proposal."""

    def change(logits):
        logits[row, 1] = value
        return logits.astype(np.float32)

    return ChangedDrafter(target, change, noise=0.0)


@pytest.mark.emulate
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("row", [0, 2])
def test_a_bad_draft_row_ends_the_tree_above_it(row, value):
    target = Float32Target(seed=2)
    arguments = {"budget": 8, "max_new_tokens": 12}
    plain = generate(target, None, [0], budget=0, max_new_tokens=12)
    found = generate(target, bad_row_drafter(target, row, value), [0], **arguments)
    rounds = [r for r in found.rounds if len(r.tree.token_ids) > 1 or row == 0]
    assert found.token_ids.tolist() == plain.token_ids.tolist()
    assert all(int(r.tree.depths.max()) <= row for r in found.rounds)
    assert [int(r.tree.status) for r in rounds[:-1]] == [1] * (len(rounds) - 1)
    with emulate.active():
        emulated = generate(target, bad_row_drafter(target, row, value), [0], **arguments)
    assert [r.token_ids for r in emulated.rounds] == [r.token_ids for r in found.rounds]
    assert [int(r.tree.status) for r in emulated.rounds] == [int(r.tree.status) for r in found.rounds]


def test_a_bad_draft_row_is_recorded_and_replayed_as_it_is_live():
    target = Float32Target(seed=3)
    drafter = bad_row_drafter(target, 2, np.nan)
    traces = record(target, drafter, [[1, 2]], num_positions=12, max_budget=8, progress=False)
    assert np.isnan(traces.candidates.lse[:, 2]).all()
    assert (traces.candidates.token_ids[:, 2] == -1).all()
    live = live_rounds(target, drafter, traces, 0, [1, 2], budget=8)
    assert replayed_rounds(traces, 0, BestFirst(8)) == live
    assert score(traces, BestFirst(8)).num_accepted.max() <= 2


@pytest.mark.parametrize("loop", LOOPS)
def test_a_target_without_a_token_is_rejected(loop):
    target = ChangedTarget(forward=lambda x, f: (np.full_like(x, -np.inf), f))
    with pytest.raises(ArgumentError, match=rf"^{loop}: the target's logits after \d+ tokens give no token"):
        run(loop, target, NoisyDrafter(target))
    assert target.passes == 3


@pytest.mark.emulate
def test_bad_target_rows_that_the_walk_never_reaches_change_nothing():
    class Target(Float32Target):
        def forward(self, tree, kv):
            logits, features = super().forward(tree, kv)
            reached, node = [], 0
            while node >= 0:
                reached.append(node)
                children = np.flatnonzero((tree.parents == node) & (tree.token_ids == logits[node].argmax()))
                node = int(children[0]) if children.size else -1
            logits[np.setdiff1d(np.arange(len(logits)), reached)] = np.nan
            return logits, features

    plain = generate(Float32Target(), None, [0], budget=0, max_new_tokens=12)
    target = Target()
    found = generate(target, NoisyDrafter(target), [0], budget=8, max_new_tokens=12)
    assert found.token_ids.tolist() == plain.token_ids.tolist()
    with emulate.active():
        emulated = generate(target, bad_row_drafter(target, 3, -np.inf), [0], budget=8, max_new_tokens=12)
    assert emulated.token_ids.tolist() == plain.token_ids.tolist()


@given(budget=st.integers(0, 10**13), vocab_size=st.integers(1, 6), depth=st.integers(0, 5))
def test_fillable_nodes_are_those_of_the_full_tree(budget, vocab_size, depth):
    assert fillable_nodes(budget, depth, vocab_size) == min(budget, sum(vocab_size**d for d in range(1, depth + 1)))


def test_a_chain_takes_any_budget():
    target, drafter = TinyTarget.load(), TinyDrafter.load()
    found, expected = (
        generate(target, drafter, [1], budget=budget, max_new_tokens=9, max_children=1) for budget in (10**9, 15)
    )
    assert [r.token_ids for r in found.rounds] == [r.token_ids for r in expected.rounds]


def test_a_budget_beyond_the_full_tree_costs_no_more():
    asked = []

    class Target(TableTarget):
        def allocate(self, max_context, max_nodes):
            asked.append(max_nodes)
            return super().allocate(max_context, max_nodes)

    target = Target(vocab_size=3)
    small = generate(target, NoisyDrafter(target), [1], budget=120, max_new_tokens=9)
    large = generate(target, NoisyDrafter(target), [1], budget=10**12, max_new_tokens=9)
    assert asked == [121, 121]  # 3 + 9 + 27 + 81 nodes and the root
    assert [r.token_ids for r in large.rounds] == [r.token_ids for r in small.rounds]
    assert [int(r.tree.num_nodes) for r in large.rounds] == [int(r.tree.num_nodes) for r in small.rounds]


class OnePageTarget(TableTarget):
    """A target whose caches say that they are long; only their first page exists."""

    def allocate(self, max_context, max_nodes):
        (kv,) = super().allocate(10**5, 0)
        pages = -(-(max_context + max_nodes) // 10**5)
        rows = [pool.reshape(-1, 1)[None, : 10**5] for pool in (kv.ckv, kv.kpe)]
        return (PagedKV(*rows, np.zeros(pages, np.int32), kv.context_lens),)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_length_that_is_never_reached_costs_nothing(temperature):
    """The text ends at its stop token; the draws are made as it grows, and are the same."""
    arguments = {"budget": 8, "temperature": temperature}
    target = OnePageTarget(seed=1)
    whole = generate(target, NoisyDrafter(target), [0], max_new_tokens=30, **arguments).token_ids.tolist()
    stop = whole[7]
    tracemalloc.start()
    arguments |= {"max_new_tokens": 20_000_000, "stop_token_ids": [stop]}
    found = generate(target, NoisyDrafter(target), [0], **arguments)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.token_ids.tolist() == whole[: whole.index(stop) + 1]
    assert peak < 20_000_000


@pytest.mark.parametrize("count", [10**12, 2**31, 2**70])
def test_lengths_beyond_int32_are_rejected_before_anything_is_made(count):
    target, drafter = TinyTarget.load(), TinyDrafter.load()
    with pytest.raises(ArgumentError, match=r"^generate: .*`max_new_tokens`.* ask for \d+ positions of cache"):
        generate(target, drafter, [1], budget=8, max_new_tokens=count)
    with pytest.raises(ArgumentError, match=rf"^generate: `budget` is {count}, expected at most 65534"):
        generate(target, drafter, [1], budget=count, max_new_tokens=50)
    with pytest.raises(ArgumentError, match=rf"^record: `max_budget` is {count}, expected at most 65534"):
        record(target, drafter, [[1]], num_positions=1, max_budget=count, progress=False)
    with pytest.raises(ArgumentError, match=r"^record: .*`num_positions` ask for"):
        record(target, drafter, [[1]], num_positions=count, progress=False)


@pytest.mark.parametrize("loop", LOOPS)
def test_caches_without_memory_are_rejected_in_words(loop):
    def allocate(kv):
        raise MemoryError

    with pytest.raises(ArgumentError, match=rf"^{loop}: .* for which `target.allocate` has no memory"):
        run(loop, ChangedTarget(allocate), NoisyDrafter(TableTarget()))


def test_generate_rounds_checks_before_the_first_round():
    with pytest.raises(DTypeError, match="`drafter` is str without `draft_len`"):
        generate_rounds(TableTarget(), "drafter", [1], budget=1, max_new_tokens=1)
