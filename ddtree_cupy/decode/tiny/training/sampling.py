"""Continuations sampled from the target: the drafter's training text."""

# PyTorch's own annotations are too loose for the strict checker.
# mypy: ignore-errors

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddtree_cupy._files import open_arrays, written_whole
from ddtree_cupy.decode.evaluate import is_periodic
from ddtree_cupy.decode.tiny.training.target import TorchTarget


@dataclass(frozen=True, eq=False)
class Continuations:
    """Prompts with the target's continuations.

    Attributes
    ----------
    tokens : uint8 tensor [n, S]
    temperatures : float tensor [n]
        0 is greedy; -1 marks real text.
    prompt_lens : int tensor [n]
    """

    tokens: Tensor
    temperatures: Tensor
    prompt_lens: Tensor

    def save(self, path: Path) -> None:
        """Write to a compressed `.npz` file."""
        with written_whole(path) as stream:
            np.savez_compressed(stream, **{name: value.cpu().numpy() for name, value in vars(self).items()})

    @classmethod
    def load(cls, path: Path, device: torch.device) -> "Continuations":
        """Read what `save` wrote."""
        with open_arrays(path, "continuations") as file:
            return cls(**{name: torch.from_numpy(file.read(name)).to(device) for name in file.names})


@torch.inference_mode()
def sample(
    target: TorchTarget,
    prompts: Tensor,
    num_tokens: int,
    temperatures: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """Continue prompts [B, P] by `num_tokens` each; returns uint8 [B, P + num_tokens].

    Temperature 0 is greedy: the next token is the argmax of logits + temperature * Gumbel noise.
    """
    c = target.config
    batch, prompt_len = prompts.shape
    tokens = prompts.new_zeros(batch, prompt_len + num_tokens)
    tokens[:, :prompt_len] = prompts
    width = c.head_dim_ckv + c.head_dim_kpe
    caches = [torch.zeros(batch, prompt_len + num_tokens, width, device=prompts.device) for _ in range(c.num_layers)]
    logits = _prefill(target, prompts, caches)
    for length in range(prompt_len, prompt_len + num_tokens):
        noise = torch.rand(logits.shape, generator=generator, device=logits.device)
        gumbel = -torch.log(-torch.log(noise.clamp(1e-9, 1 - 1e-7)))
        token = (logits.float() + temperatures[:, None] * gumbel).argmax(-1)
        tokens[:, length] = token
        if length + 1 < tokens.shape[1]:
            logits = target.step(token, caches, length)
    return tokens.to(torch.uint8)


def _prefill(target: TorchTarget, prompts: Tensor, caches: list[Tensor], rows: int = 512) -> Tensor:
    last = []
    for start in range(0, len(prompts), rows):
        chunk = slice(start, start + rows)
        logits, _, rows_of_layers = target(prompts[chunk].long())
        for cache, new in zip(caches, rows_of_layers, strict=True):
            cache[chunk, : prompts.shape[1]] = new
        last.append(logits[:, -1])
    return torch.cat(last)


def repeats(tokens: np.ndarray) -> np.ndarray:
    """Tell for each row [n, S] whether it ends in a short period."""
    return np.array([is_periodic(row.tobytes()) for row in tokens], bool)
