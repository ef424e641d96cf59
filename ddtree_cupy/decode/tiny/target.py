"""NumPy inference of the bundled target: a byte-level MLA transformer, absorbed form."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ddtree_cupy.containers import DraftTree, PagedKV
from ddtree_cupy.decode.tiny.config import TargetConfig
from ddtree_cupy.decode.tiny.layers import (
    Array,
    apply_rope,
    heads_matmul,
    place_on,
    rms_norm,
    rope_angles,
    rope_frequencies,
    swiglu,
)
from ddtree_cupy.decode.tiny.weights import Weights, check_shapes, load_weights
from ddtree_cupy.errors import DTypeError, ShapeError
from ddtree_cupy.tree_attention import tree_attention, write_kv

TARGET_WEIGHTS = Path(__file__).parent / "target.npz"
PAGE_SIZE = 16


@dataclass(frozen=True, eq=False)
class _Layer:
    """Weights of one layer, ready for the absorbed form.

    Letters: D d_model, H heads, C latent width, R rope width, n and v the per-head sizes before absorption.
    """

    attention_norm: Array  # (D,)
    q_kv_down: Array  # (H (n + R) + C + R, D), query and latent projections stacked
    kv_norm: Array  # (C,)
    k_up: Array  # (H, n, C)
    v_up: Array  # (H, C, v)
    out: Array  # (D, H v)
    mlp_norm: Array  # (D,)
    gate_up: Array  # (2 d_hidden, D)
    down: Array  # (D, d_hidden)


class TinyTarget:
    """The bundled target model, on NumPy or CuPy.

    A decoder-only byte model in the form of DeepSeek-V3: all heads share one latent key-value row `ckv` and one
    rotary key `kpe` a position. Keys are never expanded: with k_h = K_h ckv and v_h = V_h ckv,

        q_h . k_h = (K_h^T q_h) . ckv      sum_j p_j v_h[j] = V_h (sum_j p_j ckv[j])

    so the query absorbs K_h before `tree_attention` and the result meets V_h after it.

    Attributes
    ----------
    vocab_size : int
        256, one token a byte value.
    config : TargetConfig
    dtype : numpy.dtype
        float32 or float64: of all weights, caches and arithmetic.

    Notes
    -----
    Trained on contexts of 1,024 bytes; longer ones work, with worse predictions.
    Source: MLA and its absorbed form, DeepSeek-V2 (arXiv 2405.04434) section 2.1; DeepSeek-V3 (arXiv 2412.19437).
    Unlike there, queries have no low-rank step, and the layers are dense.

    Examples
    --------
    >>> target = TinyTarget.load()
    >>> prompt = np.frombuffer(b"import num", np.uint8)
    >>> kv = target.allocate(max_context=0, max_nodes=prompt.size)
    >>> logits, _ = target.forward(DraftTree.from_parents(prompt, np.arange(-1, prompt.size - 1)), kv)
    >>> chr(logits[-1].argmax())
    'b'
    """

    def __init__(
        self, config: TargetConfig, weights: Weights, dtype: npt.DTypeLike = np.float32, backend: str = "numpy"
    ) -> None:
        check_shapes(weights, _shapes(config))
        self.config = config
        self.vocab_size = config.vocab_size
        self.dtype = float_dtype("TinyTarget", dtype)
        self._place = place_on(backend)
        cast = {name: self._place(value.astype(self.dtype)) for name, value in weights.items()}
        self._frequencies = self._place(rope_frequencies(config.head_dim_kpe, config.rope_base))
        self._embed, self._norm, self._head = cast["embed.weight"], cast["norm.weight"], cast["head.weight"]
        self._layers = [_make_layer(config, cast, f"layers.{index}.") for index in range(config.num_layers)]

    @classmethod
    def load(cls, path: Path = TARGET_WEIGHTS, *, dtype: npt.DTypeLike = np.float32, backend: str = "numpy") -> Self:
        """Read a weights file, by default the bundled one; `backend` "cupy" computes on the GPU.

        Raises
        ------
        WeightsError
            The file is missing, truncated, altered or foreign.
        DTypeError
            `dtype` is neither float32 nor float64.
        """
        config, weights = load_weights(path, "target", TargetConfig)
        return cls(config, weights, dtype, backend)

    def allocate(self, max_context: int, max_nodes: int) -> tuple[PagedKV, ...]:
        """Return one empty cache a layer, with room for `max_context` keys and `max_nodes` tree nodes."""
        return tuple(
            PagedKV.allocate(
                max_context + max_nodes,
                page_size=PAGE_SIZE,
                head_dim_ckv=self.config.head_dim_ckv,
                head_dim_kpe=self.config.head_dim_kpe,
                dtype=self.dtype,
            ).map(self._place)
            for _ in range(self.config.num_layers)
        )

    def forward(self, tree: DraftTree, kv: Sequence[PagedKV]) -> tuple[Array, Array]:
        """Run all nodes of an unbatched tree in one pass.

        Parameters
        ----------
        tree : DraftTree
            N nodes; node i has position context_len + depths[i].
        kv : sequence of PagedKV
            One unbatched cache a layer, all of one context_len. The key of node i is written to position
            context_len + i; `context_lens` stays as it is.

        Returns
        -------
        logits : float array, shape (N, 256)
        features : float array, shape (N, F)
            Residual streams after the layers `config.feature_layers`, side by side.

        Raises
        ------
        ShapeError, DTypeError, ArgumentError
            The message names the argument, what it is and what was expected.
        """
        self._check(tree, kv)
        config = self.config
        positions = int(kv[0].context_lens) + tree.depths
        cos, sin = rope_angles(positions, self._frequencies, self.dtype)
        x = self._embed[tree.token_ids]
        features = []
        for index, (layer, layer_kv) in enumerate(zip(self._layers, kv, strict=True)):
            x = x + self._attend(layer, x, cos, sin, tree, layer_kv)
            x = x + swiglu(rms_norm(x, layer.mlp_norm, eps=config.norm_eps), layer.gate_up, layer.down)
            if index in config.feature_layers:
                features.append(x)
        logits: Array = rms_norm(x, self._norm, eps=config.norm_eps) @ self._head.T
        return logits, np.concatenate(features, axis=-1)

    def _attend(self, layer: _Layer, x: Array, cos: Array, sin: Array, tree: DraftTree, kv: PagedKV) -> Array:
        config = self.config
        projected = rms_norm(x, layer.attention_norm, eps=config.norm_eps) @ layer.q_kv_down.T
        q, ckv, kpe = np.split(projected, [-config.head_dim_ckv - config.head_dim_kpe, -config.head_dim_kpe], axis=-1)
        q = q.reshape(len(x), config.num_heads, -1)
        q_nope = heads_matmul(q[..., : config.head_dim_nope], layer.k_up)  # absorbs K: (N, H, C)
        q_pe = apply_rope(q[..., config.head_dim_nope :], cos[:, None], sin[:, None])
        ckv_rows = rms_norm(ckv, layer.kv_norm, eps=config.norm_eps)
        write_kv(kv, ckv_rows, apply_rope(kpe, cos, sin), num_rows=tree.num_nodes)
        latent, _ = tree_attention(tree, q_nope, q_pe, kv, sm_scale=config.sm_scale)
        attended: Array = heads_matmul(latent, layer.v_up).reshape(len(x), -1) @ layer.out.T
        return attended

    def _check(self, tree: DraftTree, kv: Sequence[PagedKV]) -> None:
        if tree.token_ids.ndim != 1:
            raise ShapeError(f"TinyTarget.forward: `tree.token_ids` is {tree.token_ids.shape}, expected (num_nodes,)")
        if len(kv) != self.config.num_layers:
            raise ShapeError(f"TinyTarget.forward: `kv` has {len(kv)} caches, expected {self.config.num_layers}")
        lens = {int(layer_kv.context_lens) for layer_kv in kv}
        if len(lens) != 1:
            raise ShapeError(f"TinyTarget.forward: `kv` has context_lens {sorted(lens)}, expected one length")


def float_dtype(model: str, dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Return `dtype` when it is float32 or float64, else raise DTypeError."""
    checked: np.dtype[Any] = np.dtype(dtype)
    if checked not in (np.float32, np.float64):
        raise DTypeError(f"{model}: `dtype` is {checked}, expected float32 or float64")
    return checked


