"""What the documents say is true: code blocks run, paths exist, tables match the code."""

import re
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


@pytest.mark.parametrize("number", [0, 1, 2])
def test_readme_example_prints_what_it_says(capsys, number):
    example = blocks(README, "python")[number]
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out in blocks(README, "text")


@pytest.mark.emulate
def test_readme_fuzz_example_runs():
    example = blocks(README, "python")[3]
    assert len([line for line in example.split("twice = ")[1].splitlines() if line]) <= 10
    exec(compile(example, "README.md", "exec"), {})


def test_readme_takes_an_own_model_to_a_budget_in_fifteen_lines():
    lines = [line for line in blocks(README, "python")[2].splitlines() if line]
    assert "from_callable" in "".join(lines)
    assert len(lines) <= 15


def test_every_code_block_is_tested():
    assert len(blocks(README, "python")) == 4


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
