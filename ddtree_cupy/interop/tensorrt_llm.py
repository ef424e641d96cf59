"""TensorRT-LLM's spec-dec inputs: packed mask words, position offsets and generation lengths."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy.containers import DraftTree, Visibility
from ddtree_cupy.containers.topology import words_per_row
from ddtree_cupy.errors import ShapeError
from ddtree_cupy.interop._host import Call
from ddtree_cupy.interop._masks import read_words, write_words

Array = Any
MASK, OFFSETS, LENGTHS = (f"spec_decoding_{name}" for name in ("packed_mask", "position_offsets", "generation_lengths"))


def to_tensorrt_llm_mask(
    visibility: Visibility | DraftTree,
    *,
    max_nodes: int | None = None,
    words: int | None = None,
    ragged: bool = False,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return `spec_decoding_packed_mask` and `spec_decoding_generation_lengths`.

    Bit j % 32 (bit 0 first) of word j // 32 of row i is set when node i may attend to node j; the context is
    visible to all. Rows have the stride of the buffer, `words` = ceil(max_nodes / 32), whatever the size of the tree.

    Parameters
    ----------
    visibility : Visibility or DraftTree
        Any boolean matrix.
    max_nodes : int, default N
        Rows of a request in the buffer: max_total_draft_tokens + 1, the root counts.
    words : int, default ceil(max_nodes / 32)
        Words per row, for a buffer that is wider than that.
    ragged : bool
        Rows of all requests without padding, as the C++ runtime lays them out; else (B, max_nodes, words) as in
        the PyTorch backend.

    Returns
    -------
    packed_mask : int32 array, shape (B, max_nodes, words), or (sum of generation lengths, words) when ragged
        Unused rows and words are 0. Bit 31 makes a word negative.
    generation_lengths : int32 array, shape (B)
        num_nodes, the root counts.

    Raises
    ------
    DTypeError, ArgumentError
        A buffer smaller than the tree, arrays on a GPU.

    Notes
    -----
    This library has the same words as uint32, with the stride ceil(N / 32). The C++ packing kernel writes row 0 as
    "itself" whatever the matrix says, which is right for every tree.
    Source: cpp/tensorrt_llm/kernels/speculativeDecoding/convertSpecDecodingMaskToPackedMask.cu and
    tensorrt_llm/_torch/speculative/spec_tree_manager.py of github.com/NVIDIA/TensorRT-LLM.

    Examples
    --------
    >>> tree = DraftTree.from_parents([7, 10, 20, 11], [-1, 0, 1, 0])
    >>> mask, generation_lengths = to_tensorrt_llm_mask(tree, max_nodes=40)
    >>> mask.shape, mask[0, :4].tolist(), generation_lengths.tolist()
    ((1, 40, 2), [[1, 0], [3, 0], [7, 0], [9, 0]], [4])
    """
    call = Call("to_tensorrt_llm_mask")
    dense, counts = call.dense(visibility)
    batch, size, _ = dense.shape
    most = int(counts.max(initial=0))
    rows = size if max_nodes is None else call.integer("max_nodes", max_nodes, low=max(most, 1))
    least = words_per_row(rows)
    width = least if words is None else call.integer("words", words, low=least)
    call.addressable("max_nodes" if words is None else "words", (batch, rows, width), itemsize=4)
    mask = write_words(dense, rows, width)
    if ragged:
        mask = mask[np.arange(rows) < counts[:, None]]
    return mask.view(np.int32), counts.astype(np.int32)


def from_tensorrt_llm_mask(
    packed_mask: npt.NDArray[Any],
    generation_lengths: npt.NDArray[Any],
    *,
    capacity: int | None = None,
) -> Visibility:
    """Read packed words back, always with the request axis; 3 axes are the padded form, 2 the ragged one.

    Parameters
    ----------
    packed_mask : int32 | uint32 array, shape (B, max_nodes, words) or (sum of generation lengths, words)
        Rows and bits from the generation length on are ignored: they may hold an earlier tree.
    generation_lengths : int32 | int64 array, shape (B)
        Nodes, the root counts.
    capacity : int, optional
        N of the result; default max_nodes, or the longest request when ragged.

    Returns
    -------
    Visibility
        Batched, N = capacity.

    Raises
    ------
    ShapeError
        The number of rows does not follow from the lengths, or a row has too few words.

    Examples
    --------
    >>> words, lens = np.array([[1], [3], [7], [9]], np.int32), np.array([4], np.int32)
    >>> from_tensorrt_llm_mask(words, lens).to_dense()[0, 3].astype(int).tolist()
    [1, 0, 0, 1]
    """
    names = ("packed_mask", "generation_lengths")
    return _read(Call("from_tensorrt_llm_mask"), names, packed_mask, generation_lengths, capacity)


