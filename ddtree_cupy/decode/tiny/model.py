"""What the bundled models share: weights from a file, their shapes, and the half of a layer that is not attention."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Self

import numpy as np

from ddtree_cupy._arrays import as_dtype
from ddtree_cupy.decode.tiny.layers import Array, Place, place_on, rms_norm, swiglu
from ddtree_cupy.decode.tiny.weights import Config, Weights, load_weights
from ddtree_cupy.errors import WeightsError

Shapes = dict[str, tuple[int, ...]]
Named = Callable[[str], Array]  # from a name inside a layer, without ".weight", to the array


@dataclass(frozen=True, eq=False, kw_only=True)
class Layer:
    """Weights of one layer but for the attention's inputs; D is d_model, H v the width of the attended values."""

    attention_norm: Array  # (D,)
    out: Array  # (D, H v)
    mlp_norm: Array  # (D,)
    gate_up: Array  # (2 d_hidden, D)
    down: Array  # (D, d_hidden)

    def feed_forward(self, x: Array, eps: float) -> Array:
        """Return x (n, D) plus what the second half of the layer adds."""
        return x + swiglu(rms_norm(x, self.mlp_norm, eps=eps), self.gate_up, self.down)


def shared_parts(named: Named) -> dict[str, Array]:
    """Return the fields of `Layer`."""
    return {
        "attention_norm": named("attention_norm"),
        "out": named("attention.out"),
        "mlp_norm": named("mlp_norm"),
        "gate_up": np.concatenate([named("mlp.gate"), named("mlp.up")]),
        "down": named("mlp.down"),
    }


class TinyModel(Generic[Config]):
    """Base of the bundled models, on NumPy or CuPy; a subclass names its arrays and makes its layers of them."""

    _kind: ClassVar[str]  # of the weights file
    _config_type: type[Config]

    def __init__(self, config: Config, weights: Weights, dtype: Any = np.float32, backend: str = "numpy") -> None:
        asked = _all_shapes(config, *self._shapes(config))
        found = {name: array.shape for name, array in weights.items()}
        for name in sorted(found.keys() | asked.keys()):
            if found.get(name) != asked.get(name):
                raise WeightsError(
                    f"weights: `{name}` has shape {found.get(name)}, the config asks for {asked.get(name)}"
                )
        self.config: Config = config
        self.vocab_size: int = config.vocab_size
        self.dtype = as_dtype(type(self).__name__, "dtype", dtype, ("float32", "float64"))
        self._place: Place = place_on(backend)
        cast = {name: self._place(value.astype(self.dtype)) for name, value in weights.items()}
        self._embed, self._norm, self._head = (cast[f"{name}.weight"] for name in ("embed", "norm", "head"))

        def layer(index: int) -> Named:
            return lambda name: cast[f"layers.{index}.{name}.weight"]

        self._take(cast, [layer(index) for index in range(config.num_layers)])

    @staticmethod
    def _shapes(config: Config) -> tuple[Shapes, Shapes]:
        """Return the shapes of a layer's attention matrices and of the arrays that the other model lacks."""
        raise NotImplementedError

    def _take(self, weights: Weights, layers: list[Named]) -> None:
        """Keep the arrays as the forward pass needs them."""
        raise NotImplementedError

    @classmethod
    def load(cls, path: Path | None = None, *, dtype: Any = np.float32, backend: str = "numpy") -> Self:
        """Read a weights file, by default the bundled one; `backend` "cupy" computes on the GPU.

        Raises
        ------
        WeightsError
            The file is missing, truncated, altered or foreign.
        DTypeError
            `dtype` is neither float32 nor float64.
        """
        config, weights = load_weights(path or bundled(cls._kind), cls._kind, cls._config_type)
        return cls(config, weights, dtype, backend)


def bundled(kind: str) -> Path:
    """Return the weights file that ships, "target" or "drafter"."""
    return Path(__file__).parent / f"{kind}.npz"


def _all_shapes(config: Any, attention: Shapes, others: Shapes) -> Shapes:
    """Return the shape of every array in the weights file; matrices are (outputs, inputs)."""
    width, hidden = config.d_model, config.d_hidden
    layer = {"attention_norm": (width,), **{f"attention.{name}": shape for name, shape in attention.items()}}
    layer |= {"mlp_norm": (width,), "mlp.gate": (hidden, width), "mlp.up": (hidden, width), "mlp.down": (width, hidden)}
    shapes: Shapes = {f"layers.{i}.{name}.weight": s for i in range(config.num_layers) for name, s in layer.items()}
    shapes |= {"embed.weight": (config.vocab_size, width), "head.weight": (config.vocab_size, width)}
    return {**shapes, "norm.weight": (width,), **others}
