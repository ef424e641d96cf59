"""The decoding loop: prefill, then draft, build, verify, accept, commit until the text is long enough."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import Checker
from ddtree_cupy.containers import AcceptResult, DraftTree
from ddtree_cupy.decode.models import PREFILL_NODES, Models, prompt_tokens
from ddtree_cupy.decode.protocols import Drafter, Target
from ddtree_cupy.errors import ArgumentError, DTypeError
from ddtree_cupy.tree_accept import accept, commit_kv, greedy_targets, sample_targets
from ddtree_cupy.tree_build import build_tree

__all__ = ["Generation", "Round", "generate", "generate_rounds"]

Array = Any


@dataclass(frozen=True, eq=False)
class Round:
    """One target pass.

    Attributes
    ----------
    token_ids : tuple of int
        The tokens it added to the text: accepted drafts, then the bonus token; cut at a stop token and at
        `max_new_tokens`.
    num_drafted : int
        How many of `token_ids` were drafted (the rest, at most one, is the bonus).
    num_accepted : int
        Draft tokens the target accepted, before any cut.
    tree : DraftTree
        The tree it verified.
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


@dataclass(frozen=True, eq=False)
class Generation:
    """A finished text and how it came about.

    Attributes
    ----------
    token_ids : int32 array, shape (n,)
        The new tokens, without the prompt; a stop token, if one came, is the last.
    rounds : tuple of Round
        One a target pass; prefill passes are not counted.
    """

    token_ids: npt.NDArray[np.int32]
    rounds: tuple[Round, ...]

    @classmethod
    def from_rounds(cls, rounds: Iterable[Round]) -> Self:
        """Run rounds to their end and collect them.

        Parameters
        ----------
        rounds : iterable of Round
            Say, from `generate_rounds`.
        """
        finished = tuple(rounds)
        return cls(np.array([token for r in finished for token in r.token_ids], np.int32), finished)

    @property
    def target_passes(self) -> int:
        """Target passes after the prefill."""
        return len(self.rounds)

    @property
    def tokens_per_pass(self) -> float:
        """Mean tokens a target pass added to the text."""
        return len(self.token_ids) / max(1, len(self.rounds))

    @property
    def seconds(self) -> float:
        """Host time of all rounds, without the prefill."""
        parts = ("draft_seconds", "build_seconds", "verify_seconds", "commit_seconds")
        return float(sum(getattr(r, part) for r in self.rounds for part in parts))


def generate(
    target: Target,
    drafter: Drafter | None,
    prompt_ids: npt.ArrayLike,
    *,
    budget: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    stop_token_ids: Collection[int] = (),
    max_children: int | Sequence[int] | None = None,
    spine: int = 0,
) -> Generation:
    """Continue a prompt by speculative decoding with a draft tree; the text is the target's own.

    Parameters
    ----------
    target, drafter : Target, Drafter
        `drafter` may be None when `budget` is 0. What they return is checked before it is used.
    prompt_ids : integer array_like, shape (n,)
        At least one token. The last one becomes the first root.
    budget : int
        Nodes a tree besides the root. 0 is plain autoregressive decoding; what vocabulary and draft length cannot
        fill costs nothing.
    max_new_tokens : int
        Never exceeded. The target is asked for caches of this length at the start.
    temperature : float
        0 takes the target's most likely token; above 0 it samples.
    seed : int
        For the uniform draws, one a text position, shared by all nodes at that position: the sampled text does
        not depend on the budget.
    stop_token_ids : collection of int
        The text ends with the first of these, which is kept. Each in 0 .. V - 1.
    max_children, spine
        As in `build_tree`; max_children=1 with budget = draft length is the flat chain.

    Returns
    -------
    Generation

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        The message names the argument, what it is and what was expected. So it does where a model answers in another
        shape, dtype or array library than its protocol says, or the target's logits after the text name no token.

    Notes
    -----
    A row of draft logits that holds NaN or +inf ends the tree above it and sets bit 0 of the `status` of
    `Round.tree`, on every backend; the text is the target's own all the same.
    At temperature 0 the text equals autoregressive decoding token for token as far as the target's pass over many
    nodes gives the same argmax as its pass over one; with float64 arithmetic that is all the time.

    Examples
    --------
    >>> from ddtree_cupy.decode.tiny import TinyDrafter, TinyTarget
    >>> target, drafter = TinyTarget.load(), TinyDrafter.load()
    >>> prompt = np.frombuffer(b"def __init__(self", np.uint8)
    >>> plain = generate(target, None, prompt, budget=0, max_new_tokens=24)
    >>> tree = generate(target, drafter, prompt, budget=32, max_new_tokens=24)
    >>> plain.token_ids.tolist() == tree.token_ids.tolist(), tree.target_passes < plain.target_passes
    (True, True)
    """
    return Generation.from_rounds(
        generate_rounds(
            target,
            drafter,
            prompt_ids,
            budget=budget,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            stop_token_ids=stop_token_ids,
            max_children=max_children,
            spine=spine,
        )
    )


