"""The stages of a training run; each reads and writes files in one work folder."""

# PyTorch's own annotations are too loose for the strict checker.
# mypy: ignore-errors

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddtree_cupy._files import written_whole
from ddtree_cupy._terminal import show
from ddtree_cupy.decode.tiny import heldout_names, heldout_text
from ddtree_cupy.decode.tiny.config import DrafterConfig, TargetConfig
from ddtree_cupy.decode.tiny.training.acceptance import bits_per_byte, heldout_prompts, tokens_per_pass
from ddtree_cupy.decode.tiny.training.corpus import Corpus
from ddtree_cupy.decode.tiny.training.drafter import TorchDrafter, block_mask
from ddtree_cupy.decode.tiny.training.loop import Schedule, train
from ddtree_cupy.decode.tiny.training.sampling import Continuations, repeats, sample
from ddtree_cupy.decode.tiny.training.target import TorchTarget, round_to_half
from ddtree_cupy.decode.tiny.weights import load_weights, save_weights

LIBRARY_SHARE = 0.7  # of the training crops; the rest are test modules
PROMPT_LENS = (16, 48, 96, 160, 256)
TEMPERATURE_SHARES = {0.0: 0.45, 0.8: 0.45, 1.0: 0.1}
REAL_TEXT_SHARE = 0.2  # of the drafter's rows
REAL_TEXT = -1.0  # in place of a temperature