def _read(call: Call, names: tuple[str, str], packed_mask: Array, lengths: Array, capacity: int | None) -> Visibility:
    """Return the Visibility of packed words; `names` are those of the words and the lengths."""
    mask_name, lengths_name = names
    lens = call.integers(lengths_name, lengths, ("batch",))
    batch, most = len(lens), int(lens.max(initial=0))
    call.host(mask_name, packed_mask)
    ragged = packed_mask.ndim == 2
    axes = ("rows", "words") if ragged else ("batch", "max_nodes", "words")
    call.array(mask_name, packed_mask, axes, ("int32", "uint32"))
    counts = call.node_counts(lengths_name, lens, batch, packed_mask.shape[0 if ragged else 1])
    words = packed_mask.shape[-1]
    if words < words_per_row(most):
        raise call.error(
            f"`{mask_name}` has {words} words per row, expected at least {words_per_row(most)} for {most} nodes",
            ShapeError,
        )
    if ragged and len(packed_mask) != lens.sum():
        raise call.error(
            f"`{mask_name}` has {len(packed_mask)} rows, expected {lens.sum()}, the sum of `{lengths_name}` "
            f"{lens.tolist()}",
            ShapeError,
        )
    rows = max(most, 1) if ragged else packed_mask.shape[1]
    size = rows if capacity is None else call.integer("capacity", capacity, low=max(most, 1))
    call.addressable("capacity", (batch, size, 32 * max(words, words_per_row(size))))
    valid = packed_mask if ragged else packed_mask[np.arange(rows) < counts[:, None]]
    return read_words(valid, counts, size)


def to_tensorrt_llm(
    tree: DraftTree, *, max_nodes: int | None = None, words: int | None = None
) -> dict[str, npt.NDArray[np.int32]]:
    """Return the three spec-dec arrays of a tree by TensorRT-LLM's names (padded form).

    Parameters
    ----------
    tree : DraftTree
        One request or a batch.
    max_nodes, words : int, optional
        The buffer, as in `to_tensorrt_llm_mask`.

    Returns
    -------
    dict
        spec_decoding_packed_mask int32 (B, max_nodes, words); spec_decoding_position_offsets int32 (B, max_nodes),
        the depth, 0 for the root and for padding; spec_decoding_generation_lengths int32 (B), the root counts.

    Raises
    ------
    DTypeError, ArgumentError
        As in `to_tensorrt_llm_mask`.

    Notes
    -----
    Token ids are not among the three arrays; `from_tensorrt_llm` takes them as an argument. TensorRT-LLM's retrieve
    links are those of SGLang, as int32.

    Examples
    --------
    >>> tree = DraftTree.from_parents([7, 10, 20, 11], [-1, 0, 1, 0])
    >>> to_tensorrt_llm(tree, max_nodes=6)["spec_decoding_position_offsets"].tolist()
    [[0, 1, 2, 1, 0, 0]]
    """
    batched = Call("to_tensorrt_llm").tree(tree)
    mask, counts = to_tensorrt_llm_mask(batched, max_nodes=max_nodes, words=words)
    rows = mask.shape[1]
    offsets = np.zeros((len(counts), rows), np.int32)
    kept = min(rows, batched.depths.shape[1])
    offsets[:, :kept] = np.maximum(batched.depths[:, :kept], 0)
    return {MASK: mask, OFFSETS: offsets, LENGTHS: counts}


def from_tensorrt_llm(arrays: Mapping[str, Array], token_ids: npt.NDArray[Any]) -> DraftTree:
    """Make a tree of the three spec-dec arrays and its tokens, with the request axis; the offsets are checked.

    Parameters
    ----------
    arrays : mapping of str to int32 arrays
        The keys of `to_tensorrt_llm`; others are ignored.
    token_ids : int32 | int64 array, shape (B, N)
        N nodes with the root, at least the longest generation length; entries from num_nodes on are ignored.

    Returns
    -------
    DraftTree
        Batched, N as in `token_ids`; path_scores None.

    Raises
    ------
    UnsupportedError
        A mask that belongs to no tree, a token beyond int32.
    ShapeError, DTypeError, ArgumentError
        A missing array, shapes that do not fit, offsets that are not the depths, siblings that share a token.

    Examples
    --------
    >>> tree = DraftTree.from_parents([7, 10, 20, 11], [-1, 0, 1, 0])
    >>> from_tensorrt_llm(to_tensorrt_llm(tree), tree.token_ids[None]).parents.tolist()
    [[-1, 0, 1, 0]]
    """
    call = Call("from_tensorrt_llm")
    call.mapping(arrays, (MASK, OFFSETS, LENGTHS))
    call.host(MASK, arrays[MASK], ("batch", "max_nodes", "words"), ("int32", "uint32"))
    tokens: Any = call.integers("token_ids", token_ids, ("batch", "num_nodes"))
    offsets = call.integers(OFFSETS, arrays[OFFSETS], ("batch", "max_nodes"))
    longest = int(call.integers(LENGTHS, arrays[LENGTHS], ("batch",)).max(initial=1))
    if tokens.shape[1] < longest:
        raise call.error(
            f"`token_ids` is {tokens.shape}, expected at least {longest} tokens per request, the longest of "
            f"`{LENGTHS}`",
            ShapeError,
        )
    visibility = _read(call, (MASK, LENGTHS), arrays[MASK], arrays[LENGTHS], tokens.shape[1])
    tree = call.tree_behind(visibility, "token_ids", tokens)
    kept = min(tree.depths.shape[1], offsets.shape[1])
    call.positions(OFFSETS, offsets[:, :kept], tree.depths[:, :kept], 0, "its depth {expected}")
    return tree
