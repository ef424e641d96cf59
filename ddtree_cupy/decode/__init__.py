"""decode: the whole speculative loop for any pair of models, and a tiny bundled pair with which it runs anywhere."""

from ddtree_cupy.decode.generate import Generation, generate, generate_rounds
from ddtree_cupy.decode.loop import Round
from ddtree_cupy.decode.protocols import Drafter, Target

__all__ = ["Drafter", "Generation", "Round", "Target", "generate", "generate_rounds"]
