"""Sizes of the bundled models; shared by NumPy inference and PyTorch training."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Self

VOCAB_SIZE = 256  # one token per byte value


@dataclass(frozen=True)
class _Config:
    def to_dict(self) -> dict[str, Any]:
        """Return the sizes as plain JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Rebuild a config; every field must be there and nothing else."""
        names = {field.name for field in fields(cls)}
        if set(values) != names:
            raise ValueError(f"{cls.__name__} has fields {sorted(names)}, got {sorted(values)}")
        return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})


@dataclass(frozen=True)
class TargetConfig(_Config):
    """Sizes of the target, a decoder-only MLA transformer (DeepSeek-V3 form)."""

    vocab_size: int = VOCAB_SIZE
    d_model: int = 256
    num_layers: int = 6
    num_heads: int = 8
    head_dim_nope: int = 32  # per-head query/key part without position, before absorption
    head_dim_v: int = 32
    head_dim_ckv: int = 64  # C, width of the latent that all heads share
    head_dim_kpe: int = 16  # R, width of the rotary key that all heads share
    d_hidden: int = 512  # SwiGLU
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6
    feature_layers: tuple[int, ...] = (1, 3, 5)  # residual streams handed to the drafter

    @property
    def sm_scale(self) -> float:
        """Scale of the attention scores, from the head size before absorption."""
        return float((self.head_dim_nope + self.head_dim_kpe) ** -0.5)


@dataclass(frozen=True)
class DrafterConfig(_Config):
    """Sizes of the block drafter (DFlash form)."""

    vocab_size: int = VOCAB_SIZE
    draft_len: int = 15  # L, masked positions after the root
    window: int = 256  # committed positions that a block may attend to
    d_feature: int = 256  # width of one target layer's features
    num_features: int = 3  # target layers that are read
    d_model: int = 256
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    d_hidden: int = 320  # SwiGLU
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6
