"""The folder of compiled kernels: several in one process, folders and files of other users, damaged libraries."""

import os
import shutil
import stat
import subprocess

import numpy as np
import pytest

from ddtree_cupy import emulate
from ddtree_cupy.emulate import env
from ddtree_cupy.errors import EmulatorError
from tests.emulate.cases import run_python

pytestmark = pytest.mark.emulate

# Counts threads by a barrier and a warp sum, so the runtime's context and scheduler must be those the kernel uses.
PROGRAM = """
import os, sys, tempfile
import numpy as np
from ddtree_cupy import emulate
def kernel(n):
    code = '''extern "C" __global__ void k(int* y) {
      __shared__ int s[64];
      s[threadIdx.x] = threadIdx.x;
      __syncthreads();
      y[threadIdx.x] = s[63 - threadIdx.x] + __reduce_add_sync(~0u, %d);
    }''' % n
    return n, emulate.Module(code).get_function("k")
def check(n_and_function):
    n, function = n_and_function
    y = np.zeros(64, np.int32)
    function((2,), (64,), (y,), seed=3)
    assert y.tolist() == [63 - i + 32 * n for i in range(64)], (n, y)
"""


def run(program, **environment):
    child = run_python(PROGRAM + program, **environment)
    assert child.returncode == 0, child.stderr[-2000:].decode()


def launch(n=1):
    y = np.zeros(1, np.int32)
    emulate.Module(f'extern "C" __global__ void k(int* y) {{ y[0] = {n}; }}').get_function("k")((1,), (1,), (y,))
    assert y[0] == n


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache that holds the kernel of `launch()` and that of `kernel(1)`."""
    folder = tmp_path_factory.mktemp("filled") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDTREE_CACHE_DIR", str(folder))
        launch()
    run("kernel(1)", DDTREE_CACHE_DIR=str(folder))
    return folder


@pytest.fixture
def cache(filled, tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    shutil.copytree(filled, folder)
    monkeypatch.setenv("DDTREE_CACHE_DIR", str(folder))
    launch()
    return folder


def give_away(path):
    """Make `path` a file of another user."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        path.unlink()
        path.symlink_to("/bin/sh")


def test_cache_folder_may_change_between_kernels_and_between_launches(cache, tmp_path):
    shutil.copytree(cache, tmp_path / "b")  # with a second copy of the runtime
    run(
        """
kernels = []
for n, folder in enumerate("AB", 1):
    os.environ["DDTREE_CACHE_DIR"] = os.environ[folder]
    kernels.append(kernel(n))
    for one in kernels:
        check(one)
os.environ["DDTREE_CACHE_DIR"] = os.environ["A"]
check(kernels[1])
""",
        A=str(cache),
        B=str(tmp_path / "b"),
    )


def test_kernels_share_the_fallback_folder_of_a_process(tmp_path):
    (tmp_path / "file").write_text("")
    trap = tmp_path / f"ddtree_cupy-{os.getuid()}"
    trap.symlink_to(tmp_path)  # somebody else's: not followed
    run(
        """
from ddtree_cupy.emulate import env
for n in (1, 2):
    check(kernel(n))
assert env.cache_dir() == env.cache_dir()
assert str(env.cache_dir()).startswith(os.environ["TMPDIR"])
""",
        DDTREE_CACHE_DIR=str(tmp_path / "file" / "cache"),
        TMPDIR=str(tmp_path),
    )
    (own,) = (path for path in tmp_path.glob("ddtree_cupy-*") if path != trap)
    assert own.stat().st_mode & 0o777 == 0o700


def test_folders_and_libraries_are_created_for_this_user_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("DDTREE_CACHE_DIR", str(tmp_path / "new" / "cache"))
    before = os.umask(0)
    try:
        launch()
    finally:
        os.umask(before)
    made = list((tmp_path / "new").rglob("*"))
    assert [path.suffix for path in made].count(".so") == 2
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "new", *made))


