"""A tiny bundled target and drafter, trained on the Python standard library's source; NumPy only.

`README.md` beside this file says how they were trained and how good they are.
"""

from ddtree_cupy.decode.tiny.corpus import heldout_names, heldout_text
from ddtree_cupy.decode.tiny.drafter import DrafterState, TinyDrafter
from ddtree_cupy.decode.tiny.target import TinyTarget

__all__ = ["DrafterState", "TinyDrafter", "TinyTarget", "heldout_names", "heldout_text"]
