"""A word of the command line becomes one side of a comparison."""

from __future__ import annotations

from pathlib import Path

from steplab.compare.sides import Side
from steplab.record import Run
from steplab.store import Store
from steplab.trace.analyse import analyse
from steplab.trace.analysis import Analysis
from steplab.trace.load import load_trace

TRACE_SUFFIXES = (".json", ".gz")


def open_side(word: str, store: Store) -> Side:
    """Return the trace file `word`, or the Run of that id, with its trace where it has one."""
    path = Path(word)
    if path.suffix in TRACE_SUFFIXES or path.is_file():
        return Side(path.name, analysis=analyse(load_trace(path)))
    run = store.load(word)
    return Side(run.id, run, _stored_analysis(run, store))


def _stored_analysis(run: Run, store: Store) -> Analysis | None:
    """Analyse the first trace of a profiled Run, with the stacks and shapes of its detailed one."""
    if run.profile is None or not run.profile.traces:
        return None
    folder = store.runs / run.id
    detail = load_trace(folder / run.profile.detail) if run.profile.detail else None
    device = run.environment.device_name if run.spec.device == "cuda" else ""
    return analyse(load_trace(folder / run.profile.traces[0]), detail, device)