def _shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every array in the weights file; matrices are (outputs, inputs)."""
    heads, width = config.num_heads, config.d_model
    latent, rope = config.head_dim_ckv, config.head_dim_kpe
    layer: dict[str, tuple[int, ...]] = {
        "attention_norm.weight": (width,),
        "attention.q.weight": (heads * (config.head_dim_nope + rope), width),
        "attention.kv_down.weight": (latent + rope, width),
        "attention.kv_norm.weight": (latent,),
        "attention.k_up.weight": (heads * config.head_dim_nope, latent),
        "attention.v_up.weight": (heads * config.head_dim_v, latent),
        "attention.out.weight": (width, heads * config.head_dim_v),
        "mlp_norm.weight": (width,),
        "mlp.gate.weight": (config.d_hidden, width),
        "mlp.up.weight": (config.d_hidden, width),
        "mlp.down.weight": (width, config.d_hidden),
    }
    shapes = {"embed.weight": (config.vocab_size, width), "head.weight": (config.vocab_size, width)}
    layers = {f"layers.{i}.{name}": shape for i in range(config.num_layers) for name, shape in layer.items()}
    return {**shapes, "norm.weight": (width,), **layers}


def _make_layer(config: TargetConfig, weights: Weights, prefix: str) -> _Layer:
    def named(name: str) -> Array:
        return weights[f"{prefix}{name}.weight"]

    k_up = named("attention.k_up").reshape(config.num_heads, config.head_dim_nope, config.head_dim_ckv)
    v_up = named("attention.v_up").reshape(config.num_heads, config.head_dim_v, config.head_dim_ckv)
    return _Layer(
        attention_norm=named("attention_norm"),
        q_kv_down=np.concatenate([named("attention.q"), named("attention.kv_down")]),
        kv_norm=named("attention.kv_norm"),
        k_up=k_up,
        v_up=v_up.transpose(0, 2, 1),
        out=named("attention.out"),
        mlp_norm=named("mlp_norm"),
        gate_up=np.concatenate([named("mlp.gate"), named("mlp.up")]),
        down=named("mlp.down"),
    )
