"""The decoding loop on one text: prefill, then draft, build, verify, accept, commit, one round per target pass."""

import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import Checker
from ddtree_cupy.containers import Candidates, DraftTree
from ddtree_cupy.decode.models import Models
from ddtree_cupy.decode.policies import Policy, check_live_tree
from ddtree_cupy.decode.text import Text
from ddtree_cupy.errors import ArgumentError
from ddtree_cupy.tree_accept import accept, greedy_targets, sample_targets
from ddtree_cupy.tree_build import build_tree, top_candidates

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
    """One text, its root and its draws. Making it shows the models the prompt.

    The last token of `prompt` is the first root. `asking` names the arguments that decide the size of the caches, for
    messages. The other arguments are those of `generate`, after the checks; `budget` is at most what a tree can hold.

    Attributes
    ----------
    root : int
        The last committed token, whose features are not known yet.
    remaining : int
        Tokens that may still come; 0 after a stop token.
    text : Text
        What the models know of the text before the root.
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
        self.root = int(prompt[-1])
        self.text = Text(models, prompt, asking=asking, max_new_tokens=max_new_tokens, max_nodes=budget + 1)

    def candidates(self, draft_logits: Array, width: int) -> Candidates:
        """Return the best `width` tokens of every draft row, from logits rounded to float32, on the host."""
        logits = draft_logits.astype(np.float32) if draft_logits.dtype == np.float64 else draft_logits
        return top_candidates(logits, min(width, self.models.vocab_size), check_finite=False).to("numpy")

    def round(self, policy: Policy | None = None, **tree_options: Any) -> Round:
        """Run one target pass on a tree of at most `budget` drafts.

        `policy` builds the tree, or `build_tree` with its options.
        """
        context_len = self.text.context_len

        started = time.perf_counter()
        if self.budget == 0 or self.remaining == 1:
            draft_logits = self.text.place(np.zeros((0, self.models.vocab_size), np.float32))
        else:
            draft_logits = self.text.propose(self.root)
        drafted = time.perf_counter()
        if policy is not None and len(draft_logits):
            tree = self._build(policy, draft_logits[: self.remaining - 1])
        else:
            limits = {"max_depth": self.remaining - 1, "check_finite": False, **tree_options}
            tree = build_tree(draft_logits, budget=self.budget, root_token_ids=self.root, **limits)
        tree = _without_padding(tree)
        built = time.perf_counter()
        target_logits = self.text.verify(tree)
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
        self.root = bonus_token
        token_ids = [*tree.token_ids[result.accepted[1 : num_accepted + 1]].tolist(), self.root]
        self.text.commit(result, token_ids)
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

    def _build(self, policy: Policy, draft_logits: Array) -> DraftTree:
        """Return the policy's tree after checking it, in the library of the target."""
        candidates = self.candidates(draft_logits, self.budget).with_batch()
        tree = policy.build(candidates, np.array([self.root], np.int32))
        check_live_tree(
            self.models.function,
            policy,
            tree,
            draft_len=len(draft_logits),
            root=self.root,
            budget=self.budget,
            vocab_size=self.models.vocab_size,
            position=self.text.context_len,
        )
        return tree.without_batch().map(self.text.place)

    def _uniforms(self, count: int) -> Array:
        """Return the draws of the next `count` text positions, which depend on the seed and the position alone."""
        missing = max(count - len(self.drawn), 0)
        self.drawn = np.concatenate([self.drawn, self.random.random(missing)])
        return self.text.place(self.drawn[:count])


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
