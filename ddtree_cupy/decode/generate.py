"""Speculative decoding of one prompt: `generate`, and `generate_rounds` for streaming."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import Checker
from ddtree_cupy.decode.loop import Loop, Round, check_temperature
from ddtree_cupy.decode.models import Models, prompt_tokens
from ddtree_cupy.decode.policies import Policy, check_policy
from ddtree_cupy.decode.protocols import Drafter, StatefulDrafter, StatefulTarget, Target
from ddtree_cupy.errors import ArgumentError, DTypeError

__all__ = ["Generation", "generate", "generate_rounds"]

POLICY_BUDGET = 1024  # the most nodes besides the root of a policy's trees, unless `budget` says otherwise


@dataclass(frozen=True, eq=False)
class Generation:
    """A finished text and the rounds that made it.

    Attributes
    ----------
    token_ids : int32 array, shape (n,)
        The new tokens, without the prompt. If a stop token came, it is the last one.
    rounds : tuple of Round
        One per target pass; prefill passes are not counted.
    """

    token_ids: npt.NDArray[np.int32]
    rounds: tuple[Round, ...]

    @classmethod
    def from_rounds(cls, rounds: Iterable[Round]) -> Self:
        """Run rounds to their end and collect them.

        Parameters
        ----------
        rounds : iterable of Round
            For example those of `generate_rounds`.
        """
        finished = tuple(rounds)
        return cls(np.array([token for r in finished for token in r.token_ids], np.int32), finished)

    @property
    def target_passes(self) -> int:
        """Target passes after the prefill."""
        return len(self.rounds)

    @property
    def tokens_per_pass(self) -> float:
        """Mean number of tokens that a target pass added to the text."""
        return len(self.token_ids) / max(1, len(self.rounds))

    @property
    def seconds(self) -> float:
        """Host time of all rounds, without the prefill."""
        parts = ("draft_seconds", "build_seconds", "verify_seconds", "commit_seconds")
        return float(sum(getattr(r, part) for r in self.rounds for part in parts))


def generate(
    target: Target | StatefulTarget,
    drafter: Drafter | StatefulDrafter | None,
    prompt_ids: npt.ArrayLike,
    *,
    budget: int | None = None,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    stop_token_ids: Collection[int] = (),
    max_children: int | Sequence[int] | None = None,
    spine: int = 0,
    policy: Policy | None = None,
) -> Generation:
    """Continue a prompt by speculative decoding with a draft tree; the text is the target's own.

    Parameters
    ----------
    target, drafter : Target or StatefulTarget, Drafter or StatefulDrafter
        `drafter` may be None when `budget` is 0. A `Drafter` needs the features of a `Target`; a `StatefulDrafter` goes
        with both. The results of both are checked before they are used.
    prompt_ids : integer array_like, shape (n,)
        At least one token. The last one becomes the first root.
    budget : int
        Nodes of each tree besides the root. 0 is plain autoregressive decoding. Budget that vocabulary and draft
        length cannot fill takes no time and no memory. With a `policy` it is a limit, by default 1,024: the most nodes
        besides the root of its trees, and the most ranks of a draft row that it is shown.
    max_new_tokens : int
        Never exceeded. The target is asked for caches of this length at the start.
    temperature : float
        0 takes the target's most likely token; above 0 it samples.
    seed : int
        For the uniform draws. All nodes at one text position share one draw, so the sampled text does not depend on
        the budget.
    stop_token_ids : collection of int
        The text ends with the first of these, which is kept. Each is in 0 .. V - 1.
    max_children, spine
        As in `build_tree`; max_children=1 with budget = draft length is the flat chain. Not with a `policy`.
    policy : Policy, optional
        Builds the tree of every round, such as one of `explore`, or any object with `name` and `build(candidates,
        root_token_ids)`. It is shown the best ranks of float32 logits, as in a replay of recorded traces, and the
        rounds are those of the replay, until the end of the text limits the depth.

    Returns
    -------
    Generation

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        An argument does not fit; a model returns another shape, dtype or array library than its protocol says; or the
        target's logits after the text give no token (NaN, or nothing above -inf).

    Notes
    -----
    A row of draft logits that holds NaN or +inf ends the tree above it and sets bit 0 of the `status` of
    `Round.tree`, on every backend; the text is still the target's own.
    At temperature 0 the text equals autoregressive decoding token for token as long as the target's pass over many
    nodes gives the same argmax as its pass over one node. In float64 arithmetic this held for every tested text.

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
            policy=policy,
        )
    )


def generate_rounds(
    target: Target | StatefulTarget,
    drafter: Drafter | StatefulDrafter | None,
    prompt_ids: npt.ArrayLike,
    *,
    budget: int | None = None,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    stop_token_ids: Collection[int] = (),
    max_children: int | Sequence[int] | None = None,
    spine: int = 0,
    policy: Policy | None = None,
) -> Iterator[Round]:
    """Yield the rounds of `generate` one by one, for streaming.

    Parameters
    ----------
    target, drafter, prompt_ids, budget, max_new_tokens, temperature, seed, stop_token_ids, max_children, spine, policy
        As in `generate`. They are checked before the first round.

    Yields
    ------
    Round
    """
    check = Checker("generate")
    models = Models("generate", target, drafter, needs_drafter=False)
    prompt = prompt_tokens("generate", "prompt_ids", prompt_ids, models.vocab_size)
    budget = _checked_budget(check, budget, policy, max_children, spine)
    max_new_tokens = check.integer("max_new_tokens", max_new_tokens, low=0)
    temperature = check_temperature(check, temperature)
    if drafter is None and budget > 0:
        what = f"`budget` {budget}" if policy is None else f"`policy` {policy.name!r}"
        raise ArgumentError(f"generate: `drafter` is None and {what}, expected a drafter or budget 0")
    seed = check.integer("seed", seed, low=0)
    is_many = isinstance(stop_token_ids, Collection) and getattr(stop_token_ids, "ndim", 1) > 0
    if not is_many or isinstance(stop_token_ids, str):
        raise DTypeError(f"generate: `stop_token_ids` is {stop_token_ids!r}, expected a collection of token ids")
    last = models.vocab_size - 1
    stop = frozenset(check.integer("stop_token_ids", token, low=0, high=last) for token in stop_token_ids)
    budget = models.most_nodes("budget", budget, max(max_new_tokens - 1, 0), max_children)

    def rounds() -> Iterator[Round]:
        loop = Loop(
            models,
            prompt,
            asking="`prompt_ids`, `max_new_tokens` and `budget`",
            max_new_tokens=max_new_tokens,
            budget=budget,
            temperature=temperature,
            seed=seed,
            stop_token_ids=stop,
        )
        while loop.remaining:
            yield loop.round(policy, max_children=max_children, spine=spine)

    return rounds()


def _checked_budget(check: Checker, budget: int | None, policy: Policy | None, max_children: Any, spine: int) -> int:
    """Return the budget, or that of a policy; refuse what a policy decides by itself."""
    if policy is not None:
        hint = "; ddtree_cupy.explore.named_policy(policy) finds one by its name" if isinstance(policy, str) else ""
        check_policy("generate", "policy", policy, hint)
        given = [
            name for name, is_given in (("max_children", max_children is not None), ("spine", spine != 0)) if is_given
        ]
        if given:
            raise ArgumentError(
                f"generate: `{given[0]}` and `policy` are given, expected one of them: a policy decides alone about "
                f"its trees"
            )
        budget = POLICY_BUDGET if budget is None else budget
    if budget is None:
        raise ArgumentError("generate: neither `budget` nor `policy` is given, expected one of them")
    return check.integer("budget", budget, low=0)
