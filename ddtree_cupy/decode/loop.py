"""The decoding loop on one text: prefill, then draft, build, verify, accept, commit, one round per target pass."""

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import Checker
from ddtree_cupy.containers import AcceptResult, DraftTree
from ddtree_cupy.decode.models import PREFILL_NODES, Models
from ddtree_cupy.errors import ArgumentError
from ddtree_cupy.tree_accept import accept, commit_kv, greedy_targets, sample_targets
from ddtree_cupy.tree_build import build_tree

__all__ = ["Loop", "Round", "check_temperature"]

Array = Any


@dataclass(frozen=True, eq=False)
class Round:
    """One target pass.

    Attributes
    ----------
    token_ids : tuple of int
        The tokens that it added to the text: accepted drafts, then the bonus token. They end at a stop token and at
        `max_new_tokens`.
    num_drafted : int
        How many of `token_ids` were drafted (the rest, at most one, is the bonus).
    num_accepted : int
        Draft tokens that the target accepted, before `token_ids` was cut.
    tree : DraftTree
        The tree that it verified.
    context_len : int
        Cached positions before the pass.
    draft_seconds, build_seconds, verify_seconds, commit_seconds : float
        Host time of the drafter, of tree_build, of the target pass, and of accept and commit.
    """

    token_ids: tuple[int, ...]
    num_drafted: int
    num_accepted: int
    tree: DraftTree
    context_len: int
    draft_seconds: float
    build_seconds: float
    verify_seconds: float
    commit_seconds: float


def check_temperature(check: Checker, temperature: float) -> float:
    """Return a temperature as float, 0 or more."""
    found = check.real("temperature", temperature)
    if found < 0:
        raise ArgumentError(f"{check.function}: `temperature` is {found}, expected 0 (greedy) or more")
    return found


class Loop:
    """One text: its caches, the state of the drafter, the root and the draws. Making it prefills the prompt.

    The last token of `prompt` is the first root. `asking` names the arguments that decide the size of the caches, for
    messages. The other arguments are those of `generate`, after the checks; `budget` is at most what a tree can hold.

    Attributes
    ----------
    root : int
        The last committed token, whose features are not known yet.
    remaining : int
        Tokens that may still come; 0 after a stop token.
    drafter_state : object
        The state after the whole text except the root.
    """

    def __init__(
        self,
        models: Models,
        prompt: npt.NDArray[np.int32],
        *,
        asking: str,
        max_new_tokens: int,
        budget: int,
        temperature: float,
        seed: int,
        stop_token_ids: Collection[int] = (),
    ) -> None:
        self.models, self.budget, self.temperature = models, budget, temperature
        self.remaining, self.stop_token_ids = max_new_tokens, stop_token_ids
        self.random, self.drawn = np.random.default_rng(seed), np.zeros(0)
        self.drafter_state = models.drafter.start() if models.drafter is not None else None
        max_nodes = max(budget + 1, min(PREFILL_NODES, prompt.size))
        self.kv = models.allocate(asking, prompt.size + max_new_tokens, max_nodes)
        for start in range(0, prompt.size - 1, PREFILL_NODES):
            self._prefill(prompt[start : min(start + PREFILL_NODES, prompt.size - 1)])
        self.root = int(prompt[-1])

    def round(self, **tree_options: Any) -> Round:
        """Run one target pass on a tree of at most `budget` drafts, built with these options of `build_tree`."""
        context_len = int(self.kv[0].context_lens)

        started = time.perf_counter()
        if self.budget == 0 or self.remaining == 1:
            draft_logits = self._place(np.zeros((0, self.models.vocab_size), np.float32))
        else:
            draft_logits = self.models.propose(self.drafter_state, self.root)
        drafted = time.perf_counter()
        limits = {"max_depth": self.remaining - 1, "check_finite": False, **tree_options}
        tree = build_tree(draft_logits, budget=self.budget, root_token_ids=self.root, **limits)
        tree = _without_padding(tree)
        built = time.perf_counter()
        target_logits, features = self.models.forward(tree, self.kv)
        verified = time.perf_counter()
        options: dict[str, Any] = {"num_nodes": tree.num_nodes, "on_bad_row": "mark"}  # rows off the path do not matter
        if self.temperature == 0:
            targets = greedy_targets(target_logits, **options)
        else:
            uniforms = self._uniforms(min(self.models.draft_len + 1, self.remaining))[np.maximum(tree.depths, 0)]
            targets = sample_targets(target_logits, uniforms, temperature=self.temperature, **options)
        result = accept(tree, targets)
        num_accepted, bonus_token = int(result.num_accepted), int(result.bonus_token)
        if bonus_token < 0:
            raise self.models.no_token(context_len + num_accepted + 1)
        self._commit(result, features)
        self.root = bonus_token
        token_ids = [*tree.token_ids[result.accepted[1 : num_accepted + 1]].tolist(), self.root]
        # the depth limit of the tree keeps their number within `remaining`
        stop = next((at for at, token in enumerate(token_ids) if token in self.stop_token_ids), None)
        if stop is not None:
            token_ids = token_ids[: stop + 1]
        self.remaining = self.remaining - len(token_ids) if stop is None else 0
        self.drawn = self.drawn[len(token_ids) :]
        return Round(
            token_ids=tuple(token_ids),
            num_drafted=min(num_accepted, len(token_ids)),
            num_accepted=num_accepted,
            tree=tree,
            context_len=context_len,
            draft_seconds=drafted - started,
            build_seconds=built - drafted,
            verify_seconds=verified - built,
            commit_seconds=time.perf_counter() - verified,
        )

    def _prefill(self, token_ids: npt.NDArray[np.int32]) -> None:
        count = token_ids.size
        chain = DraftTree.from_parents(token_ids, np.arange(-1, count - 1))
        _, features = self.models.forward(chain.map(self._place), self.kv)
        whole = AcceptResult(np.arange(count, dtype=np.int32), np.array(count - 1, np.int32), np.array(-1, np.int32))
        self._commit(whole.map(self._place), features)

    def _commit(self, result: AcceptResult, features: Array) -> None:
        self.kv = commit_kv(self.kv, result)
        if self.models.drafter is not None:
            path = result.accepted[: int(result.num_accepted) + 1]
            self.drafter_state = self.models.drafter.observe(self.drafter_state, features[path])

    def _uniforms(self, count: int) -> Array:
        """Return the draws of the next `count` text positions, which depend on the seed and the position alone."""
        missing = max(count - len(self.drawn), 0)
        self.drawn = np.concatenate([self.drawn, self.random.random(missing)])
        return self._place(self.drawn[:count])

    def _place(self, array: Array) -> Array:
        """Move a host array to the library of the target's caches."""
        return np.asarray(array, like=self.kv[0].ckv)


def _without_padding(tree: DraftTree) -> DraftTree:
    """Drop padding nodes, so that a target pass computes only nodes of the tree."""
    count = int(tree.num_nodes)
    words = (count + 31) // 32
    return DraftTree(
        token_ids=tree.token_ids[:count],
        parents=tree.parents[:count],
        depths=tree.depths[:count],
        path_scores=None if tree.path_scores is None else tree.path_scores[:count],
        num_nodes=tree.num_nodes,
        status=tree.status,
        visibility_bits=tree.visibility_bits[:count, :words].copy(),  # a contiguous copy
        first_child=tree.first_child[:count],
        next_sibling=tree.next_sibling[:count],
    )
