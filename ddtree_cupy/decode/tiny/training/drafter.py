"""The block drafter in PyTorch: many anchors of one sequence in one masked pass."""

# PyTorch's own annotations are too loose for the strict checker.
# mypy: ignore-errors

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddtree_cupy.decode.tiny.config import DrafterConfig
from ddtree_cupy.decode.tiny.training.target import RMSNorm, SwiGLU, apply_rope, init_weights, rope_angles


class BlockAttention(nn.Module):
    """Block slots attend to the context's projected features and to their own block."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q = nn.Linear(config.d_model, width, bias=False)
        self.k = nn.Linear(config.d_model, kv_width, bias=False)
        self.v = nn.Linear(config.d_model, kv_width, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.out = nn.Linear(width, config.d_model, bias=False)

    def forward(self, x: Tensor, context: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        """Attend from x [B, Q, D]; context [B, S, D]; angles of the keys, the S context ones first."""
        c = self.config
        cos, sin = (a[:, None] for a in angles)  # [S + Q, 1, head_dim / 2]
        keys_from = torch.cat([context, x], dim=1)
        q = self.q_norm(self.q(x).unflatten(-1, (c.num_heads, -1)))
        k = self.k_norm(self.k(keys_from).unflatten(-1, (c.num_kv_heads, -1)))
        v = self.v(keys_from).unflatten(-1, (c.num_kv_heads, -1))
        q = apply_rope(q, cos[-x.shape[1] :], sin[-x.shape[1] :]).to(v.dtype)
        k = apply_rope(k, cos, sin).to(v.dtype)
        k, v = (a.repeat_interleave(c.num_heads // c.num_kv_heads, dim=2) for a in (k, v))
        q, k, v = (a.transpose(1, 2) for a in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(o.transpose(1, 2).flatten(-2))


class BlockLayer(nn.Module):
    """Pre-norm block attention and SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = BlockAttention(config)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = SwiGLU(config.d_model, config.d_hidden)


class TorchDrafter(nn.Module):
    """DFlash-style drafter (arXiv 2602.06036); parameter names are those of the weights file."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.slots = nn.Parameter(torch.empty(config.draft_len, config.d_model))
        self.fuse = nn.Linear(config.num_features * config.d_feature, config.d_model, bias=False)
        self.context_norm = RMSNorm(config.d_model, config.norm_eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        init_weights(self, config.num_layers)

    def context(self, features: Tensor) -> Tensor:
        """Project target features [..., F] to the drafter's context [..., D]."""
        c = self.config
        x = features.float().unflatten(-1, (c.num_features, c.d_feature))
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + c.norm_eps)
        return self.context_norm(self.fuse(x.flatten(-2)))

    def forward(self, tokens: Tensor, features: Tensor, anchors: Tensor, mask: Tensor) -> Tensor:
        """Draft after every anchor.

        tokens [B, S], features [B, S, F], anchors [A] (root positions, one set for the whole
        batch), mask of `block_mask`. Returns logits [B, A, L, V].
        """
        c = self.config
        batch, length = tokens.shape
        roots = self.embed(tokens[:, anchors])[:, :, None]
        slots = self.slots.expand(batch, len(anchors), -1, -1)
        x = torch.cat([roots, slots], dim=2).flatten(1, 2)
        context = self.context(features)
        angles = rope_angles(_key_positions(anchors, length, c.draft_len), c.head_dim, c.rope_base)
        for layer in self.layers:
            x = x + layer.attention(layer.attention_norm(x), context, angles, mask)
            x = x + layer.mlp(layer.mlp_norm(x))
        x = x.unflatten(1, (len(anchors), c.draft_len + 1))[:, :, 1:]
        return self.head(self.norm(x))


def _key_positions(anchors: Tensor, length: int, draft_len: int) -> Tensor:
    block = anchors[:, None] + torch.arange(draft_len + 1, device=anchors.device)
    return torch.cat([torch.arange(length, device=anchors.device), block.flatten()])


def block_mask(anchors: Tensor, length: int, config: DrafterConfig) -> Tensor:
    """Return bool [A * (L + 1), S + A * (L + 1)], True where a slot may attend.

    A slot sees its own whole block and the `window` positions strictly before its root.
    """
    block = torch.arange(len(anchors), device=anchors.device).repeat_interleave(config.draft_len + 1)
    distance = anchors[block][:, None] - torch.arange(length, device=anchors.device)
    in_window = (distance > 0) & (distance <= config.window)
    return torch.cat([in_window, block[:, None] == block[None, :]], dim=1)
