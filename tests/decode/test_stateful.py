"""Models that remember the text by themselves: the same rounds as with caches that the loop keeps, and lossless."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy import AcceptResult, DraftTree, commit_kv
from ddtree_cupy.decode import generate
from ddtree_cupy.decode.tiny import TinyDrafter, TinyTarget
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError
from ddtree_cupy.explore import record
from tests.explore.live import rounds_of
from tests.refusals import CupyArray
from tests.toys import NoisyDrafter, TableTarget, TextDrafter, TextTarget

FORMS = {
    "both stateful": (TextTarget, TextDrafter),
    "cached target, stateful drafter": (TableTarget, TextDrafter),
}


@pytest.mark.parametrize("form", FORMS)
@given(
    seed=st.integers(0, 2**16),
    budget=st.integers(0, 40),
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=9),
    count=st.integers(0, 12),
    noise=st.sampled_from([0.0, 1.0, 5.0]),
    temperature=st.sampled_from([0.0, 0.9]),
    max_children=st.sampled_from([None, 1, 2]),
)
def test_rounds_are_those_of_the_form_with_caches(form, seed, budget, prompt, count, noise, temperature, max_children):
    options = {"budget": budget, "max_new_tokens": count, "temperature": temperature, "max_children": max_children}
    cached = TableTarget(seed=seed)
    expected = generate(cached, NoisyDrafter(cached, noise), prompt, seed=seed, **options)
    make_target, make_drafter = FORMS[form]
    target = make_target(seed=seed)
    found = generate(target, make_drafter(target, noise), prompt, seed=seed, **options)
    assert rounds_of(found) == rounds_of(expected)
    if temperature == 0:
        text = list(prompt)
        for token in found.token_ids.tolist():
            assert token == np.argmax(target.logits_after(text))
            text.append(token)


def test_models_are_told_the_whole_text_once_and_in_order():
    target = TextTarget(seed=2)
    drafter = TextDrafter(target)
    prompt = np.array([3, 1, 4])
    found = generate(target, drafter, prompt, budget=6, max_new_tokens=20)
    text = [3, 1, 4, *found.token_ids.tolist()]
    (_, start), *commits = target.told
    assert (start, sum((tokens for _, tokens in commits), start[:-1])) == ([3, 1, 4], text[:-1])
    (_, start), *commits = drafter.told
    assert (start, sum((tokens for _, tokens in commits), start)) == ([3, 1, 4], text)
    assert prompt.tolist() == [3, 1, 4]
    assert [r.context_len for r in found.rounds] == [2, *(2 + np.cumsum([len(r.token_ids) for r in found.rounds]))][:-1]
    again = generate(target, drafter, prompt, budget=6, max_new_tokens=20)  # the same objects, another text
    assert rounds_of(again) == rounds_of(found)


class OwnTarget:
    """The bundled target, its caches its own business."""

    def __init__(self, model):
        self.model, self.vocab_size = model, model.vocab_size

    def start(self, prompt_ids):
        self.kv = self.model.allocate(400, 400)
        self.features = None
        if prompt_ids.size > 1:
            self.verify(DraftTree.from_parents(prompt_ids[:-1], np.arange(-1, prompt_ids.size - 2)))
            self.commit(np.arange(prompt_ids.size - 1, dtype=np.int32))

    def verify(self, tree):
        logits, self.of_nodes = self.model.forward(tree, self.kv)
        return logits

    def commit(self, accepted):
        path = np.full(len(self.of_nodes), -1, np.int32)  # a result is as long as its tree
        path[: len(accepted)] = accepted
        self.kv = commit_kv(self.kv, AcceptResult(path, np.int32(len(accepted) - 1), np.int32(-1)))
        self.features = self.of_nodes[accepted]


class OwnDrafter:
    """The bundled drafter, which fetches the features from the target it belongs to."""

    def __init__(self, model, target):
        self.model, self.target, self.draft_len = model, target, model.draft_len

    def start(self, prompt_ids):
        self.state, self.root = self.model.start(), int(prompt_ids[-1])
        self._observe()

    def propose(self):
        return self.model.propose(self.state, self.root)

    def commit(self, token_ids):
        self.root = int(token_ids[-1])
        self._observe()

    def _observe(self):
        if self.target.features is not None:
            self.state = self.model.observe(self.state, self.target.features)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_bundled_pair_in_the_stateful_form_gives_the_same_rounds(temperature):
    models = TinyTarget.load(dtype=np.float64), TinyDrafter.load(dtype=np.float64)
    target = OwnTarget(models[0])
    prompt = np.frombuffer(b"def __init__(self, name):\n        self.", np.uint8)
    options = {"budget": 24, "max_new_tokens": 40, "temperature": temperature}
    expected = generate(*models, prompt, **options)
    found = generate(target, OwnDrafter(models[1], target), prompt, **options)
    assert rounds_of(found) == rounds_of(expected)
    plain = generate(target, None, prompt, **{**options, "budget": 0})
    assert plain.token_ids.tolist() == found.token_ids.tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_record_takes_both_forms(temperature):
    options = {"num_positions": 6, "max_budget": 12, "width": 3, "temperature": temperature, "progress": False}
    prompts = [[1], [2, 3, 0]]
    cached, target = TableTarget(seed=4), TextTarget(seed=4)
    expected = record(cached, NoisyDrafter(cached), prompts, **options)
    found = record(target, TextDrafter(target), prompts, **options)
    for name in ("root_token_ids", "continuations", "context_lens", "row_widths"):
        assert np.array_equal(getattr(found, name), getattr(expected, name))
    assert np.array_equal(found.candidates.token_ids, expected.candidates.token_ids)
    assert np.array_equal(found.candidates.logits, expected.candidates.logits)


def run(loop, target, drafter):
    if loop == "generate":
        return generate(target, drafter, [1, 2], budget=6, max_new_tokens=30)
    return record(target, drafter, [[1, 2]], num_positions=20, max_budget=6, progress=False)


ODD_ANSWERS = [
    ("verify", lambda x: x[:-1], ShapeError, r"is \(\d, 5\), expected \(num_nodes, vocab_size\).* from `tree`"),
    ("verify", lambda x: x[:, :4], ShapeError, r"is \(\d, 4\), expected .*vocab_size=5 from `target`"),
    ("verify", lambda x: x[None], ShapeError, r"is \(1, "),
    ("verify", lambda x: (x, x), DTypeError, "is tuple, expected a NumPy or CuPy array"),
    ("verify", lambda x: x.tolist(), DTypeError, r"is list, .*numpy.asarray\(target.verify\(...\)\) makes one"),
    ("verify", lambda x: None, DTypeError, "is NoneType"),
    ("verify", lambda x: x.astype(int), DTypeError, "has dtype int64, expected float32"),
    ("verify", lambda x: CupyArray(), DTypeError, "is a CuPy array, expected a NumPy array.*cupy.asnumpy"),
    ("propose", lambda x: x[:, :4], ShapeError, r"is \(4, 4\), expected \(draft_len, vocab_size\)"),
    ("propose", lambda x: np.concatenate([x, x]), ShapeError, r"is \(8, 5\), expected"),
    ("propose", lambda x: None, DTypeError, "is NoneType"),
    ("propose", lambda x: CupyArray(), DTypeError, "is a CuPy array, expected a NumPy array.*cupy.asnumpy"),
]


@pytest.mark.parametrize("loop", ["generate", "record"])
@pytest.mark.parametrize(("part", "change", "error", "words"), ODD_ANSWERS)
def test_answers_that_do_not_fit_are_rejected_before_they_are_used(loop, part, change, error, words):
    target = TextTarget()
    drafter = TextDrafter(target)
    model = target if part == "verify" else drafter
    answer = getattr(model, part)
    setattr(model, part, lambda *arguments: change(answer(*arguments)))
    role = "target" if part == "verify" else "drafter"
    with pytest.raises(error, match=rf"^{loop}: `{role}.{part}\(\.\.\.\)` {words}"):
        run(loop, target, drafter)
    assert [what for what, _ in target.told] == [what for what, _ in drafter.told] == ["start"]  # nothing was committed


@pytest.mark.parametrize("loop", ["generate", "record"])
@pytest.mark.parametrize("name", ["vocab_size", "start", "commit", "draft_len", "propose"])
def test_models_that_lack_a_part_are_rejected(loop, name):
    own = TextTarget()
    models = []
    for role, parts in {own: ("vocab_size", "start", "verify", "commit")}.items():
        models.append(type("Model", (), {part: getattr(role, part) for part in parts if part != name})())
    drafter = TextDrafter(own)
    parts = [part for part in ("draft_len", "start", "propose", "commit") if part != name]
    models.append(type("Model", (), {part: getattr(drafter, part) for part in parts})())
    missing = rf"^{loop}: `(target|drafter)` is Model without `\w+`, expected what .* or decode.Stateful"
    with pytest.raises(DTypeError, match=missing):
        run(loop, *models)


@pytest.mark.parametrize("loop", ["generate", "record"])
def test_a_drafter_of_features_needs_a_target_that_has_some(loop):
    target = TextTarget()
    with pytest.raises(DTypeError, match=rf"^{loop}: `drafter` is NoisyDrafter, which observes the features of a"):
        run(loop, target, NoisyDrafter(target))
    assert target.passes == 0
    run(loop, target, TextDrafter(target))  # the form that the message names


@pytest.mark.parametrize("count", [2**31, 2**70])
def test_lengths_beyond_int32_are_rejected_before_a_text_begins(count):
    target = TextTarget()
    with pytest.raises(ArgumentError, match=r"^generate: .*`max_new_tokens`.* ask for \d+ positions"):
        generate(target, TextDrafter(target), [1], budget=8, max_new_tokens=count)
    assert not hasattr(target, "told")
