"""Replay a tree policy over traces: exactly the rounds that live decoding would have had."""

from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import Checker
from ddtree_cupy.containers import AcceptResult, Candidates, DraftTree
from ddtree_cupy.decode.policies import Policy, check_trees
from ddtree_cupy.errors import ArgumentError
from ddtree_cupy.explore.names import policy_of
from ddtree_cupy.explore.traces import Traces
from ddtree_cupy.tree_accept import accept

__all__ = ["Outcomes", "Replay", "replay", "score"]

_BATCH = 128  # positions in one call of the policy
_MOST_ROUNDS = 10_000_000  # of a replay; all of them are held at once
_NOT_RECORDED = np.iinfo(np.int32).max  # id shown to policies for ranks cut off by the recorder, its logit -inf


@dataclass(frozen=True, eq=False)
class _Rounds:
    policy: str
    num_accepted: npt.NDArray[np.int32]
    num_nodes: npt.NDArray[np.int32]
    hit_ranks: npt.NDArray[np.int32]
    expected_tokens: npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Outcomes(_Rounds):
    """The results of one round of a policy at every position of some traces.

    Attributes
    ----------
    policy : str
    num_accepted : int32 array, shape (P,)
        Draft tokens accepted; the round commits one token more.
    num_nodes : int32 array, shape (P,)
        Nodes of the tree, root included.
    hit_ranks : int32 array, shape (P, L)
        Rank, in the drafter's row, of the accepted token at each depth; -1 below the accepted path.
    expected_tokens : float64 array, shape (P,)
        E of `choose_budget` for the whole tree, the expectation under the draft marginals. NaN without path scores.
    """

    def rounds(self, traces: Traces, prompt: int) -> npt.NDArray[np.int64]:
        """Return the positions at which rounds start when the prompt is decoded with this policy.

        Parameters
        ----------
        traces : Traces
            The traces that were scored.
        prompt : int
        """
        positions = traces.prompt(prompt)
        steps = self.num_accepted[positions.start : positions.stop].tolist()
        starts, at = [], 0
        while at < len(steps):
            starts.append(positions.start + at)
            at += 1 + steps[at]
        return np.array(starts, np.int64)


@dataclass(frozen=True, eq=False)
class Replay(_Rounds):
    """The rounds of one policy, in order.

    R rounds. Every round counts in full, also one whose tokens extend beyond the last recorded position.

    Attributes
    ----------
    policy, num_accepted, num_nodes, hit_ranks, expected_tokens
        As in `Outcomes`, with R in place of P.
    draws : int32 array, shape (R,)
        The decoded text to which the round belongs, from 0: the number of the prompt, unless prompts were resampled.
    prompts : int32 array, shape (R,)
        The prompt of that text; resampling decodes some prompts more than once.
    positions : int64 array, shape (R,)
        The position in the traces at which the round starts.
    """

    draws: npt.NDArray[np.int32]
    prompts: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int64]

    @property
    def num_rounds(self) -> int:
        """R, the number of target passes."""
        return len(self.positions)

    @property
    def num_tokens(self) -> int:
        """All committed tokens: accepted drafts and one more per round."""
        return int(self.num_accepted.sum()) + self.num_rounds

    @property
    def tokens_per_pass(self) -> float:
        """Mean number of tokens that a target pass commits."""
        return self.num_tokens / self.num_rounds

    @property
    def acceptance_histogram(self) -> npt.NDArray[np.int64]:
        """Number of rounds that accepted exactly 0, 1, .. L draft tokens, shape (L + 1,)."""
        return np.bincount(self.num_accepted, minlength=self.hit_ranks.shape[1] + 1)

    @property
    def depth_rates(self) -> npt.NDArray[np.float64]:
        """Share of the rounds that reached each depth and accepted there, shape (L,); NaN where no round got there."""
        accepted = (self.hit_ranks >= 0).sum(0)
        arrived = np.concatenate([[self.num_rounds], accepted])[: len(accepted)]
        rates = np.full(len(accepted), np.nan)
        np.divide(accepted, arrived, out=rates, where=arrived > 0)
        return rates

    @property
    def rank_histogram(self) -> npt.NDArray[np.int64]:
        """Accepted tokens by depth and rank in the drafter's row, shape (L, highest rank + 1)."""
        width = int(self.hit_ranks.max(initial=0)) + 1
        rows = [np.bincount(ranks[ranks >= 0], minlength=width) for ranks in self.hit_ranks.T]
        return np.array(rows, np.int64).reshape(-1, width)

    def __repr__(self) -> str:
        return f"Replay({self.policy!r}, rounds={self.num_rounds}, tokens_per_pass={self.tokens_per_pass:.3f})"


