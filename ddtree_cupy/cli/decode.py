"""`ddtree decode`: continue a prompt in three ways, and compare what a tree costs and saves."""

import argparse
import codecs
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ddtree_cupy import emulate
from ddtree_cupy._terminal import fitted, show, table
from ddtree_cupy.decode import Generation, generate_rounds
from ddtree_cupy.errors import ArgumentError
from ddtree_cupy.explore import CostTable, MeasuredCost

DEFAULT_PROMPT = '''import os


class Stack:
    """A last-in, first-out container."""

    def __init__(self, items=()):
        self._items = list(items)

    def push(self, item):
'''

EXIT_TEXTS_DIFFER = 3

_MOST_BYTES = 1 << 20  # of a prompt; a stream without end is refused
_HEADS, _CONTEXT = 8, 8192  # at which the cost table is read
_WHY = (
    "On a CPU the time of a pass grows with its nodes, so a tree takes longer than a chain.",
    "On a GPU they share one read of weights and keys, so a tree saves passes: its tokens per pass.",
)


def add_command(commands: Any) -> argparse.ArgumentParser:
    """Add `decode` to the commands and return its parser."""
    decode: argparse.ArgumentParser = commands.add_parser(
        "decode", help="continue a prompt in three ways and compare them"
    )
    text = decode.add_mutually_exclusive_group()
    text.add_argument(
        "prompt",
        nargs="?",
        default=DEFAULT_PROMPT,
        help="text to continue (default: a Python class); - reads standard input",
    )
    text.add_argument("--file", help="continue the text in this file; - reads standard input")
    decode.add_argument("--budget", type=int, default=64, help="nodes of each tree besides the root (default 64)")
    decode.add_argument("--max-new-tokens", type=int, default=128, help="bytes to add (default 128)")
    decode.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    decode.add_argument("--seed", type=int, default=0, help="for sampling (default 0)")
    decode.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="default: float32")
    backends: dict[str, Any] = {"choices": ("numpy", "emulate", "cupy"), "default": "numpy"}
    decode.add_argument("--backend", **backends, help="references, CUDA kernels on the CPU (slow), or CUDA")
    decode.set_defaults(run=_run)
    return decode


def _run(options: argparse.Namespace) -> int:
    prompt = _prompt(options)
    with emulate.active() if options.backend == "emulate" else contextlib.nullcontext():
        return _decode_three_ways(prompt, options)


def _prompt(options: argparse.Namespace) -> bytes:
    """Return the bytes of the prompt, whatever the locale: the bundled models read bytes."""
    file = "-" if options.file is None and options.prompt == "-" else options.file
    if file is None:
        return os.fsencode(options.prompt)
    name = "standard input" if file == "-" else file
    if file != "-":
        with Path(file).open("rb") as stream:
            prompt = stream.read(_MOST_BYTES + 1)
    elif sys.stdin is None:
        raise ArgumentError("there is no standard input, expected the text to continue")
    else:
        prompt = sys.stdin.buffer.read(_MOST_BYTES + 1)
    if not 0 < len(prompt) <= _MOST_BYTES:
        what = f"holds more than {_MOST_BYTES:,} bytes" if prompt else "is empty"
        raise ArgumentError(f"{name} {what}, expected a text of 1 to {_MOST_BYTES:,} bytes")
    return prompt


