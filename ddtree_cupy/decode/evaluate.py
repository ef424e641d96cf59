"""Measure the bundled models on held-out text: is decoding lossless, and how many tokens does a pass add?

``python -m ddtree_cupy.decode.evaluate lossless`` and ``... curve`` are `make lossless` and `make curve`;
``... agreement`` compares the text that the GPU decodes with that of NumPy.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from ddtree_cupy._check import Checker
from ddtree_cupy._progress import with_progress
from ddtree_cupy._terminal import run_command, show
from ddtree_cupy.containers import DraftTree
from ddtree_cupy.decode.generate import generate
from ddtree_cupy.decode.tiny import TinyDrafter, TinyTarget, heldout_names, heldout_text

__all__ = ["PROMPT_BYTES", "Run", "heldout_prompts", "is_periodic", "prompt_at", "run_all"]

PROMPT_BYTES = 256


@dataclass(frozen=True)
class Run:
    """One text to decode: where its prompt is, how to decode it and, when that is done, the result.

    Attributes
    ----------
    file, offset : str, int
        The prompt is the 256 bytes of the held-out file before `offset`.
    budget : int
        0 is autoregressive decoding, -1 the flat chain of the full draft length.
    max_new_tokens, temperature, seed, dtype, backend
        As in `generate`; `dtype` and `backend` are those of the models.
    text : bytes
    target_passes : int
    """

    file: str
    offset: int
    budget: int
    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    dtype: str = "float64"
    backend: str = "numpy"
    text: bytes = b""
    target_passes: int = 0


def heldout_prompts(count: int) -> list[tuple[str, int]]:
    """Return `count` places (file, offset) at line starts, spread evenly over all held-out files."""
    places = []
    for name in heldout_names():
        text = heldout_text(name)
        starts = [i + 1 for i, byte in enumerate(text) if byte == ord("\n") and i + 1 >= PROMPT_BYTES]
        places += [(name, start) for start in starts if start < len(text)]
    count = Checker("heldout_prompts").integer("count", count, low=0, high=len(places))
    picked = np.linspace(0, len(places) - 1, count).round().astype(int)
    return [places[i] for i in picked]


def is_periodic(text: bytes, *, tail: int = 64, longest: int = 16) -> bool:
    """Whether the last `tail` bytes repeat with a period of at most `longest`; such a text is too easy to draft."""
    end = text[-tail:]
    return any(end[period:] == end[:-period] for period in range(1, longest + 1))


def run_one(run: Run) -> Run:
    """Decode one text and return the run with its result."""
    target, drafter = _models(run.dtype, run.backend)
    prompt = np.frombuffer(prompt_at(run.file, run.offset), np.uint8)
    chain = run.budget < 0
    result = generate(
        target,
        drafter,
        prompt,
        budget=drafter.draft_len if chain else run.budget,
        max_children=1 if chain else None,
        max_new_tokens=run.max_new_tokens,
        temperature=run.temperature,
        seed=run.seed,
    )
    return replace(run, text=bytes(result.token_ids.astype(np.uint8)), target_passes=result.target_passes)


def prompt_at(file: str, offset: int) -> bytes:
    """Return the prompt before a place of a held-out file."""
    return heldout_text(file)[offset - PROMPT_BYTES : offset]


def run_all(runs: Sequence[Run], *, workers: int | None = None, label: str = "") -> list[Run]:
    """Decode all `runs` over worker processes, with a progress bar, and return them in order."""
    workers = workers or os.cpu_count() or 1
    with ProcessPoolExecutor(workers) if workers > 1 else nullcontext() as pool:
        done = pool.map(run_one, runs, chunksize=4) if pool else map(run_one, runs)
        return list(with_progress(done, len(runs), label, "text"))


@cache
def _models(dtype: str, backend: str = "numpy") -> tuple[TinyTarget, TinyDrafter]:
    return TinyTarget.load(dtype=dtype, backend=backend), TinyDrafter.load(dtype=dtype, backend=backend)


def lossless(
    prompts: Sequence[tuple[str, int]], budgets: Sequence[int], *, workers: int | None = None, **settings: Any
) -> list[dict[str, Any]]:
    """Compare the text of every budget with autoregressive decoding; returns one row per budget."""
    rows = []
    plain = run_all([Run(*place, 0, **settings) for place in prompts], workers=workers, label="autoregressive")
    for budget in budgets:
        runs = run_all([Run(*place, budget, **settings) for place in prompts], workers=workers, label=_name(budget))
        different = [run for run, reference in zip(runs, plain, strict=True) if run.text != reference.text]
        first = {f"{run.file}:{run.offset}" for run in different[:3]}
        rows.append({"way": _name(budget), "identical": len(runs) - len(different), "of": len(runs), "first": [*first]})
    return rows


def agreement(prompts: Sequence[tuple[str, int]], **settings: Any) -> list[dict[str, Any]]:
    """Compare the text of the CUDA kernels with that of NumPy, both float32, budget 64; returns one row per prompt.

    Where two texts begin to differ, the row says how far apart the two best logits are in float64: a gap of the size of
    rounding errors explains the difference.
    """
    rows = []
    for place in prompts:
        host, device = (run_one(Run(*place, 64, dtype="float32", backend=b, **settings)) for b in ("numpy", "cupy"))
        row: dict[str, Any] = {"file": host.file, "offset": host.offset, "identical": host.text == device.text}
        if not row["identical"]:
            pairs = enumerate(zip(host.text, device.text, strict=True))
            row["first"] = next(i for i, (a, b) in pairs if a != b)
            row["float64_gap"] = top_two_gap(prompt_at(*place) + host.text[: row["first"]])
        rows.append(row)
    return rows


def top_two_gap(text: bytes) -> float:
    """Return by how much the best logit of the float64 target exceeds the second best after `text`."""
    target, _ = _models("float64")
    tokens = np.frombuffer(text, np.uint8)
    kv = target.allocate(0, tokens.size)
    logits, _ = target.forward(DraftTree.from_parents(tokens, np.arange(-1, tokens.size - 1)), kv)
    second, best = np.sort(logits[-1])[-2:]
    return float(best - second)


def tokens_per_pass(runs: Sequence[Run]) -> dict[str, Any]:
    """Mean tokens per target pass over the texts that do not end in a short period, and how many were left out."""
    kept = [run for run in runs if not is_periodic(run.text)]
    passes = sum(run.target_passes for run in kept)
    return {
        "tokens_per_pass": sum(len(run.text) for run in kept) / max(1, passes),
        "texts": len(kept),
        "periodic": len(runs) - len(kept),
    }


def _name(budget: int) -> str:
    return "chain" if budget < 0 else "autoregressive" if budget == 0 else f"tree {budget}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one measurement; exit code 1 when it failed or a text differs from autoregressive decoding."""
    return run_command("evaluate", lambda: _evaluate(_parser().parse_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ddtree_cupy.decode.evaluate", description=__doc__)
    parser.add_argument("what", choices=("lossless", "curve", "agreement"))
    parser.add_argument("--prompts", type=int, default=100, help="held-out prompts (default 100)")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="new bytes of each text (default 128)")
    parser.add_argument("--dtype", choices=("float32", "float64"), help="default: float64 (lossless), float32 (curve)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    return parser


def _evaluate(options: argparse.Namespace) -> int:
    prompts = heldout_prompts(options.prompts)
    settings = {"max_new_tokens": options.max_new_tokens}
    if options.what == "lossless":
        rows = lossless(prompts, (-1, 1, 15, 64), dtype=options.dtype or "float64", **settings)
        lines = [f"{row['way']:<10}{row['identical']:>5} of {row['of']} texts identical {row['first']}" for row in rows]
        failed = any(row["identical"] != row["of"] for row in rows)
    elif options.what == "agreement":
        rows = agreement(prompts, **settings)
        lines = [f"{sum(row['identical'] for row in rows)} of {len(rows)} texts identical on NumPy and the GPU"]
        lines += [f"{row}" for row in rows if not row["identical"]]
        failed = any(not row["identical"] and row["float64_gap"] > 1e-4 for row in rows)
    else:
        rows = []
        for temperature in (0.0, 0.8):
            for budget in (-1, 4, 8, 16, 32, 64, 128, 256):
                runs = [
                    Run(*place, budget, temperature=temperature, seed=i, dtype=options.dtype or "float32", **settings)
                    for i, place in enumerate(prompts)
                ]
                done = run_all(runs, label=f"temperature {temperature}, {_name(budget)}")
                rows.append({"temperature": temperature, "way": _name(budget), **tokens_per_pass(done)})
        lines = [
            f"temperature {row['temperature']:<5}{row['way']:<10}{row['tokens_per_pass']:>7.2f} tokens per pass "
            f"({row['texts']} texts, {row['periodic']} periodic left out)"
            for row in rows
        ]
        failed = False
    show(json.dumps(rows) if options.json else "\n".join(lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
