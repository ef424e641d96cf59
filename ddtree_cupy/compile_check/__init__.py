"""For developers: compile every kernel for every architecture without a GPU, and read what it costs there."""

from ddtree_cupy.compile_check import nvrtc, resources

__all__ = ["nvrtc", "resources"]