def generate_rounds(
    target: Target,
    drafter: Drafter | None,
    prompt_ids: npt.ArrayLike,
    *,
    budget: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    stop_token_ids: Collection[int] = (),
    max_children: int | Sequence[int] | None = None,
    spine: int = 0,
) -> Iterator[Round]:
    """Yield the rounds of `generate` one by one, for streaming.

    Parameters
    ----------
    target, drafter, prompt_ids, budget, max_new_tokens, temperature, seed, stop_token_ids, max_children, spine
        As in `generate`; checked before the first round.

    Yields
    ------
    Round
    """
    check = Checker("generate")
    models = Models("generate", target, drafter)
    prompt = prompt_tokens("generate", "prompt_ids", prompt_ids, models.vocab_size)
    budget = check.integer("budget", budget, low=0)
    max_new_tokens = check.integer("max_new_tokens", max_new_tokens, low=0)
    temperature = check.real("temperature", temperature)
    if temperature < 0:
        raise ArgumentError(f"generate: `temperature` is {temperature}, expected 0 (greedy) or more")
    if drafter is None and budget > 0:
        raise ArgumentError(f"generate: `drafter` is None and `budget` {budget}, expected a drafter or budget 0")
    seed = check.integer("seed", seed, low=0)
    is_many = isinstance(stop_token_ids, Collection) and getattr(stop_token_ids, "ndim", 1) > 0
    if not is_many or isinstance(stop_token_ids, str):
        raise DTypeError(f"generate: `stop_token_ids` is {stop_token_ids!r}, expected a collection of token ids")
    last = models.vocab_size - 1
    stop = frozenset(check.integer("stop_token_ids", token, low=0, high=last) for token in stop_token_ids)
    budget = models.most_nodes("budget", budget, max(max_new_tokens - 1, 0), max_children)
    loop = _Loop(models, budget, max_new_tokens, temperature, seed, stop)
    return loop.run(prompt, {"max_children": max_children, "spine": spine})


