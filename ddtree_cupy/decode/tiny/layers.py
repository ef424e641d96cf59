"""The NumPy building blocks that both models share; each keeps the dtype of its input."""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def rms_norm(x: Array, weight: Array | None = None, *, eps: float) -> Array:
    """Divide the last axis by its root mean square and multiply by `weight`."""
    normed: Array = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + x.dtype.type(eps))
    return normed if weight is None else normed * weight


def swiglu(x: Array, gate_up: Array, down: Array) -> Array:
    """Return down(silu(gate x) * up x); `gate_up` stacks both matrices (2 hidden, d_model)."""
    gate, up = np.split(x @ gate_up.T, 2, axis=-1)
    half = gate.dtype.type(0.5)
    silu = gate * (half + half * np.tanh(half * gate))  # gate * sigmoid(gate), without overflow
    product: Array = (silu * up) @ down.T
    return product


def rope_angles(positions: Array, width: int, base: float, dtype: npt.DTypeLike) -> tuple[Array, Array]:
    """Return cos and sin, shape (n, width / 2), of integer positions (n,)."""
    inverse = base ** (-np.arange(0, width, 2) / width)
    angles = positions[:, None] * inverse
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def apply_rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate the pairs (x[i], x[i + width / 2]) of the last axis."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def heads_matmul(x: Array, per_head: Array) -> Array:
    """Multiply each head of x (n, H, a) by its own matrix (H, a, b); returns (n, H, b)."""
    product: Array = np.matmul(x.transpose(1, 0, 2), per_head).transpose(1, 0, 2)
    return product
