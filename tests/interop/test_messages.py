"""What users read when a call is refused: our errors only, naming the function and the argument they passed."""

import numpy as np

from ddtree_cupy import AcceptResult, interop
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from tests.interop.cases import CANDIDATES, PATHS, T6, TOKENS, WORDS, ints
from tests.refusals import rejects

HUGE, FAR = 2**40, 2**33
LENGTHS = "spec_decoding_generation_lengths"
TABLES = CANDIDATES.map(lambda array: np.stack([array, array]))
NONE, NO_RESULT = np.zeros(0, bool), (ints([]), ints([]).reshape(0, 2), ints([]))
FAR_LENGTHS, FAR_ROOTS = [2**62 - 1] * 4, ints([1, 2**64 - 1], np.uint64)
ROOT_ONLY = AcceptResult(ints([0, -1, -1, -1, -1, -1]), ints(0), ints(1))
HUGGINGFACE, SGLANG, TENSORRT_LLM = interop.to_huggingface(T6, 3), interop.to_sglang(T6, 3), interop.to_tensorrt_llm(T6)


def wide(*values):
    return ints(values, np.int64)


def tokens_with(node, token):
    """Return T6's tokens as int64 (1, N) with one changed."""
    tokens = ints([TOKENS], np.int64)
    tokens[0, node] = token
    return tokens


def row(error, function, argument, *arguments, **options):
    """Return a case: the message begins with the function and holds the argument."""
    return error, rf"^{function}: .*`{argument}(`|\[)", function, arguments, options


def hf(error, input_ids):
    return row(error, "from_huggingface", "input_ids", HUGGINGFACE | {"input_ids": input_ids}, 3)


