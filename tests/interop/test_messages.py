"""What users read when a call is refused: our errors only, naming the function and the argument they passed."""

import re

import numpy as np
import pytest

from ddtree_cupy import AcceptResult
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from ddtree_cupy.interop import (
    from_flashinfer_mask,
    from_huggingface,
    from_huggingface_mask,
    from_medusa_choices,
    from_parent_lists,
    from_sglang,
    from_sglang_accept,
    from_sglang_mask,
    from_tensorrt_llm,
    from_tensorrt_llm_mask,
    from_vllm_token_tree,
    to_flashinfer_mask,
    to_huggingface,
    to_huggingface_mask,
    to_sglang,
    to_sglang_accept,
    to_sglang_mask,
    to_tensorrt_llm,
    to_tensorrt_llm_mask,
    tree_from_visibility,
)
from tests.interop.cases import CANDIDATES, PATHS, T6, TOKENS, WORDS, ints

HUGE = 2**40
FAR = 2**33
LENGTHS = "spec_decoding_generation_lengths"
TABLES = CANDIDATES.map(lambda array: np.stack([array, array]))
NONE = np.zeros(0, bool)
ROOT_ONLY = AcceptResult(ints([0, -1, -1, -1, -1, -1]), ints(0), ints(1))


def tokens_with(node, token):
    """Return T6's tokens as int64 (1, N) with one changed."""
    tokens = ints([TOKENS], np.int64)
    tokens[0, node] = token
    return tokens


def huggingface(input_ids):
    return from_huggingface(to_huggingface(T6, 3) | {"input_ids": input_ids}, 3)


def sglang(draft_token):
    return from_sglang(to_sglang(T6, 3) | {"draft_token": draft_token})


def tensorrt_llm(lengths, tokens=TOKENS):
    return from_tensorrt_llm(to_tensorrt_llm(T6) | {LENGTHS: ints(lengths)}, ints([tokens]))


