"""The built wheel works outside the checkout: an editable install would hide a missing file."""

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.package.test_dependencies import imports

ROOT = Path(__file__).parents[2]
WHEEL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
LEFT_OUT = tuple(path.removeprefix("/") for path in WHEEL["exclude"])


def run(*command, cwd, **environment):
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=True).stdout


def test_what_ships_imports_nothing_that_the_wheel_leaves_out():
    assert all((ROOT / path).exists() for path in LEFT_OUT)
    names = tuple(path.removesuffix(".py").replace("/", ".") for path in LEFT_OUT)
    for path in ROOT.glob("ddtree_cupy/**/*.py"):
        if not path.relative_to(ROOT).as_posix().startswith(LEFT_OUT):
            assert not [name for name, _ in imports(path) if name.startswith(names)], path


@pytest.mark.wheel
@pytest.mark.slow
def test_wheel_runs_the_main_job_outside_the_checkout(tmp_path):
    build = ("-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path))
    run(sys.executable, *build, str(ROOT), cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"ddtree_cupy/decode/tiny/target.npz", "ddtree_cupy/explore/play.js"} <= set(names)
    assert not [name for name in names if name.startswith(LEFT_OUT) or "/train" in name]

    site = tmp_path / "site"
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check", "--target", str(site))
    run(sys.executable, *install, str(wheel), cwd=tmp_path)

    def installed(*arguments):
        return run(sys.executable, *arguments, cwd=tmp_path, PYTHONPATH=str(site))

    assert installed("-c", "import ddtree_cupy; print(ddtree_cupy.__file__)").startswith(str(site))
    assert (site / "ddtree_cupy" / "_cuda_src").is_dir()
    measured = "from ddtree_cupy.explore import CostTable; print(CostTable.load().about['gpu'])"
    assert installed("-c", measured) == "NVIDIA H200\n"
    found = json.loads(installed("-m", "ddtree_cupy", "decode", "--max-new-tokens", "12", "--json"))
    assert found["identical"]
    assert [way["way"] for way in found["ways"]] == ["autoregressive", "chain, 15 drafts", "tree, budget 64"]
    evaluate = ("-m", "ddtree_cupy.decode.evaluate", "lossless", "--prompts", "1", "--max-new-tokens", "4", "--json")
    assert [row["identical"] for row in json.loads(installed(*evaluate))] == [1, 1, 1, 1]
