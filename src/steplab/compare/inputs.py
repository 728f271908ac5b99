"""The two inputs of a comparison: stored Runs, traces, or both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from steplab.core import Budget, Run, Samples
from steplab.core.errors import UserError
from steplab.store import Store
from steplab.trace.analysis import Analysis
from steplab.trace.analyze import analyze, analyze_cycles
from steplab.trace.load import load_trace, names_trace
from steplab.trace.ranks.analysis import RanksAnalysis
from steplab.trace.ranks.folder import analyze_folder, analyze_run_ranks


@dataclass(frozen=True)
class Side:
    """What is known of A or of B."""

    name: str  # id of the Run, or path of the trace file or of the folder of ranks
    run: Run | None = None
    cycles: tuple[Analysis, ...] = ()  # of a Run one per trace, of a trace itself; (): none
    ranks: RanksAnalysis | None = None  # of a step that several ranks share

    @property
    def timed(self) -> Samples | None:
        """Milliseconds of the steps that ran without a profiler."""
        if self.run is None or self.run.clock is None or not self.run.clock.step.values:
            return None
        return self.run.clock.step

    @property
    def profiled(self) -> Samples | None:
        """Milliseconds of the steps that the traces show."""
        steps = self.budget.steps if self.budget else ()
        return Samples(tuple(step.wall_ms for step in steps), "ms") if steps else None

    @property
    def budget(self) -> Budget | None:
        """The budget of the profiled steps of all cycles; of a folder, the mean of the ranks."""
        if not self.cycles:
            return self.ranks.budget if self.ranks is not None else None
        steps = tuple(step for cycle in self.cycles for step in cycle.budget.steps)
        return replace(self.cycles[0].budget, steps=steps)


def check_side(side: Side) -> None:
    """Refuse a Run that did not end well, or that timed no steps."""
    if side.run is not None and side.run.status != "ok":
        reason = side.run.reason or "no reason was kept"
        raise UserError(
            f"The Run {side.name} ended with the status {side.run.status}: {reason}",
            "Only Runs that are ok can be compared.",
        )
    if side.timed is None and side.profiled is None:
        raise UserError(
            f"{side.name} holds no samples of steps.",
            "Compare Runs of `bench step` or `profile`; `steplab runs` lists them.",
        )


def comparable_samples(sides: Sequence[Side]) -> tuple[Samples, Samples, str]:
    """Return the steps of A and of B that were taken in the same way, and which those are."""
    first, second = sides
    for one, other, what in (
        (first.timed, second.timed, "Steps without a profiler"),
        (first.profiled, second.profiled, "Profiled steps"),
    ):
        if one and other:
            _check_lengths(first.name, one)
            _check_lengths(second.name, other)
            return one, other, what
    only = next(side for side in sides if side.timed)
    raise UserError(
        f"{only.name} has timed steps, the other side only profiled ones.",
        "Compare with a Run of `steplab profile`, which has both.",
    )


def _check_lengths(name: str, steps: Samples) -> None:
    """Refuse steps without a length: no ratio can be taken of them."""
    odd = [value for value in steps.values if not 0 < value < math.inf]
    if odd:
        raise UserError(
            f"{name} cannot be compared: {len(odd):,} of {len(steps):,} steps take {odd[0]:g} ms.",
            "Measure it again.",
        )


def open_side(word: str, store: Store) -> Side:
    """Return the trace file or the folder `word`, or the Run of that id, with its traces."""
    if names_trace(word):
        path = Path(word)
        if path.is_dir():
            return Side(word, ranks=analyze_folder(path))
        return Side(word, cycles=(analyze(load_trace(path)),))
    run = store.load(word)
    folder = store.runs / run.id
    return Side(run.id, run, tuple(analyze_cycles(run, folder)), analyze_run_ranks(run, folder))
