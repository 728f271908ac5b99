"""Watching the phases of a step: as labels in a trace, or by their times. Imports torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch
from torch.profiler import record_function

LABELS = {"forward": "FORWARD", "backward": "BACKWARD", "optimizer": "OPTIMIZER"}
INFERENCE = "FORWARD_INFER"


def labels(infers: bool) -> Any:
    """Return a watcher that puts each phase into the trace under its label."""
    names = {"forward": INFERENCE} if infers else LABELS
    return lambda phase: record_function(names.get(phase, phase.upper()))


class PhaseTimes:
    """A watcher that notes how long each phase takes."""

    def __init__(self, on_cuda: bool) -> None:
        self.on_cuda = on_cuda
        self.pairs: dict[str, list[tuple[Any, Any]]] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Stand around one phase."""
        start = self._now()
        yield
        self.pairs.setdefault(phase, []).append((start, self._now()))

    def mean_ms(self, phase: str) -> float | None:
        """Return the mean of a phase; None: it never ran. The device must be idle by now."""
        pairs = self.pairs.get(phase)
        if not pairs:
            return None
        if self.on_cuda:
            return sum(a.elapsed_time(b) for a, b in pairs) / len(pairs)
        return sum((b - a) * 1e3 for a, b in pairs) / len(pairs)

    def _now(self) -> Any:
        if not self.on_cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
