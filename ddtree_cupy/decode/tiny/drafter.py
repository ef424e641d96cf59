"""NumPy inference of the bundled drafter: a block of tokens from one forward pass."""

from dataclasses import dataclass

import numpy as np

from ddtree_cupy.decode.tiny.config import DrafterConfig
from ddtree_cupy.decode.tiny.layers import Array, apply_rope, rms_norm, rope_angles, rope_frequencies
from ddtree_cupy.decode.tiny.model import Layer, Named, Shapes, TinyModel, bundled, shared_parts
from ddtree_cupy.decode.tiny.weights import Weights
from ddtree_cupy.errors import ArgumentError, ShapeError

DRAFTER_WEIGHTS = bundled("drafter")


@dataclass(frozen=True, eq=False)
class DrafterState:
    """What the drafter keeps of the committed text; a state is never modified.

    Attributes
    ----------
    num_observed : int
        Committed positions so far; the position of the next root.
    keys, values : float array, shape (num_layers, num_kv_heads, w, head_dim)
        Those of the last w <= window positions.
    """

    num_observed: int
    keys: Array
    values: Array


@dataclass(frozen=True, eq=False)
class _Layer(Layer):
    qkv: Array  # ((H + 2 KV) head_dim, D), query, key and value projections stacked
    q_norm: Array  # (head_dim,)
    k_norm: Array  # (head_dim,)


