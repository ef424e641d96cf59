"""A training loop that runs for a wall-clock budget and resumes from a checkpoint."""

# PyTorch's own annotations are too loose for the strict checker.
# mypy: ignore-errors

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from ddtree_cupy._files import written_whole


@dataclass(frozen=True)
class Schedule:
    """Wall-clock budget and learning rates of one training run.

    Attributes
    ----------
    seconds : float
        Whole training time, summed over all pieces.
    piece_seconds : float
        Longest time of one piece; the checkpoint then waits for the next.
    matrix_lr, other_lr : float
        Peak rates: Muon for hidden matrices, AdamW for embeddings, head and norms.
    weight_decay : float
        Decoupled, times the rate; hidden matrices only.
    """

    seconds: float
    piece_seconds: float = float("inf")
    matrix_lr: float = 6e-3
    other_lr: float = 3e-3
    weight_decay: float = 0.05
    warmup: float = 0.02
    log_seconds: float = 10.0

    def factor(self, fraction: float) -> float:
        """Rate relative to its peak: short warm-up, then linear to zero."""
        fraction = min(max(fraction, 0.0), 1.0)
        return max(min(fraction / self.warmup, (1 - fraction) / (1 - self.warmup)), 1e-3)


def make_optimizers(model: nn.Module, schedule: Schedule) -> list[torch.optim.Optimizer]:
    """Muon (hidden matrices) and AdamW (everything else)."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, weight in model.named_parameters():
        hidden = weight.ndim == 2 and not name.startswith(("embed", "head", "slots"))
        (matrices if hidden else others).append(weight)
    return [
        torch.optim.Muon(
            matrices,
            lr=schedule.matrix_lr,
            weight_decay=schedule.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(others, lr=schedule.other_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(
    model: nn.Module,
    loss_of_step: Callable[[int], Tensor],
    schedule: Schedule,
    checkpoint: Path,
    label: str,
) -> bool:
    """Minimise `loss_of_step(step)` until the budget is spent.

    Returns True when the whole budget is spent, False when this piece ended before. Losses
    are logged to ``<checkpoint stem>_log.csv`` (seconds, step, mean loss in nats).
    """
    optimizers = make_optimizers(model, schedule)
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    state = _restore(checkpoint, model, optimizers)
    loss_of_step(state.step).backward()  # compiles, outside the budget
    model.zero_grad(set_to_none=True)
    spent_before, started = state.spent, time.monotonic()
    losses: list[Tensor] = []
    while state.spent < schedule.seconds and state.spent - spent_before < schedule.piece_seconds:
        factor = schedule.factor(state.spent / schedule.seconds)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        loss = loss_of_step(state.step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        state.step += 1
        if state.step % 16 == 0:
            loss.item()  # keeps the host from running ahead of the clock
        state.spent = spent_before + time.monotonic() - started
        logged = state.log[-1][0] if state.log else 0.0
        if state.spent - logged >= schedule.log_seconds or state.spent >= schedule.seconds:
            mean = torch.stack(losses).mean().item()
            losses.clear()
            state.log.append((state.spent, state.step, mean))
            print(f"{label} {state.spent:6.1f} s step {state.step:6d} loss {mean:.4f}", flush=True)
    _save(checkpoint, model, optimizers, state)
    return state.spent >= schedule.seconds


@dataclass
class _State:
    step: int = 0
    spent: float = 0.0
    log: list[tuple[float, int, float]] = field(default_factory=list)


def _restore(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> _State:
    if not path.exists():
        return _State()
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    for optimizer, values in zip(optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(values)
    return _State(saved["step"], saved["spent"], [tuple(row) for row in saved["log"]])


def _save(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], state: _State) -> None:
    torch.save(
        {
            "model": model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "step": state.step,
            "spent": state.spent,
            "log": state.log,
        },
        path,
    )
    rows = [f"{seconds:.1f},{step},{loss:.5f}" for seconds, step, loss in state.log]
    with written_whole(path.with_name(f"{path.stem}_log.csv")) as stream:
        stream.write("\n".join(["seconds,step,loss", *rows, ""]).encode())
