"""What the documents say is true: code blocks run, paths exist, tables match the code."""

import doctest
import re
import tomllib
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import ddtree_cupy
from ddtree_cupy.emulate import env

ROOT = Path(__file__).parents[2]
PAGES = [str(page.relative_to(ROOT)) for page in sorted(ROOT.glob("docs/*.md"))]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *PAGES]
README = (ROOT / "README.md").read_text()


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def examples():
    """Yield every Python block of the documents, with the output that stands below it."""
    for name in DOCUMENTS:
        text = (ROOT / name).read_text()
        for code, output in re.findall(
            r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", text, re.DOTALL | re.MULTILINE
        ):
            marks = [pytest.mark.emulate] if "emulate" in code else []
            line = text[: text.index(code)].count("\n")
            yield pytest.param(name, code, output, marks=marks, id=f"{name}:{line}")


@pytest.mark.parametrize(("name", "code", "output"), [*examples()])
def test_example_prints_what_the_page_says(capsys, name, code, output):
    exec(compile(code, f"<{name}>", "exec"), {})
    assert capsys.readouterr().out == output


def test_readme_takes_an_own_model_to_a_budget_in_fifteen_lines():
    (example,) = [block for block in blocks(README, "python") if "from_callable" in block]
    assert len([line for line in example.splitlines() if line]) <= 15


def test_prototype_of_a_ragged_batch_takes_twenty_lines():
    (example,) = blocks((ROOT / "docs" / "prototype.md").read_text(), "python")
    assert len(example.splitlines()) <= 20


def test_readme_begins_with_three_lines_of_code_and_fuzzes_in_ten():
    first, *_, fuzz = blocks(README, "python")
    assert len([line for line in first.splitlines() if line]) == 3
    assert len([line for line in fuzz.split("twice = ")[1].splitlines() if line]) <= 10
    screen = README.splitlines()[:45]
    assert sum(line.startswith("- **You ") for line in screen) == 3
    assert any("figures/readme.svg" in line for line in screen)


def test_every_page_that_comes_from_elsewhere_has_a_table_and_an_example():
    pages = [page for page in PAGES if page.startswith("docs/from_")]
    assert len(pages) == 5
    for page in pages:
        text = (ROOT / page).read_text()
        assert text.startswith("# Coming from ")
        assert "| there | here |" in text
        assert len(blocks(text, "python")) == 1, "one example a page"


def test_names_of_this_library_in_tables_exist():
    for page in [page for page in PAGES if page.startswith("docs/from_")]:
        for module, name in re.findall(r"`(interop|explore|emulate|decode)\.(\w+)", (ROOT / page).read_text()):
            assert name in import_module(f"ddtree_cupy.{module}").__all__, (page, name)


@pytest.mark.emulate
def test_the_page_on_kernels_says_what_happens():
    found = doctest.testfile(
        str(ROOT / "docs" / "check_kernels.md"),
        module_relative=False,
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE,
    )
    assert found.attempted >= 6
    assert found.failed == 0


def test_site_has_every_page_and_every_public_module():
    index, api = ((ROOT / "docs" / name).read_text() for name in ("index.md", "api.md"))
    in_site = {
        line
        for tree in re.findall(r"^```{toctree}\n(.*?)^```", index, re.DOTALL | re.MULTILINE)
        for line in tree.replace("<", " ").replace(">", " ").split()
    }
    assert {Path(page).stem for page in PAGES if page != "docs/index.md"} <= in_site
    assert {"../README", "../CONTRIBUTING", "../CHANGELOG", "../notebooks/*"} <= in_site
    public = {"ddtree_cupy", "ddtree_cupy.errors", "ddtree_cupy.decode.tiny", "ddtree_cupy.testing.strategies"}
    public |= {
        f"ddtree_cupy.{name}" for name in ("decode", "explore", "viz", "interop", "kernels", "emulate", "testing")
    }
    assert set(re.findall(r"^   (ddtree_cupy[\w.]*)$", api, re.MULTILINE)) == public


