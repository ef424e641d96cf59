"""A tiny bundled target and drafter, trained on the Python standard library's source; NumPy only.

`README.md` beside this file says how they were trained and how good they are.
"""

from ddtree_cupy.decode.tiny.drafter import DrafterState, TinyDrafter
from ddtree_cupy.decode.tiny.target import TinyTarget
from ddtree_cupy.decode.tiny.texts import heldout_names, heldout_text

__all__ = ["DrafterState", "TinyDrafter", "TinyTarget", "heldout_names", "heldout_text"]
