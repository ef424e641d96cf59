"""What the tests of displays share: trees of known numbers, drawing for real, and what colours stand for."""

import numpy as np

from ddtree_cupy import build_tree

TARGETS = np.array([10, 33, 0, 0, 0, 0], np.int32)


def toy_tree(budget=5):
    """Rows p = .6 .3 .1 and .5 .4 .1: nodes 9, 10, 20, 11, 21, 20 with parents -1, 0, 1, 0, 1, 3."""
    logits = np.full((2, 40), -np.inf, np.float32)
    logits[0, 10:13], logits[1, 20:23] = np.log([0.6, 0.3, 0.1]), np.log([0.5, 0.4, 0.1])
    return build_tree(logits, budget=budget, root_token_ids=9)


def two_trees():
    logits = np.random.default_rng(0).standard_normal((2, 3, 9)).astype(np.float32)
    return build_tree(logits, budget=4, root_token_ids=np.array([1, 2], np.int32))


def draw(display):
    """Render for real: many faults of an artist show only then."""
    display.figure_.canvas.draw()
    return display


def texts(artists):
    return [artist.get_text() for artist in artists]


def plain(values):
    """Return a NumPy array without matplotlib's mask."""
    return np.ma.getdata(values)


def meanings(display, colors):
    """Return what the legend says of each colour, whatever the colours are."""
    from matplotlib.colors import to_hex, to_rgba_array

    said = {}
    for handle, text in zip(display.legend_.legend_handles, display.legend_.get_texts(), strict=True):
        color = handle.get_markerfacecolor() if hasattr(handle, "get_markerfacecolor") else handle.get_facecolor()
        said[to_hex(color)] = text.get_text()
    return [said[to_hex(color)] for color in to_rgba_array(colors)]


def looks(values):
    """Number what is alike by first appearance: [0, 1, 0] when the first and the last are."""
    seen = {}
    return [seen.setdefault(tuple(np.atleast_1d(value)), len(seen)) for value in values]
