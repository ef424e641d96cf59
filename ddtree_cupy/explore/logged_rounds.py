"""Rounds that other systems have logged: how many tokens each of their passes added, beside those of a replay."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ddtree_cupy._check import Checker
from ddtree_cupy._files import parse_json
from ddtree_cupy.errors import ArgumentError, DTypeError, ShapeError, WeightsError

__all__ = ["LoggedRounds", "read_ddtreeplus", "read_jetspec", "read_vllm_metrics"]

_MOST = 2**31 - 1


@dataclass(frozen=True, eq=False)
class LoggedRounds:
    """The rounds of one method in the log of another system.

    R rounds, in the order of the log.

    Attributes
    ----------
    source : str
    num_accepted : int32 array, shape (R,)
        Draft tokens accepted; the round commits one token more.
    prompts : int32 array, shape (R,)
        The number that the log gives to the prompt, or its place in the log.
    tree_sizes : int32 array, shape (R,)
        Drafted nodes as the source counts them; -1 where it does not say.
    round_us : float64 array, shape (R,)
        Time of the round; NaN where the log does not say.
    """

    source: str
    num_accepted: npt.NDArray[np.int32]
    prompts: npt.NDArray[np.int32]
    tree_sizes: npt.NDArray[np.int32]
    round_us: npt.NDArray[np.float64]

    @property
    def num_rounds(self) -> int:
        """R, the number of target passes."""
        return len(self.num_accepted)

    @property
    def num_tokens(self) -> int:
        """All committed tokens: accepted drafts and one more per round."""
        return int(self.num_accepted.sum()) + self.num_rounds

    @property
    def tokens_per_pass(self) -> float:
        """Mean number of tokens that a target pass commits; NaN without rounds."""
        return self.num_tokens / self.num_rounds if self.num_rounds else float("nan")

    @property
    def acceptance_histogram(self) -> npt.NDArray[np.int64]:
        """Number of rounds that accepted exactly 0, 1, .. draft tokens."""
        return np.bincount(self.num_accepted)

    def __repr__(self) -> str:
        return f"LoggedRounds({self.source!r}, rounds={self.num_rounds}, tokens_per_pass={self.tokens_per_pass:.3f})"


def _rounds(source: str, rounds: Sequence[tuple[int, int, int, float]]) -> LoggedRounds:
    """Return rounds of (prompt, committed tokens, size of the tree, microseconds)."""
    prompts, lengths, sizes, times = zip(*rounds, strict=True) if rounds else ((), (), (), ())
    counts = (np.array(values, np.int32) for values in (lengths, prompts, sizes))
    committed, of_prompt, of_tree = counts
    return LoggedRounds(source, committed - np.int32(1), of_prompt, of_tree, np.array(times, np.float64))


class _Entry:
    """One JSON object of a log, with messages that say where it stands."""

    def __init__(self, function: str, where: str, value: Any) -> None:
        self.check, self.where = Checker(function), where
        if not isinstance(value, Mapping):
            raise DTypeError(f"{function}: `{where}` is {type(value).__name__}, expected an object with named fields")
        self.value = value

    def __contains__(self, name: str) -> bool:
        return self.value.get(name) is not None

    def error(self, name: str, text: str, kind: type[Exception] = ArgumentError) -> Exception:
        """Return the error to raise about one field."""
        return kind(f"{self.check.function}: `{name}` of {self.where} {text}")

    def field(self, name: str) -> Any:
        """Return a field, which must be there."""
        if name not in self:
            has = ", ".join(map(str, self.value)) or "nothing"
            raise self.error(name, f"is missing; the object has {has}")
        return self.value[name]

    def integer(self, name: str, low: int = 0) -> int:
        """Return an integer of at least `low`."""
        return self.check.integer(f"{name}` of `{self.where}", self.field(name), low=low, high=_MOST)

    def integers(self, name: str, low: int = 0, length: int | None = None) -> list[int]:
        """Return a list of integers of at least `low`, of the length given."""
        values = self.field(name)
        if not isinstance(values, list | tuple):
            raise self.error(name, f"is {type(values).__name__}, expected a list of integers", DTypeError)
        if length is not None and len(values) != length:
            raise self.error(name, f"has {len(values)} entries, expected {length}, one per round", ShapeError)
        for at, value in enumerate(values):
            self.check.integer(f"{name}[{at}]` of `{self.where}", value, low=low, high=_MOST)
        return list(values)


def _lines(function: str, path: str | Path) -> Iterator[_Entry]:
    """Yield the objects of a file of JSON lines."""
    with open(path, "rb") as stream:
        for number, raw in enumerate(stream, 1):
            if raw.strip():
                try:
                    value = parse_json(raw)
                except ValueError as error:
                    raise WeightsError(f"{function}: line {number} of {path} is not JSON ({error})") from error
                yield _Entry(function, f"line {number} of {path}", value)


def read_jetspec(path: str | Path) -> LoggedRounds:
    """Read an output file of JetSpec's benchmark: JSON lines, one prompt each.

    Parameters
    ----------
    path : str or path
        Each line has `accept_lengths` (trees) or `acceptance_lengths` (chains): committed tokens of each round, at
        least 1; and, if given, `rounds`, `tree_sizes` and `sample`, the number of the prompt (default: its line).

    Raises
    ------
    DTypeError, ShapeError, ArgumentError
        A field is missing, is something else, or contradicts another; the message names line and field.
    WeightsError
        A line is not JSON.

    Notes
    -----
    Source: bench/outputs of github.com/hao-ai-lab/JetSpec. The file has one time for a prompt, none for a round.

    Examples
    --------
    >>> read_jetspec("outputs/tree.jsonl")  # doctest: +SKIP
    LoggedRounds('JetSpec tree', rounds=604, tokens_per_pass=8.535)
    """
    rounds: list[tuple[int, int, int, float]] = []
    names = set()
    for number, entry in enumerate(_lines("read_jetspec", path)):
        name = "acceptance_lengths" if "acceptance_lengths" in entry else "accept_lengths"
        names.add(name)
        if len(names) > 1 or {"accept_lengths", "acceptance_lengths"} <= entry.value.keys():
            raise entry.error(name, "is beside rounds of the other kind, expected trees or chains alone in one file")
        lengths = entry.integers(name, low=1)
        if "rounds" in entry and entry.integer("rounds") != len(lengths):
            raise entry.error("rounds", f"is {entry.value['rounds']}, expected {len(lengths)}, the entries of `{name}`")
        sizes = entry.integers("tree_sizes", length=len(lengths)) if "tree_sizes" in entry else [-1] * len(lengths)
        sample = entry.integer("sample") if "sample" in entry else number
        rounds += [(sample, length, size, np.nan) for length, size in zip(lengths, sizes, strict=True)]
    return _rounds(f"JetSpec {'chain' if 'acceptance_lengths' in names else 'tree'}", rounds)


def read_ddtreeplus(path: str | Path) -> dict[tuple[str, str], LoggedRounds]:
    """Read the rounds of ddtreeplus: JSON lines, one round each.

    Parameters
    ----------
    path : str or path
        Each line has `sample_index`, `method_key`, `round_index`, `action_name`, `accepted_length` (committed tokens,
        at least 1) and, if given, `latency_ms`.

    Returns
    -------
    dict
        From (method_key, action_name), in the order of the file, to the rounds of that action.

    Raises
    ------
    DTypeError, ArgumentError
        A field is missing or is something else, or a round is there twice; the message names line and field.
    WeightsError
        A line is not JSON.

    Notes
    -----
    Source: runs of github.com/hxri/ddtreeplus.

    Examples
    --------
    >>> read_ddtreeplus("runs/collect.jsonl")["ddtree_tb128", "flat"]  # doctest: +SKIP
    LoggedRounds('ddtree_tb128, flat', rounds=4022, tokens_per_pass=8.662)
    """
    found: dict[tuple[str, str], list[tuple[int, int, int, float]]] = {}
    seen = set()
    for entry in _lines("read_ddtreeplus", path):
        method, action = entry.field("method_key"), entry.field("action_name")
        for name, value in (("method_key", method), ("action_name", action)):
            if not isinstance(value, str):
                raise entry.error(name, f"is {type(value).__name__}, expected a text", DTypeError)
        sample, number = entry.integer("sample_index"), entry.integer("round_index")
        if (method, sample, number) in seen:
            raise entry.error("round_index", f"is {number}, and that round of sample {sample} of {method} came before")
        seen.add((method, sample, number))
        time = entry.check.real(f"latency_ms` of `{entry.where}", entry.value.get("latency_ms", 0.0))
        time_us = 1000.0 * time if "latency_ms" in entry else np.nan
        found.setdefault((method, action), []).append((sample, entry.integer("accepted_length", low=1), -1, time_us))
    return {key: _rounds(", ".join(key), rounds) for key, rounds in found.items()}


def read_vllm_metrics(requests: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> LoggedRounds:
    """Read vLLM's metrics of speculative decoding per request, from its responses or from parts of them.

    Parameters
    ----------
    requests : mapping, or sequence of mapping
        Responses, their `metrics`, or `metrics.speculative_decoding`, as parsed from JSON: `acceptance_histogram`
        ("summary") and, if given, `per_step_accepted` and `per_step_drafted` ("detailed").

    Returns
    -------
    LoggedRounds
        `prompts` numbers the requests. Without `per_step_accepted` the order of the rounds of a request is not known;
        they rise by the tokens accepted.

    Raises
    ------
    DTypeError, ShapeError, ArgumentError
        A field is missing, is something else, or contradicts another; the message names request and field.

    Notes
    -----
    The server reports them with ``--per-request-spec-decode-metrics detailed``. Source: the page on per-request
    acceptance metrics of the vLLM documentation.

    Examples
    --------
    >>> read_vllm_metrics({"acceptance_histogram": [39, 1, 0, 3]})
    LoggedRounds('vLLM', rounds=43, tokens_per_pass=1.233)
    """
    function = "read_vllm_metrics"
    given = [requests] if isinstance(requests, Mapping) else Checker(function).items("requests", requests)
    rounds: list[tuple[int, int, int, float]] = []
    for number, value in enumerate(given):
        where = f"requests[{number}]"
        for part in ("metrics", "speculative_decoding"):
            if isinstance(value, Mapping) and part in value:
                value = value[part]
                where = f"{where}.{part}"
                if value is None:
                    raise ArgumentError(
                        f"{function}: `{where}` is null: the server reports it if it was started with "
                        f"`--per-request-spec-decode-metrics detailed`, for requests with n = 1"
                    )
        entry = _Entry(function, where, value)
        histogram = entry.integers("acceptance_histogram")
        accepted = np.repeat(np.arange(len(histogram)), histogram).tolist()
        drafted = [-1] * len(accepted)
        if "per_step_accepted" in entry:
            steps = entry.integers("per_step_accepted", length=len(accepted))
            if sorted(steps) != accepted:
                raise entry.error("per_step_accepted", "contradicts `acceptance_histogram`")
            accepted = steps
        if "per_step_drafted" in entry and "per_step_accepted" in entry:
            drafted = entry.integers("per_step_drafted", length=len(accepted))
            for at, (taken, size) in enumerate(zip(accepted, drafted, strict=True)):
                if taken > size:
                    raise entry.error(
                        f"per_step_accepted[{at}]", f"is {taken}, expected at most {size}, what was drafted"
                    )
        rounds += [(number, taken + 1, size, np.nan) for taken, size in zip(accepted, drafted, strict=True)]
    return _rounds("vLLM", rounds)
