"""Times on a GPU: of one call with a cold L2, of a call in a captured graph with a warm L2, and of the host."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

GRAPH_CALLS = 10
MOST_GRAPH_US = 20_000


@dataclass(frozen=True)
class Times:
    """Microseconds.

    Attributes
    ----------
    event_us, low_us, high_us : float
        Median, 20 % and 80 % of single calls between two events, L2 flushed before each; includes the launch gap.
    graph_us : float or None
        One of ten calls captured in a CUDA graph, L2 warm; None above 20 ms, where the launch gap does not matter.
    host_us : float
        Host time of one call, without waiting for the GPU.
    """

    event_us: float
    low_us: float
    high_us: float
    graph_us: float | None
    host_us: float


def measure(run: Callable[[], None], *, budget_seconds: float = 0.4) -> Times:
    """Warm up, then time `run` by all three ways, each within about `budget_seconds`."""
    import cupy

    run()
    cupy.cuda.runtime.deviceSynchronize()
    flush = cupy.empty(2 * _l2_bytes(), np.uint8)
    first = _event_us(run, flush)
    repeats = int(np.clip(budget_seconds * 1e6 / max(first, 50.0), 3, 200))
    samples = np.array([_event_us(run, flush) for _ in range(repeats)])
    low, middle, high = np.percentile(samples, [20, 50, 80])
    graph_us = _graph_us(run, float(middle), budget_seconds) if middle < MOST_GRAPH_US else None
    return Times(float(middle), float(low), float(high), graph_us, _host_us(run, 20 if middle < MOST_GRAPH_US else 3))


def _event_us(run: Callable[[], None], flush: Any) -> float:
    import cupy

    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    flush.fill(1)
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, stop)) * 1e3


def _graph_us(run: Callable[[], None], about_us: float, budget_seconds: float) -> float:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        run()
        stream.synchronize()
        stream.begin_capture()
        for _ in range(GRAPH_CALLS):
            run()
        graph = stream.end_capture()
        replays = int(np.clip(budget_seconds * 1e6 / max(GRAPH_CALLS * about_us, 50.0), 3, 50))
        samples = []
        for _ in range(replays):
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            stop.record(stream)
            stop.synchronize()
            samples.append(float(cupy.cuda.get_elapsed_time(start, stop)) * 1e3 / GRAPH_CALLS)
    return float(np.median(samples))


def _host_us(run: Callable[[], None], calls: int) -> float:
    import cupy

    samples = []
    for _ in range(calls):
        cupy.cuda.runtime.deviceSynchronize()
        start = time.perf_counter()
        run()
        samples.append(1e6 * (time.perf_counter() - start))
    cupy.cuda.runtime.deviceSynchronize()
    return float(np.median(samples))


def _l2_bytes() -> int:
    import cupy

    return int(cupy.cuda.Device().attributes["L2CacheSize"])


def copy_bytes_per_second() -> float:
    """Measure device memory: a copy of 4 GiB, bytes read plus bytes written."""
    import cupy

    source = cupy.ones(1 << 32, np.uint8)
    target = cupy.empty_like(source)
    moved = 2 * int(source.nbytes)
    return moved / (1e-6 * _median_us(lambda: cupy.copyto(target, source)))


def matmul_flops_per_second(size: int = 8192) -> float:
    """Measure the tensor cores: a bfloat16 product of two random square matrices, float32 accumulation."""
    import cupy
    import ml_dtypes

    rng = cupy.random.default_rng(0)
    a, b = (rng.standard_normal((size, size), dtype=np.float32).astype(ml_dtypes.bfloat16) for _ in "ab")
    out = cupy.empty_like(a)
    return 2 * size**3 / (1e-6 * _median_us(lambda: cupy.matmul(a, b, out=out)))


def _median_us(run: Callable[[], Any], repeats: int = 10) -> float:
    import cupy

    run()
    samples = []
    for _ in range(repeats):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        run()
        stop.record()
        stop.synchronize()
        samples.append(float(cupy.cuda.get_elapsed_time(start, stop)) * 1e3)
    return float(np.median(samples))
