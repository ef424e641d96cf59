"""Sphinx reads the pages of `docs`, the README and the notebooks from the repository's root: `make docs`."""

import re
from importlib import import_module
from pathlib import Path

import ddtree_cupy

project = "ddtree_cupy"
version = release = ddtree_cupy.__version__
root_doc = "docs/index"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "numpydoc"]
include_patterns = ["*.md", "docs/*.md", "docs/_build/api/*.rst", "notebooks/*.ipynb"]
exclude_patterns = [".*", "ddtree_cupy", "cuda_src", "tests", "docs/_build/html", "docs/_build/doctrees"]
templates_path = [str(Path(__file__).parent / "templates")]

# notebooks are stored with their outputs; `make notebooks` runs them
nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

# one page for every name in the `__all__` of a public module
autosummary_ignore_module_all = False
autosummary_imported_members = True
# a class that two modules offer is indexed on the page of the first
_modules = re.findall(r"^   (ddtree_cupy[\w.]*)$", (Path(__file__).parent / "api.md").read_text(), re.MULTILINE)
_pages = {f"{module}.{name}": name for module in _modules for name in import_module(module).__all__}
_objects = [id(getattr(import_module(page.removesuffix(f".{name}")), name)) for page, name in _pages.items()]
autosummary_context = {"repeated": [page for i, page in enumerate(_pages) if _objects[i] in _objects[:i]]}
autodoc_typehints = "none"
numpydoc_show_class_members = False
default_role = "code"
suppress_warnings = ["ref.python"]  # an attribute such as `name` is one of several classes

html_theme = "furo"
html_show_copyright = False
html_title = f"ddtree_cupy {release}"
html_additional_pages = {"index": "redirect.html"}
