"""Reports: one self-contained HTML page of what traces say about trees."""

import hashlib
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ddtree_cupy import __version__
from ddtree_cupy._check import Checker
from ddtree_cupy._files import written_whole
from ddtree_cupy.errors import ArgumentError
from ddtree_cupy.explore._page import cell, figure, listing, page, require_matplotlib, table, text
from ddtree_cupy.explore.comparison import PolicyRow, compare_policies, ratio_means
from ddtree_cupy.explore.continuations import Continuations, continuations
from ddtree_cupy.explore.cost_tables import checked_cost
from ddtree_cupy.explore.costs import name_of_cost
from ddtree_cupy.explore.curves import BudgetCurve, budget_curve
from ddtree_cupy.explore.names import policy_of
from ddtree_cupy.explore.policies import Policy
from ddtree_cupy.explore.speedup import Cost, Interval
from ddtree_cupy.explore.traces import Traces
from ddtree_cupy.viz import AcceptanceDisplay, BudgetDisplay, ContinuationDisplay

__all__ = ["Report", "report"]

_BUDGETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, eq=False)
class Report:
    """The results that stand on a page of `report`, and the page.

    Attributes
    ----------
    curve : BudgetCurve
    policies : tuple of PolicyRow
    continuations : Continuations
    html : str
    """

    curve: BudgetCurve
    policies: tuple[PolicyRow, ...]
    continuations: Continuations
    html: str

    def __repr__(self) -> str:
        return f"Report(budgets={self.curve.budgets}, policies={len(self.policies)}, characters={len(self.html)})"


def report(
    traces: Traces,
    path: str | Path | None = "report.html",
    *,
    cost: Cost | None = None,
    budgets: Sequence[int] | None = None,
    policies: Iterable[Policy | str] | None = None,
    against: Policy | str | None = None,
    round_us: float = 0.0,
    samples: int = 1000,
    seed: int = 0,
    progress: bool = True,
) -> Report:
    """Write one HTML page: the best budget, policies compared over prompts, pictures, and what was run.

    The page is one file that needs no network. Its pictures are SVG with their text as text, and it follows the light
    or dark setting of the reader.

    Parameters
    ----------
    traces : Traces
    path : str or path, optional
        The file to write; None writes none.
    cost : callable or CostTable, optional
        As in `speedup`. Without one, tokens are counted, and the largest budget is the best.
    budgets : sequence of int, optional
        For `budget_curve`. Default: powers of two up to 256, as far as the traces are exact.
    policies, against
        As in `compare_policies`.
    round_us, samples, seed
        As in `speedup`.
    progress : bool
        As in `sweep`.

    Returns
    -------
    Report
        The same results as objects.

    Raises
    ------
    ModuleNotFoundError
        matplotlib, the extra `viz`, is missing.

    Examples
    --------
    >>> few = Traces.load().select([0, 1])
    >>> report(few, None, budgets=[4, 16], policies=["chain 15"]).html.splitlines()[0]
    '<!DOCTYPE html>'
    """
    check = Checker("report")
    check.kind("traces", traces, Traces)
    if path is not None:
        check.kind("path", path, str, Path)
        if not Path(path).parent.is_dir():
            raise ArgumentError(f"report: `path` is {str(path)!r}, expected a file in a folder that exists")
    require_matplotlib("report")
    cost = None if cost is None else checked_cost("report", cost)
    if budgets is None:
        budgets = [budget for budget in _BUDGETS if budget <= max(1, traces.max_budget)]
    weighed: dict[str, Any] = {"cost": cost, "round_us": round_us, "samples": samples, "seed": seed}
    if policies is not None:
        given = check.items("policies", policies)
        policies = [policy_of("report", f"policies[{at}]", policy) for at, policy in enumerate(given)]
    against = None if against is None else policy_of("report", "against", against)
    curve = budget_curve(traces, budgets, **weighed, progress=progress)
    rows = compare_policies(traces, policies, against=against, **weighed, progress=progress)
    below = continuations(traces)
    parts = [*_budget(curve), *_policies(rows), *_rounds(curve), *_continuations(below, samples, seed)]
    parts += ["<h2>What was run</h2>", listing(_what_was_run(traces, curve, rows, **weighed))]
    made = Report(curve, rows, below, page("Which tree should be drafted?", parts))
    if path is not None:
        with written_whole(path) as stream:
            stream.write(made.html.encode())
    return made


