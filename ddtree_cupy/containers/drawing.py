"""Place a draft tree on a plane (x = depth, y = leaf order) and draw it as SVG, or write it as lines of text."""

import math
import unicodedata
from collections.abc import Iterator, Sequence
from html import escape

from ddtree_cupy._terminal import escaped

_GUTTER, _MARGIN = 34, 12  # pixels: between the columns, where the edges run, and around the picture
_MOST_COLUMNS = 24  # of a label, in the widths of one Latin letter; the rest is cut
_MOST_NESTED = 200  # levels of groups inside each other; parsers of HTML and XML have limits, the lowest is 256
_NO_XML = {0xFFFE: "\\ufffe", 0xFFFF: "\\uffff"}  # no document may hold these two

# Text and edges take the colour of the text around the picture, so they suit light and dark pages; alone, a picture
# follows the settings of the reader. The other colours stand out from white and from black.
_STYLE = (
    "<style>"
    ".ddtree{font-family:monospace,monospace}"
    "svg.ddtree{display:block;max-width:none}"
    "svg.ddtree:root{color-scheme:light dark;color:CanvasText}"
    ".ddtree path{fill:none;stroke:currentColor;stroke-opacity:.4}"
    ".ddtree text{fill:currentColor;white-space:pre}"
    ".ddtree circle{fill:#2a8fd0;stroke:none}"
    ".ddtree .accepted>circle{fill:#009e73}"
    ".ddtree .accepted>path{stroke:#009e73;stroke-opacity:1;stroke-width:3}"
    ".ddtree .refused>circle{fill:#d55e00}"
    ".ddtree .bonus>circle{fill:none;stroke:#d98200;stroke-width:2}"
    ".ddtree .out>.bonus>*{opacity:.35}"
    ".ddtree .bonus>path{stroke:#d98200;stroke-opacity:1;stroke-width:2;stroke-dasharray:4 3}"
    ".ddtree .unreached>circle{fill:#808080}"
    ".ddtree .chosen>circle{stroke:currentColor;stroke-width:2}"
    ".ddtree .out>circle,.ddtree .out>text,.ddtree .out>path{opacity:.35}"
    ".ddtree g:hover>text{font-weight:bold}"
    ".ddtree g:hover>path{stroke-opacity:1;stroke-width:3}"
    "</style>"
)


def _children_of(parents: Sequence[int]) -> list[list[int]]:
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    return children


def node_positions(parents: Sequence[int]) -> list[tuple[float, float]]:
    """Return (x, y) per node: x is the depth, leaves take y = 0, 1, 2, ... and a parent sits between its children.

    Leaves are numbered depth first with siblings in node order, so edges never cross.

    Parameters
    ----------
    parents : sequence of int, length N
        parents[0] = -1 and 0 <= parents[i] < i, valid nodes only.
    """
    children = _children_of(parents)
    depths = [0] * len(parents)
    for node, parent in enumerate(parents):
        if parent >= 0:
            depths[node] = depths[parent] + 1

    leaf_order: list[int] = []
    stack = [0] if parents else []
    while stack:
        node = stack.pop()
        if children[node]:
            stack.extend(reversed(children[node]))
        else:
            leaf_order.append(node)

    heights = [0.0] * len(parents)
    for y, leaf in enumerate(leaf_order):
        heights[leaf] = float(y)
    for node in reversed(range(len(parents))):  # children have larger indices, so they have their places already
        if children[node]:
            heights[node] = (heights[children[node][0]] + heights[children[node][-1]]) / 2
    return [(float(depth), height) for depth, height in zip(depths, heights, strict=True)]


def shown(text: str) -> str:
    r"""Return the text of a token so that all of it is seen: controls as escapes, spaces at its ends as "␣".

    Parameters
    ----------
    text : str

    Examples
    --------
    >>> print(shown(" the\n"), shown(""))
    ␣the\n ""
    """
    body = text.strip(" ")
    before = len(text) - len(text.lstrip(" ")) if body else len(text)
    after = len(text) - before - len(body)
    return "␣" * before + escaped(body).translate(_NO_XML) + "␣" * after or '""'


def width_of(text: str) -> int:
    """Return the columns of a text in a font of fixed width: 2 for CJK and emoji, 0 for marks on another character.

    Parameters
    ----------
    text : str

    Examples
    --------
    >>> [width_of(text) for text in ("tree", "木", "🌳", "e\u0301")]
    [4, 2, 2, 1]
    """
    return sum(map(_width_of_character, text))


