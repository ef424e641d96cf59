"""For developers: compile every kernel for every architecture without a GPU, and read its registers and memory."""

from ddtree_cupy.compile_check import nvrtc, resources

__all__ = ["nvrtc", "resources"]
