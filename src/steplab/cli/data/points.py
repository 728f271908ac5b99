"""Progress over points, on stderr so that stdout stays clean."""

from __future__ import annotations

import sys

from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from steplab.cli.progress import ProgressBar


class PointProgress(ProgressBar):
    """A bar over the points of a set of series."""

    def __init__(self, points: int) -> None:
        times = (TextColumn("left"), TimeRemainingColumn())
        super().__init__(
            sys.stderr, points, TextColumn("points"), BarColumn(30), TaskProgressColumn(), *times
        )

    def advance(self, points: int) -> None:
        """Move the bar on by so many points."""
        if self.live:
            self.bar.advance(self.task, points)
