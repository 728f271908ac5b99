"""Progress of long commands: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Self, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from steplab.core import Run, RunSpec, units
from steplab.core.printable import printable, raw_stream
from steplab.core.spec import LENGTHS, axes_text, varying_axes


class ProgressBar:
    """A bar that is drawn only where somebody can see it move."""

    def __init__(self, stream: TextIO, total: int | None, *columns: ProgressColumn) -> None:
        self.stream, self.live = stream, stream.isatty()
        console = Console(file=raw_stream(stream), highlight=False)
        self.bar = Progress(*columns, console=console, transient=True)
        self.task = self.bar.add_task("starting", total=total)

    def __enter__(self) -> Self:
        if self.live:
            self.bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.live:
            with contextlib.suppress(OSError):  # the terminal may be gone
                self.bar.stop()

    def say(self, line: str) -> None:
        """Print a line, above the bar where there is one."""
        if self.live:
            self.bar.console.print(printable(line), markup=False, soft_wrap=True)
        else:  # not by the console, which ends the program when a pipe is closed
            print(line, file=self.stream, flush=True)


class StepProgress(ProgressBar):
    """Progress over training steps, on stdout below the lines of the log."""

    def __init__(self, total: int) -> None:
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        super().__init__(
            sys.stdout, total, TextColumn("step"), MofNCompleteColumn(), BarColumn(30), *times
        )

    def advance(self, step: int) -> None:
        """Move the bar to `step`."""
        if self.live:
            self.bar.update(self.task, completed=step)


class ItemProgress(ProgressBar):
    """Progress over `total` items of a kind ("series", "points"), on stderr."""

    def __init__(self, kind: str, total: int) -> None:
        times = (TextColumn("left"), TimeRemainingColumn())
        super().__init__(
            sys.stderr, total, TextColumn(kind), MofNCompleteColumn(), BarColumn(30), *times
        )

    def advance(self, count: int) -> None:
        """Move the bar on by `count` items."""
        if self.live:
            self.bar.advance(self.task, count)


def step_name(spec: RunSpec, among: Sequence[RunSpec] = ()) -> str:
    """Return a training step in words; of the cells `among` which it is one, by what differs."""
    context = spec.config.get("context") or spec.config.get("seq_max_len")
    where = f" x {context}" if context else ""
    told = ("workload", "size", "batch", "mode", "recipe", *LENGTHS)
    own = varying_axes(among) if len(among) > 1 else spec.overrides
    more = axes_text(spec, [axis for axis in own if axis not in told])
    name = " ".join(filter(None, [spec.workload, spec.size, more]))
    return f"{name} batch {spec.batch}{where} {spec.mode} [{spec.recipe.label}]"


def step_result(run: Run) -> str:
    """Return how a training step ended: its status with its time or its reason."""
    time = units.milliseconds(run.clock.step.median) if run.clock else run.reason
    return f"{run.status}, {time}"


class CellProgress(ProgressBar):
    """Progress over the cells of a sweep, on stderr so that stdout stays clean.

    `cells` is None for a search: it does not know how many it will measure. `name` and `result` say
    in words what a cell is and how it ended.
    """

    def __init__(
        self,
        cells: int | None,
        name: Callable[[RunSpec], str] = step_name,
        result: Callable[[Run], str] = step_result,
    ) -> None:
        what = TextColumn("{task.description}", markup=False)
        columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), what)
        super().__init__(sys.stderr, cells, *columns)
        self.cells, self.name, self.result = cells, name, result
        self.count = 0

    def stage(self, spec: RunSpec, text: str) -> None:
        """Show what the current cell is doing."""
        if self.live:
            self.bar.update(self.task, description=f"{self.name(spec)}: {text}")

    def done(self, run: Run) -> None:
        """Count a finished cell; where nothing is drawn, say how it ended."""
        self.count += 1
        if self.live:
            self.bar.advance(self.task)
            return
        number = f"{self.count}" if self.cells is None else f"{self.count}/{self.cells}"
        self.say(f"[{number}] {self.name(run.spec)}: {self.result(run)}")