def _decode_three_ways(prompt: bytes, options: argparse.Namespace) -> int:
    from ddtree_cupy.decode.tiny import TinyDrafter, TinyTarget

    models = {"dtype": np.dtype(options.dtype), "backend": "cupy" if options.backend == "cupy" else "numpy"}
    target, drafter = TinyTarget.load(**models), TinyDrafter.load(**models)
    tree = f"tree, budget {options.budget}"
    ways: dict[str, tuple[int, int | None]] = {  # name -> budget, max_children
        tree: (options.budget, None),
        f"chain, {drafter.draft_len} drafts": (drafter.draft_len, 1),
        "autoregressive": (0, None),
    }
    text = prompt.decode("utf-8", "surrogateescape")
    prompt_ids = np.frombuffer(prompt, np.uint8)
    shared = {name: getattr(options, name) for name in ("max_new_tokens", "temperature", "seed")}
    results: dict[str, Generation] = {}
    for way, (budget, max_children) in ways.items():
        stream = generate_rounds(target, drafter, prompt_ids, budget=budget, max_children=max_children, **shared)
        if way == tree and not options.json:
            stream = _show_text(text, stream)
        else:
            stream = _with_progress(way, options.max_new_tokens, stream)
        results[way] = Generation.from_rounds(stream)

    texts = {result.token_ids.tobytes() for result in results.values()}
    costs = CostTable.load()
    cost = MeasuredCost(costs, heads=_HEADS, context=_CONTEXT)
    rows = [_row(way, results[way], cost) for way in reversed(ways)]
    if options.json:
        added = bytes(results[tree].token_ids.astype(np.uint8)).decode("utf-8", "replace")
        show(json.dumps({"prompt": text, "text": added, "identical": len(texts) == 1, "ways": rows}))
    else:
        show("\n" + _comparison(rows))
        show(f"the three texts are {'identical' if len(texts) == 1 else 'DIFFERENT'}\n")
        for line in _WHY if options.backend != "cupy" else _WHY[1:]:
            show(fitted(line))
        where = f"tree_attention {costs.about['variant']}, {costs.about['gpu']}, {_HEADS} heads, {_CONTEXT:,} keys"
        show(fitted(f"on a GPU: speedup over autoregressive by the cost table ({where}; weights left out)"))
    return 0 if len(texts) == 1 else EXIT_TEXTS_DIFFER


def _row(name: str, result: Generation, cost: MeasuredCost) -> dict[str, Any]:
    try:
        passes = sum(cost(int(finished.tree.num_nodes) - 1) for finished in result.rounds)
        speedup = cost(0) * len(result.token_ids) / passes if passes else None
    except ArgumentError:  # more nodes than were measured
        speedup = None
    return {
        "way": name,
        "target_passes": result.target_passes,
        "tokens_per_pass": result.tokens_per_pass,
        "seconds": result.seconds,
        "ms_per_token": 1e3 * result.seconds / max(1, len(result.token_ids)),
        "gpu_speedup": speedup,
    }


def _comparison(rows: list[dict[str, Any]]) -> str:
    cells = [
        (
            row["way"],
            row["target_passes"],
            f"{row['tokens_per_pass']:.2f}",
            f"{row['ms_per_token']:.1f}",
            "-" if row["gpu_speedup"] is None else f"{row['gpu_speedup']:.2f}x",
        )
        for row in rows
    ]
    return table(("way", "passes", "tokens/pass", "ms/token", "on a GPU"), cells)


def _show_text(prompt: str, stream: Iterator[Any]) -> Iterator[Any]:
    """Print the text while it is decoded: accepted drafts green and underlined, or in ‹ › where there is no colour."""
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    before, after = ("\033[4;32m", "\033[0m") if coloured else ("‹", "›")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    begun = list(itertools.islice(stream, 1))  # errors come before anything is printed
    print(f"accepted drafts are marked {before}like this{after}\n")
    show(prompt, end="")
    for finished in itertools.chain(begun, stream):
        drafted = decoder.decode(bytes(finished.token_ids[: finished.num_drafted]))
        if drafted:
            print(before, end="")
            show(drafted, end="")
            print(after, end="")
        show(decoder.decode(bytes(finished.token_ids[finished.num_drafted :])), end="")
        yield finished
    show(decoder.decode(b"", final=True))


def _with_progress(name: str, total: int, stream: Iterator[Any]) -> Iterator[Any]:
    try:
        from tqdm import tqdm
    except ImportError:
        yield from stream
        return
    with tqdm(total=total, desc=name, unit="token", leave=False, disable=not sys.stderr.isatty()) as bar:
        for finished in stream:
            bar.update(len(finished.token_ids))
            yield finished
