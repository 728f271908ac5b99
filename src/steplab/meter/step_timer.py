"""StepTimer: turns the steps of a loop into samples, without ever waiting for the device.

One step runs under the profiler instead, for its kernel launches and its dtype.
"""

from __future__ import annotations

import weakref
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import median_low
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from steplab.core import Samples
from steplab.core.errors import Unsupported, UserError
from steplab.probes.disturbances import (
    UNDISTURBED,
    Disturbance,
    Disturbances,
    mark_slow,
    note_event,
)
from steplab.probes.ran import GRAPH_LAUNCH, LAUNCHES, RawProfile, matmul_dtype

COUNTED = LAUNCHES | {GRAPH_LAUNCH}  # a replayed graph is one launch of the host
FROM_ENTRY = "counted from its own entry: no counted step ended before it"


class StepTimer:
    """Follows a loop: in a step, in a phase, or between two steps."""

    def __init__(self, model: nn.Module, inspect_step: int | None) -> None:
        self.samples = StepSamples()
        self.count = 0  # steps that did not raise, including the inspected one
        self.left_s = 0.0  # when the Meter last returned control to the loop
        self.inspected = Inspected(why_no_dtype="" if inspect_step else "no step is inspected")
        self.uninspected = ""  # why no step ran under the profiler although one should have
        self._model = model
        self._inspect_step = inspect_step
        self._inspection: Inspection | None = None
        self._step: MarkedStep | None = None  # the one that is running
        self._last_end: Moment | None = None  # of the previous step, if that one counts
        self._pending: deque[MarkedStep] = deque()  # ended on the host
        self._disturbances: Disturbances | None = None

    @cached_property
    def marker(self) -> Marker:
        """Created at the first step: by then the model is on the device that trains it."""
        return Marker(device_of(self._model))

    def enter(self, tokens: int) -> None:
        """Begin a step; its period began when the previous one ended, if that one counts."""
        entry_s = perf_counter()
        if self._step is not None:
            raise UserError("A step was entered inside a step.", "Leave meter.step first.")
        if self.count + 1 == self._inspect_step:
            self._begin_inspection()
        last_end = self._last_end
        if self._disturbances is None:
            self._disturbances = Disturbances(self.marker.on_cuda)
            self._disturbances.open()
            weakref.finalize(self, self._disturbances.close)
        elif last_end is None:
            self._disturbances.next_step()  # what happened before this period is not its own
        if self.count and self.count == self.inspected.step:
            note_event("followed the step that was profiled")
        self._step = MarkedStep(
            tokens,
            start=self.marker.mark() if last_end is None else last_end,
            entry_s=entry_s,
            wait_s=0.0 if last_end is None else entry_s - self.left_s,
            from_entry=last_end is None,
        )

    def leave(self) -> None:
        """End the step, and collect what the device has finished."""
        assert self._step is not None and self._disturbances is not None
        self._step.disturbance = self._disturbances.next_step()
        if self._inspection is not None:
            self.inspected = self._inspection.stop(self.count + 1)
            self._inspection = self._last_end = None
        else:
            self._step.end = self._last_end = self.marker.mark()
            self._pending.append(self._step)
        self._step = None
        self.count += 1
        self.collect()
        self.left_s = perf_counter()

    def abort(self) -> None:
        """Forget the step. Calls no CUDA: after a device fault that would hide the user's error."""
        self._step = self._last_end = None
        if self._inspection is not None:
            self._inspection.abandon()
            self._inspection = None

    def pause(self) -> None:
        """The loop does something else now: the next period begins when its step is entered."""
        self._last_end = None

    def phase(self, name: str) -> PhaseScope:
        """Return the scope of a phase of the running step."""
        if self._step is None:
            raise UserError(
                f"The phase {name!r} was entered outside a step.",
                "Enter it inside: with meter.step(tokens=...):",
            )
        return PhaseScope(self.marker, self._step, name)

    def collect(self) -> None:
        """Turn the steps that the device has finished into samples, oldest first."""
        while self._pending and self._pending[0].passed:
            step = self._pending.popleft()
            self.samples.add(step)
            # Its end is kept: it is the start of the next step.
            self.marker.release(step.start)
            for _, start, end in step.phases:
                self.marker.release(start)
                self.marker.release(end)

    def _begin_inspection(self) -> None:
        if another_profiler_runs():
            self.uninspected = f"another profiler was running in step {self.count + 1}"
            self.inspected = Inspected(why_no_dtype=self.uninspected)
        else:
            self._inspection = Inspection(self.marker.device)


# Classes and not generators: `contextlib.contextmanager` costs a microsecond per entry.


class StepScope:
    """`with meter.step(...)`: a step that raises is forgotten, and the exception propagates."""

    __slots__ = ("_timer", "_tokens")

    def __init__(self, timer: StepTimer, tokens: int) -> None:
        self._timer, self._tokens = timer, tokens

    def __enter__(self) -> None:
        self._timer.enter(self._tokens)

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is None:
            self._timer.leave()
        else:
            self._timer.abort()