@pytest.mark.parametrize("place", [".", "emulate"])
@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_folders_that_others_may_write_are_refused(cache, place, mode):
    folder = cache / place
    folder.chmod(mode)
    with pytest.raises(EmulatorError, match=rf"{folder} may be written by other users \(its mode is {mode:04o}\)") as e:
        launch()
    advice = str(e.value).split("`")[1]
    subprocess.run(advice, shell=True, check=True)
    launch()


def test_folders_of_other_users_are_refused(cache, monkeypatch, tmp_path):
    me = os.geteuid()
    with monkeypatch.context() as other:
        other.setattr(env.os, "geteuid", lambda: me + 1)
        with pytest.raises(EmulatorError, match=rf"belongs to user {me}, you are user {me + 1}.*DDTREE_CACHE_DIR to a"):
            launch()
    monkeypatch.setenv("DDTREE_CACHE_DIR", str(tmp_path / "other"))
    launch()


def library_of(cache, name):
    """Return the runtime, or the kernel that `launch()` uses."""
    for source in cache.glob("emulate/*.cpp"):
        if "y[0] = 1" in source.read_text():
            kernel = source.with_suffix(".so")
    (runtime,) = cache.glob("emulate/runtime-*.so")
    return {"runtime": runtime, "kernel": kernel}[name]


@pytest.mark.parametrize("name", ["runtime", "kernel"])
@pytest.mark.parametrize("change", [give_away, lambda path: path.chmod(0o722)], ids=["owner", "mode"])
def test_libraries_of_other_users_are_refused(cache, change, name):
    library = library_of(cache, name)
    change(library)
    with pytest.raises(EmulatorError, match=rf"{library} (belongs to|may be written by).*delete it"):
        launch()
    library.unlink()
    launch()


@pytest.mark.parametrize("damage", ["short", "flipped"])
def test_damaged_libraries_are_built_again(cache, damage):
    """In a process of its own: a library that is in use cannot be damaged without harm."""
    libraries = list(cache.glob("emulate/*.so"))
    assert len(libraries) == 3
    for library in libraries:
        content = bytearray(library.read_bytes())
        if damage == "flipped":
            content[len(content) // 3] ^= 0x10
        library.write_bytes(content[:5000] if damage == "short" else content)
    run("check(kernel(1))", DDTREE_CACHE_DIR=str(cache))
    libraries.remove(library_of(cache, "kernel"))  # not asked for
    assert all(stat.S_IMODE(library.stat().st_mode) == 0o700 for library in libraries)


def write_file(path):
    path.write_text("")


def link_to_nothing(path):
    path.symlink_to("nothing")


@pytest.mark.parametrize("make", [write_file, link_to_nothing, os.mkfifo])
def test_what_is_not_a_folder_is_refused_in_words(make, tmp_path, monkeypatch):
    monkeypatch.setenv("DDTREE_CACHE_DIR", str(tmp_path))
    make(tmp_path / "emulate")
    with pytest.raises(EmulatorError, match=rf"cannot be used \(.*{tmp_path}/emulate'\).*DDTREE_CACHE_DIR to another"):
        launch()


def test_libraries_that_cannot_be_read_or_loaded_are_refused_in_words(cache, tmp_path, monkeypatch):
    library = library_of(cache, "kernel")
    library.unlink()
    library.mkdir(0o700)
    with pytest.raises(EmulatorError, match=rf"cannot be used \(.*{library}'\)"):
        launch()
    monkeypatch.setenv("DDTREE_CACHE_DIR", str(tmp_path / "$ORIGIN"))  # the loader expands it
    shutil.copytree(cache, tmp_path / "$ORIGIN")
    with pytest.raises(EmulatorError, match=r"cannot be loaded \(.*DDTREE_CACHE_DIR to another folder"):
        launch(2)


def test_a_cache_folder_may_begin_with_a_dash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DDTREE_CACHE_DIR", "-Wl")
    launch()
    assert (tmp_path / "-Wl" / "emulate").is_dir()
    shutil.rmtree(tmp_path / "-Wl")
