"""Cells in a worker process: an illegal access or a hang costs one row. No torch on this side."""

from __future__ import annotations

from steplab.workers.client import Worker
from steplab.workers.trials import TrialRunner

MEASURE_CELL = "steplab.bench.op_cell:measure_cell"
# A process goes on after these: nothing was run, or all of it ended well.
HARMLESS = ("ok", "unsupported")


class CellIsolation(TrialRunner):
    """Keeps one worker for all cells until a cell fails: starting one costs seconds on a GPU."""

    def __init__(self, timeout: float = 600.0) -> None:
        super().__init__(timeout, MEASURE_CELL, HARMLESS)

    def _worker_for(self, key: str) -> Worker:
        return super()._worker_for("")
