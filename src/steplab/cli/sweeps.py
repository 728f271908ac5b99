"""What the benchmark commands share: Runs as they come, and how the sweep ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

from steplab.core import Run, units
from steplab.core.errors import MeasurementError, Unsupported
from steplab.store import Store


def collect_runs(
    cells: Iterable[Run], total: int, store: Store, done: Callable[[Run], None]
) -> list[Run]:
    """Return the Runs of a sweep, each passed to `done` as it comes.

    When the sweep is interrupted, say how many cells are in the store: it can be continued.
    """
    runs: list[Run] = []
    try:
        for run in cells:
            runs.append(run)
            done(run)
    except KeyboardInterrupt:
        kept = f"{len(runs)} of {total} cells are in {store.root}"
        print(f"{kept}; the same command goes on from there.", file=sys.stderr)
        raise
    return runs


def print_count(runs: Sequence[Run], store: Store) -> None:
    """Print how many Runs were stored, and where."""
    print(f"{units.counted(len(runs), 'Run')} in {store.root}; list them with: steplab runs")


def require_success(runs: Sequence[Run], failure: str = "No cell could be measured") -> None:
    """Raise an error with the first reason unless some Run is ok.

    It is Unsupported where nothing was lacking but what this machine has.
    """
    if all(run.status != "ok" for run in runs):
        unsupported = all(run.status == "unsupported" for run in runs)
        kind = Unsupported if unsupported else MeasurementError
        raise kind(f"{failure}; the first: {runs[0].reason.rstrip('.')}.")
