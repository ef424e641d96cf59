"""decode: the whole speculative loop for any pair of models, and a tiny bundled pair with which it runs anywhere."""

from ddtree_cupy.decode.callables import CallableDrafter, CallableTarget, from_callable
from ddtree_cupy.decode.generate import Generation, generate, generate_rounds
from ddtree_cupy.decode.loop import Round
from ddtree_cupy.decode.policies import Policy
from ddtree_cupy.decode.protocols import Drafter, StatefulDrafter, StatefulTarget, Target

__all__ = [
    "CallableDrafter",
    "CallableTarget",
    "Drafter",
    "Generation",
    "Policy",
    "Round",
    "StatefulDrafter",
    "StatefulTarget",
    "Target",
    "from_callable",
    "generate",
    "generate_rounds",
]
