"""Every step that the Meter has timed: eight bytes per number, so that a million steps fit."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from statistics import median

from steplab.engine.meter.events import MarkedStep
from steplab.record import Clock, Figures, Memory, Samples

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