class _Loop:
    """The state of one text: the caches, the drafter's state, the root, and how many tokens are out."""

    def __init__(
        self,
        models: Models,
        budget: int,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        stop_token_ids: frozenset[int],
    ) -> None:
        self.models, self.drafter, self.budget = models, models.drafter, budget
        self.max_new_tokens, self.temperature = max_new_tokens, temperature
        self.stop_token_ids = stop_token_ids
        self.random, self.drawn = np.random.default_rng(seed), np.zeros(0)
        self.num_emitted = 0
        self.drafter_state = self.drafter.start() if self.drafter is not None else None

    def run(self, prompt: npt.NDArray[np.int32], tree_options: dict[str, Any]) -> Iterator[Round]:
        """Prefill all of the prompt but its last token, then yield rounds until the text is done."""
        max_nodes = max(self.budget + 1, min(PREFILL_NODES, prompt.size))
        asking = "`prompt_ids`, `max_new_tokens` and `budget`"
        self.kv = self.models.allocate(asking, prompt.size + self.max_new_tokens, max_nodes)
        self.place = _placer(self.kv[0].ckv)
        for start in range(0, prompt.size - 1, PREFILL_NODES):
            self._prefill(prompt[start : min(start + PREFILL_NODES, prompt.size - 1)])
        self.root = int(prompt[-1])
        while self.num_emitted < self.max_new_tokens:
            finished_round = self._round(tree_options)
            yield finished_round
            if self.stop_token_ids.intersection(finished_round.token_ids):
                return

    def _prefill(self, token_ids: npt.NDArray[np.int32]) -> None:
        count = token_ids.size
        chain = DraftTree.from_parents(token_ids, np.arange(-1, count - 1))
        _, features = self.models.forward(chain.map(self.place), self.kv)
        whole = AcceptResult(np.arange(count, dtype=np.int32), np.array(count - 1, np.int32), np.array(-1, np.int32))
        self._commit(whole.map(self.place), features)

    def _commit(self, result: AcceptResult, features: Array) -> None:
        self.kv = commit_kv(self.kv, result)
        if self.drafter is not None:
            path = result.accepted[: int(result.num_accepted) + 1]
            self.drafter_state = self.drafter.observe(self.drafter_state, features[path])

    def _round(self, tree_options: dict[str, Any]) -> Round:
        remaining = self.max_new_tokens - self.num_emitted
        context_len = int(self.kv[0].context_lens)

        started = time.perf_counter()
        if self.drafter is None or self.budget == 0 or remaining == 1:
            draft_logits = self.place(np.zeros((0, self.models.vocab_size), np.float32))
        else:
            draft_logits = self.models.propose(self.drafter_state, self.root)
        drafted = time.perf_counter()
        limits = {"max_depth": remaining - 1, "check_finite": False, **tree_options}
        tree = build_tree(draft_logits, budget=self.budget, root_token_ids=self.root, **limits)
        tree = _without_padding(tree)
        built = time.perf_counter()
        target_logits, features = self.models.forward(tree, self.kv)
        verified = time.perf_counter()
        options: dict[str, Any] = {"num_nodes": tree.num_nodes, "on_bad_row": "mark"}  # only the path's rows matter
        if self.temperature == 0:
            targets = greedy_targets(target_logits, **options)
        else:
            uniforms = self._uniforms(min(self.models.draft_len + 1, remaining))[np.maximum(tree.depths, 0)]
            targets = sample_targets(target_logits, uniforms, temperature=self.temperature, **options)
        result = accept(tree, targets)
        num_accepted, bonus_token = int(result.num_accepted), int(result.bonus_token)
        if bonus_token < 0:
            raise self.models.no_token(context_len + num_accepted + 1)
        self._commit(result, features)
        self.root = bonus_token
        token_ids = [*tree.token_ids[result.accepted[1 : num_accepted + 1]].tolist(), self.root]
        token_ids = self._cut(token_ids)
        self.num_emitted += len(token_ids)
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

    def _uniforms(self, count: int) -> Array:
        """Return the draws of the next `count` text positions, which depend on the seed and the position alone."""
        missing = max(count - len(self.drawn), 0)
        self.drawn = np.concatenate([self.drawn, self.random.random(missing)])
        return self.place(self.drawn[:count])

    def _cut(self, token_ids: list[int]) -> list[int]:
        """End the round's tokens at the first stop token; the tree's depth limit keeps them inside the maximum."""
        for index, token in enumerate(token_ids):
            if token in self.stop_token_ids:
                return token_ids[: index + 1]
        return token_ids


def _placer(like: Array) -> Callable[[Array], Array]:
    """Return the function that moves a NumPy array to the library of `like`."""
    if isinstance(like, np.ndarray):
        return lambda array: array
    import cupy

    to_device: Callable[[Array], Array] = cupy.asarray
    return to_device


def _without_padding(tree: DraftTree) -> DraftTree:
    """Drop padding nodes, so that a target pass costs what the tree holds."""
    count = int(tree.num_nodes)
    words = (count + 31) // 32
    return DraftTree(
        token_ids=tree.token_ids[:count],
        parents=tree.parents[:count],
        depths=tree.depths[:count],
        path_scores=None if tree.path_scores is None else tree.path_scores[:count],
        num_nodes=tree.num_nodes,
        status=tree.status,
        visibility_bits=tree.visibility_bits[:count, :words].copy(),  # contiguous again
        first_child=tree.first_child[:count],
        next_sibling=tree.next_sibling[:count],
    )