def test_citation_is_of_this_version():
    citation = (ROOT / "CITATION.cff").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"\nversion: {project['version']}\n" in citation
    assert f"\nlicense: {project['license']}\n" in citation
    assert "authors" not in project, "then CITATION.cff names them, too"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_path_exists(name):
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert ((ROOT / name).parent / target).exists(), target
    for target in re.findall(r"`((?:cuda_src|ddtree_cupy|docs|tests|notebooks)/[\w/.-]+)`", text):
        assert (ROOT / target).exists(), target


def test_every_make_target_exists():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for name in DOCUMENTS:
        for target in re.findall(r"`make ([\w-]+)`", (ROOT / name).read_text()):
            assert target in targets, target


def test_api_table_names_every_public_function():
    table = {name for name in re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE) if name.islower()}
    functions = {name for name in ddtree_cupy.__all__ if name.islower()}
    assert table == {name for name in functions if name not in ("bind", "workspace_bytes")}
    assert all(re.search(rf"`{name}\b", README) for name in functions)


# the sizes that the letters of the API table stand for, all different
SIZES = {"B": 2, "L": 3, "V": 50, "K": 6, "N": 5, "H": 7, "C": 64, "R": 16}


def api_calls():
    """Return, for every row of the API table, the arrays of its shapes from left to right."""
    rng = np.random.default_rng(0)
    b, n, h, c, r = (SIZES[letter] for letter in "BNHCR")
    logits = rng.standard_normal((b, SIZES["L"], SIZES["V"])).astype(np.float32)
    candidates = ddtree_cupy.top_candidates(logits, SIZES["K"])
    roots = np.zeros(b, np.int32)
    tree = ddtree_cupy.build_tree(logits, budget=n - 1, root_token_ids=roots)
    best = ddtree_cupy.best_first_tree(candidates, budget=n - 1, root_token_ids=roots)
    kv = ddtree_cupy.PagedKV.allocate(20, page_size=4, head_dim_ckv=c, head_dim_kpe=r, batch=b)
    ckv_rows, kpe_rows, q_nope, q_pe = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((b, n, c), (b, n, r), (b, n, h, c), (b, n, h, r))
    )
    ddtree_cupy.write_kv(kv, ckv_rows, kpe_rows, num_rows=tree.num_nodes)
    out, lse = ddtree_cupy.tree_attention(tree, q_nope, q_pe, kv, sm_scale=0.1)
    targets = rng.standard_normal((b, n, SIZES["V"])).astype(np.float32)
    uniforms = rng.random((b, n))
    greedy = ddtree_cupy.greedy_targets(targets)
    sampled = ddtree_cupy.sample_targets(targets, uniforms, temperature=1.0)
    ddtree_cupy.commit_kv(kv, ddtree_cupy.accept(tree, greedy))
    assert ddtree_cupy.choose_budget(best.path_scores[0], lambda nodes: 1.0) <= n - 1
    return {
        "top_candidates": (logits, candidates.logits, candidates.lse),
        "best_first_tree": (),
        "build_tree": (logits,),
        "choose_budget": (best.path_scores[0],),
        "write_kv": (ckv_rows, kpe_rows),
        "tree_attention": (q_nope, q_pe, out, lse),
        "merge_states": (),
        "convert_lse": (),
        "greedy_targets": (targets, greedy),
        "sample_targets": (targets, uniforms, sampled),
        "accept": (greedy,),
        "commit_kv": (),
    }


def test_api_table_has_the_shapes_of_the_code():
    calls = api_calls()
    rows = {name: row for name, row in re.findall(r"^\| `(\w+)` \|(.*?)\|", README, re.MULTILINE) if name.islower()}
    assert set(rows) == set(calls)
    for name, row in rows.items():
        shapes = [tuple(SIZES[letter] for letter in shape.split(",")) for shape in re.findall(r"\[([A-Z,]+)\]", row)]
        assert shapes == [array.shape for array in calls[name]], name
    assert "DraftTree of N = capacity + 1 nodes" in rows["best_first_tree"]


def test_switches_table_is_that_of_the_code():
    assert env.markdown_table() in README