@dataclass(frozen=True)
class Run:
    """Where and how a stage runs."""

    work: Path
    device: torch.device
    compile: bool
    seed: int = 0

    def autocast(self) -> torch.autocast:
        """bfloat16 products on a GPU, plain float32 on a CPU."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")


class Crops:
    """Random crops of the training text, held on the device."""

    def __init__(self, run: Run) -> None:
        text = Corpus.load(run.work / "corpus.npz")
        self.library = torch.from_numpy(text.library.copy()).to(run.device)
        self.tests = torch.from_numpy(text.tests.copy()).to(run.device)

    def __call__(self, rows: int, length: int) -> Tensor:
        """Return int64 [rows, length]."""
        from_library = round(rows * LIBRARY_SHARE) if len(self.tests) > length else rows
        pieces = []
        for stream, count in ((self.library, from_library), (self.tests, rows - from_library)):
            starts = torch.randint(max(len(stream) - length, 1), (count, 1), device=stream.device)
            pieces.append(stream[starts + torch.arange(length, device=stream.device)] if count else None)
        return torch.cat([piece for piece in pieces if piece is not None]).long()


def train_target(run: Run, config: TargetConfig, schedule: Schedule, *, batch: int, context: int) -> bool:
    """Train the target on next-byte cross-entropy; writes `target.npz` when the budget is spent."""
    torch.manual_seed(run.seed)
    crops = Crops(run)
    model = TorchTarget(config).to(run.device)

    def loss_of(tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1])[0]
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    fast = torch.compile(loss_of) if run.compile else loss_of

    def step(index: int) -> Tensor:
        with run.autocast():
            return fast(crops(batch, context + 1))

    return _train(run, "target", model, step, schedule)


def write_continuations(run: Run, *, rounds: int, batch: int, length: int, seconds: float) -> None:
    """Sample continuations of training text; rows that end in a loop are dropped."""
    target = load_target(run)
    crops = Crops(run)
    generator = torch.Generator(run.device).manual_seed(run.seed)
    shares = torch.tensor(list(TEMPERATURE_SHARES.values()), device=run.device)
    choices = torch.tensor(list(TEMPERATURE_SHARES), device=run.device)
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    started = time.monotonic()
    for index in range(rounds):
        prompt_len = PROMPT_LENS[index % len(PROMPT_LENS)]
        temperatures = choices[torch.multinomial(shares, batch, replacement=True, generator=generator)]
        tokens = sample(target, crops(batch, prompt_len), length - prompt_len, temperatures, generator)
        good = torch.from_numpy(~repeats(tokens.cpu().numpy())).to(run.device)
        lens = torch.full_like(temperatures[good], prompt_len, dtype=torch.int32)
        kept.append((tokens[good], temperatures[good], lens))
        print(f"continuations: round {index}, prompt {prompt_len}, kept {len(lens)} of {batch}", flush=True)
        if time.monotonic() - started > seconds and index + 1 >= len(PROMPT_LENS):
            break
    tokens, temperatures, lens = (torch.cat(parts) for parts in zip(*kept, strict=True))
    Continuations(tokens, temperatures, lens).save(run.work / "continuations.npz")
    for temperature in TEMPERATURE_SHARES:
        row = tokens[temperatures == temperature][:1].cpu().numpy().tobytes()
        show(f"--- temperature {temperature}\n{row.decode('latin-1')[-400:]}")


def train_drafter(
    run: Run, config: DrafterConfig, schedule: Schedule, *, batch: int, num_anchors: int, decay: float
) -> bool:
    """Train the drafter against the frozen target; writes `drafter.npz` when the budget is spent.

    The label of a depth is the target's distribution there, given the path actually taken, at the
    row's own temperature. Depth d weighs exp(-(d - 1) / decay), as in DFlash.
    """
    torch.manual_seed(run.seed + 1)
    target = load_target(run)
    crops = Crops(run)
    data = Continuations.load(run.work / "continuations.npz", run.device)
    groups = [(n, torch.nonzero(data.prompt_lens == n)[:, 0]) for n in data.prompt_lens.unique().tolist()]
    model = TorchDrafter(config).to(run.device)
    model.embed.load_state_dict(target.embed.state_dict())
    model.head.load_state_dict(target.head.state_dict())
    depths = torch.arange(config.draft_len, device=run.device)
    weights = torch.exp(-depths / decay)
    weights /= weights.sum()

    def loss_of(tokens: Tensor, temperatures: Tensor, anchors: Tensor, mask: Tensor) -> Tensor:
        with torch.no_grad():
            target_logits, features, _ = target(tokens)
        draft = model(tokens, features, anchors, mask).float().log_softmax(-1)
        at = anchors[:, None] + depths
        scale = torch.where(temperatures == REAL_TEXT, 1.0, temperatures)[:, None, None, None]
        soft = (target_logits[:, at].float() / scale.clamp(min=0.1)).softmax(-1)
        hard = F.one_hot(tokens[:, at + 1], config.vocab_size).float()
        labels = torch.where(scale == 0, hard, soft)
        return -((labels * draft).sum(-1).mean((0, 1)) * weights).sum()

    fast = torch.compile(loss_of) if run.compile else loss_of
    length, real_rows = data.tokens.shape[1], round(batch * REAL_TEXT_SHARE)

    def step(index: int) -> Tensor:
        prompt_len, rows = groups[torch.randint(len(groups), ()).item()]
        rows = rows[torch.randint(len(rows), (batch - real_rows,), device=run.device)]
        tokens = torch.cat([data.tokens[rows].long(), crops(real_rows, length)])
        temperatures = F.pad(data.temperatures[rows], (0, real_rows), value=REAL_TEXT)
        candidates = torch.randperm(length - config.draft_len - prompt_len, device=run.device)
        anchors = candidates[:num_anchors].sort().values + prompt_len - 1
        with run.autocast():
            return fast(tokens, temperatures, anchors, block_mask(anchors, length, config))

    return _train(run, "drafter", model, step, schedule)


def evaluate(run: Run, *, prompts: int) -> dict[str, object]:
    """Report bits per byte and, once there is a drafter, tokens per target pass."""
    target = load_target(run)
    report: dict[str, object] = {"bits_per_byte": {n: bits_per_byte(target, heldout_text(n)) for n in heldout_names()}}
    if (run.work / "drafter.npz").exists():
        drafter = load_drafter(run)
        for temperature in (0.0, 0.8):
            report[f"tokens_per_pass_{temperature}"] = tokens_per_pass(
                target, drafter, temperature=temperature, prompts=heldout_prompts(prompts)
            )
    with written_whole(run.work / "report.json") as stream:
        stream.write(json.dumps(report, indent=1).encode() + b"\n")
    return report


def load_target(run: Run) -> TorchTarget:
    """Load `target.npz`, frozen."""
    return _load(run, "target", TargetConfig, TorchTarget)


def load_drafter(run: Run) -> TorchDrafter:
    """Load `drafter.npz`, frozen."""
    return _load(run, "drafter", DrafterConfig, TorchDrafter)


def _load(run: Run, kind: str, config_type: type, model_type: type) -> nn.Module:
    config, weights = load_weights(run.work / f"{kind}.npz", kind, config_type)
    model = model_type(config)
    model.load_state_dict({name: torch.from_numpy(value).float() for name, value in weights.items()})
    return model.to(run.device).eval().requires_grad_(False)


def _train(run: Run, kind: str, model: nn.Module, step: Callable[[int], Tensor], schedule: Schedule) -> bool:
    """Train a model and, when its budget is spent, write its weights file."""
    done = train(model, step, schedule, run.work / f"{kind}_checkpoint.pt", kind)
    if done:
        round_to_half(model)
        weights = {name: value.cpu().numpy() for name, value in model.state_dict().items()}
        save_weights(run.work / f"{kind}.npz", kind, model.config, weights)
    return done
