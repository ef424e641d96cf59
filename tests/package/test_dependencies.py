"""Dependencies point one way (errors <- containers <- reference <- api <- package), and importing is cheap."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "ddtree_cupy"
OPS = ("tree_build", "tree_attention", "tree_accept")
CONTAINERS = {"errors", "_arrays", "_check", "containers"}
KERNEL = CONTAINERS | {"_overlap", "_cache_struct", "kernels"}
API = KERNEL | set(OPS) | {"emulate", "_call", "_bind", "__init__"}
EVERYTHING = API | {"decode", "explore", "testing", "bench", "viz", "interop", "_doctor", "cli"}
EVERYTHING |= {"_files", "_terminal", "compile_check"}

# part of the package -> the parts it may import; a part always sees itself
ALLOWED = {
    "errors": set(),
    "_progress": set(),
    "_overlap": set(),
    "_arrays": {"errors"},
    "_check": {"errors", "_arrays", "_overlap"},
    "_files": {"errors"},
    "_terminal": {"errors"},
    "containers": CONTAINERS | {"_files", "_terminal"},
    "kernels": {"errors", "_arrays", "_check", "_overlap"},
    "compile_check": {"errors", "_terminal", "kernels"},
    "emulate": {"errors", "_arrays", "_check", "_overlap", "kernels"},
    "_cache_struct": {"_overlap", "containers", "kernels"},
    "_alike": {"_arrays", "containers", "emulate"},
    "_call": {"errors", "_arrays", "_check", "_overlap", "_alike", "kernels", "emulate"},
    "_bind": {"errors", "_call"},
    **{f"{op}.reference": CONTAINERS for op in OPS},
    **{f"{op}.kernel": KERNEL for op in OPS},
    "tree_attention.call": KERNEL,
    "tree_build.topology": KERNEL,
    "tree_build.versions": KERNEL | {"tree_build.topology"},
    "tree_build.kernel": KERNEL | {"tree_build.topology", "tree_build.versions"},
    "tree_attention.versions": KERNEL | {"tree_attention.call"},
    "tree_attention.kernel": KERNEL | {"tree_attention.call", "tree_attention.versions"},
    **{f"{op}.prepare": KERNEL | {"_call", f"{op}.reference", f"{op}.kernel"} for op in OPS},
    "tree_attention.prepare": KERNEL | {"_call", *(f"tree_attention.{n}" for n in ("reference", "kernel", "call"))},
    **{f"{op}.api": CONTAINERS | {"_call", f"{op}.prepare", f"{op}.reference"} for op in OPS},
    **{f"{op}.__init__": {f"{op}.api"} for op in OPS},
    "__init__": CONTAINERS | set(OPS) | {"_call", "_bind"},
    "decode": API | {"_progress", "_files", "_terminal"},
    "explore": API | {"decode", "_progress", "_files", "_terminal", "bench.measurements", "viz"},
    "testing": API | {"compile_check"},
    "viz": CONTAINERS,
    "interop": CONTAINERS,
    "bench": API | {"testing", "_terminal", "_files"},
    "bench.tables": {"errors", "explore", "tree_attention", "_files", "_terminal"},
    "bench.measurements": {"errors", "_files"},
    "_doctor": {"errors", "_terminal", "kernels", "compile_check", "emulate", "__init__"},
    "cli": EVERYTHING,
    "__main__": {"cli"},
}
# Containers are below kernels, and reach up inside two functions only: links of CuPy arrays come from a kernel, and a
# container moves to the current device.
UPWARDS = {
    ("containers/topology.py", "ddtree_cupy.tree_build.topology"),
    ("containers/base.py", "ddtree_cupy.kernels.device"),
}
TABLES = {"tree_attention": ["VERSIONS"], "tree_build": ["BEST_FIRST"]}  # of versions, in `versions/__init__.py`
MAY_IMPORT_CUPY = ("containers", "kernels", "kernel", "bench", "testing", "decode", "cli", "_doctor")


def modules():
    tiny = PACKAGE / "decode" / "tiny"  # its training scripts need PyTorch and nothing imports them
    return [p for p in sorted(PACKAGE.rglob("*.py")) if tiny / "training" not in p.parents and p != tiny / "train.py"]


def part_of(path):
    """Return the key of ALLOWED that governs a module."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    two = ".".join(parts[:2])
    return two if parts[0] in OPS or two in ALLOWED else parts[0]


