"""The built wheel works outside the checkout: an editable install would hide a missing file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command, cwd, **environment):
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.wheel
def test_wheel_runs_the_main_job_outside_the_checkout(tmp_path):
    build = ("-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path))
    run(sys.executable, *build, str(ROOT), cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check", "--target", str(site))
    run(sys.executable, *install, str(wheel), cwd=tmp_path)

    where = "import ddtree_cupy; print(ddtree_cupy.__file__)"
    assert run(sys.executable, "-c", where, cwd=tmp_path, PYTHONPATH=str(site)).startswith(str(site))
    assert (site / "ddtree_cupy" / "_cuda_src").is_dir()
    decode = ("-m", "ddtree_cupy", "decode", "--max-new-tokens", "12", "--json")
    found = json.loads(run(sys.executable, *decode, cwd=tmp_path, PYTHONPATH=str(site)))
    assert found["identical"]
    assert [way["way"] for way in found["ways"]] == ["autoregressive", "chain, 15 drafts", "tree, budget 64"]