class TinyDrafter(TinyModel[DrafterConfig]):
    """The bundled block drafter, on NumPy or CuPy.

    Slot 0 of a block holds the root token, each of the slots 1 to L a learned vector. All slots see each other, and
    in every layer also keys and values projected from the target's features of the last `window` committed positions.
    Row i of the result scores the token i + 1 positions after the root. The rows are marginal distributions: none
    depends on a token of another.

    Attributes
    ----------
    draft_len : int
        L = 15.
    vocab_size : int
        256.
    config : DrafterConfig
    dtype : numpy.dtype
        float32 or float64.

    Notes
    -----
    Source: DFlash (arXiv 2602.06036). Unlike there, each masked slot has its own vector, and embedding and head are
    the drafter's own (they start from the target's).

    Examples
    --------
    >>> drafter = TinyDrafter.load()
    >>> state = drafter.observe(drafter.start(), np.zeros((3, 768), np.float32))
    >>> state.num_observed, drafter.propose(state, root_token_id=10).shape
    (3, (15, 256))
    """

    _kind, _config_type = "drafter", DrafterConfig

    @staticmethod
    def _shapes(config: DrafterConfig) -> tuple[Shapes, Shapes]:
        width, size = config.d_model, config.head_dim
        attention = {
            "q": (config.num_heads * size, width),
            "k": (config.num_kv_heads * size, width),
            "v": (config.num_kv_heads * size, width),
            "q_norm": (size,),
            "k_norm": (size,),
            "out": (width, config.num_heads * size),
        }
        others = {
            "slots": (config.draft_len, width),
            "fuse.weight": (width, config.num_features * config.d_feature),
            "context_norm.weight": (width,),
        }
        return attention, others

    def _take(self, weights: Weights, layers: list[Named]) -> None:
        config = self.config
        self.draft_len = config.draft_len
        self._frequencies = self._place(rope_frequencies(config.head_dim, config.rope_base))
        self._slots, self._fuse = weights["slots"], weights["fuse.weight"]
        self._context_norm = weights["context_norm.weight"]
        self._layers = [
            _Layer(
                qkv=np.concatenate([named("attention.q"), named("attention.k"), named("attention.v")]),
                q_norm=named("attention.q_norm"),
                k_norm=named("attention.k_norm"),
                **shared_parts(named),
            )
            for named in layers
        ]
        # keys and values of the context, for all layers in one product
        self._context_kv = np.concatenate([layer.qkv[config.num_heads * config.head_dim :] for layer in self._layers])

    def start(self) -> DrafterState:
        """Return the state of an empty text."""
        shape = (self.config.num_layers, self.config.num_kv_heads, 0, self.config.head_dim)
        empty = self._place(np.zeros(shape, self.dtype))
        return DrafterState(0, empty, empty)

    def observe(self, state: DrafterState, features: Array) -> DrafterState:
        """Return the state after more committed positions; the old one stays valid.

        Parameters
        ----------
        features : float array, shape (n, F)
            The target's features of the next n positions, in order.
        """
        config = self.config
        width = config.num_features * config.d_feature
        if features.ndim != 2 or features.shape[1] != width:
            raise ShapeError(f"TinyDrafter.observe: `features` is {features.shape}, expected (num_positions, {width})")
        end = state.num_observed + len(features)
        features = features[-config.window :]
        context = self._context(features.astype(self.dtype, copy=False))
        keys, values = np.split(
            (context @ self._context_kv.T).reshape(-1, config.num_layers, 2 * config.num_kv_heads, config.head_dim),
            2,
            axis=2,
        )
        k_norms = np.stack([layer.k_norm for layer in self._layers])[:, None]
        cos, sin = self._angles(np.arange(end - len(features), end))
        keys = apply_rope(rms_norm(keys, k_norms, eps=config.norm_eps), cos[:, None, None], sin[:, None, None])
        return DrafterState(end, self._append(state.keys, keys), self._append(state.values, values))

    def propose(self, state: DrafterState, root_token_id: int) -> Array:
        """Draft the block after a root.

        Parameters
        ----------
        state : DrafterState
            A state that has observed every position before the root.
        root_token_id : int
            In 0..255.

        Returns
        -------
        float array, shape (L, 256)
            Logits; row i scores the token i + 1 positions after the root.
        """
        config = self.config
        if not 0 <= root_token_id < self.vocab_size:
            raise ArgumentError(f"TinyDrafter.propose: `root_token_id` is {root_token_id}, expected 0..255")
        x = np.concatenate([self._embed[root_token_id][None], self._slots])
        angles = self._angles(state.num_observed + np.arange(len(x)))
        for layer, keys, values in zip(self._layers, state.keys, state.values, strict=True):
            x = x + self._attend(layer, x, angles, keys, values)
            x = layer.feed_forward(x, config.norm_eps)
        logits: Array = rms_norm(x[1:], self._norm, eps=config.norm_eps) @ self._head.T
        return logits

    def _context(self, features: Array) -> Array:
        """Project features (n, F) to (n, D), after normalising the part of each target layer."""
        parts = features.reshape(-1, self.config.num_features, self.config.d_feature)
        fused = rms_norm(parts, eps=self.config.norm_eps).reshape(features.shape) @ self._fuse.T
        return rms_norm(fused, self._context_norm, eps=self.config.norm_eps)

    def _attend(self, layer: _Layer, x: Array, angles: tuple[Array, Array], keys: Array, values: Array) -> Array:
        """Attend from every slot x (L + 1, D) to the context (KV, w, head_dim) and to the whole block."""
        config = self.config
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
        cos, sin = (angle[:, None] for angle in angles)
        qkv = rms_norm(x, layer.attention_norm, eps=config.norm_eps) @ layer.qkv.T
        q, k, v = np.split(qkv.reshape(len(x), -1, size), [heads, heads + kv_heads], axis=1)
        q = apply_rope(rms_norm(q, layer.q_norm, eps=config.norm_eps), cos, sin)
        k = apply_rope(rms_norm(k, layer.k_norm, eps=config.norm_eps), cos, sin)
        keys = np.concatenate([keys, k.transpose(1, 0, 2)], axis=1)
        values = np.concatenate([values, v.transpose(1, 0, 2)], axis=1)
        # the query heads of one key head side by side: (KV, slots * heads / KV, head_dim)
        grouped = q.reshape(len(x), kv_heads, -1, size).transpose(1, 0, 2, 3).reshape(kv_heads, -1, size)
        scores = grouped @ keys.transpose(0, 2, 1) * x.dtype.type(size**-0.5)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = weights @ values / weights.sum(axis=-1, keepdims=True)
        mixed = mixed.reshape(kv_heads, len(x), -1, size).transpose(1, 0, 2, 3).reshape(len(x), -1)
        attended: Array = mixed @ layer.out.T
        return attended

    def _append(self, old: Array, new: Array) -> Array:
        """Join old (layers, KV, w, head_dim) and new (n, layers, KV, head_dim) rows; keep the last `window`."""
        return np.concatenate([old, new.transpose(1, 2, 0, 3)], axis=2)[:, :, -self.config.window :]

    def _angles(self, positions: Array) -> tuple[Array, Array]:
        return rope_angles(self._place(positions), self._frequencies, self.dtype)