def _budget(curve: BudgetCurve) -> list[str]:
    best = curve.budgets.index(curve.best_budget)
    lead = f"<strong>Budget {cell(curve.best_budget)}</strong> is the best of {len(curve.budgets)}: "
    if curve.speedup:
        lead += f"{cell(curve.speedup[best])} times faster than plain decoding, with "
    lead += f"{cell(curve.tokens_per_pass[best])} tokens per pass of the target."
    order, has_cost = np.argsort(curve.budgets, kind="stable"), bool(curve.speedup)
    lines = [
        [
            cell(curve.budgets[at]),
            cell(curve.tokens_per_pass[at]),
            _expected(float(curve.expected_tokens_per_pass[at])),
            *([cell(curve.speedup[at])] if has_cost else []),
        ]
        for at in order
    ]
    head = ["budget", "tokens per pass (95 %)", "expected by the drafter", *(["speedup (95 %)"] if has_cost else [])]
    display = BudgetDisplay.from_curve(curve)
    pictures = [figure("tokens", "Tokens per pass over the budget", lambda ax: display.plot(ax))]
    if has_cost:
        caption = "Speedup over plain decoding; the star is the best budget"
        pictures.append(figure("speedup", caption, lambda ax: display.plot(ax, kind="speedup")))
    return [f"<p>{lead}</p>", "<h2>Budgets</h2>", _side_by_side(pictures), table(head, lines)]


def _policies(rows: Sequence[PolicyRow]) -> list[str]:
    if not rows:
        return []
    has_cost = rows[0].speedup is not None
    head = ["policy", "tokens per pass (95 %)", "nodes", *(["speedup (95 %)"] if has_cost else []), "ratio (95 %)", ""]
    lines = [
        [
            text(row.policy),
            cell(row.tokens_per_pass),
            cell(row.nodes, f"{row.nodes:.1f}"),
            *([] if row.speedup is None else [cell(row.speedup)]),
            cell(row.ratio),
            _verdict(row.ratio),
        ]
        for row in rows
    ]
    note = f"The ratio is {ratio_means(rows[0])}. Its interval is paired: every sample draws the same prompts for both."
    return ["<h2>Policies, prompt by prompt</h2>", table(head, lines), f'<p class="note">{text(note)}</p>']


def _verdict(ratio: Interval) -> str:
    """Say what an interval of a ratio allows to say."""
    if ratio.low == ratio.high == 1.0:
        return "the same"
    return "better" if ratio.low > 1 else "worse" if ratio.high < 1 else "unclear"


def _rounds(curve: BudgetCurve) -> list[str]:
    result = curve.replays[curve.budgets.index(curve.best_budget)]
    display = AcceptanceDisplay.from_replay(result)
    caption = f"{result.policy}: {result.num_rounds:,} rounds"
    return ["<h2>How far rounds get</h2>", figure("rounds", caption, lambda ax: display.plot(ax))]


def _continuations(found: Continuations, samples: int, seed: int) -> list[str]:
    if not found.depths.size:
        return []
    lines = []
    for on_spine, name in ((True, "spine"), (False, "sibling")):
        hits, total = found.counts(on_spine=on_spine)
        if total:
            share = found.share(on_spine=on_spine, samples=samples, seed=seed)
            in_tree = found.counts(on_spine=on_spine, in_tree=True)[0]
            expected = float(np.nanmean(found.favourite_probabilities[found.on_spine == on_spine]))
            counts = [cell(total), cell(hits), cell(in_tree)]
            lines.append([name, *counts, cell(share), _expected(expected)])
    head = ["below", "accepted nodes", "the favourite is right", "and in the tree"]
    head += ["share right (95 %)", "expected by the drafter"]
    display = ContinuationDisplay.from_continuations(found)
    pictures = [
        figure("depths", "The drafter's favourite is right", lambda ax: display.plot(ax)),
        figure("ranks", "The target's token among the first ranks", lambda ax: display.plot(ax, kind="rank")),
    ]
    note = (
        f"Rounds of {found.policy}. On the spine all nodes above are the drafter's favourites; below a sibling, one of "
        f"them was not, and the target preferred it."
    )
    return [
        "<h2>After a sibling</h2>",
        table(head, lines),
        f'<p class="note">{text(note)}</p>',
        _side_by_side(pictures),
    ]


def _side_by_side(pictures: Sequence[str]) -> str:
    return '<div class="pictures">\n' + "\n".join(pictures) + "\n</div>"


def _expected(value: float) -> str:
    return "not known" if np.isnan(value) else cell(value, f"{value:.2f}")


def _what_was_run(
    traces: Traces,
    curve: BudgetCurve,
    rows: Sequence[PolicyRow],
    *,
    cost: Any,
    round_us: float,
    samples: int,
    seed: int,
) -> dict[str, object]:
    """Return what one must know to make the page again."""
    kept = traces.candidates
    arrays = (kept.token_ids, kept.logits, kept.lse, traces.continuations, traces.prompt_starts)
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()
    versions = {name: version(name) for name in ("numpy", "matplotlib")}
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "versions": f"ddtree_cupy {__version__}, Python {platform.python_version()}, "
        + ", ".join(f"{name} {found}" for name, found in versions.items()),
        "traces": f"{traces}, exact up to budget {traces.max_budget}, SHA-256 {digest[:16]}",
        **{f"traces: {name}": said for name, said in traces.about.items()},
        "cost": "none: tokens are counted" if cost is None else name_of_cost(cost),
        "cost of a round besides the pass": f"{round_us:g}",
        "budgets": ", ".join(map(str, curve.budgets)),
        "policies": "; ".join(row.policy for row in rows) or "none",
        "bootstrap": f"{samples} samples over {traces.num_prompts} prompts, seed {seed}",
    }