@rejects(
    *(
        row(error, "from_tensorrt_llm", name, TENSORRT_LLM | {LENGTHS: ints([length])}, ints([tokens]))
        for error, name, length, tokens in (
            (ShapeError, LENGTHS, 7, TOKENS),
            (ArgumentError, LENGTHS, 7, [*TOKENS, 1]),
            (ArgumentError, LENGTHS, -1, TOKENS),
            (ShapeError, "token_ids", 6, []),
        )
    ),
    row(ArgumentError, "from_tensorrt_llm_mask", "generation_lengths", ints(WORDS).reshape(1, 6, 1), ints([7])),
    row(ArgumentError, "from_sglang_mask", "num_nodes", np.ones(36, bool), draft_token_num=6, num_nodes=[7], mode=1),
    hf(ShapeError, ints([TOKENS[:5]])),
    hf(DTypeError, ints([TOKENS], np.float32)),
    hf(DTypeError, [TOKENS]),
    hf(ArgumentError, tokens_with(3, 10)),
    hf(ArgumentError, tokens_with(2, -5)),
    row(ArgumentError, "from_sglang", "draft_token", SGLANG | {"draft_token": tokens_with(3, 10)[0]}),
    row(ShapeError, "from_huggingface_mask", "attention_mask", np.zeros((1, 1, 6, 8), np.float32), 3),
    # tokens beyond int32
    hf(UnsupportedError, tokens_with(2, HUGE)),
    row(UnsupportedError, "from_tensorrt_llm", "token_ids", TENSORRT_LLM, tokens_with(2, HUGE)),
    row(UnsupportedError, "tree_from_visibility", "token_ids", T6, tokens_with(2, HUGE)[0]),
    row(UnsupportedError, "from_medusa_choices", "root_token_ids", PATHS, CANDIDATES, root_token_ids=HUGE),
    row(UnsupportedError, "from_medusa_choices", "root_token_ids", PATHS, TABLES, root_token_ids=FAR_ROOTS),
    row(UnsupportedError, "from_vllm_token_tree", "root_token_ids", "[(0,)]", CANDIDATES, root_token_ids=HUGE),
    row(UnsupportedError, "from_sglang", "draft_token", SGLANG | {"draft_token": tokens_with(2, HUGE)[0]}),
    # ragged lists
    *(
        case
        for values in ([1, [2, 3]], [[1], [2, 3]])
        for case in (
            row(ShapeError, "to_flashinfer_mask", "context_lens", T6, values),
            row(ShapeError, "to_huggingface", "context_lens", T6, values),
            row(ShapeError, "to_sglang_mask", "context_lens", T6, values),
            row(
                ShapeError,
                "from_sglang_mask",
                "context_lens",
                np.ones(54, bool),
                draft_token_num=6,
                context_lens=values,
            ),
            row(ShapeError, "from_huggingface_mask", "num_nodes", HUGGINGFACE["attention_mask"], 3, num_nodes=values),
            row(ShapeError, "from_medusa_choices", "root_token_ids", PATHS, CANDIDATES, root_token_ids=values),
        )
    ),
    # lengths and roots that are no integers
    *(
        case
        for value in (None, 2**70, "3", 3.0, [True], {3}, object())
        for case in (
            row(DTypeError, "to_flashinfer_mask", "context_lens", T6, value),
            row(DTypeError, "from_medusa_choices", "root_token_ids", PATHS, CANDIDATES, root_token_ids=value),
        )
    ),
    # what is no list, no mapping, no text
    *(
        case
        for value in (None, 5, "ab", np.array(5), {1: 2}, iter([7]))
        for case in (
            row(DTypeError, "from_parent_lists", "token_ids", value, value),
            row(DTypeError, "from_parent_lists", "parents", [7], value),
        )
    ),
    row(DTypeError, "from_parent_lists", "root_token_ids", [1], [-1], root="omitted", root_token_ids="ab"),
    *(
        row(DTypeError, "from_medusa_choices", "choices", value, CANDIDATES, root_token_ids=7)
        for value in (None, 5, 0.5, np.array(5))
    ),
    *(
        case
        for value in (None, 5, ["input_ids"], T6)
        for case in (
            row(DTypeError, "from_huggingface", "arrays", value, 3),
            row(DTypeError, "from_sglang", "arrays", value),
            row(DTypeError, "from_tensorrt_llm", "arrays", value, ints([TOKENS])),
        )
    ),
    row(ArgumentError, "to_huggingface_mask", "dtype", T6, 3, dtype=np.ones(2)),
    row(ArgumentError, "from_parent_lists", "root", [7], [-1], root=[]),
    # sizes beyond 64 bits, before anything is made
    row(ShapeError, "from_flashinfer_mask", "custom_mask", NONE, wide(0, 2**32), wide(2**32)),
    row(ArgumentError, "from_flashinfer_mask", "qo_indptr", NONE, wide(0, 2**63 - 1, -(2**63)), ints([1, 1])),
    row(ArgumentError, "from_flashinfer_mask", "capacity", np.ones(1, bool), ints([0, 1]), ints([1]), capacity=FAR),
    row(ArgumentError, "from_tensorrt_llm_mask", "capacity", ints([[[1]]]), ints([1]), capacity=FAR),
    row(ArgumentError, "from_parent_lists", "capacity", [7], [-1], capacity=10**7),
    row(ArgumentError, "from_parent_lists", "capacity", [7], [-1], capacity=FAR),
    row(ArgumentError, "to_tensorrt_llm_mask", "max_nodes", T6, max_nodes=2**50),
    row(ArgumentError, "to_tensorrt_llm_mask", "words", T6, words=2**70),
    row(ArgumentError, "to_huggingface_mask", "context_lens", T6, 2**61),
    row(ArgumentError, "to_huggingface_mask", "past_len", T6, 3, past_len=2**70),
    row(ArgumentError, "to_huggingface_mask", "key_len", T6, 3, key_len=2**70),
    row(ArgumentError, "to_sglang_mask", "context_lens", T6, 2**61),
    row(ArgumentError, "to_sglang_mask", "context_lens", T6, 2**63 - 1),
    row(ArgumentError, "from_sglang_mask", "draft_token_num", NONE, draft_token_num=2**40, mode=1),
    row(ShapeError, "from_sglang_mask", "tree_mask", np.ones(8, bool), draft_token_num=2, context_lens=FAR_LENGTHS),
    row(ArgumentError, "to_sglang_accept", "num_spec_step", ROOT_ONLY, T6, num_spec_step=2**70),
    row(ArgumentError, "from_sglang_accept", "draft_token_num", *NO_RESULT, draft_token_num=2**70),
    row(ArgumentError, "from_parent_lists", "token_ids", [2**70], [-1]),
    row(ArgumentError, "from_parent_lists", "parents", [7, 1], [-1, 2**70]),
)
def test_messages_name_what_the_caller_passed(function, arguments, options):
    getattr(interop, function)(*arguments, **options)


def test_tokens_of_padding_may_be_beyond_int32():
    tokens = np.append(tokens_with(0, TOKENS[0]), [[HUGE]], axis=1)
    assert interop.from_tensorrt_llm(TENSORRT_LLM, tokens).token_ids.tolist() == [[*TOKENS, -1]]


def test_the_form_names_its_masks_like_the_system():
    flat = interop.to_flashinfer_mask(T6, 3)
    assert flat._fields == ("custom_mask", "mask_indptr", "qo_indptr", "kv_lens")
    assert interop.from_flashinfer_mask(**flat._asdict()).num_nodes.tolist() == [6]
    found = interop.from_huggingface_mask(attention_mask=HUGGINGFACE["attention_mask"], context_lens=3)
    assert found.num_nodes.tolist() == [6]