def _width_of_character(character: str) -> int:
    if character == "\ufe0f":  # asks for the wide form of the character before it
        return 1
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def _label(text: str) -> str:
    """Return the text to draw, cut to the widest label."""
    text = shown(text)
    if width_of(text) <= _MOST_COLUMNS:
        return text
    kept = ""
    for character in text:
        if width_of(kept + character) >= _MOST_COLUMNS:
            break
        kept += character
    return kept + "…"


def tree_svg(
    parents: Sequence[int],
    labels: Sequence[str],
    titles: Sequence[str],
    *,
    path_scores: Sequence[float] | None = None,
    kinds: Sequence[str] | None = None,
    notes: Sequence[str] | None = None,
) -> str:
    """Return a standalone SVG of the tree: one circle per node and its label, `titles` as hover text.

    The columns of the labels and the gutters of the edges alternate, so that no edge runs through a label. The group of
    a node, `<g data-node="5">`, holds its circle, its label, the edge from its parent, and the groups of its children:
    pointing at a node marks its whole path.

    Parameters
    ----------
    parents : sequence of int, length N
        As in `node_positions`.
    labels, titles : sequence of str, length N
        Any text, not markup.
    path_scores : sequence of float, length N, optional
        Nats; more probable nodes are larger.
    kinds : sequence of str, length N, optional
        Names of classes: "accepted", "refused", "bonus", "unreached", "out".
    notes : sequence of str, length N, optional
        Kept with the nodes as `data-note`, for scripts.
    """
    texts = [_label(label) for label in labels]
    size, step = (12, 20) if len(parents) <= 64 else (10, 14)
    positions = node_positions(parents)
    depths = [int(x) for x, _ in positions]
    ends = [14 + 0.62 * size * width_of(text) for text in texts]  # from the circle's centre to behind the label
    widths = [0.0] * (1 + max(depths))
    for depth, end in zip(depths, ends, strict=True):
        widths[depth] = max(widths[depth], end)
    lefts = [float(_MARGIN)]
    for column in widths:
        lefts.append(lefts[-1] + column + _GUTTER)
    heights = [_MARGIN + step * y for _, y in positions]
    groups = []
    for node, (parent, text, title) in enumerate(zip(parents, texts, titles, strict=True)):
        x, y = lefts[depths[node]], heights[node]
        radius = 4.0 if path_scores is None else 2.5 + 3.5 * math.exp(min(0.0, path_scores[node]) / 2)
        kind = f' class="{kinds[node]}"' if kinds and kinds[node] else ""
        note = f' data-note="{escape(notes[node])}"' if notes else ""
        edge = ""
        if parent >= 0:
            start, turn, above = lefts[depths[parent]] + ends[parent], x - _GUTTER, heights[parent]
            middle = x - _GUTTER / 2
            curve = f"C{middle:g},{above:g} {middle:g},{y:g} {x - radius:g},{y:g}"
            edge = f'<path d="M{start:g},{above:g} H{turn:g} {curve}"/>'
        groups.append(
            f'<g data-node="{node}"{kind}{note}><title>{escape(title.translate(_NO_XML))}</title>{edge}'
            f'<circle cx="{x:g}" cy="{y:g}" r="{radius:.3g}"/>'
            f'<text x="{x + 9:g}" y="{y + 0.35 * size:g}">{escape(text)}</text>'
        )
    width, height = lefts[-1] - _GUTTER, max(heights) + _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ddtree" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-size="{size}" font-family="monospace" fill="#2a8fd0" '
        f'role="img" aria-label="draft tree of {len(parents)} nodes">{_STYLE}{"".join(_nested(parents, groups))}</svg>'
    )


def _nested(parents: Sequence[int], groups: Sequence[str]) -> Iterator[str]:
    """Yield the opened groups, each closed behind those of its children, or at once where the tree is too deep."""
    children = _children_of(parents)
    nests = max((int(x) for x, _ in node_positions(parents)), default=0) <= _MOST_NESTED
    stack = [0] if parents else []
    while stack:
        node = stack.pop()
        if node < 0:
            yield "</g>"
            continue
        yield groups[node] if nests else groups[node] + "</g>"
        stack.extend([-1] * nests + children[node][::-1])


def tree_text(parents: Sequence[int], labels: Sequence[str]) -> str:
    """Return the tree as indented lines, children under their parent in node order."""
    children = _children_of(parents)
    lines: list[str] = []
    stack = [(0, "", "")] if parents else []
    while stack:
        node, lead, below = stack.pop()
        lines.append(lead + labels[node])
        for child in reversed(children[node]):
            last = child == children[node][-1]
            stack.append((child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  ")))
    return "\n".join(lines)
