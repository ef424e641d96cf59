"""The weights files: `.npz` without pickle, with the config and a checksum inside."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ddtree_cupy._files import open_arrays, write_arrays
from ddtree_cupy.decode.tiny.config import DrafterConfig, TargetConfig
from ddtree_cupy.errors import WeightsError

Weights = Mapping[str, npt.NDArray[Any]]
Config = TypeVar("Config", TargetConfig, DrafterConfig)

FORMAT = "ddtree-tiny-1"


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
    write_arrays(path, {"format": FORMAT, "kind": kind, "config": sizes}, arrays, about=sizes)


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
    with open_arrays(path, "weights") as file:
        header = file.read_header(FORMAT)
        if header.get("kind") != kind:
            raise WeightsError(f"{path}: holds {header.get('kind')!r:.100} weights, expected {kind!r}")
        sizes: Any = header.get("config")
        config = config_type.from_dict(sizes)
        arrays = file.read_arrays(header, about=sizes)
    wrong = [f"`{name}` is {array.dtype}" for name, array in arrays.items() if array.dtype != np.float16]
    if wrong:
        raise WeightsError(f"{path}: {wrong[0]}, expected float16")
    return config, arrays
