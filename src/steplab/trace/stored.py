"""The traces of a stored Run, analysed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from steplab.record import Run
from steplab.trace.analyse import analyse
from steplab.trace.analysis import Analysis
from steplab.trace.events import Trace
from steplab.trace.load import load_trace


def analyse_run(run: Run, folder: Path) -> Analysis | None:
    """Analyse the first trace of a profiled Run, whose files lie in `folder`.

    None for a Run without a profile, or one that travelled without its traces.
    """
    return next(analyse_cycles(run, folder), None)


def analyse_cycles(run: Run, folder: Path) -> Iterator[Analysis]:
    """Yield the analysis of every trace of a profiled Run, one cycle of its schedule each.

    None at all where the first is missing, as in a Run that travelled without its traces.
    """
    profile = run.profile
    if profile is None or not profile.traces or not (folder / profile.traces[0]).is_file():
        return
    path = folder / profile.detail if profile.detail else None
    detail = load_trace(path) if path and path.is_file() else None
    for name in profile.traces:
        yield analyse_trace(run, folder / name, detail)


def analyse_trace(run: Run, path: Path, detail: Trace | None) -> Analysis:
    """Analyse one trace of `run`, with the device and the unprofiled time that the Run knows."""
    device = run.environment.device_name if run.spec.device == "cuda" else ""
    weights = run.profile.updated_weights if run.profile else None
    analysis = analyse(load_trace(path), detail, device, weights)
    unprofiled = run.clock.step.median if run.clock else None
    return replace(analysis, budget=replace(analysis.budget, unprofiled_ms=unprofiled))
