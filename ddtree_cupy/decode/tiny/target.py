"""NumPy inference of the bundled target: a byte-level MLA transformer, absorbed form."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddtree_cupy.containers import DraftTree, PagedKV
from ddtree_cupy.decode.tiny.config import TargetConfig
from ddtree_cupy.decode.tiny.layers import Array, apply_rope, heads_matmul, rms_norm, rope_angles, rope_frequencies
from ddtree_cupy.decode.tiny.model import Layer, Named, Shapes, TinyModel, bundled, shared_parts
from ddtree_cupy.decode.tiny.weights import Weights
from ddtree_cupy.errors import ShapeError
from ddtree_cupy.tree_attention import tree_attention, write_kv

TARGET_WEIGHTS = bundled("target")
PAGE_SIZE = 16


@dataclass(frozen=True, eq=False)
class _Layer(Layer):
    """Weights of one layer, ready for the absorbed form.

    Letters: D d_model, H heads, C latent width, R rope width, n and v the per-head sizes before absorption.
    """

    q_kv_down: Array  # (H (n + R) + C + R, D), query and latent projections stacked
    kv_norm: Array  # (C,)
    k_up: Array  # (H, n, C)
    v_up: Array  # (H, C, v)


class TinyTarget(TinyModel[TargetConfig]):
    """The bundled target model, on NumPy or CuPy.

    A decoder-only byte model in the form of DeepSeek-V3: all heads share one latent key-value row `ckv` and one
    rotary key `kpe` per position. Keys are never expanded: with k_h = K_h ckv and v_h = V_h ckv,

        q_h . k_h = (K_h^T q_h) . ckv      sum_j p_j v_h[j] = V_h (sum_j p_j ckv[j])

    so the query absorbs K_h before `tree_attention`, and the result is multiplied by V_h after it.

    Attributes
    ----------
    vocab_size : int
        256, one token per byte value.
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

    _kind, _config_type = "target", TargetConfig

    @staticmethod
    def _shapes(config: TargetConfig) -> tuple[Shapes, Shapes]:
        heads, width = config.num_heads, config.d_model
        latent, rope = config.head_dim_ckv, config.head_dim_kpe
        attention = {
            "q": (heads * (config.head_dim_nope + rope), width),
            "kv_down": (latent + rope, width),
            "kv_norm": (latent,),
            "k_up": (heads * config.head_dim_nope, latent),
            "v_up": (heads * config.head_dim_v, latent),
            "out": (width, heads * config.head_dim_v),
        }
        return attention, {}

    def _take(self, weights: Weights, layers: list[Named]) -> None:
        heads, latent = self.config.num_heads, self.config.head_dim_ckv
        self._frequencies = self._place(rope_frequencies(self.config.head_dim_kpe, self.config.rope_base))
        self._layers = [
            _Layer(
                q_kv_down=np.concatenate([named("attention.q"), named("attention.kv_down")]),
                kv_norm=named("attention.kv_norm"),
                k_up=named("attention.k_up").reshape(heads, -1, latent),
                v_up=named("attention.v_up").reshape(heads, -1, latent).transpose(0, 2, 1),
                **shared_parts(named),
            )
            for named in layers
        ]

    def allocate(self, max_context: int, max_nodes: int) -> tuple[PagedKV, ...]:
        """Return one empty cache per layer, with room for `max_context` keys and `max_nodes` tree nodes.

        They share `context_lens`, so that `commit_kv` takes one launch.
        """
        first, *others = (
            PagedKV.allocate(
                max_context + max_nodes,
                page_size=PAGE_SIZE,
                head_dim_ckv=self.config.head_dim_ckv,
                head_dim_kpe=self.config.head_dim_kpe,
                dtype=self.dtype,
            ).map(self._place)
            for _ in range(self.config.num_layers)
        )
        return first, *(replace(kv, context_lens=first.context_lens) for kv in others)

    def forward(self, tree: DraftTree, kv: Sequence[PagedKV]) -> tuple[Array, Array]:
        """Run all nodes of an unbatched tree in one pass.

        Parameters
        ----------
        tree : DraftTree
            N nodes; node i has position context_len + depths[i].
        kv : sequence of PagedKV
            One unbatched cache per layer, all with the same context_len. The key of node i is written to position
            context_len + i; `context_lens` does not change.

        Returns
        -------
        logits : float array, shape (N, 256)
        features : float array, shape (N, F)
            Residual streams after the layers `config.feature_layers`, side by side.
        """
        self._check(tree, kv)
        config = self.config
        positions = int(kv[0].context_lens) + tree.depths
        cos, sin = rope_angles(positions, self._frequencies, self.dtype)
        x = self._embed[tree.token_ids]
        features = []
        for index, (layer, layer_kv) in enumerate(zip(self._layers, kv, strict=True)):
            x = x + self._attend(layer, x, cos, sin, tree, layer_kv)
            x = layer.feed_forward(x, config.norm_eps)
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
