"""From recorded files to a stored Run with its budget. No torch."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from steplab.record import Run
from steplab.report.pages import write_profile_page
from steplab.store import Store
from steplab.store.atomic import disk_errors
from steplab.trace.analysis import Analysis
from steplab.trace.stored import analyse_cycles

PAGE = "page.html"


@contextlib.contextmanager
def scratch(store: Store) -> Iterator[Path]:
    """Lend a hidden folder on the store's disk; the store sweeps what a killed process leaves."""
    folder = store.runs / f".draft-profile-{secrets.token_hex(4)}"
    with disk_errors(store.root):
        folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read_traces(run: Run, folder: Path) -> tuple[Run, Analysis]:
    """Return the Run with its budget, and the analysis; write them as a page into `folder`."""
    cycles = analyse_cycles(run, folder)
    analysis = next(cycles)
    run = with_budget(run, analysis, cycles)
    write_profile_page(run, analysis, folder / PAGE)
    return run, analysis


def with_budget(run: Run, first: Analysis, others: Iterable[Analysis]) -> Run:
    """Return the Run with the steps of all its cycles in its budget."""
    assert run.profile is not None
    steps, notes = [*first.budget.steps], first.budget.notes
    for cycle in others:
        steps += cycle.budget.steps
    cycles = len(run.profile.traces)
    if cycles > 1:
        notes = (*notes, f"all {cycles} cycles count here; kernels and findings are of the first")
    budget = replace(first.budget, steps=tuple(steps), notes=notes)
    return replace(run, profile=replace(run.profile, budget=budget))


def save_files(store: Store, run: Run, folder: Path) -> Path:
    """Store the Run with every file in `folder` beside it; return the Run's folder."""
    return store.save(run, {path.name: path.read_bytes() for path in sorted(folder.iterdir())})
