"""What a model must offer so that `decode.generate` can drive it: with an MLA cache, or with a state of its own."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ddtree_cupy.containers import DraftTree, PagedKV

__all__ = ["Drafter", "StatefulDrafter", "StatefulTarget", "Target"]

Array = Any


class Target(Protocol):
    """The large model that decides the text, with one MLA cache per layer that the loop keeps.

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
    """The cheap model that guesses a block of tokens at once, from the features of a `Target`.

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


class StatefulTarget(Protocol):
    """The large model that decides the text, and remembers the text by itself, in whatever form.

    All arrays are on the host. One object serves one text at a time.

    Attributes
    ----------
    vocab_size : int
        V.
    """

    vocab_size: int

    def start(self, prompt_ids: npt.NDArray[np.int32]) -> None:
        """Forget any text and begin with a prompt, int32 (n,), n >= 1; its last token is node 0 of the first tree."""
        ...

    def verify(self, tree: DraftTree) -> npt.NDArray[Any]:
        """Return float logits (N, V) of the token after each node of an unbatched tree without padding.

        Node 0 is the last token of the text; the text itself does not change. Row i belongs to the text followed by the
        tokens on the path from node 0 (excluded) to node i, and depends on nothing else of the tree.
        """
        ...

    def commit(self, accepted: npt.NDArray[np.int32]) -> None:
        """Extend the text by nodes of the tree verified last: int32 (n,) from node 0 down, n >= 1.

        Node 0 is in the text already. The next token of the text is node 0 of the next tree.
        """
        ...


class StatefulDrafter(Protocol):
    """The cheap model that guesses the next tokens, and remembers the text by itself.

    It goes with a target of either form. All arrays are on the host. One object serves one text at a time.

    Attributes
    ----------
    draft_len : int
        L, positions guessed by one call of `propose`.
    """

    draft_len: int

    def start(self, prompt_ids: npt.NDArray[np.int32]) -> None:
        """Forget any text and begin with a prompt, int32 (n,), n >= 1."""
        ...

    def propose(self) -> npt.NDArray[Any]:
        """Return draft logits (L, V); row i scores the token i + 1 positions after the last token of the text."""
        ...

    def commit(self, token_ids: npt.NDArray[np.int32]) -> None:
        """Extend the text by tokens, int32 (n,), n >= 1: the accepted drafts and the target's own token after them."""
        ...
