"""Times short GPU calls without the host: captured as a CUDA graph and replayed."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any


def graph_ms(calls: Sequence[Callable[[], Any]], repeats: int = 7) -> float:
    """Return the median ms of one call, of a CUDA graph that holds them all."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _, call in itertools.product(range(2), calls):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Relaxed: a kernel that the backward's own thread loads at its first call may load.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        for _, call in itertools.product(range(2), calls):
            call()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return statistics.median(times) / (2 * len(calls))
