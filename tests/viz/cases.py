"""What the tests of displays share: trees of known numbers, and drawing for real."""

import numpy as np

from ddtree_cupy import build_tree

TARGETS = np.array([10, 33, 0, 0, 0, 0], np.int32)


def toy_tree(budget=5):
    """Rows p = .6 .3 .1 and .5 .4 .1: nodes 9, 10, 20, 11, 21, 20 with parents -1, 0, 1, 0, 1, 3."""
    logits = np.full((2, 40), -np.inf, np.float32)
    logits[0, 10:13], logits[1, 20:23] = np.log([0.6, 0.3, 0.1]), np.log([0.5, 0.4, 0.1])
    return build_tree(logits, budget=budget, root_token_ids=9)


def large_tree(budget=300):
    logits = 2 * np.random.default_rng(0).standard_normal((8, 500)).astype(np.float32)
    return build_tree(logits, budget=budget, root_token_ids=100_000)


def draw(display):
    """Render for real: many faults of an artist show only then."""
    display.figure_.canvas.draw()
    return display


def texts(artists):
    return [artist.get_text() for artist in artists]
