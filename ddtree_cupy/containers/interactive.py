"""Show draft trees as HTML to play with: a slider over the budget and notes on every node, without any library.

Nothing here has an id: scripts look for the picture that they stand in, so that any number fits on one page. Where a
page runs no scripts, the whole tree is drawn and its nodes keep their hover texts.
"""

from collections.abc import Sequence
from html import escape

import numpy as np

from ddtree_cupy.containers.drawing import shown, tree_svg, width_of

MOST_DRAWN = 256  # nodes of a tree that a notebook shows
_MOST_OF_A_PATH = 120  # columns of a path's text in the notes on a node; its beginning is left out
_SLIDE = (
    "var b=+this.value,v=this.closest('.ddtree-view');"
    "v.querySelectorAll('g[data-node]:not(.bonus)').forEach(function(g){var n=+g.dataset.node;"
    "g.classList.toggle('out',n>b);if(n===b)v.querySelector('output').textContent=g.dataset.note})"
)
_POINT = (
    "var g=event.target.closest('g[data-node]');"
    "if(g)this.closest('.ddtree-view').querySelector('pre').textContent=g.querySelector('title').textContent"
)
# MathJax leaves the text alone in elements of the first two classes
_VIEW = '<div class="tex2jax_ignore mathjax_ignore ddtree-view">'


def fates(parents: Sequence[int], accepted: Sequence[int]) -> list[str]:
    """Return one of "accepted", "refused" (a child at the end of the accepted path) and "unreached" per node.

    Parameters
    ----------
    parents : sequence of int, length N
    accepted : sequence of int
        Node indices from the root to the last accepted one.
    """
    path = set(accepted)
    return [
        "accepted" if node in path else "refused" if parent == accepted[-1] else "unreached"
        for node, parent in enumerate(parents)
    ]


def node_titles(
    token_ids: Sequence[int],
    parents: Sequence[int],
    *,
    labels: Sequence[str] | None = None,
    path_scores: Sequence[float] | None = None,
    target_words: Sequence[str | None] | None = None,
    entries: Sequence[str] | None = None,
) -> list[str]:
    """Return what there is to say about each node, several lines each.

    Parameters
    ----------
    token_ids, parents : sequence of int, length N
    labels : sequence of str, length N, optional
        Texts of the tokens, which bring their own spaces.
    path_scores : sequence of float, length N, optional
    target_words : sequence of str or None, length N, optional
        The text of the target's token behind each node, where it is known.
    entries : sequence of str, length N, optional
        Why each node is in the tree; default: the budget from which on it is, its index in a best-first tree.
    """
    words = [str(token) for token in token_ids] if labels is None else [*labels]
    between = " " if labels is None else ""
    paths, depths, titles = [*words], [0] * len(words), []
    for node, (token, parent) in enumerate(zip(token_ids, parents, strict=True)):
        if parent >= 0:
            paths[node] = paths[parent] + between + words[node]
            depths[node] = depths[parent] + 1
        lines = [f"path: {_end_of(paths[node])}", f"node {node}, token {token}, depth {depths[node]}"]
        if path_scores is not None:
            whole, own = np.exp([path_scores[node], path_scores[node] - path_scores[max(parent, 0)]])
            lines += [f"probability {whole:.3g}, after its parent {own:.3g}"] * (node > 0)
        if entries is not None:
            lines.append(entries[node])
        elif node:
            score = "" if path_scores is None else f" with path score {path_scores[node]:.3f} nats"
            lines.append(f"enters at budget {node}{score}")
        if target_words is not None and target_words[node] is not None:
            lines.append(f"next token of the target: {shown(target_words[node] or '')}")
        titles.append("\n".join(lines))
    return titles


def _end_of(path: str) -> str:
    text = shown(path)
    return text if width_of(text) <= _MOST_OF_A_PATH else "…" + text[-_MOST_OF_A_PATH // 2 :]


def budget_notes(count: int, path_scores: Sequence[float] | None, accepted: Sequence[int] | None) -> list[str]:
    """Return for each budget below `count` what the tree of that many nodes besides the root gives.

    Parameters
    ----------
    count : int
        Nodes of the whole tree, the root included.
    path_scores : sequence of float, length `count`, optional
    accepted : sequence of int, optional
        Node indices from the root to the last accepted one.
    """
    notes = [f"{budget} of {count - 1}" for budget in range(count)]
    if path_scores is not None:
        expected = np.cumsum(np.exp(path_scores))
        notes = [f"{note}, {tokens:.2f} tokens per pass expected" for note, tokens in zip(notes, expected, strict=True)]
    if accepted is not None:
        found = np.searchsorted(np.asarray(accepted), np.arange(count), side="right") - 1
        notes = [f"{note}, {drafts} accepted" for note, drafts in zip(notes, found, strict=True)]
    return notes


def tree_html(
    token_ids: Sequence[int],
    parents: Sequence[int],
    *,
    labels: Sequence[str] | None = None,
    path_scores: Sequence[float] | None = None,
    accepted: Sequence[int] | None = None,
    bonus: tuple[int, str] | None = None,
    target_words: Sequence[str | None] | None = None,
) -> str:
    """Return one tree as HTML with a slider: budget b shows the first b nodes besides the root.

    Parameters
    ----------
    token_ids, parents, labels, path_scores, target_words
        As in `node_titles`.
    accepted : sequence of int, optional
        Node indices from the root to the last accepted one.
    bonus : (token id, its text), optional
        The target's token behind them; only with `accepted`.
    """
    count = len(parents)
    titles = node_titles(token_ids, parents, labels=labels, path_scores=path_scores, target_words=target_words)
    notes = budget_notes(count, path_scores, accepted)
    texts = [str(token) for token in token_ids] if labels is None else [*labels]
    kinds = None if accepted is None else fates(parents, accepted)
    drawn, scores = [*parents], path_scores if path_scores is None else [*path_scores]
    if kinds is not None and accepted is not None and bonus is not None:
        drawn.append(accepted[-1])
        texts.append(bonus[1])
        titles.append(f"bonus token {bonus[0]}: the target's own token behind the accepted path")
        notes.append("")
        kinds.append("bonus")
        scores = scores if scores is None else [*scores, 0.0]
    svg = tree_svg(drawn, texts, titles, path_scores=scores, kinds=kinds, notes=notes)
    slider = (
        f'<label>budget <input type="range" min="0" max="{count - 1}" value="{count - 1}" aria-label="budget" '
        f'style="width:20em;vertical-align:middle" oninput="{escape(_SLIDE)}"> '
        f"<output>{escape(notes[count - 1])}</output></label>"
    )
    return (
        f"{_VIEW}{slider if count > 1 else ''}"
        f'<div style="overflow:auto;max-height:600px" onmouseover="{escape(_POINT)}">{svg}</div>'
        f'<pre style="min-height:6.5em;margin:0;color:inherit;background:none">point at a node</pre></div>'
    )


def batch_html(requests: Sequence[tuple[str, str | None]]) -> str:
    """Return the requests of a batch, one below the other, that open at a click; the first one with a tree is open.

    Parameters
    ----------
    requests : sequence of (str, str or None)
        One line about the request, and the HTML of its tree or None.
    """
    rows, opened = [], " open"
    for summary, html in requests:
        if html is None:
            rows.append(f"<div>{escape(summary)}</div>")
        else:
            rows.append(f"<details{opened}><summary>{escape(summary)}</summary>{html}</details>")
            opened = ""
    return f'<div class="ddtree-batch">{"".join(rows)}</div>'