def score(traces: Traces, policy: Policy | str) -> Outcomes:
    """Run one round of a policy at every position.

    Parameters
    ----------
    traces : Traces
    policy : Policy or str
        A policy of this package, the name of one (see `named_policy`), or any object with `name` and
        `build(candidates, root_token_ids)`.

    Raises
    ------
    ArgumentError
        There are no positions; a tree is inactive or has an accepted token that the recorded row of the drafter lacks;
        or a tree, or the `widest` tree from which the policy cut it, uses the last recorded rank of a row or one
        beyond: then unrecorded ranks might belong into the tree. Record with a larger `width`, or set a smaller budget.
    """
    Checker("replay").kind("traces", traces, Traces)
    policy = policy_of("replay", "policy", policy)
    if traces.num_positions == 0:
        raise ArgumentError("replay: `traces` has no positions")
    parts = [
        _score_batch(traces, policy, slice(start, start + _BATCH)) for start in range(0, traces.num_positions, _BATCH)
    ]
    return Outcomes(policy.name, *(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def verified_trees(traces: Traces, policy: Policy, rows: slice) -> tuple[Candidates, DraftTree, AcceptResult]:
    """Return, for some positions, the candidates as a policy sees them, its trees, and what the target accepts of them.

    Parameters
    ----------
    traces : Traces
    policy : Policy
    rows : slice
        Of positions, both ends given.

    Raises
    ------
    ArgumentError
        As in `score`.
    """
    candidates = traces.candidates.map(lambda array: array[rows])
    is_recorded = np.arange(traces.width) < traces.row_widths[rows][..., None]
    shown = replace(candidates, token_ids=np.where(is_recorded, candidates.token_ids, _NOT_RECORDED).astype(np.int32))
    tree = policy.build(shown, traces.root_token_ids[rows])
    _check_tree(policy, traces, tree, rows)
    if hasattr(policy, "widest"):  # the nodes that were cut away decided, too
        _check_tree(policy, traces, policy.widest(shown, traces.root_token_ids[rows]), rows)
    # off the accepted path the target's token is unknown, and `accept` never reaches it
    targets = np.take_along_axis(traces.continuations[rows], np.maximum(tree.depths, 0), axis=1)
    return shown, tree, accept(tree, targets)


def _score_batch(
    traces: Traces, policy: Policy, rows: slice
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float64]]:
    _, tree, result = verified_trees(traces, policy, rows)
    accepted = result.num_accepted
    on_path = np.arange(traces.draft_len) < accepted[:, None]
    hits = traces.candidates.token_ids[rows] == traces.continuations[rows, : traces.draft_len, None]
    unknown = (on_path & ~hits.any(-1)).any(1)
    if unknown.any():
        raise ArgumentError(
            f"replay: policy {policy.name!r} has an accepted token at position "
            f"{rows.start + int(np.flatnonzero(unknown)[0])} that is not among the ranks recorded of the "
            f"drafter's row, expected tokens of `candidates`"
        )
    hit_ranks = np.where(on_path, hits.argmax(-1) if traces.width else -1, -1).astype(np.int32)
    scores = tree.path_scores
    expected = np.full(len(accepted), np.nan) if scores is None else np.exp(scores).sum(-1)
    return accepted, tree.num_nodes, hit_ranks, expected


def _check_tree(policy: Policy, traces: Traces, tree: DraftTree, rows: slice) -> None:
    """Raise unless the tree has one active request per position, fits the draft and does not use the last ranks."""
    row_widths = traces.row_widths[rows]
    batch = len(row_widths)
    check_trees("replay", policy, tree, batch=batch, draft_len=traces.draft_len, position=rows.start)
    last = np.full((batch, 1 + traces.draft_len), -1, np.int32)  # by depth; the root's is none
    some = np.nonzero((row_widths > 0) & (row_widths < traces.vocab_size))
    last[some[0], some[1] + 1] = traces.candidates.token_ids[rows][(*some, row_widths[some] - 1)]
    used = tree.token_ids == np.take_along_axis(last, np.maximum(tree.depths, 0), axis=1)
    used = (tree.depths > 0) & (used | (tree.token_ids == _NOT_RECORDED))
    if used.any():
        position, node = (int(found[0]) for found in np.nonzero(used))
        depth = int(tree.depths[position, node])
        width = int(row_widths[position, depth - 1])
        raise ArgumentError(
            f"replay: policy {policy.name!r} uses rank {width - 1} or more at depth {depth} of position "
            f"{rows.start + position}, where {width} ranks were recorded, so its tree may lack better ranks; record "
            f"with `width` above {width}, or shrink the tree"
        )


def replay(traces: Traces, policy: Policy | str, *, num_rounds: int | None = None, seed: int = 0) -> Replay:
    """Decode every prompt of the traces with a policy, without running a model.

    Parameters
    ----------
    traces : Traces
    policy : Policy or str
        As in `score`.
    num_rounds : int, optional
        Draw prompts with replacement until there are this many rounds, at most ten million; default: each prompt once.
    seed : int
        Seed of the drawing. The same seed draws the same prompts for every policy.

    Notes
    -----
    A round that starts at a recorded position equals that of `decode.generate(policy=policy)` at that position, under
    two conditions: other shapes of the target's pass do not change its tokens, and the policy reads no more of the
    drafter's rows than was recorded. The end of the text does not limit the trees, as it does in the last rounds of
    `generate`. The tree of each position is built once.

    Examples
    --------
    >>> traces = Traces.load()
    >>> replay(traces, "chain 15").tokens_per_pass < replay(traces, "best-first 64").tokens_per_pass
    True
    """
    outcomes = score(traces, policy)
    check = Checker("replay")
    starts = [outcomes.rounds(traces, prompt) for prompt in range(traces.num_prompts)]
    seed = check.integer("seed", seed, low=0)
    drawn = list(range(traces.num_prompts))
    if num_rounds is not None:
        num_rounds = check.integer("num_rounds", num_rounds, low=1)
        check.integer("num_rounds", num_rounds, low=1, high=_MOST_ROUNDS)
        rng, drawn, count = np.random.default_rng(seed), [], 0
        while count < num_rounds:
            drawn.append(int(rng.integers(traces.num_prompts)))
            count += len(starts[drawn[-1]])
    positions = np.concatenate([starts[prompt] for prompt in drawn])[:num_rounds]
    draws = np.repeat(np.arange(len(drawn), dtype=np.int32), [len(starts[prompt]) for prompt in drawn])[:num_rounds]
    chosen = {field.name: getattr(outcomes, field.name)[positions] for field in fields(outcomes)[1:]}
    return Replay(outcomes.policy, **chosen, draws=draws, prompts=np.array(drawn, np.int32)[draws], positions=positions)
