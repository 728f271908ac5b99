"""What made one step slower than its neighbors, by what was seen in that very step.

Totals are read at the end of every step, in microseconds and without waiting for the device; the
difference between two readings is what happened in the step between them.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from types import FrameType
from typing import Any, NamedTuple

import torch

from steplab.core import Samples, units
from steplab.probes.compilation import graph_count

# Of the thread that opens it, which runs the loop. Every further thread would cost 3 us a step.
THREAD = "/proc/thread-self/schedstat"
# A pause is a cause if it makes up this share of what the step took beyond the median: several
# may share the blame, and small ones are in every step.
CAUSE_SHARE = 0.25
LONG_MS = 0.2  # a collection of young objects is shorter, and not worth a look at the stack
KEPT_MS = 0.5  # shorter pauses of a step are not kept: its neighbors have them too

_notes: list[str] = []  # what steplab itself did to a step, since the process began
_launched: list[Any] = []  # kernels that Triton has compiled at a launch


def note_event(text: str) -> None:
    """Note what a step does beside its work, as in "captured the CUDA graph again"."""
    _notes.append(text)


class Totals(NamedTuple):
    """Counted since some moment in the past."""

    collecting_ms: float  # in Python's garbage collector
    core_wait_ms: float  # the loop's thread was ready to run and had no core
    graphs: int  # that Dynamo has compiled
    kernels: int  # that Triton has compiled at a launch
    mallocs: int  # calls of cudaMalloc
    frees: int  # calls of cudaFree, each of which waits for the device
    retries: int  # allocations that had to wait until the allocator had freed its cache
    pinned: int  # calls of cudaHostAlloc, which wait for the device too
    notes: int


@dataclass(frozen=True)
class Disturbance:
    """What happened in one step."""

    collecting_ms: float
    core_wait_ms: float
    graphs: int
    kernels: int
    mallocs: int
    frees: int
    retries: int
    pinned: int
    notes: tuple[str, ...]

    def causes(self, excess_ms: float, data_ms: float) -> list[str]:
        """Say what made the step `excess_ms` longer, `data_ms` of them waiting for data."""
        least = CAUSE_SHARE * excess_ms
        events = {
            f"compiled {units.counted(self.graphs, 'graph')}": self.graphs > 0,
            f"compiled {units.counted(self.kernels, 'Triton kernel')}": self.kernels > 0,
            "the allocator was full and freed its cache": self.retries > 0,
            f"allocated device memory {units.counted(self.mallocs, 'time')}": self.mallocs > 0,
            f"freed device memory {units.counted(self.frees, 'time')}": (
                self.frees > 0 and not self.retries
            ),
            f"allocated pinned memory {units.counted(self.pinned, 'time')}": self.pinned > 0,
            f"waited {units.milliseconds(data_ms)} for data": data_ms >= least > 0,
            f"garbage collection took {units.milliseconds(self.collecting_ms)}": (
                self.collecting_ms >= least
            ),
            f"waited {units.milliseconds(self.core_wait_ms)} for a core": (
                self.core_wait_ms >= least
            ),
        }
        return [*dict.fromkeys(self.notes), *(text for text, is_one in events.items() if is_one)]


UNDISTURBED = Disturbance(0.0, 0.0, 0, 0, 0, 0, 0, 0, ())


class Disturbances:
    """Reads the totals, from `open` to `close`.

    `line_of` tells the line that a frame is at, where it matters at which the collector strikes.
    """

    def __init__(
        self, on_cuda: bool, line_of: Callable[[FrameType | None], str] | None = None
    ) -> None:
        self.on_cuda = on_cuda
        self._line_of = line_of
        self.collecting_ms = 0.0
        self.collecting_at: defaultdict[str, float] = defaultdict(float)  # ms by line of user code
        self._since = 0.0
        self._file: int | None = None

    def open(self) -> None:
        """Begin to watch."""
        gc.callbacks.append(self._on_gc)
        watch_triton()
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
            now.kernels - before.kernels,
            now.mallocs - before.mallocs,
            now.frees - before.frees,
            now.retries - before.retries,
            now.pinned - before.pinned,
            tuple(_notes[before.notes : now.notes]),
        )

    def _read(self) -> Totals:
        return Totals(
            self.collecting_ms,
            self._core_wait_ms(),
            graph_count(),
            len(_launched),
            *(allocator_calls() if self.on_cuda else NO_CALLS),
            len(_notes),
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
            spent_ms = (perf_counter() - self._since) * 1e3
            self.collecting_ms += spent_ms
            if spent_ms > LONG_MS and self._line_of is not None:
                self.collecting_at[self._line_of(sys._getframe(1))] += spent_ms


class AllocatorCalls(NamedTuple):
    """How often torch's allocators went to the driver, since the process began."""

    mallocs: int
    frees: int
    retries: int
    pinned: int


NO_CALLS = AllocatorCalls(0, 0, 0, 0)


def allocator_calls() -> AllocatorCalls:
    """Ask the allocators of device and of pinned memory."""
    # Not torch.cuda.memory_stats, which sorts all of its two hundred numbers.
    stats = torch._C._cuda_memoryStats(torch.cuda.current_device())
    on_host = torch._C._cuda_hostMemoryStats()
    found = (stats.get("num_device_alloc", 0), stats.get("num_device_free", 0))
    return AllocatorCalls(*found, stats["num_alloc_retries"], on_host.get("num_host_alloc", 0))


def watch_triton() -> None:
    """Let Triton tell when a launch has compiled its kernel, unless somebody else listens.

    Inductor's kernels are compiled before they are launched, with their graph.
    """
    runtime = getattr(getattr(sys.modules.get("triton"), "knobs", None), "runtime", None)
    if runtime is not None and runtime.jit_post_compile_hook is None:
        runtime.jit_post_compile_hook = _note_kernel


def _note_kernel(*_: Any, **compiled: Any) -> None:
    _launched.append(compiled.get("repr", ""))


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
