"""Time per step and phase: device events on CUDA, the host's clock everywhere."""

from __future__ import annotations

import contextlib
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any

import torch

from steplab.core import Clock, Samples
from steplab.probes.disturbances import UNDISTURBED, Disturbance, Disturbances, mark_slow
from steplab.probes.loaders import LoaderWaits
from steplab.probes.probe import Probe, Subject

THREADS = Path("/proc/self/task")  # a folder for each thread
MOST_LINES = 3  # at which the garbage collector struck


class Stopwatch:
    """Marks moments without waiting for the device; differences are read afterward."""

    def __init__(self, on_cuda: bool) -> None:
        self.on_cuda = on_cuda
        self.host_s: list[float] = []
        self.events: list[torch.cuda.Event] = []

    def mark(self) -> int:
        """Mark the present moment on both clocks and return its index."""
        self.host_s.append(perf_counter())
        if self.on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append(event)
        return len(self.host_s) - 1

    def host_ms(self, start: int, end: int) -> float:
        """Milliseconds between two marks on the host's clock."""
        return (self.host_s[end] - self.host_s[start]) * 1e3

    def device_ms(self, start: int, end: int) -> float:
        """Milliseconds between two marks on the device; without a GPU, on the host."""
        if not self.on_cuda:
            return self.host_ms(start, end)
        return self.events[start].elapsed_time(self.events[end])


class ClockProbe(Probe):
    """Times steps; the loop wraps the fetch of each batch and each step.

    A step that asks a loader for its batch itself brings `loaders`, which sees that; one that runs
    code of any kind, `line_of`, by which the line is known at which the garbage collector strikes.
    """

    def __init__(
        self,
        loaders: LoaderWaits | None = None,
        line_of: Callable[[FrameType | None], str] | None = None,
    ) -> None:
        self.loaders, self.line_of = loaders, line_of

    def open_window(self, subject: Subject) -> None:
        """Synchronize, then start: the first period begins with an idle device."""
        self.on_cuda = subject.on_cuda
        self.watch = Stopwatch(self.on_cuda)
        self.phase_marks: list[dict[str, list[tuple[int, int]]]] = []
        self.step_marks: list[tuple[int, int]] = []
        self.data_marks: list[tuple[int, int]] = []
        self.loader_ms: list[float] = []  # of each step
        self.disturbances = Disturbances(self.on_cuda, self.line_of)
        self.disturbed: dict[int, Disturbance] = {}
        self.watch_before, subject.step.watch = subject.step.watch, self._phase
        if self.on_cuda:
            torch.cuda.synchronize()
        self.contention = Contention()
        self.disturbances.open()
        if self.loaders is not None:
            self.loaders.open()
        self.first = self.watch.mark()

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """Wrap the fetch of a batch."""
        start = self.watch.mark()
        yield
        self.data_marks.append((start, self.watch.mark()))

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Wrap one step."""
        self.phase_marks.append(defaultdict(list))
        waited_ms = self._waited_ms
        start = self.watch.mark()
        yield
        self.step_marks.append((start, self.watch.mark()))
        self.loader_ms.append(self._waited_ms - waited_ms)
        seen = self.disturbances.next_step()
        if seen is not UNDISTURBED:
            self.disturbed[len(self.step_marks) - 1] = seen

    def close_window(self, subject: Subject) -> None:
        """Stop; nothing is read yet."""
        self.window_ms = (perf_counter() - self.watch.host_s[self.first]) * 1e3
        self.contended = self.contention.share()
        self.disturbances.close()
        if self.loaders is not None:
            self.loaders.close()
        subject.step.watch = self.watch_before

    def result(self) -> Clock:
        """Compute all periods and phases from the marks."""
        ends = [self.first, *(end for _, end in self.step_marks)]
        device, host = self.watch.device_ms, self.watch.host_ms
        periods = tuple(device(a, b) for a, b in pairwise(ends))
        fetched = zip(self.data_marks, self.loader_ms, strict=True)
        data_wait = Samples(tuple(host(*marks) + ms for marks, ms in fetched), "ms")
        marks = mark_slow(Samples(periods, "ms"), data_wait, self.disturbed)
        return Clock(
            step=Samples(periods, "ms", marks),
            host=Samples(tuple(host(a, b) for a, b in self.step_marks), "ms"),
            data_wait=data_wait,
            phases=self._phases(device),
            host_phases=self._phases(host),
            window_ms=self.window_ms,
            source="cuda events" if self.on_cuda else "perf_counter",
            contended=self.contended,
            collector_ms=self.disturbances.collecting_ms / max(len(self.step_marks), 1),
            collector_median_ms=statistics.median(self._collecting_ms or [0.0]),
            collector_lines=self._collector_lines,
            loader=self.loaders.result() if self.loaders is not None else None,
        )

    @property
    def _collecting_ms(self) -> list[float]:
        """Milliseconds in the garbage collector, of each step."""
        steps = range(len(self.step_marks))
        return [self.disturbed.get(step, UNDISTURBED).collecting_ms for step in steps]

    @property
    def _collector_lines(self) -> dict[str, float]:
        """Milliseconds of a step in the collector by line, on average, most first."""
        steps = max(len(self.step_marks), 1)
        lines = sorted(self.disturbances.collecting_at.items(), key=lambda one: -one[1])
        return {line: ms / steps for line, ms in lines[:MOST_LINES] if line}

    @property
    def _waited_ms(self) -> float:
        return self.loaders.waited_ms if self.loaders is not None else 0.0

    def _phases(self, duration: Any) -> dict[str, Samples]:
        names = dict.fromkeys(name for step in self.phase_marks for name in step)
        return {
            name: Samples(
                tuple(sum(duration(a, b) for a, b in step[name]) for step in self.phase_marks),
                "ms",
            )
            for name in names
        }

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = self.watch.mark()
        yield
        self.phase_marks[-1][name].append((start, self.watch.mark()))


class Contention:
    """How long the threads of this process have waited for a core since it was made."""

    def __init__(self) -> None:
        self.waited_s, self.began_s = seconds_without_core(), perf_counter()

    def share(self) -> float | None:
        """Return that time over the time since then; None where the kernel does not say."""
        waited_s, elapsed_s = seconds_without_core(), perf_counter() - self.began_s
        if waited_s is None or self.waited_s is None or not elapsed_s > 0:
            return None
        # Below 0 where threads ended: their time is no longer in the sum.
        return max(0.0, (waited_s - self.waited_s) / elapsed_s)


def seconds_without_core(threads: Path = THREADS) -> float | None:
    """Return how long the threads of this process were ready to run but had no core.

    The sum over living threads so far; None where the kernel does not say. The second number of
    `schedstat` is a thread's time on a run queue, in nanoseconds.
    """
    waited = []
    for path in threads.glob("*/schedstat"):
        try:
            waited.append(int(path.read_text().split()[1]))
        except (
            OSError,
            IndexError,
            ValueError,
        ):  # the thread has just ended, or nothing is counted
            continue
    return sum(waited) / 1e9 if waited else None


PROBE = ClockProbe
