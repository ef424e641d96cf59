"""Functions from tokens to logits as models: an n-gram of ten lines, decoded, recorded and refused."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddtree_cupy.decode import CallableDrafter, CallableTarget, from_callable, generate
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError
from ddtree_cupy.explore import BestFirst, record, replay
from tests.explore.live import live_rounds, replayed_rounds
from tests.toys import TableTarget

CORPUS = np.frombuffer(b"abracadabra, said the bard, and the cat sat on the mat; abra, cadabra!" * 3, np.uint8)


class NGram:
    """Counts of what followed the last n - 1 tokens of a corpus, one more for every token."""

    def __init__(self, corpus, n, vocab_size=128):
        self.n, self.vocab_size, self.counts = n, vocab_size, {}
        for end in range(n - 1, len(corpus)):
            row = self.counts.setdefault(tuple(corpus[end - n + 1 : end].tolist()), np.ones(vocab_size))
            row[corpus[end]] += 20.0

    def __call__(self, tokens):
        assert tokens.dtype == np.int32
        row = self.counts.get(tuple(tokens[len(tokens) - self.n + 1 :].tolist()), np.ones(self.vocab_size))
        return np.log(row / row.sum())


def pair(n_target=4, n_drafter=2, draft_len=5):
    target, drafter = NGram(CORPUS, n_target), NGram(CORPUS, n_drafter)
    return from_callable(target, vocab_size=128), from_callable(drafter, vocab_size=128, draft_len=draft_len)


@example(budget=9, n=4, draft_len=5, count=17)  # equal counts: nine nodes need not hold the chain
@given(budget=st.integers(0, 30), n=st.integers(1, 4), draft_len=st.integers(0, 6), count=st.integers(0, 25))
def test_ngrams_decode_to_the_text_of_plain_decoding(budget, n, draft_len, count):
    target, drafter = pair(n_drafter=n, draft_len=draft_len)
    assert (type(target), type(drafter)) == (CallableTarget, CallableDrafter)
    found = generate(target, drafter, CORPUS[:5], budget=budget, max_new_tokens=count)
    text = CORPUS[:5].tolist()
    for _ in range(count):
        text.append(int(np.argmax(NGram(CORPUS, 4)(np.array(text, np.int32)))))
    assert found.token_ids.tolist() == text[5:]
    if draft_len and n == 4:  # a drafter that is the target: all drafts of a chain are accepted
        chain = {"budget": draft_len, "max_children": 1}
        found = generate(target, drafter, CORPUS[:5], **chain, max_new_tokens=count)
        assert found.target_passes == -(-count // (1 + draft_len))


def test_ngrams_are_recorded_and_replayed():
    target, drafter = pair()
    traces = record(target, drafter, [CORPUS[:5], CORPUS[9:20]], num_positions=12, max_budget=16, progress=False)
    live = live_rounds(target, drafter, traces, 1, CORPUS[9:20], budget=16)
    assert replayed_rounds(traces, 1, BestFirst(16)) == live
    assert replay(traces, BestFirst(16)).tokens_per_pass > 1.2


def test_callables_go_with_models_of_the_other_form():
    target = TableTarget(seed=3)
    drafter = from_callable(lambda tokens: target.logits_after(tokens.tolist()), vocab_size=5, draft_len=4)
    found = generate(target, drafter, [1], budget=4, max_children=1, max_new_tokens=10)
    assert [r.num_accepted for r in found.rounds] == [4, 4]


@pytest.mark.parametrize(
    "answer", [[0, 2, 1], np.array([0.0, 2.0, 1.0], np.float16), (0.0, 2.0, -np.inf), np.array([0, 2, 1], np.uint8)]
)
def test_answers_are_taken_as_they_come(answer):
    target = from_callable(lambda tokens: answer, vocab_size=3)
    drafter = from_callable(lambda tokens: answer, vocab_size=3, draft_len=2)
    assert generate(target, drafter, [0], budget=4, max_new_tokens=6).token_ids.tolist() == [1] * 6


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((3, {"vocab_size": 5}), DTypeError, "`next_logits` is int, expected a function from token ids to logits"),
        ((len, {"vocab_size": 0}), ArgumentError, "`vocab_size` is 0, expected an integer at least 1"),
        ((len, {"vocab_size": "5"}), DTypeError, "`vocab_size` is '5', expected an integer"),
        ((len, {"vocab_size": 5, "draft_len": -1}), ArgumentError, "`draft_len` is -1, expected an integer at least 0"),
        ((len, {"vocab_size": 5, "draft_len": 1.0}), DTypeError, "`draft_len` is 1.0, expected an integer"),
    ],
)
def test_from_callable_rejects(arguments, error, words):
    with pytest.raises(error, match=rf"^from_callable: {words}"):
        from_callable(arguments[0], **arguments[1])


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (
            np.zeros(4),
            ShapeError,
            r"from_callable: `next_logits\(...\)` is \(4,\), expected \(5,\): one logit for each",
        ),
        (1.0, ShapeError, r"is \(\), expected \(5,\)"),
        (None, ShapeError, r"is \(\), expected \(5,\)"),
        ([[1.0, 2.0], [1.0]], ShapeError, "is ragged"),
        (np.ma.masked_array(np.zeros(5)), DTypeError, "is a masked array"),
        (["a"] * 5, DTypeError, "`target.verify.*` has dtype"),
        (np.full(5, np.nan), ArgumentError, "the target's logits after 2 tokens give no token"),
    ],
)
def test_answers_that_do_not_fit_are_rejected(answer, error, words):
    with pytest.raises(error, match=words):
        generate(from_callable(lambda tokens: answer, vocab_size=5), None, [1, 2], budget=0, max_new_tokens=3)


def test_rows_for_every_token_are_refused_with_advice_that_works():
    next_logits = lambda tokens: np.eye(5)[tokens]  # noqa: E731, a model that answers for every position
    with pytest.raises(ShapeError, match=r"is \(2, 5\), expected \(5,\).*; (`lambda tokens.*\[-1\]`) returns the last"):
        generate(from_callable(next_logits, vocab_size=5), None, [1, 2], budget=0, max_new_tokens=3)
    last_row = lambda tokens: next_logits(tokens)[-1]  # noqa: E731
    found = generate(from_callable(last_row, vocab_size=5), None, [1, 2], budget=0, max_new_tokens=3)
    assert found.token_ids.tolist() == [2, 2, 2]
