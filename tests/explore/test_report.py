"""The page of `report`: valid, alone, escaped, and with the numbers of the functions."""

import builtins
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from ddtree_cupy.errors import ArgumentError, DTypeError
from ddtree_cupy.explore import (
    CostTable,
    LinearCost,
    chain,
    compare,
    continuations,
    replay,
    report,
    speedup,
    tokens_per_pass,
)
from ddtree_cupy.explore.__main__ import main
from tests.refusals import rejects

COST = LinearCost(fixed_us=40.0, per_node_us=1.0)
BUDGETS, POLICIES = (16, 4), ("chain 15", "best-first 8, max_children 2")
SETTINGS = {"round_us": 2.0, "samples": 60, "seed": 3}
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Tables, text and attributes of a page, every element of which must be closed."""

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.open, self.attributes, self.texts, self.tables, self.numbers, self.style = [], [], [], [], [], ""
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag == "data":
            self.numbers.append(float(dict(attrs)["value"]))

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["style"]:
            self.style += data
            return
        self.texts.append(data)
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data

    def rows(self, head):
        """Rows of the table whose first column has this name, by their first cell."""
        table = next(table for table in self.tables if table[0][0] == head)
        return {row[0]: dict(zip(table[0], row, strict=True)) for row in table[1:]}


@pytest.fixture(scope="module")
def some(traces):
    return traces.select(range(5))


@pytest.fixture(scope="module")
def made(some, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "page.html"
    options = {"budgets": BUDGETS, "policies": POLICIES, "against": "best-first 4", **SETTINGS}
    found = report(some, path, cost=COST, **options)
    assert path.read_text(encoding="utf-8") == found.html
    return found


@pytest.fixture(scope="module")
def page(made):
    return Page(made.html)


def test_the_page_refers_to_nothing_outside(made, page):
    for tag, name, value in page.attributes:
        assert name not in ("src", "srcset", "action", "data", "poster"), (tag, name)
        if name == "href":
            assert value.startswith("#"), (tag, value)
    assert {target for target in re.findall(r"url\(([^)]*)", made.html) if not target.startswith("#")} == set()
    assert not re.search(r"//[a-z]|@import|<script|<link|<iframe|<\?xml|<!DOCTYPE svg", made.html, re.IGNORECASE)


def test_ids_are_unique_and_every_reference_has_one(made, page):
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids)) > 100
    used = {value[1:] for _, name, value in page.attributes if name == "href"}
    used |= set(re.findall(r"url\(#([^)]*)\)", made.html))
    assert used <= set(ids)
    assert used


def test_the_page_is_light_and_dark(made, page):
    assert "prefers-color-scheme: dark" in page.style
    assert ("meta", "content", "light dark") in page.attributes
    used = set(re.findall(r"var\((--\w+)\)", made.html))
    light, dark = page.style.split("@media", 1)
    assert all(f"{name}:" in light and f"{name}:" in dark for name in used)
    pictures = re.findall(r"<svg.*?</svg>", made.html, re.DOTALL)
    assert len(pictures) == 5
    for picture in pictures:
        assert "currentColor" in picture  # axes and text
        assert not re.search(r"#0{3,6}\b|#f{3,6}\b|#010203", picture, re.IGNORECASE)  # no black and no white is left
        assert "<text" in picture
        assert 'role="img"' in picture


def test_the_numbers_of_budgets_are_those_of_the_functions(some, made, page):
    rows, wanted = page.rows("budget"), {}
    assert list(rows) == ["4", "16"]
    settings = {"samples": 60, "seed": 3}
    for budget in BUDGETS:
        result = replay(some, f"best-first {budget}")
        wanted[budget] = speedup(result, COST, **SETTINGS)
        row = rows[str(budget)]
        assert row["tokens per pass (95 %)"] == str(tokens_per_pass(result, **settings))
        assert row["speedup (95 %)"] == str(wanted[budget])
        assert row["expected by the drafter"] == f"{result.expected_tokens.mean():.2f}"
        assert {wanted[budget].value, result.tokens_per_pass} <= set(page.numbers)  # with all digits
    best = max(wanted, key=lambda budget: wanted[budget].value)
    assert made.curve.best_budget == best
    lead = "".join(page.texts).partition("Budgets")[0]
    assert f"Budget {best} is the best of 2: {wanted[best]} times faster than plain decoding" in lead


def test_the_numbers_of_policies_are_those_of_the_functions(some, page):
    rows, base = page.rows("policy"), replay(some, "best-first 4")
    assert tuple(rows) == POLICIES
    for name, row in rows.items():
        result = replay(some, name)
        ratio = compare(result, base, cost=COST, **SETTINGS)
        assert row["tokens per pass (95 %)"] == str(tokens_per_pass(result, samples=60, seed=3))
        assert row["nodes"] == f"{result.num_nodes.mean() - 1:.1f}"
        assert row["speedup (95 %)"] == str(speedup(result, COST, **SETTINGS))
        assert row["ratio (95 %)"] == str(ratio)
        assert row[""] == ("better" if ratio.low > 1 else "worse" if ratio.high < 1 else "unclear")
    assert "The ratio is to the speedup of best-first 4." in "".join(page.texts)


def test_the_numbers_of_continuations_are_those_of_the_function(some, page):
    found, rows = continuations(some), page.rows("below")
    for name, on_spine in (("spine", True), ("sibling", False)):
        hits, total = found.counts(on_spine=on_spine)
        row = rows[name]
        assert (row["accepted nodes"], row["the favourite is right"]) == (str(total), str(hits))
        assert row["and in the tree"] == str(found.counts(on_spine=on_spine, in_tree=True)[0])
        assert row["share right (95 %)"] == str(found.share(on_spine=on_spine, samples=60, seed=3))
        assert float(row["expected by the drafter"]) == pytest.approx(
            found.favourite_probabilities[found.on_spine == on_spine].mean(), abs=0.005
        )


def test_the_page_says_what_was_run(some, page):
    from ddtree_cupy import __version__

    said = " ".join(page.texts)
    assert page.texts[page.texts.index("cost of a round besides the pass") + 1] == "2"
    for part in (
        f"ddtree_cupy {__version__}",
        "numpy ",
        "matplotlib ",
        repr(some),
        "SHA-256",
        some.about["target"],
        "LinearCost(fixed_us=40.0, per_node_us=1.0)",
        "16, 4",
        "60 samples over 5 prompts, seed 3",
        " UTC",
    ):
        assert part in said


def test_the_page_escapes_what_others_wrote(some):
    evil = '<script>alert("x")</script>&amp;\x1b[31m\u202e'
    policy = replace(chain(3), label=f"{evil} $x$")
    odd = replace(some, about={evil: f"{evil}</dd></html>", "accents": "café 漢字 🙂"})
    found = report(odd, None, budgets=(2,), policies=[policy], against="chain 2", samples=5)
    page = Page(found.html)
    assert "<script" not in found.html
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", found.html)
    assert '<script>alert("x")</script>&amp;\\x1b[31m\\u202e $x$' in page.rows("policy")
    assert "café 漢字 🙂" in page.texts


def test_the_page_without_cost_counts_tokens(some):
    found = report(some, None, budgets=(2, 4), policies=["chain 2"], samples=5)
    page = Page(found.html)
    assert "speedup" not in "".join(page.texts)
    assert found.curve.best_budget == 4
    assert "The ratio is to the tokens per pass of best-first 64." in "".join(page.texts)
    assert "none: tokens are counted" in page.texts


def test_the_page_of_one_prompt_and_no_siblings_says_nothing_untrue(traces):
    found = report(traces.select([3]), None, budgets=(0, 1), policies=[], samples=5)
    page = Page(found.html)
    assert math.isnan(found.curve.tokens_per_pass[0].low)
    assert "(nan to nan)" in found.html
    assert all(table[0][0] != "policy" for table in page.tables)


def test_defaults_fit_traces_with_few_ranks(some):
    """Recorded for trees of 8 nodes: larger ones are left out, not refused."""
    few = replace(
        some,
        max_budget=8,
        candidates=some.candidates.map(lambda array: array[..., :12] if array.ndim == 3 else array),
        row_widths=some.row_widths.clip(max=12),
    ).validate()
    found = report(few, None, samples=5)
    assert found.curve.budgets == (1, 2, 4, 8)
    names = [row.policy for row in found.policies]
    assert {"chain 15", "Medusa 63", "fixed 4x2x2x1"} <= set(names)
    assert not any(name.startswith(("best-first", "entropy", "cost-aware")) for name in names)
    assert {row.against for row in found.policies} == {"best-first 8"}


class Untouched:
    name = "untouched"

    def build(self, candidates, root_token_ids):
        raise AssertionError("a replay began")


@rejects(
    (DTypeError, "report: `traces` is str", lambda t, p: report("x", None)),
    (DTypeError, "report: `path` is int, expected str or Path", lambda t, p: report(t, 3)),
    (ArgumentError, "report: `path` is .*folder that exists", lambda t, p: report(t, p / "none" / "page.html")),
    (
        ArgumentError,
        r"report: `cost` is a CostTable of heads \[8, 64\]",
        lambda t, p: report(t, p, cost=CostTable.load()),
    ),
    (DTypeError, "report: `cost` is float", lambda t, p: report(t, p / "a", cost=3.0)),
    (ArgumentError, "`budgets` is empty", lambda t, p: report(t, p / "a", budgets=[])),
    (ArgumentError, "`samples` is 0", lambda t, p: report(t, p / "a", samples=0)),
    (
        ArgumentError,
        r"`policies\[1\]` is 'x'",
        lambda t, p: report(t, p / "a", policies=[Untouched(), "x"], budgets=[1]),
    ),
    (ArgumentError, "`against` is 'x'", lambda t, p: report(t, p / "a", policies=[Untouched()], against="x")),
)
def test_report_rejects(call, some, tmp_path):
    try:
        call(some, tmp_path)
    finally:
        assert list(tmp_path.iterdir()) == []


def test_report_without_matplotlib_says_what_to_install(some, monkeypatch):
    actual = builtins.__import__

    def without(name, *arguments, **options):
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError("no", name="matplotlib")
        return actual(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match=r"report: pictures need matplotlib, .*pip install 'matplotlib"):
        report(some, None, policies=[Untouched()])


def test_report_ignores_and_keeps_the_settings_of_matplotlib(some):
    import matplotlib

    options = {"budgets": (2,), "policies": ["chain 2"], "samples": 5}
    plain = re.findall(r"<svg.*?</svg>", report(some, None, **options).html, re.DOTALL)
    with matplotlib.rc_context({"text.color": "red", "font.size": 30.0, "svg.fonttype": "path"}):
        odd = re.findall(r"<svg.*?</svg>", report(some, None, **options).html, re.DOTALL)
        assert matplotlib.rcParams["text.color"] == "red"
    assert odd == plain


def test_report_command_writes_the_page(some, tmp_path, capsys):
    some.select([0, 1]).save(tmp_path / "traces.npz")
    out = tmp_path / "page.html"
    where = ["--out", str(out), "--heads", "64", "--fixed-us", "500", "--against", "chain 8"]
    assert main(["report", str(tmp_path / "traces.npz"), *where]) == 0
    assert re.fullmatch(r".*page\.html: best budget \d+\n", capsys.readouterr().out)
    page = Page(out.read_text(encoding="utf-8"))
    said = "".join(page.texts)
    assert "heads=64" in said
    assert "LinearCost(fixed_us=500.0" in said
    assert "The ratio is to the speedup of chain 8." in said
