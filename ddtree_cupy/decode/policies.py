"""Tree policies: what `decode.generate` and `explore.replay` ask of a policy, and the checks of its trees."""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ddtree_cupy.containers import Candidates, DraftTree
from ddtree_cupy.errors import ArgumentError, DTypeError

__all__ = ["Policy", "check_live_tree", "check_policy", "check_trees"]


class Policy(Protocol):
    """A rule that turns candidates into trees; anything with this method and a name can be replayed and run live.

    For sweeps over processes it must be possible to pickle it: a class at module level, not a closure. A policy that
    cuts its trees out of wider ones by their scores also has a method `widest` with the arguments of `build`; `replay`
    checks those wider trees, too.

    Attributes
    ----------
    name : str
    """

    @property
    def name(self) -> str:
        """Name in tables and figures."""
        ...

    def build(self, candidates: Candidates, root_token_ids: npt.NDArray[np.int32]) -> DraftTree:
        """Return one tree per request, batched.

        Parameters
        ----------
        candidates : Candidates
            Batched, (B, L, K), on the host. Ranks that traces do not hold have id 2**31 - 1 and logit -inf; trees that
            take one are refused. In the last rounds of a live text L is smaller: no tree may be deeper than the text.
        root_token_ids : int32 array, shape (B,)
        """
        ...


def check_policy(function: str, name: str, policy: Any, alternative: str = "") -> None:
    """Raise unless `policy` has the attributes of `Policy`.

    Parameters
    ----------
    function, name : str
        The caller and the name of its argument, for messages.
    policy : Policy
    alternative : str
        What else the caller takes, or how to get a policy; the end of the message.
    """
    if isinstance(policy, type) or not hasattr(policy, "name") or not callable(getattr(policy, "build", None)):
        what = f"the class {policy.__name__}" if isinstance(policy, type) else type(policy).__name__
        raise DTypeError(
            f"{function}: `{name}` is {what}, expected a policy: an object with `name` and `build`{alternative}"
        )


def check_trees(function: str, policy: Policy, tree: Any, *, batch: int, draft_len: int, position: int) -> None:
    """Raise unless `policy` returned one active tree per request, none deeper than the draft.

    Parameters
    ----------
    function : str
        The caller, for messages.
    policy : Policy
    tree : DraftTree
        What `policy.build` returned.
    batch, draft_len : int
    position : int
        That of the first request, for messages.
    """
    if not isinstance(tree, DraftTree):
        raise DTypeError(f"{function}: policy {policy.name!r} returned {type(tree).__name__}, expected DraftTree")
    if tree.token_ids.shape[:-1] != (batch,) or int(tree.depths.max(initial=0)) > draft_len:
        raise ArgumentError(
            f"{function}: policy {policy.name!r} returned trees {tree.token_ids.shape} of depth "
            f"{int(tree.depths.max(initial=0))}, expected ({batch}, num_nodes) no deeper than {draft_len}"
        )
    inactive = tree.num_nodes < 1
    if inactive.any():
        raise ArgumentError(
            f"{function}: policy {policy.name!r} returned an inactive tree at position "
            f"{position + int(np.flatnonzero(inactive)[0])}, expected at least the root"
        )


def check_live_tree(
    function: str, policy: Policy, tree: Any, *, draft_len: int, root: int, budget: int, vocab_size: int, position: int
) -> None:
    """Raise unless a target can verify what `policy` returned for one round.

    Parameters
    ----------
    function, policy, tree, draft_len, position
        As in `check_trees`.
    root : int
        The token of node 0.
    budget : int
        The most nodes besides the root.
    vocab_size : int
    """
    check_trees(function, policy, tree, batch=1, draft_len=draft_len, position=position)
    tree.validate()
    count, highest = int(tree.num_nodes[0]), int(tree.token_ids.max())
    where = f"{function}: policy {policy.name!r} returned a tree at position {position}"
    if int(tree.token_ids[0, 0]) != root:
        raise ArgumentError(f"{where} with token {tree.token_ids[0, 0]} at node 0, expected the root's, {root}")
    if highest >= vocab_size:
        raise ArgumentError(f"{where} with token {highest}, expected tokens in 0..{vocab_size - 1}")
    if count - 1 > budget:
        raise ArgumentError(
            f"{where} of {count - 1} nodes besides the root, expected at most {budget}; a larger `budget` allows more"
        )
