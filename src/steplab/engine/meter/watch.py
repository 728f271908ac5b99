"""StepWatch: follows the steps of a loop and turns each into samples, never waiting for one."""

from __future__ import annotations

from collections import deque
from functools import cached_property
from time import perf_counter
from types import TracebackType

from torch import nn

from steplab.engine.meter.events import MarkedStep, Marker, Moment, device_of
from steplab.engine.meter.inspection import Inspected, Inspection, another_profiler_runs
from steplab.engine.meter.samples import StepSamples
from steplab.errors import UserError


class StepWatch:
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

    def __init__(self, watch: StepWatch, tokens: int) -> None:
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
