"""Quality estimates during training: bits per byte, and tokens per target pass."""

# PyTorch's own annotations are too loose for the strict checker.
# mypy: ignore-errors

import numpy as np
import torch
import torch.nn.functional as F

from ddtree_cupy.decode import evaluate
from ddtree_cupy.decode.tiny.training.corpus import SEPARATOR
from ddtree_cupy.decode.tiny.training.drafter import TorchDrafter, block_mask
from ddtree_cupy.decode.tiny.training.sampling import repeats, sample
from ddtree_cupy.decode.tiny.training.target import TorchTarget
from ddtree_cupy.tree_accept import accept
from ddtree_cupy.tree_build import build_tree


@torch.inference_mode()
def bits_per_byte(target: TorchTarget, text: bytes, window: int = 1024) -> float:
    """Mean code length of `text` in bits per byte, each byte seeing at least window / 2 bytes.

    The first byte of the text is predicted from the file separator.
    """
    device = next(target.parameters()).device
    data = torch.tensor(list(SEPARATOR + text), device=device)
    total, half = 0.0, window // 2
    for start in range(0, len(data) - 1, half):
        piece = data[start : start + window + 1]
        scored_from = 0 if start == 0 else window - half
        if len(piece) - 1 <= scored_from:
            break
        logits = target(piece[None, :-1])[0][0]
        total += F.cross_entropy(logits[scored_from:].float(), piece[scored_from + 1 :], reduction="sum").item()
    return total / np.log(2) / len(text)


def heldout_prompts(count: int) -> np.ndarray:
    """Return uint8 [count, 256], the prompts of `decode.evaluate`."""
    texts = [evaluate.prompt_at(*place) for place in evaluate.heldout_prompts(count)]
    return np.stack([np.frombuffer(text, np.uint8) for text in texts])


def tokens_per_pass(
    target: TorchTarget,
    drafter: TorchDrafter,
    *,
    temperature: float,
    prompts: np.ndarray,
    num_tokens: int = 128,
    budget: int = 64,
    seed: int = 0,
) -> dict[str, float]:
    """Estimate mean tokens per target pass of the flat chain and the best-first tree.

    The target's continuation is sampled first: exact matching commits that very text, so a
    round at root r accepts the longest drafted prefix of it.
    """
    device = next(target.parameters()).device
    draft_len = drafter.config.draft_len
    generator = torch.Generator(device).manual_seed(seed)
    prompt_len = prompts.shape[1]
    roots = torch.as_tensor(prompts, device=device)
    temperatures = torch.full((len(prompts),), temperature, device=device)
    tokens = sample(target, roots, num_tokens + draft_len + 1, temperatures, generator)
    drafts = draft_everywhere(target, drafter, tokens, prompt_len - 1, num_tokens)
    text = tokens.cpu().numpy()
    kept = np.flatnonzero(~repeats(text[:, : prompt_len + num_tokens]))
    result = {"repeating": float(len(prompts) - len(kept))}
    for name, options in {"chain": {"budget": draft_len, "max_children": 1}, "tree": {"budget": budget}}.items():
        passes = 0
        for row in kept:
            done = 0
            while done < num_tokens:
                path = text[row, prompt_len + done : prompt_len + done + draft_len + 1]
                done += 1 + _num_accepted(drafts[row, done], path, options)
                passes += 1
        result[name] = len(kept) * num_tokens / max(passes, 1)
    return result


def _num_accepted(draft: np.ndarray, path: np.ndarray, options: dict[str, int]) -> int:
    """Count the accepted nodes of the tree of draft [L, V] when the target's text goes on as path [L + 1]."""
    tree = build_tree(draft, root_token_ids=0, **options)
    return int(accept(tree, path[tree.depths].astype(np.int32)).num_accepted)


@torch.inference_mode()
def draft_everywhere(
    target: TorchTarget, drafter: TorchDrafter, tokens: torch.Tensor, first_root: int, count: int
) -> np.ndarray:
    """Return draft log-probabilities float32 [n, count, L, V] for `count` roots in a row."""
    anchors = torch.arange(first_root, first_root + count, device=tokens.device)
    mask = block_mask(anchors, tokens.shape[1], drafter.config)
    drafts = []
    for rows in tokens.long().split(8):
        logits = drafter(rows, target(rows)[1], anchors, mask)
        drafts.append(logits.float().log_softmax(-1).cpu().numpy())
    return np.concatenate(drafts)
