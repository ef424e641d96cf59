"""The building blocks that both models share; each keeps the dtype and the array library of its input.

Only NumPy is named here: CuPy replaces the NumPy functions by `__array_function__` and `__array_ufunc__`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy.errors import ArgumentError
from ddtree_cupy.kernels.device import current_device

Array = Any
Place = Callable[[Any], Any]  # moves a NumPy array to where a model computes


def place_on(backend: str) -> Place:
    """Return the function that moves NumPy arrays to a backend, "numpy" or "cupy".

    Raises
    ------
    ArgumentError
        `backend` is another name.
    MissingGPUError
        `backend` is "cupy", and CuPy or a GPU is missing.
    """
    if backend == "numpy":
        return lambda array: array
    if backend != "cupy":
        raise ArgumentError(f"TinyTarget, TinyDrafter: `backend` is {backend!r}, expected 'numpy' or 'cupy'")
    current_device()
    import cupy

    to_device: Place = cupy.asarray
    return to_device


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


def rope_frequencies(width: int, base: float) -> Array:
    """Return the angles in radians by which one position turns each pair, float64, shape (width / 2,)."""
    return base ** (-np.arange(0, width, 2) / width)


def rope_angles(positions: Array, frequencies: Array, dtype: npt.DTypeLike) -> tuple[Array, Array]:
    """Return cos and sin, shape (n, width / 2), of integer positions (n,)."""
    angles = positions[:, None] * frequencies
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def apply_rope(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate the pairs (x[i], x[i + width / 2]) of the last axis."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def heads_matmul(x: Array, per_head: Array) -> Array:
    """Multiply each head of x (n, H, a) by its own matrix (H, a, b); returns (n, H, b)."""
    return (x.transpose(1, 0, 2) @ per_head).transpose(1, 0, 2)
