"""Flattening: each header once, messages that name the right file and line."""

import io
import zipfile

import pytest

from ddtree_cupy.errors import CompileError
from ddtree_cupy.kernels import source
from ddtree_cupy.kernels.source import expand, expand_text


@pytest.fixture
def root(tmp_path):
    files = {
        "common/warp.cuh": '#pragma once\n#include <cuda_fp16.h>\n#include "dtype.cuh"\nint warp;\n',
        "common/dtype.cuh": "  # pragma once\nint dtype;\n",
        "op/a.cu": '// a\n#include "common/warp.cuh"\n#include "common/dtype.cuh"\nint a;\n'
        '#include "near.cuh"\nint b;\n',
        "op/near.cuh": '#include "../common/warp.cuh"\nint near;\n',
        "op/lost.cu": '\n#include "common/none.cuh"\n',
        "op/loop.cu": '#include "loop.cuh"\nint c;\n',
        "op/loop.cuh": '#include "loop.cuh"\nint loop;\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def places(text):
    """Map each non-empty line that is no directive to the file and line the compiler would name."""
    file, number, found = "?", 0, {}
    for line in text.splitlines():
        if line.startswith("#line"):
            _, digits, name = line.split(maxsplit=2)
            file, number = name.strip('"'), int(digits) - 1
        else:
            number += 1
            if line:
                found[line] = (file, number)
    return found


def test_expand_keeps_every_place(root):
    text = expand("op/a.cu", root=root)
    assert places(text) == {
        "// a": ("op/a.cu", 1),
        "#include <cuda_fp16.h>": ("common/warp.cuh", 2),
        "int dtype;": ("common/dtype.cuh", 2),
        "int warp;": ("common/warp.cuh", 4),
        "int a;": ("op/a.cu", 4),
        "int near;": ("op/near.cuh", 2),
        "int b;": ("op/a.cu", 6),
    }
    assert text.count("int warp;") == text.count("int dtype;") == 1
    assert '#include "' not in text
    assert "pragma" not in text


def test_expand_survives_a_header_that_includes_itself(root):
    assert places(expand("op/loop.cu", root=root)) == {"int loop;": ("op/loop.cuh", 2), "int c;": ("op/loop.cu", 2)}


def test_missing_files_are_named(root):
    with pytest.raises(CompileError, match=r"op/lost\.cu:2: cannot find 'common/none\.cuh'"):
        expand("op/lost.cu", root=root)
    with pytest.raises(CompileError, match=r"cannot find 'op/absent\.cu'"):
        expand("op/absent.cu", root=root)


def test_absolute_paths_look_beside_the_file_first(root, tmp_path_factory):
    own = tmp_path_factory.mktemp("own")
    (own / "mine.cu").write_text('#include "help.cuh"\n#include "common/dtype.cuh"\nint mine;\n')
    (own / "help.cuh").write_text("int help;\n")
    assert places(expand(own / "mine.cu", root=root)) == {
        "int help;": ("help.cuh", 1),
        "int dtype;": ("common/dtype.cuh", 2),
        "int mine;": ("mine.cu", 3),
    }


def test_text_may_include_library_headers(root):
    text = expand_text('#include "common/dtype.cuh"\nint x;', name="inline.cu", root=root)
    assert places(text)["int x;"] == ("inline.cu", 2)
    assert "int dtype;" in text


def test_expand_reads_from_a_zipped_wheel(root):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path in sorted(root.rglob("*.cu*")):
            archive.write(path, f"_cuda_src/{path.relative_to(root)}")
    inside = zipfile.Path(zipfile.ZipFile(packed), "_cuda_src/")
    assert expand("op/a.cu", root=inside) == expand("op/a.cu", root=root)


def test_source_root_prefers_the_packaged_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "files", lambda _: tmp_path)
    assert source.source_root() != tmp_path / "_cuda_src"
    (tmp_path / "_cuda_src").mkdir()
    assert source.source_root() == tmp_path / "_cuda_src"
    monkeypatch.setattr(source, "__file__", str(tmp_path / "a" / "b" / "sources.py"))
    (tmp_path / "_cuda_src").rmdir()
    with pytest.raises(CompileError, match="reinstall"):
        source.source_root()
