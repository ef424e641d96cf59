"""What messages and documents say about installing works in a checkout: the package is on no index."""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ddtree_cupy.errors import MissingGPUError
from ddtree_cupy.kernels.device import current_device

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = [
    path for glob in ("*.md", "docs/*.md", "ddtree_cupy/**/*.md", "ddtree_cupy/**/*.py") for path in ROOT.glob(glob)
]
ADVICE = re.compile(r"pip install((?: +(?:-e|\.|'[^'\n]+'|\"[^\"\n]+\")(?=[\s'\"`,;:)]|$))+)")


def requirements(text):
    """Return what every `pip install` of a text names."""
    assert text.count("pip install ") == len(ADVICE.findall(text)), "an argument of `pip install` without quotes"
    return {word for advice in ADVICE.findall(text) for word in shlex.split(advice) if word != "-e"}


def follow(advice):
    """Run a `pip install` in the checkout, without installing anything and without an index."""
    # building for `-e` takes one more package, which pip fetches where it may
    words = [word for word in shlex.split(advice) if word != "-e"]
    options = ("--dry-run", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    return subprocess.run(
        (sys.executable, "-m", "pip", "install", *options, *words),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_every_advice_names_the_checkout_or_a_requirement_of_an_extra():
    extras = PROJECT["optional-dependencies"]
    known = {requirement for extra in extras.values() for requirement in extra}
    found = {word for path in FILES for word in requirements(path.read_text())}
    assert {".", ".[cuda13]", ".[notebook]"} <= found
    for word in found - {"."}:
        names = re.fullmatch(r"\.\[([\w,]+)\]", word)
        if names is None:
            assert word in known or word.startswith("nvidia-cuda-"), word
        else:
            assert set(names[1].split(",")) <= set(extras), word


def test_missing_cupy_is_explained_by_advice_that_works(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingGPUError, match="in the checkout of ddtree_cupy run pip install") as caught:
        current_device()
    (advice,) = ADVICE.findall(str(caught.value))
    done = follow(advice)
    assert done.returncode == 0, done.stderr
