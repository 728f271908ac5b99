"""StepTimer: turns the steps of a loop into samples, without ever waiting for the device."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from steplab.core import Clock, Figures, Memory, Samples
from steplab.core.errors import Unsupported, UserError
from steplab.meter.inspection import Inspected, Inspection, another_profiler_runs


class DeviceEvent(Protocol):
    """What is used of `torch.cuda.Event`."""

    def record(self, stream: Any) -> None:
        """Queue the event behind what `stream` has been given so far."""
        ...

    def query(self) -> bool:
        """Whether the device has come to it."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to `end_event`; both must have passed."""
        ...


class Moment(NamedTuple):
    """One moment on the host's clock (seconds) and, on CUDA, in a stream of the device."""

    host_s: float
    event: DeviceEvent | None
    stream: int = 0  # address of the stream

    @property
    def passed(self) -> bool:
        """Whether the device has come this far; always true on CPU."""
        return self.event is None or self.event.query()

    def host_ms_to(self, later: Moment) -> float:
        """Milliseconds until `later` on the host's clock."""
        return (later.host_s - self.host_s) * 1e3

    def device_ms_to(self, later: Moment) -> float:
        """Milliseconds until `later` on the device, which must have passed (CPU: the host's)."""
        if self.event is None or later.event is None:
            return self.host_ms_to(later)
        return self.event.elapsed_time(later.event)


class Marker:
    """Notes moments on one device. CUDA events are taken from a pool and given back to it.

    Streams are looked up by their address: making a Stream object for every event would cost as
    much as recording it.
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
        """Note the present moment."""
        host_s = perf_counter()
        if not self.on_cuda:
            return Moment(host_s, None)
        event = self._free.pop() if self._free else self._new_event(enable_timing=True)
        # The model's device need not be the current one, whose stream is the default here.
        address = torch._C._cuda_getCurrentRawStream(self._index)
        stream = self._streams.get(address)
        if stream is None:
            stream = self._streams[address] = torch.cuda.current_stream(self.device)
        event.record(stream)
        return Moment(host_s, event, address)

    def give_back(self, moment: Moment) -> None:
        """Let the moment's event be used again; nobody may read the moment afterwards."""
        if moment.event is not None:
            self._free.append(moment.event)

    def synchronise(self) -> None:
        """Wait until every moment has passed."""
        if self.on_cuda:
            torch.cuda.synchronize(self.device)


class MarkedStep:
    """The moments of one step: `start` and `end` of its period, and of every phase entered."""

    __slots__ = ("end", "entry_s", "from_entry", "phases", "start", "tokens", "wait_s")

    def __init__(
        self, tokens: int, start: Moment, entry_s: float, wait_s: float, from_entry: bool
    ) -> None:
        self.tokens = tokens
        self.start = start
        self.end = start
        self.entry_s = entry_s
        self.wait_s = wait_s  # between the last step and this one
        self.from_entry = from_entry  # no counted step ended before it: the period has no wait
        self.phases: list[tuple[str, Moment, Moment]] = []

    @property
    def passed(self) -> bool:
        """Whether all moments can be read; a phase may have ended on a stream of its own."""
        elsewhere = (end for _, _, end in self.phases if end.stream != self.end.stream)
        return self.end.passed and all(end.passed for end in elsewhere)


def device_of(model: nn.Module) -> torch.device:
    """Return where the model's first parameter lives: a CPU or a CUDA device."""
    first = next(model.parameters(), None)
    if first is None:
        raise UserError("The model has no parameters, so its device cannot be told.")
    if first.device.type not in ("cpu", "cuda"):
        raise Unsupported(
            f"The Meter cannot time the device {first.device}.", "It knows cpu and cuda."
        )
    return first.device


