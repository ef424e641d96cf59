"""What a model must offer so that `decode.generate` can drive it."""

from collections.abc import Sequence
from typing import Any, Protocol

from ddtree_cupy.containers import DraftTree, PagedKV

__all__ = ["Drafter", "Target"]

Array = Any


class Target(Protocol):
    """The large model that decides the text.

    Attributes
    ----------
    vocab_size : int
        V.
    """

    vocab_size: int

    def allocate(self, max_context: int, max_nodes: int) -> Sequence[PagedKV]:
        """Return one empty unbatched cache per layer with room for `max_context` + `max_nodes` positions."""
        ...

    def forward(self, tree: DraftTree, kv: Sequence[PagedKV]) -> tuple[Array, Array]:
        """Run all N nodes of an unbatched tree in one pass.

        Node i has position context_len + depth(i). The pass writes the key of node i to logical position
        context_len + i of every cache (`write_kv`), attends through `tree_attention`, and does not change
        `context_lens`. A prompt is prefilled by the same call on a chain.

        Returns
        -------
        logits : float array, shape (N, V)
        features : float array, shape (N, F)
            The input of the drafter, one row per node. Rows of padding nodes are not used.
        """
        ...


class Drafter(Protocol):
    """The cheap model that guesses a block of tokens at once.

    Attributes
    ----------
    draft_len : int
        L, positions guessed by one call of `propose`.
    """

    draft_len: int

    def start(self) -> Any:
        """Return the state of an empty text."""
        ...

    def observe(self, state: Any, features: Array) -> Any:
        """Return the state after the target's features (n, F) of newly committed positions, in order.

        The old state must not be used again.
        """
        ...

    def propose(self, state: Any, root_token_id: int) -> Array:
        """Return draft logits (L, V); row i scores the token i + 1 positions after the root.

        The root is a committed token whose features are not known yet.
        """
        ...