class PhaseScope:
    """`with meter.phase(...)`: a phase that raises is forgotten, and the exception propagates."""

    __slots__ = ("_marker", "_name", "_start", "_step")

    def __init__(self, marker: Marker, step: MarkedStep, name: str) -> None:
        self._marker, self._step, self._name = marker, step, name

    def __enter__(self) -> None:
        self._start = self._marker.mark()

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is None:
            self._step.phases.append((self._name, self._start, self._marker.mark()))


@dataclass(frozen=True)
class Inspected:
    """What the inspected step showed; all None before it has run."""

    step: int | None = None  # its number, from 1
    launches: int | None = None  # kernels and graphs that the host launched; None on CPU
    dtype: str | None = None  # of the matrix products
    why_no_dtype: str = ""  # "" where it is known, or still may be


class Inspection:
    """A profiler around one step, which is never timed: the profiler slows it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_cuda = device.type == "cuda"
        # record_shapes also records dtypes; the shapes weigh one matrix product against another.
        self._profiler = RawProfile(self._on_cuda, record_shapes=True)
        self._profiler.start()

    def stop(self, step: int) -> Inspected:
        """End the profile of step number `step` and return what it showed."""
        if self._on_cuda:
            torch.cuda.synchronize(self._device)
        self._profiler.stop()
        events = self._profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        launches = sum(event.name() in COUNTED for event in events) if self._on_cuda else None
        dtype, reason = matmul_dtype(events, self._device)
        return Inspected(step, launches, dtype, f"step {step} {reason}" if reason else "")

    def abandon(self) -> None:
        """End the profile of a step that failed; only the step's own exception may surface."""
        try:
            self._profiler.stop()
        except RuntimeError:
            # A CUDA fault in the step makes every later CUDA call fail too, this one included.
            return


def another_profiler_runs() -> bool:
    """Whether the user profiles this step: a second profiler would silently end theirs."""
    return torch._C._autograd._profiler_enabled()


class StepSamples:
    """One column per quantity, one row per counted step; times in milliseconds.

    Eight bytes per number, so that a million steps fit.
    """

    def __init__(self) -> None:
        self.tokens = array("q")
        self.step_ms = array("d")
        self.host_ms = array("d")
        self.wait_ms = array("d")
        self.wall_ms = array("d")  # the same period as step_ms, on the host's clock
        self.phase_ms: dict[str, array[float]] = {}
        self.host_phase_ms: dict[str, array[float]] = {}
        self.from_entry: list[int] = []  # rows whose period starts when the step is entered
        self.disturbed: dict[int, Disturbance] = {}  # by row

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, step: MarkedStep) -> None:
        """Append a step whose moments have all passed."""
        row = len(self.tokens)
        self.tokens.append(step.tokens)
        self.step_ms.append(step.start.device_ms_to(step.end))
        self.host_ms.append((step.end.host_s - step.entry_s) * 1e3)
        self.wait_ms.append(step.wait_s * 1e3)
        self.wall_ms.append(step.start.host_ms_to(step.end))
        if step.from_entry:
            self.from_entry.append(row)
        if step.disturbance is not UNDISTURBED:
            self.disturbed[row] = step.disturbance
        for name, start, end in step.phases:
            _add_to_row(self.phase_ms, name, row, start.device_ms_to(end))
            _add_to_row(self.host_phase_ms, name, row, start.host_ms_to(end))

    def tokens_per_s(self, first: int) -> float | None:
        """Median rate of the steps from row `first` on; None if unknown.

        The median is taken of the time per token, so that steps of equal size give exactly their
        tokens over their median time.
        """
        pairs = zip(self.step_ms[first:], self.tokens[first:], strict=True)
        ms_per_token = median_low([ms / tokens for ms, tokens in pairs] or [0.0])
        return 1e3 / ms_per_token if ms_per_token > 0 else None

    def typical(self, first: int) -> int | None:
        """Return the row with the median time from row `first` on, the lower of two."""
        periods = self.step_ms[first:]
        return first + periods.index(median_low(periods)) if periods else None

    def all_phases_ms(self, row: int) -> float:
        """Return the sum of the phases of one step."""
        return sum(column[row] for column in self.phase_ms.values() if row < len(column))

    def step(self) -> Samples:
        """Periods; slow ones, with what was seen in them, and those without a previous step."""
        found = self.slow_steps(0)
        return Samples(found.values, "ms", {**found.marks, **self._from_entry_marks()})

    def slow_steps(self, first: int) -> Samples:
        """Periods from row `first` on; slow ones are marked with what was seen in them."""
        periods, waits = (
            Samples(tuple(column[first:]), "ms") for column in (self.step_ms, self.wait_ms)
        )
        disturbed = {row - first: one for row, one in self.disturbed.items() if row >= first}
        return Samples(periods.values, "ms", mark_slow(periods, waits, disturbed))

    def data_wait(self) -> Samples:
        """Waits before the steps; 0 and marked where the period has none."""
        return Samples(tuple(self.wait_ms), "ms", self._from_entry_marks())

    def phases(self, columns: dict[str, array[float]]) -> dict[str, Samples]:
        """Phases by name, one value per step: 0 in a step that did not enter the phase."""
        return {
            name: Samples((*column, *[0.0] * (len(self) - len(column))), "ms")
            for name, column in columns.items()
        }

    def _from_entry_marks(self) -> dict[str, str]:
        return {str(row): FROM_ENTRY for row in self.from_entry}