def device_name(device: torch.device) -> str:
    """Return the GPU's name as its driver gives it; a CPU has no peak in the catalog."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"


FROM_ENTRY = "counted from its own entry: no counted step ended before it"


@dataclass(frozen=True)
class MeterSummary(Clock):
    """The Clock of a whole training run, and what else the Meter saw.

    `data_wait` is the time between two steps. `window_ms` is the sum of the periods on the
    host's clock; the device was not made to wait at either end of it.
    """

    tokens: Samples
    tokens_per_second: float | None  # median over the steps
    memory: Memory | None
    figures: Figures
    formula: str  # what `figures.mfu` counts
    dtype: str | None  # whose peak it is held against: as given, or as inspected
    kernel_launches: int | None  # of the inspected step
    inspected_step: int | None  # ran under the profiler and is not among the samples
    notes: tuple[str, ...] = ()


class StepSamples:
    """One column per quantity, one row per counted step; times in milliseconds."""

    def __init__(self) -> None:
        self.tokens = array("q")
        self.step_ms = array("d")
        self.host_ms = array("d")
        self.wait_ms = array("d")
        self.wall_ms = array("d")  # the same period as step_ms, on the host's clock
        self.phase_ms: dict[str, array[float]] = {}
        self.host_phase_ms: dict[str, array[float]] = {}
        self.from_entry: list[int] = []  # rows whose period starts at the step's own entry

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
        for name, start, end in step.phases:
            _add_to_row(self.phase_ms, name, row, start.device_ms_to(end))
            _add_to_row(self.host_phase_ms, name, row, start.host_ms_to(end))

    def tokens_per_s(self, first: int) -> float | None:
        """Median rate of the steps from row `first` on; None when it cannot be told.

        The median is taken of the time per token, so that steps of equal size give exactly their
        tokens over their median time.
        """
        pairs = zip(self.step_ms[first:], self.tokens[first:], strict=True)
        ms_per_token = median([ms / tokens for ms, tokens in pairs] or [0.0])
        return 1e3 / ms_per_token if ms_per_token > 0 else None

    def step(self) -> Samples:
        """Periods, with the slow ones and those without a predecessor marked."""
        found = Samples(tuple(self.step_ms), "ms")
        marks = {str(row): "slow, no cause seen" for row in found.slow_indices()}
        return Samples(found.values, "ms", marks | self._from_entry_marks())

    def data_wait(self) -> Samples:
        """Waits before the steps; 0 and marked where the period does not hold one."""
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
    """Add `ms` to the phase's value in `row`; rows that lack the phase are filled with 0."""
    column = columns.get(name)
    if column is None:
        column = columns[name] = array("d")
    if len(column) <= row:
        column.extend([0.0] * (row + 1 - len(column)))
    column[row] += ms


class StepTimer:
    """Knows where the loop is: in a step, in a phase, or between two steps."""

    def __init__(self, model: nn.Module, inspect_step: int | None) -> None:
        self.samples = StepSamples()
        self.count = 0  # steps that ended well, the inspected one included
        self.left_s = 0.0  # when the loop last got control back
        self.inspected = Inspected(why_no_dtype="" if inspect_step else "no step is inspected")
        self.uninspected = ""  # why no step ran under the profiler, though one should have
        self._model = model
        self._inspect_step = inspect_step
        self._inspection: Inspection | None = None
        self._step: MarkedStep | None = None  # the one we are in
        self._last_end: Moment | None = None  # of the step before, if that one counts
        self._pending: deque[MarkedStep] = deque()  # ended; the device may not be there yet

    @cached_property
    def marker(self) -> Marker:
        """Made at the first step, when the model is on the device it will be trained on."""
        return Marker(device_of(self._model))

    def enter(self, tokens: int) -> None:
        """Begin a step; its period began where the last one ended, if that one counts."""
        entry_s = perf_counter()
        if self._step is not None:
            raise UserError("A step was entered inside a step.", "Leave meter.step first.")
        if self.count + 1 == self._inspect_step:
            self._begin_inspection()
        last_end = self._last_end
        self._step = MarkedStep(
            tokens,
            start=self.marker.mark() if last_end is None else last_end,
            entry_s=entry_s,
            wait_s=0.0 if last_end is None else entry_s - self.left_s,
            from_entry=last_end is None,
        )

    def leave(self) -> None:
        """End the step and collect what the device has finished by now."""
        assert self._step is not None
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
        """The loop does something else now: the next step is counted from its own entry."""
        self._last_end = None

    def phase(self, name: str) -> PhaseScope:
        """Return the scope of a phase of the present step."""
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
            # Not its end, which is the start of the next step.
            self.marker.give_back(step.start)
            for _, start, end in step.phases:
                self.marker.give_back(start)
                self.marker.give_back(end)

    def _begin_inspection(self) -> None:
        if another_profiler_runs():
            self.uninspected = f"another profiler was running in step {self.count + 1}"
            self.inspected = Inspected(why_no_dtype=self.uninspected)
        else:
            self._inspection = Inspection(self.marker.device)


# Classes and not generators: `contextlib.contextmanager` costs a microsecond per entry.


class StepScope:
    """`with meter.step(...)`: a step that raises is forgotten, and the exception goes on."""

    __slots__ = ("_tokens", "_watch")

    def __init__(self, watch: StepTimer, tokens: int) -> None:
        self._watch, self._tokens = watch, tokens

    def __enter__(self) -> None:
        self._watch.enter(self._tokens)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._watch.leave()
        else:
            self._watch.abort()


class PhaseScope:
    """`with meter.phase(...)`: a phase that raises is forgotten, and the exception goes on."""

    __slots__ = ("_marker", "_name", "_start", "_step")

    def __init__(self, marker: Marker, step: MarkedStep, name: str) -> None:
        self._marker, self._step, self._name = marker, step, name

    def __enter__(self) -> None:
        self._start = self._marker.mark()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._step.phases.append((self._name, self._start, self._marker.mark()))
