"""`ddtree tree`: build a draft tree from a file of logits or probabilities."""

import argparse
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from ddtree_cupy import build_tree
from ddtree_cupy._files import open_arrays, read_array, read_json, written_whole
from ddtree_cupy._terminal import fitted, show
from ddtree_cupy.containers import drawing
from ddtree_cupy.errors import ArgumentError, DTypeError, ProbabilityWarning, ShapeError

_MOST_LABEL_BYTES = 64 << 20  # the vocabularies of large models take a few MB, with their merges 20
_LABEL_WIDTH = 24
_SUM_TOLERANCE = 0.02  # of probabilities that were rounded to 16 bits


def add_command(commands: Any) -> argparse.ArgumentParser:
    """Add `tree` to the commands and return its parser."""
    tree: argparse.ArgumentParser = commands.add_parser("tree", help="build a draft tree from a logits file")
    tree.add_argument("file", type=Path, help=".npy with (draft_len, vocab), or .npz with one array or `draft_logits`")
    tree.add_argument("--probs", action="store_true", help="the file holds probabilities, not logits")
    tree.add_argument(
        "--labels",
        type=Path,
        help="texts of the tokens: .json with a list or {text: id} (a tokenizer's), else a line for each id",
    )
    tree.add_argument("--budget", type=int, default=16, help="nodes besides the root (default 16)")
    tree.add_argument("--root", type=int, default=0, help="token id of the root (default 0)")
    tree.add_argument("--max-depth", type=int, help="deepest level")
    tree.add_argument("--max-children", type=int, help="largest number of children of a node")
    tree.add_argument("--min-path-score", type=float, help="smallest path score, in nats")
    tree.add_argument("--spine", type=int, default=0, help="insert the rank-0 chain to this depth first")
    tree.add_argument("--svg", type=Path, help="draw the tree into this file")
    tree.add_argument("--save", type=Path, help="save the tree into this .npz file, for DraftTree.load")
    tree.set_defaults(run=_run)
    return tree


def _run(options: argparse.Namespace) -> int:
    logits = _load_logits(options.file)
    if logits.ndim != 2:
        raise ShapeError(f"{options.file} holds an array of shape {logits.shape}, expected (draft_len, vocab_size)")
    if options.root < 0:
        raise ArgumentError(f"--root is {options.root}, expected a token id")
    if options.probs:
        logits = _log_of(logits, options.file)
    texts = {} if options.labels is None else _load_labels(options.labels)
    limits = {
        name: getattr(options, name) for name in ("budget", "max_depth", "max_children", "min_path_score", "spine")
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ProbabilityWarning)
        tree = build_tree(logits, root_token_ids=options.root, **limits)
    for warning in caught:
        show(f"ddtree: {options.file}: {warning.message}, and --probs does so here", file=sys.stderr)
    count = int(tree.num_nodes)
    tokens, parents, scores = tree.token_ids[:count].tolist(), tree.parents[:count].tolist(), tree.path_scores[:count]  # type: ignore[index]
    names = [_label(token, texts) for token in tokens]
    labels = [f"{name} p={p:.3f}" for name, p in zip(names, np.exp(scores), strict=True)]
    if options.svg:
        titles = [f"path score {score:.3f} nats" for score in scores]
        with written_whole(options.svg) as stream:
            stream.write(drawing.tree_svg(parents, labels, titles).encode())
    if options.save:
        tree.save(options.save)
    if options.json:
        arrays = ("token_ids", "parents", "depths", "path_scores")
        found: dict[str, Any] = {name: getattr(tree, name)[:count].tolist() for name in arrays}
        if options.labels is not None:
            found["labels"] = [texts.get(token) for token in tokens]
        show(json.dumps(found))
    else:
        show(drawing.tree_text(parents, labels))
        expected = f"expected tokens per pass {np.exp(scores).sum():.2f}"
        show(fitted(f"{count} nodes, depth {int(tree.depths.max())}, {expected}"))
    return 0


def _label(token: int, texts: dict[int, str]) -> str:
    """Return a token as it is shown: its id, and its text if that is known."""
    if token not in texts:
        return str(token)
    text = repr(texts[token])  # line breaks and controls as escapes
    return f"{token} {text if len(text) <= _LABEL_WIDTH else text[: _LABEL_WIDTH - 4] + '...' + text[-1]}"


