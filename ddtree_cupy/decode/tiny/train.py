"""Train the bundled models: ``python -m ddtree_cupy.decode.tiny.train STAGE --work DIR``.

Needs a checkout, since wheels leave training out, and the extra ``train`` (PyTorch). Stages, in order: corpus, target,
continuations, drafter, evaluate, install. Training stages run for a wall-clock budget (--minutes) and can be cut into
pieces (--piece-minutes): run the same command again until it says that the stage is complete.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree_cupy.decode.tiny.config import DrafterConfig, TargetConfig
from ddtree_cupy.decode.tiny.drafter import DRAFTER_WEIGHTS
from ddtree_cupy.decode.tiny.target import TARGET_WEIGHTS
from ddtree_cupy.decode.tiny.training import corpus

if TYPE_CHECKING:
    from ddtree_cupy.decode.tiny.training.stages import Run

# So small that a CPU runs every stage in a minute; the resulting models are useless.
DEBUG_TARGET = TargetConfig(d_model=64, num_layers=2, num_heads=2, d_hidden=96, feature_layers=(0, 1))
DEBUG_DRAFTER = DrafterConfig(
    d_feature=64, num_features=2, d_model=64, num_layers=2, num_heads=2, num_kv_heads=1, d_hidden=96
)

NEEDS_ANOTHER_PIECE = 3


def main(arguments: list[str] | None = None) -> int:
    """Run one stage; the exit code is 3 when a training stage needs another piece."""
    args = _parser().parse_args(arguments)
    args.work.mkdir(parents=True, exist_ok=True)
    if args.stage == "corpus":
        text = corpus.collect(args.stdlib)
        text.save(args.work / "corpus.npz")
        print(f"{len(text.names)} files, {text.library.size} + {text.tests.size} bytes")
        return 0
    if args.stage == "install":
        shutil.copyfile(args.work / "target.npz", TARGET_WEIGHTS)
        shutil.copyfile(args.work / "drafter.npz", DRAFTER_WEIGHTS)
        return 0
    try:
        import torch
    except ImportError:
        print('training needs PyTorch: pip install -e ".[train]"', file=sys.stderr)
        return 1
    from ddtree_cupy.decode.tiny.training.stages import Run

    torch.set_float32_matmul_precision("high")
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return _run_stage(args, Run(args.work, torch.device(device), args.compile, args.seed))


def _run_stage(args: argparse.Namespace, run: "Run") -> int:
    from ddtree_cupy.decode.tiny.training import stages
    from ddtree_cupy.decode.tiny.training.loop import Schedule

    schedule = Schedule(60 * args.minutes, 60 * args.piece_minutes, matrix_lr=args.lr)
    if args.stage == "target":
        config = DEBUG_TARGET if args.debug else TargetConfig()
        return _tell(stages.train_target(run, config, schedule, batch=args.batch, context=args.context))
    if args.stage == "drafter":
        sizes = DEBUG_DRAFTER if args.debug else DrafterConfig()
        return _tell(
            stages.train_drafter(run, sizes, schedule, batch=args.batch, num_anchors=args.anchors, decay=args.decay)
        )
    if args.stage == "continuations":
        seconds = 60 * args.minutes
        stages.write_continuations(run, rounds=args.rounds, batch=args.batch, length=args.context, seconds=seconds)
    else:
        print(json.dumps(stages.evaluate(run, prompts=args.prompts), indent=1))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ddtree_cupy.decode.tiny.train", description=__doc__)
    stages = ("corpus", "target", "continuations", "drafter", "evaluate", "install")
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--work", type=Path, required=True, help="folder for all inputs and outputs")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--debug", action="store_true", help="tiny models, to try the stages on a CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stdlib", type=Path, help="standard library to read (corpus)")
    parser.add_argument("--minutes", type=float, default=5.0, help="whole budget of the stage")
    parser.add_argument("--piece-minutes", type=float, default=float("inf"), help="longest piece of that budget")
    parser.add_argument("--batch", type=int, default=64, help="sequences per step or round")
    parser.add_argument("--context", type=int, default=1024, help="tokens per sequence")
    parser.add_argument("--lr", type=float, default=6e-3, help="peak rate of the hidden matrices")
    parser.add_argument("--rounds", type=int, default=20, help="sampling rounds (continuations)")
    parser.add_argument("--anchors", type=int, default=48, help="blocks per sequence (drafter)")
    parser.add_argument("--decay", type=float, default=5.0, help="depth scale of the loss (drafter)")
    parser.add_argument("--prompts", type=int, default=100, help="held-out prompts (evaluate)")
    return parser


def _tell(done: bool) -> int:
    print("stage complete" if done else "budget not spent yet: run the same command again", flush=True)
    return 0 if done else NEEDS_ANOTHER_PIECE


if __name__ == "__main__":
    sys.exit(main())
