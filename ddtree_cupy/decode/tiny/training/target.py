"""The target in PyTorch: MLA in the non-absorbed form for training, absorbed for sampling."""

# PyTorch's own annotations are too loose for the strict checker.
# mypy: ignore-errors

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddtree_cupy.decode.tiny.config import TargetConfig


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, d_model: int, d_hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_hidden, bias=False)
        self.up = nn.Linear(d_model, d_hidden, bias=False)
        self.down = nn.Linear(d_hidden, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to the last axis."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


def rope_angles(positions: Tensor, width: int, base: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [..., width / 2], for integer positions [...]."""
    inverse = base ** (-torch.arange(0, width, 2, device=positions.device).float() / width)
    angles = positions.float()[..., None] * inverse
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + width/2]) of the last axis."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class MLA(nn.Module):
    """Multi-head latent attention (arXiv 2405.04434, section 2.1)."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        heads, nope, rope = config.num_heads, config.head_dim_nope, config.head_dim_kpe
        self.q = nn.Linear(config.d_model, heads * (nope + rope), bias=False)
        self.kv_down = nn.Linear(config.d_model, config.head_dim_ckv + rope, bias=False)
        self.kv_norm = RMSNorm(config.head_dim_ckv, config.norm_eps)
        self.k_up = nn.Linear(config.head_dim_ckv, heads * nope, bias=False)
        self.v_up = nn.Linear(config.head_dim_ckv, heads * config.head_dim_v, bias=False)
        self.out = nn.Linear(heads * config.head_dim_v, config.d_model, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q_nope [..., H, nope], q_pe [..., H, R], ckv [..., C] and kpe [..., R]."""
        c = self.config
        q = self.q(x).unflatten(-1, (c.num_heads, -1))
        q_nope, q_pe = q.split([c.head_dim_nope, c.head_dim_kpe], dim=-1)
        ckv, kpe = self.kv_down(x).split([c.head_dim_ckv, c.head_dim_kpe], dim=-1)
        q_pe = apply_rope(q_pe, cos[..., None, :], sin[..., None, :])
        return q_nope, q_pe, self.kv_norm(ckv), apply_rope(kpe, cos, sin)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Causal attention over x [B, S, D]; also returns the cache rows [B, S, C + R]."""
        c = self.config
        q_nope, q_pe, ckv, kpe = self.project(x, cos, sin)
        k_nope = self.k_up(ckv).unflatten(-1, (c.num_heads, -1))
        v = self.v_up(ckv).unflatten(-1, (c.num_heads, -1))
        shared = kpe.to(k_nope.dtype)[:, :, None].expand(-1, -1, c.num_heads, -1)
        q = torch.cat([q_nope, q_pe.to(q_nope.dtype)], dim=-1).transpose(1, 2)
        k = torch.cat([k_nope, shared], dim=-1).transpose(1, 2)
        # one head size for q, k and v lets the flash kernel run
        v = F.pad(v, (0, q.shape[-1] - c.head_dim_v)).transpose(1, 2)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=c.sm_scale)
        o = o[..., : c.head_dim_v].transpose(1, 2).flatten(-2)
        return self.out(o), torch.cat([ckv, kpe], dim=-1)

    def step(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, length: int) -> Tensor:
        """Attend from one new position x [B, D] in the absorbed form; writes cache[:, length]."""
        c = self.config
        q_nope, q_pe, ckv, kpe = self.project(x, cos, sin)
        cache[:, length, : c.head_dim_ckv] = ckv
        cache[:, length, c.head_dim_ckv :] = kpe
        k_up = self.k_up.weight.unflatten(0, (c.num_heads, -1))
        v_up = self.v_up.weight.unflatten(0, (c.num_heads, -1))
        q = torch.cat([torch.einsum("bhn,hnc->bhc", q_nope, k_up), q_pe], dim=-1)
        keys = cache[:, : length + 1]
        weights = torch.softmax(q @ keys.transpose(1, 2) * c.sm_scale, dim=-1)
        latent = weights @ keys[..., : c.head_dim_ckv]
        return self.out(torch.einsum("bhc,hvc->bhv", latent, v_up).flatten(-2))


class Layer(nn.Module):
    """Pre-norm attention and SwiGLU, each on a residual stream."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = MLA(config)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = SwiGLU(config.d_model, config.d_hidden)


class TorchTarget(nn.Module):
    """Byte-level decoder; parameter names are those of the weights file."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        init_weights(self, config.num_layers)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return logits [B, S, V], features [B, S, F] and one cache [B, S, C + R] per layer."""
        c = self.config
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        cos, sin = rope_angles(positions, c.head_dim_kpe, c.rope_base)
        x = self.embed(tokens)
        features, caches = [], []
        for index, layer in enumerate(self.layers):
            attended, cache = layer.attention(layer.attention_norm(x), cos, sin)
            x = x + attended
            x = x + layer.mlp(layer.mlp_norm(x))
            caches.append(cache)
            if index in c.feature_layers:
                features.append(x)
        return self.head(self.norm(x)), torch.cat(features, dim=-1), caches

    def step(self, token: Tensor, caches: list[Tensor], length: int) -> Tensor:
        """Return logits [B, V] after one more token [B]; writes row `length` of every cache."""
        c = self.config
        position = torch.tensor(length, device=token.device)
        cos, sin = rope_angles(position, c.head_dim_kpe, c.rope_base)
        x = self.embed(token)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = x + layer.attention.step(layer.attention_norm(x), cos, sin, cache, length)
            x = x + layer.mlp(layer.mlp_norm(x))
        return self.head(self.norm(x))


def init_weights(model: nn.Module, num_layers: int) -> None:
    """Normal weights of variance 1/fan_in; residual outputs smaller by sqrt(2 layers)."""
    for name, weight in model.named_parameters():
        if weight.ndim < 2:
            continue
        if "embed" in name or "slots" in name:
            nn.init.normal_(weight, std=0.02)
            continue
        std = weight.shape[1] ** -0.5
        if name.endswith(("attention.out.weight", "mlp.down.weight")):
            std /= (2 * num_layers) ** 0.5
        nn.init.normal_(weight, std=std if "head" not in name else 0.02)


@torch.no_grad()
def round_to_half(model: nn.Module) -> None:
    """Round every weight to float16, the precision of the weights file, in place."""
    for weight in model.parameters():
        weight.copy_(weight.half().float())
