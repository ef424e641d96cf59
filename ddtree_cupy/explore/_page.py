"""One HTML page in one file: escaped text, tables, pictures as inline SVG, light and dark."""

import html
import io
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ddtree_cupy._terminal import escaped
from ddtree_cupy.explore.speedup import Interval

__all__ = ["cell", "figure", "listing", "page", "require_matplotlib", "table", "text"]

_INK = "#010203"  # drawn where the page's own colour of text is meant
_COLORS = {_INK: "currentColor", "#e6e6e6": "var(--line)", "#0072b2": "var(--blue)"}
_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c1e21; --soft: #5c6370; --line: #e6e6e6; --blue: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181c; --ink: #e4e6ea; --soft: #9aa1ad; --line: #353a42; --blue: #2f86c9; }
}
body { background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; line-height: 1.2; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; } .pictures { display: flex; flex-wrap: wrap; gap: 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
figure { margin: .8rem 0; flex: 1 1 24rem; } figure svg { max-width: 100%; height: auto; }
figcaption, .note { color: var(--soft); font-size: .9rem; }
dt { color: var(--soft); font-size: .9rem; } dd { margin: 0 0 .5rem; overflow-wrap: anywhere; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
"""


def text(value: object) -> str:
    """Return text of anyone as HTML: no markup, and no character that a reader obeys."""
    return html.escape(escaped(value))


def cell(value: Interval | float, shown: str | None = None) -> str:
    """Return a number as HTML, with all its digits in an attribute; an interval is shown with its ends."""
    number = value.value if isinstance(value, Interval) else value
    return f'<data value="{number!r}">{text(shown or value)}</data>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; cells are HTML."""
    lines = [f"<tr>{''.join(f'<td>{entry}</td>' for entry in row)}</tr>" for row in rows]
    names = "".join(f'<th scope="col">{text(name)}</th>' for name in head)
    return (
        f'<div class="wide"><table>\n<thead><tr>{names}</tr></thead>\n<tbody>\n{_joined(lines)}\n</tbody></table></div>'
    )


def listing(entries: dict[str, object]) -> str:
    """Return names and values, each as text."""
    return f"<dl>\n{_joined(f'<dt>{text(name)}</dt><dd>{text(value)}</dd>' for name, value in entries.items())}\n</dl>"


def page(title: str, parts: Iterable[str]) -> str:
    """Return the whole file; parts are HTML."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{text(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{text(title)}</h1>
{_joined(parts)}
</body>
</html>
"""


def require_matplotlib(function: str) -> None:
    """Raise unless pictures can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        message = f"{function}: pictures need matplotlib, the extra `viz`: pip install 'matplotlib>=3.9'"
        raise ModuleNotFoundError(message, name="matplotlib") from error


def figure(name: str, caption: str, plot: Callable[[Any], object], size: tuple[float, float] = (5.2, 3.4)) -> str:
    """Return a picture as a figure with inline SVG; `plot` draws it onto an Axes.

    Its text is text, in the colour of the page, and nothing in it refers to anything outside.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    inks = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    settings: dict[Any, Any] = {**dict.fromkeys(inks, _INK), "svg.fonttype": "none", "svg.hashsalt": name}
    stream = io.BytesIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # settings of the caller would change the page
        matplotlib.rcParams.update(settings)
        drawn = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(drawn)
        plot(drawn.subplots())
        drawn.savefig(stream, format="svg", transparent=True)
    svg = stream.getvalue().decode()
    svg = re.sub(
        r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.DOTALL
    )
    svg = re.sub(r'\b(xmlns(:\w+)?|version)="[^"]*"\s?', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'\bid="|(?<=href=")#|(?<=url\()#', lambda found: f"{found[0]}{name}-", svg)  # unique on the page
    svg = re.sub("|".join(_COLORS), lambda found: _COLORS[found[0].lower()], svg, flags=re.IGNORECASE)
    label = text(caption)
    return f'<figure>\n<svg role="img" aria-label="{label}" {svg.strip()}\n<figcaption>{label}</figcaption>\n</figure>'


def _joined(lines: Iterable[str]) -> str:
    return "\n".join(lines)
