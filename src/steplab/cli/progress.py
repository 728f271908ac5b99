"""What a long study shows while it works: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from steplab import units
from steplab.record import Run
from steplab.spec import RunSpec


class StepProgress:
    """Progress over training steps: a bar below the lines on a terminal, lines alone elsewhere."""

    def __init__(self, total: int) -> None:
        self.live = sys.stdout.isatty()
        self.bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(30),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(file=sys.stdout, highlight=False),
            transient=True,
        )
        self.task = self.bar.add_task("", total=total)

    def say(self, line: str) -> None:
        """Print a line, above the bar where there is one."""
        if self.live:
            self.bar.console.print(line, markup=False, soft_wrap=True)
        else:
            print(line, flush=True)

    def advance(self, step: int) -> None:
        """Move the bar to `step`."""
        if self.live:
            self.bar.update(self.task, completed=step)

    def __enter__(self) -> StepProgress:
        if self.live:
            self.bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.live:
            self.bar.stop()


class CellProgress:
    """Progress over the cells of a study, on stderr so that stdout stays clean."""

    def __init__(self, cells: int) -> None:
        self.live = sys.stderr.isatty()
        self.cells = cells
        self.count = 0
        self.bar = Progress(
            BarColumn(20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=Console(file=sys.stderr),
            transient=True,
        )
        self.task = self.bar.add_task("starting", total=cells)

    def stage(self, spec: RunSpec, text: str) -> None:
        """Show what the current cell is doing."""
        if self.live:
            self.bar.update(self.task, description=f"{_name(spec)}: {text}")

    def done(self, run: Run) -> None:
        """Count a finished cell."""
        self.count += 1
        if self.live:
            self.bar.advance(self.task)
            return
        time = units.milliseconds(run.clock.step.median) if run.clock else run.reason
        line = f"[{self.count}/{self.cells}] {_name(run.spec)}: {run.status}, {time}"
        print(line, file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Print a line above the progress."""
        self.bar.console.print(text, markup=False)

    def __enter__(self) -> CellProgress:
        if self.live:
            self.bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.live:
            self.bar.stop()


def _name(spec: RunSpec) -> str:
    context = spec.config.get("context") or spec.config.get("seq_max_len")
    where = f" x {context}" if context else ""
    size = f" {spec.size}" if spec.size else ""
    return f"{spec.workload}{size} batch {spec.batch}{where} {spec.mode} [{spec.recipe.label}]"
