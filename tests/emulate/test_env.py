"""The table of environment variables is complete and true."""

import os
import re
from pathlib import Path

import pytest

import ddtree_cupy
from ddtree_cupy.emulate import env
from ddtree_cupy.errors import UnsupportedError

PACKAGE = Path(ddtree_cupy.__file__).parent


def test_every_variable_in_the_package_is_in_the_table():
    used = set()
    for path in PACKAGE.rglob("*"):
        if path.suffix in (".py", ".h", ".cpp", ".cu", ".cuh"):
            text = path.read_text()
            used |= set(re.findall(r"""["'](DDTREE_[A-Z_]+)["']""", text))
            used |= set(re.findall(r"environ[^\n]*(DDTREE_[A-Z_]+)", text))
    assert used == {switch.name for switch in env.SWITCHES}


def test_markdown_table_has_a_row_for_each():
    rows = env.markdown_table().strip().splitlines()
    assert len(rows) == 2 + len(env.SWITCHES)
    assert all(row.count("|") == 4 for row in rows)


def test_unlisted_names_are_refused():
    with pytest.raises(KeyError, match="DDTREE_OTHER"):
        env._value("DDTREE_OTHER")


def test_cache_dir_order(tmp_path, monkeypatch):
    monkeypatch.delenv("DDTREE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert env.cache_dir() == tmp_path / "xdg" / "ddtree_cupy"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert env.cache_dir() == tmp_path / "home" / ".cache" / "ddtree_cupy"
    monkeypatch.setenv("DDTREE_CACHE_DIR", str(tmp_path / "own"))
    assert env.cache_dir() == tmp_path / "own"


def test_cache_dir_falls_back_when_it_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DDTREE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(env.tempfile, "gettempdir", lambda: str(tmp_path))
    found = env.cache_dir()
    assert found == tmp_path / f"ddtree_cupy-{os.getuid()}"
    assert found.stat().st_mode & 0o077 == 0
    found.rmdir()
    (tmp_path / "elsewhere").mkdir()
    found.symlink_to(tmp_path / "elsewhere")  # someone else's trap: not followed
    assert env.cache_dir() not in (found, tmp_path / "elsewhere")


def test_switches_are_read_when_asked(monkeypatch):
    monkeypatch.setenv("DDTREE_EMULATE_SANITIZE", "tsan")
    assert env.sanitizer() == "tsan"
    monkeypatch.setenv("DDTREE_EMULATE_SANITIZE", "everything")
    with pytest.raises(UnsupportedError, match=r"asan\+ubsan, tsan"):
        env.sanitizer()
    monkeypatch.setenv("DDTREE_EMULATE_UCONTEXT", "0")
    assert not env.use_ucontext()
