"""Exceptions of the library, each a :class:`DDTreeError` and also a built-in exception, and its one warning."""

__all__ = [
    "ArgumentError",
    "CompileError",
    "DDTreeError",
    "DTypeError",
    "EmulatorError",
    "LayoutError",
    "MissingGPUError",
    "ProbabilityWarning",
    "RequestIndexError",
    "ShapeError",
    "UnsupportedError",
    "WeightsError",
]


class DDTreeError(Exception):
    """Base class of every error that this library raises on purpose."""


class ShapeError(DDTreeError, ValueError):
    """An array has the wrong number of axes or the wrong extent."""


class DTypeError(DDTreeError, TypeError):
    """An array or scalar has a type that the function does not take."""


class LayoutError(DDTreeError, ValueError):
    """An array has the wrong strides, alignment, device or write permission."""


class ArgumentError(DDTreeError, ValueError):
    """A value lies outside the range that its argument allows."""


class RequestIndexError(DDTreeError, IndexError):
    """A batch has no request of this index."""


class UnsupportedError(DDTreeError, NotImplementedError):
    """There is no implementation for this combination; the message lists the supported ones."""


class MissingGPUError(DDTreeError, RuntimeError):
    """A GPU, its driver or CuPy is missing; the message says how to fix that."""


class CompileError(DDTreeError, RuntimeError):
    """A kernel does not compile; the message names file, line, kernel and architecture."""


class EmulatorError(DDTreeError, RuntimeError):
    """The CPU emulator caught a fault (block, thread and source line are named) or cannot trust its cache folder."""


class ProbabilityWarning(UserWarning):
    """Logits are expected, and what was given looks like probabilities."""


class WeightsError(DDTreeError, ValueError):
    """A file of weights, traces, costs or a container is truncated, damaged or of another kind."""
