"""The `ddtree` command: decode a prompt, look at a tree, see what works on this machine."""

import argparse
import codecs
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddtree_cupy import _doctor, build_tree, emulate
from ddtree_cupy._files import open_arrays, read_array, written_whole
from ddtree_cupy._terminal import EXIT_FAILED, run_command, show
from ddtree_cupy.containers import drawing
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError

DEFAULT_PROMPT = '''import os


class Stack:
    """A last-in, first-out container."""

    def __init__(self, items=()):
        self._items = list(items)

    def push(self, item):
'''

EXIT_TEXTS_DIFFER = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 wrong usage, 3 the three texts differ."""

    def run() -> int:
        options = _parser().parse_args(arguments)
        code: int = options.run(options)
        return code

    return run_command("ddtree", run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ddtree", description="Speculative decoding with draft trees.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    decode = commands.add_parser("decode", help="continue a prompt in three ways and compare them")
    decode.add_argument("prompt", nargs="?", default=DEFAULT_PROMPT, help="text to continue (default: a Python class)")
    decode.add_argument("--budget", type=int, default=64, help="nodes of each tree besides the root (default 64)")
    decode.add_argument("--max-new-tokens", type=int, default=128, help="bytes to add (default 128)")
    decode.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    decode.add_argument("--seed", type=int, default=0, help="for sampling (default 0)")
    decode.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="default: float32")
    backends: dict[str, Any] = {"choices": ("numpy", "emulate", "cupy"), "default": "numpy"}
    decode.add_argument("--backend", **backends, help="references, CUDA kernels on the CPU (slow), or CUDA")
    decode.set_defaults(run=_decode)

    tree = commands.add_parser("tree", help="build a draft tree from a logits file")
    tree.add_argument("file", type=Path, help=".npy with (draft_len, vocab), or .npz with one array or `draft_logits`")
    tree.add_argument("--budget", type=int, default=16, help="nodes besides the root (default 16)")
    tree.add_argument("--root", type=int, default=0, help="token id of the root (default 0)")
    tree.add_argument("--max-depth", type=int, help="deepest level")
    tree.add_argument("--max-children", type=int, help="largest number of children of a node")
    tree.add_argument("--min-path-score", type=float, help="smallest path score, in nats")
    tree.add_argument("--spine", type=int, default=0, help="insert the rank-0 chain to this depth first")
    tree.add_argument("--svg", type=Path, help="draw the tree into this file")
    tree.add_argument("--save", type=Path, help="save the tree into this .npz file, for DraftTree.load")
    tree.set_defaults(run=_tree)

    doctor = commands.add_parser("doctor", help="show what is installed and which backends work")
    doctor.set_defaults(run=_run_doctor)

    kernels = commands.add_parser("kernels", help="compile every kernel for every architecture, without a GPU")
    kernels.add_argument("--arch", action="append", help="only this architecture, such as sm_90; may be repeated")
    kernels.set_defaults(run=_kernels)

    bench = commands.add_parser("bench", help="compare every kernel with its reference, then time it on this GPU")
    bench.add_argument("pattern", nargs="?", default="", help="only cases whose op, name or variant contains this text")
    grids = bench.add_mutually_exclusive_group()
    grids.add_argument("--tree-sizes", action="store_true", help="tree_attention over the nodes, for explore's costs")
    grids.add_argument("--curves", action="store_true", help="tree_attention over nodes, heads, context, batch in turn")
    bench.set_defaults(run=_bench)
    for command in (decode, tree, doctor, kernels, bench):
        command.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


def _decode(options: argparse.Namespace) -> int:
    with emulate.active() if options.backend == "emulate" else contextlib.nullcontext():
        return _decode_three_ways(options)


def _decode_three_ways(options: argparse.Namespace) -> int:
    from ddtree_cupy.decode import Generation, generate_rounds
    from ddtree_cupy.decode.tiny import TinyDrafter, TinyTarget

    models = {"dtype": np.dtype(options.dtype), "backend": "cupy" if options.backend == "cupy" else "numpy"}
    target, drafter = TinyTarget.load(**models), TinyDrafter.load(**models)
    prompt = np.frombuffer(os.fsencode(options.prompt), np.uint8)
    tree = f"tree, budget {options.budget}"
    ways: dict[str, tuple[int, int | None]] = {  # name -> budget, max_children
        tree: (options.budget, None),
        f"chain, {drafter.draft_len} drafts": (drafter.draft_len, 1),
        "autoregressive": (0, None),
    }
    shared = {name: getattr(options, name) for name in ("max_new_tokens", "temperature", "seed")}
    results: dict[str, Generation] = {}
    for way, (budget, max_children) in ways.items():
        stream = generate_rounds(target, drafter, prompt, budget=budget, max_children=max_children, **shared)
        if way == tree and not options.json:
            stream = _show_text(options.prompt, stream)
        else:
            stream = _with_progress(way, options.max_new_tokens, stream)
        results[way] = Generation.from_rounds(stream)

    texts = {result.token_ids.tobytes() for result in results.values()}
    rows = [_decode_row(way, results[way]) for way in reversed(ways)]
    if options.json:
        text = bytes(results[tree].token_ids.astype(np.uint8)).decode("utf-8", "replace")
        show(json.dumps({"prompt": options.prompt, "text": text, "identical": len(texts) == 1, "ways": rows}))
    else:
        show(f"\n{'way':<18}{'target passes':>15}{'tokens per pass':>17}{'seconds':>10}{'ms per token':>14}")
        for row in rows:
            show(
                f"{row['way']:<18}{row['target_passes']:>15}{row['tokens_per_pass']:>17.2f}"
                f"{row['seconds']:>10.2f}{row['ms_per_token']:>14.1f}"
            )
        show(f"the three texts are {'identical' if len(texts) == 1 else 'DIFFERENT'}")
    return 0 if len(texts) == 1 else EXIT_TEXTS_DIFFER


def _decode_row(name: str, result: Any) -> dict[str, Any]:
    return {
        "way": name,
        "target_passes": result.target_passes,
        "tokens_per_pass": result.tokens_per_pass,
        "seconds": result.seconds,
        "ms_per_token": 1e3 * result.seconds / max(1, len(result.token_ids)),
    }


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


def _tree(options: argparse.Namespace) -> int:
    logits = _load_logits(options.file)
    if logits.ndim != 2:
        raise ShapeError(f"{options.file} holds an array of shape {logits.shape}, expected (draft_len, vocab_size)")
    if options.root < 0:
        raise ArgumentError(f"--root is {options.root}, expected a token id")
    limits = {
        name: getattr(options, name) for name in ("budget", "max_depth", "max_children", "min_path_score", "spine")
    }
    tree = build_tree(logits, root_token_ids=options.root, **limits)
    count = int(tree.num_nodes)
    parents, scores = tree.parents[:count].tolist(), tree.path_scores[:count]  # type: ignore[index]
    labels = [f"{token} p={p:.3f}" for token, p in zip(tree.token_ids[:count].tolist(), np.exp(scores), strict=True)]
    if options.svg:
        titles = [f"path score {score:.3f} nats" for score in scores]
        with written_whole(options.svg) as stream:
            stream.write(drawing.tree_svg(parents, labels, titles).encode())
    if options.save:
        tree.save(options.save)
    if options.json:
        names = ("token_ids", "parents", "depths", "path_scores")
        show(json.dumps({name: getattr(tree, name)[:count].tolist() for name in names}))
    else:
        show(drawing.tree_text(parents, labels))
        show(f"{count} nodes, depth {int(tree.depths.max())}, expected tokens per pass {np.exp(scores).sum():.2f}")
    return 0


def _load_logits(file: Path) -> Any:
    if file.exists() and not file.is_file():  # opening a FIFO would wait for its writer
        raise ArgumentError(f"{file} is not a regular file, expected a .npy or .npz file")
    with file.open("rb") as stream:
        if stream.peek(2)[:2] != b"PK":  # not a zip archive
            try:
                return read_array(stream, os.fstat(stream.fileno()).st_size, "array")
            except DTypeError as error:
                raise DTypeError(f"{file}: {error}") from None
            except ValueError as error:
                raise ArgumentError(f"{file} is not a complete .npy or .npz file of numbers: {error}") from None
    with open_arrays(file, "logits") as arrays:
        names = arrays.names
        name = "draft_logits" if "draft_logits" in names else names[0] if len(names) == 1 else None
        if name is not None:
            return arrays.read(name)
    raise ArgumentError(f"{file} holds {', '.join(names) or 'nothing'}, expected one array or `draft_logits`")


def _run_doctor(options: argparse.Namespace) -> int:
    report = _doctor.report()
    show(json.dumps(report) if options.json else _doctor.as_text(report))
    return 0


def _kernels(options: argparse.Namespace) -> int:
    from ddtree_cupy.compile_check import resources

    archs = tuple(options.arch or resources.ARCHS)
    unknown = set(archs) - set(resources.ARCHS)
    if unknown:
        raise ArgumentError(f"--arch {', '.join(sorted(unknown))}: expected some of {', '.join(resources.ARCHS)}")
    rows = resources.kernel_table(archs)
    show(json.dumps(resources.as_json(rows)) if options.json else resources.format_table(rows))
    broken = resources.problems(rows)
    show("\n".join(broken), end="\n" if broken else "", file=sys.stderr)
    return EXIT_FAILED if broken else 0


def _bench(options: argparse.Namespace) -> int:
    from ddtree_cupy.bench.__main__ import main as run_bench

    given = {"--json": options.json, "--tree-sizes": options.tree_sizes, "--curves": options.curves}
    flags = [flag for flag, is_given in given.items() if is_given]
    return run_bench([options.pattern, *flags])
