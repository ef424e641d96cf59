"""Sweeps: many policies over the same traces, on any executor."""

from collections.abc import Iterable
from concurrent.futures import Executor
from typing import Any

from ddtree_cupy._check import Checker
from ddtree_cupy._progress import with_progress
from ddtree_cupy.decode import Policy
from ddtree_cupy.errors import DTypeError
from ddtree_cupy.explore.names import policy_of
from ddtree_cupy.explore.replay import Replay, replay
from ddtree_cupy.explore.traces import Traces

__all__ = ["sweep"]


def sweep(
    traces: Traces,
    policies: Iterable[Policy | str],
    *,
    num_rounds: int | None = None,
    seed: int = 0,
    executor: Executor | None = None,
    progress: bool = True,
) -> list[Replay]:
    """Replay several policies, one task per policy.

    Parameters
    ----------
    traces : Traces
    policies : iterable of Policy or str
        As in `score`.
    num_rounds, seed
        As in `replay`. The same prompts are drawn for every policy.
    executor : concurrent.futures.Executor, optional
        Runs the tasks: ``ProcessPoolExecutor()`` on a laptop, ``dask.distributed.Client(...).get_executor()`` or
        ``mpi4py.futures.MPIPoolExecutor()`` on a cluster. Default: this process. The results are the same bit for bit.
    progress : bool
        Show a bar on a terminal, when tqdm is installed.

    Returns
    -------
    list of Replay
        In the order of `policies`.

    Examples
    --------
    >>> results = sweep(Traces.load().select([0, 1]), ["chain 15", "best-first 16"], num_rounds=100)
    >>> [(result.policy, result.num_rounds) for result in results]
    [('chain 15', 100), ('best-first 16', 100)]
    """
    check = Checker("sweep")
    check.kind("traces", traces, Traces)
    given = check.items("policies", policies)
    todo = [policy_of("sweep", f"policies[{at}]", policy) for at, policy in enumerate(given)]
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise DTypeError(f"sweep: `executor` is {type(executor).__name__}, expected one with `submit`, or None")
    options: dict[str, Any] = {"num_rounds": num_rounds, "seed": seed}
    if executor is None:
        finished = (replay(traces, policy, **options) for policy in todo)
        return list(with_progress(finished, len(todo), "sweep", "policy", progress))
    futures = [executor.submit(replay, traces, policy, **options) for policy in todo]
    try:
        results = (future.result() for future in futures)
        return list(with_progress(results, len(todo), "sweep", "policy", progress))
    finally:
        for future in futures:  # after an error or an interrupt, tasks that have not begun are cancelled
            future.cancel()
