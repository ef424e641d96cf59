"""The weights files: whole or refused."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_cupy.decode.tiny import TinyDrafter, TinyTarget
from ddtree_cupy.decode.tiny.config import DrafterConfig, TargetConfig
from ddtree_cupy.decode.tiny.drafter import DRAFTER_WEIGHTS
from ddtree_cupy.decode.tiny.target import TARGET_WEIGHTS
from ddtree_cupy.decode.tiny.weights import load_weights, save_weights
from ddtree_cupy.errors import DTypeError, WeightsError

CONFIG = TargetConfig(d_model=16, num_layers=1)


def small_weights():
    rng = np.random.default_rng(0)
    return {"norm.weight": np.ones(16, np.float16), "head.weight": rng.standard_normal((8, 16)).astype(np.float16)}


@pytest.fixture(scope="module")
def small_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "small.npz"
    save_weights(path, "target", CONFIG, small_weights())
    return path


def test_weights_fit_the_size_limit():
    assert TARGET_WEIGHTS.stat().st_size + DRAFTER_WEIGHTS.stat().st_size <= 12_000_000


@pytest.mark.parametrize("config", [TargetConfig(num_layers=4), DrafterConfig()])
def test_config_from_dict_is_identical(config):
    sizes = config.to_dict()
    assert type(config).from_dict(sizes) == config
    assert type(config).from_dict(json.loads(json.dumps(sizes))) == config


def test_load_weights_matches_saved(small_file):
    config, weights = load_weights(small_file, "target", TargetConfig)
    assert config == CONFIG
    assert weights.keys() == small_weights().keys()
    for name, value in small_weights().items():
        np.testing.assert_array_equal(weights[name], value, strict=True)


@given(data=st.data())
def test_load_weights_rejects_truncated(small_file, tmp_path_factory, data):
    content = small_file.read_bytes()
    path = tmp_path_factory.getbasetemp() / "truncated.npz"
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1), label="length")])
    with pytest.raises(WeightsError, match="truncated"):
        load_weights(path, "target", TargetConfig)


def test_load_rejects_foreign_files(tmp_path):
    np.save(tmp_path / "array.npy", np.zeros(3))
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    np.savez(tmp_path / "pickled.npz", a=np.array([{}], dtype=object))
    (tmp_path / "text.npz").write_text("no weights here")
    for name in ("array.npy", "other.npz", "pickled.npz", "text.npz", "missing.npz"):
        with pytest.raises(WeightsError, match=name):
            TinyTarget.load(tmp_path / name)


def test_load_rejects_the_other_models_weights():
    with pytest.raises(WeightsError, match="holds 'drafter' weights, expected 'target'"):
        TinyTarget.load(DRAFTER_WEIGHTS)


def test_load_rejects_arrays_that_do_not_fit_the_config(small_file):
    with pytest.raises(WeightsError, match=r"`embed\.weight` has shape None"):
        TinyTarget.load(small_file)


@pytest.mark.parametrize("model", [TinyTarget, TinyDrafter])
def test_load_rejects_other_dtypes(model):
    with pytest.raises(DTypeError, match="float16, expected float32 or float64"):
        model.load(dtype=np.float16)
