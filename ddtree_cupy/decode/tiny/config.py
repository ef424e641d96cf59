"""Sizes of the bundled models; shared by NumPy inference and PyTorch training."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from ddtree_cupy._check import Checker
from ddtree_cupy.errors import ArgumentError, DTypeError

VOCAB_SIZE = 256  # one token per byte value
MAX_SIZE, MAX_LAYERS = 65_536, 1_024  # the most that a file may ask for


@dataclass(frozen=True)
class _Config:
    def to_dict(self) -> dict[str, Any]:
        """Return the sizes as plain JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """Rebuild a config; every field must be present, of its type and of a size that a small model can have.

        Raises
        ------
        DTypeError, ArgumentError
            A field is missing, unknown, of another type or too large.
        """
        check, names = Checker(cls.__name__), [field.name for field in fields(cls)]
        if not isinstance(values, dict) or set(values) != set(names):
            found = sorted(values) if isinstance(values, dict) else type(values).__name__
            raise ArgumentError(f"{cls.__name__} has fields {sorted(names)}, got {found!s:.300}")
        rebuilt: dict[str, Any] = {}
        for field in fields(cls):
            name, value = field.name, values[field.name]
            if field.type is int:
                rebuilt[name] = check.integer(name, value, low=1, high=MAX_LAYERS if name == "num_layers" else MAX_SIZE)
            elif field.type is float:
                rebuilt[name] = check.real(name, value, above=0.0)
            elif isinstance(value, list | tuple) and value:
                rebuilt[name] = tuple(check.integer(name, layer, low=0, high=MAX_LAYERS - 1) for layer in value)
            else:
                raise DTypeError(f"{cls.__name__}: `{name}` is {value!r:.100}, expected a list of layers")
        return cls(**rebuilt)


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
    feature_layers: tuple[int, ...] = (1, 3, 5)  # layers whose residual streams go to the drafter

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
    d_feature: int = 256  # width of the features of one target layer
    num_features: int = 3  # target layers that are read
    d_model: int = 256
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    d_hidden: int = 320  # SwiGLU
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6
