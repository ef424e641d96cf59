"""One text, as the two models of a loop remember it: in caches that the loop keeps, or by themselves."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy.containers import AcceptResult, DraftTree, PagedKV
from ddtree_cupy.decode.models import PREFILL_NODES, Models
from ddtree_cupy.tree_accept import commit_kv

__all__ = ["Text"]

Array = Any


class Text:
    """The text before the root, for both forms of target and of drafter. Making it shows the models the prompt.

    Attributes
    ----------
    context_len : int
        Tokens of the text before the root.
    """

    def __init__(
        self, models: Models, prompt: npt.NDArray[np.int32], *, asking: str, max_new_tokens: int, max_nodes: int
    ) -> None:
        self.models, self.context_len = models, prompt.size - 1
        room = (asking, prompt.size + max_new_tokens, max(max_nodes, min(PREFILL_NODES, prompt.size)))
        self._kv: tuple[PagedKV, ...] = ()
        if models.target_is_stateful:
            models.check_room(*room)
            models.target.start(prompt.copy())
        else:
            self._kv = models.allocate(*room)
        self._drafter_state: Any = None
        if models.drafter_is_stateful:
            models.drafter.start(prompt.copy())
        elif models.drafter is not None:
            self._drafter_state = models.drafter.start()
        if self._kv:
            for start in range(0, prompt.size - 1, PREFILL_NODES):
                self._prefill(prompt[start : min(start + PREFILL_NODES, prompt.size - 1)])

    def place(self, array: Array) -> Array:
        """Move a host array to the library of the target's arrays."""
        return np.asarray(array, like=self.models.like)

    def propose(self, root_token_id: int) -> Array:
        """Return the drafter's logits (L or fewer, V)."""
        return self.models.propose(self._drafter_state, root_token_id)

    def verify(self, tree: DraftTree) -> Array:
        """Return the target's logits (N, V)."""
        if not self._kv:
            return self.models.verify(tree)
        logits, self._features = self.models.forward(tree, self._kv)
        return logits

    def commit(self, result: AcceptResult, token_ids: list[int]) -> None:
        """Extend the text by what was accepted of the tree verified last.

        `token_ids` are the tokens after the old root, up to the new one.
        """
        path = result.accepted[: int(result.num_accepted) + 1]
        self._commit(result, path)
        if self.models.drafter_is_stateful:
            self.models.drafter.commit(np.array(token_ids, np.int32))
        self.context_len += len(path)

    def _commit(self, result: AcceptResult, path: Array) -> None:
        if not self._kv:
            self.models.target.commit(path.copy())
            return
        self._kv = commit_kv(self._kv, result)
        if self.models.drafter is not None and not self.models.drafter_is_stateful:
            self._drafter_state = self.models.drafter.observe(self._drafter_state, self._features[path])

    def _prefill(self, token_ids: npt.NDArray[np.int32]) -> None:
        count = token_ids.size
        chain = DraftTree.from_parents(token_ids, np.arange(-1, count - 1))
        self.verify(chain.map(self.place))
        whole = AcceptResult(np.arange(count, dtype=np.int32), np.array(count - 1, np.int32), np.array(-1, np.int32))
        whole = whole.map(self.place)
        self._commit(whole, whole.accepted)
