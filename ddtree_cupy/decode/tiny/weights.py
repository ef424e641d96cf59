"""The weights files: `.npz` without pickle, with the config and a checksum inside."""

import hashlib
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ddtree_cupy.decode.tiny.config import DrafterConfig, TargetConfig
from ddtree_cupy.errors import WeightsError

Weights = Mapping[str, npt.NDArray[Any]]
Config = TypeVar("Config", TargetConfig, DrafterConfig)

FORMAT = "ddtree-tiny-1"
_HEADER = "__header__"


def save_weights(path: Path, kind: str, config: TargetConfig | DrafterConfig, weights: Weights) -> None:
    """Write weights as float16 with their config and checksum.

    Parameters
    ----------
    kind : str
        ``"target"`` or ``"drafter"``; `load_weights` asks for it.
    weights : mapping of name to float array
    """
    arrays = {name: np.ascontiguousarray(value, dtype=np.float16) for name, value in weights.items()}
    sizes = config.to_dict()
    header = {"format": FORMAT, "kind": kind, "config": sizes, "sha256": _checksum(sizes, arrays)}
    contents: dict[str, Any] = {_HEADER: np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays}
    np.savez_compressed(path, **contents)


def load_weights(path: Path, kind: str, config_type: type[Config]) -> tuple[Config, Weights]:
    """Read a weights file and check that it is whole.

    Returns
    -------
    config : config_type
    weights : mapping of name to float16 array

    Raises
    ------
    WeightsError
        The file is missing, truncated, altered, or holds something else.
    """
    if not path.is_file():
        raise WeightsError(f"{path}: no such weights file")
    if not zipfile.is_zipfile(path):
        raise WeightsError(f"{path}: not a weights file, or a truncated one")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:  # a damaged archive can fail in any way
        raise WeightsError(f"{path}: truncated or altered ({error})") from error
    header = _parse_header(arrays.pop(_HEADER, None))
    if header is None:
        raise WeightsError(f"{path}: not a weights file of format {FORMAT}")
    if header.get("kind") != kind:
        raise WeightsError(f"{path}: holds {header.get('kind')!r} weights, expected {kind!r}")
    sizes = header.get("config")
    if not isinstance(sizes, dict) or header.get("sha256") != _checksum(sizes, arrays):
        raise WeightsError(f"{path}: altered, the checksum does not match")
    try:
        return config_type.from_dict(sizes), arrays
    except ValueError as error:
        raise WeightsError(f"{path}: {error}") from error


def check_shapes(weights: Weights, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise WeightsError unless `weights` has exactly these arrays."""
    found = {name: value.shape for name, value in weights.items()}
    wrong = sorted(name for name in found.keys() | shapes.keys() if found.get(name) != shapes.get(name))
    if wrong:
        name = wrong[0]
        raise WeightsError(f"weights: `{name}` has shape {found.get(name)}, the config asks for {shapes.get(name)}")


def _parse_header(raw: npt.NDArray[Any] | None) -> dict[str, Any] | None:
    """Return the header, or None when there is none of this format."""
    try:
        header = json.loads(raw.tobytes()) if raw is not None else None
    except ValueError:
        return None
    return header if isinstance(header, dict) and header.get("format") == FORMAT else None


def _checksum(sizes: Mapping[str, Any], arrays: Weights) -> str:
    """SHA-256 over the config and over names, shapes, dtypes and bytes, in the order of the names."""
    digest = hashlib.sha256(json.dumps(sizes, sort_keys=True).encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.shape} {array.dtype.str}\n".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