def _load_logits(file: Path) -> Any:
    _require_regular(file, "a .npy or .npz file")
    with file.open("rb") as stream:
        start = stream.peek(10)[:10]
        if _is_of_torch(start):
            raise _torch_error(file)
        if start[:2] != b"PK":  # not a zip archive
            try:
                return _numbers(read_array(stream, os.fstat(stream.fileno()).st_size, "array"))
            except DTypeError as error:
                raise DTypeError(f"{file}: {error}") from None
            except ValueError as error:
                raise ArgumentError(f"{file} is not a complete .npy or .npz file of numbers: {error}") from None
    with open_arrays(file, "logits") as arrays:
        names = arrays.names
        name = "draft_logits" if "draft_logits" in names else names[0] if len(names) == 1 else None
        if name is not None:
            return _numbers(arrays.read(name))
    if any(name.endswith("data.pkl") for name in names):
        raise _torch_error(file)
    raise ArgumentError(f"{file} holds {', '.join(names) or 'nothing'}, expected one array or `draft_logits`")


def _require_regular(file: Path, expected: str) -> None:
    if file.exists() and not file.is_file():  # opening a FIFO would wait for its writer
        raise ArgumentError(f"{file} is not a regular file, expected {expected}")


def _is_of_torch(start: bytes) -> bool:
    """Whether a file begins as a pickle, as old `.pt` files do, or as `.safetensors`: the size of its JSON."""
    return start[:1] == b"\x80" or start[8:9] == b"{"


def _torch_error(file: Path) -> ArgumentError:
    load = "safetensors.torch.load_file" if file.suffix == ".safetensors" else "torch.load"
    pick = "[name]" if file.suffix == ".safetensors" else ""
    return ArgumentError(
        f"{file} is a file of PyTorch, expected .npy or .npz; in Python, "
        f"numpy.save('logits.npy', {load}({str(file)!r}){pick}.detach().float().cpu().numpy()) makes one"
    )


def _numbers(array: Any) -> Any:
    if array.dtype.kind in "iu" and array.dtype.itemsize == 2:
        raise DTypeError(
            f"holds {array.dtype} numbers, expected logits; if they are the bits of bfloat16 numbers, "
            f"numpy.save(file, array.view(ml_dtypes.bfloat16)) says so"
        )
    return array


def _log_of(probs: Any, file: Path) -> Any:
    """Return the logarithms of probabilities, in float32 at least; 0 becomes -inf, which is no candidate."""
    if probs.dtype.kind not in "fV":
        raise DTypeError(f"{file} holds {probs.dtype} numbers, expected probabilities for --probs")
    wide = probs.astype(np.promote_types(np.float32, probs.dtype) if probs.dtype.kind == "f" else np.float32)
    sums = wide.sum(axis=1, dtype=np.float64)
    wrong = ~((wide >= 0).all(axis=1) & (np.abs(sums - 1) <= _SUM_TOLERANCE))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise ArgumentError(
            f"{file}: row {row} sums to {sums[row]:.4g}, its smallest number is {wide[row].min():.4g}; --probs expects "
            f"probabilities, which are at least 0 and sum to 1; logits are taken without it"
        )
    with np.errstate(divide="ignore"):
        return np.log(wide)


def _load_labels(file: Path) -> dict[int, str]:
    """Return the texts of token ids."""
    _require_regular(file, "a file with the texts of the tokens")
    if file.suffix != ".json":
        with file.open("rb") as stream:
            raw = stream.read(_MOST_LABEL_BYTES + 1)
        if len(raw) > _MOST_LABEL_BYTES:
            raise ArgumentError(f"{file}: over {_MOST_LABEL_BYTES:,} bytes, expected a line for each token")
        return dict(enumerate(raw.decode("utf-8", "replace").removesuffix("\n").split("\n")))
    found = read_json(file, max_bytes=_MOST_LABEL_BYTES)
    if isinstance(found, dict) and isinstance(found.get("model"), dict):  # tokenizer.json of Hugging Face
        found = found["model"].get("vocab")
    if isinstance(found, dict):
        pairs = [(token, text) for text, token in found.items()]
    elif isinstance(found, list):
        pairs = list(enumerate(found))
    else:
        pairs = [(None, None)]
    if any(type(token) is not int or not isinstance(text, str) for token, text in pairs):
        raise ArgumentError(f"{file}: expected a list of texts, one for each token id, or an object {{text: id}}")
    return dict(pairs)