def _add_to_row(columns: dict[str, array[float]], name: str, row: int, ms: float) -> None:
    """Add `ms` to the phase's value in `row`; earlier rows without the phase get 0."""
    column = columns.get(name)
    if column is None:
        column = columns[name] = array("d")
    if len(column) <= row:
        column.extend([0.0] * (row + 1 - len(column)))
    column[row] += ms


class MarkedStep:
    """The moments of one step: start and end of its period and of every phase."""

    __slots__ = (
        *("end", "entry_s", "from_entry", "phases", "start", "tokens", "wait_s"),
        "disturbance",
    )

    def __init__(
        self, tokens: int, start: Moment, entry_s: float, wait_s: float, from_entry: bool
    ) -> None:
        self.tokens = tokens
        self.start = start
        self.end = start
        self.entry_s = entry_s
        self.wait_s = wait_s  # between the previous step and this one
        self.from_entry = from_entry  # the period has no wait: no counted step ended before it
        self.phases: list[tuple[str, Moment, Moment]] = []
        self.disturbance = UNDISTURBED

    @property
    def passed(self) -> bool:
        """Whether all moments can be read; a phase may have ended on a stream of its own."""
        elsewhere = (end for _, _, end in self.phases if end.stream != self.end.stream)
        return self.end.passed and all(end.passed for end in elsewhere)


class Marker:
    """Marks moments on one device. CUDA events are taken from a pool and returned to it.

    Streams are looked up by their address: creating a Stream object for every event would cost
    as much as recording it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_cuda = device.type == "cuda"
        self._new_event: Callable[..., DeviceEvent] = torch.cuda.Event
        self._free: list[DeviceEvent] = []
        self._streams: dict[int, torch.cuda.Stream] = {}
        if self.on_cuda:
            self._index = torch.cuda.current_device() if device.index is None else device.index

    def mark(self) -> Moment:
        """Mark the present moment."""
        host_s = perf_counter()
        if not self.on_cuda:
            return Moment(host_s, None)
        event = self._free.pop() if self._free else self._new_event(enable_timing=True)
        # Explicitly: the default is a stream of the current device, which may not be the model's.
        address = torch._C._cuda_getCurrentRawStream(self._index)
        stream = self._streams.get(address)
        if stream is None:
            stream = self._streams[address] = torch.cuda.current_stream(self.device)
        event.record(stream)
        return Moment(host_s, event, address)

    def release(self, moment: Moment) -> None:
        """Return the moment's event to the pool; the moment must not be read afterward."""
        if moment.event is not None:
            self._free.append(moment.event)

    def synchronize(self) -> None:
        """Wait until every moment has passed."""
        if self.on_cuda:
            torch.cuda.synchronize(self.device)


class Moment(NamedTuple):
    """One moment on the host's clock (seconds) and, on CUDA, in a stream of the device."""

    host_s: float
    event: DeviceEvent | None
    stream: int = 0  # address of the stream

    @property
    def passed(self) -> bool:
        """Whether the device has reached it; always true on a CPU."""
        return self.event is None or self.event.query()

    def host_ms_to(self, later: Moment) -> float:
        """Milliseconds until `later` on the host's clock."""
        return (later.host_s - self.host_s) * 1e3

    def device_ms_to(self, later: Moment) -> float:
        """Milliseconds until `later` on the device (on a CPU: the host); both must have passed."""
        if self.event is None or later.event is None:
            return self.host_ms_to(later)
        return self.event.elapsed_time(later.event)


class DeviceEvent(Protocol):
    """What is used of `torch.cuda.Event`."""

    def record(self, stream: Any) -> None:
        """Queue the event behind the work that `stream` has so far."""
        ...

    def query(self) -> bool:
        """Whether the device has reached it."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to `end_event`; both must have passed."""
        ...


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter: a CPU or a CUDA device."""
    first = next(model.parameters(), None)
    if first is None:
        raise UserError("The model has no parameters, so its device is unknown.")
    if first.device.type not in ("cpu", "cuda"):
        raise Unsupported(
            f"The Meter cannot time the device {first.device}.", "It knows cpu and cuda."
        )
    return first.device
