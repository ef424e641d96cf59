"""Pictures of trees, masks, caches and measurements: one class per picture; drawing imports matplotlib.

Every class takes its data in the constructor or through a class method: from plain arrays (`from_arrays`), a container
(`from_tree`, `from_kv`), or the result of another function (`from_curve`, `from_replay`, `from_generation`,
`from_continuations`, `from_judgement`, `from_report`).
`plot(ax=None, ...)` draws onto one Axes (a new one by default), keeps the artists in attributes with a trailing
underscore (`ax_`, `figure_`, ...) and returns the object. Colours are those of Okabe and Ito; no global setting is
touched. Arrays on a GPU are copied to the host when an object is made, which synchronises. Arguments that do not fit
raise ShapeError, DTypeError or ArgumentError.
"""

from ddtree_cupy.viz.acceptance import AcceptanceDisplay
from ddtree_cupy.viz.bench import BenchDisplay
from ddtree_cupy.viz.budget import BudgetDisplay
from ddtree_cupy.viz.continuation import ContinuationDisplay
from ddtree_cupy.viz.error import ErrorDisplay
from ddtree_cupy.viz.page_table import PageTableDisplay
from ddtree_cupy.viz.tree import TreeDisplay
from ddtree_cupy.viz.visibility import VisibilityDisplay

__all__ = [
    "AcceptanceDisplay",
    "BenchDisplay",
    "BudgetDisplay",
    "ContinuationDisplay",
    "ErrorDisplay",
    "PageTableDisplay",
    "TreeDisplay",
    "VisibilityDisplay",
]
