"""Place a draft tree on a plane (x = depth, y = leaf order) and draw it as SVG."""

from collections.abc import Sequence
from html import escape

_STEP_X, _STEP_Y, _MARGIN = 84, 26, 22


def node_positions(parents: Sequence[int]) -> list[tuple[float, float]]:
    """Return (x, y) per node: x is the depth, leaves take y = 0, 1, 2, ... and a parent sits between its children.

    Leaves are numbered depth first with siblings in node order, so edges never cross.

    Parameters
    ----------
    parents : sequence of int, length N
        parents[0] = -1 and 0 <= parents[i] < i, valid nodes only.
    """
    children: list[list[int]] = [[] for _ in parents]
    depths = [0] * len(parents)
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
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


def tree_svg(parents: Sequence[int], labels: Sequence[str], titles: Sequence[str]) -> str:
    """Return a standalone SVG of the tree: one labelled circle per node, `titles` as hover text."""
    positions = node_positions(parents)
    points = [(_MARGIN + _STEP_X * x, _MARGIN + _STEP_Y * y) for x, y in positions]
    width = max(x for x, _ in points) + _STEP_X
    height = max(y for _, y in points) + _MARGIN
    edges = []
    for node, parent in enumerate(parents):
        if parent >= 0:
            (x0, y0), (x1, y1) = points[parent], points[node]
            middle = (x0 + x1) / 2
            edges.append(f'<path d="M{x0:g},{y0:g} C{middle:g},{y0:g} {middle:g},{y1:g} {x1:g},{y1:g}"/>')
    nodes = []
    for (x, y), label, title in zip(points, labels, titles, strict=True):
        nodes.append(
            f'<g><title>{escape(title)}</title><circle cx="{x:g}" cy="{y:g}" r="6"/>'
            f'<text x="{x + 9:g}" y="{y + 4:g}">{escape(label)}</text></g>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="draft tree of {len(parents)} nodes">'
        '<g fill="none" stroke="#999999">' + "".join(edges) + "</g>"
        '<g fill="#0072b2" font-family="monospace" font-size="12">' + "".join(nodes) + "</g></svg>"
    )


def tree_text(parents: Sequence[int], labels: Sequence[str]) -> str:
    """Return the tree as indented lines, children under their parent in node order."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    lines: list[str] = []
    stack = [(0, "", "")] if parents else []
    while stack:
        node, lead, below = stack.pop()
        lines.append(lead + labels[node])
        for child in reversed(children[node]):
            last = child == children[node][-1]
            stack.append((child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  ")))
    return "\n".join(lines)
