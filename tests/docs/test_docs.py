"""What the documents say is true: code blocks run, paths exist, tables match the code."""

import re
from pathlib import Path

import pytest

import ddtree_cupy
from ddtree_cupy._compile import env

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
README = (ROOT / "README.md").read_text()


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", [0, 1])
def test_readme_example_prints_what_it_says(capsys, number):
    example = blocks(README, "python")[number]
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out in blocks(README, "text")


@pytest.mark.emulate
def test_readme_fuzz_example_runs():
    example = blocks(README, "python")[2]
    assert len([line for line in example.split("twice = ")[1].splitlines() if line]) <= 10
    exec(compile(example, "README.md", "exec"), {})


def test_every_code_block_is_tested():
    assert len(blocks(README, "python")) == 3


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_path_exists(name):
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target
    for target in re.findall(r"`((?:cuda_src|ddtree_cupy|tests|notebooks)/[\w/.-]+)`", text):
        assert (ROOT / target).exists(), target


def test_every_make_target_exists():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for name in DOCUMENTS:
        for target in re.findall(r"`make ([\w-]+)`", (ROOT / name).read_text()):
            assert target in targets, target


def test_api_table_names_every_public_function():
    table = {name for name in re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE) if name.islower()}
    functions = {name for name in ddtree_cupy.__all__ if name.islower()}
    assert table == {name for name in functions if not name.endswith("_workspace_bytes")}
    assert all(f"`{name}`" in README for name in functions)


def test_switches_table_is_that_of_the_code():
    assert env.markdown_table() in README
