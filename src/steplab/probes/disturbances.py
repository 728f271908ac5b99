"""What made one step slower than its neighbors, by what was seen in that very step.

Totals are read at the end of every step, in microseconds and without waiting for the device; the
difference between two readings is what happened in the step between them.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch

from steplab.core import Samples, units
from steplab.probes.compilation import graph_count

# Of the thread that opens it, which runs the loop. Every further thread would cost 3 us a step.
THREAD = "/proc/thread-self/schedstat"
# A pause is a cause if it makes up this share of what the step took beyond the median: several
# may share the blame, and small ones are in every step.
CAUSE_SHARE = 0.25
KEPT_MS = 0.5  # shorter pauses of a step are not kept: its neighbors have them too

_notes: list[str] = []  # what steplab itself did to a step, since the process began


def note_event(text: str) -> None:
    """Note what a step does beside its work, as in "captured the CUDA graph again"."""
    _notes.append(text)


class Totals(NamedTuple):
    """Counted since some moment in the past."""

    collecting_ms: float  # in Python's garbage collector
    core_wait_ms: float  # the loop's thread was ready to run and had no core
    graphs: int  # that Dynamo has compiled
    mallocs: int  # calls of cudaMalloc
    retries: int  # allocations that had to wait until the allocator had freed its cache
    notes: int


@dataclass(frozen=True)
class Disturbance:
    """What happened in one step."""

    collecting_ms: float
    core_wait_ms: float
    graphs: int
    mallocs: int
    retries: int
    notes: tuple[str, ...]

    def causes(self, excess_ms: float, data_ms: float) -> list[str]:
        """Say what made the step `excess_ms` longer, `data_ms` of them waiting for data."""
        least = CAUSE_SHARE * excess_ms
        events = {
            f"compiled {units.counted(self.graphs, 'graph')}": self.graphs > 0,
            "the allocator was full and freed its cache": self.retries > 0,
            f"allocated device memory {units.counted(self.mallocs, 'time')}": self.mallocs > 0,
            f"waited {units.milliseconds(data_ms)} for data": data_ms >= least > 0,
            f"garbage collection took {units.milliseconds(self.collecting_ms)}": (
                self.collecting_ms >= least
            ),
            f"waited {units.milliseconds(self.core_wait_ms)} for a core": (
                self.core_wait_ms >= least
            ),
        }
        return [*dict.fromkeys(self.notes), *(text for text, is_one in events.items() if is_one)]


UNDISTURBED = Disturbance(0.0, 0.0, 0, 0, 0, ())


class Disturbances:
    """Reads the totals, from `open` to `close`."""

    def __init__(self, on_cuda: bool) -> None:
        self.on_cuda = on_cuda
        self.collecting_ms = 0.0
        self._since = 0.0
        self._file: int | None = None

    def open(self) -> None:
        """Begin to watch."""
        gc.callbacks.append(self._on_gc)
        try:
            self._file = os.open(THREAD, os.O_RDONLY)
        except OSError:  # the system has no such file
            self._file = None
        self._last = self._read()

    def close(self) -> None:
        """Stop watching."""
        gc.callbacks.remove(self._on_gc)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def next_step(self) -> Disturbance:
        """Return what has happened since the last call, or since `open`."""
        before, self._last = self._last, self._read()
        now = self._last
        collecting_ms = now.collecting_ms - before.collecting_ms
        core_wait_ms = now.core_wait_ms - before.core_wait_ms
        if now[2:] == before[2:] and collecting_ms < KEPT_MS and core_wait_ms < KEPT_MS:
            return UNDISTURBED
        return Disturbance(
            collecting_ms,
            core_wait_ms,
            max(0, now.graphs - before.graphs),  # it is 0 again after a reset of Dynamo
            now.mallocs - before.mallocs,
            now.retries - before.retries,
            tuple(_notes[before.notes : now.notes]),
        )

    def _read(self) -> Totals:
        mallocs, retries = allocator_calls() if self.on_cuda else (0, 0)
        return Totals(
            self.collecting_ms, self._core_wait_ms(), graph_count(), mallocs, retries, len(_notes)
        )

    def _core_wait_ms(self) -> float:
        """The second number of `schedstat` is a thread's time on a run queue, in nanoseconds."""
        if self._file is None:
            return 0.0
        try:
            return int(os.pread(self._file, 64, 0).split()[1]) / 1e6
        except (OSError, IndexError, ValueError):  # the thread has ended, or nothing is counted
            return 0.0

    def _on_gc(self, when: str, info: dict[str, int]) -> None:
        if when == "start":
            self._since = perf_counter()
        else:
            self.collecting_ms += (perf_counter() - self._since) * 1e3


def allocator_calls() -> tuple[int, int]:
    """Return how often the CUDA allocator called cudaMalloc, and how often it had to try twice."""
    # Not torch.cuda.memory_stats, which sorts all of its two hundred numbers.
    stats = torch._C._cuda_memoryStats(torch.cuda.current_device())
    return int(stats.get("num_device_alloc", 0)), int(stats["num_alloc_retries"])


def mark_disturbed(
    periods: Samples, data_wait: Samples, disturbed: Mapping[int, Disturbance]
) -> dict[str, str]:
    """Return a mark for every step that would be slow for a reason, if it turns out to be slow.

    For a few steps of a longer series, which alone cannot tell what is slow: pauses count from an
    eighth of the step on.
    """
    marks = {}
    for step, period_ms in enumerate(periods.values):
        data_ms = data_wait.values[step]
        causes = disturbed.get(step, UNDISTURBED).causes(period_ms / 2, data_ms)
        if causes:
            marks[str(step)] = f"slow, {' and '.join(causes)}"
    return marks


def mark_slow(
    periods: Samples, data_wait: Samples, disturbed: Mapping[int, Disturbance]
) -> dict[str, str]:
    """Return a mark for every step far above the median: what was seen in it, if anything.

    `disturbed` has the steps, by index, in which something was.
    """
    marks = dict(periods.with_slow_marked().marks)
    for text in marks:
        step = int(text)
        excess_ms = periods.values[step] - periods.median
        data_ms = data_wait.values[step] - data_wait.median if data_wait.values else 0.0
        causes = disturbed.get(step, UNDISTURBED).causes(excess_ms, data_ms)
        if causes:
            marks[text] = f"slow, {' and '.join(causes)}"
    return marks