def imports(path):
    """Yield (dotted name, is at module level) of every absolute import."""
    tree = ast.parse(path.read_text())
    inside = {id(node) for outer in ast.walk(tree) if isinstance(outer, ast.FunctionDef) for node in ast.walk(outer)}
    for node in ast.walk(tree):
        top = id(node) not in inside
        if isinstance(node, ast.Import):
            yield from ((alias.name, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "ddtree_cupy":
                for alias in node.names:
                    is_module = (PACKAGE / alias.name).is_dir() or (PACKAGE / f"{alias.name}.py").is_file()
                    yield (f"ddtree_cupy.{alias.name}" if is_module else "ddtree_cupy.__init__", top)
            elif node.module.startswith("ddtree_cupy.") and (PACKAGE / Path(*node.module.split(".")[1:])).is_dir():
                folder = PACKAGE / Path(*node.module.split(".")[1:])
                for alias in node.names:
                    is_module = (folder / alias.name).is_dir() or (folder / f"{alias.name}.py").is_file()
                    yield (f"{node.module}.{alias.name}" if is_module else node.module, top)
            else:
                yield (node.module, top)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    part = part_of(path)
    for name, at_module_level in imports(path):
        if not name.startswith("ddtree_cupy."):
            continue
        if not at_module_level and (path.relative_to(PACKAGE).as_posix(), name) in UPWARDS:
            continue
        wanted = name.removeprefix("ddtree_cupy.").split(".")
        two = ".".join(wanted[:2])
        own = part.split(".")[0]
        if wanted[0] == own and own not in OPS:
            continue
        if two == part:
            continue
        allowed = ALLOWED[part]
        assert wanted[0] in allowed or two in allowed, f"{part} imports {name}"


def private_imports(path, inside):
    """Yield imports of a name with a leading underscore from a package that does not hold `path` itself."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("ddtree_cupy"):
            continue
        for name in (f"{node.module}.{alias.name}" for alias in node.names):
            parts = name.split(".")
            private = next((i for i, part in enumerate(parts) if part.startswith("_") and part[1] != "_"), None)
            if private is not None and tuple(parts[1:private]) != inside[: private - 1]:
                yield name


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_names_stay_in_their_package(path):
    assert not list(private_imports(path, path.relative_to(PACKAGE).parent.parts))


def test_notebooks_import_public_names_only(tmp_path):
    for notebook in sorted((PACKAGE.parent / "notebooks").glob("*.ipynb")):
        for number, cell in enumerate(json.loads(notebook.read_text())["cells"]):
            if cell["cell_type"] == "code":
                code = tmp_path / f"{notebook.stem}_{number}.py"
                code.write_text("".join(line for line in cell["source"] if not line.startswith(("%", "!"))))
                assert not list(private_imports(code, ("notebooks",)))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_cupy_is_imported_inside_functions_of_few_modules(path):
    for name, at_module_level in imports(path):
        if name.split(".")[0] == "cupy":
            assert not at_module_level, f"{path} imports cupy at module level"
            assert any(allowed in part_of(path).split(".") for allowed in MAY_IMPORT_CUPY)


def test_import_pulls_in_numpy_only():
    code = (
        "import numpy, sys; before = set(sys.modules); import ddtree_cupy; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "new -= set(sys.stdlib_module_names) | {'numpy'}; "
        "print(sorted(new))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "['ddtree_cupy']"


@pytest.mark.parametrize("op", ["tree_attention", "tree_build"])
def test_versions_are_registered_and_named_as_their_sources(op):
    """A version's module sees no other version: what two of them need is in `common.py`."""
    registry = importlib.import_module(f"ddtree_cupy.{op}.versions")
    versions = {name: module for table in (vars(registry)[key] for key in TABLES[op]) for name, module in table.items()}
    folder = PACKAGE / op / "versions"
    assert {path.stem for path in folder.glob("*.py")} == {"__init__", "common", *versions}
    for name, version in versions.items():
        assert version.__name__ == f"ddtree_cupy.{op}.versions.{name}"
        assert (PACKAGE.parent / "cuda_src" / op / f"{name}.cu").is_file()
        own = [found for found, _ in imports(folder / f"{name}.py") if ".versions." in found]
        assert own == [f"ddtree_cupy.{op}.versions.common"]


def test_rules_cover_every_module():
    assert {part_of(path) for path in modules()} <= set(ALLOWED)


def test_public_names_exist_and_have_docstrings():
    import ddtree_cupy

    for name in ddtree_cupy.__all__:
        assert getattr(ddtree_cupy, name).__doc__, name