def names(call, error, function, argument):
    """Assert that `call` raises `error` with a message that begins with the function and holds the argument."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert re.match(rf"{function}: ", message), message
    assert f"`{argument}`" in message or f"`{argument}[" in message, message


@pytest.mark.parametrize(
    ("call", "error", "function", "argument"),
    [
        (lambda: tensorrt_llm([7]), ShapeError, "from_tensorrt_llm", LENGTHS),
        (lambda: tensorrt_llm([7], [*TOKENS, 1]), ArgumentError, "from_tensorrt_llm", LENGTHS),
        (lambda: tensorrt_llm([-1]), ArgumentError, "from_tensorrt_llm", LENGTHS),
        (lambda: tensorrt_llm([6], []), ShapeError, "from_tensorrt_llm", "token_ids"),
        (
            lambda: from_tensorrt_llm_mask(ints(WORDS).reshape(1, 6, 1), ints([7])),
            ArgumentError,
            "from_tensorrt_llm_mask",
            "generation_lengths",
        ),
        (
            lambda: from_sglang_mask(np.ones(36, bool), draft_token_num=6, num_nodes=[7], mode=1),
            ArgumentError,
            "from_sglang_mask",
            "num_nodes",
        ),
        (lambda: huggingface(ints([TOKENS[:5]])), ShapeError, "from_huggingface", "input_ids"),
        (lambda: huggingface(ints([TOKENS], np.float32)), DTypeError, "from_huggingface", "input_ids"),
        (lambda: huggingface([TOKENS]), DTypeError, "from_huggingface", "input_ids"),
        (lambda: huggingface(tokens_with(3, 10)), ArgumentError, "from_huggingface", "input_ids"),
        (lambda: sglang(tokens_with(3, 10)[0]), ArgumentError, "from_sglang", "draft_token"),
        (lambda: huggingface(tokens_with(2, -5)), ArgumentError, "from_huggingface", "input_ids"),
        (
            lambda: from_huggingface_mask(np.zeros((1, 1, 6, 8), np.float32), 3),
            ShapeError,
            "from_huggingface_mask",
            "attention_mask",
        ),
    ],
)
def test_messages_name_what_the_caller_passed(call, error, function, argument):
    names(call, error, function, argument)


@pytest.mark.parametrize(
    ("call", "function", "argument"),
    [
        (lambda: huggingface(tokens_with(2, HUGE)), "from_huggingface", "input_ids"),
        (
            lambda: from_tensorrt_llm(to_tensorrt_llm(T6), tokens_with(2, HUGE)),
            "from_tensorrt_llm",
            "token_ids",
        ),
        (lambda: tree_from_visibility(T6, tokens_with(2, HUGE)[0]), "tree_from_visibility", "token_ids"),
        (lambda: from_medusa_choices(PATHS, CANDIDATES, root_token_ids=HUGE), "from_medusa_choices", "root_token_ids"),
        (
            lambda: from_medusa_choices(PATHS, TABLES, root_token_ids=ints([1, 2**64 - 1], np.uint64)),
            "from_medusa_choices",
            "root_token_ids",
        ),
        (
            lambda: from_vllm_token_tree("[(0,)]", CANDIDATES, root_token_ids=HUGE),
            "from_vllm_token_tree",
            "root_token_ids",
        ),
        (
            lambda: from_sglang(to_sglang(T6, 3) | {"draft_token": tokens_with(2, HUGE)[0]}),
            "from_sglang",
            "draft_token",
        ),
    ],
)
def test_tokens_beyond_int32_are_rejected_by_their_own_name(call, function, argument):
    names(call, UnsupportedError, function, argument)


def test_tokens_of_padding_may_be_beyond_int32():
    tokens = np.append(tokens_with(0, TOKENS[0]), [[HUGE]], axis=1)
    found = from_tensorrt_llm(to_tensorrt_llm(T6), tokens)
    assert found.token_ids.tolist() == [[*TOKENS, -1]]


@pytest.mark.parametrize("values", [[1, [2, 3]], [[1], [2, 3]]])
def test_ragged_lists_are_rejected(values):
    for call, function, argument in (
        (lambda: to_flashinfer_mask(T6, values), "to_flashinfer_mask", "context_lens"),
        (lambda: to_huggingface(T6, values), "to_huggingface", "context_lens"),
        (lambda: to_sglang_mask(T6, values), "to_sglang_mask", "context_lens"),
        (
            lambda: from_sglang_mask(np.ones(54, bool), draft_token_num=6, context_lens=values),
            "from_sglang_mask",
            "context_lens",
        ),
        (
            lambda: from_huggingface_mask(to_huggingface_mask(T6, 3), 3, num_nodes=values),
            "from_huggingface_mask",
            "num_nodes",
        ),
        (
            lambda: from_medusa_choices(PATHS, CANDIDATES, root_token_ids=values),
            "from_medusa_choices",
            "root_token_ids",
        ),
    ):
        names(call, ShapeError, function, argument)


@pytest.mark.parametrize("value", [None, 2**70, "3", 3.0, [True], {3}, object()])
def test_lengths_and_roots_that_are_no_integers_are_rejected(value):
    names(lambda: to_flashinfer_mask(T6, value), DTypeError, "to_flashinfer_mask", "context_lens")
    names(
        lambda: from_medusa_choices(PATHS, CANDIDATES, root_token_ids=value),
        DTypeError,
        "from_medusa_choices",
        "root_token_ids",
    )


@pytest.mark.parametrize("value", [None, 5, "ab", np.array(5), {1: 2}, iter([7])])
def test_parent_lists_that_are_no_lists_are_rejected(value):
    names(lambda: from_parent_lists(value, value), DTypeError, "from_parent_lists", "token_ids")
    names(lambda: from_parent_lists([7], value), DTypeError, "from_parent_lists", "parents")
    if value is not None:
        names(
            lambda: from_parent_lists([1], [-1], root="omitted", root_token_ids="ab"),
            DTypeError,
            "from_parent_lists",
            "root_token_ids",
        )


@pytest.mark.parametrize("value", [None, 5, 0.5, np.array(5)])
def test_choices_that_are_no_lists_are_rejected(value):
    names(
        lambda: from_medusa_choices(value, CANDIDATES, root_token_ids=7), DTypeError, "from_medusa_choices", "choices"
    )


@pytest.mark.parametrize("value", [None, 5, ["input_ids"], T6])
def test_arrays_that_are_no_mapping_are_rejected(value):
    names(lambda: from_huggingface(value, 3), DTypeError, "from_huggingface", "arrays")
    names(lambda: from_sglang(value), DTypeError, "from_sglang", "arrays")
    names(lambda: from_tensorrt_llm(value, ints([TOKENS])), DTypeError, "from_tensorrt_llm", "arrays")


def test_options_that_are_no_strings_are_rejected():
    names(lambda: to_huggingface_mask(T6, 3, dtype=np.ones(2)), ArgumentError, "to_huggingface_mask", "dtype")
    names(lambda: from_parent_lists([7], [-1], root=[]), ArgumentError, "from_parent_lists", "root")


@pytest.mark.parametrize(
    ("call", "error", "function", "argument"),
    [
        (
            lambda: from_flashinfer_mask(NONE, ints([0, 2**32], np.int64), ints([2**32], np.int64)),
            ShapeError,
            "from_flashinfer_mask",
            "custom_mask",
        ),
        (
            lambda: from_flashinfer_mask(NONE, ints([0, 2**63 - 1, -(2**63)], np.int64), ints([1, 1])),
            ArgumentError,
            "from_flashinfer_mask",
            "qo_indptr",
        ),
        (
            lambda: from_flashinfer_mask(np.ones(1, bool), ints([0, 1]), ints([1]), capacity=FAR),
            ArgumentError,
            "from_flashinfer_mask",
            "capacity",
        ),
        (
            lambda: from_tensorrt_llm_mask(ints([[[1]]]), ints([1]), capacity=FAR),
            ArgumentError,
            "from_tensorrt_llm_mask",
            "capacity",
        ),
        (lambda: from_parent_lists([7], [-1], capacity=10**7), ArgumentError, "from_parent_lists", "capacity"),
        (lambda: from_parent_lists([7], [-1], capacity=FAR), ArgumentError, "from_parent_lists", "capacity"),
        (lambda: to_tensorrt_llm_mask(T6, max_nodes=2**50), ArgumentError, "to_tensorrt_llm_mask", "max_nodes"),
        (lambda: to_tensorrt_llm_mask(T6, words=2**70), ArgumentError, "to_tensorrt_llm_mask", "words"),
        (lambda: to_huggingface_mask(T6, 2**61), ArgumentError, "to_huggingface_mask", "context_lens"),
        (lambda: to_huggingface_mask(T6, 3, past_len=2**70), ArgumentError, "to_huggingface_mask", "past_len"),
        (lambda: to_huggingface_mask(T6, 3, key_len=2**70), ArgumentError, "to_huggingface_mask", "key_len"),
        (lambda: to_sglang_mask(T6, 2**61), ArgumentError, "to_sglang_mask", "context_lens"),
        (lambda: to_sglang_mask(T6, 2**63 - 1), ArgumentError, "to_sglang_mask", "context_lens"),
        (
            lambda: from_sglang_mask(NONE, draft_token_num=2**40, mode=1),
            ArgumentError,
            "from_sglang_mask",
            "draft_token_num",
        ),
        (
            lambda: from_sglang_mask(np.ones(8, bool), draft_token_num=2, context_lens=[2**62 - 1] * 4),
            ShapeError,
            "from_sglang_mask",
            "tree_mask",
        ),
        (
            lambda: to_sglang_accept(
                AcceptResult(ints([0, -1, -1, -1, -1, -1]), ints(0), ints(1)), T6, num_spec_step=2**70
            ),
            ArgumentError,
            "to_sglang_accept",
            "num_spec_step",
        ),
        (
            lambda: from_sglang_accept(ints([]), ints([]).reshape(0, 2), ints([]), draft_token_num=2**70),
            ArgumentError,
            "from_sglang_accept",
            "draft_token_num",
        ),
        (lambda: from_parent_lists([2**70], [-1]), ArgumentError, "from_parent_lists", "token_ids"),
        (lambda: from_parent_lists([7, 1], [-1, 2**70]), ArgumentError, "from_parent_lists", "parents"),
    ],
)
def test_sizes_beyond_64_bits_are_rejected_before_anything_is_made(call, error, function, argument):
    names(call, error, function, argument)


def test_the_form_names_its_masks_like_the_system():
    flat = to_flashinfer_mask(T6, 3)
    assert flat._fields == ("custom_mask", "mask_indptr", "qo_indptr", "kv_lens")
    assert from_flashinfer_mask(**flat._asdict()).num_nodes.tolist() == [6]
    found = from_huggingface_mask(attention_mask=to_huggingface(T6, 3)["attention_mask"], context_lens=3)
    assert found.num_nodes.tolist() == [6]
